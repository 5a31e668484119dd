"""Saves from a program that holds a lease of blocks, through the supervisor, which alone publishes.

One connection, opened with the lease's token when it is first needed; from then on saving needs no office.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from sublet.client.line import connect_data
from sublet.errors import Disconnected, InvalidRequest
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.frames import close_all
from sublet.wire.guests import HolderReply
from sublet.wire.http import TokenView
from sublet.wire.volumes import (
    Collected,
    CopiedIn,
    FilesOpened,
    HolderVolumeCall,
    LendVolume,
    ListVolume,
    OpenFiles,
    Published,
    VolumeCall,
    VolumeLent,
    VolumeListed,
    VolumeOpened,
    VolumeReply,
)

if TYPE_CHECKING:
    from sublet.client.address import Address
    from sublet.client.handle import LeaseHandle
    from sublet.wire.conversation import Conversation

ANSWER_S: Final = 900.0
"""A publication takes as long as the disk does."""


class HolderLine:
    """``state.checkpoints.volume.VolumeLine`` for a holder."""

    def __init__(
        self,
        address: Address,
        token: Callable[[], str],
        pair: Callable[[], tuple[LeaseId, Epoch]],
        in_use: Callable[[], Callable[[], None]],
    ) -> None:
        """``token`` fetches one, ``pair`` is the lease and its epoch; ``in_use`` is called when something is asked, and
        what it returns when it was answered: to save is to use the lease."""
        self._in_use = in_use
        self._address = address
        self._token = token
        self._of = pair
        self._lock = threading.Lock()
        self._conversation: Conversation | None = None

    def pair(self) -> tuple[LeaseId, Epoch]:
        return self._of()

    def ask(self, call: VolumeCall) -> VolumeReply:
        """Raises what it is refused with."""
        answer, fds = self._call(call)
        close_all(fds)
        if not isinstance(answer, VolumeOpened | Published | Collected | CopiedIn):
            raise Disconnected(f"the supervisor answered with a {type(answer).__name__}")
        return answer

    def _call(self, call: HolderVolumeCall) -> tuple[HolderReply, tuple[int, ...]]:
        is_over = self._in_use()
        try:
            return self._ask(call)
        finally:
            is_over()

    def _ask(self, call: HolderVolumeCall) -> tuple[HolderReply, tuple[int, ...]]:
        with self._lock:
            if self._conversation is not None and self._conversation.link.over is not None:
                self._drop()
            if self._conversation is None:
                self._conversation = connect_data(self._address, self._token())
            try:
                replied = self._conversation.call(dumps(call), timeout_s=ANSWER_S)
            except BaseException:
                if self._conversation.link.over is not None:
                    self._drop()
                raise
        try:
            answer: HolderReply = loads(HolderReply, replied.body)
        except BaseException:
            close_all(replied.fds)
            raise
        return answer, replied.fds

    def list_volume(self, call: ListVolume) -> VolumeListed:
        """What is published there, for a process that may not enter the volume's folder."""
        answer, _ = self._call(call)
        if not isinstance(answer, VolumeListed):
            raise Disconnected(f"the supervisor answered with a {type(answer).__name__}")
        return answer

    def open_files(self, call: OpenFiles) -> list[int]:
        """Files of the volume, opened for this process; they are the caller's to close."""
        answer, fds = self._call(call)
        if not isinstance(answer, FilesOpened) or len(fds) != len(call.names):
            close_all(fds)
            raise Disconnected(f"the supervisor answered with a {type(answer).__name__} and {len(fds)} files")
        return list(fds)

    def lend(self) -> str:
        """A ticket for a guest of another lease, which may then save here."""
        return lend(self._address, self._token())

    def close(self) -> None:
        """Hang up. Harmless twice, and it is opened again when it is needed."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._drop()


class HasVolume(Protocol):
    """A lease of blocks."""

    def volume_line(self) -> HolderLine: ...


def in_use_of(lease: LeaseHandle | None, volume: HasVolume | None) -> Callable[[], Callable[[], None]] | None:
    """Both are in use as long as a guest runs under the one that may save to the other; None: neither."""
    found = [getattr(one, "_in_use", None) for one in (lease, volume)]
    uses = [use for use in found if use is not None]

    def begin() -> Callable[[], None]:
        ends = [use() for use in uses]

        def end() -> None:
            for one in ends:
                one()

        return end

    return begin if uses else None


def lease_token(lease: LeaseHandle) -> str:
    """What opens connections for it."""
    fabric = lease._fabric
    return fabric._run(fabric._core.query(f"/v1/leases/{lease.id}/token", TokenView)).token


def lend(address: Address, token: str, *, reads: bool = False) -> str:
    """A ticket for the volume of the lease whose token this is; ``reads``: only to copy from it."""
    with connect_data(address, token) as conversation:
        answer = loads(HolderReply, conversation.call(dumps(LendVolume(reads=reads))).body)
    if not isinstance(answer, VolumeLent):
        raise Disconnected(f"the supervisor answered with a {type(answer).__name__}")
    return answer.ticket


def ticket_for(volume: HasVolume | None) -> str:
    """What a start has to show (``Start.volume``); empty without one."""
    if volume is None:
        return ""
    line = getattr(volume, "volume_line", None)
    if line is None:
        raise InvalidRequest(
            f"volume= is a {type(volume).__name__}", do='Give a lease of blocks: fabric.block("2GiB", name="ckpt").'
        )
    return str(line().lend())
