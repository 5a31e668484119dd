"""The onlooker. It sees everything, true time included, trusts no table, and stops the seed at the first broken rule.

What it compares is what was *seen*: effects on the hardware, answers that were given, starts that holders made, reports
of agents, durable events. ``rules`` says what each of the rules is (L for leases, S for scheduling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.errors import LeaseExpired, SubletError
from sublet.lease.fence import is_exclusive
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, Outcome
from sublet.office.ledger.checks import check_after, check_books
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.values import (
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    RenewMode,
    ResourceId,
    Suspend,
    Tier,
)
from sublet.wire.orders import Held, Order, Parkable, Report, Resumed, TornDown
from tests.simulation.account import audit
from tests.simulation.bound import BoundRules
from tests.simulation.idle_hands import IdleHands, is_unbounded
from tests.simulation.kept import KeptRules
from tests.simulation.parked import ParkedRules
from tests.simulation.sharing import held_millis
from tests.simulation.supervised import SupervisedRules

if TYPE_CHECKING:
    from sublet.lease.fence import FenceEntry
    from sublet.lease.holder import Holder
    from sublet.office.ledger.state import State
    from tests.simulation.holder import HolderProcess
    from tests.simulation.node import NodeProcess
    from tests.simulation.office import OfficeProcess
    from tests.simulation.replies import Reply
    from tests.simulation.world import World

_S: Final = 1_000_000_000
LATE_NS: Final = 5 * _S
"""An office that is up acts on a deadline within this time."""
RHO: Final = 0.05


def is_plain_between(state: State, holder: LeaseRecord, other: LeaseRecord) -> bool:
    """Whether neither the weights of groups nor any other limit bears on what the other has of the holder's end."""
    return state.group_of(holder.tenant) == state.group_of(other.tenant) and is_unbounded(state, other)


def is_below_floor(state: State, request: LeaseId) -> bool:
    """Whether the group of this request holds less than its floor."""
    group = state.group_of(state.leases[request].tenant)
    floor = state.books.groups[group].floor if group in state.books.groups else 0
    return held_millis(state, group) < 1000 * floor


