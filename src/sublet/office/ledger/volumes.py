"""Volumes: what a named block lease leaves behind.

1. A request with a name makes the volume of that name, or goes on with it: on its node and resource, with the slice
   it has already, so that neither capacity nor quota is counted twice. While a lease has it the request is refused;
   while it is being put away, or removed, it waits.
2. The lease ends. Its agent says with ``TornDown`` whether anything is left to keep. If not, the slice is free like any
   other. Otherwise it stays the volume's, read-only, for as long as was asked.
3. The time is over, or the tenant gives it up: ``RemoveVolume``, until the agent has said ``VolumeRemoved``. Free means
   verified here as well.

A volume exists from the grant of its lease on, so that a name is never given twice. What an agent keeps and the books
do not know, because they come from a backup, is taken into them; what they have and the agent does not name is asked
for by the order that ended its lease, and is lost only if the agent has looked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

import msgspec

from sublet.errors import CapacityExceeded, InvalidRequest, NotFound, QuotaExceeded, SubletError
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState, VolumeState
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done, Refusal, RefusalCode
from sublet.office.ledger.records import (
    LOCAL_TENANT,
    LeaseRecord,
    ResourceRecord,
    SliceRecord,
    VolumeRecord,
    Want,
    volume_key,
)
from sublet.values import (
    BYTES_MAX,
    Kind,
    LeaseId,
    ResourceId,
    TenantId,
    format_duration,
    format_size,
    valid_name,
)
from sublet.wire import orders

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from sublet.office.ledger.transaction import Transaction

AT_ONCE: Final = 500
"""Volumes whose time has come that are handled in one tick."""


# ---- 1: the request and the grant ----


def wanting(step: Transaction, command: cmd.Acquire) -> cmd.Acquire:
    """The request spelt out: of a volume that exists the size need not be said, and no other may be."""
    block = next((want for want in command.wants if want.kind is Kind.BLOCK), None)
    if command.retain_ns is not None and (block is None or command.name is None):
        raise InvalidRequest(
            "only what a lease of blocks with a name leaves behind can be kept",
            do="Give it a name, or leave retain out.",
        )
    if command.retain_ns is not None and not 0 <= command.retain_ns <= step.policy.retain_max_ns:
        raise InvalidRequest(
            f"a volume cannot be kept for {format_duration(command.retain_ns)}",
            do=f"Ask for at most {format_duration(step.policy.retain_max_ns)}; each use of it begins the time anew.",
        )
    if block is None:
        return command
    volume = _known(step.state, command)
    if volume is None or volume.state is VolumeState.REMOVING:
        if block.amount == 0:
            raise _no_size(command, volume)
        if command.name is not None:
            _check_count(step, command.tenant)
        return command
    if block.amount not in (0, volume.size):
        raise InvalidRequest(
            f"volume {volume.name} has {format_size(volume.size)}, and {format_size(block.amount)} were asked for",
            do="Leave the size out, or take another name; a volume keeps the size it was made with.",
        )
    whole = Want(kind=Kind.BLOCK, amount=volume.size)
    wants = tuple(whole if want is block else want for want in command.wants)
    return msgspec.structs.replace(command, wants=wants)


def _check_count(step: Transaction, tenant: TenantId) -> None:
    """Whether this tenant may have one more under a new name. The owner may."""
    most = step.policy.volumes_tenant_max
    if tenant == LOCAL_TENANT or len(step.state.volumes) < most:
        return
    if sum(1 for volume in step.state.volumes.values() if volume.tenant == tenant) >= most:
        raise QuotaExceeded(
            f"tenant {tenant} has {most} volumes, and that is the most",
            do="Remove one with `sublet volume rm`, or ask the operator for more.",
        )


def _known(state: State, command: cmd.Acquire) -> VolumeRecord | None:
    volume = state.volumes.get(volume_key(command.tenant, command.name)) if command.name is not None else None
    return None if volume is None or volume.state is VolumeState.LOST else volume


def _no_size(command: cmd.Acquire, volume: VolumeRecord | None) -> SubletError:
    if volume is not None:
        return NotFound(f"volume {volume.name} is being removed", do="Say a size to make a new one.")
    if command.name is None:
        return InvalidRequest("the amount of block must be at least 1", do="Ask for something.")
    name = valid_name(command.name, "name")
    return NotFound(
        f"there is no volume {name}", do="Say a size to make one; `sublet volume ls` shows those that you have."
    )


def in_use(state: State, lease: LeaseRecord) -> Refusal | None:
    """Another lease has the volume that this is to go on with, and it may be for long."""
    volume = state.volume_of(lease)
    holder = holder_of(state, volume) if volume is not None else None
    if volume is None or holder is None or holder.id == lease.id:
        return None
    return Refusal(
        code=RefusalCode.CAPACITY,
        reason=f"volume {volume.name} is in use by lease {holder.id}",
        do=f'Go on with that one (`fabric.attach("{holder.id}")`), or end it first.',
    )


def holder_of(state: State, volume: VolumeRecord) -> LeaseRecord | None:
    """The lease that has it, unless that is over already."""
    lease = state.leases.get(volume.lease)
    if volume.state is not VolumeState.LIVE or lease is None or lease.epoch != volume.epoch:
        return None
    return lease if lease.status in LIVE_STATES or lease.status is LeaseStatus.GRANTED else None


def after_grant(step: Transaction, lease: LeaseRecord) -> None:
    """The volume is its own from here on."""
    part = next((part for part in lease.parts if part.kind is Kind.BLOCK), None)
    if part is None or lease.name is None or lease.node is None or lease.epoch is None:
        return
    old = step.state.volume_of(lease)
    retain_ns = lease.retain_ns
    if retain_ns is None:
        retain_ns = step.policy.retain_ns if old is None else old.retain_ns
    step.emit(
        ev.VolumeTaken(
            tenant=lease.tenant,
            name=lease.name,
            lease=lease.id,
            epoch=lease.epoch,
            node=lease.node,
            resource=part.resource,
            size=part.amount,
            retain_ns=retain_ns,
        )
    )


def migrate(step: Transaction) -> None:
    """Books of a time before volumes: leases that have one get it on record. What they left on disk before is found
    when their agent names it."""
    for lease in list(step.state.leases.values()):
        is_held = lease.status in LIVE_STATES or lease.status is LeaseStatus.GRANTED
        if is_held and lease.name is not None and step.state.volume_of(lease) is None:
            after_grant(step, lease)


# ---- 2: the end ----


def ref_of(state: State, parts: tuple[orders.Part, ...], epoch: str) -> orders.VolumeRef | None:
    """The volume in these parts, under this epoch."""
    for part in parts:
        piece = state.resources[part.resource].slices.get(epoch) if part.kind is Kind.BLOCK else None
        if piece is not None and piece.volume:
            return orders.VolumeRef(tenant=piece.tenant, name=piece.volume)
    return None


def verified(step: Transaction, resource: ResourceRecord, piece: SliceRecord, *, kept: bool) -> None:
    """The agent looked: no process is on the slice of this volume, and it is kept or not."""
    volume = step.state.volumes[volume_key(piece.tenant, piece.volume)]
    if not is_open(piece) or volume.state is VolumeState.REMOVING:  # then another question is open by now
        return
    if kept:
        step.emit(
            ev.VolumeKept(
                tenant=volume.tenant,
                name=volume.name,
                lease=volume.lease,
                epoch=volume.epoch,
                resource=resource.id,
                size=volume.size,
            )
        )
    elif volume.state is VolumeState.RETAINED or _lost_its_data(step.state, volume):
        detail = f"{volume.node} does not have it any more"
        step.emit(ev.VolumeLost(**_fields(volume), size=volume.size, detail=detail))
    else:
        step.emit(ev.VolumeRemoved(**_fields(volume), size=volume.size, detail="nothing was in it"))


def confirm_removal(step: Transaction, piece: SliceRecord) -> bool:
    """An operator's word for what is being removed: then it is. Whether that was so."""
    if not piece.volume or not is_removed(step.state, piece):
        return False
    volume = step.state.volumes[volume_key(piece.tenant, piece.volume)]
    step.emit(ev.VolumeRemoved(**_fields(volume), size=volume.size, detail="an operator vouches for it"))
    return True


