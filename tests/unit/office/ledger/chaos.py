"""A ledger among holders who do as they please, an agent whose words get lost, doubled and mixed up, and restarts.

What must hold all the while is in ``watch``.
"""

from __future__ import annotations

import random
from dataclasses import replace

from sublet.errors import (
    IdempotencyConflict,
    NotFound,
    QuotaExceeded,
    SubletError,
)
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState, VolumeState
from sublet.lease_end import EndReason
from sublet.office.journal.history import AuditHistory, _AuditedEvent
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, Outcome, Refusal
from sublet.office.ledger.bills import Rates, Usage, fold
from sublet.office.ledger.budgets import prices_record, standing_now
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import (
    DeclaredRecord,
    GroupRecord,
    LeaseRecord,
    ProcessRecord,
    Quota,
    ReservationRecord,
    ResourceRecord,
    Span,
    Want,
)
from sublet.office.ledger.spending import window_of
from sublet.office.ledger.state import State
from sublet.values import (
    GIB,
    BudgetId,
    BudgetWindow,
    Epoch,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    RequestId,
    ReservationId,
    ResourceId,
    Suspend,
    TenantId,
    Tier,
)
from sublet.wire.orders import (
    End,
    EndedHere,
    Failed,
    Fault,
    Foreign,
    Inventory,
    Metered,
    NotHeld,
    Order,
    Parkable,
    Report,
    Saved,
    StoredVolume,
    TornDown,
    VolumeRef,
    VolumeRemoved,
    Volumes,
)
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, answers_to, device, inventory, seconds
from tests.unit.office.ledger.disk import Disk
from tests.unit.office.ledger.watch import Watch, by_itself

__all__ = ["Chaos"]

TENANTS = (LOCAL, ANN, BEN)
BILLED = _AuditedEvent
"""The facts of which bills are made."""
GROUPS = (GroupId("default"), GroupId("course"), GroupId("lab"))
PASSING = TenantId("passing")
"""It never has anything, so it can be removed."""


