"""Decides when to leave (a notice, or SIGTERM), and leaves once everything is saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Final, NamedTuple

from sublet.errors import LeaseInterrupt
from sublet.lease.value import rfc3339
from sublet.lease_end import EndReason, LeaseEnd

LEASE_ENDED: Final = 76
TERMINATED: Final = 128 + signal.SIGTERM
SIGTERM: Final = "SIGTERM"
"""The reason that is given when a program left because of a signal."""
PAGE: Final = "SUBLET_PAGE"
_MISSING: Final = object()


class Preempted(LeaseInterrupt, SystemExit):
    """Training stops here, in good order: the last step is done and saved, and the same program goes on from it.

    Raised between two steps. It ends the program with status 76 (143 where no lease ends and SIGTERM came), in
    silence; ``except Exception`` does not meet it, and a program that catches it cannot train on: the lease is going.
    """

    def __init__(self, end: LeaseEnd, step: int, *, status: int = LEASE_ENDED) -> None:
        super().__init__(end)
        self.step = step
        """The last one that is done, and saved."""
        self.code = status

    def __str__(self) -> str:
        why = "SIGTERM came" if self.code == TERMINATED else f"the lease ends: {self.end.reason}"
        return f"step {self.step} is saved; {why}"


class LeaveReason(NamedTuple):
    """That it is time to leave, and why."""

    reason: EndReason
    detail: str
    by_signal: bool = False
    """Nothing is known of any lease's end; another process sent SIGTERM."""

    def end(self) -> LeaseEnd:
        return LeaseEnd(
            reason=self.reason,
            at=rfc3339(time.time_ns()),
            detail=self.detail,
            saved_at=rfc3339(time.time_ns()),
            resume_hint="Run it again: it goes on from the step that is saved.",
        )


class PreemptionWatch:
    """Looks whether it is time to leave. While it is active SIGTERM is noted, and ends nothing by itself."""

    def __init__(self, lease: Any = None) -> None:
        """``lease``: what ``sublet.current()`` gives, or a lease that this program holds; by default the former, where
        the program runs under one."""
        if lease is None and os.environ.get(PAGE):
            from sublet.compute.behind import current

            lease = current()
        self._lease = lease
        self._came = False
        self._before: Any = None
        self._at_post = False

    def reason_to_leave(self) -> LeaveReason | None:
        """Whether to leave by now. Costs some microseconds."""
        notice = _notice_of(self._lease)
        if notice is not None:
            return notice
        if not self._came:
            return None
        # Without a lease it is how others preempt (Slurm, Kubernetes); under one it is a person who wants an end.
        reason = EndReason.PREEMPTED if self._lease is None else EndReason.RELEASED
        return LeaveReason(reason, "SIGTERM", by_signal=True)

    def begin(self) -> None:
        """Take up the post. Only the main thread of a program hears signals; elsewhere nothing is changed."""
        if self._at_post or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._at_post = True

    def end(self) -> None:
        """SIGTERM is again what it was."""
        if not self._at_post:
            return
        self._at_post = False
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._came = True


def _notice_of(lease: Any) -> LeaveReason | None:
    if lease is None:
        return None
    noticed: Any = getattr(lease, "noticed", _MISSING)
    if noticed is not _MISSING:
        return None if noticed is None else LeaveReason(noticed.reason, noticed.detail)
    end = lease.end
    if end is not None:
        return LeaveReason(end.reason, end.detail)
    notice = lease.notice
    return None if notice is None else LeaveReason(notice.reason, getattr(notice, "detail", ""))
