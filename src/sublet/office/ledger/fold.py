"""The fold: one function per fact, with its effect on the state and its indexes.

No decision is made here. A fact the state tables do not know raises before anything is changed: it is a bug.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sublet.lease.states import (
    LIVE_STATES,
    LeaseEvent,
    LeaseStatus,
    SliceEvent,
    SliceState,
    next_lease,
    next_slice,
)
from sublet.office.ledger import events as ev
from sublet.office.ledger.burst_credit import remaining
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.fold_spending import (
    account,
    budget_credited,
    budget_reached,
    budget_removed,
    budget_set,
    group_gone,
    prices_set,
    shift_held,
    tenant_gone,
)
from sublet.office.ledger.fold_volumes import VOLUME_FOLD, keep_volume, take_over, volume_attached
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.records import (
    NO_LONGER_THERE,
    LeaseRecord,
    NodeRecord,
    Now,
    ReservedRecord,
    ResourceRecord,
    SliceRecord,
    volume_key,
)
from sublet.values import Kind, LeaseId, ReservationId, Way

if TYPE_CHECKING:
    from sublet.office.ledger.state import State


def apply(state: State, event: ev.Event, now: Now) -> None:
    """Take one fact into the books."""
    FOLD[type(event)](state, event, now)
    if state.books.budgets:
        account(state, event, now)


def _office_opened(state: State, event: ev.OfficeOpened, now: Now) -> None:
    if event.incarnation > state.books.incarnation:
        state.books.incarnation, state.books.next_n = event.incarnation, 1
    state.books.clock_domain = event.clock_domain


def _rebased(state: State, event: ev.Rebased, now: Now) -> None:
    state.books.clock_domain = event.clock_domain
    shift = event.shift_ns
    for meter in state.books.usage.values():
        meter.shift(shift)
    for used in (*state.books.accounts.values(), *state.books.group_accounts.values()):
        used.shift(shift)
    state.books.periods_from_ns += shift
    state.tenants_changed()
    for cooling in state.books.cool_until_ns.values():
        for tenant in cooling:
            cooling[tenant] += shift
    shift_held(state, shift)
    for tenant, burst in state.books.bursts.items():
        state.books.bursts[tenant] = msgspec.structs.replace(burst, at_ns=burst.at_ns + shift)
    for lease in state.leases.values():
        _shift_lease(lease, shift)
        if lease.status in LIVE_STATES:
            lease.extended_ns += event.extended_ns
            lease.number += 1  # an agent on a clock of its own must take the new deadline for news
    state.index_waiting_since()
    state.timers.clear()
    state.armed.clear()
    for lease in state.leases.values():
        state.arm(lease)
    state.volume_timers.clear()
    for volume in state.volumes.values():
        volume.kept_ns = None if volume.kept_ns is None else volume.kept_ns + shift
        volume.until_ns = None if volume.until_ns is None else volume.until_ns + shift
        state.arm_volume(volume)


def _node_joined(state: State, event: ev.NodeJoined, now: Now) -> None:
    found = event.inventory
    known = state.nodes.get(found.node)
    node = NodeRecord(
        id=found.node,
        domain=found.domain,
        labels=dict(found.labels),
        draining=known.draining if known else False,
        lost=known.lost if known else False,
        resources=tuple(dict.fromkeys((known.resources if known else ()) + tuple(d.id for d in found.devices))),
    )
    for device in found.devices:
        resource = state.resources.get(device.id)
        if resource is None:
            condition = SliceState.DRAINING if node.draining else SliceState.FREE
            resource = ResourceRecord(id=device.id, node=node.id, device=device, state=condition)
            state.resources[device.id] = resource
        resource.device = device
        state.rooms[device.id] = Room.of(resource)
    state.nodes[node.id] = node
    state.index_node(node)
    state.capacity_version += 1


def _node_lost(state: State, event: ev.NodeLost, now: Now) -> None:
    node = state.nodes[event.node]
    node.lost = True
    for resource in map(state.resources.__getitem__, node.resources):
        for piece in resource.slices.values():
            state.move_slice(resource, piece, SliceEvent.VANISH)
        if resource.state is not SliceState.LOST:  # it was gone before its node was
            resource.state = next_slice(resource.state, SliceEvent.VANISH, resource.id)
    state.index_node(node)


def _node_returned(state: State, event: ev.NodeReturned, now: Now) -> None:
    node = state.nodes[event.node]
    node.lost = False
    for resource in map(state.resources.__getitem__, node.resources):
        for piece in resource.slices.values():
            state.move_slice(resource, piece, SliceEvent.RETURN)
            if piece.hard:  # being away proves nothing: only an operator clears it
                state.move_slice(resource, piece, SliceEvent.FAILED)
        _is_back(resource, node)
    state.index_node(node)
    state.capacity_version += 1


def _is_back(resource: ResourceRecord, node: NodeRecord) -> None:
    """What was on it is in its slices, which are verified one by one; the rest was never leased."""
    returned = next_slice(resource.state, SliceEvent.RETURN, resource.id)
    resource.state = next_slice(returned, SliceEvent.VERIFIED, resource.id)
    if resource.detail == NO_LONGER_THERE:
        resource.detail = ""
    if resource.detail:  # the fault it had before is still unexplained
        resource.state = next_slice(resource.state, SliceEvent.FAILED, resource.id)
    elif node.draining:
        resource.state = next_slice(resource.state, SliceEvent.DRAIN, resource.id)


def _node_drained(state: State, event: ev.NodeDrained, now: Now) -> None:
    node = state.nodes[event.node]
    node.draining = event.draining
    before, happened = (
        (SliceState.FREE, SliceEvent.DRAIN) if event.draining else (SliceState.DRAINING, SliceEvent.UNDRAIN)
    )
    for resource in map(state.resources.__getitem__, node.resources):
        if resource.state is before:
            resource.state = next_slice(before, happened, resource.id)
    state.index_node(node)
    state.capacity_version += 1


def _resource_faulted(state: State, event: ev.ResourceFaulted, now: Now) -> None:
    resource = state.resources[event.resource]
    resource.state = next_slice(resource.state, SliceEvent.FAILED, resource.id)
    resource.detail = event.detail
    state.index_node(state.nodes[resource.node])


def _resource_lost(state: State, event: ev.ResourceLost, now: Now) -> None:
    resource = state.resources[event.resource]
    resource.state = next_slice(resource.state, SliceEvent.VANISH, resource.id)
    resource.detail = resource.detail or NO_LONGER_THERE
    state.index_node(state.nodes[resource.node])
    state.capacity_version += 1


def _resource_returned(state: State, event: ev.ResourceReturned, now: Now) -> None:
    resource = state.resources[event.resource]
    node = state.nodes[resource.node]
    _is_back(resource, node)
    state.index_node(node)
    state.capacity_version += 1


def _foreign_seen(state: State, event: ev.ForeignSeen, now: Now) -> None:
    resource = state.resources[event.resource]
    resource.foreign = event.foreign
    state.rooms[resource.id].subtract_foreign(event.foreign)
    state.capacity_version += 1


def _tenant_set(state: State, event: ev.TenantSet, now: Now) -> None:
    into = event.tenant.group or DEFAULT_GROUP
    if state.group_of(event.tenant.id) != into:
        state.move_tenant(event.tenant.id, into, now)
    state.tenants[event.tenant.id] = event.tenant
    state.books.removed.pop(event.tenant.id, None)
    state.tenants_changed()
    state.capacity_version += 1


def _tenant_removed(state: State, event: ev.TenantRemoved, now: Now) -> None:
    del state.tenants[event.tenant]
    state.books.removed[event.tenant] = event.generation
    state.books.accounts.pop(event.tenant, None)
    state.books.bursts.pop(event.tenant, None)
    state.tenants_changed()
    tenant_gone(state, event.tenant)


def _group_set(state: State, event: ev.GroupSet, now: Now) -> None:
    state.books.groups[event.group.id] = event.group
    state.tenants_changed()
    state.capacity_version += 1


def _group_removed(state: State, event: ev.GroupRemoved, now: Now) -> None:
    state.books.groups.pop(event.group, None)
    state.tenants_changed()
    state.books.group_accounts.pop(event.group, None)
    group_gone(state, event.group)
    state.capacity_version += 1


def _reservation_set(state: State, event: ev.ReservationSet, now: Now) -> None:
    state.books.reservations[event.reservation.id] = event.reservation


def _reservation_removed(state: State, event: ev.ReservationRemoved, now: Now) -> None:
    del state.books.reservations[event.reservation]
    _reserve(state, event.reservation, None)


def _reservation_placed(state: State, event: ev.ReservationPlaced, now: Now) -> None:
    known = state.books.reserved.get(event.reservation) or ReservedRecord(span=event.span)
    _reserve(state, event.reservation, msgspec.structs.replace(known, resources=event.resources))


def _reservation_began(state: State, event: ev.ReservationBegan, now: Now) -> None:
    _reserve(state, event.reservation, msgspec.structs.replace(state.books.reserved[event.reservation], began=True))


def _reservation_lent(state: State, event: ev.ReservationLent, now: Now) -> None:
    _reserve(state, event.reservation, msgspec.structs.replace(state.books.reserved[event.reservation], lends=True))


def _reservation_over(state: State, event: ev.ReservationOver, now: Now) -> None:
    _reserve(state, event.reservation, None)


def _reserve(state: State, reservation: ReservationId, reserved: ReservedRecord | None) -> None:
    if reserved is not None:
        state.books.reserved[reservation] = reserved
    else:
        state.books.reserved.pop(reservation, None)
    state.index_reserved()
    state.capacity_version += 1


def _policy_applied(state: State, event: ev.PolicyApplied, now: Now) -> None:
    """The limits are in their file, not in the books; but one of them may have been all that a request lacked."""
    if event.declared is not None:
        state.books.declared = event.declared
    state.capacity_version += 1


def _burst_drawn(state: State, event: ev.BurstDrawn, now: Now) -> None:
    lease = state.leases[event.lease]
    drawn = event.before.drawn + event.millis - lease.draws
    state.books.bursts[lease.tenant] = msgspec.structs.replace(event.before, drawn=drawn)
    lease.draws = event.millis
    if not event.millis:
        state.capacity_version += 1


def _burst_changed(state: State, event: ev.BurstChanged, now: Now) -> None:
    state.books.bursts[event.tenant] = event.burst
    state.capacity_version += 1


def _no_longer_draws(state: State, lease: LeaseRecord, now: Now) -> None:
    """It ends, or its grant came to nothing."""
    if lease.draws:
        known = state.books.bursts[lease.tenant]
        state.books.bursts[lease.tenant] = msgspec.structs.replace(
            known, at_ns=now.ns, credit=remaining(known, now.ns), drawn=known.drawn - lease.draws
        )
        lease.draws = 0


def _queued(state: State, event: ev.Queued, now: Now) -> None:
    lease = copy(event.lease)
    lease.group = state.group_of(lease.tenant)
    state.leases[lease.id] = lease
    if lease.parks is not None:
        state.leases[lease.parks.of].parked_under = lease.id
    if lease.resume is not None:
        _change_parks(state, lease.resume.lease, resumed_by=lease.id)
    if lease.replaces is not None and lease.replaces in state.leases:
        state.leases[lease.replaces].replaced_by = lease.id
    if lease.goes_on is not None:
        state.no_longer_taken(lease.tenant, lease.goes_on)
    state.requests[lease.tenant, lease.request_id] = lease.id
    state.books.next_arrival = max(state.books.next_arrival, lease.arrival + 1)
    state.enqueue(lease)
    state.arm(lease)


def _priority_gained(state: State, event: ev.PriorityGained, now: Now) -> None:
    lease = state.leases[event.lease]
    state.dequeue(lease)
    lease.has_priority = True
    state.enqueue(lease)
    state.arm(lease)


def _granted(state: State, event: ev.Granted, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.status = next_lease(lease.status, LeaseEvent.GRANT, lease.id)
    state.dequeue(lease)
    state.drop_promise(lease)
    lease.node, lease.epoch, lease.parts = event.node, event.epoch, event.parts
    lease.claim_by_ns, lease.granted_at_ns, lease.offered = event.claim_by_ns, now.ns, event.offered
    lease.granted_wall_ns = now.wall_ns
    state.books.next_n = max(state.books.next_n, event.epoch.n + 1)
    key = str(event.epoch)
    for part in event.parts:
        resource = state.resources[part.resource]
        if part.kind is Kind.BLOCK and lease.name is not None:
            take_over(state, volume_key(lease.tenant, lease.name), part)
        piece = SliceRecord(
            resource=resource.id,
            lease=lease.id,
            epoch=event.epoch,
            tenant=lease.tenant,
            part=part,
            state=next_slice(SliceState.FREE, SliceEvent.LEASE, resource.id),
        )
        resource.slices[key] = piece
        resource.used += part.amount
        state.rooms[resource.id].put(piece)
    state.live_count += 1
    state.index_granted(lease)
    state.meter(lease, +1, now)
    state.arm(lease)


def _ungranted(state: State, event: ev.Ungranted, now: Now) -> None:
    lease = state.leases[event.lease]
    status = next_lease(lease.status, LeaseEvent.UNGRANT, lease.id)
    _no_longer_draws(state, lease, now)
    state.tear_down(lease, now)
    state.on_node[state.node_of(lease)].pop(lease.id, None)
    state.live_count -= 1
    lease.status, lease.node, lease.epoch, lease.parts = status, None, None, ()
    lease.offered, lease.claim_by_ns, lease.granted_at_ns, lease.granted_wall_ns = False, None, None, None
    lease.offers += 1
    state.enqueue(lease)
    state.capacity_version += 1  # all it asked for may be free by now
    state.arm(lease)


def _claimed(state: State, event: ev.Claimed, now: Now) -> None:
    lease = state.leases[event.lease]
    claimed = LeaseEvent.CLAIM if lease.resume is None else LeaseEvent.RESUME
    lease.status = next_lease(lease.status, claimed, lease.id)
    lease.claimed_at_ns, lease.deadline_ns, lease.number = now.ns, event.deadline_ns, event.number
    if lease.offered:  # from here on it is paid for
        lease.granted_at_ns, lease.granted_wall_ns = now.ns, now.wall_ns
    lease.claim_by_ns, lease.offered = None, False
    state.arm(lease)


def _renewed(state: State, event: ev.Renewed, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.status = next_lease(lease.status, LeaseEvent.RENEW, lease.id)
    lease.deadline_ns, lease.number, lease.fate = event.deadline_ns, event.number, None
    state.index_yielding(lease)
    lease.renewals += 1
    lease.extended_ns = 0  # a holder that speaks needs no allowance for silence
    if event.ttl_ns is not None:
        lease.ttl_ns = event.ttl_ns
    state.note(lease, event.busy_ns, event.idle, now)
    state.arm(lease)


def _activity(state: State, event: ev.ActivityNoted, now: Now) -> None:
    state.note(state.leases[event.lease], event.busy_ns, event.idle, now)


def _fate_sealed(state: State, event: ev.FateSealed, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.fate = event.reason
    state.index_yielding(lease)


def _attached(state: State, event: ev.Attached, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.status = next_lease(lease.status, LeaseEvent.ATTACH, lease.id)
    old, new = str(lease.epoch), str(event.epoch)
    for part in lease.parts:
        slices = state.resources[part.resource].slices
        piece = slices.pop(old, None)
        if piece is not None:  # None: a second part on the same resource would be a bug that check() finds
            piece.epoch = event.epoch
            slices[new] = piece
            if piece.volume:
                volume_attached(state, state.volumes[volume_key(piece.tenant, piece.volume)], event.epoch)
    lease.epoch, lease.number, lease.attach_request_id = event.epoch, event.number, event.request_id
    lease.holder = event.holder or lease.holder
    lease.process = event.process
    lease.peer = event.peer
    state.books.next_n = max(state.books.next_n, event.epoch.n + 1)


def _bound(state: State, event: ev.Bound, now: Now) -> None:
    state.leases[event.lease].process = event.process


def _noticed(state: State, event: ev.Noticed, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.status = next_lease(lease.status, LeaseEvent.NOTICE, lease.id)
    lease.notice, lease.number = event.notice, event.number
    if event.notice.beneficiary is not None:
        other = state.leases[event.notice.beneficiary].tenant
        if other != lease.tenant:
            until = now.ns + state.books.cool_down_ns
            state.books.cool_until_ns.setdefault(lease.tenant, {})[other] = until
    state.arm(lease)


def _spared(state: State, event: ev.Spared, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.status = next_lease(lease.status, LeaseEvent.SPARE, lease.id)
    lease.notice, lease.number = None, event.number
    state.arm(lease)


def _promised(state: State, event: ev.Promised, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.promise, lease.promise_node, lease.victims = event.parts, event.node, event.victims
    state.promises[lease.id] = None


def _promise_dropped(state: State, event: ev.PromiseDropped, now: Now) -> None:
    state.drop_promise(state.leases[event.lease])


def _ending(state: State, event: ev.Ending, now: Now) -> None:
    lease = state.leases[event.lease]
    is_kept = event.end.way is Way.SUSPEND
    status = next_lease(lease.status, LeaseEvent.SUSPEND if is_kept else LeaseEvent.END, lease.id)
    state.tear_down(lease, now)
    _no_longer_draws(state, lease, now)
    lease.status, lease.end, lease.number = status, event.end, event.number
    lease.busy_ns = event.busy_ns
    state.index_yielding(lease)
    state.note_taken(lease)


def _ended(state: State, event: ev.Ended, now: Now) -> None:
    lease = state.leases[event.lease]
    if lease.status is LeaseStatus.QUEUED:
        lease.status = next_lease(lease.status, LeaseEvent.END, lease.id)
        state.dequeue(lease)
        state.drop_promise(lease)
    else:
        lease.status = next_lease(lease.status, LeaseEvent.TORN_DOWN, lease.id)
        state.on_node[state.node_of(lease)].pop(lease.id, None)
        state.live_count -= 1
        if state.promises:  # it may have been the last victim of one, and what it leaves may be quarantined
            state.capacity_version += 1
    lease.end = event.end
    state.armed.pop(lease.id, None)
    state.ended.append(lease.id)
    old = None if lease.replaces is None else state.leases.get(lease.replaces)
    if old is not None and old.replaced_by == lease.id and old.end is None:
        old.replaced_by = None
    if lease.resume is not None and not lease.resumed:  # it came to nothing, and another request may try
        _change_parks(state, lease.resume.lease, resumed_by=None)


def _metered(state: State, event: ev.Metered, now: Now) -> None:
    state.leases[event.lease].metered = True


def _torn_down(state: State, event: ev.TornDown, now: Now) -> None:
    resource = state.resources[event.resource]
    state.free_slice(resource, resource.slices[str(event.epoch)], SliceEvent.VERIFIED)


def _quarantined(state: State, event: ev.Quarantined, now: Now) -> None:
    resource = state.resources[event.resource]
    piece = resource.slices[str(event.epoch)]
    if piece.state is not SliceState.QUARANTINED:  # else: it was late, and now it turns out that it failed
        state.move_slice(resource, piece, SliceEvent.FAILED)
    piece.detail, piece.hard = event.detail, event.hard


def _cleared(state: State, event: ev.Cleared, now: Now) -> None:
    resource = state.resources[event.resource]
    if event.lease is None:
        resource.state = next_slice(resource.state, SliceEvent.CLEARED, resource.id)
        resource.detail = ""
        if state.nodes[resource.node].draining:
            resource.state = next_slice(resource.state, SliceEvent.DRAIN, resource.id)
        state.index_node(state.nodes[resource.node])
        state.capacity_version += 1
        return
    piece = resource.slices[str(event.epoch)]
    if piece.volume:  # to vouch for it says that no process is on it, not that nothing is in it
        keep_volume(state, state.volumes[volume_key(piece.tenant, piece.volume)], piece, now)
    else:
        state.free_slice(resource, piece, SliceEvent.CLEARED)


def _parked(state: State, event: ev.Parked, now: Now) -> None:
    ended = state.leases[event.of].end if event.of in state.leases else None
    took_ns = max(0, now.ns - ended.at_ns) if ended is not None else 0
    _change_parks(state, event.lease, holds=True, took_ns=took_ns)
    state.capacity_version += 1  # a request may wait to go on with it


def _parking_denied(state: State, event: ev.ParkingDenied, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.unsaved = event.why
    if lease.end is not None:
        detail = f"{lease.end.detail}; not parked: {event.why}"
        lease.end = msgspec.structs.replace(lease.end, way=Way.NOT_SAVED, resume=None, detail=detail)


def _resumed(state: State, event: ev.Resumed, now: Now) -> None:
    lease, under = state.leases[event.lease], state.leases.get(event.under)
    lease.resumed = True
    took_ns = 0 if under is None or under.parks is None else under.parks.took_ns
    lease.moving_ns = took_ns + max(0, now.ns - (lease.claimed_at_ns or now.ns))


def _replaced(state: State, event: ev.Replaced, now: Now) -> None:
    lease, old = state.leases[event.lease], state.leases[event.old]
    lease.held_since_ns = old.claimed_at_ns if old.held_since_ns is None else old.held_since_ns
    lease.wait_until_ns = event.wait_until_ns
    state.arm(lease)


def _change_parks(state: State, lease_id: LeaseId, **changes: Any) -> None:
    lease = state.leases.get(lease_id)
    if lease is not None and lease.parks is not None:
        lease.parks = msgspec.structs.replace(lease.parks, **changes)
        state.arm(lease)


def _forgotten(state: State, event: ev.Forgotten, now: Now) -> None:
    for lease_id in event.leases:
        lease = state.leases.pop(lease_id)
        state.requests.pop((lease.tenant, lease.request_id), None)
        state.armed.pop(lease_id, None)
        state.no_longer_taken(lease.tenant, lease_id)
    gone = set(event.leases)
    while state.ended and state.ended[0] in gone:
        gone.discard(state.ended.popleft())
    if gone:  # a state made from a snapshot has them in the order of their ends, not of their last teardown
        state.ended = deque(lease for lease in state.ended if lease not in gone)


def _shift_lease(lease: LeaseRecord, shift_ns: int) -> None:
    for name in _INSTANTS:
        at = getattr(lease, name)
        if at is not None:
            setattr(lease, name, at + shift_ns)
    if lease.notice is not None:
        lease.notice = msgspec.structs.replace(lease.notice, take_at_ns=lease.notice.take_at_ns + shift_ns)
    if lease.end is not None:
        lease.end = msgspec.structs.replace(lease.end, at_ns=lease.end.at_ns + shift_ns)


_INSTANTS: Final = (
    "asked_at_ns",
    "wait_until_ns",
    "priority_at_ns",
    "granted_at_ns",
    "claim_by_ns",
    "claimed_at_ns",
    "deadline_ns",
    "idle_since_ns",
    "held_since_ns",
)

FOLD: Final[dict[type, Callable[[State, Any, Now], None]]] = {
    ev.OfficeOpened: _office_opened,
    ev.Rebased: _rebased,
    ev.NodeJoined: _node_joined,
    ev.NodeLost: _node_lost,
    ev.NodeReturned: _node_returned,
    ev.NodeDrained: _node_drained,
    ev.ResourceFaulted: _resource_faulted,
    ev.ResourceLost: _resource_lost,
    ev.ResourceReturned: _resource_returned,
    ev.ForeignSeen: _foreign_seen,
    ev.TenantSet: _tenant_set,
    ev.TenantRemoved: _tenant_removed,
    ev.PolicyApplied: _policy_applied,
    ev.GroupSet: _group_set,
    ev.GroupRemoved: _group_removed,
    ev.ReservationSet: _reservation_set,
    ev.ReservationRemoved: _reservation_removed,
    ev.ReservationPlaced: _reservation_placed,
    ev.ReservationBegan: _reservation_began,
    ev.ReservationLent: _reservation_lent,
    ev.ReservationOver: _reservation_over,
    ev.PricesSet: prices_set,
    ev.BudgetSet: budget_set,
    ev.BudgetCredited: budget_credited,
    ev.BudgetReached: budget_reached,
    ev.BudgetRemoved: budget_removed,
    ev.BurstChanged: _burst_changed,
    ev.BurstDrawn: _burst_drawn,
    ev.Queued: _queued,
    ev.PriorityGained: _priority_gained,
    ev.Granted: _granted,
    ev.Ungranted: _ungranted,
    ev.Claimed: _claimed,
    ev.Renewed: _renewed,
    ev.ActivityNoted: _activity,
    ev.FateSealed: _fate_sealed,
    ev.Attached: _attached,
    ev.Bound: _bound,
    ev.Noticed: _noticed,
    ev.Spared: _spared,
    ev.Promised: _promised,
    ev.PromiseDropped: _promise_dropped,
    ev.Ending: _ending,
    ev.Ended: _ended,
    ev.Metered: _metered,
    ev.TornDown: _torn_down,
    ev.Quarantined: _quarantined,
    ev.Cleared: _cleared,
    ev.Parked: _parked,
    ev.ParkingDenied: _parking_denied,
    ev.Replaced: _replaced,
    ev.Resumed: _resumed,
    ev.Forgotten: _forgotten,
    **VOLUME_FOLD,
}