class Chaos:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rights = random.Random(seed + 1)
        self.policy = Policy(
            ttl_min_ns=seconds(1),
            notice_ns=seconds(10),
            notice_spot_ns=seconds(3),
            min_run_batch_ns=seconds(rng.choice((5, 30))),
            max_hold_ns=seconds(rng.choice((20, 60))),
            turn_least_ns=seconds(4),
            pause_ns=seconds(9),
            cool_down_ns=seconds(rng.choice((1, 15))),
            reserved_clear_ns=seconds(5),
            reserved_keep_ns=seconds(15),
            gang_patience_ns=seconds(rng.choice((30, 100_000))),
            priority_after_ns=seconds(25),
            usage_window_ns=seconds(120),
            ended_keep_ns=seconds(300),
            share_across_tenants=rng.random() < 0.2,
        )
        self.nodes = [_node(rng, index) for index in range(rng.choice((1, 2, 2, 3)))]
        self.bench = Bench(*self.nodes, policy=self.policy)
        self.bench.obedient = False
        self.watch = Watch(self.policy)
        self.paying = random.Random(f"paying/{seed}")
        """Drawn apart as well; priority is for sale in a tenth of the lives."""
        self.priority = 700_000 if seed % 10 == 0 else None
        if self.priority is not None:
            self.bench.do(cmd.SetPrices(prices=prices_record(Rates(priority=self.priority))))
        self.air: list[Report] = []
        """Reports on their way."""
        self.asked: list[cmd.Acquire] = []
        self.disk = Disk()
        self.incarnation = 1
        self.boots = 1
        self.programs = random.Random(f"programs/{seed}")
        """Which process asks: drawn apart, so that the stories of older seeds stay as they were."""
        self.times = random.Random(f"times/{seed}")
        self.money = random.Random(f"money/{seed}")
        self.files = random.Random(f"files/{seed}")
        self.past = AuditHistory()
        self.before: dict[BudgetId, dict[tuple[LeaseId, str], tuple[int, int]]] = {}
        """How many holdings of each lease were over when the budget was made, and how many had begun."""
        self.told = 0
        """Steps of the bench's history that are in the past."""
        self.pids = 100
        self.dead: list[ProcessRecord] = []
        self.processes: list[ProcessRecord] = [self._new_process() for _ in range(4)]

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.bench.now_ns += seconds(self.rng.choice((0, 0, 0.5, 1, 1, 3, 10)))
            self._agent()
            self._say_again()
            deed = self.rng.choices(DEEDS, WEIGHTS)[0]
            deed(self, number)
            if self.money.random() < 0.04:
                self._budgets()
            if self.files.random() < 0.02:
                self._file()
            if self.rng.random() < 0.5:
                self.do(cmd.Tick())
                wake_ns = self.bench.ledger.next_wake_ns()
                assert wake_ns is None or wake_ns > self.bench.now_ns, "a tick left something that is due"
            for tenant in TENANTS:
                expected = self.watch.used_milli_ns(tenant, self.bench.now_ns)
                metered = self.bench.state.used_milli_ns(tenant, self.bench.now_ns)
                assert metered == expected, f"S9: {tenant} used {expected}, the meter says {metered}"
            if number % 8 == 0:
                self.compare_with_bill()
        self.rest()
        assert self.bench.state.snapshot() == self.bench.folded().snapshot(), "S10: the fold is another state"

    def do(self, command: cmd.Command) -> Outcome:
        outcome = self.bench.do(command)
        self.watch.see(command, outcome, self.bench)
        return outcome

    def rest(self) -> None:
        """Everything is mended, everybody goes home: nothing may be left."""
        bench, state = self.bench, self.bench.state
        bench.now_ns += seconds(1)
        for found in self.nodes:
            self.do(cmd.NodeUp(inventory=found))
            self.do(cmd.Drain(node=found.node, draining=False))
        self.do(cmd.ApplyPolicy(changed={}, declared=DeclaredRecord()))
        for tenant in TENANTS:
            self.do(cmd.SetTenant(tenant=tenant, quota=Quota()))
        for group in GROUPS:
            self.do(cmd.SetGroup(group=GroupRecord(id=group)))
        for reservation in list(state.books.reservations):
            self.do(cmd.RemoveReservation(reservation=reservation))
        self.compare_with_bill()
        for budget in list(state.books.budgets.values()):
            self.do(cmd.RemoveBudget(tenant=budget.tenant, group=budget.group, per=budget.per))
        assert not state.books.held, "nothing is counted without a budget"
        self.air = [report for report in self.air if not isinstance(report, Foreign)]
        self.air += [Foreign(node=resource.node, resource=resource.id) for resource in state.resources.values()]
        for _ in range(3):
            self._agent(well=True)
            bench.now_ns += seconds(0.1)
        bench.now_ns += seconds(2)
        again = [order for order in bench.ledger.orders_due(bench.now) if not isinstance(order, End)]
        assert not again, f"confirmed, and yet sent again: {again}"
        for _ in range(400):
            self._agent(well=True)
            for resource in list(state.resources.values()):
                if resource.detail or any(piece.state == "quarantined" for piece in resource.slices.values()):
                    self.do(cmd.ClearFence(resource=resource.id, vouch=True))
            for volume in list(state.volumes.values()):
                self.do(cmd.RemoveVolume(tenant=volume.tenant, name=volume.name))
            for lease in list(state.leases.values()):
                if lease.status is LeaseStatus.GRANTED:
                    self.do(cmd.Claim(tenant=lease.tenant, lease=lease.id))
                elif lease.status in LIVE_STATES:
                    self.do(cmd.Release(tenant=lease.tenant, lease=lease.id))
            bench.now_ns += seconds(1)
            self.do(cmd.Tick())
            bench.unsent += bench.ledger.orders_due(bench.now)
            gone = all(lease.status is LeaseStatus.ENDED for lease in state.leases.values())
            if gone and not bench.unsent and not state.volumes:
                break
        left = [
            f"{lease.id} {lease.status}" for lease in state.leases.values() if lease.status is not LeaseStatus.ENDED
        ]
        assert not left, f"S3: {left} after everybody went home"
        assert not state.volumes, f"{list(state.volumes)} are left after all were given up"
        for resource in state.resources.values():
            assert not resource.slices, f"L14: {resource.slices} is left of {resource.id}"
            assert resource.state == "free", f"L14: {resource.id} is {resource.state}"
        bench.now_ns += seconds(10)
        self.do(cmd.Tick())
        assert not bench.ledger.orders_due(bench.now), "an order is sent for ever"
        assert bench.ledger.next_resend_ns() is None

    # ---- deeds ----

    def acquire(self, number: int) -> None:
        rng = self.rng
        wait_s = rng.choice((None, None, 0, 10, 60))
        command = cmd.Acquire(
            tenant=rng.choice(TENANTS),
            lease=LeaseId(f"L{number}"),
            request_id=RequestId(f"r{number}"),
            wants=_wants(rng),
            ttl_ns=seconds(rng.choice((2, 10, 30, 60))),
            tier=rng.choice(tuple(Tier)),
            wait_ns=None if wait_s is None else seconds(wait_s),
            selector={"zone": "z0"} if rng.random() < 0.1 else {},
            process=self._process(),
            pays_priority=self.priority is not None and self.paying.random() < 0.2,
        )
        self.asked.append(command)
        self.do(command)

    def replace(self, number: int) -> None:
        """Another lease in the place of one: whatever comes of it at once, the present one ends only if it is had."""
        rng = self.rng
        old = self._some(LeaseStatus.ACTIVE)
        if old is None:
            return
        before = rng.choice((None, 0, 0, 30))
        command = cmd.Acquire(
            tenant=old.tenant,
            lease=LeaseId(f"R{number}"),
            request_id=RequestId(f"r{number}"),
            wants=_wants(rng),
            ttl_ns=seconds(rng.choice((2, 10, 30, 60))),
            tier=rng.choice(tuple(Tier)),
            wait_ns=None if before is None else seconds(before),
            replaces=old.id,
            process=self._process(),
        )
        answer = self.do(command).answer
        if isinstance(answer, Refusal):  # at that moment it may have got notice, for another request
            assert old.status in LIVE_STATES, "a refusal took the present lease"

    def keep(self, number: int) -> None:
        """Disk under a name: made, taken, asked for in another size, or with none."""
        rng = self.rng
        command = cmd.Acquire(
            tenant=rng.choice(TENANTS),
            lease=LeaseId(f"V{number}"),
            request_id=RequestId(f"r{number}"),
            wants=(Want(kind=Kind.BLOCK, amount=rng.choice((0, 0, 1, 1, 2)) * GIB, least=None),),
            ttl_ns=seconds(rng.choice((2, 10, 30))),
            wait_ns=rng.choice((None, 0, seconds(20))),
            name=rng.choice("ab"),
            retain_ns=rng.choice((None, None, 0, seconds(30))),
            process=self._process(),
        )
        known = self.bench.state.volumes.get(f"{command.tenant}/{command.name}")
        has, was = (known.state, known.size) if known is not None else (None, 0)
        answer = self.do(command).answer
        if isinstance(answer, Granted) and has is VolumeState.RETAINED:
            assert answer.lease.parts[0].amount == was, "a volume changed its size"
            self.watch.met["taken again"] += 1
        if has in (None, VolumeState.LOST) and not command.wants[0].amount:
            assert isinstance(answer, NotFound), f"a volume out of nothing: {answer}"

    def give_up(self, number: int) -> None:
        found = list(self.bench.state.volumes.values())
        if found:
            volume = self.rng.choice(found)
            was = volume.state
            answer = self.do(cmd.RemoveVolume(tenant=volume.tenant, name=volume.name)).answer
            assert isinstance(answer, SubletError) == (was is VolumeState.LIVE), f"{volume} was given up: {answer}"

    def name_disk(self, number: int) -> None:
        """An agent names what it keeps; rarely somebody has taken something away by hand, or put it there."""
        rng, disk = self.rng, self.disk
        if disk.stored and rng.random() < 0.4:
            del disk.stored[rng.choice(list(disk.stored))]
        node = rng.choice(self.nodes)
        if rng.random() < 0.1:
            ref = VolumeRef(tenant=rng.choice(TENANTS), name="found")
            block = ResourceId(f"{node.node}-block")
            disk.stored[node.node, ref] = StoredVolume(
                volume=ref, resource=block, size=GIB, lease=LeaseId("old"), epoch=Epoch(0, 1)
            )
        self.air.append(disk.listing(node.node, lambda _: True))

    def resume(self, number: int) -> None:
        """Go on with what is parked, or with what is not; by the epoch that is live, or by an old one."""
        rng = self.rng
        found = [lease for lease in self.bench.state.leases.values() if lease.parks is not None]
        lease = rng.choice(found) if found and rng.random() < 0.9 else self._some(*LeaseStatus)
        if lease is None:
            return
        old = lease.epoch is not None and rng.random() < 0.1
        epoch = Epoch(0, 1) if old else lease.epoch
        command = cmd.Acquire(
            tenant=lease.tenant,
            lease=LeaseId(f"R{number}"),
            request_id=RequestId(f"r{number}"),
            wants=(),
            ttl_ns=seconds(rng.choice((10, 30))),
            wait_ns=rng.choice((None, 0, seconds(30))),
            resume=lease.id,
            resume_epoch=epoch,
            process=self._process(),
        )
        was, at = lease.status, lease.epoch
        answer = self.do(command).answer
        if was in (LeaseStatus.ENDING, LeaseStatus.ENDED) or lease.parks is None or (old and at is not None):
            assert isinstance(answer, SubletError), f"resumed from {was}, {lease.parks}: {answer}"

    def acquire_again(self, number: int) -> None:
        """L15: one effect; and another content under the same id is noticed."""
        if not self.asked:
            return
        command = self.rng.choice(self.asked)
        known = (command.tenant, command.request_id) in self.bench.state.requests
        new = LeaseId(f"X{number}")
        outcome = self.do(_with(command, lease=new))
        if known:
            assert new not in self.bench.state.leases, "L15: a retry made a second lease"
            other = _with(command, lease=new, ttl_ns=command.ttl_ns + 1)
            assert isinstance(self.do(other).answer, IdempotencyConflict)
        elif new in self.bench.state.leases:
            assert not isinstance(outcome.answer, SubletError)

    def claim(self, number: int) -> None:
        if lease := self._some(LeaseStatus.GRANTED, LeaseStatus.ACTIVE):
            process = lease.process if self.programs.random() < 0.7 else self._process()
            self.do(cmd.Claim(tenant=lease.tenant, lease=lease.id, epoch=lease.epoch, process=process))

    def decline(self, number: int) -> None:
        if lease := self._some(LeaseStatus.GRANTED):
            self.do(cmd.Decline(tenant=lease.tenant, lease=lease.id))

    def renew(self, number: int) -> None:
        lease = self._some(LeaseStatus.ACTIVE, LeaseStatus.NOTICED, LeaseStatus.ENDING, LeaseStatus.ENDED)
        if lease is None or lease.epoch is None:
            return
        epoch = lease.epoch if self.rng.random() < 0.9 else Epoch(lease.epoch.incarnation, max(0, lease.epoch.n - 1))
        was_live, before = lease.status in LIVE_STATES, lease.deadline_ns
        busy_ns = self.rng.choice((0, seconds(1), seconds(10**6)))
        active = self.rng.random() < 0.8
        command = cmd.Renew(tenant=lease.tenant, lease=lease.id, epoch=epoch, active=active, busy_ns=busy_ns)
        answer = self.do(command).answer
        if not was_live or epoch != lease.epoch:
            assert isinstance(answer, SubletError), "L8: a renewal of what is over"
            assert lease.deadline_ns == before
        if isinstance(answer, QuotaExceeded):
            assert lease.fate is EndReason.QUOTA

    def note(self, number: int) -> None:
        lease = self._some(LeaseStatus.ACTIVE, LeaseStatus.NOTICED)
        if lease is not None and lease.epoch is not None:
            active = self.rng.random() < 0.4
            self.do(cmd.NoteActivity(tenant=lease.tenant, lease=lease.id, epoch=lease.epoch, active=active))

    def attach(self, number: int) -> None:
        if lease := self._some(LeaseStatus.ACTIVE, LeaseStatus.NOTICED):
            request = RequestId(f"a{self.rng.randrange(number + 1)}")
            process = self._process()
            self.do(cmd.Attach(tenant=lease.tenant, lease=lease.id, request_id=request, process=process))

    def _process(self) -> ProcessRecord | None:
        """Of somebody who asks."""
        return self.programs.choice((None, *self.processes))

    def _new_process(self) -> ProcessRecord:
        self.pids += 1
        return ProcessRecord(pid=self.pids, start_ticks=self.pids, boot_id="b", namespaces="n")

    def die(self, number: int) -> None:
        """A holder's process ends: what is bound to it goes, and nothing else does."""
        state, dead = self.bench.state, self.programs.choice(self.processes)
        bound = tuple(lease.id for lease in state.leases.values() if lease.process == dead)
        others = [lease.id for lease in state.leases.values() if lease.process != dead and lease.end is None]
        self.do(cmd.HolderGone(process=dead, leases=bound + tuple(others[:3])))
        ending = any(lease.process == dead and lease.status is LeaseStatus.ENDING for lease in state.leases.values())
        for lease in state.leases.values():
            if lease.process == dead and lease.status not in (LeaseStatus.ENDING, LeaseStatus.ENDED):
                storage = all(part.kind is Kind.BLOCK for part in lease.parts)
                assert ending, f"{lease.id} outlives its process"
                assert storage, f"{lease.id} outlives its process"
        self.dead.append(dead)
        for lease_id in others:
            end = state.leases[lease_id].end if lease_id in state.leases else None
            assert end is None or end.reason is not EndReason.HOLDER_GONE, f"{lease_id} ended, and its holder lives"
        self.processes[self.processes.index(dead)] = self._new_process()

    def _say_again(self) -> None:
        """Storage waits for what may save to it; the watch says again that the process has ended."""
        for dead in self.dead:
            bound = [lease for lease in self.bench.state.leases.values() if lease.process == dead]
            if any(lease.status in LIVE_STATES for lease in bound):
                self.do(cmd.HolderGone(process=dead, leases=tuple(lease.id for lease in bound)))
                if not any(lease.status is LeaseStatus.ENDING for lease in bound):
                    assert not [lease for lease in bound if lease.status in LIVE_STATES]

    def lose_sight(self, number: int) -> None:
        """The office restarts where it cannot see a process; the holder of another lease lets it outlive itself."""
        state, unseen = self.bench.state, self.programs.choice(self.processes)
        self.do(cmd.HolderUnseen(process=unseen, leases=tuple(state.leases)))
        assert not [one for one in state.leases.values() if one.process == unseen and one.end is None]
        if (lease := self._some(LeaseStatus.ACTIVE, LeaseStatus.NOTICED)) is not None and lease.epoch is not None:
            self.do(cmd.Unbind(tenant=lease.tenant, lease=lease.id, epoch=lease.epoch))
            assert lease.process is None or lease.end is not None

    def release(self, number: int) -> None:
        if lease := self._some(*LeaseStatus):
            gone = self.rng.random() < 0.2
            self.do(cmd.Release(tenant=lease.tenant, lease=lease.id, gone=gone))

    def revoke(self, number: int) -> None:
        if lease := self._some(*LeaseStatus):
            reason = self.rng.choice((EndReason.OPERATOR, EndReason.BUDGET))
            self.do(cmd.Revoke(lease=lease.id, reason=reason, notice_ns=self.rng.choice((0, seconds(4)))))

    def stranger(self, number: int) -> None:
        """A1: another tenant's lease is no lease at all, and is spoken of in the same words."""
        if (lease := self._some(*LeaseStatus)) is None:
            return
        other = self.rng.choice([tenant for tenant in TENANTS if tenant != lease.tenant])
        epoch = lease.epoch or Epoch(1, 1)

        def calls(name: LeaseId) -> list[cmd.Command]:
            return [
                cmd.Claim(tenant=other, lease=name),
                cmd.Decline(tenant=other, lease=name),
                cmd.Renew(tenant=other, lease=name, epoch=epoch),
                cmd.NoteActivity(tenant=other, lease=name, epoch=epoch, active=True),
                cmd.Attach(tenant=other, lease=name, request_id=RequestId("x")),
                cmd.Release(tenant=other, lease=name),
                cmd.Unbind(tenant=other, lease=name, epoch=epoch),
                cmd.RemoveVolume(tenant=other, name=f"of-{name}"),
            ]

        nobody = LeaseId("never-was")
        for theirs, none in zip(calls(lease.id), calls(nobody), strict=True):
            one, two = self.do(theirs).answer, self.do(none).answer
            assert isinstance(one, NotFound), "A1"
            assert isinstance(two, NotFound), "A1"
            assert str(one).replace(lease.id, "?") == str(two).replace(nobody, "?"), "A1"

    def quota(self, number: int) -> None:
        rng = self.rng
        quota = rng.choice((Quota(), Quota(gpus=1), Quota(cores=2, leases=2), Quota(gpu_seconds=20), Quota(gpus=0)))
        if rng.random() < 0.3:
            quota = Quota(block_bytes=GIB)
        self.do(cmd.SetTenant(tenant=rng.choice(TENANTS), quota=quota))
        if self.rights.random() < 0.5:
            self._groups()
        if self.rights.random() < 0.1:
            tenant = self.rights.choice(TENANTS)
            self.do(cmd.DisableTenant(tenant=tenant, notice=self.rights.random() < 0.5))
            self.do(cmd.EnableTenant(tenant=tenant, token_hash=f"after {number}"))
            self.do(cmd.RemoveTenant(tenant=tenant))  # refused while anything is left of it
            if tenant not in self.bench.state.tenants:
                self._with_budgets(cmd.AddTenant(tenant=tenant, token_hash="again"))
            self._with_budgets(cmd.AddTenant(tenant=PASSING, token_hash="passing"))
            self.do(cmd.RemoveTenant(tenant=PASSING))

    def _groups(self) -> None:
        """Weights, ceilings and quotas of groups; tenants that change theirs; a group that goes, if it is empty."""
        rng = self.rights
        group = GroupRecord(
            id=rng.choice(GROUPS),
            weight=rng.choice((1, 2, 5)),
            ceiling=rng.choice((None, None, 1, 2)),
            quota=rng.choice((Quota(), Quota(leases=3), Quota(gpu_seconds=60))),
        )
        self.do(cmd.SetGroup(group=group))
        self.do(cmd.SetTenant(tenant=rng.choice(TENANTS), group=rng.choice(GROUPS), weight=rng.choice((1, 3))))
        self.do(cmd.RemoveGroup(group=rng.choice(GROUPS)))
        self._reservations()

    def _reservations(self) -> None:
        """Times of devices for a group, at once or soon; some are removed while they go on."""
        rng, wall_ns = self.times, self.bench.now.wall_ns
        known = self.bench.state.books.reservations
        if known and rng.random() < 0.3:
            self.do(cmd.RemoveReservation(reservation=rng.choice(sorted(known))))
            return
        spans = []
        for _ in range(rng.choice((1, 1, 2))):
            start_ns = wall_ns + seconds(rng.choice((0, 5, 40, 90)))
            wall_ns = start_ns + seconds(rng.choice((20, 60, 200)))
            spans.append(Span(start_ns, wall_ns))
        name = ReservationId(f"res-{len(known)}")
        gpus = rng.choice((1, 1, 2, 3))
        record = ReservationRecord(id=name, group=rng.choice(GROUPS), gpus=gpus, spans=tuple(spans))
        self.do(cmd.SetReservation(reservation=record))

    def _budgets(self) -> None:
        """A budget for a tenant or a group: small or ample; credit; other prices; none any more."""
        rng, known = self.money, list(self.bench.state.books.budgets.values())
        tenant = rng.choice((*TENANTS, None))
        group = rng.choice(GROUPS) if tenant is None else None
        per = rng.choice((BudgetWindow.DAY, BudgetWindow.TOTAL))
        deed = rng.random()
        if known and deed < 0.25:
            budget = rng.choice(known)
            self.do(cmd.RemoveBudget(tenant=budget.tenant, group=budget.group, per=budget.per))
        elif known and deed < 0.5:
            budget = rng.choice(known)
            amount = rng.choice((0, 1_000, 30_000))
            self.do(
                cmd.CreditBudget(
                    amount=amount,
                    tenant=budget.tenant,
                    group=budget.group,
                    per=budget.per,
                    request_id=RequestId(f"credit-{amount}"),
                )
            )
        elif deed < 0.6:
            gpu, cpu = rng.choice((0, 500_000, 2_000_000)), rng.choice((0, 20_000))
            prices = prices_record(Rates(gpu=gpu, cpu=cpu, priority=self.priority))
            self.do(cmd.SetPrices(prices=prices))
        else:
            amount = rng.choice((-1, 0, 500, 5_000, 50_000))
            self._with_budgets(cmd.SetBudget(tenant=tenant, group=group, per=per, amount=amount))

    def _with_budgets(self, command: cmd.Command) -> None:
        """One that may make budgets: what was over before is not in them. What was granted in the last instant of the
        boot before is: of that nothing was before, whatever the wall clock said then."""
        known, now = set(self.bench.state.books.budgets), self.bench.now
        self.do(command)
        for name in self.bench.state.books.budgets.keys() - known:
            self.before[name] = {}
            for usage in self._usages():
                count, last = len(usage.holdings), usage.holdings[-1]
                begins = usage.live and last.start_ns == now.ns and last.wall_ns != now.wall_ns
                self.before[name][usage.lease, usage.group] = (count - usage.live, count - begins)

    def _file(self) -> None:
        """The operator's file is applied, with some of all that it may have; much of it contradicts what there is. And
        a tenant has burst credit beyond a small quota of device time."""
        rng, wall_ns = self.files, self.bench.now.wall_ns
        groups: dict[GroupId, dict[str, int]] = {}
        for group in rng.sample(GROUPS, k=rng.choice((0, 1, 2))):
            choices = {"weight": (1, 4), "ceiling": (1, 3), "gpus": (2, 3), "leases": (4, 9)}
            groups[group] = {name: rng.choice(some) for name, some in choices.items() if rng.random() < 0.4}
        members = {tenant: rng.choice((*groups,)) for tenant in (*TENANTS, PASSING) if groups and rng.random() < 0.4}
        name = ReservationId("of-file")
        reservation = ReservationRecord(id=name, group=rng.choice(GROUPS), gpus=rng.choice((1, 2)), when="soon")
        start_ns = wall_ns + seconds(rng.choice((0, 40)))
        budgets = {
            BudgetId(f"{whose}/{per}"): rng.choice((500, 50_000))
            for whose in ("tenant/ann", "tenant/passing", "group/course")
            for per in ("day", "total")
            if rng.random() < 0.2
        }
        declared = DeclaredRecord(
            groups=groups,
            members=members,
            reservations={name: reservation} if rng.random() < 0.4 else {},
            budgets=budgets,
        )
        spans: dict[ReservationId, tuple[Span, ...]] = {name: (Span(start_ns, start_ns + seconds(60)),)}
        self._with_budgets(cmd.ApplyPolicy(changed={}, declared=declared, spans=spans))
        quota = Quota(gpu_seconds=5, burst_seconds=rng.choice((100, 1000)), burst_refill_seconds=rng.choice((0, 3600)))
        self.do(cmd.SetTenant(tenant=rng.choice(TENANTS), quota=quota))

    def _usages(self) -> list[Usage]:
        """Of which the bill is made."""
        bench = self.bench
        for now, events in bench.history[self.told :]:
            for event in events:
                if isinstance(event, BILLED):
                    self.past._apply(event, now.ns, now.wall_ns)
        self.told = len(bench.history)
        return self.past.usages(bench.now_ns)

    def compare_with_bill(self) -> None:
        """B2: what is used of a budget is what the bill has for the same time, to the grain.

        Here the wall clock is set back by hours. So what was over before the budget was made may lie after that on the
        wall clock: it is on the bill of that time, and not in the budget. And what began later may lie before that: it
        is in the budget, as on the bill of the whole window.
        """
        bench, state = self.bench, self.bench.state
        all_usages = self._usages() if state.books.budgets else []
        for budget in state.books.budgets.values():
            _, low_ns, until_ns = window_of(budget.per, bench.now.wall_ns)
            earlier, later, before = [], [], dict(self.before[budget.id])
            for usage in all_usages:  # of a volume whose tenant changed its group and came back there are several
                over, begun = before.pop((usage.lease, usage.group), (0, 0))
                earlier.append(replace(usage, holdings=usage.holdings[over:begun]))
                later.append(replace(usage, holdings=usage.holdings[begun:]))
            billed = 0
            for usages, since_ns in ((earlier, max(budget.since_wall_ns, low_ns or 0)), (later, low_ns)):
                if since_ns is None or until_ns is None or since_ns < until_ns:
                    by = "tenant" if budget.group is None else "group"
                    bill = fold(usages, by=by, rates=state.rates, since_ns=since_ns, until_ns=until_ns)
                    lines = {line.key: line.grains for line in bill.lines}
                    billed += lines.get(budget.tenant or str(budget.group), 0)
            used = standing_now(state, budget, bench.now).used
            assert used == billed, f"B2: {used} is used of {budget}, and {billed} on the bill"
            self.watch.met["a budget that was used"] += used > 0

    def node(self, number: int) -> None:
        found = self.rng.choice(self.nodes)
        if self.bench.state.nodes[found.node].lost:
            self.do(cmd.NodeUp(inventory=found))
        else:
            self.do(cmd.NodeGone(node=found.node, detail="silent"))

    def drain(self, number: int) -> None:
        node = self.bench.state.nodes[self.rng.choice(self.nodes).node]
        self.do(cmd.Drain(node=node.id, draining=not node.draining))
        self.do(cmd.ApplyPolicy(changed={"tenant.leases": "4"}))
        if node.draining:
            for lease_id in self.bench.state.on_node[node.id]:
                lease = self.bench.state.leases[lease_id]
                assert lease.status not in (LeaseStatus.GRANTED, LeaseStatus.ACTIVE), (
                    f"{lease_id} stays on a drained node"
                )

    def hardware(self, number: int) -> None:
        resource = self.rng.choice(list(self.bench.state.resources.values()))
        if self.rng.random() < 0.3:
            self.air.append(Fault(node=resource.node, resource=resource.id, detail="Xid 79"))
        elif self.rng.random() < 0.5:
            self.air.append(self._strangers(resource))
        elif self.rng.random() < 0.3:
            self._found_without(resource)
        else:
            vouch = self.rng.random() < 0.7
            self.do(cmd.ClearFence(resource=resource.id, vouch=vouch))

    def _found_without(self, resource: ResourceRecord) -> None:
        """The node says what it has, and this device is not there, or is there again."""
        node = self.bench.state.nodes[resource.node]
        found = next(found for found in self.nodes if found.node == node.id)
        if node.lost:
            return
        if resource.state is not SliceState.LOST:
            found = replace(found, devices=tuple(device for device in found.devices if device.id != resource.id))
        self.do(cmd.NodeUp(inventory=found))
        assert (resource.state is SliceState.LOST) == (resource.id not in {device.id for device in found.devices})
        for piece in resource.slices.values():
            assert resource.state is not SliceState.LOST or piece.state is not SliceState.LEASED, (
                "a lost device is leased"
            )

    def _strangers(self, resource: ResourceRecord) -> Foreign:
        """They come, take more or less, or leave; the agent may say what makes no sense."""
        amount = self.rng.choice((0, 0, 1, resource.device.capacity // 2, resource.device.capacity, 1 << 59, -1))
        blocks = self.rng.random() < 0.4
        return Foreign(node=resource.node, resource=resource.id, amount=amount, blocks=blocks, detail="process 7")

    def restart(self, number: int) -> None:
        """The office dies and comes back: with its journal, on the same clock or another, or out of a backup."""
        bench, rng = self.bench, self.rng
        state = State.restore(bench.state.snapshot())
        check_books(state)
        bench.ledger = Ledger(self.policy, state)
        if rng.random() < 0.5:
            bench.unsent.clear()
        restored, last_ns = rng.random() < 0.1, None
        if restored:
            self.incarnation += 1
        if rng.random() < 0.4:
            self.boots += 1
            last_ns = bench.now_ns
            bench.now_ns = seconds(rng.choice((5, 100, 1_000, 10_000, 1_000_000)))
        self.do(
            cmd.OpenOffice(
                incarnation=self.incarnation,
                clock_domain=f"boot-{self.boots}",
                last_ns=last_ns,
                slack_ns=seconds(rng.choice((0, 3))) if last_ns is not None else 0,
                restored=restored,
            )
        )
        for found in self.nodes:
            if not bench.state.nodes[found.node].lost:
                self.do(cmd.NodeUp(inventory=found))

    # ---- the agent ----

    def _agent(self, *, well: bool = False) -> None:
        """Orders are carried out or lost; reports are lost, doubled and mixed up, unless all is ``well``."""
        bench, rng = self.bench, self.rng
        bench.unsent += bench.ledger.orders_due(bench.now)
        orders, bench.unsent = bench.unsent, []
        for order in orders:
            if well or rng.random() < 0.8:
                self.air += self._words(self._obeyed(order), well=well)
        if not well:
            self.air += [self._need(lease) for lease in bench.state.leases.values() if self._says_need(lease)]
            rng.shuffle(self.air)
            self.air = [report for report in self.air if rng.random() < 0.95]
        taken = len(self.air) if well else rng.randrange(len(self.air) + 1)
        now, self.air = self.air[:taken], self.air[taken:]
        for report in now:
            first = self.do(cmd.AgentReport(report=report))
            again = self.do(cmd.AgentReport(report=report))
            if isinstance(report, Parkable) and any(isinstance(event, ev.Noticed) for event in first.events):
                continue  # the scheduler gave notice in between, so what the agent needs became news
            told = [event for event in again.events if not by_itself(event)]
            if isinstance(report, TornDown):  # an older slice of the lease there is freed by the second at the latest
                told = [one for one in told if not (isinstance(one, ev.TornDown) and one.epoch < report.epoch)]
            assert not told, f"the same report twice: {report} led to {told}"
            if not well and rng.random() < 0.1:
                self.air.append(report)

    def _obeyed(self, order: Order) -> list[Report]:
        node = self.bench.ledger.node_of(order)
        if node is None or self.bench.state.nodes[node].lost:
            return []
        said = self.disk.obey(order, node, writes=self.rng.random() < 0.7)
        if said is not None:
            return [said]
        empty = self.rng.random() < 0.1
        said_all = answers_to(order, self.bench.ledger.node_of, empty=empty)
        return [self.disk.told(report, order, node) for report in said_all]

    def _says_need(self, lease: LeaseRecord) -> bool:
        return lease.status is LeaseStatus.NOTICED and self.rng.random() < 0.5

    def _need(self, lease: LeaseRecord) -> Parkable:
        """What an agent says of the guests of a lease that has notice, as often as it likes."""
        assert lease.node is not None
        assert lease.epoch is not None
        why = "managed memory" if self.rng.random() < 0.2 else ""
        amount = 0 if why else self.rng.choice((1, 2, 80)) * GIB
        return Parkable(node=lease.node, lease=lease.id, epoch=lease.epoch, amount=amount, why=why)

    def _words(self, reports: list[Report], *, well: bool) -> list[Report]:
        rng = self.rng
        for index, report in enumerate(reports):
            if isinstance(report, TornDown) and report.epoch.n % 3 == 0:
                reports[index] = replace(report, metered=Metered(launches=report.epoch.n, is_whole=True))
            if isinstance(report, TornDown) and report.epoch.n % 5 == 0:
                reports[index] = replace(report, saved=Saved(version=1, wall_ns=report.epoch.n))
            if isinstance(report, TornDown) and report.parked and rng.random() < 0.2:
                reports[index] = replace(report, parked=False)
        if well or rng.random() < 0.8:
            return reports
        changed: list[Report] = []
        for report in reports:
            if isinstance(report, VolumeRemoved | Volumes):
                changed.append(report)
            elif isinstance(report, TornDown):
                hard = rng.random() < 0.3
                changed += [
                    Failed(
                        node=report.node, lease=report.lease, epoch=report.epoch, resource=r, detail="stuck", hard=hard
                    )
                    for r in report.resources
                ]
            elif rng.random() < 0.3:
                reason = rng.choice((EndReason.EXPIRED, EndReason.GUEST_FAILED, EndReason.OUT_OF_MEMORY))
                changed.append(EndedHere(node=report.node, lease=report.lease, epoch=report.epoch, reason=reason))  # type: ignore[union-attr]
            elif rng.random() < 0.3:
                changed.append(NotHeld(node=report.node, lease=report.lease, epoch=report.epoch, number=1))  # type: ignore[union-attr]
            else:
                changed.append(report)
        return changed

    def _some(self, *statuses: LeaseStatus) -> LeaseRecord | None:
        found = [lease for lease in self.bench.state.leases.values() if lease.status in statuses]
        return self.rng.choice(found) if found else None


DEEDS = (
    Chaos.acquire,
    Chaos.resume,
    Chaos.acquire_again,
    Chaos.claim,
    Chaos.decline,
    Chaos.renew,
    Chaos.note,
    Chaos.attach,
    Chaos.release,
    Chaos.revoke,
    Chaos.stranger,
    Chaos.quota,
    Chaos.node,
    Chaos.drain,
    Chaos.hardware,
    Chaos.restart,
    Chaos.keep,
    Chaos.give_up,
    Chaos.name_disk,
    Chaos.die,
    Chaos.lose_sight,
    Chaos.replace,
)
WEIGHTS = (30, 6, 3, 14, 4, 14, 6, 3, 8, 4, 1, 2, 2, 2, 3, 2, 14, 2, 4, 3, 1, 6)


def _with(command: cmd.Acquire, **changes: object) -> cmd.Acquire:
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    return cmd.Acquire(**{**fields, **changes})


def _node(rng: random.Random, index: int) -> Inventory:
    able = rng.choice(tuple(Suspend))
    gpus = [
        device(f"n{index}-gpu{i}", capacity=rng.choice((8, 16)) * GIB, suspend=able)
        for i in range(rng.choice((1, 2, 2)))
    ]
    rest = (
        device(f"n{index}-cpu", Kind.CPU),
        device(f"n{index}-memory", Kind.MEMORY, capacity=8 * GIB),
        device(f"n{index}-block", Kind.BLOCK, capacity=4 * GIB),
    )
    return inventory(f"n{index}", *gpus, *rest, zone=f"z{index}")


def _wants(rng: random.Random) -> tuple[Want, ...]:
    if rng.random() < 0.3:
        return (Want(kind=Kind.CPU, amount=rng.choice((1, 4, 8)), least=rng.choice((None, 1))),)
    gpu = Want(
        kind=Kind.GPU,
        amount=rng.choice((2, 8, 16)) * GIB,
        count=rng.choice((1, 1, 2)),
        exclusivity=rng.choice((None, None, Exclusivity.SHARED)),
        least=rng.choice((None, None, GIB)),
    )
    return (gpu, Want(kind=Kind.CPU, amount=2)) if rng.random() < 0.2 else (gpu,)
