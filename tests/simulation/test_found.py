"""What the seeds found, each reduced to the few steps that show it. A bug found stays findable."""

from __future__ import annotations

from sublet.errors import LeaseRevoked
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Outcome
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.fold import apply
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Now, Want
from sublet.office.ledger.state import State
from sublet.values import (
    GIB,
    NS_PER_S,
    Epoch,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ResourceId,
    TenantId,
    Tier,
)
from sublet.wire.orders import Device, EndedHere, Extend, Grant, Held, Inventory, Order, TornDown

POLICY = Policy(ended_keep_ns=60 * NS_PER_S, max_hold_ns=90 * NS_PER_S)
NODE, GPU, CPU = NodeId("n"), ResourceId("n/gpu"), ResourceId("n/cpu")
INVENTORY = Inventory(
    node=NODE,
    domain="n",
    devices=(
        Device(id=GPU, kind=Kind.GPU, capacity=GIB),
        Device(id=CPU, kind=Kind.CPU, capacity=8),
    ),
)
ALICE, BOB = TenantId("alice"), TenantId("bob")


class Office:
    """A ledger and a clock."""

    def __init__(self) -> None:
        self.ns = 1_000 * NS_PER_S
        self.ledger = Ledger(POLICY)
        self.tell(cmd.OpenOffice(incarnation=1, clock_domain="boot 1"))
        self.tell(cmd.NodeUp(inventory=INVENTORY))
        for tenant in (ALICE, BOB):
            self.tell(cmd.AddTenant(tenant=tenant, token_hash=tenant))

    def tell(self, command: cmd.Command) -> Outcome:
        return self.ledger.handle(command, Now(self.ns, self.ns))

    def acquire(
        self, lease: str, kind: Kind = Kind.GPU, amount: int = GIB, *, tenant: TenantId = ALICE, tier: Tier = Tier.BATCH
    ) -> Outcome:
        want = Want(kind=kind, amount=amount)
        return self.tell(
            cmd.Acquire(
                tenant=tenant,
                lease=LeaseId(lease),
                request_id=RequestId(lease),
                wants=(want,),
                ttl_ns=60 * NS_PER_S,
                tier=tier,
            )
        )

    def epoch(self, lease: str) -> Epoch:
        epoch = self.ledger.state.leases[LeaseId(lease)].epoch
        assert epoch is not None
        return epoch

    def torn_down(self, lease: str, resource: ResourceId) -> None:
        report = TornDown(node=NODE, lease=LeaseId(lease), epoch=self.epoch(lease), resources=(resource,))
        self.tell(cmd.AgentReport(report=report))

    def held(self, lease: str) -> None:
        number = self.ledger.state.leases[LeaseId(lease)].number
        report = Held(node=NODE, lease=LeaseId(lease), epoch=self.epoch(lease), number=number)
        self.tell(cmd.AgentReport(report=report))


def test_leases_are_forgotten_after_a_restart_in_whatever_order_they_came_clean() -> None:
    """Safety seed 8: the first to end was the last to be torn down; a restarted office forgot it and fell over."""
    office = Office()
    office.acquire("first")
    office.acquire("second", Kind.CPU, 2)
    office.tell(cmd.Release(tenant=ALICE, lease=LeaseId("first")))
    office.ns += NS_PER_S
    office.tell(cmd.Release(tenant=ALICE, lease=LeaseId("second")))
    office.torn_down("second", CPU)
    office.torn_down("first", GPU)
    snapshot = office.ledger.state.snapshot()
    office.ns += POLICY.ended_keep_ns
    forgotten = office.tell(cmd.Tick())
    assert any(isinstance(event, ev.Forgotten) for event in forgotten.events)
    restarted = State.restore(snapshot)
    for event in forgotten.events:
        apply(restarted, event, Now(office.ns, office.ns))
    check_books(restarted)
    assert Ledger(POLICY, restarted).next_wake_ns() is None or restarted.leases


