"""A replica that cannot even be opened: its disk is gone, its log is cut off. It takes its place in a group and says
why it answers nothing, so that the loss of one replica keeps no program from beginning."""

from __future__ import annotations

import os
from collections.abc import Sequence

from blake3 import blake3

from sublet.errors import InvalidRequest
from sublet.replicated.ballot import Stamp
from sublet.replicated.cell import Answer, Request
from sublet.replicated.folder import FolderReplica
from sublet.replicated.policy import FailureDomain
from sublet.replicated.quorum import ReplicaSet
from sublet.replicated.replica import Replica, ReplicaFaulty


def open_folder(folder: str | os.PathLike[str]) -> Replica:
    """The replica there, or what stands for it."""
    try:
        return FolderReplica(folder)
    except (ReplicaFaulty, InvalidRequest) as error:
        return LostReplica(os.fspath(folder), error.message)


class LostReplica:
    """Answers nothing. Its own identity is not known, so it has no seat, and none is given to it."""

    def __init__(self, folder: str, why: str) -> None:
        self.identity = f"lost-{blake3(os.fsencode(folder)).hexdigest()[:16]}"
        self.domain = FailureDomain()
        self._why = why

    def __repr__(self) -> str:
        return f"<LostReplica: {self._why}>"

    def ask(self, requests: Sequence[tuple[str, Request]]) -> list[Answer]:
        raise self._error()

    def known(self) -> ReplicaSet | None:
        raise self._error()

    def keys(self) -> list[str]:
        raise self._error()

    def put_pack(self, key: str, name: str, data: bytes) -> None:
        raise self._error()

    def read_pack(self, key: str, name: str) -> bytes | None:
        raise self._error()

    def packs(self, key: str) -> list[str]:
        raise self._error()

    def sweep(self, key: str, stamp: Stamp, names: Sequence[str]) -> int:
        raise self._error()

    def verify(self) -> list[str]:
        return [self._why]

    def close(self) -> None:
        """There is nothing to let go of."""

    def _error(self) -> ReplicaFaulty:
        return ReplicaFaulty(self._why)
