"""What a guest answers to a holder's ``GpuSession``: sessions opened, batches carried out, sessions closed.

Bytes and descriptors in, bytes and descriptors out; the connection is the caller's. A batch may bring one piece of
shared memory; an answer brings one where what was read is more than fits a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from sublet.devices.account import Account
from sublet.devices.interface import Device
from sublet.errors import CapacityExceeded, InvalidRequest, NotFound, OutOfMemory, StaleEpoch
from sublet.guest.session import Session
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.device import INLINE_MAX, Batch, CloseSession, DeviceCall, OpenSession, Read, SessionOpened
from sublet.wire.frames import close_all
from sublet.wire.page import PageReader
from sublet.wire.shared import SHARED_MAX, SharedBuffer, map_shared

SESSIONS_MAX: Final = 64
"""Sessions open at once in one guest."""

Answer = tuple[bytes, tuple[int, ...]]
Count = Callable[[Account, tuple[int, ...]], None]


class SessionCalls:
    """All sessions of one guest."""

    def __init__(
        self, page: PageReader, open_device: Callable[[int], Device], count: Count = lambda account, done: None
    ) -> None:
        """``open_device`` opens the lease's device at this place, anew for each session; it raises ``NotFound`` where
        there is none. ``count`` is told after each batch what it did: launches, failures, bytes in and out."""
        self._page = page
        self._count = count
        self._open_device = open_device
        self._sessions: dict[int, Session] = {}

    def answer(self, body: bytes, fds: Sequence[int] = (), *, by: tuple[LeaseId, Epoch] | None = None) -> Answer:
        """The answer to one call. Takes the descriptors, whatever happens. Raises what the call is refused with.
        ``by``: by whose right the connection came, where that binds what may be opened on it."""
        try:
            call = loads(DeviceCall, body)
            match call:
                case OpenSession():
                    if by is not None and by != (call.lease, call.epoch):
                        raise StaleEpoch(f"open: this connection is ({by[0]}, {by[1]})'s, and no other's")
                    return self._open(call), ()
                case CloseSession(session=number):
                    made = self._find(number).close()
                    del self._sessions[number]
                    return dumps(made), ()
                case _:
                    return self._batch(call, fds)
        finally:
            close_all(fds)

    def close(self) -> None:
        """Free everything of every session: the connection is gone, or the guest ends."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.close()

    def _open(self, call: OpenSession) -> bytes:
        if len(self._sessions) >= SESSIONS_MAX:
            raise CapacityExceeded(f"{SESSIONS_MAX} sessions are open in this guest", do="Close one first.")
        check = self._checker(call.lease, call.epoch)
        check()
        device = self._open_device(call.device)
        session = Session(device, call.lease, call.epoch, check)
        self._sessions[session.number] = session
        return dumps(
            SessionOpened(
                session=session.number,
                device=device.identity.id,
                label=device.identity.label,
                is_host=device.identity.is_host,
                memory_bytes=device.account.cap_bytes,
            )
        )

    def _checker(self, lease: LeaseId, epoch: Epoch) -> Callable[[], object]:
        return lambda: self._page.check(lease, epoch)

    def _batch(self, batch: Batch, fds: Sequence[int]) -> Answer:
        session = self._find(batch.session)
        if len(fds) > 1:
            raise InvalidRequest(f"a batch came with {len(fds)} descriptors", do="Send one piece of shared memory.")
        before = _counted(session)
        try:
            if not fds:
                return self._run(session, batch, memoryview(b""))
            with map_shared(fds[0], 0, os.fstat(fds[0]).st_size) as shared:
                return self._run(session, batch, shared)
        finally:
            if (after := _counted(session)) != before:
                self._count(session.device.account, tuple(now - then for now, then in zip(after, before, strict=True)))

    def _run(self, session: Session, batch: Batch, shared: memoryview) -> Answer:
        largest = session.device.account.cap_bytes  # a read of more is nonsense, and will be told so
        wanted = sum(op.length for op in batch.ops if type(op) is Read and 0 < op.length <= largest)
        if wanted <= INLINE_MAX:
            return dumps(session.run(batch, shared)), ()
        if wanted > SHARED_MAX:
            raise InvalidRequest(f"a batch that reads {wanted} bytes", do=f"Read at most {SHARED_MAX} at once.")
        try:
            made = SharedBuffer.create(wanted, name="sublet-read")
        except OSError as error:
            raise OutOfMemory(
                f"mem_read: this machine has no {wanted} bytes to hand over ({error})", do="Read less at once."
            ) from error
        with made:
            body = dumps(session.run(batch, shared, made.view))
            return body, (made.publish(),)

    def _find(self, number: int) -> Session:
        found = self._sessions.get(number)
        if found is None:
            raise NotFound(f"there is no session {number} here", do="Open one.")
        return found


def _counted(session: Session) -> tuple[int, ...]:
    return (session.launches, session.failures, session.bytes_in, session.bytes_out)
