"""Whom to warn and when, against a second account that is too simple to be wrong."""

from __future__ import annotations

import random

import pytest

from sublet.lease.expiring import Expiring
from sublet.lease.policy import RenewalPolicy, grace_ns
from sublet.values import NS_PER_S, LeaseId


@pytest.mark.parametrize(("ttl_s", "grace_s"), [(0, 0), (2, 0.2), (50, 5), (300, 5), (1e9, 5)])
def test_the_grace_is_a_tenth_and_at_most_five_seconds(ttl_s: float, grace_s: float) -> None:
    assert grace_ns(round(ttl_s * NS_PER_S)) == round(grace_s * NS_PER_S)


@pytest.mark.parametrize("seed", range(40))
def test_it_warns_and_spares_exactly_whom_a_simple_account_does(seed: int) -> None:
    """Each instant, every lease whose warning is due and was not given; spared when the moment moves ahead again. Half
    of the lead before that, the office is asked for it."""
    draw = random.Random(seed)
    expiring, now_ns = Expiring(), 0
    moments: dict[LeaseId, tuple[int, int, int, int]] = {}
    saves: dict[LeaseId, int] = {}
    warned: set[LeaseId] = set()
    asked: set[LeaseId] = set()

    def ask_at(lease: LeaseId) -> int:
        return warn_at(lease) - (moments[lease][0] - warn_at(lease)) // 2

    def warn_at(lease: LeaseId) -> int:
        deadline_ns, ttl_ns, save_ns, heeded_ns = moments[lease]
        most_ns = max(ttl_ns * 15 // 100, heeded_ns)
        return deadline_ns - max(grace_ns(ttl_ns), min(most_ns, save_ns * 3 // 2))

    for _ in range(400):
        lease = LeaseId(f"l{draw.randrange(6)}")
        match draw.randrange(5):
            case 0 | 1:
                ttl_ns = draw.randrange(1, 100)
                deadline_ns = now_ns + ttl_ns
                heeded_ns = draw.choice((0, draw.randrange(1, 60)))
                moments[lease] = (deadline_ns, ttl_ns, saves.get(lease, 0), heeded_ns)
                spared = lease in warned and warn_at(lease) > now_ns
                assert expiring.moved(lease, deadline_ns, ttl_ns, now_ns, heeded_ns=heeded_ns) is spared
                if spared or lease not in warned:
                    warned -= {lease}
                    asked -= {lease} if ask_at(lease) > now_ns else set()
            case 2:
                save_ns = draw.randrange(60)
                if lease in moments:
                    saves[lease] = save_ns
                expiring.saved(lease, save_ns)
                assert expiring.save_ns(lease) == saves.get(lease, 0)
            case 3 if draw.random() < 0.3:
                expiring.drop(lease)
                moments.pop(lease, None)
                saves.pop(lease, None)
                warned.discard(lease)
                asked.discard(lease)
            case _:
                now_ns += draw.randrange(30)
                due = {name for name in moments if name not in warned and warn_at(name) <= now_ns}
                ask = {name for name in moments if name not in asked and ask_at(name) <= now_ns}
                found_to_ask, found = expiring.due(now_ns)
                assert (sorted(found_to_ask), sorted(found)) == (sorted(ask), sorted(due))
                warned |= due
                asked |= ask
        waiting = [warn_at(name) if name in asked else ask_at(name) for name in moments if name not in warned]
        assert expiring.next_ns() == min(waiting, default=None)
        assert {name for name in moments if name in expiring} == warned
        assert {name for name in moments if expiring.is_requested(name)} == asked


@pytest.mark.parametrize("save_s", [0, 1, 20, 60, 500])
@pytest.mark.parametrize("heeds", [False, True])
def test_no_renewal_in_time_comes_too_late_for_the_warning(save_s: int, heeds: bool) -> None:
    """Neither of a holder who knows how long saving takes and plans for it, nor of one who does not, or not yet."""
    expiring, lease, policy = Expiring(), LeaseId("l"), RenewalPolicy()
    least_ns, now_ns, lead = 300 * NS_PER_S, 0, 0
    ttl_ns = least_ns
    expiring.moved(lease, ttl_ns, ttl_ns, 0)
    for renewal in range(6):
        expiring.saved(lease, save_s * NS_PER_S)
        now_ns += policy.plan(ttl_ns, lease, lead).due_ns
        assert not expiring.due(now_ns - 1)[1], f"warned before renewal {renewal}"
        ttl_ns = max(least_ns, policy.ttl_for_ns(lead))
        expiring.moved(lease, now_ns + ttl_ns, ttl_ns, now_ns, heeded_ns=lead)
        lead = policy.lead_of(expiring.save_ns(lease), least_ns) if heeds else 0
    if heeds:
        expiring.due(expiring.next_ns() or 0)  # the office is asked first
        assert now_ns + ttl_ns - (expiring.next_ns() or 0) >= save_s * NS_PER_S, "and there is time to save"


def test_a_lease_that_is_renewed_for_ever_costs_no_memory() -> None:
    """Moments that were moved since are thrown away."""
    expiring = Expiring()
    for second in range(10_000):
        expiring.moved(LeaseId("a"), second + 100, 100, second)
    assert len(expiring._moments) < 200
