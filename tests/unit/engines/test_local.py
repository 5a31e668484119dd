"""What an office begins with: the books as its journal has them, and what it must know of the time before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.engines import local
from sublet.engines.local import Office
from sublet.engines.operator_limits import read_limits
from sublet.office.ledger.events import NodeJoined
from sublet.office.ledger.fold import apply
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.state import State
from sublet.testing import HeldClock
from sublet.values import Kind, NodeId, ResourceId
from sublet.wire.orders import Device, Inventory
from tests.unit.office.journal.making import OPENED, Place, at, queued


@pytest.mark.parametrize("is_restored", [False, True])
def test_an_office_goes_on_from_the_snapshot_and_from_what_came_after_it(is_restored: bool, tmp_path: Path) -> None:
    """A restored one knows that it is: then no lease goes on, since what came after the backup is not known."""
    place, state = Place(tmp_path), State.fresh(Policy())
    with place.open() as journal:
        journal.commit([OPENED, queued("a")], at(1))
        for event in (OPENED, queued("a")):
            apply(state, event, at(1))
        journal.compact(state.snapshot(), at(2))
        journal.commit([queued("b")], at(500))
        journal.backup(tmp_path / "backup")
    if is_restored:
        place.restore(tmp_path / "backup")
    office = object.__new__(Office)
    office._policy, office.clock = Policy(), HeldClock()
    with place.open() as journal:
        ledger, opening, since_snapshot = office._recover(journal)
    assert set(ledger.state.leases) == {"a", "b"}
    assert since_snapshot == 1, "which says when the next snapshot is made"
    assert (opening.restored, opening.last_ns, opening.incarnation) == (is_restored, 500, 1 + is_restored)


@pytest.mark.parametrize(("there", "offered"), [(1024, 1024), (1030, 1024), (1100, 1100), (1020, 1020)])
def test_more_room_on_the_disk_is_offered_only_when_it_is_worth_an_entry_in_the_journal(
    there: int, offered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs write and remove files all day. Less room is offered at once."""
    disk = Device(id=ResourceId("disk"), kind=Kind.BLOCK, capacity=1024, model="disk")
    posted: list[Any] = []
    office: Any = object.__new__(Office)
    office.home, office._inventory = Path(), Inventory(node=NodeId("n"), domain="n", devices=(disk,))
    office._machine, office._limits, office._room = office._inventory, read_limits(Path("missing")), FullRoom()
    state = State.fresh(Policy())
    apply(state, NodeJoined(inventory=office._inventory), at(1))
    office.driver = SimpleNamespace(ledger=SimpleNamespace(state=state), post=posted.append)
    monkeypatch.setattr(local, "block_bytes", lambda *_: there)

    async def look() -> None:
        office._check_disk()
        office._disk_timer.cancel()

    asyncio.run(look())
    assert [one.inventory.devices[0].capacity for one in posted] == ([] if offered == 1024 else [offered])


class FullRoom:
    def is_short(self) -> bool:
        return True
