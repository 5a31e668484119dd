"""The ledger a second time, without any cleverness: linear lists, nothing indexed, nothing remembered twice.

It answers the core question only: who gets what, in which order, within which quota, and when does it end. It knows no
preemption, so the sequences that compare the two give nobody a reason to be taken. Every sum is taken anew from the
list of slices, every use of a quota from the list of what was ever held.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from fractions import Fraction

from msgspec.structs import replace

from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Quota, Want
from sublet.values import GIB, MILLIS_PER_DEVICE, NS_PER_S, Exclusivity, Kind, Tier
from sublet.wire.orders import Device, Inventory

__all__ = ["Model", "ModelLease", "Spot"]

RANKS = [Tier.INTERACTIVE, Tier.BATCH, Tier.SPOT]


@dataclass
class Spot:
    """A slice: so much of one device for one grant."""

    lease: str
    tenant: str
    grant: int
    device: str
    kind: Kind
    amount: int
    alone: bool
    millis: int
    since_ns: int
    until_ns: int | None = None
    """When the holder's time was over; the slice stays until it is torn down."""
    pays: bool = False
    """For priority."""
    payer: str = ""
    """The group that its tenant was in when it asked."""
    pays_from_ns: int | None = None
    """None: never, since it was offered and the offer was not accepted."""
    groups: list[tuple[int, str]] = field(default_factory=list)
    """In which group its tenant was, since when."""


@dataclass
class Drawing:
    """A lease draws on the burst credit of its tenant."""

    lease: str
    tenant: str
    millis: int
    since_ns: int
    until_ns: int | None = None

    def goes_on_at(self, at_ns: int) -> bool:
        return self.since_ns <= at_ns and (self.until_ns is None or at_ns < self.until_ns)


@dataclass
class ModelLease:
    id: str
    tenant: str
    wants: tuple[Want, ...]
    ttl_ns: int
    tier: Tier
    asked_ns: int
    wait_until_ns: int | None
    arrival: int
    zone: str | None = None
    status: str = "queued"
    grant: int = 0
    offered: bool = False
    beyond: bool = False
    """It asked for more than there is, and stands in line for the most there is."""
    claim_by_ns: int = 0
    deadline_ns: int = 0
    take_at_ns: int | None = None
    """It has notice: a budget is used up."""
    group: str = ""
    """That pays for it."""
    pays: bool = False
    """For priority."""
    first: bool = False
    """It pays, or has waited for long enough."""


