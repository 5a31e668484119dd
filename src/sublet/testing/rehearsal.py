"""Takes a lease away on purpose, to rehearse a program's reaction."""

from __future__ import annotations

from typing import Protocol

from sublet.clock import Clock
from sublet.lease_end import EndReason
from sublet.node.agent.port import AgentPort
from sublet.values import Epoch, LeaseId
from sublet.wire.orders import End, Notify, Part


class HasLease(Protocol):
    """What ``preempt`` must know of a lease; an entry of the fence table has it."""

    @property
    def lease(self) -> LeaseId: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...


def preempt(
    agent: AgentPort, held: HasLease, clock: Clock, *, first_number: int = 1_000_000, grace_ns: int = 0
) -> None:
    """Do to this lease what a preemption does: its guests get notice, it is fenced, ended and torn down.

    It goes past the office, straight to the agent, and the office learns of it as it would of any end that the agent
    reports. The numbers are high enough to be newer than any order of the office.
    """
    agent.send(
        Notify(
            lease=held.lease,
            epoch=held.epoch,
            number=first_number,
            reason=EndReason.PREEMPTED,
            take_at_ns=clock.now_ns() + grace_ns,
            detail="a rehearsal",
        )
    )
    agent.send(
        End(
            lease=held.lease,
            epoch=held.epoch,
            number=first_number + 1,
            parts=held.parts,
            reason=EndReason.PREEMPTED,
            grace_ns=grace_ns,
            detail="a rehearsal",
        )
    )
