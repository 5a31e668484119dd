"""Reads along with a ledger: it sees commands, answers and events, keeps its own plain notes, and complains."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sublet.errors import (
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    NotFound,
    Quarantined,
    StaleEpoch,
    SubletError,
)
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.admission import own_limit
from sublet.office.ledger.answers import Granted, Offer, Outcome, Place, Refusal
from sublet.office.ledger.budgets import standing_now, used_up
from sublet.office.ledger.placement import fit
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.promised_parts import rooms_for
from sublet.office.ledger.records import KEPT_STATES, LeaseRecord, Now
from sublet.office.ledger.state import State
from sublet.values import (
    MILLIS_PER_DEVICE,
    BudgetLevel,
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    TenantId,
    Tier,
)
from sublet.wire.orders import EndedHere, Failed, Fault, Held, NotHeld, Parkable, Resumed, TornDown
from tests.unit.office.ledger.bench import Bench

__all__ = ["OF_ITSELF", "Watch", "by_itself"]

OF_ITSELF = (
    ev.Granted,
    ev.Promised,
    ev.Noticed,
    ev.Spared,
    ev.PromiseDropped,
    ev.ReservationPlaced,
    ev.ReservationBegan,
    ev.ReservationLent,
    ev.ReservationOver,
    ev.BudgetReached,
)
"""What the scheduler may do after any command."""


def by_itself(event: ev.Event) -> bool:
    """Whether it may follow from any command, even one that is an error: the moment of something else had come."""
    return isinstance(event, OF_ITSELF) or _is_for_budget(event)


def _is_for_budget(event: ev.Event) -> bool:
    return isinstance(event, ev.Ending | ev.Ended) and event.end.reason is EndReason.BUDGET


BY_THE_AGENT = (EndedHere, NotHeld, TornDown, Failed, Fault, Resumed)


@dataclass
class Note:
    """What somebody who only reads the events knows of a lease."""

    tenant: TenantId
    tier: Tier
    millis: int = 0
    since_ns: int | None = None
    deadline_ns: int = 0
    claim_by_ns: int = 0
    wait_until_ns: int | None = None
    take_at_ns: int | None = None
    when_safe: bool = False
    idle_since_ns: int | None = None
    notices: int = 0
    ended: bool = False
    ending: bool = False
    follows: bool = False
    """It is a parking lease, or goes on with one: it may end with the other."""


@dataclass
class Watch:
    """Reads along."""

    policy: Policy
    notes: dict[LeaseId, Note] = field(default_factory=dict)
    used: list[tuple[TenantId, int, int, int]] = field(default_factory=list)
    """Tenant, thousandths, from, until."""
    last_epoch: Epoch | None = None
    met: Counter[str] = field(default_factory=Counter)
    replaced: set[LeaseId] = field(default_factory=set)
    wall_ns: int = 0
    confirmed: set[Epoch] = field(default_factory=set)
    """What an agent said that it holds."""

    def see(self, command: cmd.Command, outcome: Outcome, bench: Bench) -> None:
        state, now_ns, self.wall_ns = bench.state, bench.now_ns, bench.now.wall_ns
        self._answer(command, outcome)
        if isinstance(command, cmd.AgentReport) and isinstance(command.report, Held) and not command.report.told:
            self.confirmed.add(command.report.epoch)
        for event in outcome.events:
            self.met[type(event).__name__] += 1
            self._event(event, command, state, now_ns)
        self._notices_have_a_reason(state)
        self._reserved_are_cleared(state)
        self._none_outlives_its_budget(bench)
        if isinstance(command, cmd.Tick):
            self._nothing_is_overdue(state, now_ns)
        self._work_is_conserved(bench)

    # ---- answers ----

    def _answer(self, command: cmd.Command, outcome: Outcome) -> None:
        answer = outcome.answer
        self.met[f"answer {type(answer).__name__}"] += 1
        if isinstance(command, cmd.Acquire) and not isinstance(answer, SubletError):
            assert isinstance(answer, Granted | Place | Offer | Refusal), f"S2: an acquire was answered {answer}"
            if isinstance(answer, Refusal):
                assert answer.reason, "S2: a refusal without a reason"
                assert answer.do, "S2: a refusal that does not say what to do"
                assert not any(isinstance(event, ev.Queued) for event in outcome.events), "a refusal left a request"
            if isinstance(answer, Offer):
                assert answer.offered < answer.requested, "S2: an offer that is not smaller"
        if isinstance(answer, InvalidRequest | NotFound | StaleEpoch | IdempotencyConflict | Quarantined):
            told = [event for event in outcome.events if not by_itself(event)]
            assert not told, f"{answer}: an error after {told}"
        if isinstance(answer, LeaseEnded) and isinstance(command, cmd.Renew | cmd.NoteActivity | cmd.Attach):
            wrong = (ev.Renewed, ev.Attached, ev.Claimed)
            assert not any(isinstance(event, wrong) for event in outcome.events), "L8: resurrected"
        if isinstance(command, cmd.Renew) and not isinstance(answer, Granted):
            assert not any(isinstance(event, ev.Renewed) for event in outcome.events), "L8: renewed and refused"

    # ---- events ----

    def _event(self, event: ev.Event, command: cmd.Command, state: State, now_ns: int) -> None:
        match event:
            case ev.Queued():
                lease = event.lease
                assert lease.id not in self.notes
                follows = lease.parks is not None or lease.resume is not None
                self.notes[lease.id] = Note(
                    lease.tenant, lease.tier, wait_until_ns=lease.wait_until_ns, follows=follows
                )
            case ev.Granted():
                self._epoch(event.epoch)
                note = self.notes[event.lease]
                self._is_not_reserved(state, event)
                self._within_quota(state, note.tenant, {part.kind for part in event.parts})
                self._is_free(state, event)
                note.millis = sum(part.millis for part in event.parts)
                note.since_ns, note.claim_by_ns, note.notices = now_ns, event.claim_by_ns, 0
            case ev.Attached():
                self._epoch(event.epoch)
            case ev.Claimed() | ev.Renewed():
                note = self.notes[event.lease]
                assert event.deadline_ns >= note.deadline_ns, "a promise was cut short"
                note.deadline_ns = event.deadline_ns
                if isinstance(event, ev.Renewed):
                    self._is_idle(note, now_ns, idle=event.idle)
            case ev.ActivityNoted():
                self._is_idle(self.notes[event.lease], now_ns, idle=event.idle)
            case ev.Noticed():
                note = self.notes[event.lease]
                assert note.take_at_ns is None, f"S7: {event.lease} has notice already"
                note.take_at_ns, note.notices = event.notice.take_at_ns, note.notices + 1
                note.when_safe = event.notice.when_safe
                self._may_preempt(event, state, now_ns)
                if note.when_safe:
                    self._was_at_rest(event, note, state, now_ns)
            case ev.Spared():
                note = self.notes[event.lease]
                assert note.take_at_ns is not None, f"{event.lease} was spared without a notice"
                note.take_at_ns = None
            case ev.Replaced():
                new, old = self.notes[event.lease], self.notes[event.old]
                assert (new.tenant, new.ended) == (old.tenant, False), f"{event.old} was replaced for somebody else"
                new.wait_until_ns = event.wait_until_ns
                self.replaced.add(event.old)
            case ev.Promised():
                self._promised(event, state, now_ns)
            case ev.Ungranted() | ev.Ending():
                note = self.notes[event.lease]
                assert not note.ending, f"L12: {event.lease} ended twice"
                if isinstance(event, ev.Ending):
                    note.ending = True
                    self._reason(event, note, command, state.leases[event.lease], now_ns)
                assert note.since_ns is not None
                self.used.append((note.tenant, note.millis, note.since_ns, now_ns))
                note.since_ns = note.take_at_ns = None
            case ev.Ended():
                note = self.notes[event.lease]
                assert not note.ended, f"L12: {event.lease} ended twice"
                if not note.ending and event.end.reason is EndReason.REFUSED and not note.follows:
                    assert note.wait_until_ns is not None and note.wait_until_ns <= now_ns, "refused too early"  # noqa: PT018
                note.ended = True
            case ev.Rebased():
                self._shift(event.shift_ns)
            case _:
                pass

    def _is_idle(self, note: Note, now_ns: int, *, idle: bool) -> None:
        note.idle_since_ns = None if not idle else now_ns if note.idle_since_ns is None else note.idle_since_ns

    def _was_at_rest(self, event: ev.Noticed, note: Note, state: State, now_ns: int) -> None:
        """S10: a pause between two cells is no rest, and no further turn ends that of a newcomer."""
        assert note.idle_since_ns is not None, f"S10: {event.lease} was told to yield, and something runs under it"
        if event.notice.beneficiary is not None:
            rested_ns = now_ns - note.idle_since_ns
            assert rested_ns >= self.policy.idle_least_ns, f"S10: {event.lease} has rested for {rested_ns} ns"
            lease, request = state.leases[event.lease], state.leases[event.notice.beneficiary]
            is_further_turn = request.attained_ns >= self.policy.max_hold_ns > lease.attained_ns
            has_waited = now_ns - request.asked_at_ns >= self.policy.max_hold_ns or request.tier is Tier.SPOT
            has_floor = bool(state.group(state.group_of(request.tenant)).floor)
            if is_further_turn and not (has_waited or has_floor or self._is_lent(lease, request, state)):
                self.met["a further turn after a pause"] += 1
                assert rested_ns >= self.policy.pause_ns, f"S10: {event.lease} was taken in a pause of {rested_ns} ns"

    def _may_preempt(self, event: ev.Noticed, state: State, now_ns: int) -> None:
        """S7: a request for a further turn takes no lease of its own or a higher tier at first."""
        if event.notice.beneficiary is None:
            return
        lease, request = state.leases[event.lease], state.leases[event.notice.beneficiary]
        is_exempt = request.tier is Tier.SPOT or lease.tier.rank < request.tier.rank
        has_floor = bool(state.group(state.group_of(request.tenant)).floor)
        is_exempt = is_exempt or has_floor or self._is_lent(lease, request, state)
        if request.attained_ns >= self.policy.max_hold_ns and not is_exempt:
            self.met["preempted by a further turn"] += 1
            waited_ns = now_ns - request.asked_at_ns
            assert waited_ns >= self.policy.pause_ns, f"S7: {event.lease} was taken after {waited_ns} ns"

    def _epoch(self, epoch: Epoch) -> None:
        assert self.last_epoch is None or epoch > self.last_epoch, f"L2: epoch {epoch} after {self.last_epoch}"
        self.last_epoch = epoch

    def _reason(self, event: ev.Ending, note: Note, command: cmd.Command, lease: LeaseRecord, now_ns: int) -> None:
        reason = event.end.reason
        self.met[f"end {reason}"] += 1
        if note.idle_since_ns is not None and note.take_at_ns is not None and event.end.resume is not None:
            self.met["yielded, parked"] += 1
            if min(note.take_at_ns, note.deadline_ns) > now_ns:
                assert event.end.resume.epoch in self.confirmed, f"S10: {event.lease} ends before it is safe"
            return
        if note.when_safe and isinstance(command, cmd.AgentReport) and isinstance(command.report, Held | Parkable):
            self.met["yielded"] += 1
            return
        agent = isinstance(command, cmd.AgentReport) and isinstance(command.report, BY_THE_AGENT)
        opening = isinstance(command, cmd.OpenOffice)
        if agent or opening or isinstance(command, cmd.NodeGone | cmd.Revoke):
            return
        if note.follows and reason in (EndReason.WITHDRAWN, EndReason.REFUSED):
            return
        if reason is EndReason.RELEASED and event.lease in self.replaced:
            return
        if reason in (EndReason.RELEASED, EndReason.WITHDRAWN):
            assert isinstance(command, cmd.Release | cmd.Decline), f"L5: {reason} by {command}"
        elif reason is EndReason.HOLDER_GONE and isinstance(command, cmd.HolderGone):
            assert lease.process == command.process, f"{event.lease} ended with a process that is not its holder's"
        elif reason in (EndReason.HOLDER_GONE, EndReason.REFUSED):
            assert note.claim_by_ns <= now_ns, f"L5: {event.lease} lost its claim too early"
        elif reason is EndReason.DRAINED and isinstance(command, cmd.Drain):
            pass
        elif reason is EndReason.BUDGET and note.take_at_ns is None:
            assert not note.deadline_ns, f"{event.lease} was claimed, and ended without a notice"
            self.met["a grant ended for want of budget"] += 1
        elif reason is EndReason.OPERATOR and isinstance(command, cmd.DisableTenant) and not command.notice:
            assert lease.tenant == command.tenant, f"{event.lease} ended with a tenant that is not its own"
        elif reason is EndReason.DEVICE_LOST and isinstance(command, cmd.NodeUp):
            there = {device.id for device in command.inventory.devices}
            assert any(part.resource not in there for part in lease.parts), f"{event.lease} ended, its device is there"
        elif note.take_at_ns is not None and reason not in (EndReason.EXPIRED, EndReason.IDLE, EndReason.QUOTA):
            assert min(note.take_at_ns, note.deadline_ns) <= now_ns, f"L5: {event.lease} was taken before the moment"
        else:
            assert note.deadline_ns <= now_ns, f"L5: {event.lease} ended ({reason}) before its deadline"

    def _promised(self, event: ev.Promised, state: State, now_ns: int) -> None:
        request = state.leases[event.lease]
        lost = sum(1 << 20 * self._standing(state, state.leases[victim], request, now_ns) for victim in event.victims)
        gained = 1 << 20 * (request.tier.rank + 1)
        assert lost < gained, f"S7: {event.victims} weigh {lost}, the request {gained}"

    def _is_lent(self, lease: LeaseRecord, request: LeaseRecord, state: State) -> bool:
        """Whether the request's group has reserved a device of it, and it is another group's."""
        groups = {
            state.books.reservations[state.reserved_by[part.resource]].group
            for part in lease.parts
            if part.resource in state.reserved_by
        }
        return state.group_of(request.tenant) in groups and state.group_of(lease.tenant) not in groups

    def _standing(self, state: State, lease: LeaseRecord, request: LeaseRecord, now_ns: int) -> int:
        assert lease.claimed_at_ns is not None
        ran_ns, own = now_ns - (lease.held_since_ns or lease.claimed_at_ns), lease.tier.rank + 1
        if lease.id == request.replaces:
            return 0  # it makes room for its own holder
        if self._is_lent(lease, request, state):
            return 0
        since_ns = self.notes[lease.id].idle_since_ns
        if since_ns is not None and now_ns - since_ns >= self.policy.idle_most_ns:
            return 0
        if since_ns is not None and lease.notice is not None and lease.notice.when_safe:
            return 0  # it has rested for as long as its guests need to move
        if ran_ns >= self.policy.max_hold_ns and lease.tenant != request.tenant:
            return own - 1
        if lease.attained_ns >= self.policy.max_hold_ns > request.attained_ns and lease.tenant != request.tenant:
            least_ns = self.policy.min_run_batch_ns if lease.tier is Tier.BATCH else self.policy.turn_least_ns
            if ran_ns >= least_ns:
                return own - 1
        assert lease.tier is not Tier.INTERACTIVE, "S7: a busy interactive lease was taken"
        assert lease.tier is Tier.SPOT or ran_ns >= self.policy.min_run_batch_ns, "S7: taken within its minimum run"
        return own

    def _shift(self, shift_ns: int) -> None:
        self.used = [(tenant, millis, a + shift_ns, b + shift_ns) for tenant, millis, a, b in self.used]
        for note in self.notes.values():
            note.deadline_ns += shift_ns if note.deadline_ns else 0
            note.claim_by_ns += shift_ns
            if note.since_ns is not None:
                note.since_ns += shift_ns
            if note.take_at_ns is not None:
                note.take_at_ns += shift_ns
            if note.idle_since_ns is not None:
                note.idle_since_ns += shift_ns
            if note.wait_until_ns is not None:
                note.wait_until_ns += shift_ns

    # ---- the whole ----

    def _is_free(self, state: State, event: ev.Granted) -> None:
        """What strangers use is lent to nobody, and who wants a device for himself finds nobody there."""
        for part in event.parts:
            resource = state.resources[part.resource]
            if resource.foreign is not None and not state.leases[event.lease].takes:  # a volume has its room already
                self.met["granted beside strangers"] += 1
                assert resource.used + resource.foreign.amount <= resource.device.capacity, f"{event}: it is in use"
                alone = part.kind is Kind.GPU and part.exclusivity is not Exclusivity.SHARED
                assert not (alone and resource.foreign.blocks), f"{event}: somebody is there"

    def _is_not_reserved(self, state: State, event: ev.Granted) -> None:
        """R1: what is reserved goes to its group; the rest of it, once it is lent, to spot."""
        lease = state.leases[event.lease]
        for part in event.parts:
            name = state.reserved_by.get(part.resource)
            if name is not None and state.books.reservations[name].group != state.group_of(lease.tenant):
                lent = state.books.reserved[name].lends and lease.tier is Tier.SPOT
                assert lent, f"R1: {lease.id} was granted {part.resource}, which is reserved ({name})"
                self.met["lent"] += 1

    def _reserved_are_cleared(self, state: State) -> None:
        """R2: who is on a reserved device, is not of the group and has nothing lent, has notice or is to claim it."""
        for resource, name in state.reserved_by.items():
            reserved, group = state.books.reserved[name], state.books.reservations[name].group
            for piece in state.resources[resource].slices.values():
                lease = state.leases.get(piece.lease)
                if lease is not None and lease.status is LeaseStatus.ACTIVE and state.group_of(lease.tenant) != group:
                    assert reserved.lends and lease.tier is Tier.SPOT, f"R2: {lease.id} stays on {resource} ({name})"  # noqa: PT018

    def _none_outlives_its_budget(self, bench: Bench) -> None:
        """B1: once a budget is used up nothing that it pays for waits, is set aside or runs without notice; the notice
        is that of its tier, unless its device goes to another."""
        state, now = bench.state, bench.now
        for lease in state.leases.values() if state.books.budgets else ():
            over = used_up(state, lease, now)
            if over is None or lease.parks is not None:
                continue
            assert lease.status not in (LeaseStatus.QUEUED, LeaseStatus.GRANTED, LeaseStatus.ACTIVE), (
                f"B1: {lease.id} is {lease.status}, and {over.id} is used up"
            )
            if lease.status is LeaseStatus.NOTICED and lease.notice is not None:
                self.met["notice for a budget"] += lease.notice.budget is not None
                left_ns = lease.notice.take_at_ns - now.ns
                to_another = lease.notice.beneficiary is not None or lease.notice.reservation is not None
                assert to_another or left_ns <= self.policy.notice_for_ns(lease.tier), f"B1: {lease.id} has {left_ns}"

    def _within_quota(self, state: State, tenant: TenantId, kinds: set[Kind]) -> None:
        """At the moment of a grant; a quota that is lowered later takes nothing away. Of a lease and the grant that is
        to replace it one counts: once that is claimed the other ends."""
        quota = state.tenants[tenant].quota
        granted = [lease for lease in state.leases.values() if lease.status is LeaseStatus.GRANTED]
        replaced = {lease.replaces for lease in granted}
        live = [lease for lease in state.leases.values() if lease.status in LIVE_STATES and lease.id not in replaced]
        held = [lease for lease in granted + live if lease.tenant == tenant]
        parts = [part for lease in held for part in lease.parts]
        assert quota.leases is None or len(held) <= quota.leases, f"{tenant} has {len(held)} leases"
        gpus = sum(part.kind is Kind.GPU for part in parts)
        assert quota.gpus is None or Kind.GPU not in kinds or gpus <= quota.gpus, f"{tenant} has {gpus} GPUs"
        cores = sum(part.amount for part in parts if part.kind is Kind.CPU)
        block = sum(part.amount for part in parts if part.kind is Kind.BLOCK)
        block += sum(one.size for one in state.volumes.values() if one.tenant == tenant and one.state in KEPT_STATES)
        assert quota.block_bytes is None or Kind.BLOCK not in kinds or block <= quota.block_bytes, f"{tenant}: {block}"
        assert quota.cores is None or Kind.CPU not in kinds or cores <= quota.cores, f"{tenant} has {cores} cores"
        group = state.group(state.group_of(tenant))
        held = [lease for lease in granted + live if state.group_of(lease.tenant) == group.id]
        millis = sum(part.millis for lease in held for part in lease.parts)
        assert group.quota.leases is None or len(held) <= group.quota.leases, f"{group.id} has {len(held)} leases"
        if group.ceiling is not None and Kind.GPU in kinds:
            assert millis <= group.ceiling * MILLIS_PER_DEVICE, f"{group.id} has {millis} above its ceiling"

    def _notices_have_a_reason(self, state: State) -> None:
        for lease in state.leases.values():
            if lease.status is LeaseStatus.NOTICED and lease.notice is not None and lease.notice.beneficiary:
                request = state.leases.get(lease.notice.beneficiary)
                assert request is not None, f"{lease.id} is to be taken for a lease that is forgotten"
                assert lease.id in request.victims, (
                    f"{lease.id} is to be taken for {request.id}, which needs it no more"
                )

    def _nothing_is_overdue(self, state: State, now_ns: int) -> None:
        for lease in state.leases.values():
            due_ns = state.due_at(lease)
            assert due_ns is None or due_ns > now_ns, f"L5: the time of {lease.id} ({lease.status}) is over"
        for budget in state.books.budgets.values():
            found, spent = standing_now(state, budget, Now(now_ns, self.wall_ns)), state.books.spent[budget.id]
            level = spent.level if spent.window == found.window else BudgetLevel.OPEN
            assert found.level is level, f"B3: {budget.id} is {found.level}, and the books say {level}"
        for lease in state.leases.values():
            if lease.promise:
                waiting = [v for v in lease.victims if state.leases[v].status is not LeaseStatus.ENDED]
                assert waiting, f"{lease.id} waits for victims that are gone"

    def used_milli_ns(self, tenant: TenantId, now_ns: int) -> int:
        begin = now_ns - self.policy.usage_window_ns
        open_ones = [(n.tenant, n.millis, n.since_ns, now_ns) for n in self.notes.values() if n.since_ns is not None]
        return sum(
            millis * max(0, until_ns - max(begin, since_ns))
            for whose, millis, since_ns, until_ns in self.used + open_ones
            if whose == tenant
        )

    def _work_is_conserved(self, bench: Bench) -> None:
        """S4, as long as nobody waits for so long that room is kept for him."""
        state = bench.state
        waiting = list(state.queue_listing())
        if any(bench.now_ns - lease.asked_at_ns >= self.policy.gang_patience_ns for lease in waiting):
            return
        for lease in waiting:
            if own_limit(state, lease, bench.now) is not None:
                continue
            group = state.group(state.group_of(lease.tenant))
            if state.tenants[lease.tenant].quota.gpu_seconds is not None or group.quota.gpu_seconds is not None:
                continue  # the window rolls on between two looks
            found = fit(lease.wants, lease.tenant, rooms_for(state, lease), mix=self.policy.share_across_tenants)
            assert found is None, f"S4: {lease.id} waits while {found} is free for it"
