"""Output for people (aligned tables, sizes, times, colour) and for programs (one JSON document).

Colour only on a terminal, and never with NO_COLOR. Nothing is said by colour alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

from sublet.values import NS_PER_S, Kind, format_duration, format_size

Json = dict[str, Any]
"""A document of the control API, as decoded. The short way in does without typed messages: they cost 20 ms."""

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def colour_on(stream: TextIO) -> bool:
    """Whether this stream is a terminal that may get colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def burst_of(lease: Mapping[str, Any]) -> str:
    """The name of the burst that the lease belongs to, as people read it; empty where it belongs to none."""
    labels = lease.get("labels") or {}
    return f"burst {labels['job']}" if labels.get("program") == "burst" and labels.get("job") else ""


def paint(text: str, *styles: str, stream: TextIO | None = None) -> str:
    """The text in that style, where the stream takes it."""
    if not text or not colour_on(stream or sys.stdout):
        return text
    return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"


def document(value: object) -> None:
    """Print one JSON document, indented, since people read it too."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def cost_head(lines: Sequence[Json]) -> str:
    """Over a column of costs, with the currency of these lines of a bill."""
    currency = lines[0].get("currency", "") if lines else ""
    return f"COST ({currency})" if currency else "COST"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Columns as wide as their longest cell. Cells hold plain text; colour is put on after the width is known."""
    body = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(head), *(len(row[i]) for row in body)) if body else len(head) for i, head in enumerate(heads)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if head in right else cell.ljust(width)
            for head, cell, width in zip(heads, cells, widths, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([paint(line(heads), "bold"), *(line(row) for row in body)])


def visible(text: str) -> str:
    """Names and details come from others: nothing in them may move the cursor or paint over what we say."""
    return "".join(c if c.isprintable() else "·" for c in text)


def seconds(value: float | None) -> str:
    """A duration for people, or a dash."""
    return "-" if value is None else format_duration(round(value * NS_PER_S))


def amount(kind: str, number: int) -> str:
    """``2GiB``, or ``4 cores``."""
    return plural(number, "core") if kind == Kind.CPU else format_size(number)


def window_text(view: Json) -> str:
    """For which window the amount of a budget is."""
    return "in all" if view["per"] == "total" else f"a {view['per']}"


def plural(number: int, noun: str, many: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {many or noun + 's'}"


def epoch(pair: Sequence[int] | None) -> str:
    return "-" if pair is None else f"{pair[0]}.{pair[1]}"


def where(part: Mapping[str, Any]) -> str:
    """A device by its name, with what it is: a host device must not be taken for a GPU."""
    if part["kind"] != Kind.GPU:
        return str(part["resource"])
    return f"{part['resource']} ({'host device, no GPU' if part['host'] else part['model'] or 'GPU'})"
