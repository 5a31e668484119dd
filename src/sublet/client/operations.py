"""The holder's operations, each a program of steps: what to send, how to read the answer, when to retry.

Three rules run through all of them. *Unanswered is not refused*: what got no answer is sent again unchanged, with the
same request id, for a bounded time, and then the error says whether it may have had an effect. *What it grants counts
from the sending*: every grant carries the instant before its request left. *Nothing is left behind*: an acquire that is
given up, by an error or an interrupt, leaves the queue or gives back what it was granted before it lets go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Final, TypeVar

import msgspec

from sublet.client.lease_entry import Owed
from sublet.client.model import Offer, Place
from sublet.client.responses import (
    AcquiredMany,
    decode,
    decode_acquired,
    decode_acquired_many,
    decode_lease,
    end_of,
    error_of,
    kind_of,
    unavailable,
)
from sublet.client.steps import HttpCall, HttpReply, Pause, Program, Revive, ask
from sublet.clock import Clock
from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    NotFound,
    QuotaExceeded,
    StaleEpoch,
    SubletError,
    Unsupported,
)
from sublet.lazy_dataclass import dataclass
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.values import (
    NS_PER_S,
    Epoch,
    Kind,
    LeaseId,
    RequestId,
    format_duration,
    shown,
    valid_text,
)
from sublet.wire.http import (
    AcquireRequest,
    AcquisitionRequest,
    ActivityRequest,
    AttachRequest,
    ClaimRequest,
    EndsAnswer,
    EndsRequest,
    GrantAnswer,
    GrantsAnswer,
    Hello,
    LeaseView,
    OfferAnswer,
    PlaceAnswer,
    ReleaseItem,
    ReleaseRequest,
    ReleasesAnswer,
    ReleasesRequest,
    RenewalsAnswer,
    RenewalsRequest,
    RenewAnswer,
    RenewItem,
    RenewRequest,
    UnbindRequest,
)

T = TypeVar("T")

REQUEST_TIMEOUT_S: Final = 5.0
"""One request, from sending to the whole answer."""
PATIENCE_S: Final = 20.0
"""How long what got no answer is asked again: a restart of the office takes a fraction of it."""
LOOK_PATIENCE_S: Final = 8.0
"""The same for queries."""
QUEUE_PATIENCE_S: Final = 60.0
"""The same for a look at the own place in the queue, which survives a restart."""
WITHDRAW_PATIENCE_S: Final = 2.0
"""The same on the way out of an acquire that was given up: a user waits for the prompt."""
POLL_S: Final = 5.0
"""One look at the place in the queue is answered at the latest then; a grant is answered at once. It is also the sign
of life that keeps the place (the office takes it away after 30 s of silence)."""
MANY_TIMEOUT_S: Final = 2 * REQUEST_TIMEOUT_S
"""The same for a request for many leases: the office waits 5 s for machines that do not confirm theirs, and answers
without them."""
ENDS_LOOK_S: Final = 0.1
"""Between two looks at leases that are to end, where the office is older and cannot be asked to wait."""
RELEASES_MAX: Final = 1024
"""Releases in one message."""
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedGrant:
    """A lease that is held, with the instant from which its time counts."""

    view: LeaseView
    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the holder said beforehand about waiting."""

    on_place: Callable[[Place], object] | None = None
    """Told at first and whenever the place changed."""
    on_offer: Callable[[Offer], bool] | None = None
    """Asked about an offer; without it the offer is taken, since the holder said ``or_smaller`` or ``or_model``."""


def new_request_id() -> str:
    """Unguessable, and unique without coordination."""
    return "r-" + os.urandom(12).hex()


