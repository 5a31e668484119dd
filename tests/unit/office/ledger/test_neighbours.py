"""Noisy neighbours: who is named by which rule, compared with a count of every second."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction

import pytest

from sublet.office.ledger.bills import Charge, Holding, Usage
from sublet.office.ledger.neighbours import CHURN_LEASES, RULES, NoisyTenant, noisy
from sublet.values import NS_PER_S, GroupId, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Metered


def held(
    tenant: str, asked_s: int, start_s: int, stop_s: int, millis: int = 1000, counts: Metered | None = None
) -> Usage:
    charge = Charge(resource=ResourceId("n/gpu0"), kind=Kind.GPU, units=millis)
    holding = Holding(
        start_ns=start_s * NS_PER_S, stop_ns=stop_s * NS_PER_S, wall_ns=start_s * NS_PER_S, charges=(charge,)
    )
    return Usage(
        lease=LeaseId(f"{tenant}-{asked_s}"),
        tenant=TenantId(tenant),
        holdings=(holding,),
        waited_ns=(start_s - asked_s) * NS_PER_S,
        end="released",
        counts=counts,
    )


def named(usages: list[Usage], weights: dict[str, int] | None = None, **window: int) -> list[NoisyTenant]:
    """The course is ann and cleo, the lab ben; both weigh the same."""
    return noisy(
        usages,
        group_of=lambda tenant: GroupId("lab" if tenant == "ben" else "course"),
        weight_of_tenant=lambda tenant: (weights or {}).get(tenant, 1),
        weight_of_group=lambda group: (weights or {}).get(group, 1),
        **{name: at_s * NS_PER_S for name, at_s in window.items()},
    )


def test_who_holds_all_while_others_wait_is_named_with_numbers() -> None:
    """Ann and Ben are entitled to a half each. Ann held the one GPU for all of the hour in which Ben waited."""
    (one,) = named([held("ann", 0, 0, 4000), held("ben", 400, 4000, 4100)])
    assert (one.tenant, one.rule) == ("ann", "use")
    assert one.says == "100% of the GPU time, entitled to 50%, in the 1h in which others waited"
    assert one.figures == {"part": 1.0, "entitlement": 0.5, "others_waited_seconds": 3600.0, "gpu_seconds": 3600.0}
    assert "at least 2 times its entitlement" in RULES["use"]


@pytest.mark.parametrize(
    "usages",
    [
        [held("ann", 0, 0, 4000)],
        [held("ann", 0, 0, 4000), held("ben", 3950, 4000, 4100)],
        [held("ann", 0, 0, 4000), held("ann", 100, 4000, 4100)],
        [held(tenant, at_s, start_s, 4000) for tenant in ("ann", "ben") for at_s, start_s in ((0, 0), (100, 3900))],
    ],
    ids=["no tenant waits", "for 50 s", "it waits itself", "each has its half"],
)
def test_use_alone_names_no_tenant(usages: list[Usage]) -> None:
    assert named(usages) == []


def test_weights_and_the_window_count() -> None:
    """With nine times the weight the same use is what Ann is entitled to; outside of the window no tenant waited."""
    usages = [held("ann", 0, 0, 4000), held("ben", 400, 4000, 4100)]
    assert named(usages, {"course": 9}) == []
    assert named(usages, until_ns=400) == []
    (one,) = named(usages, since_ns=1000, until_ns=2000)
    assert one.figures["gpu_seconds"] == 1000


@pytest.mark.parametrize("seed", range(20))
def test_use_is_what_a_count_of_every_second_comes_to(seed: int) -> None:
    """Entitlements of one part in fifty, so that each tenant whose others waited is named, with its numbers."""
    rng, tenants = random.Random(seed), ("ann", "ben", "cleo")
    usages = []
    for _ in range(rng.choice((3, 8, 20))):
        asked = rng.randrange(300)
        start = asked + rng.choice((0, rng.randrange(200)))
        stop = start + rng.randrange(1, 300)
        usages.append(held(rng.choice(tenants), asked, start, stop, rng.choice((250, 1000, 4000))))
    low, high = rng.choice(((0, 900), (50, 400)))
    use: dict[str, int] = defaultdict(int)
    all_use: dict[str, int] = defaultdict(int)
    others_s: dict[str, int] = defaultdict(int)
    for second in range(low, high):
        waiting = {one.tenant for one in usages if _from(one) <= second < _start(one)}
        having = [one for one in usages if _start(one) <= second < _start(one) + one.holdings[0].held_ns // NS_PER_S]
        for tenant in tenants:
            if waiting - {tenant}:
                others_s[tenant] += 1
                all_use[tenant] += sum(one.holdings[0].charges[0].units for one in having)
                use[tenant] += sum(one.holdings[0].charges[0].units for one in having if one.tenant == tenant)
    found = {one.tenant: one.figures for one in named(usages, since_ns=low, until_ns=high)}
    for tenant in tenants:
        if tenant in found:
            figures = found[TenantId(tenant)]
            assert figures["others_waited_seconds"] == others_s[tenant] >= 60
            assert figures["gpu_seconds"] == use[tenant] / 1000
            assert figures["part"] == float(Fraction(use[tenant], all_use[tenant])) >= 2 * figures["entitlement"]
        elif others_s[tenant] >= 60 and all_use[tenant]:
            assert Fraction(use[tenant], all_use[tenant]) < 1, "who has all is entitled to a half at the most"


def _start(usage: Usage) -> int:
    return usage.holdings[0].wall_ns // NS_PER_S


def _from(usage: Usage) -> int:
    return _start(usage) - usage.waited_ns // NS_PER_S


def test_failed_launches_and_churn_are_named() -> None:
    bad = Metered(vram_byte_seconds=0, launches=1000, failures=100, bytes_in=0, bytes_out=0, fuel=0)
    few = Metered(vram_byte_seconds=0, launches=1001, failures=100, bytes_in=0, bytes_out=0, fuel=0)
    churn = [held("cleo", n * 20, n * 20, n * 20 + 9) for n in range(CHURN_LEASES)]
    found = named([held("ann", 0, 0, 10, counts=bad), held("ben", 0, 0, 10, counts=few), *churn])
    assert [(one.tenant, one.rule) for one in found] == [("ann", "failures"), ("cleo", "churn")]
    assert found[0].says == "100 operations failed, of 1,000 launches"
    assert found[1].says == "100 leases with GPUs ended, held for 9.0 s on average"
    assert named(churn[1:]) == []
    assert named(churn, since_ns=500) == [], "of those that ended in the window"