class Violation(AssertionError):
    """A rule was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text


class Watch:
    """One world's onlooker."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._idle_hands = IdleHands(self.fail, world.scenario.policy)
        self._epochs: dict[Epoch, LeaseId] = {}
        """Every epoch that any process outside the office ever saw."""
        self._told: dict[LeaseId, Epoch] = {}
        """What holders were told that they have."""
        self._torn: dict[tuple[LeaseId, ResourceId], Epoch] = {}
        """Up to which epoch an agent said that nothing is left."""
        self._highest: dict[ResourceId, Epoch] = {}
        """The highest epoch that had an effect on an exclusive resource."""
        self._belief_ns: dict[LeaseId, int] = {}
        """By the rules, the holder's deadline on its own clock."""
        self._granted_ns: dict[LeaseId, int] = {}
        """What was left when the belief was formed."""
        self._ttl_ns: dict[LeaseId, int] = {}
        self._promised_ns: dict[LeaseId, int] = {}
        """The last deadline that was answered, on the office's clock."""
        self._word_true: dict[LeaseId, int] = {}
        """When the office last took a claim or a renewal of the lease."""
        self._over: dict[LeaseId, EndReason] = {}
        self._requests: dict[tuple[str, str], LeaseId] = {}
        self._forgotten: set[LeaseId] = set()
        self._met_incarnation: dict[str, int] = {}
        self._supervised = SupervisedRules(self.fail)
        self._idle_since_true: dict[LeaseId, int] = {}
        self._yielded: set[LeaseId] = set()
        """Leases of which the office was told that nothing runs, and when."""
        self._confirmed: set[Epoch] = set()
        """What agents said that they hold."""
        self._by_what_is_needed = False
        """What is decided now follows from what an agent said of the guests of a lease, or of its parking lease."""
        self._said_empty: set[Epoch] = set()
        """Of which leases agents said that they have no guests."""
        self.parked = ParkedRules(self.fail, world)
        self._kept = KeptRules(self.fail, world)
        self._bound = BoundRules(self.fail, world)
        self._entry_before: FenceEntry | None = None
        self._at_crash: bytes | None = None
        self._left_at_crash: dict[LeaseId, int] = {}
        self._domain_at_crash = ""

    def fail(self, rule: str, text: str) -> None:
        """Stop here."""
        raise Violation(rule, f"{text} [at {self._world.now / _S:.3f} s]")

    # ---- the office's decisions ----

    def decided(self, office: OfficeProcess, command: cmd.Command, outcome: Outcome, now: Now) -> None:
        """The ledger has handled a command; nothing of it is durable yet."""
        assert office.ledger is not None
        state = office.ledger.state
        if office.deposed:  # what it decides is not judged; but agents that know no better may still obey it
            self._heard(state, outcome)
            return
        if outcome.events:
            try:
                check_after(state, outcome.events)
            except AssertionError as error:
                self.fail("books", str(error))
        answered = isinstance(outcome.answer, Granted)
        if answered and isinstance(command, cmd.Renew | cmd.Attach) and command.lease in self._over:
            self.fail("L8", f"{command.lease} had ended ({self._over[command.lease]}), and was granted more time")
        if answered and isinstance(command, cmd.Renew):
            self._renewed_rightly(state, command, now)
        self.parked.decided(state, command, outcome)
        self._bound.decided(state, command, outcome)
        if self._world.sharing is not None:
            self._world.sharing.decided(state, outcome.events)
        report = command.report if isinstance(command, cmd.AgentReport) else None
        self._by_what_is_needed = isinstance(report, Parkable | Held)
        for event in outcome.events:
            self._event(office, state, event, now)
        self._heard(state, outcome)

    def _heard(self, state: State, outcome: Outcome) -> None:
        """Signs of life of holders."""
        for event in outcome.events:
            if isinstance(event, ev.Claimed | ev.Renewed):
                self._word_true[event.lease] = self._world.now
                self._ttl_ns[event.lease] = state.leases[event.lease].ttl_ns

    def _renewed_rightly(self, state: State, command: cmd.Renew, now: Now) -> None:
        lease = state.leases[command.lease]
        if lease.renew is RenewMode.WHILE_BUSY and not command.active:
            self.fail("L13", f"{lease.id} was renewed although nothing ran")
        held_ns = now.ns - (lease.claimed_at_ns or now.ns)
        if held_ns >= self._world.scenario.policy.max_hold_ns:
            kinds = {part.kind for part in lease.parts} - {Kind.BLOCK}
            for other in state.queue_listing():
                if self._world.sharing is not None and not is_plain_between(state, lease, other):
                    continue
                if other.tenant != lease.tenant and kinds & {want.kind for want in other.wants}:
                    self.fail("L13", f"{lease.id} was renewed after {held_ns / _S:.0f} s while {other.id} waits")

    def _event(self, office: OfficeProcess, state: State, event: ev.Event, now: Now) -> None:
        if isinstance(event, ev.ActivityNoted | ev.Renewed):
            if event.idle:
                self._idle_since_true.setdefault(event.lease, self._world.now)
            else:
                self._idle_since_true.pop(event.lease, None)
        match event:
            case ev.Queued():
                self._once(event.lease)
            case ev.Claimed() | ev.Renewed():
                if event.lease in self._over:
                    self.fail("L8", f"{event.lease} had ended, and came back by {type(event).__name__}")
            case ev.Noticed():
                self._notice_allowed(state, state.leases[event.lease], event, now)
            case ev.Ending():
                self._ends_rightly(office, state, state.leases[event.lease], event, now)
            case ev.Ended():
                before = self._over.get(event.lease)
                if before is not None and before is not event.end.reason:
                    self.fail("L12", f"{event.lease} ended twice: {before} and {event.end.reason}")
                self._over[event.lease] = event.end.reason
                self._told.pop(event.lease, None)
            case ev.Forgotten():
                for lease_id in event.leases:
                    self._told.pop(lease_id, None)
                    self._forgotten.add(lease_id)
            case ev.TornDown():
                self._was_verified(event.resource, event.lease, event.epoch)
            case ev.Cleared(by="office") if event.lease is not None:
                if (event.lease, event.resource) not in self._torn:
                    self.fail("L4", f"{event.resource} was cleared of {event.lease} and no agent had looked")
            case _:
                pass

    def _once(self, lease: LeaseRecord) -> None:
        key = (lease.tenant, lease.request_id)
        known = self._requests.setdefault(key, lease.id)
        if known != lease.id:
            self.fail("L15", f"request {lease.request_id} had two effects: {known} and {lease.id}")

    def _notice_allowed(self, state: State, lease: LeaseRecord, event: ev.Noticed, now: Now) -> None:
        """S7, S8: batch keeps its minimum run, every lease gets the notice of the tier."""
        policy, notice = self._world.scenario.policy, event.notice
        if notice.beneficiary is None or lease.claimed_at_ns is None:
            return
        if notice.when_safe:
            rested_ns = self._world.now - self._idle_since_true.get(lease.id, self._world.now)
            if rested_ns < policy.idle_least_ns * (1 - RHO):
                self.fail("S10", f"{lease.id} was told to yield after {rested_ns / _S:.2f} s of idleness")
            if notice.take_at_ns - now.ns < policy.grace_ns(lease.ttl_ns):
                self.fail("S10", f"{lease.id} had less time to save than its grace")
            return
        ran_ns = now.ns - lease.claimed_at_ns
        if lease.idle_since_ns is None and lease.tier is Tier.BATCH and ran_ns < policy.min_run_batch_ns:
            self.fail("S7", f"{lease.id} was to be taken after {ran_ns / _S:.1f} s of its minimum run")
        is_further_turn = lease.attained_ns >= policy.max_hold_ns and ran_ns >= policy.turn_least_ns
        is_taken_early = ran_ns < policy.max_hold_ns and not is_further_turn
        by_floor = ran_ns >= policy.min_run_batch_ns and is_below_floor(state, notice.beneficiary)
        if lease.idle_since_ns is None and lease.tier is Tier.INTERACTIVE and is_taken_early and not by_floor:
            self.fail("S7", f"{lease.id} is interactive and was to be taken after {ran_ns / _S:.1f} s")
        if notice.take_at_ns - now.ns < policy.notice_for_ns(lease.tier):
            self.fail("S8", f"{lease.id} had less notice than its tier has")

    def _ends_rightly(
        self, office: OfficeProcess, state: State, lease: LeaseRecord, event: ev.Ending, now: Now
    ) -> None:
        reason = event.end.reason
        if event.lease in self._over:
            self.fail("L12", f"{lease.id} ended twice: {self._over[lease.id]} and {reason}")
        self._over[lease.id] = reason
        notice = lease.notice
        is_idle = lease.id in self._idle_since_true  # who became so with a notice need not wait for its moment
        is_early = notice is not None and now.ns < notice.take_at_ns
        yields = is_idle and event.end.resume is not None
        if notice is not None and is_early and (yields or (notice.when_safe and self._by_what_is_needed)):
            self._yields_rightly(state, lease, event)
            return
        if reason in (EndReason.PREEMPTED, EndReason.DRAINED) and notice is not None and now.ns < notice.take_at_ns:
            self.fail("S8", f"{lease.id} was taken {(notice.take_at_ns - now.ns) / _S:.1f} s before it was announced")
        if reason is EndReason.PREEMPTED and notice is None:
            self.fail("S8", f"{lease.id} was preempted without notice")
        if reason in (EndReason.EXPIRED, EndReason.IDLE):
            early_ns = self._promised_ns.get(lease.id, now.ns) - now.ns
            if early_ns > RHO * lease.ttl_ns and self._world.scenario.true_clocks and office.opened:
                self.fail("L5", f"{lease.id} ended as {reason} {early_ns / _S:.1f} s before its deadline")

    def _yields_rightly(self, state: State, lease: LeaseRecord, event: ev.Ending) -> None:
        """S10: an idle holder's lease ends before its bound only when nothing is lost by it: its agent holds the
        parking lease, or said that there are no guests, or that they cannot be parked; then they have time to save."""
        self._world.coverage.seen["yielded"] += 1
        self._yielded.add(lease.id)
        parked = event.end.resume
        if parked is not None:
            self._world.coverage.seen["yielded, parked"] += 1
            if parked.epoch not in self._confirmed:
                self.fail("S10", f"{lease.id} is taken, and its agent does not hold {parked.lease}")
        elif not lease.unsaved and lease.epoch not in self._said_empty and _can_be_suspended(state, lease):
            self.fail("S10", f"{lease.id} is taken from guests that could be parked")

    def _was_verified(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> None:
        if self._torn.get((lease, resource), Epoch(0, 0)) < epoch:
            self.fail("L4", f"{resource} became free of {lease} ({epoch}) and no agent had looked")

    # ---- the office's memory ----

    def office_died(self, office: OfficeProcess, *, was_syncing: bool) -> None:
        """It crashed; what was syncing may be kept or lost."""
        if office.deposed or office.ledger is None:
            return
        state = office.ledger.state
        self._at_crash = None if was_syncing else state.snapshot()
        self._domain_at_crash = state.books.clock_domain

    def restored(self, office: OfficeProcess) -> None:
        """A backup took the place of the journal: what happened since is not known to the office."""
        self._at_crash = None
        self._told.clear()
        self._requests.clear()
        self.parked.restored()

    def recovered(self, office: OfficeProcess, state: State) -> None:
        """The journal was folded: it must come to what lived, and to what was told."""
        try:
            check_books(state)
        except AssertionError as error:
            self.fail("books", str(error))
        if self._at_crash is not None and self._at_crash != state.snapshot():
            self.fail("fold", "what the journal comes to is not what the office knew when it crashed")
        self._at_crash = None
        self.parked.recovered(state)
        self._idle_since_true = {  # what it was told last may be lost
            lease.id: self._idle_since_true.get(lease.id, 0)
            for lease in state.leases.values()
            if lease.idle_since_ns is not None
        }
        for lease_id, epoch in self._told.items():
            lease = state.leases.get(lease_id)
            if lease is None:
                self.fail("L2", f"a holder was told that it has {lease_id} ({epoch}); the journal does not know it")
            elif lease.epoch is not None and lease.epoch < epoch:
                self.fail("L2", f"a holder was told that it has {lease_id} ({epoch}); the journal knows {lease.epoch}")
        self._promised_ns.clear()
        self._requests = {  # what was decided and is not in the journal had no effect: it can be asked for again
            key: lease for key, lease in self._requests.items() if lease in state.leases or lease in self._forgotten
        }
        self._over = {lease.id: lease.end.reason for lease in state.leases.values() if lease.end is not None}
        last_ns = office.disk.last_ns
        self._domain_at_crash = state.books.clock_domain
        self._left_at_crash = {
            lease.id: lease.deadline_ns - last_ns
            for lease in state.leases.values()
            if lease.status in LIVE_STATES and lease.deadline_ns is not None
        }

    def opened(self, office: OfficeProcess) -> None:
        """A restart moves no deadline out: not at all on the same clock, and to what was left on another."""
        assert office.ledger is not None
        now_ns = office.clock.now_ns()
        for lease in office.ledger.state.leases.values():
            if lease.status in LIVE_STATES and lease.id in self._left_at_crash and lease.deadline_ns is not None:
                left_ns = lease.deadline_ns - now_ns
                if left_ns > self._left_at_crash[lease.id]:
                    more_s = (left_ns - self._left_at_crash[lease.id]) / _S
                    self.fail("L10", f"a restart gave {lease.id} {more_s:.1f} s more than it had")

    def promised(self, office: OfficeProcess, reply: Reply | None, deadline_ns: int) -> None:
        """An answer that promises a deadline goes out: the agent must hold it by now."""
        world = self._world
        if office.deposed or reply is None or reply.kind != "granted" or reply.node is None:
            return
        lease_id = reply.lease
        assert reply.epoch is not None and lease_id is not None
        self._told[lease_id] = reply.epoch
        self._promised_ns[lease_id] = deadline_ns
        if reply.epoch in self._epochs and self._epochs[reply.epoch] != lease_id:
            self.fail("L2", f"epoch {reply.epoch} was given to {self._epochs[reply.epoch]} and to {lease_id}")
        self._epochs[reply.epoch] = lease_id
        node = world.node_by_id[reply.node]
        if node.embedded:
            self._supervised.promised(lease_id, reply.epoch, deadline_ns)
        entry = node.agent.fence.get(lease_id)
        if entry is None or entry.epoch != reply.epoch or not node.alive or not world.scenario.true_clocks:
            return
        held_true = node.clock.true_ns(entry.deadline_ns)
        promised_true = office.clock.true_ns(deadline_ns)
        ttl_ns = self._ttl_ns.get(lease_id, reply.left_ns)
        if held_true < promised_true - int(ttl_ns * RHO):
            late_s = (promised_true - held_true) / _S
            self.fail("L6", f"{lease_id} was promised {late_s:.1f} s more than its agent holds")

    # ---- agents ----

    def reported(self, node: NodeProcess, report: Report) -> None:
        """An agent says something."""
        if isinstance(report, TornDown):
            for resource in report.resources:
                if node.machine.is_there(resource, report.lease, report.epoch):
                    self.fail("L4", f"{node.name} said TornDown of {report.lease} while its guest is on {resource}")
                key = (report.lease, resource)
                self._torn[key] = max(report.epoch, self._torn.get(key, report.epoch))
        elif isinstance(report, Resumed):
            self.parked.resumed(node, report)
        elif isinstance(report, Parkable) and report.amount < 1 and not report.why:
            self._said_empty.add(report.epoch)
        elif isinstance(report, Held):
            if not report.told:
                self._confirmed.add(report.epoch)
            if node.embedded:
                self._supervised.held(node, report)

    def supervisor_died(self, node: NodeProcess, *, reboot: bool) -> None:
        """Its tables are gone; what they were about may not be."""
        self._supervised.died(node, reboot=reboot)

    def moved(self, node: NodeProcess) -> None:
        """An agent did what was due."""
        self.parked.look(node)
        self._kept.look(node)

    def supervisor_moved(self, node: NodeProcess) -> None:
        """It did what was due."""
        self._supervised.moved(node)

    def before_order(self, node: NodeProcess, order: Order, incarnation: int | None) -> None:
        """An order arrives at an agent."""
        if node.embedded:
            self._supervised.ordered(order)
        self._entry_before = node.agent.fence.get(order.lease)

    def after_order(self, node: NodeProcess, order: Order, incarnation: int | None) -> None:
        """It was taken. If an older office gave it, nothing may have changed."""
        self.parked.ordered(node, order, self._entry_before)
        if incarnation is None:
            return
        met = self._met_incarnation.get(f"{node.name}/{node.boot}", 0)
        if incarnation >= met:
            self._met_incarnation[f"{node.name}/{node.boot}"] = incarnation
            return
        before, after = self._entry_before, node.agent.fence.get(order.lease)
        changed = before != after
        expired = before is not None and after is None and node.clock.now_ns() >= before.deadline_ns
        if changed and not expired:
            self.fail("L9", f"{node.name} obeyed {type(order).__name__} of an office that was replaced")

    def effect_taken(self, node: NodeProcess, lease: LeaseId, epoch: Epoch) -> None:
        """The fence let an effect through."""
        self.parked.acted(node, lease, epoch)
        live = node.agent.fence.get(lease)
        if live is None or live.epoch != epoch:
            self.fail("L3", f"{node.name} took an effect of {lease} with epoch {epoch}, which is not live")
            return
        for part in live.parts:
            if is_exclusive(part):
                highest = self._highest.get(part.resource, epoch)
                if epoch < highest:
                    self.fail("L3", f"{part.resource} had effects of epoch {highest}, and now of {epoch}")
                self._highest[part.resource] = epoch

    def effect_refused(
        self, node: NodeProcess, holder: HolderProcess, lease: LeaseId, epoch: Epoch, error: SubletError, left_true: int
    ) -> None:
        """The fence refused an effect. If it left in time and travelled fast, expiry is no reason."""
        world = self._world
        if not isinstance(error, LeaseExpired) or not world.scenario.true_clocks:
            return
        if holder.holder is None or holder.holder.lease != lease:
            return
        if lease in self._yielded:  # while the call was on its way: its time had not run out
            return
        timeout_ns = min(5 * _S, holder.holder.ttl_ns // 10)
        granted = self._granted_ns.get(lease, 0)
        timeout_ns = min(timeout_ns, granted // 10)
        if world.now - left_true <= timeout_ns * 9 // 10:
            self.fail("L6", f"a call of {lease} that left in time found it expired on {node.name}")

    # ---- holders ----

    def believes(self, proc: HolderProcess, holder: Holder, sent_ns: int, left_ns: int) -> None:
        """A holder was granted time. By the rules it may use this much of it, and by no clock more than there is."""
        slower = -int(-left_ns * RHO // 1)
        belief_ns = sent_ns + max(0, left_ns - slower - min(5 * _S, left_ns // 10))
        if belief_ns >= self._belief_ns.get(holder.lease, belief_ns):
            self._granted_ns[holder.lease] = left_ns
        self._belief_ns[holder.lease] = max(belief_ns, self._belief_ns.get(holder.lease, belief_ns))
        deadline_ns = holder.deadline_ns
        office = self._world.office
        if deadline_ns is None or office.ledger is None or not office.opened:  # its books may be a backup's, and then
            return  # nothing of them goes on
        lease = office.ledger.state.leases.get(holder.lease)
        if lease is None or lease.deadline_ns is None or lease.status not in LIVE_STATES or lease.epoch != holder.epoch:
            return
        if proc.clock.true_ns(deadline_ns) > office.clock.true_ns(lease.deadline_ns):
            self.fail("L6", f"{proc.name} believes to have {holder.lease} for longer than the office thinks")

    def starts(self, proc: HolderProcess, holder: Holder) -> None:
        """A holder begins something on the device."""
        if proc.clock.now_ns() >= self._belief_ns.get(holder.lease, 0):
            self.fail("L7", f"{proc.name} started work on {holder.lease} after its own deadline")

    def gave_up(self, proc: HolderProcess, holder: Holder) -> None:
        """A holder says that it is over."""
        office = self._world.office
        if office.ledger is None or holder.deadline_ns is None or proc.clock.now_ns() >= holder.deadline_ns:
            return
        lease = office.ledger.state.leases.get(holder.lease)
        if lease is not None and lease.status in LIVE_STATES and lease.epoch == holder.epoch and not proc.let_go:
            left_s = (holder.deadline_ns - proc.clock.now_ns()) / _S
            self.fail("L7", f"{proc.name} gave {holder.lease} up {left_s:.1f} s early, although nobody had refused it")

    # ---- once a second, and at the end ----

    def look(self) -> None:
        """What must not be late."""
        world = self._world
        office = world.office
        awake_ns = world.now - max(office.awake_since_true, office.paused_until)
        if office.ledger is not None and office.opened and not office.is_syncing and awake_ns > LATE_NS:
            now_ns = office.clock.now_ns()
            for lease in office.ledger.state.leases.values():
                due_ns = None if lease.status is LeaseStatus.ENDED else office.ledger.state.due_at(lease)
                if due_ns is not None and now_ns - due_ns > LATE_NS:
                    late_s = (now_ns - due_ns) / _S
                    self.fail("L5", f"the time of {lease.id} ({lease.status}) was over {late_s:.1f} s ago")
            self._idle_hands.look(office.ledger.state, now_ns)
            self._bound.look(office.ledger.state, max(office.awake_since_true, office.paused_until))
        else:
            self._idle_hands.forget()
        for node in world.nodes:
            if not node.alive or world.now <= node.paused_until:
                continue
            if node.embedded:
                self._supervised.look(node)
            for entry in node.agent.fence:
                word_true = self._word_true.get(entry.lease)
                most_ns = 2 * self._ttl_ns.get(entry.lease, 0) * 5 // 4 + 65 * _S
                if word_true is not None and world.now - word_true > most_ns:
                    silent_s = (world.now - word_true) / _S
                    self.fail("L10", f"{entry.lease} is live on {node.name} {silent_s:.0f} s after its last renewal")

    def finish(self) -> None:
        """The accounts."""
        office = self._world.office
        if office.ledger is not None and not office.is_syncing and office.opened:
            audit(office, self.fail)
            self._kept.finish()


def _can_be_suspended(state: State, lease: LeaseRecord) -> bool:
    """Whether there is a way to keep its guests: devices that suspend, held in a class that allows it, and no more."""
    gpus = [part for part in lease.parts if part.kind is Kind.GPU]
    kinds = {part.kind for part in lease.parts}
    able = all(state.resources[part.resource].device.suspend is not Suspend.NONE for part in gpus)
    kept = all(part.exclusivity in (Exclusivity.SHARED, Exclusivity.SESSION) for part in gpus)
    return bool(gpus) and able and kept and kinds <= {Kind.GPU, Kind.CPU}