class OfficeOperations:
    """Programs for one office. It has no state but the clock it was given."""

    def __init__(self, clock: Clock, was_ended: Callable[[], bool] = lambda: False) -> None:
        """``was_ended``: whether the office that answers no more was told to end, so that no lease of it goes on."""
        self._clock = clock
        self.was_ended = was_ended

    # ---- the lease's life ----

    def acquire(self, request: AcquireRequest, hooks: Hooks, owed: Owed | None = None) -> Program[ReceivedGrant]:
        """From the request to a lease that is held; waits in the queue as long as the request says.

        ``owed`` says meanwhile what the office may have of it, and whether anything is left when this fails.
        """
        call = _post("/v1/leases", request)
        owed = Owed(RequestId(new_request_id())) if owed is None else owed
        owed.sent = (call, request)
        grant = yield from self._until_granted(
            call, request, hooks, owed, lambda reply: decode_acquired(reply, request)
        )
        if not isinstance(grant, ReceivedGrant):
            raise TypeError("one lease was asked for")
        return grant

    def acquire_many(
        self, request: AcquisitionRequest, hooks: Hooks, owed: Owed
    ) -> Program[list[tuple[ReceivedGrant, Owed]]]:
        """From the request to the leases that are held, each beside what is owed for it. As many as there are, and not
        fewer than ``at_least``; where none is free, it waits in the queue for one."""
        call = _post("/v1/acquisitions", request, timeout_s=MANY_TIMEOUT_S)
        owed.sent = (call, request)
        try:
            found = yield from self._until_granted(
                call, request.request, hooks, owed, lambda reply: decode_acquired_many(reply, request)
            )
        except NotFound as error:
            if owed.lease is not None:
                raise
            raise Unsupported(
                "this office is older and does not grant many leases in one request", do="Upgrade the office."
            ) from error
        if isinstance(found, ReceivedGrant):
            return [(found, owed)]
        answer, sent_ns = found
        members = owed.members or ()
        held = list(zip(answer.leases, members, strict=False))  # those that failed come behind them
        if len(held) < request.at_least:
            yield from self.give_back(owed, WITHDRAW_PATIENCE_S)
            why = answer.failed[0].error.message if answer.failed else "they have ended"
            raise Disconnected(
                f"{len(answer.failed)} of {len(members)} leases were granted and are not held: {why}",
                do="Ask again: what was held was given back.",
            )
        for failed in members[len(held) :]:
            failed.left = True
        return [(ReceivedGrant(view=view, sent_ns=sent_ns), member) for view, member in held]

    def _until_granted(
        self,
        call: HttpCall,
        request: AcquireRequest,
        hooks: Hooks,
        owed: Owed,
        decoded: Callable[[HttpReply], AcquiredMany],
    ) -> Program[ReceivedGrant | tuple[GrantsAnswer, int]]:
        """From the call to what is held: through the queue, offers and claims. ``decoded`` reads its first answer; the
        request for many leases may be answered by many at once, with the instant when it was sent."""
        lease: LeaseId | None = None
        place: PlaceAnswer | None = None
        declined: Offer | None = None
        over = False
        try:
            reply = yield from self._asking(call)
            while True:
                answer = decoded(reply) if lease is None else decode_acquired(reply, request)
                if isinstance(answer, GrantsAnswer):
                    owed.members = _members(answer)
                    return answer, reply.sent_ns
                lease = owed.lease = LeaseId(answer.lease.id)
                if isinstance(answer, PlaceAnswer):
                    if hooks.on_place is not None and (place is None or _shown(place) != _shown(answer)):
                        hooks.on_place(_place(answer))
                    place = answer
                    reply = yield from self._next_place(lease)
                elif isinstance(answer, OfferAnswer):
                    offer = _offer(answer)
                    if hooks.on_offer is None or hooks.on_offer(offer):
                        reply = yield from self._claim(answer.lease, request)
                    else:  # back into the line, or (wait=0) out of it
                        declined = offer
                        reply = yield from self._asking(_post(f"{_path(lease)}/decline", None))
                elif answer.lease.status == LeaseStatus.GRANTED:
                    reply = yield from self._claim(answer.lease, request)
                elif answer.lease.status in LIVE_STATES:
                    return ReceivedGrant(view=answer.lease, sent_ns=reply.sent_ns)
                else:
                    over = True
                    raise _not_granted(answer.lease, request, place, declined)
        except GeneratorExit:
            raise
        except LeaseEnded as error:  # the request was asked again, and had run out meanwhile
            owed.done = True
            if lease is None and error.end is not None and error.end.reason is EndReason.REFUSED:
                raise _ran_out(request, place, declined) from error
            raise
        except BaseException as error:
            if over or not _may_have_side_effect(error, lease):
                owed.done = True
            elif lease is None or not isinstance(error, Disconnected) or error.sent:
                with contextlib.suppress(SubletError):  # an office that does not answer is asked again by the keeper
                    yield from self.give_back(owed, WITHDRAW_PATIENCE_S)
            raise

    def attach(
        self, lease: LeaseId, holder: str, holder_pid: int | None = None, owed: Owed | None = None
    ) -> Program[ReceivedGrant]:
        """Take over an own lease under a new epoch; its earlier holder is fenced from then on."""
        request = AttachRequest(request_id=new_request_id(), holder=holder, holder_pid=holder_pid)
        call = _post(f"{_path(lease)}/attach", request)
        if owed is not None:
            owed.attaching, owed.lease = holder, lease
        try:
            reply = yield from self._asking(call)
            view = decode(reply, GrantAnswer).lease
        except SubletError as error:
            if owed is not None and not (isinstance(error, Disconnected) and error.sent):
                owed.attaching = owed.lease = None  # refused, or never sent: it is what it was
            raise
        if owed is not None:
            owed.epoch, owed.attaching = view.epoch, None
        return ReceivedGrant(view=view, sent_ns=reply.sent_ns)

    def unbind(self, lease: LeaseId, epoch: Epoch) -> Program[None]:
        """Let it outlive this process. What is over already, or another's by now, is no error."""
        with contextlib.suppress(LeaseEnded, NotFound, StaleEpoch):
            call = _post(f"{_path(lease)}/unbind", UnbindRequest(epoch=epoch))
            reply = yield from self._asking(call, of_held=True)
            decode(reply, LeaseView)

    def renew(self, lease: LeaseId, request: RenewRequest, timeout_s: float) -> Program[tuple[RenewAnswer, int]]:
        """One renewal, asked once: the caller knows its own deadline and whether to ask again."""
        reply = yield from ask(_post(f"{_path(lease)}/renew", request, timeout_s=timeout_s))
        return decode(reply, RenewAnswer), reply.sent_ns

    def renew_many(self, items: list[RenewItem], timeout_s: float) -> Program[tuple[RenewalsAnswer, int]]:
        """Many renewals in one message, asked once."""
        reply = yield from ask(_post("/v1/renewals", RenewalsRequest(items=items), timeout_s=timeout_s))
        answer = decode(reply, RenewalsAnswer)
        if not len(items) == len(answer.items) == len(answer.errors):
            raise Disconnected("the office answered another number of renewals than were asked")
        return answer, reply.sent_ns

    def report_activity(self, lease: LeaseId, epoch: Epoch, *, active: bool, busy_s: float) -> Program[LeaseView]:
        """Tell that the lease became busy or idle. Asked once: the next renewal says it as well."""
        body = ActivityRequest(epoch=epoch, active=active, busy=busy_s)
        reply = yield from ask(_post(f"{_path(lease)}/activity", body))
        return decode(reply, LeaseView)

    def release(
        self, lease: LeaseId, *, request_id: str, busy_s: float, patience_s: float = PATIENCE_S
    ) -> Program[LeaseView | None]:
        """Give it back, or leave the queue. What is over already, or unknown, is no error: None is the answer then."""
        body = ReleaseRequest(request_id=request_id, busy=busy_s)
        try:
            reply = yield from self._asking(_post(f"{_path(lease)}/release", body), patience_s, of_held=True)
            return decode(reply, LeaseView)
        except (LeaseEnded, NotFound):
            return None

    def give_back(self, owed: Owed, patience_s: float = PATIENCE_S) -> Program[None]:
        """See that the office has nothing of it any more. ``Disconnected`` where that is not known."""
        try:
            yield from self._give_back(owed, patience_s)
        except NotFound:
            owed.done = True

    def _give_back(self, owed: Owed, patience_s: float) -> Program[None]:
        if owed.lease is None and owed.members is None:
            if owed.sent is None:
                owed.done = True
                return
            call, request = owed.sent
            reply = yield from self._asking(call, patience_s, of_held=True)
            try:
                if isinstance(request, AcquisitionRequest):
                    answer = decode_acquired_many(reply, request)
                else:
                    answer = decode_acquired(reply, request)
            except (LeaseEnded, CapacityExceeded, QuotaExceeded, InvalidRequest, Unsupported):
                owed.done = True
                return
            if isinstance(answer, GrantsAnswer):
                owed.members = _members(answer)
            else:
                owed.lease = LeaseId(answer.lease.id)
        if owed.members is not None:
            yield from self.release_many(owed.members, patience_s)
            owed.done = True
            return
        if owed.lease is None:
            raise AssertionError("nothing is known of what is to be given back")
        if owed.attaching is not None or (owed.tries and owed.epoch is not None):
            # Another program may have attached to it meanwhile, and then it is not ours to end.
            call = HttpCall(method="GET", path=_path(owed.lease), timeout_s=REQUEST_TIMEOUT_S)
            reply = yield from self._asking(call, patience_s, of_held=True)
            try:
                view = decode_lease(reply)
            except NotFound:
                owed.done = True
                return
            if owed.attaching is not None:  # an attach that may not have arrived
                is_ours = view.holder == owed.attaching and not owed.is_held(owed.lease, view.epoch)
            else:
                is_ours = view.epoch == owed.epoch
            if view.end is not None or not is_ours:
                owed.done = True
                return
        yield from self.release(owed.lease, request_id=owed.release_id, busy_s=owed.busy_s, patience_s=patience_s)
        owed.done = True

    def release_many(self, owed: Sequence[Owed], patience_s: float = PATIENCE_S) -> Program[list[LeaseView | None]]:
        """Release leases that are this program's own, in as few messages as there can be. What is over already,
        unknown, or held elsewhere by now is no error: None is the answer then."""
        views: list[LeaseView | None] = []
        for start in range(0, len(owed), RELEASES_MAX):
            some = owed[start : start + RELEASES_MAX]
            items = [ReleaseItem(lease=one.lease or "", epoch=one.epoch, busy=one.busy_s) for one in some]
            call = _post("/v1/releases", ReleasesRequest(items=items), timeout_s=MANY_TIMEOUT_S)
            try:
                reply = yield from self._asking(call, patience_s, of_held=True)
            except NotFound:
                for one in some:
                    one.done = True
                views += [None] * len(some)
                continue
            answer = decode(reply, ReleasesAnswer)
            if not len(some) == len(answer.items) == len(answer.errors):
                raise Disconnected("the office answered another number of releases than were asked")
            for one, error in zip(some, answer.errors, strict=True):
                one.done = error is None or not error.transient
            views += answer.items
            for error in answer.errors:
                if error is not None and error.transient:
                    raise error_of(error)
        return views

    def wait_ended(self, labels: dict[str, str], timeout_ns: int, *, everyones: bool) -> Program[int]:
        """Until no lease with these labels is left, or the time is over; how many are left."""
        until_ns = self._clock.now_ns() + timeout_ns
        is_older = False
        while True:
            left_s = max(0.0, (until_ns - self._clock.now_ns()) / NS_PER_S)
            if is_older:
                views = yield from self.query(f"/v1/leases{'' if everyones else '?own=1'}", list[LeaseView])
                left = sum(view.status != LeaseStatus.ENDED and labels.items() <= view.labels.items() for view in views)
            else:
                wait_s = min(POLL_S, left_s)
                request = EndsRequest(labels=labels, wait=wait_s, all=everyones)
                reply = yield from self._asking(
                    _post("/v1/ends", request, timeout_s=wait_s + REQUEST_TIMEOUT_S), LOOK_PATIENCE_S
                )
                try:
                    left = decode(reply, EndsAnswer).left
                except NotFound:
                    is_older = True
                    continue
            if not left or not left_s:
                return left
            if is_older:
                yield Pause(min(ENDS_LOOK_S, left_s))

    # ---- looking and everything else ----

    def hello(self) -> Program[Hello]:
        """Ask the office for its versions of the wire. Asked once: ``connect`` answers at once."""
        reply = yield from ask(HttpCall(method="GET", path="/v1/hello", timeout_s=REQUEST_TIMEOUT_S))
        return decode(reply, Hello)

    def get_lease(self, lease: LeaseId) -> Program[LeaseView]:
        """A lease as the office knows it, whatever its state."""
        reply = yield from self._asking(
            HttpCall(method="GET", path=_path(lease), timeout_s=REQUEST_TIMEOUT_S), LOOK_PATIENCE_S
        )
        return decode_lease(reply)

    def query(self, path: str, shape: type[T]) -> Program[T]:
        """GET something. Looking changes nothing, so it may be asked again."""
        reply = yield from self._get(path)
        return decode(reply, shape)

    def text(self, path: str) -> Program[str]:
        """GET something that is not JSON."""
        reply = yield from self._get(path)
        if reply.status != 200:
            decode(reply, dict)
        return reply.body.decode()

    def command(self, method: str, path: str, body: object, shape: type[T], timeout_s: float) -> Program[T]:
        """Ask for a change that has no request id: asked once, and the error says whether it may have happened."""
        raw = _encode(body) if body is not None else None
        reply = yield from ask(HttpCall(method=method, path=path, body=raw, timeout_s=timeout_s))
        return decode(reply, shape)

    # ---- pieces ----

    def _asking(self, call: HttpCall, patience_s: float = PATIENCE_S, *, of_held: bool = False) -> Program[HttpReply]:
        """Ask until there is an answer, unchanged, for a bounded time. ``of_held``: it only concerns what the office
        has granted, so an office is not started for it that was told to end (``NotFound``)."""
        started_ns, pauses, sent = self._clock.now_ns(), _pauses(), False
        while True:
            try:
                reply = yield from ask(call)
                if reply.status not in (502, 503, 504):
                    return reply
                decode(reply, dict)  # raises what the office, or the proxy before it, says
                raise Disconnected("the office did not answer")
            except Disconnected as error:
                sent = sent or error.sent
                pause = next(pauses)
                waited_s = (self._clock.now_ns() - started_ns) / NS_PER_S
                if waited_s + pause > patience_s:
                    raise Disconnected(error.message, do=_do_after(call, sent), sent=sent) from error
                if not error.sent:
                    if of_held and self.was_ended():
                        raise NotFound("the office was told to end, and has ended every lease") from error
                    yield Revive()
            yield Pause(pause)

    def _get(self, path: str) -> Program[HttpReply]:
        call = HttpCall(method="GET", path=path, timeout_s=REQUEST_TIMEOUT_S)
        reply = yield from self._asking(call, LOOK_PATIENCE_S)
        return reply

    def _next_place(self, lease: LeaseId) -> Program[HttpReply]:
        path = f"{_path(lease)}?wait={POLL_S:g}&after={LeaseStatus.QUEUED}"
        call = HttpCall(method="GET", path=path, timeout_s=POLL_S + REQUEST_TIMEOUT_S)
        reply = yield from self._asking(call, QUEUE_PATIENCE_S)
        return reply

    def _claim(self, view: LeaseView, request: AcquireRequest) -> Program[HttpReply]:
        """Within the window; the epoch says which grant is meant, so asking twice claims once."""
        window_s = view.claim_within if view.claim_within is not None else PATIENCE_S
        body = ClaimRequest(epoch=view.epoch, holder_pid=request.holder_pid)
        call = _post(f"{_path(LeaseId(view.id))}/claim", body)
        reply = yield from self._asking(call, min(PATIENCE_S, window_s))
        return reply


