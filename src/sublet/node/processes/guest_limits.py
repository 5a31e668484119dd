"""Limits on the number of guests, and on what is kept of ended ones. Pure.

Both are counted by tenant, so that one who starts very many costs the others neither their place nor their logs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from sublet.errors import CapacityExceeded, QuotaExceeded
from sublet.node.processes.logs import LOG_BOUND_BYTES
from sublet.values import GIB, MIB, GuestId, TenantId

GUESTS_MAX: Final = 2048
"""Guests that run at once on one machine."""
GUESTS_PER_TENANT_MAX: Final = 512
ENDED_MAX: Final = 1024
"""Ended guests that are still listed, with their logs."""
ENDED_PER_TENANT_MAX: Final = 256
LOGS_PER_TENANT_BYTES: Final = GIB
"""On disk, of what one tenant's guests have said. Of very many guests at once each gets a smaller log."""
LOG_LEAST_BYTES: Final = MIB // 4
"""Beyond the bound, so that the last guest has one as well."""
LOG_SHARE: Final = 16
"""A new guest may take this part of what is left to its tenant."""


class _Running(Protocol):
    @property
    def tenant(self) -> TenantId: ...


class GuestRoom:
    """How many guests may run. What the descriptors of this process allow is known to ``files``."""

    def __init__(self) -> None:
        self.guests_max = GUESTS_MAX
        self.why = ""
        """Why it is less than it could be, and what can be done about it."""

    def check(self, tenant: TenantId, running: Iterable[_Running]) -> None:
        """Raises if this tenant may not start one more now."""
        tenants = [guest.tenant for guest in running]
        if len(tenants) >= self.guests_max:
            raise CapacityExceeded(
                f"{self.guests_max} guests run on this machine, and that is the most",
                do=self.why or "Wait until some have ended.",
            )
        if tenants.count(tenant) >= GUESTS_PER_TENANT_MAX:
            raise QuotaExceeded(
                f"tenant {tenant} has {GUESTS_PER_TENANT_MAX} guests running, and that is the most",
                do="End some with `sublet stop`, or run several commands in one guest.",
            )


class EndedGuests:
    """The ended guests that are still listed, by tenant, with the bytes of their logs."""

    def __init__(self) -> None:
        self._of: dict[TenantId, dict[GuestId, int]] = {}

    def add(self, tenant: TenantId, guest: GuestId, log_bytes: int) -> list[GuestId]:
        """Add a guest that has ended; returns the guests that are dropped for it: the oldest of its tenant, and where
        all together are too many, the oldest of the tenant that has most."""
        mine = self._of.setdefault(tenant, {})
        mine[guest] = log_bytes
        let_go = []
        while len(mine) > ENDED_PER_TENANT_MAX or (len(mine) > 1 and sum(mine.values()) > LOGS_PER_TENANT_BYTES // 2):
            let_go.append(self._drop_oldest(tenant))
        while sum(map(len, self._of.values())) > ENDED_MAX:
            let_go.append(self._drop_oldest(max(self._of, key=lambda one: len(self._of[one]))))
        return let_go

    def log_bound(self, tenant: TenantId, running: Iterable[int]) -> int:
        """How large the log of a new guest may become, where these are the bounds of the tenant's running ones."""
        left = LOGS_PER_TENANT_BYTES - sum(running) - sum(self._of.get(tenant, {}).values())
        return max(LOG_LEAST_BYTES, min(LOG_BOUND_BYTES, left // LOG_SHARE))

    def _drop_oldest(self, tenant: TenantId) -> GuestId:
        mine = self._of[tenant]
        oldest = next(iter(mine))
        del mine[oldest]
        if not mine:
            del self._of[tenant]
        return oldest
