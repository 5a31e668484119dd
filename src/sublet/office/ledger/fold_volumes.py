"""Folds what happens to volumes. A volume and its slice change together, each by its own table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sublet.lease.states import SliceEvent, SliceState, VolumeEvent, VolumeState, next_slice, next_volume
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import Now, SliceRecord, VolumeRecord, volume_key
from sublet.values import Kind
from sublet.wire.orders import Part

if TYPE_CHECKING:
    from sublet.office.ledger.state import State


def take_over(state: State, key: str, part: Part) -> bool:
    """Before a grant: the slice that its volume has is the one it gets. Whether there is one."""
    volume = state.volumes.get(key)
    if volume is None or volume.state is not VolumeState.RETAINED or volume.resource != part.resource:
        return False
    resource = state.resources[part.resource]
    piece = resource.slices[str(volume.epoch)]
    next_slice(piece.state, SliceEvent.TAKE, resource.id)
    del resource.slices[str(volume.epoch)]
    resource.used -= piece.part.amount
    state.rooms[resource.id].remove(piece)
    return True


def volume_attached(state: State, volume: VolumeRecord, epoch: Any) -> None:
    """Its lease has a new epoch, and so has it."""
    volume.state = next_volume(volume.state, VolumeEvent.TAKE, volume.key)
    volume.epoch = epoch


def keep_volume(state: State, volume: VolumeRecord, piece: SliceRecord, now: Now) -> None:
    """From here on it is kept. The time it is kept for begins once."""
    then = next_volume(volume.state, VolumeEvent.KEEP, volume.key)
    state.move_slice(state.resources[piece.resource], piece, SliceEvent.KEEP)
    if volume.state is VolumeState.LIVE:
        volume.kept_ns, volume.kept_wall_ns = now.ns, now.wall_ns
        volume.group = state.group_of(volume.tenant)
        volume.until_ns = now.ns + volume.retain_ns
        state.count_kept(volume, +1)
    state.capacity_version += 1  # a request may wait to go on with it
    volume.state = then
    state.arm_volume(volume)


def _taken(state: State, event: ev.VolumeTaken, now: Now) -> None:
    key = volume_key(event.tenant, event.name)
    old, lease = state.volumes.get(key), state.leases[event.lease]
    lease.takes = old is not None and old.state is VolumeState.RETAINED
    if old is None:
        then = VolumeState.LIVE
    else:
        lost = old.state is VolumeState.LOST
        then = next_volume(old.state, VolumeEvent.MAKE if lost else VolumeEvent.TAKE, key)
    if old is not None and lease.takes:
        state.count_kept(old, -1)
    state.volumes[key] = VolumeRecord(
        tenant=event.tenant,
        name=event.name,
        node=event.node,
        resource=event.resource,
        size=event.size,
        state=then,
        lease=event.lease,
        epoch=event.epoch,
        retain_ns=event.retain_ns,
        made_wall_ns=old.made_wall_ns if old is not None and lease.takes else now.wall_ns,
    )
    state.resources[event.resource].slices[str(event.epoch)].volume = event.name


def _kept(state: State, event: ev.VolumeKept, now: Now) -> None:
    volume = _of(state, event)
    keep_volume(state, volume, _piece(state, volume), now)


def _missed(state: State, event: ev.VolumeMissed, now: Now) -> None:
    volume = _of(state, event)
    state.move_slice(state.resources[volume.resource], _piece(state, volume), SliceEvent.TEARDOWN)


def _removing(state: State, event: ev.VolumeRemoving, now: Now) -> None:
    volume = _of(state, event)
    volume.state = next_volume(volume.state, VolumeEvent.REMOVE, volume.key)
    volume.detail, volume.until_ns = event.detail, None
    piece = _piece(state, volume)
    if piece.state is SliceState.RETAINED:  # else it is looked for already, or its node is away
        state.move_slice(state.resources[volume.resource], piece, SliceEvent.TEARDOWN)


def _removed(state: State, event: ev.VolumeRemoved, now: Now) -> None:
    volume = _of(state, event)
    next_volume(volume.state, VolumeEvent.REMOVED, volume.key)
    _free(state, volume)
    del state.volumes[volume.key]


def _lost(state: State, event: ev.VolumeLost, now: Now) -> None:
    volume = _of(state, event)
    then = next_volume(volume.state, VolumeEvent.MISS, volume.key)
    _free(state, volume)
    volume.state, volume.detail, volume.until_ns = then, event.detail, None


def _found(state: State, event: ev.VolumeFound, now: Now) -> None:
    key = volume_key(event.tenant, event.name)
    old = state.volumes.get(key)
    then = VolumeState.RETAINED
    made_wall_ns = now.wall_ns
    if old is not None:
        then = next_volume(old.state, VolumeEvent.FIND, key)
        made_wall_ns = old.made_wall_ns
        _free(state, old, found=True)
    part = Part(resource=event.resource, kind=Kind.BLOCK, amount=event.size)
    resource = state.resources[event.resource]
    piece = SliceRecord(
        resource=resource.id,
        lease=event.lease,
        epoch=event.epoch,
        tenant=event.tenant,
        part=part,
        state=SliceState.RETAINED,
        volume=event.name,
    )
    resource.slices[str(event.epoch)] = piece
    resource.used += event.size
    state.rooms[resource.id].put(piece)
    state.books.next_n = max(state.books.next_n, event.epoch.n + 1)
    volume = state.volumes[key] = VolumeRecord(
        tenant=event.tenant,
        name=event.name,
        node=event.node,
        resource=event.resource,
        size=event.size,
        state=then,
        lease=event.lease,
        epoch=event.epoch,
        retain_ns=event.retain_ns,
        made_wall_ns=made_wall_ns,
        kept_ns=now.ns,
        kept_wall_ns=now.wall_ns,
        group=state.group_of(event.tenant),
        until_ns=now.ns + event.retain_ns,
    )
    state.count_kept(volume, +1)
    state.arm_volume(volume)
    state.capacity_version += 1


def _saved(state: State, event: ev.Saved, now: Now) -> None:
    lease = state.leases[event.lease]
    lease.saved_wall_ns = event.saved.wall_ns
    lease.saved_version, lease.saved_volume = event.saved.version, event.saved.volume


def _of(state: State, event: Any) -> VolumeRecord:
    return state.volumes[volume_key(event.tenant, event.name)]


def _piece(state: State, volume: VolumeRecord) -> SliceRecord:
    return state.resources[volume.resource].slices[str(volume.epoch)]


def _free(state: State, volume: VolumeRecord, *, found: bool = False) -> None:
    """Its slice is free, if it has one still: of what is lost it was freed when that was seen. ``found``: another takes
    its place, whatever it was."""
    resource = state.resources[volume.resource]
    piece = resource.slices.get(str(volume.epoch)) if volume.state is not VolumeState.LOST else None
    if piece is None:
        return
    if volume.state in (VolumeState.RETAINED, VolumeState.REMOVING):
        state.count_kept(volume, -1)
    if found and piece.state is SliceState.RETAINED:
        state.move_slice(resource, piece, SliceEvent.TEARDOWN)
    happened = SliceEvent.CLEARED if piece.state is SliceState.QUARANTINED else SliceEvent.VERIFIED
    state.free_slice(resource, piece, happened)


VOLUME_FOLD: Final[dict[type, Callable[[State, Any, Now], None]]] = {
    ev.Saved: _saved,
    ev.VolumeTaken: _taken,
    ev.VolumeKept: _kept,
    ev.VolumeMissed: _missed,
    ev.VolumeRemoving: _removing,
    ev.VolumeRemoved: _removed,
    ev.VolumeLost: _lost,
    ev.VolumeFound: _found,
}