def _may_have_side_effect(error: BaseException, lease: LeaseId | None) -> bool:
    """Whether an acquire that failed so may have left something at the office."""
    if isinstance(error, Disconnected):
        return error.sent or lease is not None
    if isinstance(error, SubletError):  # an answer: before there is a lease, it says that there is none
        return lease is not None and not isinstance(error, LeaseEnded | NotFound)
    return True


def _members(answer: GrantsAnswer) -> tuple[Owed, ...]:
    """What is owed for each lease of the answer, those that are held first."""
    found = []
    for lease, epoch in [(view.id, view.epoch) for view in answer.leases] + [
        (one.lease, None) for one in answer.failed
    ]:
        one = Owed(RequestId(new_request_id()))
        one.lease, one.epoch = LeaseId(lease), epoch
        found.append(one)
    return tuple(found)


def _post(path: str, body: object, *, timeout_s: float = REQUEST_TIMEOUT_S) -> HttpCall:
    return HttpCall(method="POST", path=path, body=_encode(body) if body is not None else b"{}", timeout_s=timeout_s)


def _path(lease: LeaseId) -> str:
    """An id is used as it is in a path, so it must be one: letters, digits and dashes."""
    valid_text(lease, "the id of a lease")
    if not lease or not lease.replace("-", "").replace("_", "").isalnum() or not lease.isascii():
        raise NotFound(f"there is no lease {shown(lease)}", do="See `sublet lease ls`.")
    return f"/v1/leases/{lease}"