def test_a_lease_that_its_agent_let_run_out_did_not_end_by_a_notice_that_was_not_due() -> None:
    """Safety seed 38: the books said preempted, six seconds before the moment that was announced."""
    office = Office()
    office.acquire("held", tier=Tier.SPOT)
    office.acquire("waits", tenant=BOB, tier=Tier.INTERACTIVE)
    assert office.ledger.state.leases[LeaseId("held")].status is LeaseStatus.NOTICED
    report = EndedHere(node=NODE, lease=LeaseId("held"), epoch=office.epoch("held"), reason=EndReason.EXPIRED)
    office.tell(cmd.AgentReport(report=report))
    end = office.ledger.state.leases[LeaseId("held")].end
    assert end is not None
    assert end.reason is EndReason.EXPIRED


def test_after_a_reboot_the_grant_is_news_to_an_agent_on_a_clock_of_its_own() -> None:
    """Safety seed 43: the same number came with a new deadline, so the agent kept the old one and ended the lease."""
    office = Office()
    before = office.acquire("held").orders[0]
    assert isinstance(before, Grant)
    office.held("held")
    last_ns, office.ns = office.ns, 5 * NS_PER_S
    opened = office.tell(cmd.OpenOffice(incarnation=1, clock_domain="boot 2", last_ns=last_ns))
    again = [order for order in opened.orders if isinstance(order, Grant)]
    assert again
    assert again[0].number > before.number


def test_an_extension_that_is_sent_again_says_what_is_left_by_then() -> None:
    """An agent on another clock counts from the arrival, so a stale remainder would lengthen the lease."""
    office = Office()
    office.acquire("held")
    office.held("held")
    office.ns += NS_PER_S
    sent = _extends(office.tell(cmd.Renew(tenant=ALICE, lease=LeaseId("held"), epoch=office.epoch("held"))).orders)
    office.ns += 3 * NS_PER_S
    again = _extends(office.ledger.orders_due(Now(office.ns, office.ns)))
    assert again[0].deadline_ns == sent[0].deadline_ns
    assert again[0].ttl_ns == sent[0].ttl_ns - 3 * NS_PER_S


def test_whoever_waits_behind_another_request_of_his_tenant_counts_as_waiting() -> None:
    """Safety seed 992: only the first in each line was looked at, so a lease was renewed beyond the maximum hold."""
    office = Office()
    office.acquire("cores", Kind.CPU, 8)
    office.acquire("gpu")
    office.acquire("wants a gpu", tenant=BOB)
    office.acquire("wants cores", Kind.CPU, 4, tenant=BOB)
    refused: object = None
    while office.ns < 1_000 * NS_PER_S + POLICY.max_hold_ns:
        office.ns += 30 * NS_PER_S
        renew = cmd.Renew(tenant=ALICE, lease=LeaseId("cores"), epoch=office.epoch("cores"))
        refused = office.ledger.handle(renew, Now(office.ns, office.ns)).answer
    assert isinstance(refused, LeaseRevoked), refused
    assert office.ledger.state.leases[LeaseId("cores")].fate is EndReason.FAIR_SHARE


def test_a_lost_node_that_returns_still_owes_the_teardown_of_what_has_ended() -> None:
    """Safety seed 11: the lease ended as lost; when the node came back, its slice had to be verified all the same."""
    office = Office()
    office.acquire("held")
    office.tell(cmd.NodeGone(node=NODE))
    assert office.ledger.state.leases[LeaseId("held")].status is LeaseStatus.ENDED
    office.tell(cmd.NodeUp(inventory=INVENTORY))
    check_books(office.ledger.state)
    waits = office.acquire("next", tenant=BOB)
    assert not any(isinstance(event, ev.Granted) for event in waits.events), "nobody has looked yet"
    office.torn_down("held", GPU)
    assert office.ledger.state.leases[LeaseId("next")].status is LeaseStatus.GRANTED


def _extends(orders: tuple[Order, ...]) -> list[Extend]:
    return [order for order in orders if isinstance(order, Extend)]
