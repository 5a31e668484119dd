"""What must hold of leases that are bound to their holder's process, and how the pretended office sees a process end.

Where office and holders are on one machine, the kernel tells the office that a process has ended: at once, and again
when the office looks after a restart. Nothing of that is a message that could be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Outcome
from sublet.office.ledger.records import LeaseRecord, ProcessRecord
from sublet.values import Kind

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from tests.simulation.world import World

_S: Final = 1_000_000_000
LATE_NS: Final = 5 * _S
"""An office that is up acts on the end of a process within this time."""
_OVER: Final = frozenset({LeaseStatus.ENDING, LeaseStatus.ENDED})


class Programs:
    """The processes of the one machine, as its kernel knows them."""

    def __init__(self) -> None:
        self._living: set[ProcessRecord] = set()
        self.ended_at: dict[ProcessRecord, int] = {}

    def began(self, pid: int, start: int, boot_id: str) -> ProcessRecord:
        """One more; a pid may have been another's before."""
        process = ProcessRecord(pid=pid, start_ticks=start, boot_id=boot_id, namespaces="")
        self._living.add(process)
        return process

    def ended(self, process: ProcessRecord, now: int) -> None:
        """It is no more."""
        if process in self._living:
            self._living.remove(process)
            self.ended_at[process] = now

    def lives(self, process: ProcessRecord) -> bool:
        return process in self._living


class BoundRules:
    """One world's."""

    def __init__(self, fail: Callable[[str, str], None], world: World) -> None:
        self._fail = fail
        self._world = world

    def decided(self, state: State, command: cmd.Command, outcome: Outcome) -> None:
        """H1: no lease ends with a process that lives, or with another's."""
        if not isinstance(command, cmd.HolderGone):
            return
        for event in outcome.events:
            if isinstance(event, ev.Ending | ev.Ended) and event.end.reason is EndReason.HOLDER_GONE:
                lease = state.leases[event.lease]
                self._world.coverage.seen["ended with its process"] += 1
                if lease.parks is not None:
                    self._world.coverage.seen["parked, and ended with its process"] += 1
                if lease.process is None or self._world.programs.lives(lease.process):
                    self._fail("H1", f"{lease.id} ended as holder_gone, and its process {lease.process} lives")

    def look(self, state: State, awake_since: int) -> None:
        """H2: nothing that is bound to a process outlives it for long."""
        world = self._world
        for lease in state.leases.values():
            if lease.process is None or lease.status in _OVER or world.programs.lives(lease.process):
                continue
            since = max(awake_since, world.programs.ended_at.get(lease.process, 0))
            if world.now - since > LATE_NS and not self._waits_for_others(state, lease):
                late_s = (world.now - since) / _S
                self._fail("H2", f"{lease.id} ({lease.status}) is bound to a process that ended {late_s:.1f} s ago")

    def _waits_for_others(self, state: State, lease: LeaseRecord) -> bool:
        """Storage stays until nothing can save to it."""
        return all(part.kind is Kind.BLOCK for part in lease.parts) and any(
            other.process == lease.process and other.status is LeaseStatus.ENDING for other in state.leases.values()
        )
