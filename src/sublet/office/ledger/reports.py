"""Handles agents' reports, which may come late, twice, out of order, or after the end."""

from __future__ import annotations

from dataclasses import replace

from sublet.errors import InvalidRequest
from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger import parking, volumes
from sublet.office.ledger.answers import Answer, Done
from sublet.office.ledger.records import NO_LONGER_THERE, ForeignRecord, ResourceRecord, SliceRecord
from sublet.office.ledger.scheduler import Schedule
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step
from sublet.values import Epoch, LeaseId, NodeId
from sublet.wire import orders


def agent_report(step: Step, schedule: Schedule, command: cmd.AgentReport) -> Answer:
    """Take one report for what it is worth now."""
    match command.report:
        case orders.Held() as report:
            parking.held(step, report)
        case orders.NotHeld() as report:
            _over(step, report.lease, report.epoch, report.reason, report.detail or "the agent no longer knew it")
        case orders.EndedHere() as report:
            _over(step, report.lease, report.epoch, report.reason, report.detail)
        case orders.TornDown() as report:
            _torn_down(step, report)
        case orders.Failed() as report:
            _failed(step, report)
        case orders.Fault() as report:
            _fault(step, report)
        case orders.Foreign() as report:
            _foreign(step, report)
        case orders.Parkable() as report:
            parking.parkable(step, schedule.rooms_for, report)
        case orders.Resumed() as report:
            parking.resumed(step, report)
        case orders.VolumeRemoved() as report:
            volumes.removed(step, report)
        case orders.Volumes() as report:
            volumes.listed(step, report)
    return Done()


def node_up(step: Step, command: cmd.NodeUp) -> Answer:
    """An agent reported in with what it has. What it no longer has is lost with all that ran on it."""
    state = step.state
    found = with_what_is_held(command.inventory, state)
    for device in found.devices:
        owner = state.resources.get(device.id)
        if owner is not None and owner.node != found.node:
            raise InvalidRequest(
                f"node {found.node[:64]} offers {device.id[:64]}, which belongs to node {owner.node}",
                do="Give every device an id of its own.",
            )
    known = state.nodes.get(found.node)
    if known is not None and known.lost:
        step.emit(ev.NodeReturned(node=found.node))
    devices = tuple(state.resources[r].device for r in known.resources) if known else ()
    changed = known is None or known.domain != found.domain or known.labels != found.labels
    if changed or set(found.devices) - set(devices):
        step.emit(ev.NodeJoined(inventory=found))
    offered = {device.id for device in found.devices}
    for resource in (state.resources[device.id] for device in devices):
        if resource.id in offered and resource.state is SliceState.LOST:
            step.emit(ev.ResourceReturned(resource=resource.id))
        elif resource.id not in offered and resource.state is not SliceState.LOST:
            _end_all_on(step, resource, NO_LONGER_THERE)
            step.emit(ev.ResourceLost(resource=resource.id))
    return Done()


def with_what_is_held(inventory: orders.Inventory, state: State) -> orders.Inventory:
    """A device never has less than its leases hold, also if it is declared smaller now, or a disk has filled up."""
    devices = []
    for device in inventory.devices:
        record = state.resources.get(device.id)
        held = 0 if record is None or record.node != inventory.node else record.used
        devices.append(replace(device, capacity=held) if device.capacity < held else device)
    return replace(inventory, devices=tuple(devices))


def node_gone(step: Step, command: cmd.NodeGone) -> Answer:
    """The node does not answer: its leases end, and nothing on it is free until it came back and was verified."""
    node = step.state.nodes.get(command.node)
    if node is None or node.lost:
        return Done()
    leases = [step.state.leases[lease] for lease in step.state.on_node[node.id]]
    for lease in leases:
        if lease.status is not LeaseStatus.ENDING:
            step.end(lease, EndReason.NODE_LOST, command.detail)
    step.emit(ev.NodeLost(node=node.id, detail=command.detail))
    for lease in leases:
        step.finish(lease)
    _drop_promises_on(step, node.id)
    return Done()


def _over(step: Step, lease_id: LeaseId, epoch: Epoch, reason: EndReason, detail: str) -> None:
    lease = step.state.leases.get(lease_id)
    if lease is None or lease.epoch != epoch or lease.status not in LIVE_STATES:
        return
    if reason is EndReason.EXPIRED:
        step.end_when_due(lease)
    else:
        step.end(lease, reason, detail)


