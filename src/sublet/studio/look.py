"""What open pages show of the office, read once for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Final, TypeVar

from sublet.client.fabric import Fabric
from sublet.lazy_dataclass import dataclass
from sublet.studio.office import is_of_session
from sublet.wire.http import BillLine, EstimatesView, LeaseView, PlaceAnswer, StatusView, TenantView
from sublet.wire.http_views import SESSION_LABEL

SPACING_S: Final = 0.1
"""From the beginning of one look to the next: where hundreds of leases are granted one after the other, each changes a
page that must show it, and the whole office would be read for each."""
PLACES_S: Final = 0.5
"""Places in the queue are at least so old before they are asked for again: each of them moves with every grant."""
BILLS_S: Final = 5.0
"""What a lease costs rises all the time."""
TENANTS_S: Final = 10.0
SHARE: Final = 10
"""What takes long to answer is asked for more seldom, so that it takes the office a tenth of its time at most."""
PLACES_MAX: Final = 1000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsSnapshot:
    """The sessions' part of the office at one moment."""

    began_s: float
    """When it was begun to be read, on the monotonic clock: what happened before is in it."""
    leases: Mapping[str, Sequence[LeaseView]]
    """By session, those whose end has not begun."""
    places: Mapping[str, PlaceAnswer]
    """By lease, of those that wait, as far as they were asked for."""
    bills: Mapping[str, BillLine]
    """By session."""
    tenants: Mapping[str, TenantView] = field(default_factory=dict)
    """By name, at most ``TENANTS_S`` old, and so are the next two."""
    shared: str = ""
    """The folder of the office's sockets for every user of the machine; empty if there are none."""
    estimates: EstimatesView | None = None
    """How well the office's estimates agreed with what came."""

    def is_disabled(self, tenant: str) -> bool:
        """Whether it may do nothing now."""
        known = self.tenants.get(tenant)
        return known is not None and known.disabled


def by_session(leases: Sequence[LeaseView]) -> dict[str, list[LeaseView]]:
    """Those of sessions whose end has not begun."""
    found: dict[str, list[LeaseView]] = {}
    for lease in leases:
        if is_of_session(lease):
            found.setdefault(lease.labels[SESSION_LABEL], []).append(lease)
    return found


class OfficeLook:
    """Reads the office for all pages. Safe to use from several threads."""

    def __init__(self, fabric: Fabric, *, sleep: Callable[[float], object] = time.sleep) -> None:
        """``fabric``: the office, for the studio itself."""
        self._fabric, self._sleep = fabric, sleep
        self._lock = threading.Lock()
        self._last: SessionsSnapshot | None = None
        self._places, self._bills, self._rarely = Seldom(PLACES_S), Seldom(BILLS_S), Seldom(TENANTS_S)
        self._rare: tuple[Mapping[str, TenantView], StatusView | None] = ({}, None)

    def since(self, moment_s: float) -> SessionsSnapshot:
        """The office as it was at this moment of the monotonic clock, or later. Many who ask at once cost it as much as
        one. Raises ``SubletError``."""
        with self._lock:
            if self._last is None or self._last.began_s < moment_s:
                if self._last is not None:
                    self._sleep(max(0.0, self._last.began_s + SPACING_S - time.monotonic()))
                self._last = self._read(self._last)
            return self._last

    def _read(self, last: SessionsSnapshot | None) -> SessionsSnapshot:
        began_s = time.monotonic()
        leases = by_session(self._fabric.leases())
        places = {} if last is None else last.places
        if any(one.granted_at is None for many in leases.values() for one in many):
            places = self._places.again(self._read_places, places)
        bills = self._bills.again(self._read_bills, {} if last is None else last.bills)
        self._rare = self._rarely.again(self._read_rare, self._rare)
        tenants, status = self._rare
        return SessionsSnapshot(
            began_s=began_s,
            leases=leases,
            places=places,
            bills=bills,
            tenants=tenants,
            shared="" if status is None else status.shared,
            estimates=None if status is None else status.estimates,
        )

    def _read_rare(self) -> tuple[Mapping[str, TenantView], StatusView | None]:
        tenants = self._fabric.request("GET", "/v1/tenants", shape=list[TenantView])
        return {one.id: one for one in tenants}, self._fabric.status()

    def _read_places(self) -> Mapping[str, PlaceAnswer]:
        line = self._fabric.request("GET", f"/v1/queue?limit={PLACES_MAX}", shape=list[PlaceAnswer])
        return {one.lease.id: one for one in line}

    def _read_bills(self) -> Mapping[str, BillLine]:
        return {line.key: line for line in self._fabric.bill(by="session")}


class Seldom:
    """An answer that is kept for a while."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._due_s = every_s, 0.0

    def again(self, read: Callable[[], _T], last: _T) -> _T:
        """The last answer, or another where that is due."""
        began_s = time.monotonic()
        if began_s < self._due_s:
            return last
        found = read()
        ended_s = time.monotonic()
        self._due_s = ended_s + max(self._every_s, SHARE * (ended_s - began_s))
        return found
