"""For functions that are called in a guest: work for when their answer is on its way, cells that they run, and calls
that are answered in the middle of a cell."""

from __future__ import annotations

from sublet.guest.afterwards import afterwards
from sublet.guest.within import answer_calls, run_cell

__all__ = ["afterwards", "answer_calls", "run_cell"]
