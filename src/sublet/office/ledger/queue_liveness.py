"""Drops queue places whose holders give no sign of life.

A lease that runs is kept alive by renewals and ends by its time to live. A place in the queue has neither, so an open
connection that asks for it (a long poll, a stream of events) or any look at it counts as a sign of life, and a holder
that was silent for ``SILENCE_S`` loses the place. Pure: the driver brings the instants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from sublet.lease.states import LeaseStatus
from sublet.office.ledger.events import Ended, Event, Granted, Queued, Ungranted
from sublet.office.ledger.records import LeaseRecord
from sublet.values import NS_PER_S, LeaseId

SILENCE_S: Final = 30.0
"""A holder in the queue who gives no sign of life for this long has left it."""
_SILENCE_NS: Final = round(SILENCE_S * NS_PER_S)
_CONCERNING: Final = frozenset((Queued, Ungranted, Granted, Ended))


class Presence:
    """The last sign of life of each queued holder, oldest first, so that a look costs only what it finds."""

    def __init__(self) -> None:
        self._seen: OrderedDict[LeaseId, int] = OrderedDict()
        self._connected: dict[LeaseId, int] = {}

    def __len__(self) -> int:
        """How many are watched."""
        return len(self._seen)

    def restored(self, lease: LeaseRecord, now_ns: int) -> None:
        """After a restart the holder of each queued request gets the full time to come back."""
        if lease.status is LeaseStatus.QUEUED:
            self._watch(lease.id, now_ns)

    def note(self, events: Iterable[Event], now_ns: int) -> None:
        """Requests that entered the queue and that left it. A grant that waits to be claimed has its claim window."""
        for event in events:
            if type(event) not in _CONCERNING:  # most facts are not, and they come by the thousand
                continue
            if isinstance(event, Queued):
                self._watch(event.lease.id, now_ns)
            elif isinstance(event, Ungranted):
                self._watch(event.lease, now_ns)
            elif isinstance(event, Granted | Ended):
                self._seen.pop(event.lease, None)

    def seen(self, lease: LeaseId, now_ns: int) -> None:
        """A sign of life."""
        if lease in self._seen:
            self._watch(lease, now_ns)

    def connected(self, lease: LeaseId) -> None:
        """A connection of the holder is open for as long as ``disconnected`` is not called."""
        self._connected[lease] = self._connected.get(lease, 0) + 1

    def disconnected(self, lease: LeaseId, now_ns: int) -> None:
        """It closed: from now on the silence counts."""
        left = self._connected.get(lease, 0) - 1
        if left > 0:
            self._connected[lease] = left
        else:
            self._connected.pop(lease, None)
        self.seen(lease, now_ns)

    def silent_holders(self, now_ns: int) -> list[LeaseId]:
        """Holders that were silent too long; each is named once."""
        found: list[LeaseId] = []
        while self._seen:
            lease, seen_ns = next(iter(self._seen.items()))
            if now_ns - seen_ns < _SILENCE_NS:
                break
            if lease in self._connected:
                self._watch(lease, now_ns)
                continue
            del self._seen[lease]
            found.append(lease)
        return found

    def _watch(self, lease: LeaseId, now_ns: int) -> None:
        self._seen[lease] = now_ns
        self._seen.move_to_end(lease)
