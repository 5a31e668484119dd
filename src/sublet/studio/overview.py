"""The whole office, for operators of the studio, and the two actions they have on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import quote, urlencode

from sublet.client.fabric import Fabric
from sublet.errors import NotFound
from sublet.lazy_dataclass import dataclass
from sublet.lease.value import rfc3339
from sublet.studio.look import Seldom
from sublet.values import NS_PER_S
from sublet.wire.http import (
    AuditEntry,
    ClearFenceRequest,
    ConnectedView,
    DrainRequest,
    FenceView,
    GroupView,
    LeaseView,
    NodeView,
    NoisyView,
    PlaceAnswer,
    ReservationView,
    StatusView,
    TenantView,
)

SHOWN_S: Final = 1.0
"""What the open pages of operators show is at most this old."""
AUDIT_SHOWN: Final = 100
QUEUE_SHOWN: Final = 256
NOISY_H: Final = 24
"""Hours within which a tenant that disturbed others is named."""
NOISY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Overview:
    """The office at one moment."""

    at_s: float
    """Wall time."""
    status: StatusView
    leases: list[LeaseView]
    """Newest first; also those that have ended and are still remembered."""
    queue: list[PlaceAnswer]
    tenants: list[TenantView]
    groups: list[GroupView]
    reservations: list[ReservationView]
    fences: list[FenceView]
    noisy: NoisyView
    """Of the last ``NOISY_H`` hours, at most ``NOISY_S`` old."""
    connected: list[ConnectedView]
    """Processes of other users at the office's shared socket; none where the office is too old to say."""


class OfficeOverview:
    """Reads the office with the studio's right, and does what operators ask with their own. Safe to use from several
    threads."""

    def __init__(
        self, fabric: Fabric, as_operator: Callable[[str], Fabric], news_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """``as_operator``: the office, with an operator's access token. ``news_s``: when the office last had news, on
        the monotonic clock."""
        self._fabric, self._as_operator, self._news_s = fabric, as_operator, news_s
        self._lock = threading.Lock()
        self._shown: tuple[float, Overview] | None = None
        self._noisily = Seldom(NOISY_S)

    def shown(self) -> Overview:
        """At most ``SHOWN_S`` old, and with the last news in it: many open pages cost the office as much as one."""
        with self._lock:
            if self._shown is None or self._shown[0] < max(self._news_s(), time.monotonic() - SHOWN_S):
                self._shown = (time.monotonic(), self._read())
            return self._shown[1]

    def drain(self, node: str, is_draining: bool, token: str) -> None:
        """No new leases there and notice to its holders, or the end of that. ``token``: the operator's."""
        path = f"/v1/nodes/{quote(node, safe='')}/drain"
        with self._as_operator(token) as office:
            office.request("POST", path, DrainRequest(draining=is_draining), shape=NodeView)
        self._forget()

    def clear(self, resource: str, token: str, *, vouch: bool) -> None:
        """Verify what is in quarantine again; with ``vouch`` return it to service on the operator's word."""
        if resource not in [fence.resource for fence in self._fences()]:
            raise NotFound(f"{resource[:60]} is not in quarantine", do="Open the page again.")
        path = f"/v1/fences/clear?{urlencode({'resource': resource})}"
        with self._as_operator(token) as office:
            office.request("POST", path, ClearFenceRequest(vouch=vouch), shape=list[FenceView])
        self._forget()

    def audit(self, of: str, token: str) -> list[AuditEntry]:
        """The newest records, newest first; of one lease, tenant or resource, if that is said."""
        query = {"limit": str(AUDIT_SHOWN), **({"of": of} if of else {})}
        with self._as_operator(token) as office:
            return office.request("GET", f"/v1/audit?{urlencode(query)}", shape=list[AuditEntry])[::-1]

    def _read(self) -> Overview:
        ask = self._fabric.request
        return Overview(
            at_s=time.time(),
            status=self._fabric.status(),
            leases=self._fabric.leases(all=True),
            queue=ask("GET", f"/v1/queue?limit={QUEUE_SHOWN}", shape=list[PlaceAnswer]),
            tenants=ask("GET", "/v1/tenants", shape=list[TenantView]),
            groups=ask("GET", "/v1/groups", shape=list[GroupView]),
            reservations=ask("GET", "/v1/reservations", shape=list[ReservationView]),
            fences=self._fences(),
            noisy=self._noisily.again(self._read_noisy, NoisyView(rules={}, neighbours=[])),
            connected=self._connected(),
        )

    def _connected(self) -> list[ConnectedView]:
        try:
            return self._fabric.request("GET", "/v1/connections", shape=list[ConnectedView])
        except NotFound:
            return []

    def _read_noisy(self) -> NoisyView:
        since = rfc3339(time.time_ns() - NOISY_H * 3600 * NS_PER_S)
        return self._fabric.request("GET", f"/v1/bill/neighbours?{urlencode({'since': since})}", shape=NoisyView)

    def _fences(self) -> list[FenceView]:
        return self._fabric.request("GET", "/v1/fences", shape=list[FenceView])

    def _forget(self) -> None:
        with self._lock:
            self._shown = None
