"""When a lease is renewed, and when its holder must count it as lost.

Three moments of a lease's time to live, all counted from when the last answered request was *sent*::

    sent          due                                holder's deadline      the office's expiry
     |-------------|--- retries, at least five ----------|----- margin -----|
     0        0.60 to 0.80                       0.95 - request time-out     1.00 or later

The holder's deadline is never after the office's expiry. The office counts from when it *got* the request, which is
not before it was sent, so a delay of any message only moves its expiry back. What remains is the rate of the two
clocks: while the office's clock runs one second, the holder's may run as little as ``1 - rate_error``. A holder that
stops after ``ttl * (1 - rate_error)`` on its own clock has therefore stopped within ``ttl`` of the office's. The
request time-out on top leaves room to notice that an answer is not coming.

The margin between due and deadline is where lost messages are made good. It holds at least five attempts whose waits
double, so that one lost message, one stalled disk or one restart of the office loses no lease. Short leases have little
room: their renewals move forward until five attempts fit.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass, field
from typing import Final

from sublet.errors import InvalidRequest
from sublet.values import NS_PER_S, LeaseId, RenewMode, format_duration, parse_duration_ns, shown

ATTEMPTS_LEAST: Final = 5
"""So many attempts, each with its wait, fit between due and the holder's deadline, whatever the TTL."""
_WAITS: Final = 2**ATTEMPTS_LEAST - 1
"""Waits that double: 1 + 2 + 4 + 8 + 16 times the first."""
_FIRST_WAIT_LEAST: Final = 20
"""The first wait is at least a twentieth of the request time-out, for less would not outlast a disk's fsync."""
_LEAD_SHARE: Final = 4
"""Saving may need at most a quarter of the TTL."""
_DUE_LEAST: Final = 10
"""Never renew before a tenth of the time has gone, whatever the lead: that would be a loop, not a heartbeat."""
GRACE_MAX_NS: Final = 5 * NS_PER_S
_PPM: Final = 1_000_000
_DOUBLINGS_MAX: Final = 20


