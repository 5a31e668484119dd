"""The invariants of the books, walked in full. Tests and the simulator call this after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.broker.records import KEPT_STATES, LeaseRecord, SliceRecord, VolumeRecord, volume_key
from sublet.broker.rooms import Room
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState, VolumeState
from sublet.values import Epoch, Exclusivity, Kind

if TYPE_CHECKING:
    from sublet.broker.state import State

__all__ = ["check_books"]


def check_books(state: State) -> None:
    """Raise AssertionError if the books contradict themselves or an index contradicts the books."""
    _check_resources(state)
    for lease in state.leases.values():
        _check_lease(state, lease)
    for volume in state.volumes.values():
        _check_volume(state, volume)
    _check_epochs(state)
    _check_indexes(state)


def _check_resources(state: State) -> None:
    for resource in state.resources.values():
        slices = list(resource.slices.items())
        used = sum(piece.part.amount for _, piece in slices)
        assert used == resource.used, f"{resource.id}: {resource.used} used in the books, {used} in slices"
        kept = sum(piece.part.amount for _, piece in slices if _was_kept(state, piece))
        assert used - kept <= resource.device.capacity, f"{resource.id}: committed beyond its capacity (S1)"
        for key, piece in slices:
            assert key == str(piece.epoch) and piece.resource == resource.id, f"{resource.id}: slice misfiled"
            assert piece.state not in (SliceState.FREE, SliceState.DRAINING), f"{resource.id}: a slice cannot be free"
        alone = [p for _, p in slices if p.part.kind is Kind.GPU and p.part.exclusivity is not Exclusivity.SHARED]
        assert not alone or len(slices) == 1, f"{resource.id}: an exclusive slice has neighbours (L1)"
        assert Room.of(resource) == state.rooms[resource.id], f"{resource.id}: its room is out of date"


def _was_kept(state: State, piece: SliceRecord) -> bool:
    """Whether it is of a volume that was there before its lease: that takes its room, whatever the capacity is now."""
    volume = state.volumes.get(volume_key(piece.tenant, piece.volume)) if piece.volume else None
    lease = state.leases.get(piece.lease)
    return volume is not None and (volume.state in KEPT_STATES or (lease is not None and lease.takes))


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
        case LeaseStatus.ENDED:
            assert lease.end is not None, f"{name} has no reason (L12)"
            # Ended on a lost node, a lease may still have slices to be torn down when the node returns.
            assert SliceState.LEASED not in states, f"{name}: slices {states}"
        case _:
            raise AssertionError(f"{name}: not a state of the broker")
    assert bool(lease.promise) == (lease.id in state.promises), f"{name}: promise misfiled"
    assert not lease.promise or lease.status is LeaseStatus.QUEUED, f"{name} has a promise but does not wait"


def _check_volume(state: State, volume: VolumeRecord) -> None:
    name = f"volume {volume.key} ({volume.state})"
    assert volume.key == volume_key(volume.tenant, volume.name) and state.volumes[volume.key] is volume, (
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
            assert piece.state is not SliceState.RETAINED, f"{name} is nobody's, though it is in use"
        case VolumeState.RETAINED:
            assert piece.state is not SliceState.LEASED, f"{name} is in use by {piece.lease} (V2)"
        case VolumeState.REMOVING:
            away = (SliceState.TEARDOWN, SliceState.LOST, SliceState.QUARANTINED)
            assert piece.state in away, f"{name} is {piece.state} (V3)"
        case _:
            raise AssertionError(f"{name}: not a state of the books")


def _check_epochs(state: State) -> None:
    next_epoch = state.next_epoch()
    seen: dict[Epoch, str] = {}
    for lease in state.leases.values():
        if lease.epoch is not None:
            assert lease.epoch < next_epoch, f"{lease.id} has epoch {lease.epoch}, not below {next_epoch} (L2)"
            assert seen.setdefault(lease.epoch, lease.id) == lease.id, f"epoch {lease.epoch} was given twice (L2)"
    for resource in state.resources.values():
        for piece in resource.slices.values():
            known = state.volumes.get(volume_key(piece.tenant, piece.volume)) if piece.volume else None
            assert not piece.volume or (known is not None and known.epoch == piece.epoch), (
                f"{resource.id}: no such volume"
            )
            assert piece.state is not SliceState.RETAINED or piece.volume, f"{resource.id}: nothing is kept there (V1)"
            assert piece.epoch < next_epoch, f"{resource.id} has a slice of epoch {piece.epoch} (L2)"
            assert seen.setdefault(piece.epoch, piece.lease) == piece.lease, f"epoch {piece.epoch} was given twice"
            holder = state.leases.get(piece.lease)
            if piece.state is SliceState.LEASED:
                assert holder is not None and holder.epoch == piece.epoch, f"{resource.id}: leased to nobody"
                assert holder.status in LIVE_STATES | {LeaseStatus.GRANTED}, f"{resource.id}: leased to {holder.status}"


def _check_indexes(state: State) -> None:
    queued = {lease.id for lease in state.leases.values() if lease.status is LeaseStatus.QUEUED}
    listed = [lease.id for lease in state.queue_listing()]
    assert sorted(listed) == sorted(queued) and state.queued_count == len(queued), "the queue is out of date"
    waiting = (LeaseStatus.QUEUED, LeaseStatus.ENDED)
    live = {lease.id for lease in state.leases.values() if lease.status not in waiting}
    on_nodes = [lease for leases in state.on_node.values() for lease in leases]
    assert sorted(on_nodes) == sorted(live) and state.live_count == len(live), "the index of nodes is out of date"
    for tenant, held in state.held.items():
        fresh = type(held)()
        for lease in state.leases.values():
            if lease.tenant == tenant and lease.status in LIVE_STATES | {LeaseStatus.GRANTED}:
                fresh.add(lease.parts, +1)
        for volume in state.volumes.values():
            if volume.tenant == tenant and volume.state in KEPT_STATES:
                fresh.keep(volume.size)
        assert fresh == held, f"{tenant} holds {fresh}, the index says {held}"
        millis = sum(
            part.millis
            for lease in state.leases.values()
            if lease.tenant == tenant and lease.status in LIVE_STATES | {LeaseStatus.GRANTED}
            for part in lease.parts
        )
        assert millis == state.held_millis(tenant), f"{tenant}: the meter is out of step (S9)"
