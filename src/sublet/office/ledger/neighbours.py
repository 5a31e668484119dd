"""Noisy neighbours: tenants that disturb others, each named by a rule that is printed with it.

The rules look at what the audit chain tells, like a bill, and at weights as they are now. A tenant waits from a request
to its grant; requests that were never granted are not in the chain of what was held, and do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from fractions import Fraction
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.bills import Charge, Usage
from sublet.values import MILLIS_PER_DEVICE, NS_PER_S, GroupId, Kind, TenantId, format_duration

CROWDED_NS: Final = 60 * NS_PER_S
"""For so long others must have waited before use is judged."""
TIMES: Final = 2
"""The part of use, in entitlements, from which on a tenant is named."""
FAILURES: Final = 100
FAILED_PART: Final = 10
"""One in so many launches failed."""
CHURN_LEASES: Final = 100
CHURN_HELD_NS: Final = 10 * NS_PER_S

RULES: Final[Mapping[str, str]] = {
    "use": (
        f"had at least {TIMES} times its entitlement of the GPU time that was leased while other tenants waited for "
        f"GPUs, for {format_duration(CROWDED_NS)} or longer in all; the entitlement is its part by weight, of the "
        "groups and tenants that had GPUs or waited for some then"
    ),
    "failures": f"had {FAILURES} or more failed operations on devices, one in {FAILED_PART} of its launches or more",
    "churn": (
        f"had {CHURN_LEASES} or more leases with GPUs that ended, and held them for less than "
        f"{format_duration(CHURN_HELD_NS)} on average"
    ),
}
"""By name, what a tenant did that is named by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyTenant:
    """A tenant and one rule by which it is noisy."""

    tenant: TenantId
    rule: str
    says: str
    figures: Mapping[str, float]


@dataclass(slots=True)
class _Counts:
    launches: int = 0
    failures: int = 0
    ended: int = 0
    ended_held_ns: int = 0


@dataclass(slots=True)
class _Crowd:
    """What tenants had while others waited, gathered in one walk through time."""

    held: defaultdict[TenantId, int] = field(default_factory=lambda: defaultdict(int))
    """Thousandths of devices now."""
    waiting: defaultdict[TenantId, int] = field(default_factory=lambda: defaultdict(int))
    """Requests now."""
    total: int = 0
    """Thousandths of devices that all have now."""
    crowded_ns: int = 0
    """For how long any tenant waited so far."""
    all_use: int = 0
    """Thousandths × nanoseconds that all had meanwhile."""
    use: defaultdict[TenantId, int] = field(default_factory=lambda: defaultdict(int))
    since_ns: dict[TenantId, int] = field(default_factory=dict)
    """``crowded_ns`` up to which ``use`` of a tenant is counted."""
    alone_ns: defaultdict[TenantId, int] = field(default_factory=lambda: defaultdict(int))
    """For how long it waited and no other tenant did."""
    alone_use: defaultdict[TenantId, int] = field(default_factory=lambda: defaultdict(int))
    alone_all: defaultdict[TenantId, int] = field(default_factory=lambda: defaultdict(int))
    """What it had, and what all had, meanwhile."""
    present: set[TenantId] = field(default_factory=set)
    """The tenants that had something, or waited, while any tenant waited."""

    def advance(self, length_ns: int) -> None:
        if not self.waiting or not length_ns:
            return
        self.crowded_ns += length_ns
        self.all_use += self.total * length_ns
        self.present.update(self.waiting)
        if len(self.waiting) == 1:
            [tenant] = self.waiting
            self.alone_ns[tenant] += length_ns
            self.alone_use[tenant] += self.held[tenant] * length_ns
            self.alone_all[tenant] += self.total * length_ns

    def holds(self, tenant: TenantId, millis: int) -> None:
        self._count(tenant)
        self.held[tenant] += millis
        self.total += millis

    def waits(self, tenant: TenantId, requests: int) -> None:
        self.waiting[tenant] += requests
        if not self.waiting[tenant]:
            del self.waiting[tenant]

    def end(self) -> None:
        for tenant in list(self.held):
            self._count(tenant)

    def _count(self, tenant: TenantId) -> None:
        length_ns = self.crowded_ns - self.since_ns.get(tenant, 0)
        self.since_ns[tenant] = self.crowded_ns
        if length_ns and self.held[tenant]:
            self.use[tenant] += self.held[tenant] * length_ns
            self.present.add(tenant)


