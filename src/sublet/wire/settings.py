"""A supervisor's start settings, in a module of their own, which is loaded first."""

from __future__ import annotations

from typing import Final

from sublet.lazy_dataclass import dataclass

UIDS_VARIABLE: Final = "SUBLET_UIDS"
"""The file that divides the user numbers of tenants among the offices of this machine, in place of the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """What a supervisor is started with."""

    office: str
    """The office's id, which marks everything that is its. Empty: it is told on standard input, once it is known."""
    runtime: str
    """The folder that a reboot empties: sockets, notes, pages."""
    state: str
    """The folder that stays: the logs of guests."""
    package: str
    """Where the package lies."""
    version: str
