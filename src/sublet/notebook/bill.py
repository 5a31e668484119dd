"""The notebook's bill: a row for each cell, and their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sublet.notebook.status import CellBill
from sublet.values import GIB, format_size

__all__ = ["NotebookBill"]

ROWS_MAX: Final = 10_000
"""Cells that are remembered one by one; the sum has all of them."""
HEAD: Final = ("cell", "lease", "busy", "VRAM GiB·s", "launches", "in", "out", "saved", "waited", "suspended", "cost")


@dataclass(slots=True)
class NotebookBill:
    """Of one kernel."""

    rows: list[tuple[int, str, CellBill]] = field(default_factory=list)
    """Number of the cell, device, and what it consumed."""
    total: CellBill = field(default_factory=CellBill)

    def add(self, cell: int, device: str, bill: CellBill) -> None:
        """A cell is done."""
        self.rows.append((cell, device, bill))
        del self.rows[:-ROWS_MAX]
        self.total += bill

    def text(self) -> str:
        """As a table; columns in which nothing ever stood are left out."""
        table = [_row(f"[{cell}]", bill) for cell, _, bill in self.rows] + [_row("all", self.total)]
        used = [n for n in range(len(HEAD)) if n < 4 or any(row[n] for row in table)]
        shown = [[row[n] for n in used] for row in [list(HEAD), *table]]
        widths = [max(len(row[n]) for row in shown) for n in range(len(used))]
        return "\n".join(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in shown
        )


def _row(first: str, bill: CellBill) -> list[str]:
    return [
        first,
        f"{bill.held_s:.1f}s",
        f"{bill.busy_s:.1f}s",
        f"{bill.vram_byte_s / GIB:.3g}",
        "" if bill.launches is None else str(bill.launches),
        format_size(bill.bytes_in) if bill.bytes_in else "",
        format_size(bill.bytes_out) if bill.bytes_out else "",
        format_size(bill.bytes_saved) if bill.bytes_saved else "",
        f"{bill.waited_s:.1f}s" if bill.waited_s >= 0.1 else "",
        f"{bill.stood_s:.1f}s" if bill.stood_s >= 0.1 else "",
        f"{bill.cost:.4f} {bill.currency}".rstrip() if bill.cost else "",
    ]
