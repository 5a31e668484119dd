"""One line per lease, with what is worth knowing at a glance."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.cli.lease import _GOES_FIRST, _ahead, listing
from sublet.cli.show import Json
from sublet.office.ledger.explain import Because

PART = {"resource": "local/gpu0", "kind": "gpu", "amount": 1 << 30, "model": "", "host": True, "exclusivity": "shared"}
LEASE: Json = {
    "id": "l-1",
    "tenant": "ana",
    "status": "active",
    "name": None,
    "tier": "interactive",
    "wants": [{"kind": "gpu", "amount": 2 << 30, "count": 1}],
    "parts": [PART],
    "remaining": 61.0,
    "idle": False,
    "notice": None,
    "end": None,
}


def line(**changes: Any) -> str:
    return listing([LEASE | changes]).splitlines()[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "ana     1GiB gpu  local/gpu0 (host device, no GPU)  active  1m 1s"),
        ({"tier": "spot", "idle": True}, "active, spot, idle"),
        ({"status": "noticed", "notice": {"reason": "preempted", "in_seconds": 4.2}}, "noticed: preempted in 4.2s"),
        ({"status": "queued", "parts": [], "remaining": None}, "2GiB gpu  -      queued  -"),
        ({"status": "ended", "end": {"reason": "expired", "detail": ""}}, "ended: expired  -"),
        ({"parts": [], "wants": [{"kind": "gpu", "amount": 1 << 30, "count": 2}]}, "2 × 1GiB gpu"),
        ({"parts": [{**PART, "kind": "cpu", "resource": "local/cpu", "amount": 1}]}, "1 core  local/cpu  active"),
        ({"labels": {"program": "burst", "job": "pi"}}, "1m 1s    burst pi"),
        ({"name": "evil\x1b[31m\n"}, "evil·[31m·"),
    ],
)
def test_a_lease_is_one_line(changes: dict[str, Any], said: str) -> None:
    """What it holds, or what it asked for; notice, idleness, an unusual tier and the reason of the end; no escapes."""
    assert said in line(**changes)


def test_requests_ahead_are_named_with_the_reason_for_their_place() -> None:
    """There are words for each reason that the office gives."""
    assert set(_GOES_FIRST) == {because.value for because in Because}
    view: Json = {"because": "arrival", "requests": 2, "leases": ["l-1", "l-2"], "tenants": ["ana", "zoe"]}
    assert _ahead(view) == "2 requests that came before (ana, zoe): l-1, l-2"
    assert _ahead(view | {"because": "held", "requests": 1, "leases": [], "tenants": []}) == (
        "1 request for holders that have held for less time"
    )
