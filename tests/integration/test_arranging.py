"""Groups, reservations, budgets and explanations in Python: by the fabric and by the one of asyncio."""

from __future__ import annotations

import asyncio
import inspect
from decimal import Decimal
from pathlib import Path
from typing import Final

import pytest

import sublet
from sublet import aio
from sublet.errors import InvalidRequest, NotFound
from sublet.wire.http import QuotaView

METHODS: Final = (
    *("explain", "groups", "add_group", "set_group", "remove_group", "reservations", "add_reservation"),
    *("remove_reservation", "budgets", "set_budget", "credit_budget", "remove_budget"),
)
WHEN: Final = "2100-01-04 10:00-12:00"


@pytest.mark.parametrize("name", METHODS)
def test_both_fabrics_arrange_by_the_same_words(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(fabric, name)) for fabric in (sublet.Fabric, aio.Fabric))
    assert ours.parameters == theirs.parameters


def test_groups_reservations_and_budgets_are_made_changed_and_removed(two_devices: Path) -> None:
    with sublet.connect(home=two_devices) as fabric:
        made = fabric.add_group("by-python", weight=2, floor=1, ceiling=2, quota=QuotaView(leases=5))
        assert (made.weight, made.floor, made.ceiling, made.quota.leases) == (2, 1, 2, 5)
        changed = fabric.set_group("by-python", weight=3, floor=0, ceiling="none")
        assert (changed.weight, changed.floor, changed.ceiling, changed.quota.leases) == (3, 0, None, 5)
        assert "by-python" in [group.id for group in fabric.groups()]
        reserved = fabric.add_reservation("exam-by-python", WHEN, group="by-python", gpus=1, zone="UTC")
        assert (reserved.group, reserved.gpus, reserved.when) == ("by-python", 1, WHEN)
        assert reserved.id in [each.id for each in fabric.reservations()]
        with pytest.raises(InvalidRequest, match="has reservation exam-by-python"):
            fabric.remove_group("by-python")
        fabric.remove_reservation("exam-by-python")
        assert fabric.set_budget("12.50", group="by-python", per="day").amount == "12.50"
        for _ in range(2):
            credited = fabric.credit_budget(Decimal("0.25"), group="by-python", per="day", request_id="once")
            assert credited.credit == "0.25"
        assert fabric.credit_budget(1, group="by-python", per="day").credit == "1.25"
        assert [each.credit for each in fabric.budgets() if each.group == "by-python"] == ["1.25"]
        with pytest.raises(InvalidRequest, match="is a float"):
            fabric.set_budget(0.1, group="by-python")  # type: ignore[arg-type]
        fabric.remove_budget(group="by-python", per="day")
        assert fabric.remove_group("by-python").id == "by-python"
        with pytest.raises(NotFound):
            fabric.remove_group("by-python")
        with pytest.raises(NotFound):
            fabric.remove_group("../tenants/local")


def test_a_lease_is_explained_to_its_holder(two_devices: Path) -> None:
    with sublet.connect(home=two_devices) as fabric, fabric.cpu(1) as lease:
        for asked in (lease, lease.id):
            found = fabric.explain(asked)
            assert (found.lease, found.status, found.position) == (lease.id, "active", None)
            assert found.reasons
        with pytest.raises(NotFound):
            fabric.explain("l-none")


def test_the_same_from_asyncio(two_devices: Path) -> None:
    async def story() -> None:
        async with await aio.connect(home=two_devices) as fabric:
            await fabric.add_group("by-asyncio", weight=2)
            assert (await fabric.set_group("by-asyncio", ceiling=1)).ceiling == 1
            await fabric.add_reservation("exam-by-asyncio", WHEN, group="by-asyncio", gpus=1, zone="UTC")
            assert "exam-by-asyncio" in [each.id for each in await fabric.reservations()]
            await fabric.remove_reservation("exam-by-asyncio")
            await fabric.set_budget(3, group="by-asyncio")
            assert (await fabric.credit_budget(1, group="by-asyncio")).credit == "1.00"
            assert "by-asyncio" in [each.group for each in await fabric.budgets()]
            await fabric.remove_budget(group="by-asyncio")
            async with fabric.cpu(1) as lease:
                assert (await fabric.explain(lease)).lease == lease.id
            await fabric.remove_group("by-asyncio")
            assert "by-asyncio" not in [group.id for group in await fabric.groups()]

    asyncio.run(story())
