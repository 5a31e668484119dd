"""What a holder knows of its lease: frozen facts. A change makes a new one."""

from __future__ import annotations

from dataclasses import dataclass

from sublet.values import EndReason

__all__ = ["LeaseEnd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnd:
    """Why and when a lease ended, and how to go on."""

    reason: EndReason
    at: str
    """RFC 3339, UTC: for people and records."""
    detail: str = ""
    saved_at: str | None = None
    """When the state was last saved, if it was."""
    resume_hint: str = "Acquire a new lease and go on from the last checkpoint."