def is_open(piece: SliceRecord) -> bool:
    """Whether it waits for an agent's word: it is being taken down, or that was only late."""
    return piece.state is SliceState.TEARDOWN or (piece.state is SliceState.QUARANTINED and not piece.hard)


def is_removed(state: State, piece: SliceRecord) -> bool:
    """Whether it is being removed; the order for that is repeated for as long as it takes."""
    return state.volumes[volume_key(piece.tenant, piece.volume)].state is VolumeState.REMOVING


def _lost_its_data(state: State, volume: VolumeRecord) -> bool:
    """Whether its last lease ended because the agent did not find what it was to go on with."""
    lease = state.leases.get(volume.lease)
    end = lease.end if lease is not None else None
    return lease is not None and lease.takes and end is not None and end.reason is EndReason.DEVICE_LOST


# ---- 3: removal ----


def expire(step: Transaction) -> None:
    """Whose time is over goes."""
    for _ in range(AT_ONCE):
        due_ns = step.state.next_volume_ns()
        if due_ns is None or due_ns > step.now.ns:
            return
        volume = step.state.volumes[step.state.volume_timers[0][1]]
        _remove(step, volume, f"it was kept for {format_duration(volume.retain_ns)}")


def remove(step: Transaction, command: cmd.RemoveVolume) -> Answer:
    """Give it up now. What was lost is only forgotten; what is being removed already stays so."""
    name = command.name
    volume = step.state.volumes.get(volume_key(command.owner or command.tenant, name))
    if volume is None:
        raise NotFound(f"there is no volume {name[:64]}", do="`sublet volume ls` shows yours.")
    match volume.state:
        case VolumeState.LIVE:
            holder = holder_of(step.state, volume)
            if holder is None:
                raise CapacityExceeded(f"volume {name} is just being put away", do="Try again in a moment.")
            raise InvalidRequest(
                f"volume {name} is in use by lease {holder.id}", do=f"End it first: `sublet lease release {holder.id}`."
            )
        case VolumeState.RETAINED:
            _remove(step, volume, "it was given up")
        case VolumeState.LOST:
            step.emit(ev.VolumeRemoved(**_fields(volume), size=0, detail="it was lost"))
        case _:
            pass
    return Done()


