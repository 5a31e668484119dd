"""The bill of a session, a line for each cell: pure, from its records and the office's bill of its leases.

What a cell used is what its notebook measured; what a lease cost only the office knows. So the time that the office
billed for a lease is given to its cells in the order in which they ended, each as long as it had the lease, and never
more than there is; device time, device memory and money are divided by that. Time that the office counted busy beyond
what the notebook measured is that of the cells too: a lease is busy while a cell runs. What no cell had (a lease that
was kept after the last one, a program that is no notebook) has a line of its own for each lease, and leases that no
record names have one together. So the lines come to the office's bill of the session, to the unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, fields, replace
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.lease.value import rfc3339
from sublet.studio.records import CellRecord, Entry, Granted, Moved, Ran, Session
from sublet.values import NS_PER_S
from sublet.wire.http_views import BillLine

_MICRO: Final = 1_000_000


@dataclass(kw_only=True)
class CellLine:
    """One line. Amounts are whole numbers, so that sums are exact."""

    session: str
    name: str
    lease: str = ""
    """Empty: of leases that no record of the session names."""
    cell: int | None = None
    """Its number in the notebook; None: outside of cells."""
    at: str = ""
    """When the cell ended."""
    held_ns: int = 0
    busy_ns: int = 0
    gpu_ns: int = 0
    """Of whole devices."""
    vram_leased: int = 0
    """GPU memory that was leased, in bytes times seconds."""
    launches: int | None = None
    """None: not counted."""
    launch_errors: int | None = None
    """Known of a lease, not of its cells; None: not known, or not counted."""
    bytes_saved: int = 0
    waited_ns: int = 0
    micros: int = 0
    """The cost, in millionths."""
    currency: str = ""
    end: str = ""
    """How its lease ended: ``released``, ``idle``, ``preempted``, and so on; in the line outside of cells."""
    failed: bool = False
    """The cell raised, or its lease ended under it."""

    def document(self) -> dict[str, Any]:
        """In the units of every document; each number has all its digits."""
        return {
            "session": self.session,
            "name": self.name,
            "cell": self.cell,
            "lease": self.lease,
            "at": self.at or None,
            "held_seconds": self.held_ns / NS_PER_S,
            "busy_seconds": self.busy_ns / NS_PER_S,
            "gpu_seconds": self.gpu_ns / NS_PER_S,
            "vram_leased_byte_seconds": self.vram_leased,
            "launches": self.launches,
            "launch_errors": self.launch_errors,
            "bytes_saved": self.bytes_saved,
            "waited_seconds": self.waited_ns / NS_PER_S,
            "cost": self.micros / _MICRO,
            "currency": self.currency,
            "end": self.end or None,
            "failed": self.failed,
        }


@dataclass
class _Left:
    """What of a lease no line has yet, in whole numbers."""

    held_ns: int = 0
    busy_ns: int = 0
    gpu_ns: int = 0
    micros: int = 0
    vram_leased: int = 0
    waited_ns: int = 0
    bytes_saved: int = 0
    launches: int | None = field(default=0)

    @classmethod
    def of(cls, line: BillLine) -> _Left:
        return cls(
            held_ns=round(line.held_seconds * NS_PER_S),
            busy_ns=round(line.busy_seconds * NS_PER_S),
            gpu_ns=round(line.gpu_seconds * NS_PER_S),
            micros=round(line.cost * _MICRO),
            vram_leased=round(line.vram_leased_byte_seconds),
            waited_ns=round(line.waited_seconds * NS_PER_S),
            bytes_saved=line.bytes_saved,
            launches=line.launches,
        )

    def without(self, others: Iterable[CellLine]) -> _Left:
        """What is left beside these lines."""
        left = replace(self)
        for line in others:
            left.held_ns -= line.held_ns
            left.busy_ns -= line.busy_ns
            left.gpu_ns -= line.gpu_ns
            left.micros -= line.micros
            left.vram_leased -= line.vram_leased
            left.waited_ns -= line.waited_ns
            left.bytes_saved -= line.bytes_saved
            if left.launches is not None:
                left.launches -= line.launches or 0
        return left


def lease_ids(entries: Iterable[Entry]) -> list[str]:
    """The leases that the records of a session name, oldest first."""
    found: dict[str, None] = {}
    for entry in entries:
        match entry.record:
            case Granted(lease=lease) | Moved(lease=lease):
                found[lease.id] = None
            case Ran(cell=cell):
                found[cell.lease] = None
            case _:
                pass
    return list(found)


def cell_bill(
    session: Session, entries: Sequence[Entry], leases: Iterable[BillLine], total: BillLine
) -> list[CellLine]:
    """The lines of one session. ``entries``: its records; ``leases``: the office's bill by lease, of others as well;
    ``total``: its line of the bill by session."""
    cells = [entry.record.cell for entry in entries if isinstance(entry.record, Ran)]
    billed = {line.key: line for line in leases}
    lines: list[CellLine] = []
    named = [billed[ident] for ident in lease_ids(entries) if ident in billed]
    for line in named:
        lines += _lines_of(session, line, [cell for cell in cells if cell.lease == line.key])
    rest = _Left.of(total).without(lines)
    if rest.held_ns > 0 or rest.gpu_ns > 0 or total.leases > len(named) or not lines:
        lines.append(_rest(session, "", rest, total.currency))
    else:  # the cost and memory of each lease are rounded, and those of the session
        lines[-1].micros += rest.micros
        lines[-1].vram_leased += rest.vram_leased
    return lines


def _lines_of(session: Session, line: BillLine, cells: Sequence[CellRecord]) -> list[CellLine]:
    """One lease: its cells, and what is outside of them."""
    whole = _Left.of(line)
    lines: list[CellLine] = []
    begun_ns = 0
    for cell in cells:
        left = whole.without(lines)
        held_ns = _within(cell.held_s, left.held_ns)
        until_ns = begun_ns + held_ns
        lines.append(
            CellLine(
                session=session.id,
                name=session.name,
                lease=line.key,
                cell=cell.cell,
                at=rfc3339(cell.at_ns),
                held_ns=held_ns,
                busy_ns=min(_within(cell.busy_s, left.busy_ns), held_ns),
                gpu_ns=_part(whole.gpu_ns, begun_ns, until_ns, whole.held_ns),
                vram_leased=_part(whole.vram_leased, begun_ns, until_ns, whole.held_ns),
                launches=cell.launches if left.launches is None else min(cell.launches or 0, left.launches),
                bytes_saved=min(cell.bytes_saved, left.bytes_saved),
                waited_ns=_within(cell.waited_s, left.waited_ns),
                micros=_part(whole.micros, begun_ns, until_ns, whole.held_ns),
                currency=line.currency,
                failed=cell.failed,
            )
        )
        begun_ns = until_ns
    rest = _rest(session, line.key, whole.without(lines), line.currency)
    _move_busy(rest, lines)
    rest.launch_errors = None if line.launches is None else line.launch_errors
    rest.end = "" if line.live else line.end or ""
    return [*lines, rest]


def _move_busy(rest: CellLine, cells: Sequence[CellLine]) -> None:
    """No line was busy for longer than it was held: what is too much outside of cells is the cells', the last ones
    first. There is room, since the office counts no lease busy for longer than it was held."""
    for cell in reversed(cells):
        moved_ns = min(max(0, rest.busy_ns - rest.held_ns), cell.held_ns - cell.busy_ns)
        cell.busy_ns += moved_ns
        rest.busy_ns -= moved_ns


def _rest(session: Session, lease: str, left: _Left, currency: str) -> CellLine:
    known = {one.name: getattr(left, one.name) for one in fields(left)}
    return CellLine(session=session.id, name=session.name, lease=lease, currency=currency, **known)


def _within(seconds: float, most_ns: int) -> int:
    return max(0, min(round(seconds * NS_PER_S), most_ns))


def _part(whole: int, begun_ns: int, until_ns: int, held_ns: int) -> int:
    """Of an amount that was used evenly, what falls between two moments; neighbouring parts come to the whole."""
    return 0 if held_ns <= 0 else whole * until_ns // held_ns - whole * begun_ns // held_ns
