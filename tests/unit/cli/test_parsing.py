"""What options mean, and every kind of nonsense that is refused with a sentence and a remedy."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable

import pytest

from sublet.cli import parsing
from sublet.errors import InvalidRequest


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parsing.size, "2GiB", 2 << 30),
        (parsing.size, "2GB", 2 * 10**9),
        (parsing.vram, "80g", 80 << 30),
        (parsing.duration, "1h30m", 5400.0),
        (parsing.duration, "90", 90.0),
        (parsing.wait, "0", 0.0),
        (parsing.wait, "forever", math.inf),
        (parsing.count, "3", 3),
        (parsing.epoch, "1.42", [1, 42]),
        (parsing.label, "course=ml=1", ("course", "ml=1")),
        (parsing.limit, "0", 0),
        (parsing.limit_duration, "1m", 60),
        (parsing.limit_duration, "100ms", 1),
        (parsing.instant, "2026-11-21T10:00:00+02:00", "2026-11-21T08:00:00.000Z"),
    ],
)
def test_texts_become_values(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


NONSENSE = ["", " ", "0", "-1", "nan", "inf", "1e3", "١", "9" * 30, "two", "1 GiB extra", "\x00", "1.5.2"]


@pytest.mark.parametrize("text", NONSENSE)
@pytest.mark.parametrize("parse", [parsing.size, parsing.duration, parsing.count])
def test_nonsense_is_refused_with_a_remedy(parse: Callable[[str], object], text: str) -> None:
    """Zero, negative, huge, not a number, foreign digits, control characters: InvalidRequest, never another error."""
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    assert caught.value.do
    assert len(caught.value.message) < 120


@pytest.mark.parametrize("text", ["-1", "x", "1.5", ""])
def test_a_limit_is_a_whole_number_or_none(text: str) -> None:
    assert isinstance(parsing.limit("none"), parsing.NoLimit)
    with pytest.raises(InvalidRequest):
        parsing.limit(text)


@pytest.mark.parametrize("text", ["", "course", "=x", "a=" + "x" * 200, "a\n=b"])
def test_a_label_needs_a_key_and_stays_short_and_printable(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parsing.label(text)


def test_a_label_given_twice_is_a_mistake() -> None:
    assert parsing.labels([("a", "1"), ("b", "2")]) == {"a": "1", "b": "2"}
    with pytest.raises(InvalidRequest, match="twice"):
        parsing.labels([("a", "1"), ("a", "2")])


def test_a_moment_may_be_told_as_how_long_ago() -> None:
    ago = dt.datetime.fromisoformat(parsing.instant("2h"))
    assert 7190 < (dt.datetime.now(dt.UTC) - ago).total_seconds() < 7210
    with pytest.raises(InvalidRequest):
        parsing.instant("yesterday")
