"""What holders ask: acquire, claim, attach, decline, release."""

from __future__ import annotations

import msgspec

from sublet.broker import admission, bound, estimate, replacing, resuming, volumes
from sublet.broker import commands as cmd
from sublet.broker import events as ev
from sublet.broker.answers import Answer, Done, Granted, Offer, Place, Refusal, RefusalCode
from sublet.broker.finding import ended_error, find, must_be_live
from sublet.broker.keeping import activity
from sublet.broker.order import position
from sublet.broker.placement import RoomsByNode, fit
from sublet.broker.records import NO_QUOTA, LeaseRecord, Want
from sublet.broker.schedule import Schedule
from sublet.broker.step import Step, notify_order
from sublet.broker.volume_rooms import held_beside, why_not_yet
from sublet.errors import (
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    QuotaExceeded,
    StaleEpoch,
    Unauthorized,
)
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.values import EndReason, Kind, NodeId
from sublet.wire.orders import Part

__all__ = ["acquire", "answer_now", "attach", "claim", "decline", "release"]


def acquire(step: Step, schedule: Schedule, command: cmd.Acquire) -> Answer:
    """Exactly one of grant, queue place, offer and refusal.

    Who asks for more than any node could ever have, but would take less (``or_smaller``), asks for the most there is.
    What is granted of that is an offer, now or when it is his turn: it is not what he asked for, so he is asked. A no,
    or silence, ends the request, since there is nothing larger to wait for. While all of it is in use he waits in line
    like anybody else: refusing him because the devices are busy, when he would have had one a minute before, would
    tell him that it cannot be had at all.
    """
    state, policy = step.state, step.policy
    tenant = state.tenants.get(command.tenant)
    if tenant is None:
        raise Unauthorized("there is no such tenant")
    if command.resume is None and not admission.leaves_size_out(command):
        admission.check_request(command, policy)
    mark = admission.fingerprint(command)
    known = state.requests.get((command.tenant, command.request_id))
    if known is not None:
        return _answer_again(step, state.leases[known], mark)
    if command.replaces is not None:
        old = find(step, command.tenant, command.replaces)
        must_be_live(step, old)
        command = replacing.check(state, old, command)
    if command.resume is not None:
        command = resuming.wanting(step, command)
        admission.check_request(command, policy)
    elif command.name is not None or command.retain_ns is not None or admission.leaves_size_out(command):
        command = volumes.wanting(step, command)
        admission.check_request(command, policy)
    if command.lease in state.leases:
        raise InvalidRequest("the lease id is taken")
    lease = _record(step, command, mark)
    if command.tier.rank > tenant.tier_max.rank:
        return Refusal(
            code=RefusalCode.QUOTA,
            reason=f"this tenant may ask for tier {tenant.tier_max} at most, not {command.tier}",
            do=f"Ask with tier {tenant.tier_max}.",
        )
    refusal = volumes.in_use(state, lease) or admission.never_allowed(lease, state)
    if refusal is not None:
        return refusal
    if state.live_count + state.queued_count >= policy.leases_max:
        return Refusal(
            code=RefusalCode.LIMIT,
            reason=f"the office has {policy.leases_max} leases and takes no more",
            do="Ask again when some have ended.",
        )
    own_limit = _own_limit(step, lease)
    rooms = schedule.rooms_for(state, lease)
    freed = replacing.with_its_parts_free(state, lease, rooms, step.now.ns, policy)
    if own_limit is None:
        found = fit(lease.wants, lease.tenant, rooms, mix=policy.share_across_tenants)
        if found is not None:
            return _grant_at_once(step, lease, *found)
        found = None if freed is None else fit(lease.wants, lease.tenant, freed, mix=policy.share_across_tenants)
        if found is not None:
            return _replace(step, lease, *found)
    refusal = admission.never_fits(lease, state, policy)
    whole = lease
    if refusal is not None:
        most = admission.most_ever(lease, state, policy)
        if most is None:
            return refusal
        lease = msgspec.structs.replace(lease, wants=most, asked=whole.wants)
        own_limit = _own_limit(step, lease)
    if own_limit is None:
        less = admission.smaller(whole, rooms, policy)
        if less is not None:
            return _offer(step, lease, less, rooms)
        less = None if freed is None else admission.smaller(whole, freed, policy)
        if less is not None:
            assert freed is not None
            found = fit(less, lease.tenant, freed, mix=policy.share_across_tenants)
            assert found is not None, "an offer was computed that does not fit"
            return _replace(step, msgspec.structs.replace(lease, wants=less, asked=whole.wants), *found)
    if command.wait_ns == 0:
        return _refuse_now(step, lease, own_limit, rooms if freed is None else freed)
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
            bound.bind(step, lease, command.process)
            return Granted(lease=lease)
        case LeaseStatus.ACTIVE | LeaseStatus.NOTICED:
            must_be_live(step, lease)
            step.order_grant(lease)  # again: the first answer may have been lost before the agent knew
            return Granted(lease=lease)
        case LeaseStatus.QUEUED:
            raise LeaseNotActive("the lease still waits in the queue", do="Wait for the event `ready`, then claim.")
        case _:
            raise ended_error(lease)


