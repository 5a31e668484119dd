"""What holders ask: acquire, claim, renew, attach, release."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Final

from sublet.broker import admission, estimate
from sublet.broker import commands as cmd
from sublet.broker import events as ev
from sublet.broker.answers import Answer, Done, Granted, Offer, Place, Refusal, RefusalCode
from sublet.broker.order import kinds_of, position
from sublet.broker.placement import RoomsByNode, fit
from sublet.broker.records import LeaseRecord, Want
from sublet.broker.schedule import Schedule
from sublet.broker.step import Step, extend_order, notify_order
from sublet.errors import (
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    LeaseExpired,
    LeaseNotActive,
    LeaseRevoked,
    NotFound,
    QuotaExceeded,
    StaleEpoch,
    Unauthorized,
)
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease.value import LeaseEnd
from sublet.values import (
    NS_PER_S,
    EndReason,
    Epoch,
    Kind,
    LeaseId,
    NodeId,
    RenewMode,
    TenantId,
    format_duration,
)
from sublet.wire.orders import Part

__all__ = [
    "acquire",
    "answer_now",
    "attach",
    "claim",
    "decline",
    "ended_error",
    "find",
    "note_activity",
    "release",
    "renew",
]

WAITING_LOOKED_AT: Final = 64
"""Waiting requests of each tenant and tier that are looked at to see whether somebody wants what a lease holds."""


def acquire(step: Step, schedule: Schedule, command: cmd.Acquire) -> Answer:
    """Exactly one of grant, queue place, offer and refusal."""
    state, policy, now = step.state, step.policy, step.now
    tenant = state.tenants.get(command.tenant)
    if tenant is None:
        raise Unauthorized("there is no such tenant")
    admission.check_request(command, policy)
    mark = admission.fingerprint(command)
    known = state.requests.get((command.tenant, command.request_id))
    if known is not None:
        return _answer_again(step, state.leases[known], mark)
    if command.lease in state.leases:
        raise InvalidRequest("the lease id is taken")
    lease = _record(step, command, mark)
    if command.tier.rank > tenant.tier_max.rank:
        return Refusal(
            code=RefusalCode.QUOTA,
            reason=f"this tenant may ask for tier {tenant.tier_max} at most, not {command.tier}",
            do=f"Ask with tier {tenant.tier_max}.",
        )
    refusal = admission.never_allowed(lease, state)
    if refusal is not None:
        return refusal
    if state.live_count + state.queued_count >= policy.leases_max:
        return Refusal(
            code=RefusalCode.LIMIT,
            reason=f"the office has {policy.leases_max} leases and takes no more",
            do="Ask again when some have ended.",
        )
    own_limit = admission.over_quota(lease.wants, tenant.quota, state.held_by(tenant.id))
    own_limit = own_limit or admission.over_seconds(state, lease, now)
    rooms = schedule.rooms_for(state, lease)
    if own_limit is None:
        found = fit(lease.wants, lease.tenant, rooms, mix=policy.share_across_tenants)
        if found is not None:
            return _grant_at_once(step, lease, *found)
    refusal = admission.never_fits(lease, state, policy)
    if refusal is not None:
        return refusal
    if own_limit is None:
        less = admission.smaller(lease, rooms, policy)
        if less is not None:
            return _offer(step, lease, less, rooms)
    if command.wait_ns == 0:
        return _refuse_now(step, lease, own_limit, rooms)
    return _queue(step, schedule, lease)


def claim(step: Step, schedule: Schedule, command: cmd.Claim) -> Answer:
    """Take what was set aside. Claiming again what is held already is the same answer again."""
    lease = find(step, command.tenant, command.lease)
    if command.epoch is not None and lease.epoch is not None and command.epoch != lease.epoch:
        raise StaleEpoch(
            f"this grant has epoch {lease.epoch}, not {command.epoch}", do="Look at the lease again, then claim that."
        )
    match lease.status:
        case LeaseStatus.GRANTED:
            if lease.claim_by_ns is not None and step.now.ns >= lease.claim_by_ns:
                schedule.lapse(step, lease)
                raise _lapsed(lease)
            step.claim(lease)
            return Granted(lease=lease)
        case LeaseStatus.ACTIVE | LeaseStatus.NOTICED:
            _must_be_live(step, lease)
            step.order_grant(lease)  # again: the first answer may have been lost before the agent knew
            return Granted(lease=lease)
        case LeaseStatus.QUEUED:
            raise LeaseNotActive("the lease still waits in the queue", do="Wait for the event `ready`, then claim.")
        case _:
            raise ended_error(lease)


def decline(step: Step, schedule: Schedule, command: cmd.Decline) -> Answer:
    """No to an offer: back to the place in the line, or out of it if the request did not want to wait."""
    lease = find(step, command.tenant, command.lease)
    if lease.status is not LeaseStatus.GRANTED or not lease.offered:
        if lease.status in (LeaseStatus.ENDING, LeaseStatus.ENDED):
            raise ended_error(lease)
        if lease.status is LeaseStatus.QUEUED and lease.offers:
            return answer_now(step, lease)
        raise InvalidRequest("there is no open offer on this lease", do="See `sublet lease show`.")
    if lease.wait_until_ns is not None and lease.wait_until_ns <= step.now.ns:
        step.end(lease, EndReason.WITHDRAWN, "the offer was declined")
        return Done(lease=lease)
    step.ungrant(lease, "the offer was declined")
    return answer_now(step, lease)


def renew(step: Step, schedule: Schedule, command: cmd.Renew) -> Answer:
    """Move the deadline, or say why not. A renewal after the end changes nothing."""
    lease = find_live(step, command.tenant, command.lease, command.epoch)
    if command.busy_ns < 0:
        raise InvalidRequest("busy time cannot be negative")
    policy, now = step.policy, step.now
    ttl_ns = lease.ttl_ns if command.ttl_ns is None else command.ttl_ns
    if not policy.ttl_min_ns <= ttl_ns <= policy.ttl_max_ns:
        raise InvalidRequest("the new time to live is out of bounds", do="Leave it out to keep the old one.")
    refused = _why_not_renewed(step, lease, active=command.active)
    if refused is not None:
        reason, why = refused
        if command.busy_ns or not command.active:
            step.emit(_activity(step, lease, command.busy_ns, idle=not command.active))
        if lease.fate is not reason:
            step.emit(ev.FateSealed(lease=lease.id, reason=reason))
        kind = QuotaExceeded if reason is EndReason.QUOTA else LeaseRevoked
        raise kind(f"the renewal was refused: {why}", do="It runs to its deadline; save what matters now.")
    deadline_ns = max(lease.deadline_ns or 0, now.ns + ttl_ns)
    step.emit(
        ev.Renewed(
            lease=lease.id,
            deadline_ns=deadline_ns,
            number=lease.number + 1,
            busy_ns=_plausible(step, lease, command.busy_ns),
            idle=not command.active,
            ttl_ns=command.ttl_ns,
        )
    )
    step.orders.append(extend_order(lease, now.ns))
    step.hold = (lease.id, lease.number)
    return Granted(lease=lease)


def note_activity(step: Step, schedule: Schedule, command: cmd.NoteActivity) -> Answer:
    """The lease became busy or idle; its deadline stays."""
    lease = find_live(step, command.tenant, command.lease, command.epoch)
    if command.busy_ns < 0:
        raise InvalidRequest("busy time cannot be negative")
    step.emit(_activity(step, lease, command.busy_ns, idle=not command.active))
    return Done(lease=lease)


def attach(step: Step, schedule: Schedule, command: cmd.Attach) -> Answer:
    """A new epoch for a live lease: whoever held the old one is fenced from here on."""
    lease = find(step, command.tenant, command.lease)
    if not command.request_id or len(command.request_id) > 128:
        raise InvalidRequest("the request id is empty or too long")
    _must_be_live(step, lease)
    if lease.attach_request_id == command.request_id:
        step.order_grant(lease)
        return Granted(lease=lease)
    step.emit(
        ev.Attached(
            lease=lease.id,
            epoch=step.state.next_epoch(),
            number=lease.number + 1,
            request_id=command.request_id,
            holder=command.holder[:256],
        )
    )
    step.order_grant(lease)
    if lease.notice is not None:  # what the old epoch was told, the new one has to hear
        step.orders.append(notify_order(lease))
    return Granted(lease=lease)


def release(step: Step, schedule: Schedule, command: cmd.Release) -> Answer:
    """Give it back, or leave the line. Twice is harmless."""
    lease = find(step, command.tenant, command.lease)
    if command.gone:  # it speaks of the line; a grant that came in between has its own claim window
        if lease.status is LeaseStatus.QUEUED:
            step.end(lease, EndReason.HOLDER_GONE, "nobody asked for it any more")
    elif lease.status is LeaseStatus.QUEUED:
        step.end(lease, EndReason.WITHDRAWN)
    elif lease.status is LeaseStatus.GRANTED:
        step.end(lease, EndReason.WITHDRAWN, "it was not claimed")
    elif lease.status in LIVE_STATES:
        if command.busy_ns > 0:
            step.emit(_activity(step, lease, command.busy_ns, idle=lease.idle_since_ns is not None))
        step.end(lease, EndReason.RELEASED)
    return Done(lease=lease)


def answer_now(step: Step, lease: LeaseRecord) -> Answer:
    """The answer to an acquire as of this moment."""
    match lease.status:
        case LeaseStatus.QUEUED:
            return Place(
                lease=lease,
                position=position(step.state, lease, step.now.ns, step.policy),
                reason=admission.why_waiting(lease, step.state, step.now, step.policy),
                estimate_ns=estimate.estimate_ns(lease, step.state, step.now, step.policy),
            )
        case LeaseStatus.GRANTED if lease.offered:
            want, part = lease.wants[0], lease.parts[0]
            return Offer(lease=lease, asked=want.amount, offered=part.amount, kind=want.kind)
        case LeaseStatus.ENDING | LeaseStatus.ENDED:
            raise ended_error(lease)
        case _:
            return Granted(lease=lease)


def ended_error(lease: LeaseRecord) -> LeaseEnded:
    """What a call on an ended lease is told."""
    assert lease.end is not None
    at = datetime.fromtimestamp(lease.end.wall_ns / NS_PER_S, UTC).isoformat(timespec="milliseconds")
    end = LeaseEnd(reason=lease.end.reason, at=at.replace("+00:00", "Z"), detail=lease.end.detail)
    kind: type[LeaseEnded]
    match lease.end.reason:
        case EndReason.EXPIRED | EndReason.IDLE:
            kind = LeaseExpired
        case EndReason.RELEASED | EndReason.WITHDRAWN | EndReason.REFUSED | EndReason.HOLDER_GONE:
            kind = LeaseNotActive
        case _:
            kind = LeaseRevoked
    detail = f" ({lease.end.detail})" if lease.end.detail else ""
    return kind(f"the lease {lease.id} has ended: {lease.end.reason}{detail}", end=end)


def _lapsed(lease: LeaseRecord) -> LeaseEnded:
    """What a claim that came too late is told."""
    if lease.end is not None:
        return ended_error(lease)
    return LeaseNotActive(
        "the offer ran out before this claim", do="The request waits in the line again; claim it when it is ready."
    )


def find(step: Step, tenant: TenantId, lease_id: LeaseId) -> LeaseRecord:
    """The tenant's own lease. Another tenant's looks like none at all."""
    lease = step.state.leases.get(lease_id)
    if lease is None or lease.tenant != tenant:
        raise NotFound(f"there is no lease {lease_id[:64]}", do="`sublet lease ls` shows yours.")
    return lease


def find_live(step: Step, tenant: TenantId, lease_id: LeaseId, epoch: Epoch) -> LeaseRecord:
    """The lease, if this epoch of it is live now."""
    lease = find(step, tenant, lease_id)
    _must_be_live(step, lease)
    if lease.epoch != epoch:
        raise StaleEpoch(f"epoch {Epoch(*epoch)} of lease {lease_id} is not the live one")
    return lease


def _must_be_live(step: Step, lease: LeaseRecord) -> None:
    if lease.status in (LeaseStatus.ENDING, LeaseStatus.ENDED):
        raise ended_error(lease)
    if lease.status not in LIVE_STATES:
        raise LeaseNotActive(f"the lease {lease.id} is {lease.status}", do="Claim it first.")
    due = step.state.due_at(lease)
    if due is not None and step.now.ns >= due:  # its timer has not fired yet, but its time is over all the same
        step.end_when_due(lease)
        raise ended_error(lease)


def _record(step: Step, command: cmd.Acquire, mark: str) -> LeaseRecord:
    wait_ns = command.wait_ns
    return LeaseRecord(
        id=command.lease,
        tenant=command.tenant,
        request_id=command.request_id,
        fingerprint=mark,
        wants=command.wants,
        ttl_ns=command.ttl_ns,
        tier=command.tier,
        arrival=step.state.books.next_arrival,
        asked_at_ns=step.now.ns,
        asked_wall_ns=step.now.wall_ns,
        wait_until_ns=None if wait_ns is None else step.now.ns + wait_ns,
        selector=command.selector,
        renew=command.renew,
        name=command.name,
        labels=command.labels,
        holder=command.holder,
    )


def _answer_again(step: Step, lease: LeaseRecord, mark: str) -> Answer:
    if lease.fingerprint != mark:
        raise IdempotencyConflict("this request id was used for another request")
    if lease.status in LIVE_STATES:
        _must_be_live(step, lease)
        step.order_grant(lease)
    return answer_now(step, lease)


def _grant_at_once(step: Step, lease: LeaseRecord, node: NodeId, parts: list[Part]) -> Answer:
    """The holder is at the other end of this very call, so the grant is claimed with it."""
    lease = _enter(step, lease)
    step.grant(lease, node, parts)
    step.claim(lease)
    return Granted(lease=lease)


def _offer(step: Step, lease: LeaseRecord, less: tuple[Want, ...], rooms: RoomsByNode) -> Answer:
    """Set the smaller amount aside while the holder thinks about it."""
    found = fit(less, lease.tenant, rooms, mix=step.policy.share_across_tenants)
    assert found is not None, "an offer was computed that does not fit"
    lease = _enter(step, lease)
    step.grant(lease, *found, offered=True)
    return answer_now(step, lease)


def _queue(step: Step, schedule: Schedule, lease: LeaseRecord) -> Answer:
    state, policy = step.state, step.policy
    in_line = len(state.queue[lease.tier].get(lease.tenant, ()))
    if state.queued_count >= policy.queue_max or in_line >= policy.queue_tenant_max:
        limit, whose = (
            (policy.queue_tenant_max, "your requests")
            if in_line >= policy.queue_tenant_max
            else (policy.queue_max, "all")
        )
        return Refusal(
            code=RefusalCode.LIMIT,
            reason=f"the queue is full: {limit} of {whose} wait already",
            do="Ask again later, or withdraw some.",
        )
    lease = _enter(step, lease)
    schedule.make_room_if_next(step, lease)
    return answer_now(step, lease)


def _enter(step: Step, lease: LeaseRecord) -> LeaseRecord:
    """Into the books; from here on it is known by its request id."""
    step.emit(ev.Queued(lease=lease))
    return step.state.leases[lease.id]


def _refuse_now(step: Step, lease: LeaseRecord, own_limit: str | None, rooms: RoomsByNode) -> Refusal:
    free = admission.what_would_fit(lease, rooms, step.policy)
    want = lease.wants[0]
    if own_limit is not None:
        return Refusal(code=RefusalCode.QUOTA, reason=own_limit, do=QuotaExceeded.default_do)
    said = f"the largest that is free is {admission.amount_text(want.kind, free)}" if free else "nothing alike is free"
    return Refusal(
        code=RefusalCode.CAPACITY,
        reason=f"{admission.not_free(lease.wants)}; {said}",
        do="Wait for it (wait=...), or ask for less.",
        would_fit=free,
        estimate_ns=estimate.estimate_if_queued(lease, step.state, step.now, step.policy),
    )


def _why_not_renewed(step: Step, lease: LeaseRecord, *, active: bool) -> tuple[EndReason, str] | None:
    if lease.renew is RenewMode.WHILE_BUSY and not active:
        return EndReason.IDLE, "nothing runs under it"
    over = admission.over_seconds(step.state, lease, step.now)
    if over is not None:
        return EndReason.QUOTA, over
    assert lease.claimed_at_ns is not None
    held_ns = step.now.ns - lease.claimed_at_ns
    if held_ns >= step.policy.max_hold_ns and _somebody_waits_for(step, lease):
        return EndReason.FAIR_SHARE, f"it was held for {format_duration(held_ns)} and others wait"
    return None


def _somebody_waits_for(step: Step, lease: LeaseRecord) -> bool:
    kinds = {part.kind for part in lease.parts} - {Kind.BLOCK}
    return any(
        kinds & kinds_of(step.state.leases[waiting])
        for lines in step.state.queue.values()
        for tenant, line in lines.items()
        if tenant != lease.tenant
        for _, waiting in islice(line, WAITING_LOOKED_AT)
    )


def _activity(step: Step, lease: LeaseRecord, busy_ns: int, *, idle: bool) -> ev.ActivityNoted:
    return ev.ActivityNoted(lease=lease.id, busy_ns=_plausible(step, lease, busy_ns), idle=idle)


def _plausible(step: Step, lease: LeaseRecord, busy_ns: int) -> int:
    """Nobody can have been busy for longer than they held it."""
    assert lease.granted_at_ns is not None
    return max(0, min(busy_ns, step.now.ns - lease.granted_at_ns - lease.busy_ns))
