"""For a program that is a Jupyter kernel itself: interrupts of its cells work as in a guest's kernel."""

from __future__ import annotations

from sublet.guest.interrupts import kernel_class

__all__ = ["kernel_class"]
