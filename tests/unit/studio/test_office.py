"""The office as sessions see it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from sublet.errors import NotFound
from sublet.studio.office import FabricOffice
from sublet.wire.http_views import BillLine
from tests.unit.studio.test_cell_bill import line


class Forgetful:
    """An office that has forgotten its leases, and has their bill."""

    def __init__(self, *lines: BillLine) -> None:
        self._lines = list(lines)

    def lease(self, lease: str) -> Any:
        raise NotFound(f"there is no lease {lease}")

    def bill(self, *, by: str) -> list[BillLine]:
        assert by == "lease"
        return self._lines


@pytest.mark.parametrize(
    ("at", "at_ns"), [("2026-11-21T06:38:06.250Z", 1_795_243_086_250_000_000), (None, None)], ids=["now", "before"]
)
def test_how_a_forgotten_lease_ended_is_read_from_its_bill(at: str | None, at_ns: int | None) -> None:
    """An office of before does not say when."""
    office: Any = Forgetful(line("l-0", 1.0, end="idle"), structs.replace(line("l-1", 2.0, end="expired"), ended_at=at))
    seen = FabricOffice(office).find("l-1")
    assert seen is not None
    assert (seen.id, seen.is_held, seen.reason, seen.ended_ns, seen.tenant) == ("l-1", False, "expired", at_ns, "ana")


def test_of_a_lease_without_a_bill_nothing_is_known() -> None:
    office: Any = Forgetful(line("l-0", 1.0, end="idle"), line("l-1", 2.0, live=True))
    assert FabricOffice(office).find("l-1") is None
