"""What happens by time: waiting requests are granted, victims chosen, deadlines enforced.

``schedule`` runs after every command that may have made room. It walks the queue once, in order; what does not fit is
not tried again in the same walk for a request of the same shape, so a long line of alike requests costs one look each.

Nothing is looked at because time has passed, but at the moments at which time changes something: a lease becomes one
that may be taken (``_Moments``), an idle holder has rested, a quota of device time has room again. What came in between
(a request, a lease, room) is looked at in the same way, at most once in ``replan_every_ns``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from typing import NamedTuple

from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import (
    admission,
    budgets,
    burst_credit,
    parking,
    preemption,
    promised_parts,
    replacement,
    reservations,
    volumes,
)
from sublet.office.ledger import events as ev
from sublet.office.ledger.placement import FreeRooms, RoomsByNode, fit, fits_without_leases
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import InOrder, goes_before, kinds_of, position
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.replacement import held_since_ns
from sublet.office.ledger.state import State, is_particular
from sublet.office.ledger.step import Step
from sublet.values import BudgetId, Exclusivity, Kind, LeaseId, NodeId, Tier
from sublet.wire.orders import Part

ENDS_PER_TICK = 500
"""Leases whose time has come that are handled in one tick; renewals get their turn in between."""
PLANS_PER_SETTLE = 32
"""Waiting requests for which victims are looked for in one pass: half of them the first in line, half in turn, in as
many passes as it takes for all to have had their look at what has changed."""
WALK_MAX = 500
"""Waiting requests that are looked at when something came free; within an interval after it all of them are. So a long
line makes no release slow, and costs a request far back that would fit at most that interval."""
PLAN_AGAIN_NS = 50_000_000
"""Holders that become idle are looked at for waiting requests at most this often, however many there are."""
FORGET_AT_ONCE = 100
"""Ended leases are forgotten in groups of at least so many, unless they are old."""
_FOR_RESERVATIONS = frozenset(
    {
        ev.Claimed,
        ev.Cleared,
        ev.ForeignSeen,
        ev.NodeDrained,
        ev.NodeJoined,
        ev.NodeLost,
        ev.NodeReturned,
        ev.Promised,
        ev.Quarantined,
        ev.ReservationRemoved,
        ev.ReservationSet,
        ev.ResourceFaulted,
        ev.ResourceLost,
        ev.ResourceReturned,
        ev.Spared,
        ev.TenantSet,
    }
)
"""After these a reservation may need another device, or there may be a lease that has to leave one."""
_FOR_MOMENTS = frozenset({ev.Claimed, ev.GroupSet, ev.Noticed, ev.PriorityGained, ev.Queued, ev.Rebased, ev.Spared})
"""After these all who wait are to be looked at, at once or later."""
STALE_MOMENTS_MAX = 256
"""Entries among the moments that may be stale, besides as many as are not."""
_OF_NO_LEASE = LeaseId("")


class _Guard(NamedTuple):
    """Of a request whose patience is over."""

    rank: int
    """Of its tier."""
    lease: LeaseId
    lets_newcomers_past: bool
    """It is on a further turn: newcomers pass it until it has waited for the maximum hold."""


class Schedule:
    """What the scheduler remembers between steps. None of it needs to survive: it is found again by looking."""

    def __init__(self, policy: Policy, state: State) -> None:
        self.policy = policy
        self._settled_at_version = -1
        self._moments = _Moments(policy, state)
        self._look_at_ns: int | None = 0
        """When the whole line is looked at; None: nothing has changed since it was."""
        self._looked_at_ns = -policy.replan_every_ns
        self._look_again_ns: int | None = None
        """When shares may have come to be in another order, where that decides: weights differ, and a holder of more
        weight yields once its share is the larger one; or room is kept for a request, and another stands before it."""
        self._looks_left = 0
        """Passes until all who wait have had their look at what has changed."""
        self._yields: list[tuple[int, LeaseId]] = []
        """Heap of idle holders' leases, by the moment from which on they may be taken."""
        self._planned_at_ns = 0
        self._turn = 0
        """How far the looks in turn have come."""
        self._reservations_at_ns: int | None = 0
        """The instant of the wall clock at which a reservation takes its next step."""
        self._wall_ahead_ns = 0
        """How far the wall clock was ahead of the other when it was last seen."""
        self._budgets: dict[BudgetId, tuple[int | None, int | None]] = {}
        """When each budget is looked at: by the clock of leases, and by the wall clock (the end of its window)."""
        self._next_budget: tuple[int | None, int | None] = (None, None)
        """The first moments of all budgets."""
        self._guarded: dict[tuple[NodeId, Kind], _Guard] = {}
        """What is kept for a patient head of the line, on nodes that could have it."""
        self._is_policy_new = True

    def set_policy(self, policy: Policy) -> None:
        """Decide by this policy from the next command on. One of its limits may be all that a request lacked."""
        self.policy, self._is_policy_new, self._settled_at_version = policy, True, -1
        self._moments.set_policy(policy)

    def next_wake_ns(self, state: State, now: Now | None = None) -> int | None:
        """When time alone will change something. ``now``: as the clocks are by now, where one of them may have been set
        since the last command."""
        wake_ns = _sooner(state.next_timer_ns(), state.next_volume_ns())
        if self._reservations_at_ns:
            ahead_ns = self._wall_ahead_ns if now is None else now.wall_ns - now.ns
            wake_ns = _sooner(wake_ns, self._reservations_at_ns - ahead_ns)
        at_ns, ends_wall_ns = self._next_budget
        wake_ns = _sooner(wake_ns, at_ns)
        if ends_wall_ns is not None:
            ahead_ns = self._wall_ahead_ns if now is None else now.wall_ns - now.ns
            wake_ns = _sooner(wake_ns, ends_wall_ns - ahead_ns)
        if state.queued_count:
            wake_ns = _sooner(_sooner(wake_ns, self._look_at_ns), self._moments.next_ns())
            wake_ns = _sooner(wake_ns, self._look_again_ns)
            while self._yields and not _is_idle(state, self._yields[0][1]):
                heappop(self._yields)
            if self._yields:
                wake_ns = _sooner(wake_ns, max(self._yields[0][0], self._planned_at_ns + PLAN_AGAIN_NS))
        if state.ended:
            wake_ns = _sooner(wake_ns, _ended_at(state.leases[state.ended[0]]) + self.policy.ended_keep_ns)
        return wake_ns

    def rooms_for(self, state: State, lease: LeaseRecord, now_ns: int) -> RoomsByNode:
        """Rooms as this lease, waiting or just come, may see them: without what is promised to others, and without
        the nodes where it would have to go past a patient request."""
        return self._open_to(lease, promised_parts.rooms_for(state, lease), self._kept_from(state, lease, now_ns))

    def _kept_from(
        self, state: State, lease: LeaseRecord, now_ns: int, *, is_for_taking: bool = False, is_behind: bool = False
    ) -> frozenset[_Guard]:
        """What is kept for others than this lease. One that stands before a patient request in the queue does not go
        past it, but takes no lease there either (``is_for_taking``): what is taken there is for the patient one.
        ``is_behind``: it is known to stand behind all of them."""
        if not self._guarded:
            return frozenset()
        return frozenset(
            guard
            for guard in set(self._guarded.values())
            if self._keeps_out(guard, lease)
            and (
                is_for_taking
                or is_behind
                or not goes_before(state, lease, state.leases[guard.lease], now_ns, self.policy)
            )
        )

    def _open_to(self, lease: LeaseRecord, rooms: RoomsByNode, kept_from: frozenset[_Guard]) -> RoomsByNode:
        if not self._guarded:
            return rooms
        open_to_it = {
            node for node in rooms if all(self._guarded.get((node, kind)) not in kept_from for kind in kinds_of(lease))
        }
        return {
            node: node_rooms if node in open_to_it else kept
            for node, node_rooms in rooms.items()
            if (kept := [room for room in node_rooms if room.reserved]) or node in open_to_it
        }

    def _keeps_out(self, guard: _Guard, lease: LeaseRecord) -> bool:
        is_new = not preemption.is_further_turn(lease, self.policy)
        return guard.rank >= lease.tier.rank and guard.lease != lease.id and not (guard.lets_newcomers_past and is_new)

    def _guards_nobody(self, state: State) -> bool:
        """Whether room is kept for a request that has left the queue, or is promised something by now."""
        owners = [state.leases[guard.lease] for guard in self._guarded.values()] if self._guarded else ()
        return any(owner.promise or owner.status is not LeaseStatus.QUEUED for owner in owners)

    def _reserve_nodes(self, state: State, lease: LeaseRecord, now_ns: int) -> None:
        """Its patience is over: the nodes that could have it, if all leases there ended, are kept for it. Where that
        would not do, because something is quarantined, no request is kept out for its sake."""
        kinds = kinds_of(lease)
        unguarded = {node for node in state.rooms_by_node if any((node, kind) not in self._guarded for kind in kinds)}
        if not unguarded:
            return
        is_long = now_ns - lease.asked_at_ns >= self.policy.max_hold_ns
        lets_past = preemption.is_further_turn(lease, self.policy) and not is_long
        guard = _Guard(lease.tier.rank, lease.id, lets_past)
        for node, node_rooms in promised_parts.rooms_for(state, lease).items():
            if node in unguarded and fits_without_leases(lease.wants, lease.tenant, node_rooms):
                for kind in kinds:
                    self._guarded.setdefault((node, kind), guard)

    def tick(self, step: Step) -> None:
        """Handle what is due by now, in bounded number."""
        for _ in range(ENDS_PER_TICK):
            lease = step.state.pop_due(step.now.ns)
            if lease is None:
                break
            self.on_timer(step, lease)
        step.act_as_system()
        volumes.expire(step)
        self._forget(step)

    def on_timer(self, step: Step, lease: LeaseRecord) -> None:
        """The time of this lease, in whatever state it is, has come."""
        now_ns = step.now.ns
        step.act_as_system()
        match lease.status:
            case LeaseStatus.QUEUED if lease.wait_until_ns is None or lease.wait_until_ns > now_ns:
                step.emit(ev.PriorityGained(lease=lease.id))
            case LeaseStatus.QUEUED:
                step.end(lease, EndReason.REFUSED, "it was not granted within the time it could wait")
            case LeaseStatus.GRANTED if lease.offered:
                if lease.full_wants:  # there is nothing larger to go back into the line for
                    step.end(lease, EndReason.HOLDER_GONE, "the offer ran out", grace_ns=0)
                elif lease.wait_until_ns is None or lease.wait_until_ns > now_ns:
                    step.ungrant(lease, "the offer ran out")
                else:
                    step.end(lease, EndReason.REFUSED, "the offer ran out", grace_ns=0)
            case LeaseStatus.GRANTED:
                step.end(lease, EndReason.HOLDER_GONE, "the grant was not claimed in time", grace_ns=0)
            case LeaseStatus.ACTIVE | LeaseStatus.NOTICED:
                if not parking.keep(step, lease):
                    step.end_when_due(lease)
            case _:
                raise AssertionError(f"{lease.id} is {lease.status} and has no time")

    def schedule(self, step: Step) -> None:
        """Grant every request that fits now, and look for victims for those that do not, if it is time to. What has
        come with this command is looked at in a turn of its own."""
        if self._is_policy_new:
            for tenant in list(step.state.books.bursts):
                burst_credit.go_by_quota(step, tenant)
            self._is_policy_new = False
        self.update_budgets(step)
        if not step.state.books.reservations:
            self._reservations_at_ns = None
            self._grant_fitting(step)
        else:
            self.update_reservations(step)
            before = len(step.events)
            self._grant_fitting(step)
            self.update_reservations(step, before)
        self.update_budgets(step)
        if self._moments.note(step.events, step.now.ns):
            self._schedule_pass(step.state, step.now.ns + 1)

    def is_reservation_due(self, now: Now) -> bool:
        """Whether a reservation takes a step before anything is decided at this moment."""
        return self._reservations_at_ns is not None and now.wall_ns >= self._reservations_at_ns

    def is_budget_due(self, state: State, now: Now) -> bool:
        """Whether one is to be looked at before anything is decided at this moment."""
        return bool(state.books.budgets) and bool(self._budgets_due(state, now))

    def _budgets_due(self, state: State, now: Now) -> list[BudgetId]:
        """With many budgets, most commands concern a few of them and come at no moment of any."""
        known, budgets_now = self._budgets, state.books.budgets
        found = [name for name in state.budgets_changed if name in budgets_now]
        if len(known) < len(budgets_now) or _has_come(self._next_budget, now):
            found += [name for name in budgets_now if name not in known or _has_come(known[name], now)]
        return sorted(set(found))

    def update_budgets(self, step: Step) -> None:
        """Look at the budgets of which something has changed, or whose moment has come, until nothing follows."""
        state, now = step.state, step.now
        if not (state.books.budgets or self._budgets):
            state.budgets_changed.clear()
            return
        self._wall_ahead_ns = now.wall_ns - now.ns
        if not self._budgets.keys() <= state.books.budgets.keys():
            budgets.lift(step)
            self._budgets = {name: at for name, at in self._budgets.items() if name in state.books.budgets}
            self._note_next_budget()
        while due := self._budgets_due(state, now):
            state.budgets_changed.clear()
            for name in due:
                found = budgets.update_budget(step, state.books.budgets[name])
                self._budgets[name] = found.next_ns, found.ends_wall_ns
            self._note_next_budget()
        state.budgets_changed.clear()

    def _note_next_budget(self) -> None:
        moments = self._budgets.values()
        self._next_budget = (
            min((at_ns for at_ns, _ in moments if at_ns is not None), default=None),
            min((ends_wall_ns for _, ends_wall_ns in moments if ends_wall_ns is not None), default=None),
        )

    def update_reservations(self, step: Step, begin: int = 0) -> None:
        """``begin``: the first of the step's events that they have not seen."""
        state, now = step.state, step.now
        self._wall_ahead_ns = now.wall_ns - now.ns
        if not state.books.reservations:
            self._reservations_at_ns = None
        elif self.is_reservation_due(now) or any(type(event) in _FOR_RESERVATIONS for event in step.events[begin:]):
            reservations.update_reservations(step)
            self._reservations_at_ns = reservations.next_wall_ns(state, now.wall_ns, self.policy)

    def _grant_fitting(self, step: Step) -> None:
        state, now_ns = step.state, step.now.ns
        if not state.queued_count and not self._yields:  # nothing waits, and nothing is about to yield
            self._moments.have_come(now_ns)
            self._guarded, self._look_at_ns, self._settled_at_version = {}, None, state.capacity_version
            return
        changed = state.capacity_version != self._settled_at_version or self._guards_nobody(state)
        if changed:
            self._schedule_pass(state, now_ns)
        due, yields = self._is_due(state, now_ns), self._holders_yield(step)
        if not (changed or due or yields):
            return
        if state.queued_count:
            self._grant_promised(step)
            self._admit(step, None if due else WALK_MAX)
            self._drop_above_limits(step)
        else:
            self._guarded, self._look_at_ns = {}, None
        if (due or yields) and state.queued_count:
            start, takeable_by = self._next_turn(state), preemption.takeable(state, now_ns, self.policy)
            if self._may_make_room(state, takeable_by):
                in_vain: set[tuple[object, ...]] = set()
                for lease in self._to_plan_for(state, now_ns, start):
                    takeable = takeable_by.request(lease, self.policy)
                    if is_particular(lease) or takeable.may_suffice(lease.wants):
                        self._make_room(step, lease, takeable, in_vain)
                        self._note_pauses(state, lease, takeable, now_ns)
            self._planned_at_ns = now_ns
        if due:
            self._looked_at_ns = now_ns
            self._look_again_ns = now_ns + self.policy.turn_least_ns if self._is_by_shares(state) else None
            self._looks_left -= 1
            self._look_at_ns = now_ns + self.policy.replan_every_ns if self._looks_left > 0 else None
        if self._guards_nobody(state):  # what was kept for it is open to the others
            self._schedule_pass(state, now_ns + 1)
        self._settled_at_version = state.capacity_version

    def _may_make_room(self, state: State, takeable_by: preemption.TakeableBy) -> bool:
        """Whether there could be victims for any request that waits. Few of many differ in what they want, and often
        that is a whole machine, where what may be taken is a device here and there."""
        takeable = takeable_by.newcomers
        if not takeable.are_some:
            return False
        # what is replaced, and a volume, are parts that count as free to one request alone
        return state.waiting_particular > 0 or any(map(takeable.may_suffice, state.waiting_wants))

    def _is_by_shares(self, state: State) -> bool:
        """Whether something comes of it when shares change with time: see ``_look_again_ns``."""
        return state.weights_differ or (bool(self._guarded) and state.queued_count > 1)

    def _schedule_pass(self, state: State, at_ns: int) -> None:
        """Something has changed: all who wait are to be looked at, not before ``at_ns``."""
        self._looks_left = -(-state.queued_count // (PLANS_PER_SETTLE // 2))
        if self._look_at_ns is None:
            self._look_at_ns = max(at_ns, self._looked_at_ns + self.policy.replan_every_ns)

    def _is_due(self, state: State, now_ns: int) -> bool:
        shares_are_due = self._look_again_ns is not None and self._look_again_ns <= now_ns
        if (self._moments.have_come(now_ns) or shares_are_due) and state.queued_count:
            self._schedule_pass(state, now_ns)
            if shares_are_due:  # that look says when the next is
                self._look_again_ns = None
        return state.queued_count > 0 and self._look_at_ns is not None and now_ns >= self._look_at_ns

    def will_yield(self, state: State, lease: LeaseRecord) -> None:
        """Its holder is idle. If it still is when it has been for long enough, a waiting request may have the lease."""
        if lease.idle_since_ns is not None:
            save_ns = state.saves.get(lease.id, 0)
            rest_ns = self.policy.idle_before_yielding_ns(lease.moving_ns, save_ns)
            heappush(self._yields, (lease.idle_since_ns + rest_ns, lease.id))
            self._moments.add(lease.idle_since_ns + self.policy.pause_ns, lease.id)

    def _holders_yield(self, step: Step) -> bool:
        """Whether waiting requests may take from holders that are idle for long enough since the last look. One that
        has notice already does not wait for its moment."""
        state, now_ns = step.state, step.now.ns
        if not self._yields or self._yields[0][0] > now_ns:
            return False
        if state.queued_count and now_ns < self._planned_at_ns + PLAN_AGAIN_NS:
            return False
        are_some = False
        while self._yields and self._yields[0][0] <= now_ns:
            lease = state.leases.get(heappop(self._yields)[1])
            if lease is not None and preemption.is_at_rest(lease, state, now_ns, self.policy):
                parking.give_way_early(step, lease)
                are_some = True
        return are_some and state.queued_count > 0

    def make_room_if_next(self, step: Step, lease: LeaseRecord) -> None:
        """Look for victims at once for a newcomer; behind others it has to wait until they have had their look, but for
        what is reserved for its group, which is of no use to them."""
        state = step.state
        if self._is_by_shares(state):  # when they are next compared is said by the look
            self._schedule_pass(state, step.now.ns + 1)
        takeable = preemption.takeable(state, step.now.ns, self.policy).request(lease, self.policy)
        if not takeable.are_some or not (is_particular(lease) or takeable.may_suffice(lease.wants)):
            return
        is_next = self._is_next(state, lease, step.now.ns)
        has_reserved = Kind.GPU in kinds_of(lease) and any(
            state.reserved_group(one) == state.group_of(lease.tenant) for one in state.reserved_by
        )
        if is_next or has_reserved:
            step.act_as_system()
            self._make_room(step, lease, takeable, set(), only_reserved=not is_next)
        if not is_next:
            self._schedule_pass(state, step.now.ns + 1)

    def _is_next(self, state: State, lease: LeaseRecord, now_ns: int) -> bool:
        """Whether whatever goes before it in the queue is promised something."""
        ahead = position(state, lease, now_ns, self.policy) - 1
        if not 0 < ahead <= len(state.promises):
            return not ahead
        return next(other for other in InOrder(state, now_ns, self.policy) if not other.promise) is lease

    def _next_turn(self, state: State) -> int:
        """Which of the requests behind the first in line have their look in this pass: from where on."""
        behind = state.queued_count - len(state.promises) - PLANS_PER_SETTLE // 2
        if behind <= 0:
            return 0
        start = self._turn % behind
        self._turn = start + PLANS_PER_SETTLE // 2
        return start

    def _to_plan_for(self, state: State, now_ns: int, start: int) -> list[LeaseRecord]:
        """The first in line, and as many behind them from ``start`` on."""
        half = PLANS_PER_SETTLE // 2
        waiting = (lease for lease in InOrder(state, now_ns, self.policy) if not lease.promise)
        first, passed, in_turn = (list(islice(waiting, most)) for most in (half, start, half))
        return [*first, *in_turn, *passed[: half - len(in_turn)]]

    def _make_room(
        self,
        step: Step,
        lease: LeaseRecord,
        takeable: preemption.Takeable,
        in_vain: set[tuple[object, ...]],
        *,
        only_reserved: bool = False,
    ) -> None:
        """Evict and admit in one step: notice the victims and promise their parts to the request. ``in_vain``: requests
        for which there were no victims at this moment. ``only_reserved``: of devices, only those that are reserved for
        its group."""
        state, policy = step.state, self.policy
        if admission.own_limit(state, lease, step.now, with_promises=True) is not None:
            return
        kept_from = self._kept_from(state, lease, step.now.ns, is_for_taking=True)
        alike = _alike(state, lease, kept_from, policy) if takeable.are_at_rest else None
        if alike is not None and preemption.lets_pauses_pass(lease, step.now.ns, policy):
            alike = None  # whose request it is makes a difference
        if alike is not None:
            alike = (*alike, preemption.is_further_turn(lease, policy))
            if alike in in_vain:
                return
        rooms = self._open_to(lease, promised_parts.rooms_for(state, lease), kept_from)
        if only_reserved:
            rooms = {
                node: [room for room in node_rooms if room.reserved or room.kind is not Kind.GPU]
                for node, node_rooms in rooms.items()
            }
        freed = replacement.with_its_parts_free(state, lease, rooms, step.now.ns, policy)
        plan = preemption.plan(lease, rooms if freed is None else freed, state, step.now.ns, policy, takeable)
        if plan is None:
            if alike is not None:
                in_vain.add(alike)
            return
        in_vain.clear()  # what leaves for this request is no more on its way to others
        victims = tuple(v.lease.id for v in plan.victims)
        if freed is not None and lease.replaces is not None:
            victims = (*victims, lease.replaces)  # the last to go, without a notice, once the others have left
        step.emit(ev.Promised(lease=lease.id, node=plan.node, parts=plan.parts, victims=victims))
        for victim in plan.victims:
            notice_ns = (
                parking.bound_ns(step, victim.lease) if victim.is_idle else policy.notice_for_ns(victim.lease.tier)
            )
            step.notice(
                victim.lease,
                victim.reason,
                notice_ns,
                _why_taken(victim, lease),
                beneficiary=lease.id,
                when_safe=victim.is_idle,
            )

    def _note_pauses(self, state: State, lease: LeaseRecord, takeable: preemption.Takeable, now_ns: int) -> None:
        """For a further turn that waits: when a pause is no longer kept from it, since shares change with time."""
        if lease.promise or not preemption.lets_pauses_pass(lease, now_ns, self.policy):
            return
        everyone = (one for held in state.on_node.values() for one in held)
        leases: Iterable[LeaseId] = everyone if takeable.leases is None else takeable.leases
        for other in map(state.leases.__getitem__, leases):
            if other.status is LeaseStatus.ACTIVE:
                self._moments.add(preemption.kept_in_pause_until_ns(other, lease, state, now_ns, self.policy))

    def _grant_promised(self, step: Step) -> None:
        state = step.state
        for lease_id in list(state.promises):
            lease = state.leases[lease_id]
            if admission.own_limit(state, lease, step.now) is not None:  # its tenant got something else meanwhile
                step.drop_promise(lease)
                continue
            if promised_parts.can_be_kept(state, lease):
                assert lease.promise_node is not None
                step.grant(lease, lease.promise_node, lease.promise)
                continue
            kept_from = self._kept_from(state, lease, step.now.ns)
            found, old = self._fit(state, lease, kept_from), replacement.present(state, lease)
            if found is not None:  # room came from elsewhere: the victims may stay
                step.grant(lease, *found)
            elif old is not None and promised_parts.can_be_kept(state, lease, without=old):
                step.end_present(lease)  # it is the last that has what was promised
            elif promised_parts.victims_left(state, lease):
                step.drop_promise(lease)

    def _drop_above_limits(self, step: Step) -> None:
        """A request that was granted now may have used up the ceiling of a group to which more is promised. Victims of
        such a promise would leave for nothing."""
        for lease_id in list(step.state.promises):
            lease = step.state.leases[lease_id]
            if admission.own_limit(step.state, lease, step.now) is not None:
                step.drop_promise(lease)

    def _admit(self, step: Step, most: int | None) -> None:
        state, now_ns, policy = step.state, step.now.ns, self.policy
        hopeless: set[tuple[object, ...]] = set()
        full: set[tuple[object, ...]] = set()
        free, is_behind = FreeRooms(state.rooms_by_node), True
        self._guarded = {}
        if self._is_over(state, free, now_ns, is_behind=is_behind):
            return
        for lease in islice(InOrder(state, now_ns, policy), most):
            if lease.promise:
                continue
            kept = len(self._guarded)
            shape = _shape(state, lease)
            if shape not in hopeless:
                if admission.own_limit(state, lease, step.now) is not None:
                    if admission.over_seconds(state, lease, step.now) is not None:
                        self._moments.add(admission.seconds_free_at(state, lease, step.now))
                    continue
                # a volume, and what is replaced, are parts that count as free to this request alone
                if is_particular(lease) or free.have_room_for(lease.wants):
                    kept_from = self._kept_from(state, lease, now_ns, is_behind=is_behind)
                    alike = _alike(state, lease, kept_from, policy)
                    if alike is None or alike not in full:
                        if self._grant_one(step, lease, kept_from):
                            is_behind = is_behind and not kept  # shares have changed, and with them the order
                            if self._is_over(state, free, now_ns, is_behind=is_behind):
                                return
                            continue
                        if alike is not None:
                            full.add(alike)
                hopeless.add(shape)
            if now_ns - lease.asked_at_ns >= policy.gang_patience_ns:
                self._reserve_nodes(state, lease, now_ns)
                if len(self._guarded) > kept and self._is_over(state, free, now_ns, is_behind=is_behind):
                    return

    def _grant_one(self, step: Step, lease: LeaseRecord, kept_from: frozenset[_Guard]) -> bool:
        state = step.state
        found = self._fit(state, lease, kept_from)
        if found is not None:
            step.grant(lease, *found)
            return True
        found = self._fit_in_its_place(step, lease)
        if found is not None:
            step.replace(lease, *found)
        return found is not None

    def _is_over(self, state: State, free: FreeRooms, now_ns: int, *, is_behind: bool) -> bool:
        """Whether no request further down the queue can be granted anything, nor have room kept for it. Few of many
        requests differ in what they want, so this is seen without a walk. ``is_behind``: they stand behind those for
        which room is kept."""
        if state.waiting_particular or state.limits_time or state.reserved_by:
            return False
        for wants in state.waiting_wants:
            if free.have_room_for(wants):
                closed = set()
                if is_behind:
                    kinds = {want.kind for want in wants}
                    closed = {
                        node
                        for (node, kind), guard in self._guarded.items()
                        if kind in kinds and not guard.lets_newcomers_past
                    }
                if not closed or free.have_room_outside(closed, wants):
                    return False
        kinds = {want.kind for wants in state.waiting_wants for want in wants}
        if not any(
            room.kind in kinds and (node, room.kind) not in self._guarded
            for node, node_rooms in state.rooms_by_node.items()
            for room in node_rooms
        ):
            return True
        asked_ns = state.first_asked_ns()
        return asked_ns is None or now_ns - asked_ns < self.policy.gang_patience_ns

    def _fit(self, state: State, lease: LeaseRecord, kept_from: frozenset[_Guard]) -> tuple[NodeId, list[Part]] | None:
        rooms = self._open_to(lease, promised_parts.rooms_for(state, lease), kept_from)
        return admission.place(lease, state, rooms, self.policy)

    def _fit_in_its_place(self, step: Step, lease: LeaseRecord) -> tuple[NodeId, list[Part]] | None:
        """Where it fits if its holder's present lease ends."""
        state, policy = step.state, self.policy
        rooms = self.rooms_for(state, lease, step.now.ns)
        freed = replacement.with_its_parts_free(state, lease, rooms, step.now.ns, policy)
        return None if freed is None else fit(lease.wants, lease.tenant, freed, mix=policy.share_across_tenants)

    def _forget(self, step: Step) -> None:
        """Ended leases are remembered for a while; the audit log remembers them for good."""
        state, policy = step.state, self.policy
        old_ns = step.now.ns - policy.ended_keep_ns
        too_many = len(state.ended) - policy.ended_keep_max
        oldest = islice(state.ended, ENDS_PER_TICK)
        old = list(takewhile(lambda lease: _ended_at(state.leases[lease]) <= old_ns, oldest))
        if old or too_many >= FORGET_AT_ONCE:
            step.emit(ev.Forgotten(leases=tuple(islice(state.ended, max(len(old), too_many)))))


class _Moments:
    """When time alone makes something of a waiting request: a lease has run for the minimum or the maximum, a cool-down
    is over, the patience of a request is. Kept in steps of the interval between looks, so many leases of one second are
    one moment. A moment of a lease that has ended, or of a request that waits no more, is none."""

    def __init__(self, policy: Policy, state: State) -> None:
        self._policy, self._state = policy, state
        self._heap: list[tuple[int, LeaseId]] = []
        self._known: set[tuple[int, LeaseId]] = set()
        self._most = STALE_MOMENTS_MAX
        """With more entries, those that are stale are dropped."""
        self._find()

    def set_policy(self, policy: Policy) -> None:
        """What is due by other durations is due at other moments."""
        self._policy = policy
        self._find()

    def _find(self) -> None:
        """After a restart, on another clock, or where there are more moments than before."""
        for lease in self._state.leases.values():
            self._add_of(lease)
        for cooling in self._state.books.cool_until_ns.values():
            for until_ns in cooling.values():
                self.add(until_ns)

    def note(self, events: Sequence[ev.Event], now_ns: int) -> bool:
        """Take what has happened; whether waiting requests are to be looked at because of it."""
        news = False
        for event in events:
            if type(event) not in _FOR_MOMENTS:  # as most are, and a match would take long to see it
                continue
            match event:
                case ev.Claimed(lease=lease_id):
                    lease = self._state.leases[lease_id]
                    self._add_of(lease)
                    if not preemption.takeable_at_once(lease, self._state, now_ns, self._policy):
                        continue
                case ev.Queued():
                    lease = self._state.leases[event.lease.id]
                    self._add_of(lease)
                    if not self._is_of_consequence(lease):
                        continue
                case ev.Noticed(notice=notice):
                    if notice.beneficiary is not None:
                        self.add(now_ns + self._state.books.cool_down_ns)
                    continue
                case ev.GroupSet():  # with the first floor there are more moments
                    self._find()
                    continue
                case ev.Rebased():
                    self._find()
                case _:
                    pass
            news = True
        return news

    def _is_of_consequence(self, new: LeaseRecord) -> bool:
        """Whether a request that has come makes something of others. One that waits has had a look, or its look is due
        (``make_room_if_next``). One that was granted may be above what was promised to its group, and with the share of
        its tenant or group grows the chance that other leases of theirs are taken."""
        state = self._state
        is_alone = not state.books.groups and state.held_by(new.tenant).leases == 1
        return new.status is not LeaseStatus.QUEUED and not (is_alone and not state.promises)

    def add(self, at_ns: int | None, lease: LeaseId = _OF_NO_LEASE) -> None:
        if at_ns is not None:
            entry = self._in_steps(at_ns), lease
            if entry not in self._known:
                self._known.add(entry)
                heappush(self._heap, entry)
                if len(self._heap) > self._most:
                    self._heap = [known for known in self._heap if self._is_current(known)]
                    heapify(self._heap)
                    self._known, self._most = set(self._heap), 2 * len(self._heap) + STALE_MOMENTS_MAX

    def next_ns(self) -> int | None:
        while self._heap and not self._is_current(self._heap[0]):
            self._known.discard(heappop(self._heap))
        return self._heap[0][0] if self._heap else None

    def have_come(self, now_ns: int) -> bool:
        """Whether a moment has come since the last question."""
        come = False
        while self._heap and self._heap[0][0] <= now_ns:
            entry = heappop(self._heap)
            self._known.discard(entry)
            come = come or self._is_current(entry)
        return come

    def _is_current(self, entry: tuple[int, LeaseId]) -> bool:
        at_ns, lease_id = entry
        lease = self._state.leases.get(lease_id)
        return lease_id == _OF_NO_LEASE or (lease is not None and at_ns in map(self._in_steps, self._of(lease)))

    def _in_steps(self, at_ns: int) -> int:
        every_ns = self._policy.replan_every_ns
        return -(-at_ns // every_ns) * every_ns

    def _add_of(self, lease: LeaseRecord) -> None:
        for at_ns in self._of(lease):
            self.add(at_ns, lease.id)

    def _of(self, lease: LeaseRecord) -> Iterator[int]:
        """The moments of a request that waits, or of a lease that is held."""
        policy, is_further = self._policy, preemption.is_further_turn(lease, self._policy)
        if lease.status is LeaseStatus.QUEUED:
            yield lease.asked_at_ns + policy.gang_patience_ns
            if is_further:
                yield preemption.preempts_from_ns(lease, policy)
                yield lease.asked_at_ns + policy.max_hold_ns
        elif lease.status in LIVE_STATES and lease.claimed_at_ns is not None:
            since_ns = held_since_ns(lease)
            yield since_ns + policy.max_hold_ns
            if lease.tier is Tier.BATCH or (lease.tier is Tier.INTERACTIVE and self._state.has_floors):
                yield since_ns + policy.min_run_batch_ns
            if is_further:
                yield since_ns + preemption.least_turn_ns(lease, policy)
            if lease.idle_since_ns is not None:
                yield lease.idle_since_ns + policy.pause_ns


def _shape(state: State, lease: LeaseRecord) -> tuple[object, ...]:
    """Where one request does not fit, no other of this shape does later in the same walk."""
    if not is_particular(lease):
        return lease.wants, lease.tenant, bool(state.reserved_by) and lease.tier is Tier.SPOT
    return (
        lease.wants,
        tuple(sorted(lease.selector.items())),
        lease.tenant,
        lease.name if state.volume_of(lease) is not None else None,
        lease.resume,
        lease.replaces,
        bool(state.reserved_by) and lease.tier is Tier.SPOT,  # it may see devices that are lent
    )


def _alike(state: State, lease: LeaseRecord, kept_from: frozenset[_Guard], policy: Policy) -> tuple[object, ...] | None:
    """The same for requests of other tenants; None for one that sees other rooms than they do."""
    if is_particular(lease) or state.reserved_by or state.group(state.group_of(lease.tenant)).ceiling is not None:
        return None
    mixes = policy.share_across_tenants or all(want.exclusivity is not Exclusivity.SHARED for want in lease.wants)
    return lease.wants, lease.tier, kept_from, None if mixes else lease.tenant


def _is_idle(state: State, lease_id: LeaseId) -> bool:
    lease = state.leases.get(lease_id)
    return lease is not None and lease.idle_since_ns is not None and lease.status in LIVE_STATES


def _has_come(moments: tuple[int | None, int | None], now: Now) -> bool:
    """By the clock of leases, or by the wall clock."""
    at_ns, ends_wall_ns = moments
    return (at_ns is not None and at_ns <= now.ns) or (ends_wall_ns is not None and ends_wall_ns <= now.wall_ns)


def _sooner(one_ns: int | None, other_ns: int | None) -> int | None:
    if one_ns is None or other_ns is None:
        return one_ns if other_ns is None else other_ns
    return min(one_ns, other_ns)


def _ended_at(lease: LeaseRecord) -> int:
    assert lease.end is not None
    return lease.end.at_ns


def _why_taken(victim: preemption.Victim, request: LeaseRecord) -> str:
    if victim.is_lent:
        return "its device is reserved for the group of a request"
    if victim.is_idle:
        return f"idle, and a request of tier {request.tier} waits"
    if victim.by_floor:
        return "a request within the floor of its group has priority"
    if victim.reason is EndReason.FAIR_SHARE:
        return "held for longer than the maximum while others wait"
    return f"a request of tier {request.tier} goes before tier {victim.lease.tier}"
