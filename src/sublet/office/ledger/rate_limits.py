"""Rate limits of tenants: token buckets in whole nanoseconds. Pure.

Two things are counted for each tenant. *Requests*, since each costs the office's one loop some microseconds: what a
tenant sends to keep, or to give back, what it has (renewals, releases) goes on where other requests are refused, up to
a bound of its own, since a renewal that is refused would end a lease. And *leases that begin*, since each leaves a few
kilobytes in the audit chain, which is never shortened. The owner is not counted.

A bucket is one instant: the moment at which all that was taken will have come back.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sublet.errors import QuotaExceeded
from sublet.office.ledger.records import LOCAL_TENANT
from sublet.values import NS_PER_S, GroupId, TenantId, format_duration

MINUTE_NS: Final = 60 * NS_PER_S
HOUR_NS: Final = 60 * MINUTE_NS
BURST_PART: Final = 6
"""Requests may come at once that are this part of a minute's."""
BURST_MIN: Final = 60
KEEPING: Final = 10
"""What keeps or gives back may be this many times the burst ahead."""


class RequestRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of each tenant."""

    requests_per_minute: int = 6000
    leases_per_hour: int = 3000


class TooMany(QuotaExceeded):
    """A rate is used up; ``retry_s`` says when it is not."""

    def __init__(self, message: str, *, tenant: TenantId, wait_ns: int, of_group: bool = False) -> None:
        """``tenant``: whose request was refused. ``of_group``: by the rate of its group."""
        self.tenant, self.of_group = tenant, of_group
        super().__init__(message, do=f"Ask again in {format_duration(_up_to_a_second(wait_ns))}.", reason="rate")
        self.retry_s = _up_to_a_second(wait_ns) // NS_PER_S

    @property
    def kind(self) -> str:
        """Clients know the class it is made from."""
        return QuotaExceeded.__name__


class Bucket:
    """Tokens that come back at an even rate."""

    __slots__ = ("_burst_ns", "_each_ns", "_whole_at_ns")

    def __init__(self, *, amount: int, within_ns: int, burst: int) -> None:
        self._each_ns = max(1, within_ns // amount)
        self._burst_ns = burst * self._each_ns
        self._whole_at_ns = 0

    def take(self, now_ns: int, count: int = 1, *, ahead: int = 1) -> int:
        """Take so many; 0, or, if there are not as many, the nanoseconds until there will be. ``ahead``: how many times
        the burst may be taken before it has come back."""
        whole_at_ns = max(self._whole_at_ns, now_ns) + count * self._each_ns
        wait_ns = whole_at_ns - now_ns - ahead * self._burst_ns
        if wait_ns > 0:
            return wait_ns
        self._whole_at_ns = whole_at_ns
        return 0

    def give_back(self, count: int) -> None:
        """So many of those that were taken were not used."""
        self._whole_at_ns -= count * self._each_ns


class RateLimits:
    """The buckets of all tenants."""

    def __init__(self, rates: RequestRates) -> None:
        self.rates = rates
        self._requests: dict[tuple[str, int], Bucket] = {}
        """By tenant, or `group/NAME`, and by rate: one that was changed is counted anew."""
        self._leases: dict[TenantId, Bucket] = {}

    def set_rates(self, rates: RequestRates) -> None:
        """Other rates hold from now on; what one of them counts is counted anew where it has changed."""
        if rates.leases_per_hour != self.rates.leases_per_hour:
            self._leases.clear()
        self.rates = rates

    def request(
        self,
        tenant: TenantId,
        now_ns: int,
        count: int = 1,
        *,
        keeps: bool = False,
        own: int | None = None,
        group: tuple[GroupId, int] | None = None,
    ) -> None:
        """So many more requests, or a message with so many in it, which counts for as many as may come at once at the
        most; raises ``TooMany``. ``keeps``: it keeps or gives back what the tenant has. ``own``: the tenant's own rate;
        ``group``: its group and the rate of that, for what does not keep: a neighbour's flood ends no lease."""
        if tenant == LOCAL_TENANT:
            return
        rate = self.rates.requests_per_minute if own is None else own
        wait_ns = self._take(tenant, rate, now_ns, count, ahead=KEEPING if keeps else 1)
        if wait_ns:
            raise TooMany(f"tenant {tenant} sends more than {rate} requests a minute", tenant=tenant, wait_ns=wait_ns)
        if group is not None and not keeps:
            name, rate = group
            wait_ns = self._take(f"group/{name}", rate, now_ns, count, ahead=1)
            if wait_ns:
                text = f"group {name} sends more than {rate} requests a minute"
                raise TooMany(text, tenant=tenant, wait_ns=wait_ns, of_group=True)

    def _take(self, whose: str, rate: int, now_ns: int, count: int, *, ahead: int) -> int:
        burst = max(BURST_MIN, rate // BURST_PART)
        bucket = self._requests.get((whose, rate))
        if bucket is None:
            bucket = self._requests[whose, rate] = Bucket(amount=rate, within_ns=MINUTE_NS, burst=burst)
        return bucket.take(now_ns, min(count, burst), ahead=ahead)

    def lease(self, tenant: TenantId, now_ns: int, count: int = 1) -> None:
        """So many leases begin, or one is attached anew; raises ``TooMany``."""
        if tenant == LOCAL_TENANT:
            return
        if count > self.rates.leases_per_hour:
            raise QuotaExceeded(
                f"tenant {tenant} may begin {self.rates.leases_per_hour} leases within an hour, not {count}",
                do="Ask for fewer at a time, or the operator for more.",
            )
        bucket = self._leases.get(tenant)
        if bucket is None:
            rate = self.rates.leases_per_hour
            bucket = self._leases[tenant] = Bucket(amount=rate, within_ns=HOUR_NS, burst=rate)
        wait_ns = bucket.take(now_ns, count)
        if wait_ns:
            raise TooMany(
                f"tenant {tenant} has begun {self.rates.leases_per_hour} leases within an hour",
                tenant=tenant,
                wait_ns=wait_ns,
            )

    def no_lease(self, tenant: TenantId, count: int = 1) -> None:
        """So many did not begin after all: they were refused, and nothing of them is kept."""
        bucket = self._leases.get(tenant)
        if bucket is not None:
            bucket.give_back(count)


def _up_to_a_second(wait_ns: int) -> int:
    """Rounded up, so that a caller who waits as long as it says has waited long enough."""
    return -(-wait_ns // NS_PER_S) * NS_PER_S
