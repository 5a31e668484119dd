"""Replays a workload through the real ledger on a held clock.

Every cell that needs GPUs asks for them, works while it holds them, and keeps them idle until their time to live is
over, so that the next cell may find them warm. A cell that is taken saves, asks again, and goes on where it was, for
the price of saving and restoring. The loop is closed: a person who waits longer asks for the next cell later.

Holders renew as the client does, at 0.7 of the time to live; the ledger is woken when it asks for that, and at no other
moment.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from sublet.errors import InvalidRequest, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LIVE_STATES
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, Outcome, Refusal
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.placement import is_called
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import DeclaredRecord, NoticeRecord, Now, PricesRecord, Want
from sublet.office.ledger.reservation_times import instants, parse_rule, zone_of
from sublet.simulate.results import Result
from sublet.simulate.workload import Cell, WorkloadSession
from sublet.values import (
    GIB,
    MILLIS_PER_DEVICE,
    NS_PER_S,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ResourceId,
    TenantId,
    format_duration,
    shown,
)
from sublet.wire.orders import Device, End, Inventory, Parkable, TornDown

_MIN: Final = 60 * NS_PER_S
RENEW_AT: Final = 0.7
"""Of the time to live, when a holder that works renews."""
POLICY: Final = Policy(ended_keep_ns=60 * NS_PER_S)
_PRICES: Final = PricesRecord(currency="", gpu=0, models={}, cpu=0, memory=0, block=0, priority=1)
"""That priority is for sale is all that the order depends on."""
ROUNDED: Final = 1e-9
"""What a bound is lower for the rounding of minutes to nanoseconds, in parts of itself."""


MODEL: Final = "replay"
"""Of GPUs whose model is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGpus:
    """GPUs of one model."""

    gpus: int
    model: str = MODEL
    vram_gib: float = 80.0

    def take(self, cell: Cell) -> bool:
        """Whether the cell could run on these, if they were on one node."""
        fit = cell.gpus <= self.gpus and cell.vram_gib <= self.vram_gib
        return fit and (cell.model is None or is_called(cell.model, self.model))

    def __str__(self) -> str:
        return f"{self.gpus}x{self.model}-{self.vram_gib:g}GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayHardware:
    """GPUs on nodes of one size; the last node of each model has what is left."""

    gpus: int
    per_node: int = 8
    vram_gib: float = 80.0
    model: str = MODEL
    beside: tuple[ModelGpus, ...] = ()
    """GPUs of other models."""

    @property
    def models(self) -> tuple[ModelGpus, ...]:
        return ModelGpus(gpus=self.gpus, model=self.model, vram_gib=self.vram_gib), *self.beside

    @property
    def total(self) -> int:
        """GPUs of all models."""
        return sum(each.gpus for each in self.models)

    @property
    def vram_gib_max(self) -> float:
        return max(each.vram_gib for each in self.models)

    @property
    def nodes(self) -> list[ModelGpus]:
        """The GPUs of each node."""
        return [
            replace(each, gpus=min(self.per_node, each.gpus - first))
            for each in self.models
            for first in range(0, each.gpus, self.per_node)
        ]

    def has_room_for(self, cell: Cell) -> bool:
        """Whether one node could run the cell."""
        return cell.gpus <= self.per_node and any(each.take(cell) for each in self.models)


def fluid_bound_ns(sessions: Sequence[WorkloadSession], hardware: ReplayHardware) -> int:
    """Before which no policy is through with all cells, counted from minute 0.

    No cell comes before its time, since those before it can only make it later. So what comes after a moment has to be
    done after that moment, by all GPUs at most; and each cell takes its own time.
    """
    bound_min = work_min = 0.0
    for at_min, cell in sorted(_planned(sessions, hardware), key=lambda entry: entry[0], reverse=True):
        gpus = min(1.0, cell.vram_gib / hardware.vram_gib_max) if cell.shared else cell.gpus
        work_min += cell.duration_min * gpus
        bound_min = max(bound_min, at_min + max(cell.duration_min, work_min / hardware.total))
    return int(bound_min * _MIN * (1 - ROUNDED))