def _pauses() -> Iterator[float]:
    """Rising, capped, each a little different, so that many clients do not come back as one."""
    index = 0
    while True:
        base = _PAUSES_S[min(index, len(_PAUSES_S) - 1)]
        yield base * (0.75 + os.urandom(1)[0] / 512)
        index += 1


def _do_after(call: HttpCall, sent: bool) -> str:
    if not sent:
        return "Nothing was changed. See `sublet status`; `sublet up` starts the office of this machine."
    if call.method == "GET":
        return "See `sublet status`; running leases go on to their deadlines."
    return "Whether it took effect is not known: see `sublet lease ls`. Running leases go on to their deadlines."


def _place(answer: PlaceAnswer) -> Place:
    return Place(
        lease=LeaseId(answer.lease.id), position=answer.position, reason=answer.reason, estimate=answer.estimate
    )


def _shown(answer: PlaceAnswer) -> tuple[int, str, int | None]:
    """What makes a place another one for a person: not every second of the estimate."""
    return answer.position, answer.reason, None if answer.estimate is None else round(answer.estimate / 10)


def _offer(answer: OfferAnswer) -> Offer:
    def price(text: str | None) -> Decimal | None:
        return None if text is None else Decimal(text)

    return Offer(
        kind=Kind(answer.kind),
        asked=answer.asked,
        offered=answer.offered,
        valid=answer.valid,
        model=answer.model,
        asked_model=next((want.model for want in answer.lease.wants if want.model), None),
        estimate=answer.estimate,
        price=price(answer.price),
        asked_price=price(answer.asked_price),
        currency=answer.currency,
    )