def decline(step: Step, schedule: Schedule, command: cmd.Decline) -> Answer:
    """No to an offer: back to the place in the line, or out of it if there is nothing (or no time) to wait for."""
    lease = find(step, command.tenant, command.lease)
    if lease.status is not LeaseStatus.GRANTED or not lease.offered:
        if lease.status in (LeaseStatus.ENDING, LeaseStatus.ENDED):
            raise ended_error(lease)
        if lease.status is LeaseStatus.QUEUED and lease.offers:
            return answer_now(step, lease)
        raise InvalidRequest("there is no open offer on this lease", do="See `sublet lease show`.")
    if lease.asked or (lease.wait_until_ns is not None and lease.wait_until_ns <= step.now.ns):
        beyond = f", and {admission.together(lease.asked)} is more than any node has" if lease.asked else ""
        step.end(lease, EndReason.WITHDRAWN, f"the offer was declined{beyond}")
        return Done(lease=lease)
    step.ungrant(lease, "the offer was declined")
    return answer_now(step, lease)


def attach(step: Step, schedule: Schedule, command: cmd.Attach) -> Answer:
    """A new epoch for a live lease: whoever held the old one is fenced from here on."""
    lease = find(step, command.tenant, command.lease)
    if not command.request_id or len(command.request_id) > 128:
        raise InvalidRequest("the request id is empty or too long")
    must_be_live(step, lease)
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
            process=command.process,
        )
    )
    bound.parked_follow(step, lease)
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
            step.emit(activity(step, lease, command.busy_ns, idle=lease.idle_since_ns is not None))
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
            return _offer_of(lease)
        case LeaseStatus.ENDING | LeaseStatus.ENDED:
            raise ended_error(lease)
        case _:
            return Granted(lease=lease)


def _lapsed(lease: LeaseRecord) -> LeaseEnded:
    """What a claim that came too late is told."""
    if lease.end is not None:
        return ended_error(lease)
    return LeaseNotActive(
        "the offer ran out before this claim", do="The request waits in the line again; claim it when it is ready."
    )


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
        expect_ns=command.expect_ns,
        selector=command.selector,
        renew=command.renew,
        name=command.name,
        labels=command.labels,
        holder=command.holder,
        resume=resuming.parking_of(command),
        replaces=command.replaces,
        retain_ns=command.retain_ns,
        process=command.process,
    )


def _answer_again(step: Step, lease: LeaseRecord, mark: str) -> Answer:
    if lease.fingerprint != mark:
        raise IdempotencyConflict("this request id was used for another request")
    if lease.status in LIVE_STATES:
        must_be_live(step, lease)
        step.order_grant(lease)
    return answer_now(step, lease)


def _grant_at_once(step: Step, lease: LeaseRecord, node: NodeId, parts: list[Part]) -> Answer:
    """The holder is at the other end of this very call, so the grant is claimed with it."""
    lease = _enter(step, lease)
    step.grant(lease, node, parts)
    step.claim(lease)
    return Granted(lease=lease)


def _replace(step: Step, lease: LeaseRecord, node: NodeId, parts: list[Part]) -> Answer:
    """It is granted when what its holder's present lease has is clean; until then it has a place that nobody else can
    take."""
    lease = _enter(step, lease)
    step.replace(lease, node, parts)
    return answer_now(step, lease)


def _offer(step: Step, lease: LeaseRecord, less: tuple[Want, ...], rooms: RoomsByNode) -> Answer:
    """Set the smaller amount aside while the holder thinks about it."""
    found = fit(less, lease.tenant, rooms, mix=step.policy.share_across_tenants)
    assert found is not None, "an offer was computed that does not fit"
    lease = _enter(step, lease)
    step.grant(lease, *found, offered=True)
    return answer_now(step, lease)


def _offer_of(lease: LeaseRecord) -> Offer:
    """What is smaller than it was asked for; where several kinds are, the first of them."""
    for want in lease.asked or lease.wants:
        offered = min(part.amount for part in lease.parts if part.kind is want.kind)
        if offered < want.amount:
            return Offer(lease=lease, asked=want.amount, offered=offered, kind=want.kind)
    raise AssertionError(f"{lease.id} is offered all it asked for")


def _own_limit(step: Step, lease: LeaseRecord) -> str | None:
    """What the tenant's own quota says against a grant now."""
    state = step.state
    quota = state.tenants[lease.tenant].quota
    if quota == NO_QUOTA:
        return None
    held = held_beside(state, lease)
    return admission.over_quota(lease.wants, quota, held) or admission.over_seconds(state, lease, step.now)


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
    waits = why_not_yet(step.state, lease)
    if waits is not None:
        return Refusal(code=RefusalCode.CAPACITY, reason=waits, do="Wait in line for it.")
    none = "no matching GPU is free" if want.kind is Kind.GPU else "nothing is free"
    said = f"the largest that is free is {admission.amount_text(want.kind, free)}" if free else none
    return Refusal(
        code=RefusalCode.CAPACITY,
        reason=f"{admission.not_free(lease)}{admission.out_of_service(lease, step.state)}; {said}"
        f"{admission.in_the_way(lease, step.state)}",
        do="Wait in line for it, or ask for less.",
        would_fit=free,
        estimate_ns=estimate.estimate_if_queued(lease, step.state, step.now, step.policy),
    )
