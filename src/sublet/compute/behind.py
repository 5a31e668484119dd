"""For functions called in a guest: work deferred until the answer is sent, and calls answered in the middle of a
cell."""

from __future__ import annotations

from sublet.guest.afterwards import afterwards
from sublet.guest.within import answer_calls, run_cell

__all__ = ["afterwards", "answer_calls", "run_cell"]
