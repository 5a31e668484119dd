"""A Jupyter kernel as a guest of a lease: starts it, and connects to its channels and to functions in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sublet.client.guests import environment, start_spec
from sublet.client.line import open_line
from sublet.compute.calls import Exchange, PendingCall
from sublet.compute.functions import checked_callable
from sublet.compute.outcomes import read
from sublet.compute.shown import folder_for, interpreter_for, sees_our_folders
from sublet.compute.worker_guest import CELL, check_python, end_worker, why_lost
from sublet.compute.workers import Worker, WorkerCall
from sublet.errors import SubletError
from sublet.wire.conversation import Conversation
from sublet.wire.guests import GuestSpec, Service, StdioKind
from sublet.wire.jupyter import KERNEL_ENTRY, KERNEL_IMPORTS
from sublet.wire.line import SharedConnection
from sublet.wire.link_events import CallRefused
from sublet.wire.work import Flag, unpack

if TYPE_CHECKING:
    from sublet.client.lease import Lease
    from sublet.client.volume_line import HasVolume

LOOK_NS: Final = 100_000_000


class KernelGuest:
    """One kernel. It lives as long as its lease, unless it is stopped or ends by itself."""

    def __init__(
        self,
        lease: Lease,
        *,
        python: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        name: str = "kernel",
        volume: HasVolume | None = None,
        patient: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Start one and connect. Raises what keeps it from being there. ``volume``: a lease of blocks that it may save
        to, as long as that lives. ``patient``: it will need what a warm interpreter has, and rather waits for one that
        is being made. ``meanwhile`` is called when it was started and is not there yet."""
        check_python(python, "ipykernel")
        spec = GuestSpec(
            entry=KERNEL_ENTRY,
            imports=KERNEL_IMPORTS,
            python=interpreter_for(lease, python),
            cwd=folder_for(lease, cwd),
            env=environment(lease, env),
            stdio=StdioKind.NULL,
            serves=True,
            name=name,
            patient=patient,
        )
        self.lease = lease
        self.when_parked: Callable[[], object] = lambda: None
        """Called, now and then, while a call waits for an answer and the kernel is parked."""
        self.when_waiting: Callable[[], object] = lambda: None
        """Called every tenth of a second while a call waits for an answer."""
        self.guest = start_spec(lease, spec, busy=False, volume=volume)
        try:
            meanwhile()
        except BaseException:
            end_worker(self.guest)
            raise
        try:
            self.channels: Conversation = open_line(lease, self.guest.id, Service.JUPYTER)
            """For the messages of the Jupyter protocol; see ``wire.jupyter``."""
            line = SharedConnection(open_line(lease, self.guest.id, Service.WORK))
            self._worker = Worker(line, lease.id, self.guest, lambda: end_worker(self.guest))
        except SubletError as error:
            raise why_lost(lease, self.guest, "before it could begin", CELL) from error

    @staticmethod
    def check(python: str) -> None:
        """Raise if this interpreter cannot be a kernel, before a lease is taken for it. Empty: the caller's own."""
        check_python(python, "ipykernel")

    @property
    def is_lost(self) -> bool:
        """Whether it is known to be gone."""
        end = self.lease.end  # what is parked is not lost
        return self._worker.is_lost or self.channels.link.over is not None or (end is not None and not end.parked)

    def now_under(self, lease: Lease) -> None:
        """It was parked, and goes on under this lease."""
        self.lease = lease
        self.guest.lease_id = self._worker.lease_id = lease.id

    def call(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call it in the kernel's process, on its main thread, between cells."""
        return self.result(self.begin(function, *args, **keywords))

    def begin(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> PendingCall:
        """The same, for a caller that has something to do until ``result``."""
        pending = PendingCall()
        self._worker.send(pending, WorkerCall(checked_callable(function), args, keywords))
        return pending

    def begin_cell(self, function: Callable[..., Any], *args: Any) -> CellCall:
        """The same for one that runs a cell (``behind.run_cell``)."""
        return CellCall(self._worker.exchange, self.begin(function, *args))

    def result(self, pending: PendingCall) -> Any:
        """Wait for what came of a call. Raises what it raised."""
        while not self._worker.exchange.wait(pending, _in_a_moment()):
            if self.lease.end is not None and self.lease.end.parked:
                self.when_parked()
            self.when_waiting()
        if pending.came is None:
            raise self._worker.why_lost(self.lease)
        return read(pending.came, self.lease.id, of_tenant=not sees_our_folders(self.lease))

    def why_lost(self) -> SubletError:
        """Why it does not answer any more: with the lease, or by itself."""
        return why_lost(self.lease, self.guest, words=CELL)

    def close(self) -> None:
        """Hang up. The kernel goes on until its lease ends."""
        self.channels.close()
        self._worker.close()
        self.guest.close()


class CellCall:
    """A call that runs a cell, whose outputs come on the kernel's channels."""

    def __init__(self, exchange: Exchange, pending: PendingCall) -> None:
        self.pending = pending
        self._exchange = exchange

    def fileno(self) -> int:
        """Readable when it may have been answered; below zero: nothing more comes."""
        return self._exchange.line.fileno()

    def has_failed(self) -> bool:
        """Whether it was answered before the cell began."""
        if not self._exchange.poll(self.pending) or self.pending.came is None:
            return False
        came = self.pending.came
        return isinstance(came, CallRefused) or Flag.BEGAN not in unpack(came.body).flags

    def may_have_begun(self) -> bool:
        """Of one that failed or was lost: whether the first line of the cell may have run."""
        self._exchange.wait(self.pending, _in_a_moment())
        return self.pending.was_begun if self.pending.lost is not None else not self.has_failed()


def _in_a_moment() -> Callable[[], int]:
    """When a call that waits looks whether its kernel was parked (CLOCK_MONOTONIC)."""
    until_ns = time.monotonic_ns() + LOOK_NS
    return lambda: until_ns
