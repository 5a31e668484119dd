"""The version of the control protocol. It stands alone so that a command that only asks for the status need not load
the typed messages, which cost it a quarter of its time."""

from __future__ import annotations

from typing import Final

__all__ = ["WIRE_HEADER", "WIRE_OLDEST", "WIRE_VERSION"]

WIRE_VERSION: Final = 1
"""Client and office must be at most one version apart; both send theirs in ``WIRE_HEADER``."""
WIRE_OLDEST: Final = max(1, WIRE_VERSION - 1)
"""The oldest version that an office of this one still answers."""
WIRE_HEADER: Final = "sublet-wire"
