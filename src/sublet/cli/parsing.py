"""Parses option values (sizes, durations, counts, limits, labels) and declares the options that commands share."""

from __future__ import annotations

import time
from typing import Annotated, Final

from sublet.cli.declare import Arg, Opt
from sublet.errors import InvalidRequest
from sublet.values import NS_PER_S, Epoch, parse_duration_ns, parse_size, valid_labels, valid_name

COUNT_MAX: Final = 1 << 20

FOREVER: Final = float("inf")


class NoLimit:
    """``none`` on the command line: takes a limit away, unlike leaving the option out."""


NO_LIMIT: Final = NoLimit()


def size(text: str) -> int:
    """Bytes."""
    return parse_size(text)


def vram(text: str) -> int:
    """Bytes of GPU memory: --gpu takes no number of GPUs."""
    return parse_size(text, counted_by="--gpus")


def duration(text: str) -> float:
    """Seconds, more than zero."""
    return parse_duration_ns(text) / NS_PER_S


def duration_or_zero(text: str) -> float:
    """Seconds; 0 means at once."""
    return parse_duration_ns(text, zero_ok=True) / NS_PER_S


def wait(text: str) -> float:
    """Seconds to wait at most; ``forever`` has no bound and 0 tries once."""
    return FOREVER if text == "forever" else duration_or_zero(text)


def count(text: str) -> int:
    """A whole number above zero."""
    if not (text.isascii() and text.isdigit()) or len(text) > 12 or not 1 <= int(text) <= COUNT_MAX:
        raise InvalidRequest(f"{text[:40]!r} is not a count", do="Write a whole number from 1 up.")
    return int(text)


def name(text: str) -> str:
    return valid_name(text, "name")


def epoch(text: str) -> list[int]:
    """As it goes over the wire: two numbers."""
    return list(Epoch.parse(text))


def label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InvalidRequest(f"{text[:40]!r} is not a label", do="Write it as KEY=VALUE, such as --label course=ml1.")
    valid_labels({key: value})
    return key, value


def labels(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """All labels of a command line; a key said twice is a mistake, not a choice."""
    found: dict[str, str] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise InvalidRequest(f"label {key!r} is given twice", do="Give each label once.")
    return valid_labels(found)


def limit(text: str) -> int | NoLimit:
    """A number that limits something, or ``none``."""
    return NO_LIMIT if text == "none" else _limit_number(text)


def limit_size(text: str) -> int | NoLimit:
    return NO_LIMIT if text == "none" else parse_size(text)


def limit_duration(text: str) -> int | NoLimit:
    """Whole seconds, rounded up: a limit is never tighter than what was written."""
    return NO_LIMIT if text == "none" else -(-parse_duration_ns(text) // NS_PER_S)


def _limit_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 12 or int(text) > COUNT_MAX:
        raise InvalidRequest(f"{text[:40]!r} is not a limit", do="Write a whole number (0 allows nothing), or none.")
    return int(text)


def user(text: str) -> int | NoLimit:
    """A user number of this machine, or ``none``."""
    if text == "none":
        return NO_LIMIT
    if not (text.isascii() and text.isdigit()) or len(text) > 10:
        raise InvalidRequest(f"{text[:40]!r} is not a user number", do="`id -u NAME` prints it. Or write none.")
    return int(text)


def instant(text: str) -> str:
    """RFC 3339 in UTC, from a date, a time, or how long ago (``24h``)."""
    from datetime import UTC, datetime

    try:
        ago = parse_duration_ns(text, zero_ok=True) / NS_PER_S
    except InvalidRequest:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidRequest(
                f"{text[:40]!r} is not a time",
                do="Write a date or time, such as 2026-11-21 or 2026-11-21T10:00:00Z, or how long ago, such as 24h.",
            ) from None
        if moment.tzinfo is None:  # what people write without a zone is their own wall clock
            moment = moment.astimezone()
    else:
        moment = datetime.fromtimestamp(max(0.0, time.time() - ago), UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


AsJson = Annotated[
    bool, Opt("--json", help="Print one JSON document: sizes in bytes, durations in seconds, times in UTC.")
]
LeaseArg = Annotated[str, Arg("LEASE", help="Id of the lease, from `sublet lease ls`.")]
Model = Annotated[str | None, Opt("--model", metavar="MODEL", help="GPU model to require; `H200|A100` for either.")]
OrModel = Annotated[
    str | None,
    Opt("--or-model", metavar="MODEL", help="With --model: other GPU models to accept if none is free, or `any`."),
]


PayPriority = Annotated[
    bool,
    Opt(
        "--pay-priority",
        help="Go before requests of the tier that do not pay, for the rate `priority` in rates.toml (default: off).",
    ),
]


def other_model(text: str | None) -> str | None:
    """As it goes to the office."""
    return "*" if text == "any" else text
