"""Expands a reservation's rule, written in a time zone, to instants. Reads the time-zone database.

``every Tue 10:00-12:00``, ``every Mon,Thu 9:00-9:45 from 2027-01-11 until 2027-02-12``, ``every weekday 22:00-06:00``,
``2026-12-01 09:00-17:00``. An end that is not after the begin is on the next day.

**Changes of the clock.** A time that the clock jumps over is the first instant after the jump. Of a time that comes
twice, a reservation begins at the first and ends at the second. What is left empty by that does not take place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from sublet.errors import InvalidRequest
from sublet.office.ledger.records import Span
from sublet.values import NS_PER_S, shown

AHEAD_DAYS: Final = 400
"""So far ahead instants are worked out."""
_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_DO: Final = "Write 'every Tue 10:00-12:00', 'every weekday 9:00-10:30 until 2027-02-12' or '2026-12-01 09:00-17:00'."
_DATE: Final = r"\d{4}-\d\d-\d\d"
_RULE: Final = re.compile(
    rf"(?:every\s+(?P<days>[a-z]+(?:\s*(?:,|\band\b)\s*[a-z]+)*)|(?P<date>{_DATE}))"
    r"\s+(?P<begin>\d{1,2}:\d\d)\s*-\s*(?P<end>\d{1,2}:\d\d)"
    rf"(?:\s+from\s+(?P<first>{_DATE}))?(?:\s+until\s+(?P<last>{_DATE}))?"
)
_DAY_S: Final = 86_400


class Rule(NamedTuple):
    days: frozenset[int]
    """Days of the week, Monday is 0."""
    begin_minute: int
    end_minute: int
    """Of the day of the begin; above a day, it is on the next one."""
    first: date
    last: date
    """The last day on which one begins."""

    @property
    def is_once(self) -> bool:
        return self.first == self.last


def parse_rule(text: str) -> Rule:
    """Raises ``InvalidRequest``."""
    found = _RULE.fullmatch(text.strip().lower()) if len(text) <= 200 else None
    if found is None:
        raise InvalidRequest(f"{shown(text)} is not a time of a reservation", do=_DO)
    begin, end = _minute(found["begin"], text), _minute(found["end"], text)
    if begin == end or begin == 24 * 60:
        raise InvalidRequest(f"{shown(text)} ends where it begins", do="For a whole day write 00:00-24:00.")
    end += 24 * 60 if end < begin else 0
    if found["date"] is not None:
        if found["first"] or found["last"]:
            raise InvalidRequest(f"{shown(text)} is one day, which has no from and until", do=_DO)
        day = _date(found["date"])
        return Rule(frozenset({day.weekday()}), begin, end, day, day)
    first = date.min if found["first"] is None else _date(found["first"])
    last = date.max if found["last"] is None else _date(found["last"])
    if last < first:
        raise InvalidRequest(f"{shown(text)} is over before it begins", do="Give an until that is after the from.")
    return Rule(_days(found["days"]), begin, end, first, last)


def zone_of(name: str) -> tzinfo:
    """The time zone of this name in the machine's database. Raises ``InvalidRequest``."""
    try:
        if name.isprintable() and name and name == name.strip():
            return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; outside of the database; a folder of it
        pass
    known = available_timezones()
    if not known:
        raise InvalidRequest(
            "this machine has no time-zone database", do="Install it: the package tzdata of your distribution."
        )
    close = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise InvalidRequest(f"there is no time zone {shown(name)}{meant}", do="Name it as in Europe/Berlin or UTC.")


def instants(rule: Rule, zone: tzinfo, after_wall_ns: int) -> tuple[Span, ...]:
    """The times of the rule that end after this instant, ``AHEAD_DAYS`` ahead."""
    after = datetime.fromtimestamp(after_wall_ns // NS_PER_S, UTC).astimezone(zone).date()
    first = max(rule.first, after - timedelta(days=2))
    found: list[Span] = []
    for day in _each_day(first, min(rule.last, max(first, after) + timedelta(days=AHEAD_DAYS))):
        if day.weekday() in rule.days:
            start = _instant(day, rule.begin_minute, zone, later=False)
            start = max(start, found[-1].end_ns) if found else start
            end = _instant(day, rule.end_minute, zone, later=True)
            if start < end and after_wall_ns < end:
                found.append(Span(start, end))
    return tuple(found)


def _each_day(first: date, last: date) -> Iterator[date]:
    for days in range((last - first).days + 1):
        yield first + timedelta(days=days)


def _instant(day: date, minute: int, zone: tzinfo, *, later: bool) -> int:
    """The instant of a local time: of one that comes twice, the first or the second."""
    local = datetime.combine(day, time()) + timedelta(minutes=minute)
    one, other = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    low, high = sorted((int(one.timestamp()), int(other.timestamp())))
    if low < high and _local(low, zone) != local:  # the clock jumps over it: the jump is what lies between the two
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _local(middle, zone) < local else (low, middle)
        return high * NS_PER_S
    return (high if later else low) * NS_PER_S


def _local(at_s: int, zone: tzinfo) -> datetime:
    return datetime.fromtimestamp(at_s, UTC).astimezone(zone).replace(tzinfo=None)


def _minute(text: str, rule: str) -> int:
    hour, minute = map(int, text.split(":"))
    if minute > 59 or hour > 24 or (hour == 24 and minute):
        raise InvalidRequest(f"{shown(rule)} has no time of day {text}", do=_DO)
    return 60 * hour + minute


def _date(text: str) -> date:
    try:
        found = date.fromisoformat(text)
    except ValueError:
        found = date.min
    if not 2000 <= found.year < 9000:
        raise InvalidRequest(f"{text} is no date", do="Write it as 2026-12-01.")
    return found


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for name in re.split(r"\s*(?:,|\band\b)\s*", text):
        if name == "day":
            found |= set(range(7))
        elif name == "weekday":
            found |= set(range(5))
        else:
            days = [index for index, day in enumerate(_DAYS) if len(name) >= 3 and day.startswith(name)]
            if not days:
                close = difflib.get_close_matches(name, ("day", "weekday", *_DAYS), n=1)
                meant = f"; did you mean {close[0]}?" if close else ""
                raise InvalidRequest(f"{shown(name)} is no day of the week{meant}", do=_DO)
            found.add(days[0])
    return frozenset(found)
