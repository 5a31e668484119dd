"""From rules to instants: days, midnights, changes of the clock, and what is refused."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from sublet.errors import InvalidRequest
from sublet.office.ledger.reservation_times import AHEAD_DAYS, instants, parse_rule, zone_of
from sublet.values import NS_PER_S

BERLIN = "Europe/Berlin"
MONDAY = datetime(2026, 11, 23, 8, 0, tzinfo=UTC)


def times(rule: str, zone: str = BERLIN, after: datetime = MONDAY, most: int = 3) -> list[tuple[str, str]]:
    found = instants(parse_rule(rule), zone_of(zone), int(after.timestamp()) * NS_PER_S)
    return [(_text(start), _text(end)) for start, end in found[:most]]


def _text(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).strftime("%m-%d %H:%M")


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        ("every Tue 10:00-12:00", ("11-24 09:00", "11-24 11:00"), ("12-01 09:00", "12-01 11:00")),
        ("EVERY tuesday  9:00 - 9:30", ("11-24 08:00", "11-24 08:30"), ("12-01 08:00", "12-01 08:30")),
        ("every Mon,Thu 10:00-12:00", ("11-23 09:00", "11-23 11:00"), ("11-26 09:00", "11-26 11:00")),
        ("every Mon and Tue 8:00-10:00", ("11-23 07:00", "11-23 09:00"), ("11-24 07:00", "11-24 09:00")),
        ("every weekday 22:00-06:00", ("11-23 21:00", "11-24 05:00"), ("11-24 21:00", "11-25 05:00")),
        ("every day 00:00-24:00", ("11-22 23:00", "11-23 23:00"), ("11-23 23:00", "11-24 23:00")),
        ("every Tue 10:00-12:00 from 2026-12-03", ("12-08 09:00", "12-08 11:00"), ("12-15 09:00", "12-15 11:00")),
    ],
)
def test_a_rule_is_instants(rule: str, first: tuple[str, str], second: tuple[str, str]) -> None:
    """What goes on at the moment is in it; what is over is not."""
    assert times(rule)[:2] == [first, second]


def test_a_date_and_an_until_are_kept() -> None:
    assert times("2026-12-01 09:00-17:00") == [("12-01 08:00", "12-01 16:00")]
    assert times("2026-11-01 09:00-17:00") == []
    assert len(times("every Tue 10:00-12:00 until 2026-12-01", most=99)) == 2


def test_instants_go_so_far_ahead_and_no_further() -> None:
    found = instants(parse_rule("every day 10:00-12:00"), zone_of("UTC"), int(MONDAY.timestamp()) * NS_PER_S)
    assert len(found) == AHEAD_DAYS + 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # On 28 March 2027 the clock in Berlin goes from 02:00 to 03:00, which is 01:00 UTC.
        ("2027-03-28 01:30-04:00", [("03-28 00:30", "03-28 02:00")]),
        ("2027-03-28 02:30-04:00", [("03-28 01:00", "03-28 02:00")]),
        ("2027-03-28 01:00-02:30", [("03-28 00:00", "03-28 01:00")]),
        ("2027-03-28 02:10-02:50", []),
        # On 31 October 2027 it goes from 03:00 to 02:00: 02:30 comes at 00:30 and at 01:30 UTC.
        ("2027-10-31 02:30-04:00", [("10-31 00:30", "10-31 03:00")]),
        ("2027-10-31 01:00-02:30", [("10-30 23:00", "10-31 01:30")]),
        ("2027-10-31 02:15-02:45", [("10-31 00:15", "10-31 01:45")]),
    ],
)
def test_changes_of_the_clock(rule: str, expected: list[tuple[str, str]]) -> None:
    """What is jumped over is the first instant after it; of what comes twice, from the first to the second."""
    assert times(rule) == expected


@pytest.mark.parametrize("zone", [BERLIN, "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "UTC"])
def test_instants_are_in_order_and_apart_over_years(zone: str) -> None:
    """In zones with jumps of an hour, half an hour, and a whole day that never was."""
    tz = ZoneInfo(zone)
    for rule in ("every day 00:00-24:00", "every day 01:45-02:15", "every day 23:00-03:00"):
        for year in (2011, 2026):
            after = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * NS_PER_S
            found = instants(parse_rule(rule), tz, after)
            assert all(start < end for start, end in found)
            assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(found))
            assert max(end - start for start, end in found) <= int(timedelta(hours=26).total_seconds()) * NS_PER_S


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("", "not a time"),
        ("Tue 10:00-12:00", "not a time"),
        ("every Tue 10-12", "not a time"),
        ("every Tue 10:00-12:00 forever", "not a time"),
        ("every Teusday 10:00-12:00", "did you mean tuesday"),
        ("every Tu 10:00-12:00", "no day of the week"),
        ("every Tue 25:00-26:00", "no time of day 25:00"),
        ("every Tue 10:60-12:00", "no time of day 10:60"),
        ("every Tue 10:00-10:00", "ends where it begins"),
        ("2026-02-30 10:00-12:00", "no date"),
        ("2026-12-01 10:00-12:00 until 2026-12-02", "no from and until"),
        ("every Tue 10:00-12:00 from 2027-01-01 until 2026-01-01", "over before it begins"),
        ("every " + "Mon," * 1000 + "Tue 10:00-12:00", "not a time"),
        ("every Tue\x00 10:00-12:00", "not a time"),
    ],
)
def test_what_is_no_rule_is_refused(rule: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        parse_rule(rule)
    assert refused.value.do, "it says what to write"


@pytest.mark.parametrize(
    "name", ["", "Europe", "Europe/Belrin", "../../etc/passwd", "/etc/localtime", "a\x00b", " UTC"]
)
def test_an_unknown_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no time zone"):
        zone_of(name)


def test_the_nearest_zone_is_named() -> None:
    with pytest.raises(InvalidRequest, match="did you mean Europe/Berlin"):
        zone_of("Europe/Belrin")
