"""The control API's leases: each handler turns a message into a command, and the answer into a message."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    NotFound,
    SubletError,
)
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import LeaseEnd
from sublet.office.api.from_wire import (
    acquire_command,
    acquire_many_command,
    busy_ns,
    flag,
    number,
    request_id,
    seconds,
    text,
)
from sublet.office.api.service import ApiCall, ApiReply, ApiService, CommandCall, json_reply
from sublet.office.api.to_wire import offer_answer, place_answer, refusal_answer, renew_answer, rfc3339, volume_view
from sublet.office.core import BATCH_MAX
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Answer, Granted, GrantedMany, Offer, Place, Refusal
from sublet.office.ledger.records import LeaseRecord, Now, VolumeRecord, volume_key
from sublet.values import Epoch, LeaseId, RequestId, TenantId, parse_duration_ns, valid_labels
from sublet.wire.http import (
    AcquireRequest,
    AcquisitionRequest,
    ActivityRequest,
    AttachRequest,
    ClaimRequest,
    EndsAnswer,
    EndsRequest,
    EndView,
    ErrorView,
    FailedGrant,
    GrantAnswer,
    GrantsAnswer,
    LeaseView,
    OfferAnswer,
    PlaceAnswer,
    RefusalAnswer,
    ReleaseItem,
    ReleaseRequest,
    ReleasesAnswer,
    ReleasesRequest,
    RenewalsAnswer,
    RenewalsRequest,
    RenewAnswer,
    RenewItem,
    RenewRequest,
    TokenView,
    UnbindRequest,
    VolumeView,
)

WAIT_MAX_S: Final = 60.0
"""The longest that one request waits for a change; ask again."""
AT_ONCE: Final = 128
"""Leases of a listing that are written before others are answered."""
RENEWALS_MAX: Final = 4096
"""Renewals, or releases, in one message."""

T = TypeVar("T")
_Acquired: TypeAlias = GrantAnswer | PlaceAnswer | OfferAnswer | RefusalAnswer


# ---- asking ----


def acquire(service: ApiService, call: ApiCall) -> CommandCall:
    request: AcquireRequest = call.body
    lease = _new_lease()
    process = call.process(request.holder_pid)
    command = acquire_command(request, call.caller, lease, service.driver.ledger.policy, process)
    _check_begins(service, command.tenant, command.request_id)

    def render(answer: Answer, now: Now) -> _Acquired:
        return _answer(service, answer, now)

    def finish(answer: _Acquired) -> ApiReply:
        match answer:
            case GrantAnswer():
                answer.token = _token(service, request.token, call, answer.lease.id, answer.lease.epoch)
                return json_reply(answer, 201)
            case PlaceAnswer():
                service.counting.metrics.places.inc()
                return json_reply(answer, 202)
            case RefusalAnswer():
                service.rate_limits.no_lease(call.caller.tenant)
                service.counting.metrics.refusals.inc(answer.code)
                return json_reply(answer, 409)
            case _:
                return json_reply(answer, 200)

    return CommandCall(command, render, finish)


def acquire_many(service: ApiService, call: ApiCall) -> CommandCall:
    request: AcquisitionRequest = call.body
    process = call.process(request.request.holder_pid)
    if request.request.token:
        raise InvalidRequest("a token does not come with many leases", do="Ask for it with GET /v1/leases/ID/token.")
    command = acquire_many_command(request, call.caller, _new_lease, service.driver.ledger.policy, process)
    tenant, count = call.caller.tenant, len(command.leases)
    _check_begins(service, tenant, command.each.request_id, count)

    def render(answer: Answer, now: Now) -> _Acquired | GrantsAnswer:
        if isinstance(answer, GrantedMany):
            return GrantsAnswer(leases=[service.view(lease, now) for lease in answer.leases], failed=[])
        return _answer(service, answer, now)

    def without(answer: GrantsAnswer, unheld: Mapping[LeaseId, SubletError]) -> GrantsAnswer:
        held = [view for view in answer.leases if view.id not in unheld]
        failed = [FailedGrant(lease=lease, error=error_view(error)) for lease, error in unheld.items()]
        return GrantsAnswer(leases=held, failed=failed)

    def finish(answer: _Acquired | GrantsAnswer) -> ApiReply:
        begun = len(answer.leases) + len(answer.failed) if isinstance(answer, GrantsAnswer) else 1
        service.rate_limits.no_lease(tenant, count if isinstance(answer, RefusalAnswer) else count - begun)
        match answer:
            case GrantsAnswer() | GrantAnswer():
                return json_reply(answer, 201)
            case PlaceAnswer():
                service.counting.metrics.places.inc()
                return json_reply(answer, 202)
            case RefusalAnswer():
                service.counting.metrics.refusals.inc(answer.code)
                return json_reply(answer, 409)
            case _:
                return json_reply(answer, 200)

    return CommandCall(command, render, finish, without)


def claim(service: ApiService, call: ApiCall) -> CommandCall:
    request: ClaimRequest = call.body
    command = cmd.Claim(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(call.id),
        epoch=request.epoch,
        process=call.process(request.holder_pid),
    )
    return CommandCall(command, _render_grant(service, call.id), _grant_reply(service, request.token, call))


def decline(service: ApiService, call: ApiCall) -> CommandCall:
    command = cmd.Decline(
        tenant=call.caller.tenant, operator=call.caller.operator, peer=call.caller.peer, lease=LeaseId(call.id)
    )
    return CommandCall(command, lambda answer, now: _current(service, call.id, now), json_reply)


def attach(service: ApiService, call: ApiCall) -> CommandCall:
    request: AttachRequest = call.body
    service.count_leases(call.caller.tenant)
    command = cmd.Attach(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(call.id),
        request_id=request_id(request.request_id),
        holder=text(request.holder, "holder"),
        process=call.process(request.holder_pid),
    )
    return CommandCall(command, _render_grant(service, call.id), _grant_reply(service, request.token, call))


def unbind(service: ApiService, call: ApiCall) -> CommandCall:
    request: UnbindRequest = call.body
    command = cmd.Unbind(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(call.id),
        epoch=request.epoch,
    )
    return CommandCall(command, _render_view(service, call.id), json_reply)


def _grant_reply(service: ApiService, wanted: bool, call: ApiCall) -> Callable[[GrantAnswer], ApiReply]:
    def finish(grant: GrantAnswer) -> ApiReply:
        grant.token = _token(service, wanted, call, grant.lease.id, grant.lease.epoch)
        return json_reply(grant)

    return finish


# ---- keeping ----


def renew(service: ApiService, call: ApiCall) -> CommandCall:
    request: RenewRequest = call.body
    command = cmd.Renew(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(call.id),
        epoch=request.epoch,
        active=request.active,
        busy_ns=busy_ns(request.busy),
        ttl_ns=None if request.ttl is None else parse_duration_ns(request.ttl, "ttl"),
        lead_ns=_lead_ns(request.lead),
    )

    def finish(answer: RenewAnswer) -> ApiReply:
        answer.token = _token(service, request.token, call, answer.lease, answer.epoch)
        return json_reply(answer)

    return CommandCall(command, _render_renewal(service, command.lease), finish)


async def renewals(service: ApiService, call: ApiCall) -> ApiReply:
    request: RenewalsRequest = call.body
    _check_length(service, len(request.items), "renewals")
    commands = [_renew_item(call, item) for item in request.items]  # all are well-formed before the first is sent
    done, errors = await _each(service, call, commands, _render_renewal)
    return json_reply(RenewalsAnswer(items=done, errors=errors))


def _check_length(service: ApiService, length: int, what: str) -> None:
    if length > RENEWALS_MAX:
        service.limit(f"{what}_per_message")
        raise InvalidRequest(
            f"{length} {what} are more than one message may have", do=f"Send at most {RENEWALS_MAX} at a time."
        )


async def _each(
    service: ApiService,
    call: ApiCall,
    commands: Sequence[cmd.Renew] | Sequence[cmd.Release],
    render: Callable[[ApiService, str], Callable[[Answer, Now], T]],
) -> tuple[list[T | None], list[ErrorView | None]]:
    """Answers to commands of one message, each on its own, beside the errors of those that failed. Each counts as a
    request, and of many a commit at a time is given to the driver: others come in between."""
    service.count_requests(call.caller.tenant, len(commands) - 1, keeps=True)  # the message itself was counted
    answers: list[asyncio.Future[T]] = []
    for at in range(0, len(commands), BATCH_MAX):
        await service.turn(call.caller.tenant)
        some = commands[at : at + BATCH_MAX]
        answers += [service.driver.submit(command, render(service, command.lease)) for command in some]
    done: list[T | None] = []
    errors: list[ErrorView | None] = []
    for answer in await asyncio.gather(*answers, return_exceptions=True):
        if isinstance(answer, SubletError):
            done.append(None)
            errors.append(error_view(answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done.append(answer)
            errors.append(None)
    return done, errors


def _lead_ns(seconds: float) -> int:
    return parse_duration_ns(seconds, "lead", zero_ok=True) if seconds else 0


def _renew_item(call: ApiCall, item: RenewItem) -> cmd.Renew:
    return cmd.Renew(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(item.lease),
        epoch=item.epoch,
        active=item.active,
        busy_ns=busy_ns(item.busy),
        lead_ns=_lead_ns(item.lead),
    )


def activity(service: ApiService, call: ApiCall) -> CommandCall:
    request: ActivityRequest = call.body
    command = cmd.NoteActivity(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(call.id),
        epoch=request.epoch,
        active=request.active,
        busy_ns=busy_ns(request.busy),
    )
    return CommandCall(command, _render_view(service, call.id), json_reply)


def release(service: ApiService, call: ApiCall) -> CommandCall:
    request: ReleaseRequest = call.body
    command = cmd.Release(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(call.id),
        busy_ns=busy_ns(request.busy),
    )
    return CommandCall(command, _render_view(service, call.id), json_reply)


async def releases(service: ApiService, call: ApiCall) -> ApiReply:
    request: ReleasesRequest = call.body
    _check_length(service, len(request.items), "releases")
    commands = [_release_item(call, item) for item in request.items]  # all are well-formed before the first is sent
    done, errors = await _each(service, call, commands, _render_view)
    return json_reply(ReleasesAnswer(items=done, errors=errors))


def _release_item(call: ApiCall, item: ReleaseItem) -> cmd.Release:
    return cmd.Release(
        tenant=call.caller.tenant,
        operator=call.caller.operator,
        peer=call.caller.peer,
        lease=LeaseId(item.lease),
        epoch=item.epoch,
        busy_ns=busy_ns(item.busy),
    )


# ---- looking ----


async def leases(service: ApiService, call: ApiCall) -> ApiReply:
    """Live leases, newest first; with ``all`` the ended ones that are still remembered."""
    ended_too = flag(call.query, "all")
    tenant = call.caller.tenant if flag(call.query, "own") else call.query.get("tenant")
    now = service.driver.now()
    found = [
        lease
        for lease in service.driver.ledger.state.leases.values()
        if (ended_too or lease.status is not LeaseStatus.ENDED)
        and (call.caller.operator or lease.tenant == call.caller.tenant)
        and (tenant is None or lease.tenant == tenant)
    ]
    found.sort(key=lambda lease: lease.arrival, reverse=True)
    views: list[LeaseView] = []
    for at in range(0, len(found), AT_ONCE):
        await service.turn(call.caller.tenant)
        views += [service.view(lease, now) for lease in found[at : at + AT_ONCE]]
    return json_reply(views)


async def show(service: ApiService, call: ApiCall) -> ApiReply:
    """How the lease is now, or, with ``wait``, once its status is no more what it was."""
    wait_s = number(call.query, "wait", most=WAIT_MAX_S)
    lease = service.lease(call)
    if lease.tenant == call.caller.tenant:
        service.driver.presence.seen(lease.id, service.driver.clock.now_ns())
    if wait_s:
        await service.changed(lease, call.query.get("after", lease.status.value), call, wait_s)
    await service.driver.wait_confirmed(lease.id)
    service.lease(call)  # it may have been forgotten meanwhile
    return json_reply(_current(service, call.id, service.driver.now()))


async def ends(service: ApiService, call: ApiCall) -> ApiReply:
    """How many leases with these labels have not ended, once none is left or the time is over."""
    request: EndsRequest = call.body
    labels = valid_labels(request.labels)
    tenant = None if request.all and call.caller.operator else call.caller.tenant
    until_s = asyncio.get_running_loop().time() + seconds(request.wait, "wait", most=WAIT_MAX_S)
    is_over = False
    while True:
        await service.turn(call.caller.tenant)
        left = [
            lease
            for lease in service.driver.ledger.state.leases.values()
            if lease.status is not LeaseStatus.ENDED
            and (tenant is None or lease.tenant == tenant)
            and labels.items() <= lease.labels.items()
        ]
        if is_over or not left:
            return json_reply(EndsAnswer(left=len(left)))
        is_over = not await service.ended(left, call, until_s)  # others may have begun meanwhile


async def token(service: ApiService, call: ApiCall) -> ApiReply:
    lease = service.lease(call, operator_too=False)
    if lease.status not in LIVE_STATES:
        raise LeaseNotActive(f"lease {lease.id} is {lease.status}, so there is nothing to open with a token")
    text, expires_wall_ns = service.capability(lease, call.caller)
    return json_reply(TokenView(token=text, expires_at=rfc3339(expires_wall_ns)))


async def events(service: ApiService, call: ApiCall) -> ApiReply:
    """News of one lease, of the tenant, or (operator, ``all``) of all tenants."""
    lease: LeaseRecord | None = None
    if "lease" in call.query:
        call.id = call.query["lease"]
        lease = service.lease(call)
    everything = flag(call.query, "all") and call.caller.operator
    tells_places = "places" not in call.query or flag(call.query, "places")
    service.check_streams(call.caller)
    stream = service.hub.open(call.caller, None if lease is None else lease.id, everything, tells_places)
    return ApiReply(200, b"", b"text/event-stream", stream)


# ---- messages ----


def _check_begins(service: ApiService, tenant: TenantId, request: RequestId, count: int = 1) -> None:
    """Raise where no new lease is granted, whatever is asked for. A request that is sent again is answered with what it
    became: if it were refused, its lease would have no holder."""
    if service.draining:
        raise Disconnected("the office is closing and grants nothing more", do="Try again once it was started anew.")
    if (tenant, request) in service.driver.ledger.state.requests:
        return
    if why := service.why_no_room():
        service.limit("disk")
        raise CapacityExceeded(
            f"no new lease is granted: {why}",
            do="Make room on that disk: end leases of blocks, remove kept volumes (`sublet volume rm`) or other files. "
            "Leases that live go on.",
        )
    service.count_leases(tenant, count)


def _new_lease() -> LeaseId:
    return LeaseId("l-" + secrets.token_hex(8))


def error_view(error: SubletError) -> ErrorView:
    """An error as it travels."""
    end = error.end if isinstance(error, LeaseEnded) else None
    return ErrorView(
        kind=error.kind,
        message=error.message,
        do=error.do,
        transient=error.transient,
        reason=error.reason,
        end=None if end is None else _end_view(end),
    )


def _end_view(end: LeaseEnd) -> EndView:
    hint = end.resume_hint if end.parked else ""
    return EndView(
        reason=end.reason.value,
        at=end.at,
        detail=end.detail,
        way=end.way,
        parked=end.parked,
        resume_hint=hint,
        saved_at=end.saved_at,
    )


def _answer(service: ApiService, answer: Answer, now: Now) -> _Acquired:
    match answer:
        case Granted():
            return GrantAnswer(lease=service.view(answer.lease, now))
        case Place():
            return place_answer(answer, service.view(answer.lease, now))
        case Offer():
            return offer_answer(answer, service.view(answer.lease, now))
        case Refusal():
            return refusal_answer(answer)
        case _:
            raise AssertionError(f"an acquire was answered by {answer!r}")


def _current(service: ApiService, lease_id: str, now: Now) -> GrantAnswer | PlaceAnswer | OfferAnswer:
    """What an acquire would be answered if it were answered now; after the end, the lease as it ended."""
    lease = service.driver.ledger.state.leases[LeaseId(lease_id)]
    match service.driver.ledger.answer_for(lease, now):
        case Place() as place:
            return place_answer(place, service.view(lease, now))
        case Offer() as offer:
            return offer_answer(offer, service.view(lease, now))
        case _:
            return GrantAnswer(lease=service.view(lease, now))


def _render_grant(service: ApiService, lease_id: str) -> Callable[[Answer, Now], GrantAnswer]:
    def render(answer: Answer, now: Now) -> GrantAnswer:
        return GrantAnswer(lease=_view(service, lease_id, now))

    return render


def _render_view(service: ApiService, lease_id: str) -> Callable[[Answer, Now], LeaseView]:
    return lambda answer, now: _view(service, lease_id, now)


def _render_renewal(service: ApiService, lease_id: str) -> Callable[[Answer, Now], RenewAnswer]:
    ledger, lease = service.driver.ledger, LeaseId(lease_id)
    return lambda answer, now: renew_answer(ledger.state.leases[lease], now, save_ns=ledger.save_ns(lease))


def _view(service: ApiService, lease_id: str, now: Now) -> LeaseView:
    return service.view(service.driver.ledger.state.leases[LeaseId(lease_id)], now)


def _token(service: ApiService, wanted: bool, call: ApiCall, lease_id: str, epoch: Epoch | None) -> str | None:
    """Minting costs more than a grant, so it is done for those who ask, and after the decision. It is for the epoch of
    the answer: if another holder attached meanwhile, the newer epoch is none of this caller's business."""
    lease = service.driver.ledger.state.leases.get(LeaseId(lease_id)) if wanted else None
    if lease is None or lease.epoch != epoch or lease.status not in LIVE_STATES:
        return None
    return service.capability(lease, call.caller)[0]


