"""Leases that end with the process of their holder.

A lease can be bound to the process that acquired, claimed or attached it. The edge (``holder_watch``) sees the process
end and says so; what follows is decided here. A lease that is bound to no process ends by its time to live, as any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done
from sublet.office.ledger.lookup import find_live
from sublet.office.ledger.records import LeaseRecord, ProcessRecord
from sublet.office.ledger.step import Step
from sublet.values import Kind, LeaseId

_OVER = frozenset({LeaseStatus.ENDING, LeaseStatus.ENDED})
_WAITS = frozenset({LeaseStatus.QUEUED, LeaseStatus.GRANTED})


def bind(step: Step, lease: LeaseRecord, process: ProcessRecord | None) -> None:
    """The lease ends with this process from now on (None: with none), and so does what is parked of it."""
    if lease.process != process:
        step.emit(ev.Bound(lease=lease.id, process=process))
    parked_follow(step, lease)


def parked_follow(step: Step, lease: LeaseRecord) -> None:
    """The parking lease of a lease is bound to the same process."""
    parking = None if lease.parked_under is None else step.state.leases.get(lease.parked_under)
    if parking is not None and parking.status not in _OVER and parking.process != lease.process:
        step.emit(ev.Bound(lease=parking.id, process=lease.process))


def unbind(step: Step, command: cmd.Unbind) -> Answer:
    """The holder leaves it to others: it lives on when its process ends."""
    lease = find_live(step, command.tenant, command.lease, command.epoch)
    bind(step, lease, None)
    return Done(lease=lease)


def holder_gone(step: Step, command: cmd.HolderGone) -> Answer:
    """End what was bound to a process that has ended: first its queue entries, then its leases, then what it parked.

    What runs under its leases may save until it is gone, and saves to its volumes. So leases of storage alone end last,
    when the others have been torn down: the edge says once more then that the process has ended.

    What it parked is kept where a request of another process waits to go on with it, and is bound to that one then.
    """
    found = [step.state.leases.get(lease_id) for lease_id in command.leases]
    leases = [lease for lease in found if lease is not None and lease.process == command.process]
    detail = f"its process {command.process.pid} has ended"
    for lease in sorted(leases, key=_order):
        if lease.status in _WAITS:
            step.end(lease, EndReason.HOLDER_GONE, detail, grace_ns=0)
        elif lease.status in LIVE_STATES and not (_is_storage(lease) and any(map(_may_save, leases))):
            heir = _who_resumes(step, lease)
            if heir is not None and heir.process != command.process:
                step.emit(ev.Bound(lease=lease.id, process=heir.process))
            else:
                step.end(lease, EndReason.HOLDER_GONE, detail)
    return Done()


def holder_unseen(step: Step, command: cmd.HolderUnseen) -> Answer:
    """The process may live, but the office cannot see it any more: its leases end by their time to live."""
    for lease_id in command.leases:
        lease = step.state.leases.get(lease_id)
        if lease is not None and lease.status not in _OVER and lease.process == command.process:
            step.emit(ev.Bound(lease=lease.id, process=None))
    return Done()


def _order(lease: LeaseRecord) -> int:
    return 0 if lease.status in _WAITS else 3 if _is_storage(lease) else 1 if lease.parks is None else 2


def _is_storage(lease: LeaseRecord) -> bool:
    return bool(lease.parts) and all(part.kind is Kind.BLOCK for part in lease.parts)


def _may_save(lease: LeaseRecord) -> bool:
    """Whether something may still run under it, and save."""
    return lease.status is LeaseStatus.ENDING and not _is_storage(lease)


def _who_resumes(step: Step, lease: LeaseRecord) -> LeaseRecord | None:
    """The request that waits to go on with what is parked under this lease."""
    waiting = None if lease.parks is None or lease.parks.resumed_by is None else lease.parks.resumed_by
    heir = None if waiting is None else step.state.leases.get(waiting)
    return heir if heir is not None and heir.status in _WAITS else None


class BoundLeases:
    """Which leases are bound to which process: an index that follows the facts."""

    def __init__(self) -> None:
        self._leases: dict[ProcessRecord, dict[LeaseId, None]] = {}
        self._process: dict[LeaseId, ProcessRecord] = {}

    def __iter__(self) -> Iterator[ProcessRecord]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    def of(self, process: ProcessRecord) -> tuple[LeaseId, ...]:
        """The leases that end with this process, until nothing is left of them."""
        return tuple(self._leases.get(process, ()))

    def restored(self, lease: LeaseRecord) -> None:
        """A lease as the journal has it, when an office starts."""
        if lease.status is not LeaseStatus.ENDED:
            self._set(lease.id, lease.process)

    def note(self, events: Iterable[ev.Event]) -> set[ProcessRecord]:
        """Follow these facts; the processes that got a lease, or lost one, by them."""
        touched: set[ProcessRecord] = set()
        for event in events:
            if isinstance(event, ev.Queued):
                if event.lease.process is not None:
                    touched |= self._set(event.lease.id, event.lease.process)
            elif isinstance(event, ev.Attached | ev.Bound):
                touched |= self._set(event.lease, event.process)
            elif isinstance(event, ev.Ended) and event.lease in self._process:
                touched |= self._set(event.lease, None)
        return touched

    def _set(self, lease: LeaseId, process: ProcessRecord | None) -> set[ProcessRecord]:
        before = self._process.pop(lease, None)
        if before is not None:
            del self._leases[before][lease]
            if not self._leases[before]:
                del self._leases[before]
        if process is not None:
            self._process[lease] = process
            self._leases.setdefault(process, {})[lease] = None
        return {one for one in (before, process) if one is not None}
