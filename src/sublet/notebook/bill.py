"""The notebook's bill: a row for each cell, and their sum."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sublet.background import start_thread
from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass
from sublet.notebook.status import CellBill
from sublet.values import GIB, format_cost, format_size

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.lease_end import LeaseEnd
    from sublet.wire.http import BillLine

ROWS_MAX: Final = 10_000
"""Cells that are remembered one by one; the sum has all of them."""
NARROW: Final = 72
"""Letters that a cell's output has room for in a browser of a common width."""
HEAD: Final = ("cell", "lease", "busy", "VRAM GiB·s", "launches", "in", "out", "saved", "waited", "suspended", "cost")


Row = tuple[int, str, CellBill]
"""Number of the cell, its lease, and what it consumed."""


@dataclass(slots=True)
class NotebookBill:
    """Of one kernel."""

    rows: list[Row] = field(default_factory=list)
    total: CellBill = field(default_factory=CellBill)
    suspended: set[str] = field(default_factory=set)
    """Leases that were taken from a cell that went on under another, under which its row stands."""
    currency: str = ""
    """In which the office reckons, once it has said so."""
    _prices: dict[str, float] = field(default_factory=dict)
    """The price of a second of each lease."""

    def add(self, cell: int, lease: str, bill: CellBill) -> None:
        """A cell is done."""
        self.rows.append((cell, lease, bill))
        del self.rows[:-ROWS_MAX]
        self.total += bill

    def add_burst(self, cell: int, burst: str, bill: CellBill) -> None:
        """A cell that ran on leases of its own is done: one row for all of them."""
        key = f"{burst} [{cell}]"
        self.currency = bill.currency or self.currency
        self._prices[key] = bill.cost / bill.held_s if bill.held_s else 0.0
        self.add(cell, key, bill)

    def price(self, lease: str, fabric: Fabric) -> float:
        """Of a second of this lease, from what the office has billed for it so far. It is asked after the first cell,
        beside it, for no cell is held up for this: so 0 at first, and where the office does not answer."""
        if lease not in self._prices:
            self._prices[lease] = 0.0
            _ = start_thread("price", lambda: self._ask(lease, fabric))
        return self._prices[lease]

    def _ask(self, lease: str, fabric: Fabric) -> None:
        with contextlib.suppress(SubletError):
            self._learn([line for line in fabric.bill(by="lease") if line.key == lease])

    def text(self, office: Sequence[BillLine] = ()) -> str:
        """As a table; columns in which nothing ever stood are left out. ``office``: its bill by leases, from which the
        cost of a cell is its share of its lease's time."""
        mine = {lease for _, lease, _ in self.rows} | self.suspended
        lines = [line for line in office if line.key in mine]
        self._learn(lines)
        billed = _within(self.rows, lines)
        rows = [(n, self._priced(bill, self._prices.get(lease, 0.0) * bill.held_s)) for n, lease, bill in billed]
        total = self._priced(_less(self.total, self.rows, billed), sum(bill.cost for _, bill in rows))
        table = [_row(f"[{cell}]", bill) for cell, bill in rows] + [_row("all", total)]
        used = [n for n in range(len(HEAD)) if n < 4 or any(row[n] for row in table)]
        head = [*HEAD[:-1], self.currency or HEAD[-1]]  # narrow: it stands in a cell's output
        shown = [[row[n] for n in used] for row in [head, *table]]
        widths = [max(len(row[n]) for row in shown) for n in range(len(used))]
        between = "  " if sum(widths) + 2 * len(widths) <= NARROW else " "
        rendered = [between.join(map(str.rjust, row, widths)) for row in shown]
        return "\n".join([*rendered, _office(lines)] if lines else rendered)

    def _learn(self, lines: Sequence[BillLine]) -> None:
        """The prices, from lines of the office's bill by leases."""
        self._prices |= {line.key: line.cost / line.held_seconds for line in lines if line.held_seconds}
        self.currency = next((line.currency for line in lines), self.currency)

    def _priced(self, bill: CellBill, cost: float) -> CellBill:
        return replace(bill, cost=cost, currency=self.currency)


