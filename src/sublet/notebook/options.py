"""The line of ``%%gpu``: one table of options, from which it is parsed and its help is written.

A mistake is said with the nearest option there is, before anything is asked for.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, NoReturn

from sublet.errors import InvalidRequest
from sublet.values import GIB, MIB, Tier, format_duration, format_size, parse_duration_ns, parse_size

__all__ = ["CellOptions", "help_text", "parse_line"]

ROOM_BYTES: Final = 4 * GIB
GPUS_MAX: Final = 64
"""Devices of one cell; an office that has so many does not need a typo's thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """What a cell asks for."""

    vram_bytes: int | None = None
    """None: what a lease has when nobody says."""
    ttl_ns: int | None = None
    gpus: int = 1
    takes: tuple[str, ...] | None = None
    """Names that travel in; None: those that the cell reads."""
    gives: tuple[str, ...] | None = None
    """Names that come back; None: those that changed."""
    tier: Tier | None = None
    wait_ns: int | None = None
    """None: as long as it takes; 0: not at all."""
    smaller_ok: bool = False
    python: str = ""
    paths: tuple[str, ...] = ()
    """Folders and files of one's own that the cell imports from."""
    room_bytes: int = ROOM_BYTES
    """What is new and larger than this stays on the device."""
    saves: bool = True
    """Whether what stays on the device is saved after the cell."""

    def __str__(self) -> str:
        said = [
            None if self.vram_bytes is None else f"VRAM {format_size(self.vram_bytes)}",
            None if self.gpus == 1 else f"{self.gpus} devices",
            None if self.ttl_ns is None else f"for {format_duration(self.ttl_ns)}",
            None if self.tier is None else f"tier {self.tier}",
        ]
        return ", ".join(one for one in said if one) or "a device"


class _Option(NamedTuple):
    flag: str
    value: str
    """What stands after it, for people; empty for a switch."""
    read: Callable[[str], dict[str, Any]]
    says: str


def _gpus(text: str) -> dict[str, Any]:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= GPUS_MAX:
        raise InvalidRequest(f"{text!r} is not a number of devices", do=f"Give 1 to {GPUS_MAX}.")
    return {"gpus": int(text)}


def _tier(text: str) -> dict[str, Any]:
    try:
        return {"tier": Tier(text)}
    except ValueError:
        tiers = [tier.value for tier in Tier]
        raise InvalidRequest(f"there is no tier {text!r}{_nearest(text, tiers)}", do=f"Use {_or(tiers)}.") from None


def _names(text: str, what: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    wrong = next((name for name in names if not name.isidentifier()), None)
    if wrong is not None or not names:
        raise InvalidRequest(f"{wrong or text!r} is no name of a variable", do=f"Write --{what} a,b without spaces.")
    return names


def _room(text: str) -> int:
    size = parse_size(text, "--stay-over")
    if size < MIB:
        raise InvalidRequest(f"--stay-over {text} is less than 1MiB", do="Small variables always travel.")
    return size


def _vram(text: str, flag: str) -> int:
    return parse_size(text, flag, counted_by="--gpus")


def _path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


OPTIONS: Final = (
    _Option("--vram", "SIZE", lambda v: {"vram_bytes": _vram(v, "--vram")}, "memory of the device, such as 2GiB"),
    _Option("--ttl", "DURATION", lambda v: {"ttl_ns": parse_duration_ns(v, "--ttl")}, "how long it is lent at a time"),
    _Option("--gpus", "N", _gpus, "so many devices, all or none"),
    _Option("--in", "a,b", lambda v: {"takes": _names(v, "in")}, "what travels in, instead of what the cell reads"),
    _Option("--out", "a,b", lambda v: {"gives": _names(v, "out")}, "what comes back, instead of what changed"),
    _Option("--tier", "TIER", _tier, "interactive, batch or spot"),
    _Option("--wait", "DURATION", lambda v: {"wait_ns": parse_duration_ns(v, "--wait")}, "the longest to wait in line"),
    _Option("--no-wait", "", lambda _: {"wait_ns": 0}, "now or not at all"),
    _Option("--smaller-ok", "", lambda _: {"smaller_ok": True}, "less memory will do if there is no more"),
    _Option("--python", "PATH", lambda v: {"python": _path(v)}, "another interpreter"),
    _Option(
        "--stay-over",
        "SIZE",
        lambda v: {"room_bytes": _room(v)},
        f"new variables larger than this stay on the device; {format_size(ROOM_BYTES)}",
    ),
    _Option("--no-save", "", lambda _: {"saves": False}, "do not save what stays on the device after this cell"),
    _Option("--with", "PATH", lambda v: {"paths": (_path(v),)}, "a folder or file the cell imports from; repeatable"),
)
_BY_FLAG: Final = {option.flag: option for option in OPTIONS}
_ONCE: Final = {"--wait": "--no-wait", "--no-wait": "--wait"}
"""Of these one may stand there, not both."""


def parse_line(line: str, base: CellOptions | None = None) -> CellOptions:
    """What stands behind ``%%gpu``, over what holds where nothing is said. Raises ``InvalidRequest``, which says what
    was meant, probably."""
    options, seen = base or CellOptions(), set[str]()
    for flag, value in _words(line):
        option = _BY_FLAG[flag]
        if flag in seen and flag != "--with":
            raise InvalidRequest(f"{flag} is there twice", do="Say it once.")
        if _ONCE.get(flag) in seen:
            raise InvalidRequest(f"{flag} and {_ONCE[flag]} contradict each other", do="Choose one.")
        seen.add(flag)
        change = option.read(value)
        if flag == "--with":
            change = {"paths": (*options.paths, *change["paths"])}
        options = replace(options, **change)
    return options


def help_text() -> str:
    """All options, for people."""
    left = [f"{option.flag} {option.value}".rstrip() for option in OPTIONS]
    width = max(map(len, left))
    return "\n".join(f"  {flag:<{width}}  {option.says}" for flag, option in zip(left, OPTIONS, strict=True))


def _words(line: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest(f"%%gpu {line.strip()}: {error}", do="Close the quotation marks.") from None
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        option = _BY_FLAG.get(flag)
        if option is None:
            _unknown(flag)
        if option.value and not equals:
            at += 1
            if at >= len(words) or words[at] in _BY_FLAG:
                raise InvalidRequest(f"{flag} needs a value", do=f"Write {flag} {option.value}.")
            value = words[at]
        elif equals and not option.value:
            raise InvalidRequest(f"{flag} takes no value", do=f"Write {flag} alone.")
        yield flag, value
        at += 1


def _unknown(word: str) -> NoReturn:
    if not word.startswith("-"):
        raise InvalidRequest(f"%%gpu does not know what {word!r} is", do=f"Options begin with --:\n{help_text()}")
    raise InvalidRequest(f"%%gpu has no option {word}{_nearest(word, list(_BY_FLAG))}", do=f"It has:\n{help_text()}")


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _or(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
