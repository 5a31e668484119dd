"""The rules of the shared socket, which every user of the machine can reach, besides authentication (``access``).

Each user may send so many requests a minute, whatever tokens it shows (and each tenant, ``rate_limits``); more are
refused, and cost no more than the refusal. Each process that asks is written to the office's log once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

from sublet.errors import CapacityExceeded, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.office.access import Origin
from sublet.office.ledger.rate_limits import BURST_MIN, BURST_PART
from sublet.values import NS_PER_S, TenantId

_MINUTE_NS: Final = 60 * NS_PER_S
KEYS_MAX: Final = 4096
"""Users and tenants that are counted at once. One that is dropped begins anew, with all it may have at once."""
SEEN_MAX: Final = 1024
"""Processes of which it is remembered that they were logged."""

_log: Final = logging.getLogger("sublet.shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLimits:
    """The limits of the shared socket, in one value."""

    requests_per_minute_of_user: int = 6000
    """Of all processes of one user of the machine, whatever tokens they show."""
    log_lines_per_minute_of_user: int = 60

    @property
    def burst(self) -> int:
        """So many requests may come at once; as for a tenant."""
        return max(BURST_MIN, self.requests_per_minute_of_user // BURST_PART)


class TokenBuckets:
    """Rate limits: one token bucket for each key, filled evenly. Pure; time is handed in."""

    def __init__(self, per_minute: int, burst: int) -> None:
        self._per_minute = per_minute
        self._burst_ns = burst * _MINUTE_NS // per_minute
        self._full_at_ns: OrderedDict[object, int] = OrderedDict()
        """When each bucket would be full if nothing were taken any more: one number says how full it is."""

    def take(self, key: object, now_ns: int) -> float:
        """Take one; 0, or in how many seconds there is one again."""
        cost_ns = _MINUTE_NS // self._per_minute
        full_at_ns = max(now_ns, self._full_at_ns.pop(key, now_ns)) + cost_ns
        if (short_ns := full_at_ns - now_ns - self._burst_ns) > 0:
            self._full_at_ns[key] = full_at_ns - cost_ns
            return short_ns / NS_PER_S
        self._full_at_ns[key] = full_at_ns
        if len(self._full_at_ns) > KEYS_MAX:
            self._full_at_ns.popitem(last=False)
        return 0.0


class TooManyOfUser(CapacityExceeded):
    """The rate of a user of the machine is used up; ``retry_s`` says when it is not."""

    def __init__(self, origin: Origin, most: int, wait_s: float) -> None:
        self.uid, self.retry_s = origin.uid, max(1, round(wait_s))
        super().__init__(
            f"user {origin.uid} has sent more than {most} requests a minute over the shared socket",
            do=f"Try again in {self.retry_s} s, and ask less often.",
        )

    @property
    def kind(self) -> str:
        """Clients know the class it is made from."""
        return CapacityExceeded.__name__


class SharedSocket:
    """Counts and notes who asks over the shared sockets, control and data."""

    def __init__(self, limits: SharedLimits | None = None) -> None:
        self._seen: OrderedDict[tuple[Origin, str], None] = OrderedDict()
        self._limit_by(SharedLimits() if limits is None else limits)

    def _limit_by(self, limits: SharedLimits) -> None:
        self.limits = limits
        self._users = TokenBuckets(limits.requests_per_minute_of_user, limits.burst)
        self._lines = TokenBuckets(limits.log_lines_per_minute_of_user, limits.log_lines_per_minute_of_user)

    def set_limits(self, limits: SharedLimits) -> None:
        """Other limits hold from now on; where they have changed, all is counted anew."""
        if limits != self.limits:
            self._limit_by(limits)

    def on_request(self, origin: Origin, now_ns: int) -> None:
        """A request came from this user, whichever tenant it may turn out to be. Raises if it were too many."""
        if wait_s := self._users.take(origin.uid, now_ns):
            raise TooManyOfUser(origin, self.limits.requests_per_minute_of_user, wait_s)

    def known(self, origin: Origin, tenant: TenantId, now_ns: int) -> None:
        """It is this tenant's."""
        self._note(origin, f"asks as tenant {tenant}", now_ns)

    def refused(self, origin: Origin, error: SubletError, now_ns: int) -> None:
        """Its caller is accepted as no tenant."""
        self._note(origin, f"was refused: {error.message}", now_ns)

    def _note(self, origin: Origin, what: str, now_ns: int) -> None:
        key = (origin, what)
        if key in self._seen:
            self._seen.move_to_end(key)
            return
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        if not self._lines.take(origin.uid, now_ns):
            _log.info("shared socket: %s %s", origin, what)
