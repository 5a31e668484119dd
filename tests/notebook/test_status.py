"""What a cell shows of its lease."""

from __future__ import annotations

import pytest

from sublet.notebook.status import (
    CellBill,
    CellEnded,
    CellStatus,
    Finished,
    Moving,
    Running,
    Starting,
    Suspended,
    Waiting,
    as_html,
    as_text,
)
from sublet.values import GIB, MIB

BILL = CellBill(held_s=12.0, busy_s=3.21, vram_byte_s=24.0 * GIB, launches=7, bytes_in=MIB, bytes_out=0, waited_s=2.0)

LINES: list[tuple[CellStatus, str]] = [
    (
        Waiting(place=2, reason="gpu0 is held by others", estimate_s=90.0),
        "sublet: queued, place 2 · about 1m 30s · gpu0 is held by others · interrupt to cancel",
    ),
    (
        Waiting(place=2, reason="gpu0 is held by others", estimate_s=90.0, error_s=30.0),
        (
            "sublet: queued, place 2 · about 1m 30s (nine tenths of such estimates were within 30s) · "
            "gpu0 is held by others · interrupt to cancel"
        ),
    ),
    (Waiting(place=1, reason="quota"), "sublet: queued, place 1 · quota · interrupt to cancel"),
    (Starting(device="node/gpu0", host=True), "sublet: node/gpu0 (host device, no GPU) · starting"),
    (
        Running(device="node/gpu0", host=False, vram_bytes=GIB, left_s=299.6),
        "sublet: node/gpu0 · running · VRAM 1GiB · 5m left",
    ),
    (
        Running(device="node/gpu0", host=False, vram_bytes=GIB, left_s=4.9, notice="preempted by another tenant"),
        "sublet: node/gpu0 · running · VRAM 1GiB · will be taken in 4.9s · preempted by another tenant",
    ),
    (
        Moving(device="node/gpu0", host=False, what="sending words (set, 500,000 items)"),
        "sublet: node/gpu0 · sending words (set, 500,000 items)",
    ),
    (
        Suspended(why="preempted", place=1, estimate_s=60.0),
        (
            "sublet: suspended, the cell stands still · preempted · goes on by itself with the next device · place 1"
            " · about 1m · interrupt to give it up"
        ),
    ),
    (
        Finished(device="node/gpu0", host=False, bill=BILL, moved="x came"),
        "sublet: node/gpu0 · 3.2s · 1MiB sent, 0B received · waited 2s · x came",
    ),
    (
        Finished(device="local/gpu0", host=True, bill=CellBill(held_s=9.0, busy_s=1.0, moved_s=0.2, bytes_in=92)),
        "sublet: local/gpu0 (host device, no GPU) · 1.2s",
    ),
    (
        Finished(
            device="g", host=False, bill=CellBill(busy_s=3.0, moved_s=1.0, bytes_in=92, bytes_saved=GIB, cost=0.006)
        ),
        "sublet: g · 4s · 92B sent, 0B received in 1s · 1GiB saved · 0.0060",
    ),
    (
        Finished(device="g", host=False, bill=CellBill(busy_s=0.02, moved_s=0.01, cost=0.005, currency="EUR")),
        "sublet: g · 30ms",
    ),
    (
        CellEnded(message="the GPU session ended", do="Rerun this cell to reacquire."),
        "sublet: the GPU session ended · Rerun this cell to reacquire.",
    ),
]


@pytest.mark.parametrize(("status", "text"), LINES, ids=[type(one).__name__ for one, _ in LINES])
def test_it_says_how_it_stands(status: CellStatus, text: str) -> None:
    assert as_text(status) == text
    shown = as_html(status)
    for part in text.removeprefix("sublet: ").split(" · "):
        assert part in shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0994, "99ms"), (0.0996, "0.1s"), (9.94, "9.9s"), (9.96, "10s"), (9.999, "10s"), (59.7, "1m")],
)
def test_no_time_is_written_with_an_exponent(seconds: float, text: str) -> None:
    assert as_text(Finished(device="g", host=False, bill=CellBill(busy_s=seconds))) == f"sublet: g · {text}"


def test_what_people_called_things_is_no_markup() -> None:
    assert "<b>x" not in as_html(Waiting(place=1, reason="<b>x</b>")).replace("<b>waiting", "")


def test_bills_add_up_and_what_nobody_counted_stays_unknown() -> None:
    both = BILL + CellBill(held_s=1.0, cost=0.5, currency="EUR")
    assert (both.held_s, both.launches, both.cost, both.currency) == (13.0, 7, 0.5, "EUR")
    assert (CellBill() + CellBill()).launches is None
    assert sum([BILL, BILL], start=CellBill()).busy_s == pytest.approx(6.42)
