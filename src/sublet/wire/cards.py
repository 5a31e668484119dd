"""What was found on a card between two leases, and who takes how much of it while it is lent.

Standard library only: the supervisor reads these.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CardFound", "CardUse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFound:
    """One look at a card on which nobody should be."""

    left: str = ""
    """What is still there and may go by itself, in words."""
    failed: str = ""
    """Why it cannot be had clean, in words."""
    is_hard: bool = False
    """Whether looking again would not mend it."""
    settings: str = ""
    """What it is set to: text that the program understands again."""
    scrubbed_bytes: int = 0
    scrub_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """So much of a card is used by one process, as the driver says."""

    card: str
    pid: int
    bytes: int
