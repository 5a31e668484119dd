"""What the programs may use of a guest: where they run, work deferred until an answer is sent, calls answered in the
middle of a cell, and the class of a kernel whose interrupts work as in a guest's."""

from __future__ import annotations

from sublet.guest.current import current
from sublet.guest.deferred import afterwards
from sublet.guest.interrupts import kernel_class
from sublet.guest.within import answer_calls, run_cell

__all__ = ["afterwards", "answer_calls", "current", "kernel_class", "run_cell"]
