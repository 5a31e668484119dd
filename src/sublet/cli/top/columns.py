"""Texts in columns. Pure.

How wide a column is says its most demanding row, up to a bound; the last one gets what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sublet.cli.top.text import Line, Span, fit, span_line, width_of

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


Entry = tuple["str | Span | Line", ...]


def table(title: str, columns: Sequence[Column], entries: Sequence[Entry], width: int) -> tuple[Line, list[Line]]:
    """The heading, whose first column has the title, and a line per entry."""
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
    titles = "".join(span.text for span in _aligned([(Span(column.head),) for column in used], used, widths, 1000))
    heading = (Span(titles[:width].rstrip(), "bold"),)  # nothing is missing where only a title is cut
    return heading, [_aligned(row, used, widths, width) for row in rows]


def _spans(cell: str | Span | Line) -> Line:
    if isinstance(cell, Span):
        return (cell,)
    return (Span(cell),) if isinstance(cell, str) else cell


def _aligned(row: Sequence[Line], columns: Sequence[Column], widths: Sequence[int], width: int) -> Line:
    spans: list[Span] = []
    for at, (cell, column, wide) in enumerate(zip(row, columns, widths, strict=True)):
        if at:
            spans.append(Span("  "))
        if at == len(row) - 1 and not column.right:
            spans += cell  # nothing stands behind it
        elif len(cell) == 1:  # cut with an ellipsis, as a whole
            spans.append(Span(fit(cell[0].text, wide, right=column.right), cell[0].style))
        else:
            inner = span_line(cell, wide)
            spans += (*inner, Span(" " * (wide - sum(width_of(span.text) for span in inner))))
    return span_line(spans, width)
