"""A minimal office for agents' tests: the bench, and an office's orders in short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from sublet.errors import SubletError
from sublet.lease_end import EndReason
from sublet.node.agent.port import AgentPort
from sublet.testing.machine import FaultName
from sublet.values import (
    GIB,
    NS_PER_S,
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    ResourceId,
    TenantId,
)
from sublet.wire.orders import End, Extend, Grant, Notify, Part, Report, Verify

ALICE = TenantId("alice")
STEP_S: Final = 0.05
"""How often it is looked whether what is waited for has come."""
_R = TypeVar("_R")


class AgentBench(Protocol):
    """One agent with at least two GPUs, and a way to work on them, to break them and to let time pass."""

    @property
    def agent(self) -> AgentPort: ...

    @property
    def reports(self) -> list[Report]:
        """Everything the agent's sink got, in order. The suite empties it."""

    def now_ns(self) -> int:
        """The agent's clock."""

    def pass_time(self, seconds: float) -> None:
        """Let this much time pass, calling ``tick`` whenever the agent asked for it."""

    def work(self, lease: LeaseId, epoch: Epoch) -> None:
        """Have a guest of this lease touch its hardware; raises what ``check`` raises."""

    def at_work(self, lease: LeaseId) -> bool:
        """Whether a guest of this lease is on any hardware, as seen by looking at the hardware."""

    def broken_rules(self) -> list[str]:
        """Moments at which the hardware saw two holders, too much in use, or leftovers of another tenant."""

    def turn_on(self, fault: FaultName, resource: ResourceId | None = None) -> None: ...

    def turn_off(self, fault: FaultName, resource: ResourceId | None = None) -> None: ...


class OfficeInShort:
    """Sends the orders an office would, and waits for what comes of them."""

    second_s: float = 1.0
    """What the suite calls a second. Real processes need no more than a fraction of one to be told apart by."""

    def length_ns(self, seconds: float) -> int:
        """So many of its seconds, in nanoseconds."""
        return round(seconds * self.second_s * NS_PER_S)

    def sleep(self, bench: AgentBench, seconds: float) -> None:
        """Let so many of its seconds pass."""
        bench.pass_time(seconds * self.second_s)

    def wait(self, bench: AgentBench, is_so: Callable[[], object], most_s: float) -> None:
        """Let time pass until this is so, or so much of it has passed. What is asserted afterwards, says which."""
        passed_s = 0.0
        while not is_so() and passed_s < most_s:
            bench.pass_time(STEP_S)
            passed_s += STEP_S

    def grant(
        self,
        bench: AgentBench,
        lease: LeaseId,
        epoch: Epoch,
        *,
        number: int = 1,
        ttl_s: float = 600,
        tenant: TenantId = ALICE,
        device: int = 0,
        incarnation: int | None = None,
    ) -> None:
        ttl_ns = self.length_ns(ttl_s)
        bench.agent.send(
            Grant(
                lease=lease,
                epoch=epoch,
                number=number,
                tenant=tenant,
                parts=(part_of(bench, device),),
                deadline_ns=bench.now_ns() + ttl_ns,
                ttl_ns=ttl_ns,
            ),
            incarnation=incarnation,
        )

    def extend(
        self,
        bench: AgentBench,
        lease: LeaseId,
        epoch: Epoch,
        *,
        number: int,
        ttl_s: float,
        incarnation: int | None = None,
    ) -> None:
        ttl_ns = self.length_ns(ttl_s)
        order = Extend(lease=lease, epoch=epoch, number=number, deadline_ns=bench.now_ns() + ttl_ns, ttl_ns=ttl_ns)
        bench.agent.send(order, incarnation=incarnation)

    def notify(
        self, bench: AgentBench, lease: LeaseId, epoch: Epoch, *, number: int, take_at_ns: int | None = 1 << 62
    ) -> None:
        bench.agent.send(
            Notify(lease=lease, epoch=epoch, number=number, reason=EndReason.PREEMPTED, take_at_ns=take_at_ns)
        )

    def end(
        self,
        bench: AgentBench,
        lease: LeaseId,
        epoch: Epoch,
        *,
        grace_s: float = 0,
        reason: EndReason = EndReason.PREEMPTED,
        incarnation: int | None = None,
    ) -> None:
        bench.agent.send(
            End(
                lease=lease,
                epoch=epoch,
                number=99,
                parts=(part_of(bench, 0),),
                reason=reason,
                grace_ns=self.length_ns(grace_s),
            ),
            incarnation=incarnation,
        )

    def verify(self, bench: AgentBench, lease: LeaseId, epoch: Epoch) -> None:
        bench.reports.clear()
        bench.agent.send(Verify(lease=lease, epoch=epoch, parts=(part_of(bench, 0),)))


def part_of(bench: AgentBench, index: int) -> Part:
    gpus = [device for device in bench.agent.inventory().devices if device.kind is Kind.GPU]
    return Part(
        resource=gpus[index].id,
        kind=Kind.GPU,
        amount=min(GIB, gpus[index].capacity),
        millis=1000,
        exclusivity=Exclusivity.SESSION,
    )


def reports_of(bench: AgentBench, kind: type[_R]) -> list[_R]:
    return [report for report in bench.reports if isinstance(report, kind)]


def refused(bench: AgentBench, lease: LeaseId, epoch: Epoch, error: type[SubletError]) -> None:
    try:
        bench.work(lease, epoch)
    except error:
        return
    raise AssertionError(f"{lease} with epoch {epoch} could touch the hardware; {error.__name__} was due")