def _planned(sessions: Sequence[WorkloadSession], hardware: ReplayHardware) -> Iterator[tuple[float, Cell]]:
    """When each cell with GPUs would start if none waited, of those that fit."""
    for session in sessions:
        at_min = session.start_min
        for cell in session.cells:
            at_min += cell.pause_min
            if cell.gpus:
                if not hardware.has_room_for(cell):
                    continue
                yield at_min, cell
            at_min += cell.duration_min


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What it takes to clear a device and to go on elsewhere."""

    clear_ns: int = 2 * NS_PER_S
    """From the end of a lease until its device is verified to be free."""
    move_ns: int = 60 * NS_PER_S
    """Of work, what a cell that was taken loses: a save and a restore."""
    start_ns: int = 0
    """From a grant to the first line of its cell. A cell that finds its GPUs still held starts at once; what one needs
    to go on after it was taken is part of ``move_ns``."""
    source: str = "assumed"


def read_costs(path: Path) -> Costs:
    """From what ``python3 -m benchmarks notebook_taken`` measured on a machine, for a GiB of state."""
    try:
        figures = {figure["name"]: figure["ours"]["median"] for figure in json.loads(path.read_bytes())["figures"]}
        off_ms, on_ms = figures["from the notice to a free device"], figures["from the grant to the first line"]
        clear_ns, start_ns, move_ns = (round(ms * 1e6) for ms in (off_ms, on_ms, off_ms + on_ms))
        if not (0 < clear_ns <= move_ns and start_ns >= 0):
            raise ValueError("times that are not above zero")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror})", do="Give the path of a file.") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InvalidRequest(
            f"{path} is no result of the benchmark notebook_taken",
            do="Make one with `python3 -m benchmarks notebook_taken`, or leave the option out.",
        ) from error
    return Costs(clear_ns=clear_ns, move_ns=move_ns, start_ns=start_ns, source=f"measured, {path.name}")


def assumptions(hardware: ReplayHardware, costs: Costs, rules: Rules, *, shared: bool) -> list[str]:
    """What is not the ledger's own, one line each."""
    gpus = f"{hardware.gpus} GPUs of {hardware.vram_gib:g} GiB, all alike, on nodes of {hardware.per_node}"
    if hardware.beside:
        gpus = f"{', '.join(map(str, hardware.models))}: each model on nodes of its own, of at most {hardware.per_node}"
        gpus += "; a cell takes as long on one model as on another"
    found = [
        gpus,
        f"a device is clear {costs.clear_ns / NS_PER_S:.3g} s after its lease ({costs.source})",
        f"a cell begins {costs.start_ns / NS_PER_S:.3g} s after its grant, however many begin at once ({costs.source})",
        f"a cell that is taken loses {costs.move_ns / NS_PER_S:.3g} s to saving and restoring ({costs.source})",
        "an idle holder has nothing left to save, and says so at once",
        f"a holder keeps its GPUs, idle, for the rest of {format_duration(rules.policy.ttl_gpu_ns)} after a cell",
        "who waits longer asks for the next cell later (closed loop)",
        f"within a notice: {_notice_ns(rules.policy) / NS_PER_S:.0f} s, notice and the most that clearing may take",
    ]
    if shared:
        found.append("tenants share devices, each with the memory that its cell has in use; sharing slows no cell down")
    if rules.declared.reservations:
        found.append(f"minute 0 is {_moment(rules.week_min)} in the time zone of the reservations, in January")
    if rules.declared.budgets:
        found.append("budgets of the policy are left out")
    return found


def _moment(week_min: float) -> str:
    """Of a week that begins on Monday."""
    day, minute = divmod(round(week_min), 24 * 60)
    return f"{('Mon', 'Tue', 'Wed', 'Thu', 'Fri', 'Sat', 'Sun')[day % 7]} {minute // 60:02d}:{minute % 60:02d}"


def _notice_ns(policy: Policy) -> int:
    return policy.notice_ns + policy.suspend_ns