def bill_in_the_end(since_s: float, began_s: float, stood_s: float, amount: int, end: LeaseEnd | None) -> CellBill:
    """The bill of a cell that was ended: its lease is billed until it was over. Held ``since_s``."""
    now_s = time.monotonic()
    now_s -= since_end(end, now_s - since_s)
    held_s = max(0.0, now_s - since_s)
    busy_s = max(0.0, min(held_s, now_s - began_s - stood_s))
    return CellBill(held_s=held_s, busy_s=busy_s, vram_byte_s=held_s * amount, stood_s=stood_s)


def since_end(end: LeaseEnd | None, most_s: float) -> float:
    """For how long a lease has been over, by the wall clock: that time is not billed. At most ``most_s``."""
    if end is None:
        return 0.0
    try:
        ended_s = datetime.fromisoformat(end.at).timestamp()
    except ValueError:
        return 0.0
    return min(max(0.0, time.time() - ended_s), most_s)


def _within(rows: Sequence[Row], lines: Sequence[BillLine]) -> list[Row]:
    """No lease was held for longer than the office says. What its cells have on top of that is the last one's, which
    was told of the end a moment after it. Of one that was suspended part was under a lease before."""
    found = list(rows)
    for line in lines:
        mine = [n for n, (_, lease, _) in enumerate(found) if lease == line.key]
        if any(found[n][2].stood_s for n in mine):
            continue
        over_s = sum(found[n][2].held_s for n in mine) - line.held_seconds
        for n in reversed(mine):
            if over_s <= 0:
                break
            cell, lease, bill = found[n]
            held_s = max(0.0, bill.held_s - over_s)
            vram_byte_s = bill.vram_byte_s * held_s / bill.held_s if bill.held_s else 0.0
            found[n] = (
                cell,
                lease,
                replace(bill, held_s=held_s, busy_s=min(bill.busy_s, held_s), vram_byte_s=vram_byte_s),
            )
            over_s -= bill.held_s
    return found


def _less(total: CellBill, was: Sequence[Row], now: Sequence[Row]) -> CellBill:
    """The sum of all rows, after some rows have become smaller."""

    def over(name: str) -> float:
        return float(sum(getattr(bill, name) for *_, bill in was) - sum(getattr(bill, name) for *_, bill in now))

    return replace(
        total,
        held_s=total.held_s - over("held_s"),
        busy_s=total.busy_s - over("busy_s"),
        vram_byte_s=total.vram_byte_s - over("vram_byte_s"),
    )


def _office(lines: Sequence[BillLine]) -> str:
    """What the office has written down for the same leases: between cells as well, and of what it counts itself."""
    parts = [f"{sum(line.held_seconds for line in lines):.1f}s"]
    if not any(line.uncounted for line in lines):
        parts.append(f"{sum(line.launches or 0 for line in lines)} launches")
    if cost := sum(line.cost for line in lines):
        parts.append(f"cost {format_cost(cost, lines[0].currency)}")
    whose = f"the {len(lines)} leases" if len(lines) > 1 else "the lease"
    return f"{whose} in all, with the time between cells: {', '.join(parts)}"


def _row(first: str, bill: CellBill) -> list[str]:
    return [
        first,
        f"{bill.held_s:.1f}s",
        f"{bill.busy_s:.1f}s",
        _three_digits(bill.vram_byte_s / GIB),
        "" if bill.launches is None else str(bill.launches),
        format_size(bill.bytes_in) if bill.bytes_in else "",
        format_size(bill.bytes_out) if bill.bytes_out else "",
        format_size(bill.bytes_saved) if bill.bytes_saved else "",
        f"{bill.waited_s:.1f}s" if bill.waited_s >= 0.1 else "",
        f"{bill.stood_s:.1f}s" if bill.stood_s >= 0.1 else "",
        f"{bill.cost:.4f}" if bill.cost else "",
    ]


def _three_digits(number: float) -> str:
    """At least the whole number, and no exponent, however many digits that takes."""
    return f"{number:.0f}" if number >= 99.5 else f"{round(number, 3):.3g}"
