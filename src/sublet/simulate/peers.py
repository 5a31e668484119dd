"""Models of other systems on the same workload: whole-session reservation, and a batch queue.

Each is the simplest honest model of its kind, and where it is not exact it errs in the peer's favour: GPUs change hands
in no time, a server starts in no time, a culled session has its variables back for nothing, and backfill knows how long
every cell will run. None of this is used by the ledger.

- **Reservation**: a session takes what its largest cell needs when it is opened, and gives it back when it is closed.
- **Culler**: the same, but GPUs go back once nothing has run for 30 or 90 minutes, and are asked for anew by the next
  cell that needs one.
- **FIFO**: each cell is a job, in one queue; if the first does not fit, none passes it.
- **Backfill** (EASY): a later cell may pass if the first one starts no later for it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.placement import is_called, models_of
from sublet.simulate.replay import ReplayHardware, fluid_bound_ns
from sublet.simulate.results import Result
from sublet.simulate.workload import Cell, WorkloadSession
from sublet.values import NS_PER_S

_MIN: Final = 60 * NS_PER_S
BACKFILL_DEPTH: Final = 200
"""Waiting cells that backfill looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way to share."""

    name: str
    by_cell: bool = False
    """A cell is what holds GPUs; else a session."""
    cull_min: float | None = None
    """A session loses its GPUs after so long without a cell."""
    backfill: bool = False


PEERS: Final = (
    Peer(name="reservation"),
    Peer(name="cull 90m", cull_min=90),
    Peer(name="cull 30m", cull_min=30),
    Peer(name="FIFO", by_cell=True),
    Peer(name="backfill", by_cell=True, backfill=True),
)


def run_peer(peer: Peer, sessions: Sequence[WorkloadSession], hardware: ReplayHardware) -> Result:
    """The whole workload under this peer."""
    return _Run(peer, sessions, hardware).run()


@dataclass(slots=True, eq=False)
class _Holder:
    session: WorkloadSession
    tenant: str
    next_cell: int = 0
    node: int | None = None
    gpus: int = 0
    since_ns: int = 0
    ends_ns: int = 0
    """When its present cell is through; what backfill reckons with."""
    requested_ns: int = 0
    waited_ns: int = 0
    """For a server with its GPUs; its next cell pays."""
    turn: int = 0

    @property
    def cell(self) -> Cell:
        return self.session.cells[self.next_cell]


class _Run:
    def __init__(self, peer: Peer, sessions: Sequence[WorkloadSession], hardware: ReplayHardware) -> None:
        self._peer, self._hardware = peer, hardware
        self.result = Result(
            name=peer.name, gpus=hardware.total, sessions=len(sessions), fluid_ns=fluid_bound_ns(sessions, hardware)
        )
        self._nodes = hardware.nodes
        self._free = [node.gpus for node in self._nodes]
        self._now_ns, self._count = 0, 0
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._line: list[_Holder] = []
        self._running: dict[_Holder, None] = {}
        for session in sessions:
            holder = _Holder(session, session.owner)
            self._at(round(session.start_min * _MIN), self._open, holder)
            self.result.reserved_ns += round(session.gpus * (session.stop_min - session.start_min) * _MIN)
        self.result.planned_ns = round(max((session.stop_min for session in sessions), default=0.0) * _MIN)

    def run(self) -> Result:
        began = time.monotonic()
        while self._events:
            self._now_ns, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)
        self.result.wall_s = time.monotonic() - began
        self.result.end_ns = self._now_ns
        return self.result

    def _at(self, at_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_ns, self._count, do, arguments))

    # ---- a session's life ----

    def _open(self, holder: _Holder) -> None:
        if not self._peer.by_cell and self._need(holder):
            self._ask(holder)
        else:
            self._next(holder)

    def _need(self, holder: _Holder) -> int:
        if self._peer.by_cell:
            return holder.cell.gpus
        possible = (cell.gpus for cell in holder.session.cells if self._hardware.has_room_for(cell))
        return max(possible, default=0)

    def _next(self, holder: _Holder) -> None:
        """Nothing runs: the next cell comes after its pause, or the session closes."""
        holder.turn += 1
        if holder.next_cell < len(holder.session.cells):
            idle_min = holder.cell.pause_min
            self._at(self._now_ns + round(idle_min * _MIN), self._start, holder)
        else:
            planned = sum(cell.pause_min + cell.duration_min for cell in holder.session.cells)
            idle_min = max(0.0, holder.session.stop_min - holder.session.start_min - planned)
            self._at(self._now_ns + round(idle_min * _MIN), self._leave, holder, holder.turn)
        if self._peer.cull_min is not None and idle_min > self._peer.cull_min:
            self._at(self._now_ns + round(self._peer.cull_min * _MIN), self._leave, holder, holder.turn)

    def _start(self, holder: _Holder) -> None:
        cell = holder.cell
        holder.turn += 1
        if cell.gpus == 0 or not self._hardware.has_room_for(cell):
            self.result.impossible += cell.gpus > 0
            wait_min = cell.duration_min if cell.gpus == 0 else 0.0
            holder.next_cell += 1
            self._at(self._now_ns + round(wait_min * _MIN), self._next, holder)
        elif holder.node is None:
            self._ask(holder)
        else:
            self._work(holder)

    def _ask(self, holder: _Holder) -> None:
        holder.requested_ns = self._now_ns
        self._line.append(holder)
        self.result.note_queue(self._now_ns, +1)
        self._admit()

    def _work(self, holder: _Holder) -> None:
        run_ns, waited_ns = max(1, round(holder.cell.duration_min * _MIN)), holder.waited_ns
        holder.ends_ns, holder.waited_ns = self._now_ns + run_ns, 0
        self.result.cells += 1
        self.result.waits_ns.append(waited_ns)
        self.result.used_ns += run_ns * holder.cell.gpus
        self.result.done.append((holder.tenant, run_ns, waited_ns + run_ns))
        self._at(holder.ends_ns, self._done, holder)

    def _done(self, holder: _Holder) -> None:
        self.result.finished_ns = self._now_ns
        holder.next_cell += 1
        if self._peer.by_cell:
            self._give_back(holder)
        self._next(holder)

    def _leave(self, holder: _Holder, turn: int) -> None:
        """Closed, or culled, unless something has run since."""
        if holder.turn == turn:
            self._give_back(holder)

    # ---- GPUs ----

    def _give_back(self, holder: _Holder) -> None:
        if holder.node is not None:
            held_ns = holder.gpus * (self._now_ns - holder.since_ns)
            self.result.note_held(held_ns, self._nodes[holder.node].model)
            self._free[holder.node] += holder.gpus
            holder.node = None
            del self._running[holder]
            self._admit()

    def _admit(self) -> None:
        while self._line and (node := self._fit(self._line[0])) is not None:
            self._let_in(self._line.pop(0), node)
        if self._peer.backfill and self._line:
            self._backfill()

    def _fit(self, holder: _Holder) -> int | None:
        """The node with the least room that is enough."""
        need = self._need(holder)
        fitting = [node for node in self._nodes_for(holder) if self._free[node] >= need]
        return min(fitting, key=lambda node: (self._preference(holder, node), self._free[node], node), default=None)

    def _preference(self, holder: _Holder, node: int) -> int:
        """Which of the models that its cell names the node has, in their order."""
        names = models_of(holder.cell.model or "")
        return next((at for at, name in enumerate(names) if is_called(name, self._nodes[node].model)), 0)

    def _nodes_for(self, holder: _Holder) -> Sequence[int]:
        """Those with the models and the memory that it needs. A session whose cells need what no one node has is put
        where the largest of them can run."""
        if not self._hardware.beside:
            return range(len(self._nodes))
        cells = [holder.cell]
        if not self._peer.by_cell:
            cells = [cell for cell in holder.session.cells if cell.gpus and self._hardware.has_room_for(cell)]
        largest = max(cells, key=lambda cell: (cell.gpus, cell.vram_gib))
        fit_one = [number for number, node in enumerate(self._nodes) if node.take(largest)]
        return [number for number in fit_one if all(map(self._nodes[number].take, cells))] or fit_one

    def _let_in(self, holder: _Holder, node: int) -> None:
        holder.node, holder.gpus, holder.since_ns = node, self._need(holder), self._now_ns
        self._free[node] -= holder.gpus
        self._running[holder] = None
        self.result.note_queue(self._now_ns, -1)
        holder.waited_ns += self._now_ns - holder.requested_ns
        if self._peer.by_cell or holder.turn:
            self._work(holder)
        else:
            self._next(holder)

    def _backfill(self) -> None:
        """Cells behind the first in line that fit and do not delay it on the node where it can start soonest."""
        if not any(self._free):
            return
        need = self._need(self._line[0])
        running: list[list[tuple[int, int]]] = [[] for _ in self._free]
        for holder in self._running:
            assert holder.node is not None
            running[holder.node].append((holder.ends_ns, holder.gpus))
        start_ns, kept = min(
            (_soonest(self._free[node], running[node], need), node) for node in self._nodes_for(self._line[0])
        )
        left = self._free[kept] - need + sum(gpus for ends_ns, gpus in running[kept] if ends_ns <= start_ns)
        for holder in self._line[1 : 1 + BACKFILL_DEPTH]:
            wants, run_ns = self._need(holder), round(holder.cell.duration_min * _MIN)
            still_runs = self._now_ns + run_ns > start_ns
            spare = list(self._free)
            if still_runs:  # when the first one starts: only what that leaves over
                spare[kept] = min(spare[kept], left)
            fitting = [node for node in self._nodes_for(holder) if spare[node] >= wants]
            if fitting:
                node = min(fitting, key=lambda node: (self._preference(holder, node), spare[node], node))
                left -= wants * (still_runs and node == kept)
                self._line.remove(holder)
                self._let_in(holder, node)


def _soonest(free: int, running: list[tuple[int, int]], need: int) -> int:
    """When so many GPUs will be free on a node, by (end, GPUs) of what runs there."""
    for ends_ns, gpus in sorted(running):
        free += gpus
        if free >= need:
            return ends_ns
    return 1 << 62
