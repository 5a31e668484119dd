"""A session's connection to the guest that has the device: one request in flight at a time."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from sublet.client.guests import Guest, environment, start_spec
from sublet.errors import Disconnected, GpuSessionEnded, NotFound, SubletError
from sublet.lease.value import rfc3339
from sublet.lease_end import EndReason, LeaseEnd
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.device import DeviceCall, DeviceReply
from sublet.wire.frames import close_all
from sublet.wire.guests import GuestSpec, GuestView, Service, StdioKind
from sublet.wire.link_events import CallRefused, Happening, Over, Replied

if TYPE_CHECKING:
    from sublet.client.lease import Lease

WAIT_S: Final = 1.0
"""Between two looks whether the connection still stands; an answer itself is seen at once."""
END_REPORTED_S: Final = 5.0
"""How long it may take the supervisor to see that a guest is gone, and why."""
LEASE_ENDED_S: Final = 1.0
"""The same for the office, and the end of a lease."""
PAUSE_S: Final = 0.02
_SIGNALLED: Final = 128
_NEWS = "This session is over, and what it had on the device is gone; open a new one."


class DeviceLine:
    """Asks and answers, in order. One thread at a time uses it."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._call: int | None = None
        self._come: Replied | CallRefused | None = None
        self._over: Over | None = None

    def ask(self, call: DeviceCall, fds: Sequence[int] = ()) -> None:
        """Send a question. The descriptors are taken, whatever happens."""
        self._call = None
        link = self._talk.link
        try:
            self._call = link.call(dumps(call), fds)
        except BaseException:
            if not link.holds(fds):  # an interrupt may come when the link has taken them already
                close_all(fds)
            raise
        self._come = None
        self._on_events(self._talk.pump())

    def has_answer(self) -> bool:
        """Whether ``answer`` would return at once."""
        if self._call is None:
            return True
        if self._come is None and self._over is None:
            self._on_events(self._talk.pump())
        return self._come is not None or self._over is not None

    def answer(self) -> tuple[Any, tuple[int, ...]]:
        """Wait for the answer: what it says, and the descriptors that came along, which are the caller's. Raises what
        the question was refused with; ``Disconnected`` if there is no answer to come."""
        if self._call is None:  # an interrupt came when it was half asked or half answered: do not wait for it
            raise Disconnected("an interrupt (Ctrl-C) cut a message in two")
        while self._come is None and self._over is None:
            self._on_events(self._talk.wait(WAIT_S))
            if (over := self._talk.link.over) is not None:
                self._over = over  # an interrupt may have taken the news of it
        self._call = None
        come, self._come = self._come, None
        if isinstance(come, CallRefused):
            raise come.error
        if come is None:
            error = self._over.error if self._over is not None else None
            raise error or Disconnected("the guest of this session hung up")
        return loads(DeviceReply, come.body), come.fds

    def close(self) -> None:
        """Hang up. Harmless twice."""
        come, self._come = self._come, None
        if isinstance(come, Replied):
            close_all(come.fds)
        self._talk.close()

    def _on_events(self, happened: Sequence[Happening]) -> None:
        for one in happened:
            match one:
                case Replied() | CallRefused() if one.call == self._call:
                    self._come = one
                case Over():
                    self._over = one
                case _:
                    close_all(getattr(one, "fds", ()))


def open_device_line(lease: Lease) -> tuple[DeviceLine, Guest]:
    """A connection to the guest that has the lease's devices, which is started if there is none. One that
    ends meanwhile is started anew, once."""
    from sublet.client.line import open_line  # with all of the client, of which a session over a line needs nothing

    guest = device_guest(lease)
    try:
        return DeviceLine(open_line(lease, guest.id, Service.DEVICE)), guest
    except (Disconnected, NotFound) as error:
        view = _last_view(lease, guest, Disconnected(error.message))
        if view is None or view.exit_code < 0:
            raise
    guest = device_guest(lease, instead_of=guest)
    try:
        return DeviceLine(open_line(lease, guest.id, Service.DEVICE)), guest
    except Disconnected as error:
        raise why_ended(lease, guest, error) from error


