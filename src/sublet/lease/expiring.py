"""The local notice: near an unrenewed deadline, guests are told to save and end.

Saving needs no office. At the deadline everything is killed, so what is to be saved must begin before it, by the lead:
the grace, or one and a half times what the last save took. If the deadline is moved after all, the lease is spared, and
may be warned again.

Parking does need the office, which sets memory aside for it. So it is asked earlier, by half of the lead. If it has not
taken the lease by the time of the warning, guests are warned as ever.

A renewal in time must not come too late for the warning. Its holder plans it when a renewal is answered, and is told
with that answer how long saving takes; so a save counts from the next move of the deadline on, and not in the time that
has begun. And a holder whose renewals do not say that it reckons with it may come as late as after 80 % of the time;
for its sake the lead is never more than 15 % of it.
"""

from __future__ import annotations

import heapq
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.lease.policy import grace_ns, lead_ns
from sublet.values import LeaseId

_UNHEEDED_PERCENT: Final = 15
"""What saving may take of the time of a holder that does not say that it reckons with it."""


@dataclass(slots=True)
class _Entry:
    deadline_ns: int
    ttl_ns: int = 0
    save_ns: int = 0
    """What the last save took, when the deadline was moved last."""
    next_save_ns: int = 0
    """What it takes now."""
    heeded_ns: int = 0
    """The lead that its holder reckons with."""
    requested: bool = False
    warned: bool = False

    @property
    def warn_at_ns(self) -> int:
        return self.deadline_ns - self._lead_ns()

    @property
    def ask_at_ns(self) -> int:
        return self.warn_at_ns - self._lead_ns() // 2

    @property
    def next_ns(self) -> int | None:
        """What is to be done next for it, and when."""
        return None if self.warned else self.warn_at_ns if self.requested else self.ask_at_ns

    def _lead_ns(self) -> int:
        most_ns = max(self.ttl_ns * _UNHEEDED_PERCENT // 100, self.heeded_ns)
        return max(grace_ns(self.ttl_ns), min(most_ns, lead_ns(0, self.save_ns)))


class Expiring:
    """Which live leases are to be warned, and when."""

    def __init__(self) -> None:
        self._entries: dict[LeaseId, _Entry] = {}
        self._moments: list[tuple[int, LeaseId]] = []

    def __contains__(self, lease: object) -> bool:
        """Whether it was warned, and the warning stands."""
        entry = self._entries.get(lease)  # type: ignore[call-overload]  # any object may be asked for
        return entry is not None and entry.warned

    def is_requested(self, lease: LeaseId) -> bool:
        """Whether its deadline is so near that the office was asked to park it."""
        entry = self._entries.get(lease)
        return entry is not None and entry.requested

    def moved(self, lease: LeaseId, deadline_ns: int, ttl_ns: int, now_ns: int, *, heeded_ns: int = 0) -> bool:
        """The lease has this deadline now; ``heeded_ns``: the lead that its holder reckons with. Returns whether it was
        warned, and is spared."""
        entry = self._entries.setdefault(lease, _Entry(deadline_ns))
        entry.deadline_ns, entry.ttl_ns, entry.heeded_ns = deadline_ns, ttl_ns, heeded_ns
        entry.save_ns = entry.next_save_ns
        return self._arm(lease, entry, now_ns)

    def saved(self, lease: LeaseId, save_ns: int) -> None:
        """The lease's last save took so long."""
        entry = self._entries.get(lease)
        if entry is not None:
            entry.next_save_ns = save_ns

    def save_ns(self, lease: LeaseId) -> int:
        """How long its last save took; 0 if that is not known."""
        entry = self._entries.get(lease)
        return 0 if entry is None else entry.next_save_ns

    def inherit(self, lease: LeaseId, save_ns: int, now_ns: int) -> None:
        """From now on it is the lease of guests whose last save took so long: no renewal was planned without that."""
        entry = self._entries.get(lease)
        if entry is not None and save_ns:
            entry.save_ns = entry.next_save_ns = save_ns
            self._arm(lease, entry, now_ns)

    def drop(self, lease: LeaseId) -> None:
        """It is over; harmless if it was not known."""
        self._entries.pop(lease, None)

    def due(self, now_ns: int) -> tuple[list[LeaseId], list[LeaseId]]:
        """For whom to ask the office now, and whom to warn; each is named once."""
        to_park, warned = [], []
        while (next_ns := self.next_ns()) is not None and next_ns <= now_ns:
            lease = heapq.heappop(self._moments)[1]
            entry = self._entries[lease]
            if entry.requested:
                entry.warned = True
                warned.append(lease)
            else:
                entry.requested = True
                to_park.append(lease)
                heapq.heappush(self._moments, (entry.warn_at_ns, lease))
        return to_park, warned

    def next_ns(self) -> int | None:
        """When there is something to do for a lease."""
        while self._moments:
            at_ns, lease = self._moments[0]
            entry = self._entries.get(lease)
            if entry is not None and entry.next_ns == at_ns:
                return at_ns
            heapq.heappop(self._moments)
        return None

    def _arm(self, lease: LeaseId, entry: _Entry, now_ns: int) -> bool:
        if entry.warned and now_ns >= entry.warn_at_ns:
            return False  # not moved far enough: the warning stands
        spared, entry.warned = entry.warned, False
        entry.requested = entry.requested and now_ns >= entry.ask_at_ns
        heapq.heappush(self._moments, (entry.warn_at_ns if entry.requested else entry.ask_at_ns, lease))
        if len(self._moments) > 64 + 4 * len(self._entries):  # mostly moments that were moved since
            moments = ((known.next_ns, name) for name, known in self._entries.items())
            self._moments = [(at_ns, name) for at_ns, name in moments if at_ns is not None]
            heapq.heapify(self._moments)
        return spared
