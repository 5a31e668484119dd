"""What the studio says of a session, in words."""

from __future__ import annotations

import pytest

from sublet.studio.views import the_bill


@pytest.mark.parametrize(
    ("cost", "text"), [(0.0, ""), (0.0123, ", 0.0123 EUR"), (2.5, ", 2.5000 EUR"), (123456.5, ", 123456.5000 EUR")]
)
def test_the_bill_of_a_session_writes_its_cost_like_every_other_bill(cost: float, text: str) -> None:
    line = {"cost": cost, "currency": "EUR", "gpu_seconds": 60, "busy_seconds": 30, "leases": 1, "waited_seconds": 2}
    assert the_bill(line) == f"1 lease, 1m of GPU, 30s busy, 2s in the queue{text}"
