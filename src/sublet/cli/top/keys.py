"""Keys as a terminal sends them, and where one looks after each. Pure."""

from __future__ import annotations

import re
from typing import Final

from sublet.cli.top.screen import Look, Screen

_NAMES: Final[dict[bytes, str]] = {
    b"q": "quit",
    b"Q": "quit",
    b"\x03": "interrupt",
    b"\x1a": "suspend",
    b"\x0c": "redraw",
    b"j": "down",
    b"k": "up",
    b" ": "page down",
    b"b": "page up",
    b"g": "top",
    b"G": "bottom",
    b"\t": "next",
    b"A": "up",
    b"B": "down",
    b"H": "top",
    b"F": "bottom",
    b"Z": "previous",
    b"5~": "page up",
    b"6~": "page down",
    b"1~": "top",
    b"7~": "top",
    b"4~": "bottom",
    b"8~": "bottom",
}
_SEQUENCE: Final = re.compile(rb"\x1b[\[O]([0-9;:<=>?]*[@-~])")
_BEGUN: Final = re.compile(rb"\x1b(?:[\[O][0-9;:<=>?]*)?\Z")
_MOST: Final = 32
"""Bytes of a sequence that is not over: a longer one is none."""


def keys(data: bytes) -> tuple[list[str], bytes]:
    """The keys in what was read, and the beginning of one that is not all there yet."""
    found: list[str] = []
    at = 0
    while at < len(data):
        sequence = _SEQUENCE.match(data, at)
        if sequence is not None:
            found.append(_NAMES.get(sequence[1], "") if len(sequence[1]) > 1 or sequence[1].isupper() else "")
            at = sequence.end()
        elif len(data) - at <= _MOST and _BEGUN.match(data, at):
            return [name for name in found if name], data[at:]
        else:
            letter = data[at : at + 1]
            found.append("" if letter in b"ABHFZ" else _NAMES.get(letter, ""))
            at += 1
    return [name for name in found if name], b""


def looked(made: Screen, key: str) -> Look:
    """Where one looks after this key. Further than there is anything, the next screen puts right."""
    at, scroll = made.look
    match key:
        case "down":
            return Look(at, scroll + 1)
        case "up":
            return Look(at, max(0, scroll - 1))
        case "page down":
            return Look(at, scroll + made.page)
        case "page up":
            return Look(at, max(0, scroll - made.page))
        case "top":
            return Look(at, 0)
        case "bottom":
            return Look(at, 1_000_000_000)
        case "next" | "previous":
            step = 1 if key == "next" else -1
            return Look(made.parts[(made.parts.index(at) + step) % len(made.parts)])
        case _:
            return made.look