def _ran_out(request: AcquireRequest, place: PlaceAnswer | None, declined: Offer | None) -> SubletError:
    """It waited for as long as it could, or was offered less and declined."""
    waited = f"not granted within {format_duration(round(request.wait * NS_PER_S))}" if request.wait else ""
    refused = "" if declined is None else f"the offer of {declined} was declined"
    why = "" if place is None else place.reason
    text = ", ".join(part for part in (waited, refused, why) if part) or "it was not granted"
    estimate = None if place is None else place.estimate
    return unavailable(kind_of(request), text, offer=declined, estimate=estimate, do=_after_waiting(place, declined))


def _after_waiting(place: PlaceAnswer | None, declined: Offer | None) -> str:
    """What to do now, with the numbers that the office gave last."""
    less = "ask for less" if declined is None else "take the offer, or ask for less"
    if place is None:
        return f"Ask again and wait longer, or {less}."
    if place.estimate is None:
        return (
            f"It had place {place.position} in the queue, and the office cannot tell when its turn comes: ask again "
            f"without a limit to the wait, or {less}."
        )
    about, enough_min = format_duration(round(place.estimate) * NS_PER_S), int(place.estimate // 60) + 1
    return (
        f"It had place {place.position} in the queue, with about {about} to go: ask again and wait up to {enough_min}m "
        f"(`--wait {enough_min}m`), or {less}."
    )


def _not_granted(
    view: LeaseView, request: AcquireRequest, place: PlaceAnswer | None, declined: Offer | None
) -> SubletError:
    """The request ended without a lease."""
    end = None if view.end is None else end_of(view.end)
    reason = None if end is None else end.reason
    if reason is EndReason.REFUSED or (reason is EndReason.WITHDRAWN and declined is not None):
        return _ran_out(request, place, declined)
    if reason is EndReason.HOLDER_GONE:
        return LeaseNotActive(f"the grant of {view.id} was not claimed in time", end=end, do="Ask again.")
    detail = "" if end is None or not end.detail else f": {end.detail}"
    return LeaseNotActive(f"the request {view.id} ended ({reason or view.status}){detail}", end=end, do="Ask again.")
