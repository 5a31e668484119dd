"""The bill of a session by cell: whatever notebooks measured, its lines come to the office's bill."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sublet.studio.cell_bill import CellLine, cell_bill, lease_ids
from sublet.studio.records import (
    Asked,
    CellRecord,
    Entry,
    Granted,
    LeaseRecord,
    Moved,
    ProcessIdentity,
    Ran,
    Record,
    Session,
    Started,
    Terms,
    fold_all,
)
from sublet.values import GIB
from sublet.wire.http_views import BillLine

IDENT = "s-000000000001"
SUMS = ("held_ns", "busy_ns", "gpu_ns", "vram_leased", "micros", "waited_ns", "bytes_saved")


def entries(*records: Record) -> list[Entry]:
    first = Started(name="thesis", terms=Terms(vram=GIB))
    return [
        Entry(seq=number, session=IDENT, at_ns=number, record=record)
        for number, record in enumerate((first, *records), 1)
    ]


def asked() -> Asked:
    return Asked(by=ProcessIdentity(host="h", pid=1, started=1))


def granted(lease: str) -> Granted:
    return Granted(lease=LeaseRecord(id=lease, epoch=(1, 1), at_ns=1), tenant="ana")


def ran(number: int, lease: str, held_s: float, busy_s: float = 0.0, **more: Any) -> Ran:
    cell = CellRecord(cell=number, lease=lease, at_ns=number, held_s=held_s, busy_s=busy_s, vram_byte_s=1.0, **more)
    return Ran(cell=cell)


def line(key: str, held_s: float, *, gpus: int = 1, **more: Any) -> BillLine:
    known: dict[str, Any] = {
        "busy_seconds": 0.0,
        "core_seconds": 0.0,
        "memory_byte_seconds": 0.0,
        "block_byte_seconds": 0.0,
        "cost": held_s * gpus / 3600,
        "currency": "EUR",
        **more,
    }
    return BillLine(key=key, tenant="ana", leases=1, held_seconds=held_s, gpu_seconds=held_s * gpus, **known)


def session_of(records: list[Entry]) -> Session:
    found: dict[str, Session] = {}
    fold_all(found, records)
    return found[IDENT]


def test_a_lease_is_divided_by_how_long_each_cell_had_it() -> None:
    records = entries(
        asked(),
        granted("l-1"),
        ran(1, "l-1", 10.0, 4.0, launches=7, bytes_saved=GIB, waited_s=3.0),
        ran(2, "l-1", 30.0, 30.0, launches=2, failed=True),
    )
    bill = line(
        "l-1", 60.0, gpus=2, busy_seconds=34.0, launches=9, launch_errors=1, bytes_saved=GIB, waited_seconds=3.0,
        end="preempted", cost=0.06,
    )  # fmt: skip
    first, second, outside = cell_bill(session_of(records), records, [bill], bill)
    assert [(one.cell, one.held_ns // 10**9, one.gpu_ns // 10**9, one.micros) for one in (first, second, outside)] == [
        (1, 10, 20, 10_000),
        (2, 30, 60, 30_000),
        (None, 20, 40, 20_000),
    ]
    assert (first.busy_ns, first.launches, first.bytes_saved, first.waited_ns) == (4 * 10**9, 7, GIB, 3 * 10**9)
    assert (second.failed, second.end, second.launch_errors) == (True, "", None)
    assert (outside.busy_ns, outside.launches, outside.launch_errors, outside.end) == (0, 0, 1, "preempted")
    assert second.document()["cost"] == 0.03
    assert outside.document()["cell"] is None


def test_what_no_record_names_and_what_was_not_counted_is_said() -> None:
    """A suspended program's memory has the label of the session; a framework's launches are counted by nobody."""
    records = entries(asked(), granted("l-1"), ran(1, "l-1", 5.0, launches=None))
    one = line("l-1", 10.0, launches=None, live=True, end="x")
    total = line(IDENT, 14.0, launches=None, cost=one.cost + 0.001)
    first, outside, others = cell_bill(session_of(records), records, [one, line("l-9", 99.0)], total)
    assert (first.launches, outside.launches, outside.end) == (None, None, ""), "it has not ended"
    assert (others.lease, others.cell, others.held_ns, others.micros) == ("", None, 4 * 10**9, 1000)


def test_what_a_volume_costs_is_no_cells() -> None:
    """The session's line holds nothing for it; its cost was given to the last cell's lease."""
    records = entries(asked(), granted("l-1"), ran(1, "l-1", 5.0))
    one = line("l-1", 10.0)
    total = structs.replace(line(IDENT, 10.0, cost=one.cost + 0.001), leases=2)
    first, outside, others = cell_bill(session_of(records), records, [one], total)
    assert (others.lease, others.held_ns, others.micros) == ("", 0, 1000)
    assert first.micros + outside.micros == round(one.cost * 10**6)


def test_each_lease_that_a_record_names_is_there_once() -> None:
    moved = Moved(lease=LeaseRecord(id="l-2", epoch=(1, 2), at_ns=2), tenant="ana")
    records = entries(asked(), granted("l-1"), moved, ran(1, "l-1", 1.0), ran(2, "l-3", 1.0))
    assert lease_ids(records) == ["l-1", "l-2", "l-3"]
    total = line(IDENT, 3.0)
    bills = [line("l-1", 1.0), line("l-2", 2.0)]
    found = cell_bill(session_of(records), records, bills, total)
    assert [(one.lease, one.cell) for one in found] == [("l-1", 1), ("l-1", None), ("l-2", None)]


@given(
    held=st.lists(st.floats(0, 1e6), max_size=6),
    billed=st.floats(0, 1e6),
    gpus=st.integers(1, 8),
    busy=st.floats(0, 1),
    cost=st.integers(0, 10**12),
    more=st.integers(0, 10**12),
)
def test_the_lines_come_to_the_bill_whatever_was_measured(
    held: list[float], billed: float, gpus: int, busy: float, cost: int, more: int
) -> None:
    """A notebook's clock is not the office's: no cell is given more than there is, none was busy for longer than it was
    held, and nothing is lost."""
    cells = [
        ran(number, "l-1", one, one * (number % 3), waited_s=one, bytes_saved=int(one))
        for number, one in enumerate(held)
    ]
    records = entries(asked(), granted("l-1"), *cells)
    busy_s = billed * busy
    amounts: dict[str, Any] = {
        "busy_seconds": busy_s,
        "vram_leased_byte_seconds": billed * GIB,
        "waited_seconds": billed / 3,
        "bytes_saved": int(billed),
    }
    one = line("l-1", billed, gpus=gpus, **amounts, cost=cost / 10**6)
    total = line(IDENT, billed, gpus=gpus, **amounts, cost=(cost + more) / 10**6)
    found = cell_bill(session_of(records), records, [one], total)
    whole = {
        "held_ns": round(billed * 10**9),
        "busy_ns": round(busy_s * 10**9),
        "vram_leased": round(billed * GIB),
        "gpu_ns": round(billed * gpus * 10**9),
        "micros": cost + more,
        "waited_ns": round(billed / 3 * 10**9),
        "bytes_saved": int(billed),
    }
    assert {name: sum(getattr(line, name) for line in found) for name in SUMS} == whole
    assert all(getattr(line, name) >= 0 for line in found for name in SUMS)
    assert all(line.busy_ns <= line.held_ns for line in found)
    assert all(isinstance(line, CellLine) for line in found)
