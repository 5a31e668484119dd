"""Replays a workload through the real ledger on a held clock, with the invariants on.

    python -m sublet.sim.replay --gpus 64                      # a generated fortnight
    python -m sublet.sim.replay --trace trace.csv --gpus 48    # a real one

Every cell that needs GPUs asks for them, works while it holds them, and keeps them idle until their time to live is
over, so that the next cell may find them warm. A cell that is taken saves, asks again, and goes on where it was, for a
price of one minute. The loop is closed: who waits longer asks for the next cell later.

What is printed stands between two bounds: what the cells used, and what whole-session reservation would have held.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sublet.broker import commands as cmd
from sublet.broker import events as ev
from sublet.broker.answers import Granted, Outcome, Refusal
from sublet.broker.ledger import Ledger
from sublet.broker.policy import Policy
from sublet.broker.records import Now, Want
from sublet.errors import SubletError
from sublet.lease.states import LIVE_STATES
from sublet.sim.workload import Cell, Session, generate, read_trace
from sublet.values import GIB, NS_PER_S, EndReason, Kind, LeaseId, NodeId, RequestId, ResourceId, TenantId, Tier
from sublet.wire.orders import Device, End, Inventory, TornDown

__all__ = ["Replay", "Result", "main"]

_MIN: Final = 60 * NS_PER_S
TTL_NS: Final = 5 * _MIN
RENEW_NS: Final = TTL_NS * 7 // 10
TEARDOWN_NS: Final = 2 * NS_PER_S
RESUME_COST_MIN: Final = 1.0
"""What a cell that was taken loses: a save and a restore."""
AT_ONCE_NS: Final = 5 * NS_PER_S
GPUS_PER_NODE: Final = 8
POLICY: Final = Policy(ended_keep_ns=60 * NS_PER_S)


@dataclass(slots=True)
class Result:
    """What came of it."""

    sessions: int = 0
    cells: int = 0
    impossible: int = 0
    """Cells that need more GPUs than any node has; they are left out."""
    waits_ns: list[int] = field(default_factory=list)
    warm: int = 0
    """Cells that found their GPUs still held."""
    preemptions: dict[EndReason, int] = field(default_factory=dict)
    leased_ns: int = 0
    """GPU × nanoseconds, from grant to end."""
    used_ns: int = 0
    reserved_ns: int = 0
    """The same for whole-session reservation."""
    commands: int = 0
    wall_s: float = 0.0

    def wait_s(self, share: float) -> float:
        """The wait that this share of the cells did not exceed."""
        ordered = sorted(self.waits_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / NS_PER_S if ordered else 0.0

    @property
    def at_once(self) -> float:
        """The share of cells that started within five seconds."""
        return sum(wait <= AT_ONCE_NS for wait in self.waits_ns) / max(1, len(self.waits_ns))

    def __str__(self) -> str:
        hour = 3600 * NS_PER_S
        leased, used, reserved = (ns / hour for ns in (self.leased_ns, self.used_ns, self.reserved_ns))
        p50, p95, p99 = (self.wait_s(share) for share in (0.5, 0.95, 0.99))
        warm = self.warm / max(1, self.cells)
        left_out = f", {self.impossible} left out" if self.impossible else ""
        taken = ", ".join(f"{count} {reason}" for reason, count in sorted(self.preemptions.items())) or "none"
        lines = [
            f"{self.cells} GPU cells of {self.sessions} sessions{left_out}",
            f"GPU-hours   leased {leased:,.0f}, {leased / max(reserved, 1e-9):.1%} of whole-session reservation",
            f"            used {used:,.0f}, reserved {reserved:,.0f}",
            f"wait        p50 {p50:.0f} s, p95 {p95:.0f} s, p99 {p99:.0f} s",
            f"started     {self.at_once:.2%} at once, {warm:.1%} on GPUs that were still held",
            f"taken       {taken}",
            f"{self.commands:,} commands in {self.wall_s:.1f} s",
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class _Notebook:
    """Where one session is."""

    session: Session
    tenant: TenantId
    next_cell: int = 0
    lease: LeaseId | None = None
    held: int = 0
    """GPUs of the lease."""
    left_ns: int = 0
    """Of the cell that runs or waits; 0 if none does."""
    asked_ns: int = 0
    runs_since_ns: int | None = None
    first_start: bool = True
    turn: int = 0
    """Rises with every change, so that what was planned before is void."""

    @property
    def cell(self) -> Cell:
        return self.session.cells[self.next_cell]


class Replay:
    """One workload on so many GPUs."""

    def __init__(self, sessions: Sequence[Session], *, gpus: int, check_every: int = 1) -> None:
        """``check_every`` says after how many commands with consequences the books are walked."""
        self.result = Result(sessions=len(sessions))
        self._now_ns = 1_000 * NS_PER_S
        self._origin_ns = self._now_ns
        self._ledger = Ledger(POLICY)
        self._check_every = check_every
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._asked = 0
        self._granted: dict[LeaseId, tuple[int, int]] = {}
        self._by_lease: dict[LeaseId, _Notebook] = {}
        self._tick_ns: int | None = None
        self._most = min(gpus, GPUS_PER_NODE)
        self._tell(cmd.OpenOffice(incarnation=1, clock_domain="replay"))
        for node in range(-(-gpus // GPUS_PER_NODE)):
            self._tell(cmd.NodeUp(inventory=_node(node, min(GPUS_PER_NODE, gpus - node * GPUS_PER_NODE))))
        for session in sessions:
            tenant = TenantId(f"t-{session.name}")
            self._tell(cmd.AddTenant(tenant=tenant, token_hash=session.name))
            self._plan(session.start_min, self._next_cell, _Notebook(session, tenant))
            self.result.reserved_ns += round(session.gpus * (session.stop_min - session.start_min) * _MIN)

    def run(self) -> Result:
        """To the end of the last session."""
        began = time.monotonic()
        while self._queue:
            at_ns, _, do, arguments = heapq.heappop(self._queue)
            self._now_ns = max(self._now_ns, at_ns)
            do(*arguments)
            self._arm()
        self.result.wall_s = time.monotonic() - began
        return self.result

    # ---- a notebook's life ----

    def _next_cell(self, notebook: _Notebook) -> None:
        """After the pause that comes before it, the next cell wants to run."""
        if notebook.next_cell < len(notebook.session.cells):
            self._after(notebook.cell.pause_min, self._start, notebook)

    def _start(self, notebook: _Notebook) -> None:
        cell = notebook.cell
        if cell.gpus == 0:
            notebook.next_cell += 1
            self._after(cell.duration_min, self._next_cell, notebook)
            return
        if cell.gpus > self._most:
            self.result.impossible += 1
            notebook.next_cell += 1
            self._next_cell(notebook)
            return
        notebook.left_ns = max(1, round(cell.duration_min * _MIN))
        notebook.asked_ns, notebook.first_start = self._now_ns, True
        if notebook.lease is not None and notebook.held >= cell.gpus and self._renew(notebook, active=True):
            self.result.warm += 1
            self._work(notebook)
        else:
            self._give_back(notebook)
            self._ask(notebook)

    def _ask(self, notebook: _Notebook) -> None:
        self._asked += 1
        lease = LeaseId(f"l{self._asked}")
        notebook.lease, notebook.held = lease, notebook.cell.gpus
        self._by_lease[lease] = notebook
        want = Want(kind=Kind.GPU, amount=GIB, count=notebook.cell.gpus)
        outcome = self._tell(
            cmd.Acquire(
                tenant=notebook.tenant,
                lease=lease,
                request_id=RequestId(lease),
                wants=(want,),
                ttl_ns=TTL_NS,
                tier=Tier.INTERACTIVE,
            )
        )
        assert not isinstance(outcome.answer, SubletError | Refusal), outcome.answer
        if isinstance(outcome.answer, Granted) and outcome.answer.lease.status in LIVE_STATES:
            self._work(notebook)

    def _work(self, notebook: _Notebook) -> None:
        """It has its GPUs: run to the end, and renew on the way."""
        if notebook.first_start:
            notebook.first_start = False
            self.result.cells += 1
            self.result.waits_ns.append(self._now_ns - notebook.asked_ns)
        notebook.runs_since_ns = self._now_ns
        notebook.turn += 1
        self._at(self._now_ns + notebook.left_ns, self._done, notebook, notebook.turn)
        self._at(self._now_ns + RENEW_NS, self._keep, notebook, notebook.turn)

    def _keep(self, notebook: _Notebook, turn: int) -> None:
        if notebook.turn == turn and self._renew(notebook, active=True):
            self._at(self._now_ns + RENEW_NS, self._keep, notebook, turn)

    def _done(self, notebook: _Notebook, turn: int) -> None:
        """The cell is through; its lease stays, idle, for as long as it has time."""
        if notebook.turn != turn:
            return
        self._stop_clock(notebook)
        notebook.left_ns = 0
        notebook.next_cell += 1
        self._renew(notebook, active=False)
        self._next_cell(notebook)

    def _renew(self, notebook: _Notebook, *, active: bool) -> bool:
        """True if the lease is there with all its time. A cell that ends says only that it is idle."""
        lease = self._ledger.state.leases.get(notebook.lease) if notebook.lease is not None else None
        if lease is None or lease.status not in LIVE_STATES or lease.epoch is None:
            return False
        tenant, epoch = notebook.tenant, lease.epoch
        if active:
            return isinstance(self._tell(cmd.Renew(tenant=tenant, lease=lease.id, epoch=epoch)).answer, Granted)
        self._tell(cmd.NoteActivity(tenant=tenant, lease=lease.id, epoch=epoch, active=False))
        return True

    def _give_back(self, notebook: _Notebook) -> None:
        if notebook.lease is not None:
            lease, notebook.lease = notebook.lease, None
            if lease in self._ledger.state.leases:
                self._tell(cmd.Release(tenant=notebook.tenant, lease=lease))

    def _stop_clock(self, notebook: _Notebook) -> None:
        if notebook.runs_since_ns is not None:
            ran_ns = self._now_ns - notebook.runs_since_ns
            notebook.left_ns = max(0, notebook.left_ns - ran_ns)
            self.result.used_ns += ran_ns * notebook.cell.gpus
            notebook.runs_since_ns = None
        notebook.turn += 1

    # ---- what the ledger says ----

    def _tell(self, command: cmd.Command) -> Outcome:
        """One command, and what follows from it at once."""
        outcome = self._ledger.handle(command, Now(self._now_ns, self._now_ns))
        self.result.commands += 1
        if outcome.events and self.result.commands % self._check_every == 0:
            self._ledger.state.check()
        for order in outcome.orders:
            if isinstance(order, End):
                torn = tuple(part.resource for part in order.parts)
                self._at(self._now_ns + TEARDOWN_NS, self._torn_down, order, torn)
        for event in outcome.events:
            self._heard(event)
        return outcome

    def _torn_down(self, order: End, resources: tuple[ResourceId, ...]) -> None:
        node = NodeId(str(resources[0]).partition("/")[0])
        report = TornDown(node=node, lease=order.lease, epoch=order.epoch, resources=resources)
        self._tell(cmd.AgentReport(report=report))

    def _heard(self, event: ev.Event) -> None:
        match event:
            case ev.Granted():
                self._granted[event.lease] = (self._now_ns, len(event.parts))
                self._at(self._now_ns, self._claim, event.lease)
            case ev.Ending():
                since_ns, gpus = self._granted.pop(event.lease)
                self.result.leased_ns += gpus * (self._now_ns - since_ns)
                self._lost(event.lease, event.end.reason)
            case _:
                pass

    def _claim(self, lease: LeaseId) -> None:
        notebook = self._by_lease[lease]
        outcome = self._tell(cmd.Claim(tenant=notebook.tenant, lease=lease))
        waits = notebook.lease == lease and notebook.runs_since_ns is None and notebook.left_ns > 0
        if waits and isinstance(outcome.answer, Granted):
            self._work(notebook)

    def _lost(self, lease: LeaseId, reason: EndReason) -> None:
        """The lease is over. If a cell ran, it goes on later from what it saved."""
        notebook = self._by_lease.pop(lease)
        if notebook.lease != lease:
            return
        notebook.lease = None
        if reason not in (EndReason.RELEASED, EndReason.IDLE, EndReason.EXPIRED):
            self.result.preemptions[reason] = self.result.preemptions.get(reason, 0) + 1
        if notebook.runs_since_ns is not None:
            self._stop_clock(notebook)
            notebook.left_ns += round(RESUME_COST_MIN * _MIN)
            self._at(self._now_ns, self._ask_again, notebook, notebook.turn)

    def _ask_again(self, notebook: _Notebook, turn: int) -> None:
        if notebook.turn == turn:
            self._ask(notebook)

    # ---- time ----

    def _plan(self, minute: float, do: Callable[..., None], *arguments: Any) -> None:
        self._at(self._origin_ns + round(minute * _MIN), do, *arguments)

    def _after(self, minutes: float, do: Callable[..., None], *arguments: Any) -> None:
        self._at(self._now_ns + round(minutes * _MIN), do, *arguments)

    def _at(self, at_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_ns, self._count, do, arguments))

    def _arm(self) -> None:
        """Wake the ledger when it wants to be woken, for as long as anybody is there."""
        state = self._ledger.state
        wake_ns = self._ledger.next_wake_ns() if state.live_count or state.queued_count else None
        if wake_ns is not None and (self._tick_ns is None or wake_ns < self._tick_ns):
            self._tick_ns = max(wake_ns, self._now_ns)
            self._at(self._tick_ns, self._tick, self._tick_ns)

    def _tick(self, planned_ns: int) -> None:
        if planned_ns == self._tick_ns:
            self._tick_ns = None
            self._tell(cmd.Tick())


def _node(number: int, gpus: int) -> Inventory:
    name = f"n{number}"
    devices = tuple(
        Device(id=ResourceId(f"{name}/gpu{index}"), kind=Kind.GPU, capacity=80 * GIB, model="replay")
        for index in range(gpus)
    )
    return Inventory(node=NodeId(name), domain=name, devices=devices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the result; 2 if the trace cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m sublet.sim.replay", description="Replay notebooks as leases.")
    parser.add_argument("--trace", type=Path, help="a CSV of sessions and cells; generated where it is left out")
    parser.add_argument("--gpus", type=int, default=64, help=f"how many there are, on nodes of {GPUS_PER_NODE}")
    parser.add_argument("--seed", type=int, default=1, help="of the generated workload")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--check-every", type=int, default=1, help="walk the books after every N-th command")
    asked = parser.parse_args(arguments)
    try:
        if asked.trace is None:
            sessions = generate(asked.seed, sessions=asked.sessions, days=asked.days)
        else:
            sessions = read_trace(asked.trace)
    except SubletError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{Replay(sessions, gpus=asked.gpus, check_every=asked.check_every).run()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