def noisy(
    usages: Iterable[Usage],
    *,
    group_of: Callable[[TenantId], GroupId],
    weight_of_tenant: Callable[[TenantId], int],
    weight_of_group: Callable[[GroupId], int],
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> list[NoisyTenant]:
    """The noisy neighbours of a window of wall time, by rule and name."""
    counts: defaultdict[TenantId, _Counts] = defaultdict(_Counts)
    steps: list[tuple[int, int, TenantId, int]] = []

    def between(what: int, tenant: TenantId, low_ns: int, high_ns: int, amount: int) -> None:
        low_ns = low_ns if since_ns is None else max(low_ns, since_ns)
        high_ns = high_ns if until_ns is None else min(high_ns, until_ns)
        if low_ns < high_ns:
            steps.append((low_ns, what, tenant, amount))
            steps.append((high_ns, what, tenant, -amount))

    for usage in usages:
        held_ns = sum(holding.held_ns for holding in usage.holdings)
        millis = [_millis(holding.charges) for holding in usage.holdings]
        if not any(millis):
            continue
        first, last = usage.holdings[0], usage.holdings[-1]
        between(_WAITS, usage.tenant, first.wall_ns - usage.waited_ns, first.wall_ns, 1)
        for holding, part in zip(usage.holdings, millis, strict=True):
            between(_HOLDS, usage.tenant, holding.wall_ns, holding.wall_ns + holding.held_ns, part)
        ended_ns = last.wall_ns + last.held_ns
        is_inside = (since_ns is None or since_ns <= ended_ns) and (until_ns is None or ended_ns < until_ns)
        if usage.end is not None and is_inside:
            found = counts[usage.tenant]
            found.ended += 1
            found.ended_held_ns += held_ns
            if usage.counts is not None:
                found.launches += usage.counts.launches
                found.failures += usage.counts.failures
    named = _by_use(_walk(steps), group_of, weight_of_tenant, weight_of_group)
    for tenant in sorted(counts):
        named += _by_counts(tenant, counts[tenant])
    return sorted(named, key=lambda one: (list(RULES).index(one.rule), one.tenant))


_HOLDS, _WAITS = 0, 1


def _millis(charges: Iterable[Charge]) -> int:
    return sum(charge.units for charge in charges if charge.kind is Kind.GPU)


def _walk(steps: list[tuple[int, int, TenantId, int]]) -> _Crowd:
    crowd = _Crowd()
    steps.sort()
    at_ns = steps[0][0] if steps else 0
    for until_ns, what, tenant, amount in steps:
        crowd.advance(until_ns - at_ns)
        at_ns = until_ns
        if what == _HOLDS:
            crowd.holds(tenant, amount)
        else:
            crowd.waits(tenant, amount)
    crowd.end()
    return crowd


def _by_use(
    crowd: _Crowd,
    group_of: Callable[[TenantId], GroupId],
    weight_of_tenant: Callable[[TenantId], int],
    weight_of_group: Callable[[GroupId], int],
) -> list[NoisyTenant]:
    groups: defaultdict[GroupId, int] = defaultdict(int)
    """The weights of its tenants together."""
    for tenant in crowd.present:
        groups[group_of(tenant)] += weight_of_tenant(tenant)
    all_groups = sum(map(weight_of_group, groups))
    found = []
    for tenant in sorted(crowd.present):
        others_ns = crowd.crowded_ns - crowd.alone_ns[tenant]
        all_use = crowd.all_use - crowd.alone_all[tenant]
        if others_ns < CROWDED_NS or not all_use:
            continue
        group = group_of(tenant)
        entitled = Fraction(weight_of_group(group), all_groups) * Fraction(weight_of_tenant(tenant), groups[group])
        use = crowd.use[tenant] - crowd.alone_use[tenant]
        part = Fraction(use, all_use)
        if part >= TIMES * entitled:
            says = (
                f"{float(part):.0%} of the GPU time, entitled to {float(entitled):.0%}, in the "
                f"{format_duration(others_ns // NS_PER_S * NS_PER_S)} in which others waited"
            )
            figures = {
                "part": float(part),
                "entitlement": float(entitled),
                "others_waited_seconds": others_ns / NS_PER_S,
                "gpu_seconds": use / MILLIS_PER_DEVICE / NS_PER_S,
            }
            found.append(NoisyTenant(tenant=tenant, rule="use", says=says, figures=figures))
    return found


def _by_counts(tenant: TenantId, counts: _Counts) -> Iterable[NoisyTenant]:
    if counts.failures >= FAILURES and counts.failures * FAILED_PART >= counts.launches:
        yield NoisyTenant(
            tenant=tenant,
            rule="failures",
            says=f"{counts.failures:,} operations failed, of {counts.launches:,} launches",
            figures={"failures": float(counts.failures), "launches": float(counts.launches)},
        )
    if counts.ended >= CHURN_LEASES and counts.ended_held_ns < counts.ended * CHURN_HELD_NS:
        mean_s = counts.ended_held_ns / counts.ended / NS_PER_S
        yield NoisyTenant(
            tenant=tenant,
            rule="churn",
            says=f"{counts.ended:,} leases with GPUs ended, held for {mean_s:.1f} s on average",
            figures={"leases": float(counts.ended), "mean_held_seconds": mean_s},
        )
