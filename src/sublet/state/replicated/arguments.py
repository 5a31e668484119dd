"""Checks arguments before anything is sent; opens folders as replicas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from sublet.errors import InvalidRequest
from sublet.state.replicated.ballot import WriteStamp
from sublet.state.replicated.cell import Answer, Request
from sublet.state.replicated.checkpoint_record import Effect
from sublet.state.replicated.folder import FolderReplica
from sublet.state.replicated.quorum import ReplicaSet
from sublet.state.replicated.replica import FailureDomain, Replica, ReplicaFaulty
from sublet.values import Epoch, shown


def checked_epoch(epoch: object, what: str) -> Epoch:
    """That of a lease. ``what`` needs it."""
    if epoch is None:
        raise InvalidRequest(f"{what} needs the epoch of a lease", do="Give epoch=lease.epoch; reading needs none.")
    if not isinstance(epoch, Epoch):
        raise InvalidRequest(f"{shown(epoch)} is no epoch", do="Give epoch=lease.epoch, or sublet.Epoch(1, 7).")
    return epoch


def checked_effect(effect: object) -> Effect | None:
    """What a save is the effect of."""
    if effect is None:
        return None
    found = Effect(*effect) if isinstance(effect, tuple) and len(effect) == 3 else effect
    if isinstance(found, Effect) and [type(part) for part in (found.key, found.fingerprint, found.step)] == [
        str,
        str,
        int,
    ]:
        return found
    raise InvalidRequest(
        f"{shown(effect)} is not what a save is the effect of", do="Give (key, fingerprint, step): two texts, a number."
    )


def checked_version(expected: object) -> int | None:
    """The version that is to be replaced."""
    if expected is None or (isinstance(expected, int) and not isinstance(expected, bool)):
        return expected
    raise InvalidRequest(f"expected={shown(expected)} is no version", do="Give a number: 0 for what was never saved.")


def checked_bytes(data: object) -> bytes:
    """What is saved as it is."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise InvalidRequest(f"a {type(data).__name__} is not bytes", do="Use save(name, value), which takes any value.")


def checked_replicas(replicas: Any) -> Sequence[Replica]:
    """At least one, each of them another: one that is given twice would be lost once, and with it two votes. A folder
    is opened; one that cannot be counts as lost."""
    if isinstance(replicas, str | bytes) or not isinstance(replicas, Sequence):
        raise InvalidRequest(f"{shown(replicas)} is not a list of replicas", do='Give one: ["/disk1/replica", ...].')
    if not replicas:
        raise InvalidRequest("a group needs at least one replica", do="Give one replica or more.")
    found = [open_folder(one) if isinstance(one, str | os.PathLike) else one for one in replicas]
    strangers = [one for one in found if not hasattr(one, "identity") or not hasattr(one, "domain")]
    if strangers:
        raise InvalidRequest(
            f"{shown(strangers[0])} is not a replica", do='Give a list of them, or of folders: ["/disk1/replica", ...].'
        )
    if len({one.identity for one in found}) < len(found):
        raise InvalidRequest(
            f"of {len(found)} replicas two are the same", do="Give each of them once, each with a folder of its own."
        )
    return found


def open_folder(folder: str | os.PathLike[str]) -> Replica:
    """The replica there, or what stands for it."""
    try:
        return FolderReplica(folder)
    except (ReplicaFaulty, InvalidRequest) as error:
        return LostReplica(os.fspath(folder), error.message)


class LostReplica:
    """A replica that cannot be opened (its disk is gone, its log is cut off), so that a group can begin without it.

    It answers nothing. Its own identity is not known, so it has no seat, and none is given to it."""

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

    def sweep(self, key: str, stamp: WriteStamp, names: Sequence[str]) -> int:
        raise self._error()

    def verify(self) -> list[str]:
        return [self._why]

    def close(self) -> None:
        """There is nothing to let go of."""

    def _error(self) -> ReplicaFaulty:
        return ReplicaFaulty(self._why)
