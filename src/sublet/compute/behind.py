"""For functions that are called in a guest: what they leave to be done as soon as their answer is on its way, and calls
that are answered in the middle of a cell."""

from __future__ import annotations

from sublet.guest.afterwards import afterwards
from sublet.guest.within import answer_calls

__all__ = ["afterwards", "answer_calls"]
