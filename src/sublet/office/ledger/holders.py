"""Commands of holders: acquire, claim, attach, decline, release."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import msgspec

from sublet.errors import (
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    NotFound,
    QuotaExceeded,
    StaleEpoch,
    Unauthorized,
)
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import admission, bound_leases, budgets, estimate, explain, replacement, volumes
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done, Granted, GrantedMany, Offer, Place, Refusal, RefusalCode
from sublet.office.ledger.groups import gpu_millis, millis_left
from sublet.office.ledger.lookup import ended_error, find, must_be_live
from sublet.office.ledger.placement import RoomsByNode, fit, fit_many, is_called
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import position
from sublet.office.ledger.records import LeaseRecord, TenantRecord, Want
from sublet.office.ledger.renewals import activity
from sublet.office.ledger.scheduler import Schedule
from sublet.office.ledger.step import Step, notify_order
from sublet.office.ledger.volume_placement import why_not_yet
from sublet.values import NS_PER_S, Kind, LeaseId, NodeId, RequestId, format_duration
from sublet.wire.orders import Parking, Part

REQUEST_ID_MAX: Final = 120
"""Of a request for many leases: each but the first is known by this, a slash and its number."""


def acquire(step: Step, schedule: Schedule, command: cmd.Acquire) -> Answer:
    """Exactly one of grant, queue place, offer and refusal.

    A request for more than any node could ever have, which would take less (``or_smaller``), asks for the most there
    is. What is granted of that is an offer, now or at its turn: it is not what was asked for, so the holder is asked. A
    no, or silence, ends the request, since there is nothing larger to wait for. While all of it is in use the request
    waits in the queue like any other: to refuse it because the devices are busy, when it would have had one a minute
    before, would tell the holder that it cannot be had at all.
    """
    state, policy = step.state, step.policy
    tenant = state.tenants.get(command.tenant)
    if tenant is None:
        raise Unauthorized("there is no such tenant")
    if tenant.disabled:
        raise Unauthorized(f"tenant {tenant.id} is disabled", do="Ask the operator of this office.")
    if command.resume is None and not admission.leaves_size_out(command):
        admission.check_request(command, policy)
    mark = admission.fingerprint(command)
    known = state.requests.get((command.tenant, command.request_id))
    if known is not None:
        return _answer_again(step, state.leases[known], mark)
    return _acquire_new(step, schedule, command, mark, tenant)


def acquire_many(step: Step, schedule: Schedule, command: cmd.AcquireMany) -> Answer:
    """As many leases as fit now, of those that are asked for and as far as the quota goes; the answer to a repeated
    request is the same leases again.

    Where none fits, the answer is what it would be for one: a queue place or a refusal. That is for programs that take
    one: with a higher ``at_least`` nothing waits, since only requests of which each is for one node stand in the queue.
    """
    state, policy, first = step.state, step.policy, command.each
    tenant = state.tenants.get(first.tenant)
    if tenant is None:
        raise Unauthorized("there is no such tenant")
    _check_many(command, policy)
    admission.check_request(first, policy)
    count = len(command.leases)
    mark = admission.fingerprint(first, "many", count, command.at_least)
    ids = [first.request_id, *(RequestId(f"{first.request_id}/{index}") for index in range(1, count))]
    known = [state.requests[first.tenant, one] for one in ids if (first.tenant, one) in state.requests]
    if known:
        return _many_again(step, [state.leases[lease] for lease in known], mark)
    if any(lease in state.leases for lease in command.leases) or len(set(command.leases)) < count:
        raise InvalidRequest("the lease id is taken")
    lease = _record(step, first, mark)
    refusal = _not_allowed(step, lease, tenant)
    if refusal is not None:
        return refusal
    most, own_limit = _within_limits(step, lease, count)
    rooms = schedule.rooms_for(state, lease, step.now.ns)
    found = fit_many(lease.wants, lease.tenant, rooms, most, mix=policy.share_across_tenants)
    left = millis_left(state, lease)
    if left is not None:
        found = found[: sum(taken <= max(0, left) for taken in accumulate(gpu_millis(parts) for _, parts in found))]
    if len(found) < command.at_least:
        if command.at_least > 1:
            return _too_few(step, lease, command, len(found), own_limit if len(found) == most else None)
        return _acquire_new(step, schedule, first, mark, tenant)
    granted: list[LeaseRecord] = []
    holds: list[tuple[LeaseId, int]] = []
    for (node, parts), lease_id, request_id in zip(found, command.leases, ids, strict=False):
        each = msgspec.structs.replace(first, lease=lease_id, request_id=request_id)
        made = _grant_at_once(step, _record(step, each, mark), node, parts)
        granted.append(made.lease)
        holds += step.holds
    step.holds = tuple(holds)
    return GrantedMany(leases=tuple(granted))


def _acquire_new(step: Step, schedule: Schedule, command: cmd.Acquire, mark: str, tenant: TenantRecord) -> Answer:
    """The answer to a request that was not made before."""
    state, policy = step.state, step.policy
    if command.replaces is not None:
        old = find(step, command.tenant, command.replaces)
        must_be_live(step, old)
        command = replacement.check(state, old, command)
    if command.resume is not None:
        command = wanting(step, command)
        admission.check_request(command, policy)
    elif command.name is not None or command.retain_ns is not None or admission.leaves_size_out(command):
        command = volumes.wanting(step, command)
        admission.check_request(command, policy)
    if command.lease in state.leases:
        raise InvalidRequest("the lease id is taken")
    lease = _record(step, command, mark)
    refusal = _not_allowed(step, lease, tenant)
    if refusal is not None:
        return refusal
    own_limit = admission.own_limit(state, lease, step.now)
    rooms = schedule.rooms_for(state, lease, step.now.ns)
    freed = replacement.with_its_parts_free(state, lease, rooms, step.now.ns, policy)
    if own_limit is None:
        found = admission.place(lease, state, rooms, policy)
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
        lease = msgspec.structs.replace(lease, wants=most, full_wants=whole.wants)
        own_limit = admission.own_limit(state, lease, step.now)
    if own_limit is None:
        less = admission.of_other_model(whole, rooms, policy) or admission.smaller(whole, rooms, policy)
        if less is not None:
            return _offer(step, lease, less, rooms)
        less = None if freed is None else admission.smaller(whole, freed, policy)
        if less is not None:
            assert freed is not None
            found = fit(less, lease.tenant, freed, mix=policy.share_across_tenants)
            assert found is not None, "an offer was computed that does not fit"
            return _replace(step, msgspec.structs.replace(lease, wants=less, full_wants=whole.wants), *found)
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
                schedule.on_timer(step, lease)
                raise _claim_too_late(lease)
            step.claim(lease)
            bound_leases.bind(step, lease, command.process)
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
    if lease.full_wants or (lease.wait_until_ns is not None and lease.wait_until_ns <= step.now.ns):
        beyond = f", and {admission.together(lease.full_wants)} is more than any node has" if lease.full_wants else ""
        step.end(lease, EndReason.WITHDRAWN, f"the offer was declined{beyond}")
        return Done(lease=lease)
    step.ungrant(lease, "the offer was declined")
    return answer_now(step, lease)


def attach(step: Step, schedule: Schedule, command: cmd.Attach) -> Answer:
    """A new epoch for a live lease: the holder of the old one is fenced from here on."""
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
            peer=command.peer,
        )
    )
    bound_leases.parked_follow(step, lease)
    step.order_grant(lease)
    if lease.notice is not None:  # what the old epoch was told, the new one has to hear
        step.orders.append(notify_order(lease))
    return Granted(lease=lease)


def release(step: Step, schedule: Schedule, command: cmd.Release) -> Answer:
    """Give it back, or leave the line. Twice is harmless."""
    of_other = step.state.leases.get(command.lease) if command.operator else None
    if of_other is not None and of_other.tenant != command.tenant:
        raise NotFound(
            f"lease {of_other.id} is held by tenant {of_other.tenant}",
            do=f"`sublet lease revoke {of_other.id}` ends it.",
        )
    lease = find(step, command.tenant, command.lease)
    if command.epoch is not None and lease.epoch != command.epoch:
        raise StaleEpoch(
            f"epoch {command.epoch} of lease {lease.id} is not the live one", do="It is held elsewhere now."
        )
    if command.gone:  # it speaks of the line; a grant that came in between has its own claim window
        if lease.status is LeaseStatus.QUEUED:
            step.end(lease, EndReason.HOLDER_GONE, "it was not asked for any more")
    elif lease.status is LeaseStatus.QUEUED:
        step.end(lease, EndReason.WITHDRAWN)
    elif lease.status is LeaseStatus.GRANTED:
        step.end(lease, EndReason.WITHDRAWN, "it was not claimed")
    elif lease.status in LIVE_STATES:
        if command.busy_ns > 0:
            step.emit(activity(step, lease, command.busy_ns, idle=lease.idle_since_ns is not None))
        step.end(lease, EndReason.RELEASED)
    return Done(lease=lease)


def answer_now(step: Step, lease: LeaseRecord, place: int | None = None) -> Answer:
    """The answer to an acquire as of this moment. ``place``: where it stands in the line, if that is known."""
    match lease.status:
        case LeaseStatus.QUEUED:
            if place is None:
                place = position(step.state, lease, step.now.ns, step.policy)
            return Place(
                lease=lease,
                position=place,
                reason=admission.why_waiting(lease, step.state, step.now, step.policy, place),
                estimate_ns=estimate.estimate_ns(lease, step.state, step.now, step.policy, place),
            )
        case LeaseStatus.GRANTED if lease.offered:
            return _offer_of(step, lease)
        case LeaseStatus.ENDING | LeaseStatus.ENDED:
            raise ended_error(lease)
        case _:
            return Granted(lease=lease)


def _claim_too_late(lease: LeaseRecord) -> LeaseEnded:
    """What a claim that came too late is told."""
    if lease.end is not None:
        return ended_error(lease)
    return LeaseNotActive(
        "the offer ran out before this claim", do="The request waits in the line again; claim it when it is ready."
    )


def _not_allowed(step: Step, lease: LeaseRecord, tenant: TenantRecord) -> Refusal | None:
    """What stands against the request, whatever is free."""
    state, policy = step.state, step.policy
    if lease.pays_priority:
        admission.check_pays_priority(lease, state)
    if lease.tier.rank > tenant.tier_max.rank:
        return Refusal(
            code=RefusalCode.QUOTA,
            reason=f"this tenant may ask for tier {tenant.tier_max} at most, not {lease.tier}",
            do=f"Ask with tier {tenant.tier_max}.",
        )
    refusal = budgets.refusal(state, lease, step.now) or volumes.in_use(state, lease)
    refusal = refusal or admission.never_allowed(lease, state)
    if refusal is None and state.live_count + state.queued_count >= policy.leases_max:
        return Refusal(
            code=RefusalCode.LIMIT,
            reason=f"the office has {policy.leases_max} leases and takes no more",
            do="Ask again when some have ended.",
        )
    return refusal


def _record(step: Step, command: cmd.Acquire, mark: str) -> LeaseRecord:
    wait_ns, before = command.wait_ns, _before(step, command)
    has_priority_later = step.state.rates.priority is not None and not command.pays_priority
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
        resume=parking_of(command),
        replaces=command.replaces,
        retain_ns=command.retain_ns,
        process=command.process,
        peer=command.peer,
        attained_ns=0 if before is None else _attained_ns(before, step.now.ns),
        pays_priority=command.pays_priority,
        has_priority=command.pays_priority,
        priority_at_ns=step.now.ns + step.policy.priority_after_ns if has_priority_later else None,
        goes_on=before.id if before is not None and before.end is not None else None,
    )


def _before(step: Step, command: cmd.Acquire) -> LeaseRecord | None:
    """The lease with whose work the request goes on: the one that it replaces or resumes, or else one like it that was
    taken from its tenant, or that its tenant released, within the last maximum hold."""
    state = step.state
    if command.replaces is not None:
        return state.leases.get(command.replaces)
    if command.resume is not None:
        parking = state.leases.get(command.resume)
        return None if parking is None or parking.parks is None else state.leases.get(parking.parks.of)
    for lease in state.taken_since(command.tenant, step.now.ns - step.policy.max_hold_ns):
        is_like_it = lease.wants == command.wants and lease.tier is command.tier
        if is_like_it and _attained_ns(lease, step.now.ns):
            return lease
    return None


def _attained_ns(before: LeaseRecord, now_ns: int) -> int:
    """For how long its holder has held it, and what that went on with, without a break. What was parked in a pause is
    no work that goes on.

    What was released counts less by the time since nothing runs there. So a holder that releases it before the maximum,
    and at once asks anew, has held it without a break; one that rests for as long begins anew.
    """
    if before.claimed_at_ns is None:
        return 0
    if before.end is not None and before.end.reason is EndReason.RELEASED:
        rests_ns = before.end.at_ns if before.idle_since_ns is None else before.idle_since_ns
        return max(0, before.attained_ns + rests_ns - before.claimed_at_ns - (now_ns - rests_ns))
    if before.end is not None and before.idle_since_ns is not None:
        return 0
    until_ns = now_ns if before.end is None else before.end.at_ns
    return before.attained_ns + until_ns - before.claimed_at_ns


def _answer_again(step: Step, lease: LeaseRecord, mark: str) -> Answer:
    if lease.fingerprint != mark:
        raise IdempotencyConflict("this request id was used for another request")
    if lease.status in LIVE_STATES:
        must_be_live(step, lease)
        step.order_grant(lease)
    return answer_now(step, lease)


def _check_many(command: cmd.AcquireMany, policy: Policy) -> None:
    """Refuse what cannot be asked of many leases; raises InvalidRequest."""
    first, count = command.each, len(command.leases)
    if not 1 <= count <= policy.many_max:
        raise InvalidRequest(
            f"{count} leases in one request are not possible", do=f"Ask for 1 to {policy.many_max} at a time."
        )
    if not 1 <= command.at_least <= count:
        raise InvalidRequest(
            f"at_least={command.at_least} is not between 1 and the {count} leases asked for", do="Correct at_least."
        )
    if command.at_least > 1 and first.wait_ns != 0:
        raise InvalidRequest(
            "a request for at least several leases does not wait in the queue",
            do="Use wait=0 and ask again later, or at_least=1.",
        )
    if (
        first.resume is not None
        or first.replaces is not None
        or any(want.least is not None or want.other is not None for want in first.wants)
    ):
        raise InvalidRequest(
            "resume, replaces, or_smaller and or_model are for one lease", do="Leave them out, or ask for one lease."
        )
    if any(want.kind is Kind.BLOCK for want in first.wants) and (first.name is not None or first.retain_ns is not None):
        raise InvalidRequest("one volume is for one lease", do="Leave the name out, or ask for one lease.")
    if len(first.request_id) > REQUEST_ID_MAX:
        raise InvalidRequest(
            "the request id of a request for many leases is too long", do=f"Use up to {REQUEST_ID_MAX} characters."
        )


def _many_again(step: Step, leases: list[LeaseRecord], mark: str) -> Answer:
    """The leases of a repeated request that have not ended."""
    if any(lease.fingerprint != mark for lease in leases):
        raise IdempotencyConflict("this request id was used for another request")
    if leases[0].status in (LeaseStatus.QUEUED, LeaseStatus.GRANTED):  # none was free then, and one waits
        return answer_now(step, leases[0])
    live: list[LeaseRecord] = []
    holds: list[tuple[LeaseId, int]] = []
    for lease in leases:
        try:
            must_be_live(step, lease)
        except LeaseEnded:
            continue
        step.order_grant(lease)
        live.append(lease)
        holds += step.holds
    if not live:
        raise ended_error(leases[0])
    step.holds = tuple(holds)
    return GrantedMany(leases=tuple(live))


def _within_limits(step: Step, lease: LeaseRecord, count: int) -> tuple[int, str | None]:
    """How many leases like this one the tenant may have now, up to ``count``, and what stands against more."""
    state, policy = step.state, step.policy
    most = min(count, policy.leases_max - state.live_count - state.queued_count)
    for number in range(most):
        over = admission.own_limit(state, lease, step.now, beside=number)
        if over is not None:
            return number, over
    return most, None


def _too_few(step: Step, lease: LeaseRecord, command: cmd.AcquireMany, found: int, own_limit: str | None) -> Refusal:
    """Why fewer than ``at_least`` are granted, so none."""
    never = admission.never_fits(lease, step.state, step.policy)
    if never is not None:
        return never
    wanted = f"{command.at_least} leases with {admission.together(lease.wants)} each"
    if own_limit is not None:
        return Refusal(
            code=RefusalCode.QUOTA, reason=f"{wanted} are too many: {own_limit}", do=QuotaExceeded.default_do
        )
    return Refusal(
        code=RefusalCode.CAPACITY,
        reason=f"{wanted} are not free now{admission.out_of_service(lease, step.state)}; {found} would fit",
        do="Ask again later, or for fewer.",
    )


def _grant_at_once(step: Step, lease: LeaseRecord, node: NodeId, parts: list[Part]) -> Granted:
    """The holder is at the other end of this very call, so the grant is claimed with it."""
    lease = _enter(step, lease)
    step.grant(lease, node, parts)
    step.claim(lease)
    return Granted(lease=lease)


def _replace(step: Step, lease: LeaseRecord, node: NodeId, parts: list[Part]) -> Answer:
    """It is granted when what its holder's present lease has is clean; until then it has a place that no other request
    can take."""
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


def _offer_of(step: Step, lease: LeaseRecord) -> Offer:
    """What is smaller than it was asked for, or of another model; where several kinds are, the first of them."""
    state = step.state
    for want in lease.full_wants or lease.wants:
        parts = [part for part in lease.parts if part.kind is want.kind]
        offered = min(want.amount, *(part.amount for part in parts))
        model, prices = state.resources[parts[0].resource].device.model, None
        is_other = want.other is not None and not is_called(want.model or "", model)
        if offered == want.amount and not is_other:
            continue
        devices = [each.device for each in state.resources.values() if each.device.kind is Kind.GPU]
        asked_models = [device.model for device in devices if is_called(want.model or "", device.model)]
        if is_other and asked_models:
            prices = (
                admission.price_of(state, want, model, pays_priority=lease.pays_priority),
                admission.price_of(state, want, asked_models[0], pays_priority=lease.pays_priority),
            )
        return Offer(
            lease=lease,
            requested=want.amount,
            offered=offered,
            kind=want.kind,
            model=model if is_other else None,
            estimate_ns=None if lease.full_wants else estimate.estimate_if_queued(lease, state, step.now, step.policy),
            prices=prices,
            currency=state.rates.currency if prices else "",
        )
    raise AssertionError(f"{lease.id} is offered all it asked for")


def _queue(step: Step, schedule: Schedule, lease: LeaseRecord) -> Answer:
    refusal = _queue_is_full(step, lease)
    if refusal is not None:
        return refusal
    lease = _enter(step, lease)
    schedule.make_room_if_next(step, lease)
    return answer_now(step, lease)


def _queue_is_full(step: Step, lease: LeaseRecord) -> Refusal | None:
    """A refusal if as many requests of its tenant, its group or of all wait as may."""
    state, policy = step.state, step.policy
    tenant, group = lease.tenant, state.group_of(lease.tenant)
    own, of_group = state.quota_of(tenant).queue, state.group(group).quota.queue
    limits = (
        (policy.queue_tenant_max if own is None else own, state.waiting_of(tenant), "of your requests wait"),
        (of_group, 0 if of_group is None else state.waiting_of_group(group), f"requests of group {group} wait"),
        (policy.queue_max, state.queued_count, "requests wait"),
    )
    for limit, waiting, whose in limits:
        if limit is not None and waiting >= limit:
            first = next((state.leases[line[0][-1]] for line in state.lines_of(tenant)), None)
            in_ns = None if first is None else estimate.estimate_ns(first, state, step.now, policy)
            when = "when one of them has been granted" if in_ns is None else f"in about {format_duration(in_ns)}"
            return Refusal(
                code=RefusalCode.LIMIT,
                reason=f"the queue is full: {waiting} {whose} already, and {limit} may",
                do=f"Ask again {when}, or withdraw one.",
                estimate_ns=in_ns,
            )
    return None


def _enter(step: Step, lease: LeaseRecord) -> LeaseRecord:
    """Into the books; from here on it is known by its request id."""
    step.emit(ev.Queued(lease=lease))
    return step.state.leases[lease.id]


def _refuse_now(step: Step, lease: LeaseRecord, own_limit: str | None, rooms: RoomsByNode) -> Refusal:
    free = admission.what_would_fit(lease, rooms, step.policy)
    want = lease.wants[0]
    if own_limit is not None:
        state, at_ns, do = step.state, None, QuotaExceeded.default_do
        if admission.over_seconds(state, lease, step.now) is not None:
            at_ns = admission.seconds_free_at(state, lease, step.now)
            do = do if at_ns is None else f"Ask again in {_whole_seconds(at_ns - step.now.ns)}."
        elif admission.is_groups_limit(state, lease) and not admission.would_fit_without_own(state, lease):
            at_ns = explain.members_leave_at(lease, state, step.now, step.policy)
            when = (
                ""
                if at_ns is None
                else f"; the first of their leases ends within {_whole_seconds(at_ns - step.now.ns)}"
            )
            do = f"Wait in line for it: other members of your group have what its limit allows{when}."
        in_ns = None if at_ns is None else max(0, at_ns - step.now.ns)
        reason = admission.limit_sentence(state, lease, step.now) or own_limit
        return Refusal(code=RefusalCode.QUOTA, reason=reason, do=do, estimate_ns=in_ns)
    waits = why_not_yet(step.state, lease)
    if waits is not None:
        return Refusal(code=RefusalCode.CAPACITY, reason=waits, do="Wait in line for it.")
    other = admission.other_model_that_fits(lease, step.state, rooms, step.policy)
    fewer = admission.fewer_gpus(lease, rooms, step.policy)
    none = "no matching GPU is free" if want.kind is Kind.GPU else "nothing is free"
    reason = f"the largest that is free is {admission.amount_text(want.kind, free)}" if free else none
    return Refusal(
        code=RefusalCode.CAPACITY,
        reason=f"{admission.not_free(lease)}{admission.out_of_service(lease, step.state)}; {reason}"
        f"{admission.in_the_way(lease, step.state)}",
        do=f"Wait in line for it, or ask for {other or fewer or 'less'}.",
        would_fit=free,
        estimate_ns=estimate.estimate_if_queued(lease, step.state, step.now, step.policy),
    )


def _whole_seconds(ns: int) -> str:
    """Not less."""
    return format_duration(-(-max(0, ns) // NS_PER_S) * NS_PER_S)


# ------------------------------------------------------------------------------------------------------------- resuming
#
# Requests that resume parked guests: whose they are, whether they are still there, and what they need.


def wanting(step: Step, command: cmd.Acquire) -> cmd.Acquire:
    """The request to go on, spelt out; raises if there is nothing to go on with."""
    assert command.resume is not None
    if command.wants:
        raise InvalidRequest("resume= takes its resources from the parked lease", do="Leave the amounts out.")
    lease = find(step, command.tenant, command.resume)
    if lease.parks is None:
        raise InvalidRequest(
            f"{lease.id} is no parking lease", do="Name the one that `lease.end.parked` of the lease before says."
        )
    must_be_live(step, lease)
    check_epoch(lease, command)
    if lease.parks.resumed_by is not None:
        raise InvalidRequest(
            f"{lease.id} is being resumed already, as {lease.parks.resumed_by}", do="Claim or release that one."
        )
    return msgspec.structs.replace(command, wants=lease.parks.wants, selector={}, resume_epoch=lease.epoch)


def check_epoch(lease: LeaseRecord, command: cmd.Acquire) -> None:
    """If another program attached to the parking lease since, only that one may go on with it."""
    if command.resume_epoch is not None and command.resume_epoch != lease.epoch:
        raise StaleEpoch(
            f"epoch {command.resume_epoch} of {lease.id} is old; {lease.epoch} is live",
            do="Another program took over what is parked there.",
        )


def parking_of(command: cmd.Acquire) -> Parking | None:
    """What the request, spelt out, goes on with."""
    if command.resume is None or command.resume_epoch is None:
        return None
    return Parking(lease=LeaseId(command.resume), epoch=command.resume_epoch)
