"""How much each user may ask over the shared socket, and that who asks is written down once."""

from __future__ import annotations

import logging

import pytest

from sublet.errors import CapacityExceeded, Unauthorized
from sublet.office.access import Origin
from sublet.office.shared_socket import KEYS_MAX, SharedLimits, SharedSocket, TokenBuckets
from sublet.values import NS_PER_S, TenantId

ANA, BEN = Origin(shared=True, uid=1001, pid=7), Origin(shared=True, uid=1002, pid=8)
LAB = TenantId("lab")
LIMITS = SharedLimits(requests_per_minute_of_user=60)


def taken(shared: SharedSocket, origin: Origin, now_s: float, most: int = 1000) -> int:
    """How many requests of this user get through at this moment."""
    for count in range(most):
        try:
            shared.on_request(origin, round(now_s * NS_PER_S))
        except CapacityExceeded:
            return count
    return most


def test_a_user_has_so_many_at_once_and_then_so_many_a_minute() -> None:
    shared = SharedSocket(LIMITS)
    assert taken(shared, ANA, 100) == 60
    assert taken(shared, ANA, 101) == 1
    assert taken(shared, BEN, 101) == 60, "another user is not held up"
    assert taken(shared, ANA, 111) == 10
    assert taken(shared, ANA, 3600) == 60, "what was not used is not saved up beyond that"
    assert SharedLimits().burst == 1000


def test_what_is_refused_takes_nothing_and_says_when_there_is_more() -> None:
    buckets = TokenBuckets(60, 1)
    assert buckets.take("a", 0) == 0
    waits = [buckets.take("a", 0) for _ in range(100)]
    assert waits == [1.0] * 100
    assert buckets.take("a", NS_PER_S) == 0


def test_only_so_many_are_counted_at_once() -> None:
    buckets = TokenBuckets(60, 1)
    for key in range(10 * KEYS_MAX):
        assert buckets.take(key, 0) == 0
    assert len(buckets._full_at_ns) == KEYS_MAX


def test_who_asks_is_logged_once_per_process_and_within_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedSocket(SharedLimits(log_lines_per_minute_of_user=5))
    with caplog.at_level(logging.INFO, "sublet.shared"):
        for _ in range(3):
            shared.known(ANA, LAB, 0)
            shared.refused(BEN, Unauthorized("there was none"), 0)
        assert [record.getMessage() for record in caplog.records] == [
            "shared socket: uid 1001, pid 7 asks as tenant lab",
            "shared socket: uid 1002, pid 8 was refused: there was none",
        ]
        caplog.clear()
        for pid in range(100, 200):
            shared.refused(BEN._replace(pid=pid), Unauthorized("no"), 0)
    assert len(caplog.records) == 4, "one was written before"
