"""The ledger's invariants, checked in one pass. Tests and the simulation call it after every step.

Most leases that are remembered have ended, and hold nothing: of them it is looked whether they have a reason and an
epoch of their own. That nothing is leased to them is seen from the slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from sublet.lease.states import LeaseStatus, SliceState, VolumeState
from sublet.office.ledger import events as ev
from sublet.office.ledger.fairness import Account, amounts_of
from sublet.office.ledger.records import (
    HOLDING_STATES,
    KEPT_STATES,
    LeaseRecord,
    ResourceRecord,
    SliceRecord,
    VolumeRecord,
    volume_key,
)
from sublet.office.ledger.state import Held, State, is_particular, is_yielding
from sublet.values import Epoch, Exclusivity, GroupId, Kind, LeaseId, TenantId

_NOBODYS: Final = frozenset({SliceState.FREE, SliceState.DRAINING})
_NOBODY: Final = (0, 0, 0, 0, 0)
_NOTHING: Final = Account().level
_STAYS: Final = frozenset({SliceState.QUARANTINED, SliceState.RETAINED})
_LEAVES_INDEXES: Final = frozenset({ev.ActivityNoted, ev.FateSealed, ev.Renewed})
"""Of one lease and its times: nothing else in the books is changed by them. Half of all commands come to no more."""


def check_after(state: State, events: Sequence[ev.Event]) -> None:
    """``check_books``, as far as these events may have changed them."""
    if all(type(event) in _LEAVES_INDEXES for event in events):
        for event in events:
            assert isinstance(event, ev.ActivityNoted | ev.FateSealed | ev.Renewed)
            _check_lease(state, state.leases[event.lease])
    else:
        check_books(state)


def check_books(state: State) -> None:
    """Raise AssertionError if the books contradict themselves or an index contradicts the books."""
    epochs: dict[Epoch, LeaseId] = {}
    _check_leases(state, epochs)
    for resource in state.resources.values():
        _check_resource(state, resource, epochs)
    for volume in state.volumes.values():
        _check_volume(state, volume)
    _check_reserved(state)
    latest = max(epochs, default=None)
    assert latest is None or latest < state.next_epoch(), (
        f"{epochs[latest]} has epoch {latest}, not below {state.next_epoch()} (L2)"
    )


def _check_leases(state: State, epochs: dict[Epoch, LeaseId]) -> None:
    queued: set[LeaseId] = set()
    live: set[LeaseId] = set()
    holding: list[LeaseRecord] = []
    for lease in state.leases.values():
        if lease.epoch is not None:
            assert epochs.setdefault(lease.epoch, lease.id) == lease.id, f"epoch {lease.epoch} was given twice (L2)"
        known = state.requests.get((lease.tenant, lease.request_id))
        assert known == lease.id, f"request {lease.request_id} is known as {known}, and had {lease.id} as well (L15)"
        if lease.status is LeaseStatus.ENDED:
            # On a lost node it may still have slices to be torn down when the node returns.
            assert lease.end is not None, f"{lease.id} ({lease.status}) has no reason (L12)"
            assert not lease.promise, f"{lease.id} ({lease.status}) has a promise but does not wait"
            continue
        _check_lease(state, lease)
        (queued if lease.status is LeaseStatus.QUEUED else live).add(lease.id)
        if lease.status in HOLDING_STATES:
            holding.append(lease)
    yielding = {lease for lease in live if is_yielding(state.leases[lease])}
    assert yielding == state.yielding.keys(), "what is not renewed for others' sake is out of date"
    assert queued.issuperset(state.promises), "a request has a promise but does not wait"
    waiting = list(state.queue_listing())
    listed = [lease.id for lease in waiting]
    assert len(listed) == len(queued) == state.queued_count and queued.issuperset(listed), "the queue is out of date"
    wants = Counter(lease.wants for lease in waiting if not is_particular(lease))
    counted = state.waiting_wants == wants and state.waiting_particular == len(waiting) - wants.total()
    assert counted, "what waits is counted wrongly"
    assert state.first_asked_ns() == min((lease.asked_at_ns for lease in waiting), default=None), "the first is another"
    on_nodes = [lease for leases in state.on_node.values() for lease in leases]
    assert len(on_nodes) == len(live) == state.live_count and live.issuperset(on_nodes), (
        "the index of nodes is out of date"
    )
    _check_tenants(state, holding)


def _check_lease(state: State, lease: LeaseRecord) -> None:
    pieces = list(state.slices_of(lease))
    states = {piece.state for piece in pieces}
    name = f"{lease.id} ({lease.status})"
    match lease.status:
        case LeaseStatus.QUEUED:
            assert lease.epoch is None and not lease.parts and lease.end is None, f"{name} holds something"
        case LeaseStatus.GRANTED:
            assert lease.claim_by_ns is not None, f"{name} has no claim window"
            assert states == {SliceState.LEASED} and len(pieces) == len(lease.parts), f"{name}: slices {states}"
        case LeaseStatus.ACTIVE | LeaseStatus.NOTICED:
            assert lease.deadline_ns is not None and lease.claim_by_ns is None, f"{name} has no deadline"
            assert states == {SliceState.LEASED} and len(pieces) == len(lease.parts), f"{name}: slices {states}"
            assert (lease.notice is not None) == (lease.status is LeaseStatus.NOTICED), f"{name}: notice"
            assert lease.extended_ns <= lease.ttl_ns, f"{name}: extended by more than one TTL (L10)"
        case LeaseStatus.ENDING:
            assert lease.end is not None, f"{name} has no reason"
            assert SliceState.LEASED not in states, f"{name} still has a leased slice"
            assert SliceState.TEARDOWN in states, f"{name}: nothing left to tear down, yet not ended"
        case _:
            raise AssertionError(f"{name}: not a state of the broker")
    assert bool(lease.promise) == (lease.id in state.promises), f"{name}: promise misfiled"
    assert not lease.promise or lease.status is LeaseStatus.QUEUED, f"{name} has a promise but does not wait"


def _check_tenants(state: State, holding: list[LeaseRecord]) -> None:
    """What each tenant holds, against the index of it and against its meter."""
    fresh: dict[TenantId, Held] = {}
    amounts: dict[TenantId, list[int]] = {}
    for tenant, held in state.held.items():
        fresh[tenant] = type(held)()
    for lease in holding:
        assert lease.tenant in fresh, f"{lease.tenant} holds {lease.id}, the index knows of nothing"
        fresh[lease.tenant].add(lease.parts, +1)
        amounts[lease.tenant] = _sum(amounts.get(lease.tenant, _NOTHING), amounts_of(lease.parts))
    for volume in state.volumes.values():
        if volume.state in KEPT_STATES:
            assert volume.tenant in fresh, f"{volume.tenant} keeps {volume.name}, the index knows of nothing"
            fresh[volume.tenant].keep(volume.size)
    groups: dict[GroupId, Held] = {}
    levels: dict[GroupId, list[int]] = {}
    for tenant, held in state.held.items():
        assert fresh[tenant] == held, f"{tenant} holds {fresh[tenant]}, the index says {held}"
        own, group = amounts.get(tenant, _NOTHING), state.group_of(tenant)
        assert own[0] == state.held_millis(tenant), f"{tenant}: the meter is out of step (S9)"
        account = state.books.accounts.get(tenant)
        assert own == (_NOTHING if account is None else account.level), f"{tenant}: its account"
        groups.setdefault(group, type(held)()).merge(held, +1)
        levels[group] = _sum(levels.get(group, _NOTHING), own)
    for group, held in state.held_by_group.items():
        assert groups.get(group, type(held)()) == held, f"{group} holds {groups.get(group)}, the index says {held}"
    for group, account in state.books.group_accounts.items():
        assert account.level == levels.get(group, _NOTHING), f"the account of {group} is out of step"
    for lane, groups_in_line in state.queue.items():
        for group, tenants in groups_in_line.items():
            assert tenants and all(state.group_of(tenant) == group for tenant in tenants), f"{group}: misfiled"
            for *_, name in (entry for line in tenants.values() for entry in line):
                waiting = state.leases[name]
                assert lane == (waiting.tier, waiting.has_priority), f"{name} waits in another lane"


def _sum(one: list[int], other: list[int]) -> list[int]:
    return [mine + more for mine, more in zip(one, other, strict=True)]


def _check_reserved(state: State) -> None:
    books = state.books
    found = [(resource, name) for name, reserved in books.reserved.items() for resource in reserved.resources]
    assert len(found) == len(state.reserved_by), "a device is reserved twice"
    assert dict(found) == state.reserved_by, "the index of reserved devices is out of date"
    assert books.reserved.keys() <= books.reservations.keys(), "devices are kept for a reservation that is gone"
    for reserved in books.reserved.values():
        assert reserved.began or not reserved.lends, f"{reserved} is lent before it began"


def _check_resource(state: State, resource: ResourceRecord, epochs: dict[Epoch, LeaseId]) -> None:
    name, slices = resource.id, resource.slices
    if not slices:
        assert not resource.used, f"{name}: {resource.used} used in the books, nothing in slices"
        _check_room(state, resource, _NOBODY, {})
        return
    used = alone = quarantined = exclusive = stays = leaving = 0
    tenants: dict[TenantId, int] = {}
    for key, piece in slices.items():
        part = piece.part
        used += part.amount
        tenants[piece.tenant] = tenants.get(piece.tenant, 0) + 1
        quarantined += piece.state is SliceState.QUARANTINED
        stays += part.amount if piece.state in _STAYS else 0
        leaving += piece.state is SliceState.TEARDOWN
        exclusive += part.exclusivity is Exclusivity.SESSION or part.exclusivity is Exclusivity.DEVICE
        alone += part.kind is Kind.GPU and part.exclusivity is not Exclusivity.SHARED
        assert key == str(piece.epoch) and piece.resource == name, f"{name}: slice misfiled"
        assert piece.state not in _NOBODYS, f"{name}: a slice cannot be free"
        _check_slice(state, piece)
        assert epochs.setdefault(piece.epoch, piece.lease) == piece.lease, f"epoch {piece.epoch} was given twice"
    assert used == resource.used, f"{name}: {resource.used} used in the books, {used} in slices"
    capacity = resource.device.capacity
    if used > capacity:
        kept = sum(piece.part.amount for piece in slices.values() if _was_kept(state, piece))
        assert used - kept <= capacity, f"{name}: committed beyond its capacity (S1)"
    assert not alone or len(slices) == 1, f"{name}: an exclusive slice has neighbours (L1)"
    _check_room(state, resource, (len(slices), exclusive, quarantined, stays, leaving), tenants)


def _check_room(state: State, resource: ResourceRecord, actual: tuple[int, ...], tenants: dict[TenantId, int]) -> None:
    """What placement sees of it, against ``actual``, what it is."""
    room, device, others = state.rooms[resource.id], resource.device, resource.foreign
    foreign, blocked = (0, False) if others is None else (others.amount, others.blocks)
    free = device.capacity - foreign - resource.used
    seen = room.slices, room.exclusive, room.quarantined, room.stays, room.leaving
    assert (seen, room.tenants) == (actual, tenants) and (
        (room.capacity, room.free, room.foreign, room.blocked) == (device.capacity, free, foreign, blocked)
        and (room.kind, room.model) == (device.kind, device.model)
        and (room.partition, room.one_process) == (device.partition, device.one_process)
        and room.walled is bool(device.walled_trouble)
    ), f"{resource.id}: its room is out of date"


def _check_slice(state: State, piece: SliceRecord) -> None:
    if piece.volume:
        known = state.volumes.get(volume_key(piece.tenant, piece.volume))
        assert known is not None and known.epoch == piece.epoch, f"{piece.resource}: no such volume"
    else:
        assert piece.state is not SliceState.RETAINED, f"{piece.resource}: nothing is kept there (V1)"
    if piece.state is SliceState.LEASED:
        holder = state.leases.get(piece.lease)
        assert holder is not None and holder.epoch == piece.epoch, f"{piece.resource}: leased without a live lease"
        assert holder.status in HOLDING_STATES, f"{piece.resource}: leased to {holder.status}"


def _was_kept(state: State, piece: SliceRecord) -> bool:
    """Whether it is of a volume that was there before its lease: that takes its room, whatever the capacity is now."""
    volume = state.volumes.get(volume_key(piece.tenant, piece.volume)) if piece.volume else None
    lease = state.leases.get(piece.lease)
    return volume is not None and (volume.state in KEPT_STATES or (lease is not None and lease.takes))


def _check_volume(state: State, volume: VolumeRecord) -> None:
    name = f"volume {volume.key} ({volume.state})"
    assert volume.key == volume_key(volume.tenant, volume.name) and state.volumes.get(volume.key) is volume, (
        f"{name} misfiled"
    )
    piece = state.resources[volume.resource].slices.get(str(volume.epoch))
    if volume.state is VolumeState.LOST:
        assert piece is None or piece.volume != volume.name, f"{name} is lost and takes room"
        return
    assert piece is not None and piece.volume == volume.name and piece.tenant == volume.tenant, (
        f"{name} has no slice (V1)"
    )
    assert piece.part.amount == volume.size, f"{name}: its slice has {piece.part.amount}, not {volume.size}"
    assert (volume.until_ns is not None) == (volume.state is VolumeState.RETAINED), f"{name}: its time is not stated"
    match volume.state:
        case VolumeState.LIVE:
            assert piece.state is not SliceState.RETAINED, f"{name} belongs to no lease, though it is in use"
        case VolumeState.RETAINED:
            assert piece.state is not SliceState.LEASED, f"{name} is in use by {piece.lease} (V2)"
        case VolumeState.REMOVING:
            away = (SliceState.TEARDOWN, SliceState.LOST, SliceState.QUARANTINED)
            assert piece.state in away, f"{name} is {piece.state} (V3)"
        case _:
            raise AssertionError(f"{name}: not a state of the books")
