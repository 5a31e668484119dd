"""The bill of a session, line by line: the same words and numbers for command line, API and page.

A bill is read as of one moment: the office's bills until then, and the records known then. It is shown some lines at a
time, and what asks for the next lines names that moment again, so that all of them are of one bill, whatever runs
meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec import to_builtins

from sublet.client.fabric import Fabric
from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.lease.value import rfc3339
from sublet.studio.cell_bill import CellLine, cell_bill
from sublet.studio.records import Entry, Session
from sublet.studio.views import Json, count_of, memory_time
from sublet.values import NS_PER_S, format_duration, format_size
from sublet.wire.http_views import BillLine

LINES: Final = 100
"""In one answer, where nothing else is asked for."""
LINES_MAX: Final = 1000
_PLACE: Final = re.compile(r"(\d{1,19})\.(\d{1,15})\.(\d{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class BillPlace:
    """Where the next lines of a bill begin."""

    until_ns: int
    """The moment of the bill, in wall time."""
    seq: int
    """The last record that is in it."""
    number: int = 0
    """Lines before these."""

    def __str__(self) -> str:
        return f"{self.until_ns}.{self.seq}.{self.number}"

    @classmethod
    def read(cls, text: str, now_ns: int) -> BillPlace:
        """What an earlier answer named. Raises ``InvalidRequest``."""
        found = _PLACE.fullmatch(text)
        if found is None or int(found[1]) > now_ns:
            raise InvalidRequest("after names no lines of a bill", do="Give `next` as the last answer had it.")
        return cls(*(int(number) for number in found.groups()))


def bill_lines(
    fabric: Fabric, session: Session, entries: Sequence[Entry], until_ns: int
) -> tuple[list[CellLine], BillLine | None]:
    """Its lines, and the office's line of it; none and None where nothing was held. ``entries``: its own records."""
    until = rfc3339(until_ns)
    total = next((line for line in fabric.bill(by="session", until=until) if line.key == session.id), None)
    if total is None:
        return [], None
    return cell_bill(session, entries, fabric.bill(by="lease", until=until), total), total


def bill_view(fabric: Fabric, session: Session, entries: Sequence[Entry], place: BillPlace, most: int) -> Json:
    """So many lines from this place on, as a document. ``entries``: all records, of other sessions as well."""
    own = [entry for entry in entries if entry.session == session.id and entry.seq <= place.seq]
    lines, total = bill_lines(fabric, session, own, place.until_ns)
    until = place.number + most
    return {
        "session": session.id,
        "name": session.name,
        "until": rfc3339(place.until_ns),
        "total": None if total is None else to_builtins(total),
        "count": len(lines),
        "before": min(place.number, len(lines)),
        "lines": [one.document() for one in lines[place.number : until]],
        "next": str(BillPlace(place.until_ns, place.seq, until)) if until < len(lines) else None,
    }


# ---- as a table


def bill_heads(currency: str) -> tuple[str, ...]:
    """Of a table of lines."""
    cost = f"Cost, {currency}" if currency else "Cost"
    return (
        *("Cell", "Held", "Busy", "GPU time", "GPU memory", "Launches", "Errors"),
        *(cost, "Saved", "Waited", "Lease", "End"),
    )


def bill_row(line: Json) -> tuple[str, ...]:
    """One line, under ``bill_heads``."""
    cell = "outside of cells" if line["cell"] is None else f"[{line['cell']}]{' failed' if line['failed'] else ''}"
    return (cell, *_amounts(line), line["lease"] or "others", line["end"] or "-")


def sum_row(total: Json) -> tuple[str, ...]:
    """What all lines come to: the office's line of the session."""
    return ("in all", *_amounts(total), "", "")


def _amounts(line: Json) -> tuple[str, ...]:
    return (
        _seconds(line["held_seconds"]),
        _seconds(line["busy_seconds"]),
        _seconds(line["gpu_seconds"]),
        memory_time(line["vram_leased_byte_seconds"]),
        count_of(line["launches"]),
        _errors(line),
        f"{line['cost']:.6f}",
        format_size(line["bytes_saved"]) if line["bytes_saved"] > 0 else "-",
        _seconds(line["waited_seconds"]),
    )


def _errors(line: Json) -> str:
    """Of launches. They are counted for a lease, so a cell's are in the line of its lease outside of cells."""
    if line["launches"] is None:
        return count_of(None)
    return "-" if line["launch_errors"] is None else count_of(line["launch_errors"])


def _seconds(value: float) -> str:
    return format_duration(round(value * NS_PER_S)) if value else "-"
