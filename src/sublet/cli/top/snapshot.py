"""An office's state at one moment, and how events change it. Pure.

A snapshot is read whole now and then; between two readings the news of the office are put in, so that a notice or an
end is seen when it happens. News carry the whole lease, hence it does not matter if one is missed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sublet.cli.show import Json

ENDED_SHOWN_S: Final = 10.0
"""How long a lease that ended is still shown, with the reason."""
_LEAVES: Final = ("ready", "offer", "active", "notice", "spared", "attached", "ending")
"""News after which the lease is (still) listed and does not wait."""


class EndedLease(NamedTuple):
    """A lease that is over, and when we heard of it."""

    at_s: float
    lease: Json


class OfficeSnapshot(NamedTuple):
    """Documents of the control API as they came. What the caller may not see, or could not be had, is None."""

    status: Json
    leases: tuple[Json, ...]
    """Live ones and those that wait, newest first."""
    queue: tuple[Json, ...]
    """Places, those who are next first."""
    guests: tuple[Json, ...] | None
    bill: tuple[Json, ...]
    """One line per tenant."""
    tenants: tuple[Json, ...] | None = None
    fences: tuple[Json, ...] | None = None
    at_s: float = 0.0
    """When it was read, on the monotonic clock: what counts down counts from here."""
    wall_s: float = 0.0
    ended: tuple[EndedLease, ...] = ()
    lost_s: float | None = None
    """Since when the office has not answered."""
    lost_why: str = ""


def remaining(lease: Json, elapsed_s: float) -> float | None:
    """What is left of its time to live."""
    return None if lease["remaining"] is None else max(0.0, float(lease["remaining"]) - elapsed_s)


def apply_news(known: OfficeSnapshot, what: str, news: Json, now_s: float) -> OfficeSnapshot:
    """The same, after one of the office's news. News of kinds we do not know change nothing."""
    lease: Json | None = news.get("lease")
    if lease is None:
        return known
    lease = _as_of_then(lease, now_s - known.at_s)
    if what == "place":
        place = {key: news[key] for key in ("position", "reason", "estimate")} | {"lease": lease}
        queue = [*(other for other in known.queue if other["lease"]["id"] != lease["id"]), place]
        queue.sort(key=lambda waiting: int(waiting["position"]))
        return known._replace(queue=tuple(queue), leases=_with(known.leases, lease))
    waiting = tuple(place for place in known.queue if place["lease"]["id"] != lease["id"])
    if what == "ended":
        left = tuple(other for other in known.leases if other["id"] != lease["id"])
        return known._replace(queue=waiting, leases=left, ended=_ended(known, lease, now_s))
    if what in _LEAVES:
        return known._replace(queue=waiting, leases=_with(known.leases, lease))
    return known


def merged(known: OfficeSnapshot, fresh: OfficeSnapshot) -> OfficeSnapshot:
    """What was just read, with the ends that were heard of a moment ago, and with what is not read every time."""
    live = {lease["id"] for lease in fresh.leases}
    ended = tuple(end for end in known.ended if end.lease["id"] not in live and fresh.at_s - end.at_s < ENDED_SHOWN_S)
    return fresh._replace(
        ended=ended,
        bill=fresh.bill or known.bill,
        tenants=known.tenants if fresh.tenants is None else fresh.tenants,
        fences=known.fences if fresh.fences is None else fresh.fences,
    )


def _as_of_then(lease: Json, later_s: float) -> Json:
    """News count from when they came; in a snapshot everything counts from when it was read."""
    moved = dict(lease)
    for key in ("remaining", "claim_within"):
        if moved[key] is not None:
            moved[key] += later_s
    if moved["notice"] is not None:
        moved["notice"] = {**moved["notice"], "in_seconds": moved["notice"]["in_seconds"] + later_s}
    return moved


def _with(leases: tuple[Json, ...], lease: Json) -> tuple[Json, ...]:
    if any(other["id"] == lease["id"] for other in leases):
        return tuple(lease if other["id"] == lease["id"] else other for other in leases)
    return (lease, *leases)


def _ended(known: OfficeSnapshot, lease: Json, now_s: float) -> tuple[EndedLease, ...]:
    """The newest first; those who have been shown long enough go."""
    kept = (end for end in known.ended if now_s - end.at_s < ENDED_SHOWN_S and end.lease["id"] != lease["id"])
    return (EndedLease(now_s, lease), *kept)
