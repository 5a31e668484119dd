"""Lays out the whole screen from a snapshot and a size. Pure.

Every part gets a few rows, the one that is looked at gets most, and what does not fit is counted. So a terminal of ten
rows shows less of everything, and never nothing of something.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sublet.cli.show import plural
from sublet.cli.top.rows import Section, sections
from sublet.cli.top.snapshot import OfficeSnapshot
from sublet.cli.top.text import Line, StyledSpan, age, span_line, width_of

COLUMNS_MIN: Final = 40
ROWS_MIN: Final = 10
ROWS_USUAL: Final = 20
"""Below a head and above a foot, on the terminals that floors were made for."""
FEW: Final = 4
"""Rows for what is looked at before others get any."""
_MANY: Final = {"waiting": "waiting"}


class ScreenView(NamedTuple):
    """Which part the user looks at, and how far it is scrolled."""

    at: str = "leases"
    """The part that gets most of the room, and that the arrows scroll."""
    scroll: int = 0


class Screen(NamedTuple):
    """Lines, none longer than the terminal is wide, and the position that was possible."""

    lines: tuple[Line, ...]
    look: ScreenView
    parts: tuple[str, ...]
    """What there is to look at, in the order of Tab."""
    page: int
    """Rows of the part that is looked at."""


def screen(known: OfficeSnapshot, look: ScreenView, columns: int, rows: int, now_s: float) -> Screen:
    """Exactly as many lines as the terminal has rows."""
    columns, rows = max(columns, 1), max(rows, 1)
    found = sections(known, columns, now_s, reach=look.scroll + rows)
    parts = tuple(section.name for section in found)
    at = look.at if look.at in parts else "leases"
    head, foot = _head(known, columns, now_s), _foot(parts, at, columns)
    given = _shares(found, at, rows - len(head) - 1)
    spare = rows - len(head) - 1 - sum(1 + given[section.name] for section in found)
    gap = spare >= len(found)
    lines, scroll = list(head), 0
    for section in found:
        if gap:
            lines.append(())
        start = look.scroll if section.name == at else 0
        shown, start = _window(section, given[section.name], start, columns)
        scroll = start if section.name == at else scroll
        lines += [section.heading, *shown]
    if known.lost_s is not None:
        lines = [*head, *(tuple(span._replace(style="dim") for span in line) for line in lines[len(head) :])]
    lines = lines[: rows - 1]
    lines += [()] * (rows - 1 - len(lines))
    return Screen((*lines, foot), ScreenView(at, scroll), parts, max(1, given.get(at, 1) - 1))


def whole(known: OfficeSnapshot, columns: int, now_s: float) -> tuple[Line, ...]:
    """Everything, at full length: for a file, a pipe, or ``--once``."""
    lines = [*_head(known, columns, now_s)]
    for section in sections(known, columns, now_s):
        shown, _ = _window(section, len(section.rows) + 1, 0, columns)
        lines += [(), section.heading, *shown]
    return tuple(lines)


# ---- head and foot ----


def _head(known: OfficeSnapshot, columns: int, now_s: float) -> tuple[Line, ...]:
    if known.lost_s is not None:
        away = f" No answer for {age(now_s - known.lost_s)}, trying again. Below is what was known. "
        return (
            span_line(
                (StyledSpan("Sublet ", "bold"), StyledSpan(away, "bold red"), StyledSpan(known.lost_why, "red")),
                columns,
            ),
        )
    status = known.status
    noticed = sum(lease["notice"] is not None for lease in known.leases)
    facts = [f"up {age(status['uptime'] + max(0.0, now_s - known.at_s))}", plural(status["live"], "lease")]
    if known.guests is not None:
        facts.append(plural(sum(guest["state"] != "gone" for guest in known.guests), "guest"))
    facts.append(f"{status['queued']} waiting")
    spans = [StyledSpan("Sublet", "bold"), StyledSpan("  " + ", ".join(facts))]
    if noticed:
        spans.append(StyledSpan(f", {noticed} under notice", "bold red"))
    if status["quarantined"]:
        spans.append(StyledSpan(f", {status['quarantined']} in quarantine", "bold red"))
    used = sum(width_of(span.text) for span in spans)
    for where in (f"{status['home']}  pid {status['pid']}", str(status["home"])):
        if status["home"] and used + 2 + width_of(where) <= columns:
            spans += (StyledSpan(" " * (columns - used - width_of(where))), StyledSpan(where, "dim"))
            break
    return (span_line(spans, columns),)


def _foot(parts: Sequence[str], at: str, columns: int) -> Line:
    spans = [
        StyledSpan("q", "bold"),
        StyledSpan(" quit  "),
        StyledSpan("↑↓", "bold"),
        StyledSpan(" scroll  "),
        StyledSpan("Tab", "bold"),
    ]
    spans.append(StyledSpan(" next:"))
    spans += [StyledSpan(f" [{part}]", "bold cyan") if part == at else StyledSpan(f" {part}", "dim") for part in parts]
    return span_line(spans, columns)


# ---- who gets how many rows ----


def _shares(found: Sequence[Section], at: str, rows: int) -> dict[str, int]:
    """Rows below each heading: a few for the part that is looked at, one for each, then up to their floors, then the
    part that is looked at takes what it needs, and then the others."""
    wants = {section.name: len(section.rows) + any(section.beyond.values()) for section in found}
    given = dict.fromkeys(wants, 0)
    left = rows - len(found)
    order = [at, *(section.name for section in found if section.name != at)]
    floors = {section.name: section.floor * max(1, rows // ROWS_USUAL) for section in found}
    for bound in ({at: FEW}, dict.fromkeys(order, 1), floors, wants):
        for name in order:
            more = max(0, min(wants[name], bound.get(name, 0)) - given[name])
            taken = max(0, min(more, left))
            given[name] += taken
            left -= taken
    return given


def _window(section: Section, rows: int, start: int, columns: int) -> tuple[list[Line], int]:
    """So many rows from there on; if not all are shown, the last one counts what is missing. Also where it begins."""
    total = len(section.rows)
    if rows <= 0:
        return [], 0
    if total <= rows and not any(section.beyond.values()):
        return [row.line for row in section.rows], 0
    room = rows - 1
    start = max(0, min(start, total - room))
    below = Counter(row.noun for row in section.rows[start + room :] if row.noun)
    below.update({noun: count for noun, count in section.beyond.items() if count})
    above = Counter(row.noun for row in section.rows[:start] if row.noun)
    hidden = [f"{_counted(above)} above"] if above else []
    if below:
        hidden.append(f"{_counted(below)} below" if above else f"and {_counted(below, 'more ')}")
    lines = [row.line for row in section.rows[start : start + room]]
    return [*lines, span_line((StyledSpan("… " + ", ".join(hidden), "dim"),), columns)], start


def _counted(nouns: Mapping[str, int], more: str = "") -> str:
    """``87 more leases, 12 guests``."""
    counts = []
    for noun, count in sorted(nouns.items(), reverse=True):  # leases before guests
        counts.append(plural(count, more + noun, more + _MANY[noun] if noun in _MANY else ""))
        more = ""
    return ", ".join(counts)


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


def view_after_key(made: Screen, key: str) -> ScreenView:
    """What is looked at after this key. The next screen corrects a position beyond the end."""
    at, scroll = made.look
    match key:
        case "down":
            return ScreenView(at, scroll + 1)
        case "up":
            return ScreenView(at, max(0, scroll - 1))
        case "page down":
            return ScreenView(at, scroll + made.page)
        case "page up":
            return ScreenView(at, max(0, scroll - made.page))
        case "top":
            return ScreenView(at, 0)
        case "bottom":
            return ScreenView(at, 1_000_000_000)
        case "next" | "previous":
            step = 1 if key == "next" else -1
            return ScreenView(made.parts[(made.parts.index(at) + step) % len(made.parts)])
        case _:
            return made.look
