"""For functions that are called in a guest: what they leave to be done as soon as their answer is on its way."""

from __future__ import annotations

from sublet.guest.afterwards import afterwards

__all__ = ["afterwards"]