# -------------------------------------------------------------------------------------------------------------- volumes
#
# The control API's volumes: lists and removes them. A lease of blocks makes and uses one.


async def list_volumes(service: ApiService, call: ApiCall) -> ApiReply:
    """By name. A tenant sees its own, an operator all, its own, or those of one tenant."""
    wanted = call.caller.tenant if flag(call.query, "own") else call.query.get("tenant")
    found = [
        volume
        for volume in service.driver.ledger.state.volumes.values()
        if (call.caller.operator or volume.tenant == call.caller.tenant) and (wanted is None or volume.tenant == wanted)
    ]
    found.sort(key=lambda volume: (volume.tenant != call.caller.tenant, volume.key))
    now = service.driver.now()
    return json_reply([volume_view(volume, service.driver.ledger.state, now) for volume in found])


async def show_volume(service: ApiService, call: ApiCall) -> ApiReply:
    """One of them."""
    return json_reply(volume_view(_volume_of(service, call), service.driver.ledger.state, service.driver.now()))


def remove_volume(service: ApiService, call: ApiCall) -> CommandCall:
    """Give it up. The answer shows it as it is now: being removed, or gone."""
    owner = _owner(call)
    command = cmd.RemoveVolume(
        tenant=call.caller.tenant, operator=call.caller.operator, peer=call.caller.peer, name=call.id, owner=owner
    )
    before = service.driver.ledger.state.volumes.get(volume_key(owner, call.id))

    def render(answer: Answer, now: Now) -> VolumeView:
        state = service.driver.ledger.state
        volume = state.volumes.get(volume_key(owner, call.id))
        if volume is not None:
            return volume_view(volume, state, now)
        assert before is not None, "what is not there cannot be removed"
        view = volume_view(before, state, now)
        view.state, view.keep_until, view.remaining = "removed", None, None
        return view

    return CommandCall(command, render, json_reply)


def _owner(call: ApiCall) -> TenantId:
    """Whose it is. Only an operator may name another; for any other caller that is a tenant without volumes."""
    named = call.query.get("tenant", call.caller.tenant)
    if named != call.caller.tenant and not call.caller.operator:
        raise _unknown_volume(call)
    return TenantId(named)


def _volume_of(service: ApiService, call: ApiCall) -> VolumeRecord:
    volume = service.driver.ledger.state.volumes.get(volume_key(_owner(call), call.id))
    if volume is None:
        raise _unknown_volume(call)
    return volume


def _unknown_volume(call: ApiCall) -> NotFound:
    return NotFound(f"there is no volume {call.id[:64]}", do="`sublet volume ls` shows yours.")
