"""Text in terminal cells, and tables of it. Pure.

A terminal has cells, not letters: some letters take two of them, some (accents written apart) none. Names and command
lines come from others, so whatever could move the cursor is made visible first, and a width is never taken from
``len``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sublet.values import NS_PER_S, format_duration

MARKS_MAX: Final = 2
"""Accents kept on one letter; more of them would paint over the lines above."""
FULL, EMPTY, MORE, UNSEEN = "█", "░", "…", "·"


class StyledSpan(NamedTuple):
    """Text in one style: words of ``bold dim red green yellow cyan``, or none."""

    text: str
    style: str = ""


Line = tuple[StyledSpan, ...]


def cells(text: str) -> list[str]:
    """One entry per cell: the letter with its accents, and an empty one behind a letter that takes two cells."""
    if text.isascii() and text.isprintable():
        return list(text)
    found: list[str] = []
    for letter in text:
        if not letter.isprintable():
            found.append(UNSEEN)
        elif unicodedata.category(letter) in ("Mn", "Me"):
            _put_mark(found, letter)
        elif unicodedata.east_asian_width(letter) in ("W", "F"):
            found += (letter, "")
        else:
            found.append(letter)
    return found


def _put_mark(found: list[str], mark: str) -> None:
    at = len(found) - 1
    if at > 0 and not found[at]:
        at -= 1
    if at < 0:
        found.append(UNSEEN)
    elif len(found[at]) <= MARKS_MAX:
        found[at] += mark


def width_of(text: str) -> int:
    """How many cells it takes."""
    return len(cells(text))


def clipped(text: str, width: int) -> str:
    """As much of it as fits, with an ellipsis where something is missing."""
    found = cells(text)
    if len(found) <= width:
        return "".join(found)
    if width <= 0:
        return ""
    kept = found[: width - 1]
    if found[width - 1] == "" and kept:  # the second half of a letter would be missing
        kept[-1] = " "
    return "".join(kept) + MORE


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Exactly so many cells."""
    shown = clipped(text, width)
    space = " " * (width - width_of(shown))
    return space + shown if right else shown + space


def span_line(spans: Iterable[StyledSpan], width: int) -> Line:
    """A line of at most so many cells, and nothing in it that a terminal would obey."""
    found: list[StyledSpan] = []
    left = width
    for text, style in spans:
        shown = clipped(text, left)
        if shown:
            found.append(StyledSpan(shown, style))
        left -= width_of(shown)
        if left <= 0:
            break
    return tuple(found)


def plain(line: Line) -> str:
    """Without any style."""
    return "".join(span.text for span in line).rstrip()


def bar(part: float, width: int, style: str = "") -> Line:
    """``████░░``: more than nothing shows at least one block, less than all at least one gap."""
    full = round(min(1.0, max(0.0, part)) * width)
    if 0.0 < part < 1.0 and width > 1:
        full = min(max(full, 1), width - 1)
    return (StyledSpan(FULL * full, style), StyledSpan(EMPTY * (width - full), "dim"))


def age(seconds: float | None) -> str:
    """A duration of at most seven cells, to the second: ``4m 10s``; below a second nothing counts."""
    whole = 0 if seconds is None else max(0, int(seconds))
    return "-" if seconds is None else format_duration(whole * NS_PER_S) if whole else "0s"


def size(amount: int) -> str:
    """Bytes in at most seven cells: ``1.2GiB``, ``139GiB``, ``640KiB``."""
    value, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    digits = f"{value:.1f}" if value < 100 and unit != "B" else f"{value:.0f}"
    return digits.removesuffix(".0") + unit


WIDE: Final = 120
"""From this width on reasons stand in the row they belong to."""
WIDER: Final = 160
"""From this width on every column is shown."""


class Column(NamedTuple):
    head: str
    most: int
    """Cells; 0: all that are left."""
    right: bool = False
    since: int = 0
    """Shown on terminals of at least so many columns."""


Entry = tuple["str | StyledSpan | Line", ...]


def table(title: str, columns: Sequence[Column], entries: Sequence[Entry], width: int) -> tuple[Line, list[Line]]:
    """The heading, whose first column has the title, and a line per entry. The widest entry sets the width of a column,
    up to the column's bound; the last column gets the rest."""
    shown = [at for at, column in enumerate(columns) if width >= column.since]
    first = columns[0]._replace(head=title, right=False) if columns[0].head != "#" else columns[0]
    used = [first if at == 0 else columns[at] for at in shown]
    rows = [[_spans(entry[at]) for at in shown] for entry in entries]
    if columns[0].head == "#":  # a number's column is too narrow for a title, so the next one has it as well
        used[1] = used[1]._replace(head=title)
    widths = [
        min(
            max(column.most, width_of(column.head)) if column.most else width,
            max(width_of(column.head), *(sum(width_of(span.text) for span in row[at]) for row in rows), 0),
        )
        for at, column in enumerate(used)
    ]
    titles = "".join(
        span.text for span in _aligned([(StyledSpan(column.head),) for column in used], used, widths, 1000)
    )
    heading = (StyledSpan(titles[:width].rstrip(), "bold"),)  # nothing is missing where only a title is cut
    return heading, [_aligned(row, used, widths, width) for row in rows]


def _spans(cell: str | StyledSpan | Line) -> Line:
    if isinstance(cell, StyledSpan):
        return (cell,)
    return (StyledSpan(cell),) if isinstance(cell, str) else cell


def _aligned(row: Sequence[Line], columns: Sequence[Column], widths: Sequence[int], width: int) -> Line:
    spans: list[StyledSpan] = []
    for at, (cell, column, wide) in enumerate(zip(row, columns, widths, strict=True)):
        if at:
            spans.append(StyledSpan("  "))
        if at == len(row) - 1 and not column.right:
            spans += cell  # nothing stands behind it
        elif len(cell) == 1:  # cut with an ellipsis, as a whole
            spans.append(StyledSpan(fit(cell[0].text, wide, right=column.right), cell[0].style))
        else:
            inner = span_line(cell, wide)
            spans += (*inner, StyledSpan(" " * (wide - sum(width_of(span.text) for span in inner))))
    return span_line(spans, width)
