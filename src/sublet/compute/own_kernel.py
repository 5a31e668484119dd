"""For a program that is a Jupyter kernel itself: its cells are interrupted as those in a guest are, one by one."""

from __future__ import annotations

from sublet.guest.interrupts import kernel_class

__all__ = ["kernel_class"]