def _torn_down(step: Step, report: orders.TornDown) -> None:
    lease = step.state.leases.get(report.lease)
    if lease is not None and lease.epoch is not None and lease.epoch <= report.epoch:
        # Nothing is left of a lease that we still think live: its end was reported too, but that report is not here.
        _over(step, report.lease, lease.epoch, EndReason.EXPIRED, "")
    if report.metered is not None and lease is not None and not lease.metered:
        step.emit(ev.Metered(lease=lease.id, counts=report.metered, steps=report.steps))
    if report.saved is not None and lease is not None and lease.saved_wall_ns is None:
        step.emit(ev.Saved(lease=lease.id, saved=report.saved))
        if lease.parks is not None and lease.parks.of in step.state.leases:
            # What was parked saved in the end: a caller that asks what became of the lease that was taken is told so.
            step.emit(ev.Saved(lease=lease.parks.of, saved=replace(report.saved, size=0, count=0)))
    for resource_id in report.resources:
        resource = step.state.resources.get(resource_id)
        if resource is not None and resource.node == report.node:
            for piece in _slices_of(resource, report.lease, report.epoch):
                if piece.volume:
                    volumes.verified(step, resource, piece, kept=report.kept)
                else:
                    _verified(step, resource, piece)
    if lease is not None:
        parking.torn_down(step, lease, parked=report.parked)
        step.finish(lease)


def _verified(step: Step, resource: ResourceRecord, piece: SliceRecord) -> None:
    if piece.state is SliceState.TEARDOWN:
        step.emit(ev.TornDown(resource=resource.id, lease=piece.lease, epoch=piece.epoch))
    elif piece.state is SliceState.QUARANTINED and not piece.hard:  # mere lateness: it came clean after all
        step.emit(ev.Cleared(resource=resource.id, lease=piece.lease, epoch=piece.epoch))


def _failed(step: Step, report: orders.Failed) -> None:
    resource = step.state.resources.get(report.resource)
    if resource is None or resource.node != report.node:
        return
    lease = step.state.leases.get(report.lease)
    if lease is not None and lease.epoch == report.epoch:
        _over(step, report.lease, report.epoch, EndReason.DEVICE_LOST, report.detail)
    for piece in _slices_of(resource, report.lease, report.epoch):
        if piece.volume and volumes.is_removed(step.state, piece):
            continue
        worse = piece.state is SliceState.QUARANTINED and report.hard and not piece.hard
        if piece.state is SliceState.TEARDOWN or worse:
            step.emit(
                ev.Quarantined(
                    resource=resource.id, lease=piece.lease, epoch=piece.epoch, detail=report.detail, hard=report.hard
                )
            )
    if lease is not None:
        parking.torn_down(step, lease, parked=False)
        step.finish(lease)


def _fault(step: Step, report: orders.Fault) -> None:
    resource = step.state.resources.get(report.resource)
    if resource is None or resource.node != report.node or resource.state is SliceState.LOST or resource.detail:
        return
    _end_all_on(step, resource, report.detail)
    step.emit(ev.ResourceFaulted(resource=resource.id, detail=report.detail or "fault"))


def _end_all_on(step: Step, resource: ResourceRecord, detail: str) -> None:
    for piece in list(resource.slices.values()):
        lease = step.state.leases.get(piece.lease)
        if lease is not None and lease.epoch == piece.epoch and piece.state is SliceState.LEASED:
            step.end(lease, EndReason.DEVICE_LOST, detail)


def _foreign(step: Step, report: orders.Foreign) -> None:
    """What others have cannot be lent. Leases that are there stay: the room they lack is a matter of their guests."""
    resource = step.state.resources.get(report.resource)
    if resource is None or resource.node != report.node:
        return
    amount = min(max(report.amount, 0), resource.device.capacity)
    seen = ForeignRecord(amount=amount, blocks=report.blocks, detail=report.detail)
    foreign = seen if amount or report.blocks else None
    if resource.foreign != foreign:
        step.emit(ev.ForeignSeen(resource=resource.id, foreign=foreign))


def _slices_of(resource: ResourceRecord, lease: LeaseId, epoch: Epoch) -> list[SliceRecord]:
    """What a report speaks of: nearly always the slice of just this epoch, found in one look however many there are.

    An agent that met a newer epoch than a restored office knows of reports that one; it holds for the older as well.
    """
    piece = resource.slices.get(str(epoch))
    if piece is not None and piece.lease == lease:
        return [piece]
    return [piece for piece in resource.slices.values() if piece.lease == lease and piece.epoch <= epoch]


def _drop_promises_on(step: Step, node: NodeId) -> None:
    for lease_id in list(step.state.promises):
        lease = step.state.leases[lease_id]
        if lease.promise_node == node:
            step.drop_promise(lease)