def grace_ns(ttl_ns: int) -> int:
    """What a guest has to save and leave, unless more is asked for."""
    return min(GRACE_MAX_NS, ttl_ns // 10)


def lead_ns(grace_ns: int, save_ns: int) -> int:
    """How long before the deadline saving must begin: max(grace, 1.5 times the last measured save)."""
    return max(grace_ns, save_ns + save_ns // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalPlan:
    """What a policy comes to for one lease. Every instant counts from when the last answered request was sent."""

    granted_ns: int
    due_ns: int
    warn_ns: int
    """A quarter of the time is left."""
    deadline_ns: int
    """From here on the holder counts the lease as lost, whatever the office may think."""
    wait_first_ns: int
    wait_max_ns: int

    def wait_ns(self, attempt: int) -> int:
        """How long attempt number ``attempt`` (from 0) is waited for before the next: doubling, and capped."""
        return min(self.wait_max_ns, self.wait_first_ns << min(attempt, _DOUBLINGS_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalPolicy:
    """When to renew. Durations are seconds or texts such as ``"90s"``; what contradicts itself is refused at once.

    ``RenewalPolicy()`` suits most leases. ``RenewalPolicy(every="1m")`` renews each minute instead of by fraction.
    """

    renew_at_fraction: float = 0.70
    """Renew when this share of the TTL has gone."""
    jitter_fraction: float = 0.10
    """Earlier or later by up to this share of the TTL (or of ``every``), fixed for each lease by its id: leases granted
    together do not renew together, and the same run renews at the same moments again."""
    every: float | str | None = None
    """Renew this often instead; it must leave room for the retries."""
    mode: RenewMode = RenewMode.WHILE_BUSY
    """``while-busy`` renews only while work runs under the lease, so that none is kept because it was forgotten."""
    max_hold: float | str | None = None
    """Never hold it longer than this without a break: a renewal that would lead beyond is not made."""
    backoff_first: float = 1.0
    """Seconds to wait for the first answer before the next attempt; less where five attempts would not fit."""
    backoff_max: float = 5.0
    """Waits double up to this many seconds, or to the request time-out if that is less."""
    rate_error: float = 0.05
    """By how much the holder's clock may run slower than the office's."""
    request_timeout_max: float = 5.0
    """Seconds."""
    request_timeout_fraction: float = 0.10
    """The request time-out is this share of the TTL, and at most ``request_timeout_max``."""
    warn_fraction: float = 0.25
    """Warn when this share of the TTL is left."""
    _every_ns: int | None = field(init=False, repr=False, compare=False, default=None)
    _max_hold_ns: int | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.mode not in tuple(RenewMode):
            raise InvalidRequest(
                f"{shown(self.mode)} is not a way to renew",
                do=f"Use one of: {', '.join(mode.value for mode in RenewMode)}.",
            )
        object.__setattr__(self, "mode", RenewMode(self.mode))
        _within(self, "renew_at_fraction", 0.0, 1.0)
        _within(self, "jitter_fraction", 0.0, 0.5, low_ok=True)
        _within(self, "rate_error", 0.0, 0.5, low_ok=True)
        _within(self, "request_timeout_fraction", 0.0, 0.5)
        _within(self, "warn_fraction", 0.0, 1.0)
        for name in ("backoff_first", "backoff_max", "request_timeout_max"):
            _within(self, name, 0.0, 3600.0)
        if self.backoff_first > self.backoff_max:
            raise InvalidRequest(
                f"backoff_first ({self.backoff_first:g} s) is more than backoff_max ({self.backoff_max:g} s)",
                do="Make the first at most the second.",
            )
        if self.jitter_fraction >= self.renew_at_fraction:
            raise InvalidRequest(
                f"a jitter of {self.jitter_fraction:g} around {self.renew_at_fraction:g} reaches back to the start",
                do="Make jitter_fraction less than renew_at_fraction.",
            )
        end = 1.0 - self.rate_error - self.request_timeout_fraction
        if self.renew_at_fraction + self.jitter_fraction > end + 1e-9:
            raise InvalidRequest(
                f"renewing as late as {self.renew_at_fraction + self.jitter_fraction:.2f} of the TTL comes after the "
                f"holder's own deadline, which may be at {end:.2f}",
                do=f"Use renew_at_fraction={max(0.0, end - self.jitter_fraction):.2f} or less.",
            )
        retries = self.request_timeout_fraction * _WAITS / _FIRST_WAIT_LEAST
        if end - retries - 2 * self.jitter_fraction < 1 / _DUE_LEAST:
            raise InvalidRequest(
                f"the margins leave no room for {ATTEMPTS_LEAST} attempts within a TTL",
                do="Lower rate_error, request_timeout_fraction or jitter_fraction.",
            )
        if self.every is not None:
            object.__setattr__(self, "_every_ns", parse_duration_ns(self.every, "renewal interval"))
        if self.max_hold is not None:
            object.__setattr__(self, "_max_hold_ns", parse_duration_ns(self.max_hold, "maximum hold"))

    @property
    def max_hold_ns(self) -> int | None:
        return self._max_hold_ns

    def request_timeout_ns(self, ttl_ns: int) -> int:
        """min(5 s, 10 % of the TTL), by default."""
        return min(_ns(self.request_timeout_max), ttl_ns * _ppm(self.request_timeout_fraction) // _PPM)

    def deadline_after_ns(self, granted_ns: int) -> int:
        """How long after the *send* of the request that was answered with ``granted_ns`` the holder may go on."""
        slower = -(-granted_ns * _ppm(self.rate_error) // _PPM)  # rounded up: never late by a nanosecond
        return max(0, granted_ns - slower - self.request_timeout_ns(granted_ns))

    def plan(self, granted_ns: int, lease: LeaseId, lead_ns: int = 0) -> RenewalPlan:
        """The moments for one lease. ``lead_ns`` is how long before the deadline its saving must begin."""
        deadline = self.deadline_after_ns(granted_ns)
        latest = self._latest_ns(granted_ns)
        if self._every_ns is None:
            period = granted_ns * _ppm(self.renew_at_fraction) // _PPM
            jitter = granted_ns * _ppm(self.jitter_fraction) // _PPM
        else:
            period = self._every_ns
            jitter = period * _ppm(self.jitter_fraction) // _PPM
        centre = min(period, latest - jitter)  # moved as a whole, so that a short lease is spread as a long one is
        due = min(centre + jitter * _spread_ppm(lease) // _PPM, granted_ns - 2 * lead_ns)
        due = max(due, min(centre - jitter, granted_ns // _DUE_LEAST))
        return RenewalPlan(
            granted_ns=granted_ns,
            due_ns=due,
            warn_ns=granted_ns - granted_ns * _ppm(self.warn_fraction) // _PPM,
            deadline_ns=deadline,
            wait_first_ns=max(1, min(_ns(self.backoff_first), (deadline - due) // _WAITS)),
            wait_max_ns=max(1, min(_ns(self.backoff_max), self.request_timeout_ns(granted_ns))),
        )

    def check(self, ttl_ns: int, lead_ns: int = 0) -> None:
        """Refuse a TTL that this policy, or saving within ``lead_ns``, cannot live with; say which would do."""
        if ttl_ns < self.ttl_needed_ns(lead_ns):
            raise InvalidRequest(
                f"saving needs to begin {format_duration(lead_ns)} before the end, more than a quarter of a TTL of "
                f"{format_duration(ttl_ns)}",
                do=f"Ask for a TTL of at least {format_duration(self.ttl_needed_ns(lead_ns))}.",
            )
        latest = self._latest_ns(ttl_ns)
        if self._every_ns is not None and self._every_ns > latest:
            raise InvalidRequest(
                f"renewing every {format_duration(self._every_ns)} is too seldom for a TTL of "
                f"{format_duration(ttl_ns)}: {ATTEMPTS_LEAST} attempts must fit before the holder's own deadline",
                do=f"Renew every {format_duration(latest)} or more often, or ask for a longer TTL.",
            )
        if self._max_hold_ns is not None and self._max_hold_ns < ttl_ns:
            raise InvalidRequest(
                f"a maximum hold of {format_duration(self._max_hold_ns)} is less than the TTL of "
                f"{format_duration(ttl_ns)}",
                do="Ask for a TTL that is at most the maximum hold.",
            )

    @staticmethod
    def ttl_needed_ns(lead_ns: int) -> int:
        """The shortest TTL in which saving has room."""
        return _LEAD_SHARE * lead_ns

    def ttl_for_ns(self, lead_ns: int) -> int:
        """What a lease asks for once its saves take so long: that, but not more than it may be held for."""
        needed_ns = self.ttl_needed_ns(lead_ns)
        return needed_ns if self._max_hold_ns is None else min(needed_ns, self._max_hold_ns)

    @staticmethod
    def lead_of(save_ns: int, ttl_ns: int) -> int:
        """The lead of a lease whose last save took so long; 0 where its grace is enough."""
        lead = lead_ns(0, save_ns)
        return lead if lead > grace_ns(ttl_ns) else 0

    def _latest_ns(self, granted_ns: int) -> int:
        """The last moment to begin renewing from which five attempts fit before the holder's deadline."""
        retries = self.request_timeout_ns(granted_ns) * _WAITS // _FIRST_WAIT_LEAST
        return self.deadline_after_ns(granted_ns) - retries


def _spread_ppm(lease: LeaseId) -> int:
    """From -1 to 1 in millionths, the same for the same lease on every machine. A checksum is enough: ids that differ
    only in a counter come out evenly spread."""
    return binascii.crc32(lease.encode()) % (2 * _PPM + 1) - _PPM


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _ppm(fraction: float) -> int:
    """Instants are integers, so shares of them are reckoned in millionths."""
    return round(fraction * _PPM)


def _within(policy: RenewalPolicy, name: str, low: float, high: float, *, low_ok: bool = False) -> None:
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low < value or (low_ok and low == value)):
        raise InvalidRequest(f"{name} is {shown(value)}", do=f"Give a number above {low:g} and below {high:g}.")
    if value >= high:
        raise InvalidRequest(f"{name} is {shown(value)}", do=f"Give a number above {low:g} and below {high:g}.")
