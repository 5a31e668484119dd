"""Whom to warn and when, against a second account that is too simple to be wrong."""

from __future__ import annotations

import random

import pytest

from sublet.lease.expiring import Expiring, grace_ns
from sublet.values import NS_PER_S, LeaseId


@pytest.mark.parametrize(("ttl_s", "grace_s"), [(0, 0), (2, 0.2), (50, 5), (300, 5), (1e9, 5)])
def test_the_grace_is_a_tenth_and_at_most_five_seconds(ttl_s: float, grace_s: float) -> None:
    assert grace_ns(round(ttl_s * NS_PER_S)) == round(grace_s * NS_PER_S)


@pytest.mark.parametrize("seed", range(40))
def test_it_warns_and_spares_exactly_whom_a_simple_account_does(seed: int) -> None:
    """Each instant, every lease whose warning is due and was not given; spared when the moment moves ahead again."""
    draw = random.Random(seed)
    expiring, now_ns = Expiring(), 0
    moments: dict[LeaseId, tuple[int, int, int]] = {}
    warned: set[LeaseId] = set()

    def warn_at(lease: LeaseId) -> int:
        deadline_ns, ttl_ns, save_ns = moments[lease]
        return deadline_ns - max(grace_ns(ttl_ns), save_ns * 3 // 2)

    for _ in range(400):
        lease = LeaseId(f"l{draw.randrange(6)}")
        match draw.randrange(5):
            case 0 | 1:
                ttl_ns = draw.randrange(1, 100)
                deadline_ns = now_ns + ttl_ns
                moments[lease] = (deadline_ns, ttl_ns, moments.get(lease, (0, 0, 0))[2])
                spared = lease in warned and warn_at(lease) > now_ns
                assert expiring.moved(lease, deadline_ns, ttl_ns, now_ns) is spared
                warned -= {lease} if spared else set()
            case 2:
                save_ns = draw.randrange(60)
                spared = False
                if lease in moments:
                    moments[lease] = (*moments[lease][:2], save_ns)
                    spared = lease in warned and warn_at(lease) > now_ns
                assert expiring.saved(lease, save_ns, now_ns) is spared
                warned -= {lease} if spared else set()
            case 3 if draw.random() < 0.3:
                expiring.drop(lease)
                moments.pop(lease, None)
                warned.discard(lease)
            case _:
                now_ns += draw.randrange(30)
                due = {name for name in moments if name not in warned and warn_at(name) <= now_ns}
                found = expiring.due(now_ns)
                assert sorted(found) == sorted(due)
                warned |= due
        waiting = [warn_at(name) for name in moments if name not in warned]
        assert expiring.next_ns() == min(waiting, default=None)
        assert {name for name in moments if name in expiring} == warned


def test_a_lease_that_is_renewed_for_ever_costs_no_memory() -> None:
    """Moments that were moved since are thrown away."""
    expiring = Expiring()
    for second in range(10_000):
        expiring.moved(LeaseId("a"), second + 100, 100, second)
    assert len(expiring._moments) < 200