@dataclass
class Model:
    policy: Policy
    nodes: Sequence[Inventory]
    quotas: dict[str, Quota] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    """Of tenants that are not in the default group."""
    weights: dict[str, int] = field(default_factory=dict)
    """Of tenants and of groups that have another than 1."""
    budgets: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of tenants and groups that have one, for good: how much, in millionths, and since when."""
    ceilings: dict[str, int] = field(default_factory=dict)
    """Of groups that have one."""
    now_ns: int = 0
    past_quotas: list[tuple[int, str, Quota]] = field(default_factory=list)
    """Since when each tenant has had which."""
    drawings: list[Drawing] = field(default_factory=list)
    """What ever drew on burst credit."""
    leases: list[ModelLease] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    """What is taken now."""
    history: list[Spot] = field(default_factory=list)
    """What was ever taken."""
    grants: int = 0
    kept: list[tuple[str, Kind, Tier, str]] = field(default_factory=list)
    """Node, kind, tier and name of the patient."""

    # ---- what is asked ----

    def acquire(self, lease: ModelLease, *, wait: bool) -> str:
        quota = self.quotas[lease.tenant]
        if lease.pays and not any(want.kind is Kind.GPU for want in lease.wants):
            return "error"
        if self._cannot_pay(lease):
            return "refused quota"
        if any(want.exclusivity is Exclusivity.PARTITION for want in lease.wants):
            return "refused unsupported"
        if self._over(lease, quota, held=[]) or self._above(lease, []):
            return "refused quota"
        whole = lease.wants
        if self._place(lease, whole, []) is None:
            most = self._smaller(lease, [], self._allowed(lease, whole, []))
            if most is None:
                return self._beyond(lease)
            lease.wants, lease.beyond = most, True
        elif self._place(lease, whole, [], self._allowed(lease, whole, [])) is None:
            return "refused quota"
        within = self._within(lease)
        if within:
            if not lease.beyond and self._enter(lease, lease.wants):
                self._activate(lease)
                return "granted"
            open_nodes = [node for node in self._allowed(lease, whole, self.spots) if self._may_use(lease, node)]
            less = self._smaller(lease, self.spots, open_nodes)
            if less is not None:
                assert self._enter(lease, less, whole)
                self._offer(lease)
                return "offer"
        if not wait:
            return "refused capacity" if within else "refused quota"
        lease.group = self.group_of(lease.tenant)
        self.leases.append(lease)
        return "queued"

    def acquire_many(self, leases: list[ModelLease], *, at_least: int, wait: bool) -> str:
        """One after the other, as long as each is granted; and all of it undone if those are too few."""
        first = leases[0]
        if first.pays and not any(want.kind is Kind.GPU for want in first.wants):
            return "error"
        if self._cannot_pay(first):
            return "refused quota"
        if any(want.exclusivity is Exclusivity.PARTITION for want in first.wants):
            return "refused unsupported"
        trial, count = deepcopy(self), 0
        while count < len(leases) and trial._grant(copy(leases[count])):
            count += 1
        if count >= at_least:
            for lease in leases[:count]:
                assert self._grant(lease)
            return f"granted {count}"
        if at_least == 1:
            return self.acquire(first, wait=wait)
        if self._over(first, self.quotas[first.tenant], held=[]) or self._above(first, []):
            return "refused quota"
        if self._place(first, first.wants, []) is None:
            return self._beyond(first)
        return "refused capacity" if trial._within(leases[count]) else "refused quota"

    def _within(self, lease: ModelLease) -> bool:
        over = self._over(lease, self.quotas[lease.tenant], self._held(lease.tenant))
        return not over and not self._above(lease, self.spots) and not self._spent(lease)

    def _grant(self, lease: ModelLease) -> bool:
        if not self._within(lease) or not self._enter(lease, lease.wants):
            return False
        self._activate(lease)
        return True

    def claim(self, lease: ModelLease) -> str:
        if lease.status == "granted":
            if self.now_ns >= lease.claim_by_ns:
                self._lapse(lease)
                self.settle()
                return "error"
            self._activate(lease)
        return "granted" if lease.status in ("active", "noticed") else "error"

    def _beyond(self, lease: ModelLease) -> str:
        alone = [want for want in lease.wants if self._place(lease, (want,), []) is None]
        names = [device.model.lower() for node in self._in_zone(lease) for device in node.devices]
        if alone and alone[0].model and not any(alone[0].model.lower() in name for name in names):
            return "refused unsupported"
        return "refused too_big"

    def decline(self, lease: ModelLease) -> str:
        if lease.status != "granted" or not lease.offered:
            return "error"
        if lease.beyond or (lease.wait_until_ns is not None and lease.wait_until_ns <= self.now_ns):
            self._end(lease)
        else:
            self._back(lease)
        self.settle()
        return "done"

    def renew(self, lease: ModelLease) -> str:
        if lease.status != "active" or self._spent(lease):
            return "error"
        self._draw(lease, self._millis(lease) if self._is_beyond(lease) else 0)
        lease.deadline_ns = max(lease.deadline_ns, self.now_ns + lease.ttl_ns)
        return "granted"

    def release(self, lease: ModelLease) -> str:
        if lease.status in ("queued", "granted", "active", "noticed"):
            self._end(lease)
        self.settle()
        return "done"

    def torn_down(self, lease: ModelLease, grant: int) -> None:
        self.spots = [
            s for s in self.spots if not (s.lease == lease.id and s.grant == grant and s.until_ns is not None)
        ]
        if lease.status == "ending" and not any(s.lease == lease.id and s.grant == lease.grant for s in self.spots):
            lease.status = "ended"
        self.settle()

    def tick(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self._budgets()
        for lease in self.leases:
            if lease.status == "noticed" and min(lease.take_at_ns or 0, lease.deadline_ns) <= now_ns:
                self._end(lease)
            elif lease.status == "queued" and lease.wait_until_ns is not None and lease.wait_until_ns <= now_ns:
                lease.status = "ended"
            elif lease.status == "queued" and lease.asked_ns + self.policy.priority_after_ns <= now_ns:
                lease.first = True
            elif lease.status == "granted" and lease.claim_by_ns <= now_ns:
                self._lapse(lease)
            elif lease.status == "active" and lease.deadline_ns <= now_ns:
                self._end(lease)
        self.settle()

    def positions(self) -> dict[str, int]:
        return {lease.id: index for index, lease in enumerate(self._line(), start=1)}

    def used_milli_ns(self, tenant: str) -> int:
        begin = self.now_ns - self.policy.usage_window_ns
        total = 0
        for spot in self.history:
            if spot.tenant == tenant:
                until_ns = self.now_ns if spot.until_ns is None else spot.until_ns
                total += spot.millis * max(0, until_ns - max(begin, spot.since_ns))
        return total

    # ---- burst credit ----

    def set_quota(self, tenant: str, quota: Quota) -> None:
        self.quotas[tenant] = quota
        self.past_quotas.append((self.now_ns, tenant, quota))
        self.settle()

    def credit(self, tenant: str) -> Fraction:
        """What is left, in thousandths of a device and nanoseconds: all, until something has drawn on it; then from the
        first time on again, moment by moment."""
        drawings = [one for one in self.drawings if one.tenant == tenant]
        if not drawings:
            return _bound(self.quotas[tenant])
        began_ns = drawings[0].since_ns
        past = [(at_ns, quota) for at_ns, whose, quota in self.past_quotas if whose == tenant]
        moments = {self.now_ns, *(at_ns for at_ns, _ in past)}
        moments.update(at_ns for one in drawings for at_ns in (one.since_ns, one.until_ns) if at_ns is not None)
        quota = [quota for at_ns, quota in past if at_ns <= began_ns][-1]
        left = _bound(quota)
        for at_ns, next_ns in itertools.pairwise(sorted(at_ns for at_ns in moments if at_ns >= began_ns)):
            for changed_ns, changed in past:
                quota = changed if changed_ns == at_ns else quota
                left = min(left, _bound(quota)) if changed_ns == at_ns else left
            rate = Fraction((quota.burst_refill_seconds or 0) * MILLIS_PER_DEVICE, 3600)
            rate -= sum(one.millis for one in drawings if one.goes_on_at(at_ns))
            left = max(Fraction(0), min(_bound(quota), left + rate * (next_ns - at_ns)))
        return min(left, _bound(self.quotas[tenant]))

    def _is_covered(self, lease: ModelLease) -> bool:
        """Whether the credit lasts for a time to live of this lease and of all that draws beside it."""
        drawn = sum(one.millis for one in self._drawing(lease.tenant) if one.lease != lease.id)
        needed = (drawn + self._millis(lease)) * lease.ttl_ns
        return bool(_bound(self.quotas[lease.tenant])) and needed <= self.credit(lease.tenant)

    def _drawing(self, tenant: str) -> list[Drawing]:
        return [one for one in self.drawings if one.tenant == tenant and one.until_ns is None]

    def _draw(self, lease: ModelLease, millis: int) -> None:
        for one in self._drawing(lease.tenant):
            if one.lease == lease.id:
                one.until_ns = self.now_ns
        if millis:
            self.drawings.append(Drawing(lease.id, lease.tenant, millis, self.now_ns))

    def _millis(self, lease: ModelLease) -> int:
        """What it has of devices, or asks for: a part is least of the largest device."""
        has = [spot.millis for spot in self.spots if (spot.lease, spot.grant) == (lease.id, lease.grant)]
        return sum(has) or sum(self._asked(lease))

    # ---- money ----

    def set_budget(self, whose: str, amount: int) -> None:
        since_ns = self.budgets[whose][1] if whose in self.budgets else self.now_ns
        self.budgets[whose] = (amount, since_ns)
        self.settle()

    def used(self, whose: str) -> Fraction:
        """Of a budget, in units of money: every slice that was ever taken, from the beginning again."""
        since_ns = self.budgets[whose][1]
        models = {str(device.id): device.model for node in self.nodes for device in node.devices}
        held: dict[tuple[Kind, bool, bool], int] = {}
        for spot in self.history:
            until_ns = self.now_ns if spot.until_ns is None else spot.until_ns
            if spot.pays_from_ns is None:
                continue
            if until_ns > since_ns and whose in self._payers(spot.tenant, spot.payer):
                what = spot.kind, models[spot.device] == "T4", spot.pays
                units = spot.millis if spot.kind is Kind.GPU else spot.amount
                held[what] = held.get(what, 0) + units * (until_ns - max(since_ns, spot.pays_from_ns))
        return sum((self._price(*what) * amount / (3600 * NS_PER_S) for what, amount in held.items()), Fraction(0))

    def _price(self, kind: Kind, is_t4: bool, pays: bool) -> Fraction:
        """For an hour: a device of this model 3.50, others 1, with priority 0.70 more; a core 0.02; a GiB of memory
        0.002."""
        if kind is Kind.GPU:
            return (Fraction("3.5" if is_t4 else "1") + (Fraction("0.7") if pays else 0)) / 1000
        return Fraction("0.02") if kind is Kind.CPU else Fraction("0.002") / GIB

    def _payers(self, tenant: str, group: str) -> tuple[str, str]:
        return f"tenant/{tenant}", f"group/{group}"

    def _is_used_up(self, whose: str) -> bool:
        return whose in self.budgets and self.used(whose) >= Fraction(self.budgets[whose][0], 1_000_000)

    def _cannot_pay(self, lease: ModelLease) -> bool:
        payers = self._payers(lease.tenant, lease.group or self.group_of(lease.tenant))
        return any(self._is_used_up(whose) for whose in payers)

    def _budgets(self) -> None:
        """Who cannot pay has notice, or goes at once where it has nothing yet; who can again stays."""
        broke = {whose for whose in self.budgets if self._is_used_up(whose)}
        for lease in self.leases if self.budgets else ():
            if lease.status in ("queued", "granted", "active", "noticed"):
                if not broke & set(self._payers(lease.tenant, lease.group or self.group_of(lease.tenant))):
                    if lease.status == "noticed":
                        lease.status, lease.take_at_ns = "active", None
                elif lease.status == "active":
                    lease.status, lease.take_at_ns = "noticed", self.now_ns + self.policy.notice_ns
                elif lease.status != "noticed":
                    self._end(lease)

    # ---- what follows ----

    def settle(self) -> None:
        """Everybody in order: whoever fits goes in; whoever was patient for too long keeps what it could use."""
        self._budgets()
        self.kept = []
        tried: set[str] = set()
        line = self._line()
        while line:
            lease = line.pop(0)
            tried.add(lease.id)
            if not self._within(lease):
                continue
            if self._enter(lease, lease.wants):
                lease.claim_by_ns = self.now_ns + self.policy.claim_window_ns
                if lease.beyond:
                    self._offer(lease)
                line = [other for other in self._line() if other.id not in tried]
            elif self.now_ns - lease.asked_ns >= self.policy.gang_patience_ns:
                for node in self._allowed(lease, lease.wants, self.spots):
                    if self._place_on(node, lease.tenant, lease.wants, []) is not None:
                        self.kept += [(node.node, want.kind, lease.tier, lease.id) for want in lease.wants]

    def _line(self) -> list[ModelLease]:
        """Tier, then priority, then the group with the smallest share, in it the tenant with the smallest share, then
        arrival."""

        return self._in_order([lease for lease in self.leases if lease.status == "queued"])

    def _in_order(self, waiting: list[ModelLease]) -> list[ModelLease]:
        groups = {tenant: self.group_of(tenant) for tenant in self.quotas}
        by_group = {group: self._share(self._of_group(group), group) for group in set(groups.values())}
        by_tenant = {tenant: self._share(self._of_tenant(tenant), tenant) for tenant in groups}
        return sorted(
            waiting,
            key=lambda x: (
                RANKS.index(x.tier),
                not x.first,
                by_group[groups[x.tenant]],
                groups[x.tenant],
                by_tenant[x.tenant],
                x.arrival,
            ),
        )

    def group_of(self, tenant: str) -> str:
        return self.groups.get(tenant, "default")

    def move(self, tenant: str, group: str) -> None:
        self.groups[tenant] = group
        for spot in self._held(tenant):
            spot.groups.append((self.now_ns, group))

    def _of_tenant(self, tenant: str) -> list[tuple[Spot, int, int | None]]:
        return [(spot, spot.since_ns, spot.until_ns) for spot in self.history if spot.tenant == tenant]

    def _of_group(self, group: str) -> list[tuple[Spot, int, int | None]]:
        found = []
        for spot in self.history:
            ends = [at for at, _ in spot.groups[1:]] + [spot.until_ns]
            found += [(spot, at, end) for (at, name), end in zip(spot.groups, ends, strict=True) if name == group]
        return found

    def _share(self, uses: list[tuple[Spot, int, int | None]], whose: str) -> int:
        """The largest of the shares: what was used per what there is and per weight, with the weight that time gives
        it. That rises in a straight line in each period, to twice what it was at its beginning; the sum is told in the
        unit of the present period, rounded down once."""
        half, now = self.policy.half_life_ns, self.now_ns
        best = 0
        for kind in (Kind.GPU, Kind.CPU, Kind.MEMORY):
            there = [d for node in self.nodes for d in node.devices if d.kind is kind]
            most = 1000 * len(there) if kind is Kind.GPU else sum(device.capacity for device in there)
            total = held = 0
            for spot, since, until in uses:
                if spot.kind is not kind:
                    continue
                level = spot.millis if kind is Kind.GPU else spot.amount
                total += level * (area(half, until or now) - area(half, since))
                held += level if until is None else 0
            ahead = held * self.policy.held_counts_as_ns * 2 * (half + now % half)
            best = max(best, ((total >> now // half) + ahead) // (most * self.weights.get(whose, 1)) if most else 0)
        return best

    def _held(self, tenant: str) -> list[Spot]:
        return [spot for spot in self.spots if spot.tenant == tenant and spot.until_ns is None]

    def _over(self, lease: ModelLease, quota: Quota, held: list[Spot]) -> bool:
        def amount(kind: Kind) -> int:
            asked = sum(want.amount for want in lease.wants if want.kind is kind)
            return asked and asked + sum(spot.amount for spot in held if spot.kind is kind)

        def beyond(asked: int, limit: int | None) -> bool:
            return limit is not None and asked > limit

        gpus = sum(want.count for want in lease.wants if want.kind is Kind.GPU)
        return (
            beyond(1 + len({spot.lease for spot in held}), quota.leases)
            or beyond(gpus and gpus + sum(spot.kind is Kind.GPU for spot in held), quota.gpus)
            or beyond(amount(Kind.CPU), quota.cores)
            or beyond(amount(Kind.MEMORY), quota.memory_bytes)
        )

    def _spent(self, lease: ModelLease) -> bool:
        return self._is_beyond(lease) and not self._is_covered(lease)

    def _is_beyond(self, lease: ModelLease) -> bool:
        limit = self.quotas[lease.tenant].gpu_seconds
        gpu = any(want.kind is Kind.GPU for want in lease.wants)
        return gpu and limit is not None and self.used_milli_ns(lease.tenant) >= limit * 1000 * NS_PER_S

    def _above(self, lease: ModelLease, taken: list[Spot]) -> bool:
        """Whether it is above the ceiling of its group wherever it goes."""
        asked = self._asked(lease)
        return bool(asked) and sum(asked) > self._left(lease, taken)

    def _asked(self, lease: ModelLease) -> list[int]:
        """Thousandths of a device, at least: a part is least of the largest device."""
        sizes = [device.capacity for node in self.nodes for device in node.devices if device.kind is Kind.GPU]
        return [
            MILLIS_PER_DEVICE if _alone(want) else max(1, want.amount * MILLIS_PER_DEVICE // max(sizes))
            for want in lease.wants
            for _ in range(want.count)
            if want.kind is Kind.GPU
        ]

    def _left(self, lease: ModelLease, taken: list[Spot]) -> float:
        """How much more its group may have."""
        group = self.group_of(lease.tenant)
        ours = [spot for spot in taken if spot.until_ns is None and self.group_of(spot.tenant) == group]
        return self.ceilings.get(group, math.inf) * MILLIS_PER_DEVICE - sum(spot.millis for spot in ours)

    def _allowed(self, lease: ModelLease, wants: Sequence[Want], taken: list[Spot]) -> list[Inventory]:
        """The nodes, without devices of which a part of this size is more than its group may have of each."""
        nodes = self._in_zone(lease)
        for want in wants:
            if want.exclusivity is Exclusivity.SHARED:

                def has_room(device: Device, want: Want = want) -> bool:
                    part = max(1, min(want.amount, device.capacity) * MILLIS_PER_DEVICE // device.capacity)
                    return device.kind is not Kind.GPU or part * want.count <= self._left(lease, taken)

                nodes = [dataclasses.replace(node, devices=tuple(filter(has_room, node.devices))) for node in nodes]
        return nodes

    def _enter(self, lease: ModelLease, wants: Sequence[Want], whole: Sequence[Want] = ()) -> bool:
        allowed = self._allowed(lease, whole or wants, self.spots)
        open_nodes = [node for node in allowed if self._may_use(lease, node)]
        spots = self._place(lease, wants, self.spots, open_nodes)
        if spots is None:
            return False
        if lease not in self.leases:
            self.leases.append(lease)
        is_beyond = self._is_beyond(lease)
        self.grants += 1
        lease.status, lease.grant = "granted", self.grants
        lease.group = lease.group or self.group_of(lease.tenant)
        for spot in spots:
            spot.grant, spot.payer, spot.pays = self.grants, lease.group, lease.pays
            spot.pays_from_ns = self.now_ns
        self.spots += spots
        self.history += spots
        if is_beyond:
            self._draw(lease, self._millis(lease))
        return True

    def _activate(self, lease: ModelLease) -> None:
        if lease.offered:
            self._bill_from(lease, self.now_ns)
        lease.status, lease.offered = "active", False
        lease.deadline_ns = self.now_ns + lease.ttl_ns

    def _bill_from(self, lease: ModelLease, at_ns: int | None) -> None:
        for spot in self.spots:
            if (spot.lease, spot.grant) == (lease.id, lease.grant):
                spot.pays_from_ns = at_ns

    def _offer(self, lease: ModelLease) -> None:
        self._bill_from(lease, None)
        lease.offered = True
        lease.claim_by_ns = self.now_ns + self.policy.offer_valid_ns

    def _lapse(self, lease: ModelLease) -> None:
        may_wait = not lease.beyond and (lease.wait_until_ns is None or lease.wait_until_ns > self.now_ns)
        if lease.offered and may_wait:
            self._back(lease)
        else:
            self._end(lease)

    def _back(self, lease: ModelLease) -> None:
        self._close(lease)
        lease.status, lease.offered, lease.grant = "queued", False, 0

    def _end(self, lease: ModelLease) -> None:
        self._close(lease)
        lease.status = "ended" if lease.status == "queued" else "ending"

    def _close(self, lease: ModelLease) -> None:
        self._draw(lease, 0)
        for spot in self.spots:
            if spot.lease == lease.id and spot.until_ns is None:
                spot.until_ns = self.now_ns

    def _may_use(self, lease: ModelLease, node: Inventory) -> bool:
        """Whether it may go there, or somebody patient of its own or a higher tier keeps what it wants."""
        for want in lease.wants:
            owners = [(tier, name) for at, kind, tier, name in self.kept if at == node.node and kind is want.kind]
            if owners:
                tier, name = owners[0]
                keeps_out = name != lease.id and RANKS.index(tier) <= RANKS.index(lease.tier)
                patient = next(one for one in self.leases if one.id == name)
                if keeps_out and self._in_order([patient, lease])[0] is patient:
                    return False
        return True

    # ---- placing ----

    def _place(
        self, lease: ModelLease, wants: Sequence[Want], taken: list[Spot], nodes: Sequence[Inventory] | None = None
    ) -> list[Spot] | None:
        for node in self._in_zone(lease) if nodes is None else nodes:
            spots = self._place_on(node, lease.tenant, wants, taken)
            if spots is not None:
                for spot in spots:
                    spot.lease = lease.id
                return spots
        return None

    def _in_zone(self, lease: ModelLease) -> list[Inventory]:
        return [node for node in self.nodes if lease.zone is None or node.labels.get("zone") == lease.zone]

    def _place_on(self, node: Inventory, tenant: str, wants: Sequence[Want], taken: list[Spot]) -> list[Spot] | None:
        found: list[Spot] = []
        for want in wants:
            for _ in range(want.count):
                fits = [
                    device
                    for device in node.devices
                    if device.id not in [spot.device for spot in found] and self._fits(want, tenant, device, taken)
                ]
                if not fits:
                    return None
                best = min(fits, key=lambda device: (*_tight(device, taken), device.id))
                alone = _alone(want)
                share = max(1, want.amount * MILLIS_PER_DEVICE // best.capacity)
                found.append(
                    Spot(
                        lease="",
                        tenant=tenant,
                        grant=0,
                        device=best.id,
                        kind=want.kind,
                        amount=best.capacity if alone else want.amount,
                        alone=alone,
                        millis=0 if want.kind is not Kind.GPU else MILLIS_PER_DEVICE if alone else share,
                        since_ns=self.now_ns,
                        groups=[(self.now_ns, self.group_of(tenant))],
                    )
                )
        return found

    def _fits(self, want: Want, tenant: str, device: Device, taken: list[Spot]) -> bool:
        here = [spot for spot in taken if spot.device == device.id]
        if device.kind is not want.kind or device.capacity - sum(spot.amount for spot in here) < want.amount:
            return False
        if want.kind is not Kind.GPU:
            return True
        if want.model is not None and want.model.lower() not in device.model.lower():
            return False
        if _alone(want):
            return not here
        return all(not spot.alone and spot.tenant == tenant for spot in here)

    def _smaller(self, lease: ModelLease, taken: list[Spot], nodes: Sequence[Inventory]) -> tuple[Want, ...] | None:
        """Every combination of sizes is tried on every node, and the largest that fits is taken."""
        found: list[tuple[Want, ...]] = []
        for node in nodes:
            free = [d.capacity - sum(s.amount for s in taken if s.device == d.id) for d in node.devices]
            sizes = [
                [want.amount] + [size for size in free if want.least is not None and want.least <= size < want.amount]
                for want in lease.wants
            ]
            for amounts in itertools.product(*sizes):
                less = tuple(replace(want, amount=a) for want, a in zip(lease.wants, amounts, strict=True))
                if self._place_on(node, lease.tenant, less, taken) is not None:
                    found.append(less)
        return max(found, key=lambda less: [want.amount for want in less], default=None)


def _bound(quota: Quota) -> Fraction:
    """Of the burst credit, in thousandths of a device and nanoseconds."""
    return Fraction((quota.burst_seconds or 0) * MILLIS_PER_DEVICE * NS_PER_S)


def _alone(want: Want) -> bool:
    return want.kind is Kind.GPU and want.exclusivity is not Exclusivity.SHARED


def _tight(device: Device, taken: list[Spot]) -> tuple[bool, int]:
    here = [spot for spot in taken if spot.device == device.id]
    return not here, device.capacity - sum(spot.amount for spot in here)


def area(half: int, at: int) -> int:
    """Twice the area beneath the weight of time up to ``at``, where that begins with 1 and doubles in each period."""
    period, into = divmod(at, half)
    return 3 * half * half * ((1 << period) - 1) + (into * (2 * half + into) << period)
