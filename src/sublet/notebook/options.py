"""The options of ``%%gpu``: one table for the parser and its help.

An error names the option that was probably meant, before a lease is requested.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple, NoReturn

from sublet.client.config import KEYS, read_config
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.values import GIB, MIB, Tier, format_duration, format_size, parse_duration_ns, parse_size

ROOM_BYTES: Final = 4 * GIB
GPUS_MAX: Final = 64
"""Devices of one cell; an office that has so many does not need a typo's thousand."""


VRAM_DEFAULT: Final = 1 * GIB
"""Of a cell, or a notebook, that does not say how much it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOptions:
    """What a cell asks for."""

    vram_bytes: int | None = None
    """None: the default."""
    ttl_ns: int | None = None
    gpus: int = 1
    takes: tuple[str, ...] | None = None
    """Names to send; None: those that the cell reads."""
    gives: tuple[str, ...] | None = None
    """Names to fetch; None: those that changed."""
    over: str = ""
    """A list of dicts: the cell is run once for each, on leases of its own."""
    tier: Tier | None = None
    pay_priority: bool = False
    wait_ns: int | None = None
    """None: as long as it takes; 0: not at all."""
    smaller_ok: bool = False
    model: str | None = None
    or_model: bool | str = False
    """Other models that would do, or any."""
    shared: bool = False
    """With neighbours on the device, each with the VRAM that it asked for; else the device is reserved whole."""
    python: str = ""
    paths: tuple[str, ...] = ()
    """Folders and files of one's own that the cell imports from."""
    room_bytes: int = ROOM_BYTES
    """What is new and larger than this stays on the device."""
    saves: bool = True
    """Whether what stays on the device is saved after the cell."""

    def __str__(self) -> str:
        words = [
            None if self.vram_bytes is None else f"VRAM {format_size(self.vram_bytes)}",
            None if self.gpus == 1 else f"{self.gpus} devices",
            None if self.ttl_ns is None else f"for {format_duration(self.ttl_ns)}",
            None if self.tier is None else f"tier {self.tier}",
            "shared" if self.shared else None,
        ]
        return ", ".join(one for one in words if one) or "a device"


class _Option(NamedTuple):
    flag: str
    value: str
    """The value's name in the help; empty for a switch."""
    read: Callable[[str], dict[str, Any]]
    says: str
    also: str = ""
    """Another name of it, as other commands call it."""


def _gpus(text: str) -> dict[str, Any]:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= GPUS_MAX:
        raise InvalidRequest(f"{text!r} is not a number of devices", do=f"Give 1 to {GPUS_MAX}.")
    return {"gpus": int(text)}


def _tier(text: str) -> dict[str, Any]:
    try:
        return {"tier": Tier(text)}
    except ValueError:
        tiers = [tier.value for tier in Tier]
        raise InvalidRequest(
            f"there is no tier {text!r}{_nearest(text, tiers)}", do=f"Use {', '.join(tiers[:-1])} or {tiers[-1]}."
        ) from None


