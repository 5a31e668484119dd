"""How many descriptors this process may have, and how many guests and connections fit in them.

A guest takes up to five while it runs (its pipes or terminal, its log, and for a moment what starts it), a connection
one. The kernel's usual 1024 are for programs that do one thing, so as many are taken as this user may have; guests are
started with what was there before, since some programs cannot count beyond it.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final, NamedTuple

FILES_WANTED: Final = 32_768
"""Enough for all guests and connections that may be."""
_OWN: Final = 96
"""The loop, notes, zygotes, forked jobs, locks, and whatever is opened for a moment."""
_PER_GUEST: Final = 6
_HOLDERS_SHARE: Final = 4
"""At most this part of the descriptors is for connections."""


class Allowance(NamedTuple):
    """How many there may be of each."""

    guests: int
    holders: int
    why: str
    """What to do about it if that is fewer than there could be; else empty."""


def allowance(limit: int, *, guests_max: int, holders_max: int) -> Allowance:
    """What so many descriptors are room for. Pure."""
    left = max(0, limit - _OWN)
    holders = max(1, min(holders_max, left // _HOLDERS_SHARE))
    guests = max(1, min(guests_max, (left - holders) // _PER_GUEST))
    why = ""
    if guests < guests_max or holders < holders_max:
        why = (
            f"This user may have {limit} open files in one process. Wait until some have ended; or raise that limit "
            f"(`ulimit -Hn {FILES_WANTED}`, or LimitNOFILE= of a service) and start the office anew."
        )
    return Allowance(guests, holders, why)


_before: tuple[int, int] | None = None


def raise_limit(wanted: int = FILES_WANTED) -> int:
    """Take as many as there may be; how many that is. Root may have more than its limit says."""
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _before is None:
        _before = soft, hard
    infinite = resource.RLIM_INFINITY
    highest = wanted if hard == infinite else max(hard, wanted)
    for new in ((wanted, highest), (min(wanted, hard) if hard != infinite else wanted, hard)):
        if soft != infinite and soft < new[0]:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, new)
                break
    now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if now == infinite else now


def give_back() -> None:
    """In a child: what was there before ``raise_limit``."""
    if _before is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, _before)