class Rules(NamedTuple):
    """By what a replay decides."""

    policy: Policy = POLICY
    declared: DeclaredRecord = DeclaredRecord()
    """Groups, their members, and reservations. Budgets are left out."""
    monday: date = date(2026, 1, 5)
    """Whose midnight in the time zone of the reservations is minute 0, but for ``week_min``."""
    week_min: float = 0.0
    """Where in the week the workload begins."""
    prices: PricesRecord | None = None
    """Which devices are the cheapest, where the policy goes by that."""

    @property
    def least(self) -> int:
        """Fewer GPUs contradict the floors and reservations."""
        floors = sum(fields.get("floor", 0) for fields in self.declared.groups.values())
        return max([1, floors, *(each.gpus for each in self.declared.reservations.values())])

    def begins_at_ns(self) -> int:
        """Of the wall clock."""
        zones = [each.zone for each in self.declared.reservations.values()]
        midnight = datetime.combine(self.monday, datetime.min.time(), tzinfo=zone_of(zones[0] if zones else "UTC"))
        return int(midnight.timestamp()) * NS_PER_S + round(self.week_min * _MIN)

    def check_models(self, hardware: ReplayHardware) -> None:
        """See that the GPUs have the models that are reserved; raises ``InvalidRequest``."""
        for name, each in self.declared.reservations.items():
            if each.model is not None and not any(is_called(each.model, gpus.model) for gpus in hardware.models):
                vram = f"-{hardware.vram_gib:g}GiB"
                raise InvalidRequest(
                    f"reservation {name} is for GPUs called {shown(each.model)}, and --gpus names none",
                    do=f"Name the models of GPUs: --gpus {hardware.gpus}x{each.model.partition('|')[0].strip()}{vram}.",
                )

    def apply(self, now: Now) -> cmd.ApplyPolicy:
        """Groups and reservations. Members are put into theirs as tenants are added, under the names of the replay."""
        reservations = self.declared.reservations
        spans = {
            name: instants(parse_rule(each.when), zone_of(each.zone), now.wall_ns)
            for name, each in reservations.items()
        }
        declared = DeclaredRecord(groups=self.declared.groups, reservations=reservations)
        return cmd.ApplyPolicy(changed={}, declared=declared, spans=spans)


@dataclass(slots=True)
class _Notebook:
    session: WorkloadSession
    tenant: TenantId
    next_cell: int = 0
    lease: LeaseId | None = None
    held: Cell | None = None
    """For which cell the lease was asked for."""
    millis: int = 0
    """How much of devices the lease is."""
    devices: tuple[Device, ...] = ()
    """On which it is."""
    waits: bool = False
    left_ns: int = 0
    """Of the cell that runs or waits; 0 if none does."""
    requested_ns: int = 0
    runs_since_ns: int | None = None
    first_start: bool = True
    turn: int = 0
    """Rises with every change, so that what was planned before is void."""

    @property
    def cell(self) -> Cell:
        return self.session.cells[self.next_cell]