def removed(step: Transaction, report: orders.VolumeRemoved) -> None:
    """The agent looked: it is off the disk."""
    volume = step.state.volumes.get(volume_key(report.volume.tenant, report.volume.name))
    if volume is None or volume.state is not VolumeState.REMOVING or volume.epoch > report.epoch:
        return
    piece = step.state.resources[volume.resource].slices[str(volume.epoch)]
    if volume.node == report.node and is_open(piece):
        step.emit(ev.VolumeRemoved(**_fields(volume), size=volume.size, detail=volume.detail))


def _remove(step: Transaction, volume: VolumeRecord, detail: str) -> None:
    step.emit(ev.VolumeRemoving(**_fields(volume), detail=detail))
    step.orders.append(remove_order(step.state, volume))


def remove_order(state: State, volume: VolumeRecord) -> orders.RemoveVolume:
    """The order that takes it off the disk; sent again until that is reported."""
    piece = state.resources[volume.resource].slices[str(volume.epoch)]
    return orders.RemoveVolume(
        lease=volume.lease,
        epoch=volume.epoch,
        number=0,
        volume=volume.ref,
        parts=(piece.part,),
        detail=volume.detail,
    )


class _Which(TypedDict):
    tenant: TenantId
    name: str
    resource: ResourceId


def _fields(volume: VolumeRecord) -> _Which:
    return _Which(tenant=volume.tenant, name=volume.name, resource=volume.resource)


# ---- what an agent has ----


def listed(step: Transaction, report: orders.Volumes) -> None:
    """What an agent keeps, against what the books say it keeps. A node that is lost is asked when it is back."""
    node = step.state.nodes.get(report.node)
    if node is None or node.lost:
        return
    for stored in report.volumes:
        _found(step, report, stored)
    if not report.is_all:
        return
    named = {volume_key(stored.volume.tenant, stored.volume.name) for stored in report.volumes}
    for volume in list(step.state.volumes.values()):
        if volume.state is VolumeState.RETAINED and volume.node == report.node and volume.key not in named:
            _miss(step, volume)


def _found(step: Transaction, report: orders.Volumes, stored: orders.StoredVolume) -> None:
    state, ref = step.state, stored.volume
    resource = state.resources.get(stored.resource)
    if resource is None or resource.node != report.node or resource.device.kind is not Kind.BLOCK:
        return
    if not _is_plausible(stored):
        return
    volume = state.volumes.get(volume_key(ref.tenant, ref.name))
    if volume is not None and volume.state is not VolumeState.LOST:
        is_newer = volume.node == report.node and stored.epoch > volume.epoch
        if volume.state is VolumeState.LIVE or not is_newer:
            return
        piece = state.resources[volume.resource].slices[str(volume.epoch)]
        if piece.state is SliceState.QUARANTINED:
            return
    epoch = state.next_epoch()
    step.emit(
        ev.VolumeFound(
            tenant=ref.tenant,
            name=ref.name,
            node=report.node,
            resource=resource.id,
            size=stored.size,
            lease=LeaseId(f"found-{epoch}"),
            epoch=epoch,
            retain_ns=step.policy.retain_ns if volume is None else volume.retain_ns,
        )
    )


def _is_plausible(stored: orders.StoredVolume) -> bool:
    try:
        valid_name(stored.volume.tenant, "tenant")
        valid_name(stored.volume.name, "name")
    except InvalidRequest:
        return False
    return 0 < stored.size <= BYTES_MAX


def _miss(step: Transaction, volume: VolumeRecord) -> None:
    """The agent did not name it. It may have been too early or too late for that, so it is asked."""
    piece = step.state.resources[volume.resource].slices[str(volume.epoch)]
    if piece.state is not SliceState.RETAINED:
        return
    step.emit(ev.VolumeMissed(**_fields(volume)))
    step.orders.append(
        orders.End(
            lease=volume.lease,
            epoch=volume.epoch,
            number=0,
            parts=(piece.part,),
            reason=EndReason.RELEASED,
            grace_ns=0,
            detail="the office looks for its volume",
            volume=volume.ref,
        )
    )
