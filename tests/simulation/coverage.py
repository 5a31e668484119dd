"""Counters that prove that faults happened, and to leases in every state. A run in which one did not has proved less
than it says, and fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sublet.lease.states import LeaseStatus
from sublet.values import LeaseId

if TYPE_CHECKING:
    from sublet.office.ledger.records import LeaseRecord
    from tests.simulation.world import World

FAULTS: Final = (
    "message lost",
    "message doubled",
    "message late",
    "message cut",
    "cut, one way",
    "cut, both ways",
    "office crash",
    "office pause",
    "sync failed",
    "slow disk",
    "reboot",
    "restore",
    "wall jump",
    "holder crash",
    "holder pause",
    "node crash",
    "node pause",
    "supervisor crash",
    "supervisor pause",
    "link broken",
    "taken over",
    "amnesia",
    "node gone",
    "node drained",
    "revoked",
    "stuck_teardown",
    "slow_teardown",
    "scrub_failure",
    "device_fault",
    "lost_reports",
    "failed_park",
    "deaf_guest",
)
STATES: Final = (
    LeaseStatus.QUEUED,
    LeaseStatus.GRANTED,
    LeaseStatus.ACTIVE,
    LeaseStatus.JEOPARDY,
    LeaseStatus.NOTICED,
    LeaseStatus.ENDING,
)


class Coverage:
    """What one seed met."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.met: Counter[tuple[str, LeaseStatus]] = Counter()
        self.seen: Counter[str] = Counter()
        """Other things worth knowing that they happened."""

    def met_leases(self, fault: str, leases: Iterable[LeaseRecord]) -> None:
        """The fault happens to these leases."""
        for lease in leases:
            self.met[fault, lease.status] += 1
            if lease.id in self._world.in_jeopardy:
                self.met[fault, LeaseStatus.JEOPARDY] += 1

    def met_lease(self, fault: str, lease_id: LeaseId | None) -> None:
        """The fault happens to this lease, if it is one."""
        office = self._world.office
        if lease_id is not None and office.ledger is not None:
            lease = office.ledger.state.leases.get(lease_id)
            if lease is not None:
                self.met_leases(fault, (lease,))


def missing(met: Counter[tuple[str, LeaseStatus]]) -> list[str]:
    """Which pairs never met."""
    return [f"{fault} × {state}" for fault in FAULTS for state in STATES if not met[fault, state]]


def table(met: Counter[tuple[str, LeaseStatus]]) -> str:
    """The matrix, for people."""
    width = max(map(len, FAULTS))
    lines = [" " * width + "".join(f"{state:>10}" for state in STATES)]
    lines += [f"{fault:<{width}}" + "".join(f"{met[fault, state]:>10}" for state in STATES) for fault in FAULTS]
    return "\n".join(lines)
