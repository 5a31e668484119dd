"""What an office begins with: the books as its journal has them, and what it must know of the time before."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.engines.local import Office
from sublet.office.ledger.fold import apply
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.state import State
from sublet.testing import HeldClock
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
