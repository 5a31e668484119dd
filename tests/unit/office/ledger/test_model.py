"""The ledger and the dumb second implementation give the same answers to generated sequences, some 13,000 commands."""

from __future__ import annotations

import os
import random
from collections import Counter
from fractions import Fraction

import pytest
from msgspec.structs import replace

from sublet.errors import SubletError
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Done, Granted, GrantedMany, Offer, Place, Refusal
from sublet.office.ledger.bills import GRAINS_PER_MICRO, Rates
from sublet.office.ledger.budgets import prices_record, standing_now
from sublet.office.ledger.burst_credit import HOUR, account
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import GroupRecord, LeaseRecord, Quota, Want
from sublet.office.ledger.spending import account_of, budget_id
from sublet.values import (
    GIB,
    NS_PER_S,
    BudgetWindow,
    Epoch,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ResourceId,
    TenantId,
    Tier,
)
from sublet.wire.orders import Inventory, TornDown
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, device, inventory, seconds
from tests.unit.office.ledger.model import Model, ModelLease

SEQUENCES = int(os.environ.get("SUBLET_SEQUENCES", "36"))
STEPS = 60
NEVER = 10**9 * NS_PER_S

POLICY = Policy(
    gang_patience_ns=seconds(120),
    min_run_batch_ns=NEVER,  # nobody may be taken
    max_hold_ns=NEVER,
    usage_window_ns=seconds(600),
    half_life_ns=seconds(157),
    priority_after_ns=seconds(45),
)
TENANTS = (LOCAL, ANN, BEN)
GROUPS = (DEFAULT_GROUP, GroupId("course"), GroupId("lab"))
VERBS = (
    ("acquire",) * 5
    + ("claim",) * 3
    + ("down",) * 4
    + ("decline", "renew", "release", "quota", "burst", "burst", "acquire_many", "move", "weigh", "weigh", "budget")
)
LIMITS = {
    "gpus": (1, 2, 4),
    "cores": (2, 8),
    "leases": (1, 3),
    "gpu_seconds": (30, 200),
    "memory_bytes": (8 * GIB,),
}


