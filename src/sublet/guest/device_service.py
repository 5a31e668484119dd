"""The service ``device`` of a guest: ``GpuSession``s of a holder, on the devices of the lease.

Each connection is served on a thread of its own, and what it opened goes with it. Only one question is carried out at a
time in a guest, whichever connection it came by: the libraries below are not made for more, and order is what a session
promises. Who needs two devices at the same moment uses two leases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Final

from sublet.devices.account import Account
from sublet.devices.interface import Device
from sublet.errors import NotFound, SubletError
from sublet.guest.at_work import at_work
from sublet.guest.current import PAGE_VARIABLE
from sublet.guest.inbox import Inbox
from sublet.guest.serving import start_serving
from sublet.guest.session_calls import SessionCalls
from sublet.guest.tally import LeaseAccounts, SharedAccount
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.happenings import Called, Over
from sublet.wire.orders import card_uuid
from sublet.wire.page import PageReader

WAIT_S: Final = 60.0
"""Between two looks at a connection on which nothing is said."""
CACHE_VARIABLE: Final = "SUBLET_KERNEL_CACHE"

OpenDevice = Callable[[str, Account], Device]
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

    def _answer(self, conversation: Conversation, calls: SessionCalls, asked: Called, visit: Visit) -> None:
        try:
            with self._one_at_a_time, at_work():
                body, fds = calls.answer(asked.body, asked.fds, by=(visit.lease, visit.epoch))
        except SubletError as error:
            conversation.link.refuse(asked.call, error)
        else:
            conversation.link.reply(asked.call, body, fds)

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


def _count(account: Account, done: tuple[int, ...]) -> None:
    if isinstance(account, SharedAccount):
        launches, failures, bytes_in, bytes_out = done
        account.count(launches=launches, failures=failures, bytes_in=bytes_in, bytes_out=bytes_out)


def open_device(name: str, account: Account) -> Device:
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
