"""A ledger on a bench: commands in, outcomes out, and an agent that does as it is told unless a test holds it back.

After every command the books are checked, and every event is kept with its moment, so that any test can fold them anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

from sublet.errors import SubletError
from sublet.lease.states import LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Granted, Offer, Outcome, Place, Refusal
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.fold import apply
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, Now, ProcessRecord, Quota, Want
from sublet.office.ledger.state import State
from sublet.values import (
    GIB,
    NS_PER_S,
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    NodeId,
    RenewMode,
    RequestId,
    ResourceId,
    Suspend,
    TenantId,
    Tier,
)
from sublet.wire.orders import (
    Device,
    End,
    Extend,
    Grant,
    Held,
    Inventory,
    Notify,
    Order,
    Parkable,
    Parking,
    RemoveVolume,
    Report,
    Resumed,
    TornDown,
    Verify,
    VolumeRemoved,
)

__all__ = ["ANN", "BEN", "LOCAL", "Bench", "cores", "device", "disk", "gpu", "inventory", "seconds", "shared"]

LOCAL = LOCAL_TENANT
ANN = TenantId("ann")
BEN = TenantId("ben")
E = TypeVar("E", bound=SubletError)
A = TypeVar("A", bound=Answer)


def seconds(count: float) -> int:
    return round(count * NS_PER_S)


def gpu(gib: float = 8, **more: object) -> Want:
    return Want(kind=Kind.GPU, amount=int(gib * GIB), **more)  # type: ignore[arg-type]


def shared(gib: float = 4) -> Want:
    return gpu(gib, exclusivity=Exclusivity.SHARED)


def cores(count: int) -> Want:
    return Want(kind=Kind.CPU, amount=count)


def disk(gib: float = 1) -> Want:
    return Want(kind=Kind.BLOCK, amount=int(gib * GIB))


def device(
    name: str,
    kind: Kind = Kind.GPU,
    capacity: int | None = None,
    model: str = "",
    suspend: Suspend = Suspend.NONE,
) -> Device:
    usual = {Kind.GPU: 16 * GIB, Kind.CPU: 8, Kind.MEMORY: 64 * GIB, Kind.BLOCK: 100 * GIB}
    return Device(id=ResourceId(name), kind=kind, capacity=capacity or usual[kind], model=model, suspend=suspend)


def inventory(node: str, *devices: Device, **labels: str) -> Inventory:
    return Inventory(node=NodeId(node), domain=node, labels=labels, devices=devices)


class Bench:
    """One office on a held clock, with tenants ``ann`` and ``ben`` beside the local one."""

    def __init__(
        self,
        *inventories: Inventory,
        policy: Policy | None = None,
        gpus: int = 1,
        quotas: dict[TenantId, Quota] | None = None,
        start_s: float = 1000,
    ) -> None:
        self.policy = policy or Policy()
        self.ledger = Ledger(self.policy)
        self.now_ns = seconds(start_s)
        self.wall_ahead_ns = seconds(1_000_000)
        """A test may set the wall clock."""
        self.history: list[tuple[Now, tuple[ev.Event, ...]]] = []
        self.unsent: list[Order] = []
        """Orders the agent has not looked at yet."""
        self.sent: list[Order] = []
        """Every order ever given."""
        self.obedient = True
        """The agent carries out each order at once; a test may take this back."""
        self.keeps = True
        """Guests leave something in every volume."""
        self.is_empty = True
        """No lease has guests: the agent says so when one has notice."""
        self.checked = True
        """The books are walked after every command; a test with thousands of leases may do without."""
        self._numbers = itertools.count(1)
        self.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
        for tenant in (ANN, BEN):
            quota = (quotas or {}).get(tenant, Quota())
            self.do(cmd.AddTenant(tenant=tenant, token_hash="", quota=quota))
        for found in inventories or (inventory("n1", *(device(f"gpu{i}") for i in range(gpus))),):
            self.do(cmd.NodeUp(inventory=found))

    # ---- the clock ----

    @property
    def now(self) -> Now:
        return Now(self.now_ns, self.now_ns + self.wall_ahead_ns)

    @property
    def state(self) -> State:
        return self.ledger.state

    def usage_ms(self, tenant: TenantId) -> int:
        """Device-milliseconds used within the rolling window."""
        return self.state.used_milli_ns(tenant, self.now_ns) // 1000 // 1_000_000

    def at(self, moment_s: float) -> None:
        """Go to this moment without ticking."""
        assert seconds(moment_s) >= self.now_ns
        self.now_ns = seconds(moment_s)

    def wait(self, how_long_s: float) -> None:
        """Let time pass as a driver does: a tick at each moment the ledger asked for."""
        until_ns = self.now_ns + seconds(how_long_s)
        looks = 0
        while (wake_ns := self.ledger.next_wake_ns()) is not None and wake_ns <= until_ns:
            self.now_ns = max(self.now_ns, wake_ns)
            self.do(cmd.Tick())
            looks += 1
            assert looks < 100_000, f"the ledger asks to be woken again and again at {wake_ns}"
        self.now_ns = until_ns

    # ---- commands ----

    def do(self, command: cmd.Command) -> Outcome:
        """Handle one command and check the books."""
        outcome = self.ledger.handle(command, self.now)
        if self.checked:
            check_books(self.state)
        self.history.append((self.now, outcome.events))
        self.unsent += outcome.orders
        self.sent += outcome.orders
        if self.obedient:
            self.obey()
        return outcome

    def obey_until(self, kind: type[Order]) -> None:
        """The same, up to the first order of this kind."""
        self.obey(lambda order: not isinstance(order, kind))

    def obey(self, goes_on: Callable[[Order], bool] = lambda _: True) -> None:
        """The agent carries out what it was ordered so far, and all that follows from it."""
        while self.unsent and goes_on(self.unsent[0]):
            for report in answers_to(self.unsent.pop(0), self._node_of, kept=self.keeps, empty=self.is_empty):
                outcome = self.ledger.handle(cmd.AgentReport(report=report), self.now)
                if self.checked:
                    check_books(self.state)
                self.history.append((self.now, outcome.events))
                self.unsent += outcome.orders
                self.sent += outcome.orders

    def report(self, report: Report) -> Outcome:
        return self.do(cmd.AgentReport(report=report))

    def ask(
        self,
        *wants: Want,
        tenant: TenantId = LOCAL,
        lease: str | None = None,
        request: str | None = None,
        ttl_s: float = 300,
        wait_s: float | None = None,
        expect_s: float | None = None,
        tier: Tier = Tier.INTERACTIVE,
        renew: RenewMode = RenewMode.WHILE_BUSY,
        name: str | None = None,
        retain_s: float | None = None,
        process: ProcessRecord | None = None,
        pays_priority: bool = False,
        **selector: str,
    ) -> Answer | SubletError:
        """Acquire. The answer as it stood when it was given."""
        number = next(self._numbers)
        outcome = self.do(
            cmd.Acquire(
                tenant=tenant,
                lease=LeaseId(lease or f"L{number}"),
                request_id=RequestId(request or f"r{number}"),
                wants=wants or (gpu(),),
                ttl_ns=seconds(ttl_s),
                wait_ns=None if wait_s is None else seconds(wait_s),
                expect_ns=None if expect_s is None else seconds(expect_s),
                tier=tier,
                renew=renew,
                name=name,
                retain_ns=None if retain_s is None else seconds(retain_s),
                selector=selector,
                process=process,
                pays_priority=pays_priority,
            )
        )
        return outcome.answer

    def granted(self, *wants: Want, **how: object) -> LeaseRecord:
        answer = self.ask(*wants, **how)  # type: ignore[arg-type]
        assert isinstance(answer, Granted), answer
        assert answer.lease.status is LeaseStatus.ACTIVE
        return answer.lease

    def queued(self, *wants: Want, **how: object) -> LeaseRecord:
        answer = self.ask(*wants, **how)  # type: ignore[arg-type]
        assert isinstance(answer, Place), answer
        return answer.lease

    def offered(self, *wants: Want, **how: object) -> LeaseRecord:
        answer = self.ask(*wants, **how)  # type: ignore[arg-type]
        assert isinstance(answer, Offer), answer
        return answer.lease

    def refused(self, *wants: Want, **how: object) -> Refusal:
        answer = self.ask(*wants, **how)  # type: ignore[arg-type]
        assert isinstance(answer, Refusal), answer
        return answer

    def claim(self, lease: LeaseRecord) -> Answer | SubletError:
        return self.do(cmd.Claim(tenant=lease.tenant, lease=lease.id, epoch=lease.epoch)).answer

    def renew(self, lease: LeaseRecord, *, active: bool = True, **how: object) -> Answer | SubletError:
        epoch = how.pop("epoch", lease.epoch)
        assert isinstance(epoch, Epoch)
        command = cmd.Renew(tenant=lease.tenant, lease=lease.id, epoch=epoch, active=active, **how)  # type: ignore[arg-type]
        return self.do(command).answer

    def idle(self, lease: LeaseRecord) -> None:
        assert lease.epoch is not None
        self.do(cmd.NoteActivity(tenant=lease.tenant, lease=lease.id, epoch=lease.epoch, active=False))

    def release(self, lease: LeaseRecord) -> Answer | SubletError:
        return self.do(cmd.Release(tenant=lease.tenant, lease=lease.id)).answer

    # ---- looking ----

    @property
    def events(self) -> list[ev.Event]:
        return [event for _, events in self.history for event in events]

    def lease(self, lease_id: str) -> LeaseRecord:
        return self.state.leases[LeaseId(lease_id)]

    def folded(self) -> State:
        """The state that comes of the events alone."""
        return folded(self.history, self.policy)

    def _node_of(self, order: Order) -> NodeId | None:
        return self.ledger.node_of(order)


def folded(history: Iterable[tuple[Now, tuple[ev.Event, ...]]], policy: Policy) -> State:
    state = State.fresh(policy)
    for now, events in history:
        for event in events:
            apply(state, event, now)
    check_books(state)
    return state


def answers_to(order: Order, node_of: object, *, kept: bool = True, empty: bool = True) -> list[Report]:
    """What an agent says that does as it is told. ``empty``: no lease has guests, and it says so at a notice."""
    assert callable(node_of)
    node = node_of(order)
    if node is None:
        return []
    match order:
        case Grant(resume=Parking() as under):
            held = Held(node=node, lease=order.lease, epoch=order.epoch, number=order.number)
            return [held, Resumed(node=node, lease=order.lease, epoch=order.epoch, under=under)]
        case Grant() | Extend():
            return [Held(node=node, lease=order.lease, epoch=order.epoch, number=order.number)]
        case Notify():
            told = Held(node=node, lease=order.lease, epoch=order.epoch, number=order.number, told=True)
            if order.take_at_ns is None or not empty:
                return [told]
            return [told, Parkable(node=node, lease=order.lease, epoch=order.epoch, amount=0)]
        case End() | Verify():
            resources = tuple(part.resource for part in order.parts)
            parked = isinstance(order, End) and order.park is not None
            torn = TornDown(
                node=node, lease=order.lease, epoch=order.epoch, resources=resources, parked=parked, kept=kept
            )
            return [torn]
        case RemoveVolume():
            return [VolumeRemoved(node=node, lease=order.lease, epoch=order.epoch, volume=order.volume)]
