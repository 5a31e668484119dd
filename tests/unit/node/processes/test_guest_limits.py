"""Ended guests and logs, by tenant: nobody pushes out what others have."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from sublet.errors import CapacityExceeded, QuotaExceeded
from sublet.node.processes.guest_limits import (
    ENDED_MAX,
    ENDED_PER_TENANT_MAX,
    GUESTS_MAX,
    GUESTS_PER_TENANT_MAX,
    LOGS_PER_TENANT_BYTES,
    EndedGuests,
    GuestRoom,
)
from sublet.node.processes.logs import LOG_BOUND_BYTES
from sublet.values import GuestId, TenantId

A, B = TenantId("a"), TenantId("b")


class Running(NamedTuple):
    tenant: TenantId


def ids(name: str, count: int) -> list[GuestId]:
    return [GuestId(f"{name}{n}") for n in range(count)]


def test_very_many_of_one_tenant_push_out_their_own_only() -> None:
    kept = EndedGuests()
    assert not [gone for one in ids("b", 10) for gone in kept.add(B, one, 0)]
    gone = [gone for one in ids("a", 2000) for gone in kept.add(A, one, 0)]
    assert gone == ids("a", 2000 - ENDED_PER_TENANT_MAX)


def test_very_many_tenants_push_out_those_who_have_most() -> None:
    kept = EndedGuests()
    for one in ids("b", 3):
        kept.add(B, one, 0)
    gone = [
        gone
        for tenant in range(ENDED_MAX // 100 + 5)
        for one in ids(f"t{tenant}-", 100)
        for gone in kept.add(TenantId(f"t{tenant}"), one, 0)
    ]
    assert gone
    assert not [one for one in gone if one.startswith("b")]


def test_large_logs_of_ended_guests_go_with_them() -> None:
    kept = EndedGuests()
    gone = [gone for one in ids("a", 40) for gone in kept.add(A, one, LOG_BOUND_BYTES)]
    assert gone == ids("a", 40 - LOGS_PER_TENANT_BYTES // 2 // LOG_BOUND_BYTES)
    assert not kept.add(B, GuestId("b"), 10 * LOGS_PER_TENANT_BYTES), "the last one stays, whatever it is"


def test_logs_get_smaller_for_who_has_very_many_and_stay_within_the_bound() -> None:
    kept = EndedGuests()
    for one in ids("a", 40):
        kept.add(A, one, LOG_BOUND_BYTES)
    bounds: list[int] = []
    for _ in range(GUESTS_PER_TENANT_MAX):
        bounds.append(kept.log_bound(A, bounds))
    assert bounds[0] == LOG_BOUND_BYTES
    assert bounds == sorted(bounds, reverse=True)
    ended = LOGS_PER_TENANT_BYTES // 2
    least = GUESTS_PER_TENANT_MAX * bounds[-1]
    assert sum(bounds) + ended <= LOGS_PER_TENANT_BYTES + least
    assert kept.log_bound(B, ()) == LOG_BOUND_BYTES, "nobody else's matter"


def test_there_may_be_so_many_and_no_more() -> None:
    room = GuestRoom()
    room.check(A, [Running(A)] * (GUESTS_PER_TENANT_MAX - 1))
    with pytest.raises(QuotaExceeded):
        room.check(A, [Running(A)] * GUESTS_PER_TENANT_MAX)
    room.check(B, [Running(A)] * GUESTS_PER_TENANT_MAX)
    with pytest.raises(CapacityExceeded):
        room.check(B, [Running(A)] * GUESTS_MAX)