def _names(text: str, what: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    wrong = next((name for name in names if not name.isidentifier()), None)
    if wrong is not None or not names:
        raise InvalidRequest(f"{wrong or text!r} is no name of a variable", do=f"Write --{what} a,b without spaces.")
    return names


def _one_name(text: str) -> str:
    if not text.isidentifier():
        raise InvalidRequest(f"{text!r} is no name of a variable", do="Write --map params.")
    return text


def _room(text: str) -> int:
    size = parse_size(text, "--stay-over")
    if size < MIB:
        raise InvalidRequest(
            f"--stay-over {text} is less than 1MiB", do="Give 1MiB or more: smaller variables are always sent."
        )
    return size


def _vram(text: str) -> dict[str, Any]:
    return {"vram_bytes": parse_size(text, "--vram", counted_by="--gpus")}


def _path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


OPTIONS: Final = (
    _Option("--vram", "SIZE", _vram, "GPU memory, such as 2GiB (default: 1GiB)", "--gpu"),
    _Option("--ttl", "DURATION", lambda v: {"ttl_ns": parse_duration_ns(v, "--ttl")}, "time to live (default: 5m)"),
    _Option("--gpus", "N", _gpus, "number of GPUs, all on one machine (default: 1)"),
    _Option("--in", "a,b", lambda v: {"takes": _names(v, "in")}, "variables to send (default: what the cell reads)"),
    _Option("--out", "a,b", lambda v: {"gives": _names(v, "out")}, "variables to fetch (default: what changed)"),
    _Option("--map", "NAME", lambda v: {"over": _one_name(v)}, "list of dicts: run the cell for each; needs --out"),
    _Option("--tier", "TIER", _tier, "interactive, batch or spot (default: interactive)"),
    _Option("--spot", "", lambda _: {"tier": Tier.SPOT}, "short for --tier spot"),
    _Option("--pay-priority", "", lambda _: {"pay_priority": True}, "go before requests that do not pay, for a rate"),
    _Option(
        "--wait", "DURATION", lambda v: {"wait_ns": parse_duration_ns(v, "--wait")}, "longest wait (default: no limit)"
    ),
    _Option("--no-wait", "", lambda _: {"wait_ns": 0}, "fail at once if nothing is free"),
    _Option("--model", "MODEL", lambda v: {"model": v}, "GPU model to require; H200|A100 for either"),
    _Option(
        "--or-model",
        "MODEL",
        lambda v: {"or_model": True if v == "any" else v},
        "with --model: other models to accept if none is free, or any",
    ),
    _Option("--smaller-ok", "", lambda _: {"smaller_ok": True}, "accept less memory if no more is free"),
    _Option("--shared", "", lambda _: {"shared": True}, "share the GPU with your other leases, each within its --vram"),
    _Option("--exclusive", "", lambda _: {"shared": False}, "reserve the GPU whole (default)"),
    _Option("--python", "PATH", lambda v: {"python": _path(v)}, "Python interpreter (default: the notebook's)"),
    _Option(
        "--stay-over",
        "SIZE",
        lambda v: {"room_bytes": _room(v)},
        f"size above which a new variable stays on the device (default: {format_size(ROOM_BYTES)})",
    ),
    _Option("--no-save", "", lambda _: {"saves": False}, "do not save the variables that stay on the device"),
    _Option("--with", "PATH", lambda v: {"paths": (_path(v),)}, "folder or file to import from. Repeatable"),
)
_BY_FLAG: Final = {flag: option for option in OPTIONS for flag in (option.flag, option.also) if flag}
_ONCE: Final = {"--wait": "--no-wait", "--tier": "--spot", "--shared": "--exclusive"}
"""Options that exclude each other."""
_ELSEWHERE: Final = {
    **dict.fromkeys(("--time", "--timeout", "--duration"), "--ttl"),
    **dict.fromkeys(("-g", "-gpu", "--mem", "--memory", "--min-vram", "--min_vram"), "--vram"),
    **dict.fromkeys(("--count", "--num-gpus", "-n"), "--gpus"),
    **dict.fromkeys(("--priority", "--partition", "--queue"), "--tier"),
    **dict.fromkeys(("--share", "--oversubscribe"), "--shared"),
}
"""Names that other tools have for these options."""


def parse_line(line: str, base: CellOptions | None = None) -> CellOptions:
    """The options of a line, over ``base``. Raises ``InvalidRequest``, which names what was probably meant."""
    options, seen = base or CellOptions(), set[str]()
    for option, value in _parse_words(line):
        flag = option.flag
        if flag in seen and flag != "--with":
            raise InvalidRequest(f"{flag} is given twice", do="Give it once.")
        other = next((two if one == flag else one for one, two in _ONCE.items() if flag in (one, two)), "")
        if other in seen:
            raise InvalidRequest(f"{flag} and {other} contradict each other", do="Give one of them.")
        seen.add(flag)
        change = option.read(value)
        if flag == "--with":
            change = {"paths": (*options.paths, *change["paths"])}
        options = replace(options, **change)
    return options


def configured() -> CellOptions:
    """What `sublet config` set for all cells. Raises ``InvalidRequest`` for a file with a mistake."""
    words = []
    for name, setting in read_config().items():
        if setting.value is True:
            words.append(KEYS[name].flag)
        elif setting.value is not False:
            words += [KEYS[name].flag, str(setting.value)]
    return parse_line(shlex.join(words))


def help_text() -> str:
    """All options, for people."""
    left = [f"{', '.join(filter(None, (option.flag, option.also)))} {option.value}".rstrip() for option in OPTIONS]
    width = max(map(len, left))
    return "\n".join(f"  {flag:<{width}}  {option.says}" for flag, option in zip(left, OPTIONS, strict=True))


def _parse_words(line: str) -> Iterator[tuple[_Option, str]]:
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
        yield option, value
        at += 1


def _unknown(word: str) -> NoReturn:
    if not word.startswith("-"):
        raise InvalidRequest(f"%%gpu does not know what {word!r} is", do=f"Options begin with --:\n{help_text()}")
    raise InvalidRequest(f"%%gpu has no option {word}{_nearest(word, list(_BY_FLAG))}", do=f"It has:\n{help_text()}")


def _nearest(word: str, known: list[str]) -> str:
    close = [_ELSEWHERE[word]] if word in _ELSEWHERE else difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