class Pair:
    """Both, side by side, with the same commands."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes = _nodes(rng)
        self.bench = Bench(*self.nodes, policy=POLICY)
        self.bench.obedient = False
        for group in GROUPS[1:]:
            self.bench.do(cmd.SetGroup(group=GroupRecord(id=group)))
        self.bench.do(cmd.SetPrices(prices=prices_record(Rates(models={"T4": 3_500_000}, priority=700_000))))
        self.model = Model(POLICY, self.nodes, now_ns=self.bench.now_ns)
        for tenant in TENANTS:
            self.model.set_quota(tenant, Quota())
        self.asked: dict[str, cmd.Acquire] = {}
        self.told: list[str] = []
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        for number in range(STEPS):
            self.bench.now_ns += seconds(self.rng.choice((1, 1, 1, 2, 5, 20, 40)))
            self.bench.do(cmd.Tick())
            self.model.tick(self.bench.now_ns)
            self.compare("tick")
            verb = self.rng.choice(VERBS)
            getattr(self, verb)(number)
            self.compare(verb)
        assert self.bench.state.snapshot() == self.bench.folded().snapshot()

    # ---- commands ----

    def acquire(self, number: int) -> None:
        rng = self.rng
        tenant = rng.choice(TENANTS)
        wait_s = rng.choice((None, None, 0, 30, 300))
        command = cmd.Acquire(
            tenant=tenant,
            lease=LeaseId(f"L{number}"),
            request_id=RequestId(f"r{number}"),
            wants=_wants(rng),
            ttl_ns=seconds(rng.choice((10, 60, 200))),
            tier=rng.choice((Tier.INTERACTIVE, Tier.BATCH)),
            wait_ns=None if wait_s is None else seconds(wait_s),
            selector={"zone": rng.choice("ab")} if rng.random() < 0.2 else {},
            pays_priority=rng.random() < 0.3,
        )
        lease = ModelLease(
            id=command.lease,
            tenant=tenant,
            wants=command.wants,
            ttl_ns=command.ttl_ns,
            tier=command.tier,
            asked_ns=self.bench.now_ns,
            wait_until_ns=None if wait_s is None else self.bench.now_ns + seconds(wait_s),
            arrival=number,
            zone=command.selector.get("zone"),
            pays=command.pays_priority,
            first=command.pays_priority,
        )
        self.asked[command.lease] = command
        said = f"{tenant} asks {command.lease}: {command.wants} {command.tier} {command.selector} wait={wait_s}"
        said += " pays" * command.pays_priority
        self.same(said, self.bench.do(command).answer, self.model.acquire(lease, wait=wait_s != 0))

    def acquire_many(self, number: int) -> None:
        rng = self.rng
        tenant, count = rng.choice(TENANTS), rng.choice((2, 3, 5, 20))
        at_least = rng.choice((1, 1, 2, count))
        wait_s = rng.choice((None, 0, 30)) if at_least == 1 else 0
        each = cmd.Acquire(
            tenant=tenant,
            lease=LeaseId(f"L{number}.0"),
            request_id=RequestId(f"r{number}"),
            wants=tuple(self._of_many(want, tenant) for want in _wants(rng)),
            ttl_ns=seconds(rng.choice((10, 60, 200))),
            tier=rng.choice((Tier.INTERACTIVE, Tier.BATCH)),
            wait_ns=None if wait_s is None else seconds(wait_s),
            pays_priority=rng.random() < 0.2,
        )
        ids = tuple(LeaseId(f"L{number}.{index}") for index in range(count))
        leases = [
            ModelLease(
                id=one,
                tenant=tenant,
                wants=each.wants,
                ttl_ns=each.ttl_ns,
                tier=each.tier,
                asked_ns=self.bench.now_ns,
                wait_until_ns=None if wait_s is None else self.bench.now_ns + seconds(wait_s),
                arrival=number,
                pays=each.pays_priority,
                first=each.pays_priority,
            )
            for one in ids
        ]
        said = f"{tenant} asks for {at_least} to {count} {each.lease}: {each.wants} {each.tier} wait={wait_s}"
        command = cmd.AcquireMany(tenant=tenant, each=each, leases=ids, at_least=at_least)
        self.same(
            said, self.bench.do(command).answer, self.model.acquire_many(leases, at_least=at_least, wait=wait_s != 0)
        )

    def claim(self, number: int) -> None:
        if lease := self._pick("granted", "active", "queued"):
            answer = self.bench.do(cmd.Claim(tenant=TenantId(lease.tenant), lease=LeaseId(lease.id))).answer
            self.same(f"claim {lease.id}", answer, self.model.claim(lease))

    def decline(self, number: int) -> None:
        offered = [lease for lease in self.model.leases if lease.offered and lease.status == "granted"]
        if offered:
            lease = self.rng.choice(offered)
            self.bench.do(cmd.Decline(tenant=TenantId(lease.tenant), lease=LeaseId(lease.id)))
            self.model.decline(lease)

    def renew(self, number: int) -> None:
        if lease := self._pick("active"):
            self.same(f"renew {lease.id}", self.bench.renew(self.real(lease)), self.model.renew(lease))

    def release(self, number: int) -> None:
        if lease := self._pick("active", "granted", "queued", "noticed"):
            self.same(f"release {lease.id}", self.bench.release(self.real(lease)), self.model.release(lease))

    def down(self, number: int) -> None:
        """The agent has verified one of the slices that wait for it."""
        waiting = sorted({(spot.lease, spot.grant) for spot in self.model.spots if spot.until_ns is not None})
        if not waiting:
            return
        lease_id, grant = self.rng.choice(waiting)
        resources = tuple(
            ResourceId(s.device) for s in self.model.spots if (s.lease, s.grant) == (lease_id, grant) and s.until_ns
        )
        node = self.bench.state.resources[resources[0]].node
        epoch = Epoch(1, grant)
        self.bench.report(TornDown(node=NodeId(node), lease=LeaseId(lease_id), epoch=epoch, resources=resources))
        self.model.torn_down(next(lease for lease in self.model.leases if lease.id == lease_id), grant)

    def quota(self, number: int) -> None:
        tenant = self.rng.choice(TENANTS)
        name = self.rng.choice(sorted(LIMITS))
        quota = Quota(**{name: self.rng.choice(LIMITS[name])}) if self.rng.random() < 0.7 else Quota()
        self._set_quota(tenant, quota)

    def burst(self, number: int) -> None:
        """A quota of device time that is soon used up, with credit beyond it that is soon used up as well, or fills."""
        rng = self.rng
        quota = Quota(
            gpu_seconds=rng.choice((0, 10, 100)),
            burst_seconds=rng.choice((0, 60, 200, 900)),
            burst_refill_seconds=rng.choice((0, 300, 3600)),
        )
        self._set_quota(rng.choice(TENANTS), quota)

    def _set_quota(self, tenant: TenantId, quota: Quota) -> None:
        self.told.append(f"{self.bench.now_ns // NS_PER_S}s quota of {tenant}: {quota}")
        self.bench.do(cmd.SetTenant(tenant=tenant, quota=quota))
        self.model.set_quota(tenant, quota)

    def budget(self, number: int) -> None:
        """One for good, of which more and less is given as time goes by; or credit for it."""
        tenant, group = self.rng.choice(((ANN, None), (BEN, None), (None, GROUPS[0]), (None, GROUPS[1])))
        whose, amount = account_of(tenant, group), self.rng.choice((0, 1_000, 10_000, 100_000))
        which = {"tenant": tenant, "group": group, "per": BudgetWindow.TOTAL}
        self.told.append(f"{self.bench.now_ns // NS_PER_S}s budget of {whose}: {amount}")
        if whose in self.model.budgets and self.rng.random() < 0.5:
            if amount:
                self.bench.do(cmd.CreditBudget(amount=amount, **which))  # type: ignore[arg-type]
                self.model.set_budget(whose, self.model.budgets[whose][0] + amount)
            return
        added = 0
        if whose in self.model.budgets:
            added = sum(self.bench.state.books.budgets[budget_id(tenant, group, BudgetWindow.TOTAL)].credits.values())
        self.bench.do(cmd.SetBudget(amount=amount, **which))  # type: ignore[arg-type]
        self.model.set_budget(whose, amount + added)

    def move(self, number: int) -> None:
        tenant, group = self.rng.choice((ANN, BEN)), self.rng.choice(GROUPS)
        self.bench.do(cmd.SetTenant(tenant=tenant, group=group))
        self.model.move(tenant, group)
        self.model.settle()

    def weigh(self, number: int) -> None:
        weight = self.rng.choice((1, 2, 3, 10))
        if self.rng.random() < 0.5:
            tenant = self.rng.choice(TENANTS)
            self.bench.do(cmd.SetTenant(tenant=tenant, weight=weight))
            self.model.weights[tenant] = weight
        else:
            group, ceiling = self.rng.choice(GROUPS), self.rng.choice((None, None, 0, 1, 2, 3))
            self.bench.do(cmd.SetGroup(group=GroupRecord(id=group, weight=weight, ceiling=ceiling)))
            self.model.weights[group] = weight
            self.model.ceilings.pop(group, None)
            if ceiling is not None:
                self.model.ceilings[group] = ceiling
        self.model.settle()

    # ---- looking ----

    def real(self, lease: ModelLease) -> LeaseRecord:
        return self.bench.lease(lease.id)

    def same(self, what: str, real: object, expected: str) -> None:
        self.told.append(f"{self.bench.now_ns // NS_PER_S}s {what} → {expected}")
        assert _kind(real) == expected, f"{what}: the ledger says {real}, the model {expected}"

    def compare(self, after: str) -> None:
        places = self.model.positions()
        for lease in self.model.leases:
            real = self.real(lease)
            assert str(real.status) == lease.status, f"after {after}: {lease.id} is {real.status}, not {lease.status}"
            if lease.status in ("granted", "active", "noticed"):
                mine = [
                    (s.device, s.amount, s.millis)
                    for s in self.model.spots
                    if (s.lease, s.grant) == (lease.id, lease.grant)
                ]
                assert [(p.resource, p.amount, p.millis) for p in real.parts] == mine
                assert real.epoch == Epoch(1, lease.grant)
            if lease.status == "noticed":
                assert real.notice is not None
                assert real.notice.take_at_ns == lease.take_at_ns
            if lease.status in ("active", "noticed"):
                assert real.deadline_ns == lease.deadline_ns
            if lease.status == "granted":
                assert real.claim_by_ns == lease.claim_by_ns
                assert real.offered == lease.offered
            if lease.status == "queued":
                place = self.bench.ledger.place_of(real.id, self.bench.now)
                assert place is not None
                assert place.position == places[lease.id], f"after {after}: the place of {lease.id}"
        for budget in self.bench.state.books.budgets.values():
            used = Fraction(standing_now(self.bench.state, budget, self.bench.now).used, GRAINS_PER_MICRO * 1_000_000)
            assert used == self.model.used(account_of(budget.tenant, budget.group)), f"after {after}: {budget.id}"
        for tenant in TENANTS:
            assert self.bench.state.used_milli_ns(tenant, self.bench.now_ns) == self.model.used_milli_ns(tenant)
            burst = account(self.bench.state, tenant, self.bench.now_ns)
            assert Fraction(burst.credit, HOUR) == self.model.credit(tenant), f"after {after}: credit of {tenant}"
            self.seen["draws"] += burst.drawn > 0

    def _of_many(self, want: Want, tenant: TenantId) -> Want:
        """Many parts of cards of several sizes may be fewer, below a ceiling or with burst credit, than one after the
        other would be."""
        is_bound = self.model.group_of(tenant) in self.model.ceilings or self.model.quotas[tenant].burst_seconds
        is_part = want.exclusivity is Exclusivity.SHARED and is_bound
        return replace(want, least=None, exclusivity=None if is_part else want.exclusivity)

    def _pick(self, *statuses: str) -> ModelLease | None:
        found = [lease for lease in self.model.leases if lease.status in statuses]
        return self.rng.choice(found) if found else None


def _kind(answer: object) -> str:
    match answer:
        case Granted():
            return "granted"
        case GrantedMany(leases=leases):
            return f"granted {len(leases)}"
        case Offer():
            return "offer"
        case Place():
            return "queued"
        case Refusal():
            return f"refused {answer.code}"
        case Done():
            return "done"
        case SubletError():
            return "error"
        case _:
            raise AssertionError(f"not an answer: {answer!r}")


def _nodes(rng: random.Random) -> list[Inventory]:
    found = []
    for index, zone in enumerate("ab"[: rng.choice((1, 2))]):
        gpus = [
            device(f"{zone}-gpu{i}", capacity=rng.choice((8, 16)) * GIB, model=rng.choice(("T4", "A100 80GB")))
            for i in range(rng.choice((1, 2, 3)))
        ]
        rest = [device(f"{zone}-cpu", Kind.CPU), device(f"{zone}-mem", Kind.MEMORY, 16 * GIB)]
        found.append(inventory(f"n{index}", *gpus, *rest, zone=zone))
    return found


def _wants(rng: random.Random) -> tuple[Want, ...]:
    kind = rng.choice((Kind.GPU, Kind.GPU, Kind.GPU, Kind.CPU, Kind.MEMORY))
    if kind is Kind.CPU:
        amount = rng.choice((1, 2, 5, 8, 9))
        return (Want(kind=kind, amount=amount, least=rng.choice((None, 1))),)
    amount = rng.choice((2, 4, 8, 16)) * GIB
    least = rng.choice((None, None, GIB))
    if kind is Kind.MEMORY:
        return (Want(kind=kind, amount=amount, least=least),)
    gpu = Want(
        kind=kind,
        amount=amount,
        count=rng.choice((1, 1, 1, 2, 3)),
        exclusivity=rng.choice(
            (None, Exclusivity.SHARED, Exclusivity.SHARED, Exclusivity.DEVICE, Exclusivity.PARTITION)
        ),
        model=rng.choice((None, None, "t4", "A100")),
        least=least,
    )
    return (gpu, Want(kind=Kind.CPU, amount=2)) if rng.random() < 0.3 else (gpu,)


@pytest.mark.parametrize("block", range(4))
def test_both_say_the_same(block: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(SEQUENCES // 4):
        seed = block * 1_000_000 + number
        pair = Pair(random.Random(seed))
        try:
            pair.run()
        except AssertionError as error:
            story = "\n".join(pair.told[-12:])
            raise AssertionError(f"seed {seed}: {error}\n{story}") from error
        seen.update(pair.seen)
    assert seen["draws"], "none drew on burst credit"
