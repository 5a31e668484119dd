"""What the studio says of a session, in words."""

from __future__ import annotations

import pytest
from msgspec import to_builtins

from sublet.studio.views import the_bill
from sublet.wire.http import BillLine

LINE = BillLine(
    key="s-1",
    tenant="ana",
    leases=1,
    held_seconds=60,
    busy_seconds=30,
    gpu_seconds=60,
    core_seconds=0,
    memory_byte_seconds=0,
    block_byte_seconds=0,
    cost=0.0,
    currency="EUR",
    waited_seconds=2,
)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, ""),
        ({"cost": 0.0123}, ", 0.0123 EUR"),
        ({"cost": 2.5}, ", 2.5000 EUR"),
        ({"cost": 123456.5}, ", 123456.5000 EUR"),
        ({"launches": 7}, ", 7 launches"),
        ({"launches": 7, "launch_errors": 2}, ", 7 launches (2 failed)"),
        ({"saves": 2, "bytes_saved": 3 << 20}, ", 3MiB saved"),
        ({"ended": {"preempted": 1, "released": 4}}, ", given up to others once"),
        ({"ended": {"preempted": 2, "fair_share": 1}}, ", given up to others 3 times"),
    ],
)
def test_the_bill_of_a_session_says_what_it_consumed_and_how_often_it_gave_up(
    more: dict[str, object], text: str
) -> None:
    line = {**to_builtins(LINE), **more}
    assert the_bill(line) == f"1 lease, 1m of GPU, 30s busy, 2s in the queue{text}"