def why_ended(lease: Lease, guest: Guest | None, cause: SubletError) -> SubletError:
    """The error for a session whose connection broke: with its lease, or with its guest."""
    view = _last_view(lease, guest, cause)
    end = lease.end
    if end is None and view is not None and (reason := _reason_of(view)) is not None:
        end = LeaseEnd(reason=reason, at=rfc3339(time.time_ns()), detail="")
    if end is not None and end.reason is not EndReason.OUT_OF_MEMORY:
        detail = f": {end.detail}" if end.detail else ""
        return GpuSessionEnded(f"the GPU session went with its lease ({end.reason}{detail})", end=end)
    if end is not None:
        return GpuSessionEnded(
            "the guest of this session was ended, because it used more memory than its lease has (out_of_memory)",
            end=end,
            do="Lease more, or use less at once. " + _NEWS,
        )
    if view is not None and view.exit_code >= 0:
        return GpuSessionEnded(f"the guest of this session ended{_how(view.exit_code)}", do=_NEWS)
    if isinstance(cause, Disconnected):
        return GpuSessionEnded(f"the connection to the guest of this session broke: {cause.message}", do=_NEWS)
    return cause


def _how(exit_code: int) -> str:
    number = exit_code - _SIGNALLED
    if number <= 0:
        return f" with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(number).name
        if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
            return (
                f" by {name}: a kernel, or a library in it, did what it must not (an address out of bounds, most often)"
            )
        return f" by {name}"
    return f" by signal {number}"


def _last_view(lease: Lease, guest: Guest | None, cause: SubletError) -> GuestView | None:
    """What the supervisor says of it, once it has seen how it ended; None where it cannot be asked. A guest that said
    itself that its lease is over may take its grace to leave, and that is not waited for."""
    hung_up = isinstance(cause, Disconnected)
    until_s = time.monotonic() + (END_REPORTED_S if hung_up else LEASE_ENDED_S)
    while lease.end is None and guest is not None:
        try:
            view = guest.view()
        except SubletError:
            return None
        finally:
            guest.close()
        if (hung_up and view.exit_code >= 0) or time.monotonic() > until_s:
            return view
        time.sleep(PAUSE_S)
    return None


def _reason_of(view: GuestView) -> EndReason | None:
    with contextlib.suppress(ValueError):
        found = EndReason(view.reason)
        return found if found is not EndReason.GUEST_FAILED else None
    return None


# -------------------------------------------------------------------------------------------------------- device guests
#
# The guest in which a lease's devices are used: one per lease, started at the first use.


ENTRY: Final = "sublet.guest.device_service:main"
IMPORTS: Final = ("cloudpickle?", "numpy?", "torch?", "warp?")
"""What its warm interpreter has loaded, where it is there: the same as a worker's, so that one does for both."""

LOCAL: Final = "local"

_lock = threading.Lock()
_guests: WeakKeyDictionary[Lease, Guest] = WeakKeyDictionary()


def device_guest(lease: Lease, *, instead_of: Guest | None = None) -> Guest:
    """The one of this lease; another one if it has ended, or is the one that the caller knows to have ended."""
    with _lock:
        guest = _guests.get(lease)
        if guest is None or guest is instead_of or guest.exit_code is not None:
            guest = _guests[lease] = start_spec(lease, _spec(lease), busy=False)
        return guest


def _spec(lease: Lease) -> GuestSpec:
    return GuestSpec(
        entry=ENTRY,
        # Named, so that it is shown to a guest behind walls; for others it is the one that warm interpreters are of.
        python=sys.executable if lease._held.view.tenant != LOCAL else "",
        imports=IMPORTS,
        env=environment(lease, None),
        stdio=StdioKind.NULL,
        serves=True,
        name="GpuSession",
    )
