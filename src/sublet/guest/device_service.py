"""The service ``device`` of a guest: ``GpuSession``s of a holder, on the devices of the lease.

Each connection is served on a thread of its own, and what it opened goes with it. Only one question is carried out at a
time in a guest, whichever connection it came by: the libraries below are not made for more, and order is what a session
promises. A program that needs two devices at the same moment uses two leases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from sublet.devices.account import MemoryAccount
from sublet.devices.interface import Device
from sublet.errors import CapacityExceeded, InvalidRequest, NotFound, OutOfMemory, StaleEpoch, SubletError
from sublet.guest.at_work import at_work
from sublet.guest.current import PAGE_VARIABLE
from sublet.guest.inbox import Inbox
from sublet.guest.launch_counter import is_counting
from sublet.guest.serving import start_serving
from sublet.guest.session import GuestSession
from sublet.guest.usage_counters import LeaseAccounts, SharedAccount
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.device import INLINE_MAX, Batch, CloseSession, DeviceCall, OpenSession, Read, SessionOpened
from sublet.wire.frames import close_all
from sublet.wire.guests import Service, Visit
from sublet.wire.link_events import Called, Over
from sublet.wire.orders import card_uuid
from sublet.wire.page import PageReader
from sublet.wire.sealed_memory import SHARED_MAX, SharedBuffer, map_shared

WAIT_S: Final = 60.0
"""Between two looks at a connection on which nothing is said."""
CACHE_VARIABLE: Final = "SUBLET_KERNEL_CACHE"

OpenDevice = Callable[[str, MemoryAccount], Device]
"""Opens the device of this name, whose memory is counted there."""


class DeviceService:
    """All connections of one guest."""

    def __init__(self, page: PageReader | None = None, accounts: LeaseAccounts | None = None) -> None:
        self._page = page or PageReader(os.environ.get(PAGE_VARIABLE, ""))
        self._accounts = accounts or LeaseAccounts.from_environment()
        self._one_at_a_time = threading.RLock()
        self.open_device: OpenDevice = open_device

    def serve(self, conversation: Conversation, visit: Visit) -> None:
        """One connection, until the holder hangs up or the lease is over (then it is cut)."""
        calls = SessionCalls(self._page, self._device, _count)
        try:
            while True:
                for happening in conversation.wait(WAIT_S):
                    if isinstance(happening, Over):
                        return
                    if isinstance(happening, Called):
                        self._answer(conversation, calls, happening, visit)
                if conversation.wants_write:
                    conversation.flush(WAIT_S)
        finally:
            with self._one_at_a_time, contextlib.suppress(SubletError):
                calls.close()

    def _answer(self, conversation: Conversation, calls: SessionCalls, called: Called, visit: Visit) -> None:
        try:
            with self._one_at_a_time, at_work():
                body, fds = calls.answer(called.body, called.fds, by=(visit.lease, visit.epoch))
        except SubletError as error:
            conversation.link.refuse(called.call, error)
        else:
            conversation.link.reply(called.call, body, fds)

    def _device(self, place: int) -> Device:
        devices = self._page.read().devices
        if not 0 <= place < len(devices):
            count = f"{len(devices)} device{'s' * (len(devices) != 1)}"
            raise NotFound(
                f"open: this lease has {count}, and none at place {place}",
                do=_places(len(devices)),
            )
        return self.open_device(devices[place], self._accounts.of(place))


def _places(count: int) -> str:
    if not count:
        return "Lease one: fabric.gpu(min_vram=…)."
    return "Give 0, or leave it out." if count == 1 else f"Give 0 to {count - 1}."


def _count(account: MemoryAccount, done: tuple[int, ...]) -> None:
    if isinstance(account, SharedAccount):
        launches, failures, bytes_in, bytes_out = done
        account.count(
            launches=0 if is_counting() else launches, failures=failures, bytes_in=bytes_in, bytes_out=bytes_out
        )


def open_device(name: str, account: MemoryAccount) -> Device:
    """The device that a lease calls so. Imports what that takes, and no more."""
    uuid = card_uuid(name)
    if uuid:
        from sublet.devices.cuda import CudaDevice

        return CudaDevice(name, uuid, account, cache=kernel_cache())
    from sublet.devices.host import HostDevice

    return HostDevice(name, account, cache=kernel_cache())


def kernel_cache() -> str:
    """A folder of this user alone, which outlives the guest where there is a home: what was compiled once need not be
    compiled again."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return named
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "sublet", "kernels")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return os.path.join(tempfile.gettempdir(), f"sublet-kernels-{os.geteuid()}")
    return folder


_services: list[DeviceService] = []
_first = threading.Lock()


def serve_device(conversation: Conversation, visit: Visit) -> None:
    """Serve one connection, as one of this process's."""
    with _first:
        if not _services:
            _services.append(DeviceService())
    _services[0].serve(conversation, visit)


def main() -> None:
    """A guest that serves devices and nothing else."""
    thread = start_serving(Inbox.from_stdin(), {Service.DEVICE: serve_device})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread.join()


# ---- What a guest answers to a holder's ``GpuSession``: sessions opened, batches carried out, sessions closed
# Bytes and descriptors in, bytes and descriptors out; the connection is the caller's. A batch may bring one piece of
# shared memory; an answer brings one where what was read is more than fits a message.

SESSIONS_MAX: Final = 64
"""Sessions open at once in one guest."""

Answer = tuple[bytes, tuple[int, ...]]
Count = Callable[[MemoryAccount, tuple[int, ...]], None]


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
        self._sessions: dict[int, GuestSession] = {}

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
        check = partial(self._page.check, call.lease, call.epoch)
        check()
        device = self._open_device(call.device)
        session = GuestSession(device, call.lease, call.epoch, check)
        self._sessions[session.number] = session
        return dumps(
            SessionOpened(
                session=session.number,
                device=device.identity.id,
                label=device.identity.label,
                is_host=device.identity.is_host,
                memory_bytes=device.account.cap_bytes,
                limits=device.identity.limits if call.takes_limits else (),
            )
        )

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

    def _run(self, session: GuestSession, batch: Batch, shared: memoryview) -> Answer:
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

    def _find(self, number: int) -> GuestSession:
        found = self._sessions.get(number)
        if found is None:
            raise NotFound(f"there is no session {number} here", do="Open one.")
        return found


def _counted(session: GuestSession) -> tuple[int, ...]:
    return (session.launches, session.failures, session.bytes_in, session.bytes_out)
