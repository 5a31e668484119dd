"""Renders lines for a terminal and emits only what changed. Pure.

The screen is compared cell by cell, so a countdown costs a dozen bytes a second, not a line, and a view over a slow ssh
connection stays usable. The cursor is put in place for every piece, hence it does not matter what a terminal makes of a
letter that is wider here than there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from sublet.cli.top.text import Line, cells

Cell = tuple[str, str]
"""Letter and style; an empty letter is the second half of the one before."""
Painting = tuple[tuple[Cell, ...], ...]

_SGR: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_GAP: Final = 6
"""So many unchanged cells are rather written again than jumped over: a jump has about as many bytes."""
_SIMPLE: Final = str.maketrans({"█": "#", "░": ".", "└": "`", "…": "~", "·": ".", "×": "x", "↑": "^", "↓": "v"})


def painting(lines: Sequence[Line], *, colour: bool) -> Painting:
    """The lines as cells."""
    return tuple(
        tuple((letter, span.style if colour else "") for span in line for letter in cells(span.text)) for line in lines
    )


def changes(before: Painting | None, after: Painting) -> str:
    """What to write so that a terminal that shows the one shows the other; with nothing before, the whole."""
    pieces = [] if before is not None else ["\x1b[0m\x1b[2J"]
    for row, (old, new) in enumerate(zip_longest(before or (), after, fillvalue=()), start=1):
        pieces += _line_changes(row, old, new)
    return "".join(pieces)


def styled(line: Line, *, colour: bool) -> str:
    """One line for a terminal that scrolls."""
    return "".join(_styled(span.text, span.style if colour else "") for span in line).rstrip(" ")


def simple(text: str, encoding: str) -> str:
    """The same for a terminal that knows fewer letters."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_SIMPLE).encode(encoding, "replace").decode(encoding)
    return text


def _line_changes(row: int, old: tuple[Cell, ...], new: tuple[Cell, ...]) -> list[str]:
    pieces = []
    for start, stop in _runs(old, new):
        pieces.append(f"\x1b[{row};{start + 1}H{_run(row, new, start, stop)}")
    if len(old) > len(new):
        pieces.append(f"\x1b[{row};{len(new) + 1}H\x1b[K")
    return pieces


def _runs(old: tuple[Cell, ...], new: tuple[Cell, ...]) -> list[tuple[int, int]]:
    """Where they differ, as stretches; small gaps are filled. A letter of two cells is taken whole."""
    found: list[tuple[int, int]] = []
    for at, cell in enumerate(new):
        if at < len(old) and old[at] == cell and not (at and not cell[0] and found and found[-1][1] == at):
            continue
        start = at - 1 if not cell[0] and at else at
        if found and start - found[-1][1] <= _GAP:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((start, at + 1))
    return [(start - 1 if start and not new[start][0] else start, stop) for start, stop in found]


def _run(row: int, new: tuple[Cell, ...], start: int, stop: int) -> str:
    if stop < len(new) and not new[stop][0]:
        stop += 1
    pieces, at = [], start
    while at < stop:
        style, text, ahead = new[at][1], [], at
        while ahead < stop and new[ahead][1] == style:
            letter = new[ahead][0]
            text.append(letter)
            ahead += 1
            if letter and (len(letter) > 1 or ord(letter) > 0x2FFF) and ahead < stop:
                ahead += not new[ahead][0]
                text.append(f"\x1b[{row};{ahead + 1}H")  # wherever that letter has left the cursor
        pieces.append(_styled("".join(text), style))
        at = ahead
    return "".join(pieces)


def _styled(text: str, style: str) -> str:
    return f"\x1b[{';'.join(_SGR[word] for word in style.split())}m{text}\x1b[0m" if style and text else text
