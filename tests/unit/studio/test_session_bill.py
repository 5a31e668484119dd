"""The bill of a session, some lines at a time: all of one moment, and together the office's bill."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import to_builtins

from sublet.errors import InvalidRequest
from sublet.studio.cell_bill import cell_bill
from sublet.studio.records import Entry
from sublet.studio.session_bill import BillPlace, bill_heads, bill_row, bill_view, sum_row
from sublet.values import GIB
from sublet.wire.http_views import BillLine
from tests.unit.studio.test_cell_bill import IDENT, asked, entries, granted, line, ran, session_of

UNTIL_NS = 1_800_000_000 * 10**9


class Bills:
    """The office's bills as of a moment: what is asked for is in the answer."""

    def __init__(self, held_s: float, **more: Any) -> None:
        self.until: set[str] = set()
        self._lines = {"session": [line("s-x", 9.0), line(IDENT, held_s, **more)], "lease": [line("l-1", held_s)]}

    def bill(self, *, by: str, until: str) -> list[BillLine]:
        self.until.add(until)
        return self._lines[by]


def pages(bills: Any, records: list[Entry], most: int, more: list[Entry]) -> list[dict[str, Any]]:
    """All of a bill, ``most`` lines at a time; ``more`` is recorded behind the first of them."""
    session, place = session_of(records), BillPlace(UNTIL_NS, records[-1].seq)
    found = [bill_view(bills, session, records, place, most)]
    while found[-1]["next"] is not None:
        found.append(bill_view(bills, session, records + more, BillPlace.read(found[-1]["next"], UNTIL_NS), most))
    return found


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_pages_are_of_one_moment_and_come_to_the_bill_whatever_is_recorded_meanwhile(most: int) -> None:
    records = entries(asked(), granted("l-1"), *(ran(number, "l-1", 7.0) for number in range(1, 6)))
    more = [Entry(seq=99, session=IDENT, at_ns=99, record=ran(6, "l-1", 4.0))]
    bills: Any = Bills(60.0)
    found = pages(bills, records, most, more)
    lines = [one for page in found for one in page["lines"]]
    assert [one["cell"] for one in lines] == [1, 2, 3, 4, 5, None]
    assert [page["before"] for page in found] == list(range(0, 6, most))
    assert all(page["count"] == 6 and len(page["lines"]) <= most for page in found)
    total = found[0]["total"]
    for what, unit in (("cost", 10**6), ("gpu_seconds", 10**9), ("held_seconds", 10**9)):
        assert sum(round(one[what] * unit) for one in lines) == round(total[what] * unit), what
    assert len(bills.until) == 1
    assert bill_view(bills, session_of(records), records, BillPlace(UNTIL_NS, 99, 50), 2)["lines"] == []


def test_a_session_that_held_nothing_has_no_lines() -> None:
    class Nothing:
        def bill(self, *, by: str, until: str) -> list[BillLine]:
            return [line("s-x", 1.0)]

    records = entries(asked())
    nothing: Any = Nothing()
    found = bill_view(nothing, session_of(records), records, BillPlace(UNTIL_NS, 9), 10)
    assert (found["lines"], found["total"], found["count"], found["next"]) == ([], None, 0, None)


@pytest.mark.parametrize(
    "text", ["", "1", "1.2", "1.2.3.4", "-1.2.3", "1.2.x", "1.2.3\n", "١.2.3", f"{UNTIL_NS + 1}.1.1", "9" * 40 + ".1.1"]
)
def test_what_names_no_lines_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="after names no lines of a bill"):
        BillPlace.read(text, UNTIL_NS)


def test_rows_say_what_is_outside_of_cells_and_what_all_come_to() -> None:
    records = entries(asked(), granted("l-1"), ran(3, "l-1", 45.0, failed=True))
    bills: Any = Bills(60.0)
    found = bill_view(bills, session_of(records), records, BillPlace(UNTIL_NS, 9), 10)
    rows = [*map(bill_row, found["lines"]), sum_row(found["total"])]
    assert [(*row[:3], row[10]) for row in rows] == [
        ("[3] failed", "45s", "-", "l-1"),
        ("outside of cells", "15s", "-", "l-1"),
        ("in all", "1m", "-", ""),
    ]
    assert [row[7] for row in rows] == ["0.012500", "0.004167", "0.016667"]
    assert len(bill_heads("EUR")) == len(rows[0]) == len(rows[-1])
    assert bill_heads("EUR")[7] == "Cost, EUR"
    assert bill_heads("")[7] == "Cost"


def test_rows_say_what_was_not_counted_and_how_much_memory_was_leased() -> None:
    """Errors are those of a lease: they are in its line outside of cells, and nowhere 0 where none were counted."""
    records = entries(asked(), granted("l-1"), ran(1, "l-1", 15.0, launches=5), ran(2, "l-1", 15.0, launches=None))

    def columns(**counted: object) -> list[tuple[str, ...]]:
        more: Any = {"vram_leased_byte_seconds": 60.0 * 4 * GIB, **counted}
        total = line(IDENT, 60.0, **more)
        lines = cell_bill(session_of(records), records, [line("l-1", 60.0, **more)], total)
        rows = [bill_row(one.document()) for one in lines]
        return [row[4:7] for row in (*rows, sum_row(to_builtins(total)))]

    assert columns(launches=9, launch_errors=2) == [
        ("60.0 GiB·s", "5", "-"),
        ("60.0 GiB·s", "0", "-"),
        ("120.0 GiB·s", "4", "2"),
        ("240.0 GiB·s", "9", "2"),
    ]
    nothing = ("not counted", "not counted")
    assert [row[1:] for row in columns(launches=None)] == [("5", "-"), nothing, nothing, nothing]