class Replay:
    """One workload on so many GPUs."""

    def __init__(
        self,
        sessions: Sequence[WorkloadSession],
        hardware: ReplayHardware,
        *,
        rules: Rules | None = None,
        costs: Costs | None = None,
        name: str = "leases",
        check_every: int = 0,
        late: tuple[int, int] | None = None,
    ) -> None:
        """``check_every`` says after how many commands with consequences the books are walked; 0: never. ``late``, a
        wait and a number: the run stops once more cells than that have waited longer."""
        rules = Rules() if rules is None else rules
        policy = rules.policy
        if any(cell.shared for session in sessions for cell in session.cells):
            policy = msgspec.structs.replace(policy, share_across_tenants=True)
        self.result = Result(
            shared=policy.share_across_tenants,
            name=name,
            gpus=hardware.total,
            sessions=len(sessions),
            notice_ns=_notice_ns(policy),
            fluid_ns=fluid_bound_ns(sessions, hardware),
        )
        self._hardware, self._costs = hardware, costs or Costs()
        self._now_ns = 1_000 * NS_PER_S
        self._origin_ns = self.result.start_ns = self._now_ns
        self._ttl_ns, self._renew_ns = policy.ttl_gpu_ns, round(RENEW_AT * policy.ttl_gpu_ns)
        self._wall_ns = rules.begins_at_ns() - self._origin_ns
        self._has_reservations = bool(rules.declared.reservations)
        self._ledger = Ledger(policy)
        self._check_every = check_every
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._requests = 0
        self._granted: dict[LeaseId, tuple[int, int]] = {}
        self._by_lease: dict[LeaseId, _Notebook] = {}
        self._tick_ns: int | None = None
        self._late_ns, self._late_left = late or (0, 1 << 60)
        self._left = sum(len(session.cells) for session in sessions)
        self._total = self._left
        self._handle(cmd.OpenOffice(incarnation=1, clock_domain="replay"))
        self._devices: dict[ResourceId, Device] = {}
        for number, gpus in enumerate(hardware.nodes):
            inventory = _node(number, gpus)
            self._devices |= {device.id: device for device in inventory.devices}
            self._handle(cmd.NodeUp(inventory=inventory))
        rules.check_models(hardware)
        refused = self._handle(rules.apply(self._now())).answer
        if isinstance(refused, SubletError):
            raise refused
        prices = rules.prices or (_PRICES if any(session.pays_priority for session in sessions) else None)
        if prices is not None:
            self._handle(cmd.SetPrices(prices=prices))
        tenants: set[TenantId] = set()
        for session in sessions:
            tenant = TenantId(f"t-{session.owner}")
            if tenant not in tenants:
                tenants.add(tenant)
                group = session.group or rules.declared.members.get(TenantId(session.owner)) or None
                self._handle(
                    cmd.AddTenant(tenant=tenant, token_hash=tenant, group=None if group is None else GroupId(group))
                )
            self._plan(session.start_min, self._next_cell, _Notebook(session, tenant))
            self.result.reserved_ns += round(session.gpus * (session.stop_min - session.start_min) * _MIN)
        last_min = max((session.stop_min for session in sessions), default=0.0)
        self.result.planned_ns = round(last_min * _MIN)

    def run(self, progress: Callable[[float], None] | None = None) -> Result:
        """To the end of the last session. ``progress`` is told the share of the cells that is done."""
        began, turns = time.monotonic(), 0
        while self._queue:
            at_ns, _, do, arguments = heapq.heappop(self._queue)
            self._now_ns = max(self._now_ns, at_ns)
            commands = self.result.commands
            do(*arguments)
            if self.result.commands != commands or self._tick_ns is None:
                self._arm()
            turns += 1
            if self._late_left < 0:
                self.result.stopped = True
                break
            if progress is not None and turns % 1024 == 0:
                progress(1 - self._left / max(1, self._total))
        self.result.wall_s = time.monotonic() - began
        self.result.end_ns = self._now_ns
        return self.result

    # ---- a notebook's life ----

    def _next_cell(self, notebook: _Notebook) -> None:
        if notebook.next_cell < len(notebook.session.cells):
            self._after(notebook.cell.pause_min, self._start, notebook)

    def _start(self, notebook: _Notebook) -> None:
        cell = notebook.cell
        if cell.gpus == 0:
            self._left -= 1
            notebook.next_cell += 1
            self._after(cell.duration_min, self._next_cell, notebook)
            return
        if not self._hardware.has_room_for(cell):
            self.result.impossible += 1
            self._leave_out(notebook)
            return
        notebook.left_ns = max(1, round(cell.duration_min * _MIN))
        notebook.requested_ns, notebook.first_start = self._now_ns, True
        if notebook.lease is not None and _holds(notebook, cell) and self._renew(notebook, active=True):
            self.result.warm += 1
            self._work(notebook, warm=True)
        else:
            self._give_back(notebook)
            self._ask(notebook)

    def _leave_out(self, notebook: _Notebook) -> None:
        self._left -= 1
        notebook.next_cell += 1
        self._next_cell(notebook)

    def _ask(self, notebook: _Notebook) -> None:
        self._requests += 1
        lease = LeaseId(f"l{self._requests}")
        notebook.lease, notebook.held = lease, notebook.cell
        self._by_lease[lease] = notebook
        cell = notebook.cell
        want = Want(
            kind=Kind.GPU,
            amount=max(1, round(cell.vram_gib * GIB)),
            count=cell.gpus,
            exclusivity=Exclusivity.SHARED if cell.shared else None,
            model=cell.model,
        )
        self._wait(notebook, +1)
        outcome = self._handle(
            cmd.Acquire(
                tenant=notebook.tenant,
                lease=lease,
                request_id=RequestId(lease),
                wants=(want,),
                ttl_ns=self._ttl_ns,
                tier=notebook.session.tier,
                pays_priority=notebook.session.pays_priority,
            )
        )
        if isinstance(outcome.answer, SubletError | Refusal):  # beyond a quota, for good
            del self._by_lease[lease]
            notebook.lease = None
            self._wait(notebook, -1)
            self.result.refused += notebook.first_start
            self._leave_out(notebook)
        elif isinstance(outcome.answer, Granted) and outcome.answer.lease.status in LIVE_STATES:
            self._work(notebook)

    def _work(self, notebook: _Notebook, *, warm: bool = False) -> None:
        """It has its GPUs: run to the end, and renew on the way."""
        self._wait(notebook, -1)
        if notebook.first_start:
            start_ns = 0 if warm else self._costs.start_ns
            notebook.first_start = False
            wait_ns = self._now_ns + start_ns - notebook.requested_ns
            self.result.cells += 1
            self.result.note_wait(wait_ns, pays_priority=notebook.session.pays_priority)
            self._late_left -= wait_ns > self._late_ns
            notebook.left_ns += start_ns
        notebook.runs_since_ns = self._now_ns
        notebook.turn += 1
        self._at(self._now_ns + notebook.left_ns, self._done, notebook, notebook.turn)
        self._at(self._now_ns + self._renew_ns, self._keep, notebook, notebook.turn)

    def _keep(self, notebook: _Notebook, turn: int) -> None:
        if notebook.turn == turn and self._renew(notebook, active=True):
            self._at(self._now_ns + self._renew_ns, self._keep, notebook, turn)

    def _done(self, notebook: _Notebook, turn: int) -> None:
        """The cell is through; its lease stays, idle, for as long as it has time."""
        if notebook.turn != turn:
            return
        busy_ns = self._stop_clock(notebook)
        run_ns = max(1, round(notebook.cell.duration_min * _MIN))
        self.result.done.append((notebook.session.owner, run_ns, max(run_ns, self._now_ns - notebook.requested_ns)))
        self.result.finished_ns = self._now_ns - self._origin_ns
        self._left -= 1
        notebook.left_ns = 0
        notebook.next_cell += 1
        self._renew(notebook, active=False, busy_ns=busy_ns)
        self._next_cell(notebook)

    def _renew(self, notebook: _Notebook, *, active: bool, busy_ns: int = 0) -> bool:
        """True if the lease is there with all its time. A cell that ends says only that it is idle."""
        lease = self._ledger.state.leases.get(notebook.lease) if notebook.lease is not None else None
        if lease is None or lease.status not in LIVE_STATES or lease.epoch is None:
            return False
        tenant, epoch = notebook.tenant, lease.epoch
        if active:
            return isinstance(self._handle(cmd.Renew(tenant=tenant, lease=lease.id, epoch=epoch)).answer, Granted)
        self._handle(cmd.NoteActivity(tenant=tenant, lease=lease.id, epoch=epoch, active=False, busy_ns=busy_ns))
        return True

    def _give_back(self, notebook: _Notebook) -> None:
        if notebook.lease is not None:
            lease, notebook.lease = notebook.lease, None
            if lease in self._ledger.state.leases:
                self._handle(cmd.Release(tenant=notebook.tenant, lease=lease))

    def _wait(self, notebook: _Notebook, by: int) -> None:
        if notebook.waits != (by > 0):
            notebook.waits = by > 0
            self.result.note_queue(self._now_ns, by)

    def _stop_clock(self, notebook: _Notebook) -> int:
        """Nothing of it runs from now on. Returns for how long it ran."""
        ran_ns = 0
        if notebook.runs_since_ns is not None:
            ran_ns = self._now_ns - notebook.runs_since_ns
            notebook.left_ns = max(0, notebook.left_ns - ran_ns)
            used = notebook.millis if notebook.cell.shared else notebook.cell.gpus * MILLIS_PER_DEVICE
            self.result.used_ns += ran_ns * used // MILLIS_PER_DEVICE
            notebook.runs_since_ns = None
        notebook.turn += 1
        return ran_ns

    # ---- what the ledger says ----

    def _now(self) -> Now:
        return Now(self._now_ns, self._now_ns + self._wall_ns)

    def _handle(self, command: cmd.Command) -> Outcome:
        outcome = self._ledger.handle(command, self._now())
        self.result.commands += 1
        if self._check_every and outcome.events and self.result.commands % self._check_every == 0:
            check_books(self._ledger.state)
        for order in outcome.orders:
            if isinstance(order, End):
                torn = tuple(part.resource for part in order.parts)
                self._at(self._now_ns + self._costs.clear_ns, self._torn_down, order, torn)
        for event in outcome.events:
            self._on_event(event)
        return outcome

    def _torn_down(self, order: End, resources: tuple[ResourceId, ...]) -> None:
        node = NodeId(str(resources[0]).partition("/")[0])
        report = TornDown(node=node, lease=order.lease, epoch=order.epoch, resources=resources)
        self._handle(cmd.AgentReport(report=report))

    def _on_event(self, event: ev.Event) -> None:
        match event:
            case ev.Granted():
                millis = sum(part.millis for part in event.parts)
                self._granted[event.lease] = (self._now_ns, millis)
                notebook = self._by_lease[event.lease]
                notebook.millis, notebook.devices = millis, tuple(self._devices[part.resource] for part in event.parts)
                self._at(self._now_ns, self._claim, event.lease)
            case ev.Ending():
                since_ns, millis = self._granted.pop(event.lease)
                held_ns = millis * (self._now_ns - since_ns) // MILLIS_PER_DEVICE
                self.result.note_held(held_ns, self._by_lease[event.lease].devices[0].model)
                if self._by_lease[event.lease].session.pays_priority:
                    self.result.paying_ns += held_ns
                self._lost(event.lease, event.end.reason)
            case ev.Noticed(notice=NoticeRecord(when_safe=True)):
                self._at(self._now_ns, self._is_safe, event.lease)
            case _:
                pass

    def _is_safe(self, lease: LeaseId) -> None:
        """Its agent finds nothing under the idle lease that would be lost."""
        found = self._ledger.state.leases.get(lease)
        if found is not None and found.epoch is not None and found.node is not None:
            report = Parkable(
                node=found.node, lease=lease, epoch=found.epoch, amount=0, why="not in this replay", safe=True
            )
            self._handle(cmd.AgentReport(report=report))

    def _claim(self, lease: LeaseId) -> None:
        notebook = self._by_lease[lease]
        outcome = self._handle(cmd.Claim(tenant=notebook.tenant, lease=lease))
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
            word = reason.value if notebook.runs_since_ns is not None else "idle"
            self.result.preemptions[word] = self.result.preemptions.get(word, 0) + 1
        if notebook.runs_since_ns is not None:
            self._stop_clock(notebook)
            notebook.left_ns += self._costs.move_ns
            self.result.moving_ns += self._costs.move_ns * notebook.millis // MILLIS_PER_DEVICE
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
        """Wake the ledger when it wants to be woken, while any session is left."""
        state = self._ledger.state
        now = self._now() if self._has_reservations else None
        wake_ns = self._ledger.next_wake_ns(now) if state.live_count or state.queued_count else None
        if wake_ns is not None and (self._tick_ns is None or wake_ns < self._tick_ns):
            self._tick_ns = max(wake_ns, self._now_ns)
            self._at(self._tick_ns, self._tick, self._tick_ns)

    def _tick(self, planned_ns: int) -> None:
        """Unless a command that came meanwhile has left the ledger nothing to do."""
        if planned_ns == self._tick_ns:
            self._tick_ns = None
            wake_ns = self._ledger.next_wake_ns(self._now())
            if wake_ns is not None and wake_ns <= self._now_ns:
                self._handle(cmd.Tick())


def _holds(notebook: _Notebook, cell: Cell) -> bool:
    """Whether its lease is enough for the cell."""
    held = notebook.held
    if held is None or held.shared != cell.shared or held.gpus < cell.gpus:
        return False
    if cell.model is not None and not all(is_called(cell.model, device.model) for device in notebook.devices):
        return False
    available_gib = held.vram_gib if cell.shared else min(device.capacity for device in notebook.devices) / GIB
    return available_gib >= cell.vram_gib


def _node(number: int, gpus: ModelGpus) -> Inventory:
    name = f"n{number}"
    devices = tuple(
        Device(
            id=ResourceId(f"{name}/gpu{index}"), kind=Kind.GPU, capacity=round(gpus.vram_gib * GIB), model=gpus.model
        )
        for index in range(gpus.gpus)
    )
    return Inventory(node=NodeId(name), domain=name, devices=devices)
