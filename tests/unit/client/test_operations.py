"""The operations of a holder, step by step, without any office."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from sublet.client import background_requests
from sublet.client.lease_entry import Owed
from sublet.client.lease_table import LeaseTable
from sublet.client.model import Offer, Place
from sublet.client.operations import PATIENCE_S, Hooks, OfficeOperations, ReceivedGrant, _offer
from sublet.client.requests import ask_gpu
from sublet.client.responses import error_of
from sublet.client.steps import HttpCall, HttpReply, Program, Revive
from sublet.errors import (
    CapacityExceeded,
    Disconnected,
    IdempotencyConflict,
    InvalidRequest,
    LeaseNotActive,
    LeaseRevoked,
    NotFound,
    QuotaExceeded,
    SubletError,
    Unauthorized,
    Unsupported,
)
from sublet.lease.policy import RenewalPolicy
from sublet.lease_end import EndReason
from sublet.values import Epoch, Kind, LeaseId, RequestId
from sublet.wire.http import (
    AcquireRequest,
    EndView,
    ErrorView,
    GrantAnswer,
    OfferAnswer,
    ReleasesAnswer,
    ReleasesRequest,
    StatusView,
)
from tests.unit.client.script import (
    NOBODY,
    SILENCE,
    HeldClock,
    Script,
    ended,
    error,
    grant,
    offer,
    place,
    refusal,
    reply,
    view,
)


@pytest.fixture
def script() -> Script:
    return Script(HeldClock())


def request(**terms: object) -> AcquireRequest:
    return ask_gpu(
        terms,  # type: ignore[arg-type]
        min_vram="1GiB",
        count=1,
        exclusivity=None,
        model=None,
        or_smaller=False,
    ).request


def acquire(script: Script, *answers: object, hooks: Hooks | None = None, **terms: object) -> ReceivedGrant:
    script.answers += answers  # type: ignore[arg-type]
    return script.run(OfficeOperations(script.clock).acquire(request(**terms), hooks or Hooks()))


# ---- acquiring


def test_a_grant_at_once_takes_one_request(script: Script) -> None:
    """And its time counts from before the request was sent, not from when the answer came."""
    script.takes_s = 3.0
    sent_ns = script.clock.now_ns()
    script.answers = [grant()]
    found = script.run(OfficeOperations(script.clock).acquire(request(), Hooks()))
    assert (found.view.id, found.sent_ns) == ("l-1", sent_ns)
    assert script.asked == ["POST /v1/leases"]


def test_a_queued_request_is_claimed_when_it_is_ready(script: Script) -> None:
    """The clock of a lease from the queue starts with the claim, so its time counts from the claim's sending."""
    places: list[Place] = []
    script.answers = [
        place(2),
        place(2),
        place(1, "yours is next"),
        grant(view("granted", claim_within=10.0, remaining=None)),
        grant(),
    ]
    found = script.run(OfficeOperations(script.clock).acquire(request(), Hooks(on_place=places.append)))
    assert script.asked == [
        "POST /v1/leases",
        "GET /v1/leases/l-1?wait=5&after=queued",
        "GET /v1/leases/l-1?wait=5&after=queued",
        "GET /v1/leases/l-1?wait=5&after=queued",
        "POST /v1/leases/l-1/claim",
    ]
    assert b'"epoch":[1,7]' in (script.calls[-1].body or b"")
    assert found.sent_ns == script.clock.now_ns() - round(script.takes_s * 1e9)
    assert [(p.position, p.reason) for p in places] == [(2, "all devices are held"), (1, "yours is next")]


def test_unanswered_is_asked_again_unchanged(script: Script) -> None:
    """A retry carries the same request id, so that it has one effect, however often it arrives."""
    acquire(script, SILENCE, error("Disconnected", status=503), SILENCE, grant())
    bodies = {call.body for call in script.calls}
    assert (len(script.calls), len(bodies)) == (4, 1)


def test_an_office_that_is_gone_is_started_again(script: Script) -> None:
    """Where nobody listens, the driver is asked to see to it before the next try."""
    acquire(script, NOBODY, grant())
    kinds = [type(step) for step in script.steps]
    assert kinds.index(Revive) == 1
    assert kinds[-1] is HttpCall


@pytest.mark.parametrize(("silence", "sent", "said"), [(SILENCE, True, "is not known"), (NOBODY, False, "Nothing was")])
def test_patience_ends_and_says_what_may_have_happened(
    script: Script, silence: Disconnected, sent: bool, said: str
) -> None:
    """Three-valued: done, refused, and not known; the last is never told as one of the others."""
    started = script.clock.now_ns()
    with pytest.raises(Disconnected) as caught:
        acquire(script, *[silence] * 100)
    assert caught.value.sent is sent
    assert said in str(caught.value)
    assert (script.clock.now_ns() - started) / 1e9 < PATIENCE_S + 20


def test_one_try_that_may_have_arrived_is_enough_not_to_know(script: Script) -> None:
    """The office may have died after it got the first; that the later ones met nobody changes nothing about that."""
    with pytest.raises(Disconnected) as caught:
        acquire(script, SILENCE, *[NOBODY] * 100)
    assert caught.value.sent


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("capacity", CapacityExceeded, "GPU unavailable: 1GiB is not free"),
        ("too_big", CapacityExceeded, "GPU unavailable: 1GiB is not free"),
        ("limit", CapacityExceeded, "GPU unavailable: 1GiB is not free"),
        ("quota", QuotaExceeded, "1GiB is not free"),
        ("unsupported", Unsupported, "1GiB is not free"),
    ],
)
def test_a_refusal_is_an_error_with_its_reason(script: Script, code: str, kind: type[SubletError], text: str) -> None:
    with pytest.raises(kind) as caught:
        acquire(script, refusal(code), wait=0)
    assert type(caught.value) is kind
    assert str(caught.value) == f"{text}. Wait."
    assert script.asked == ["POST /v1/leases"]  # there is nothing to give back


def test_an_error_keeps_the_offices_word_for_why(script: Script) -> None:
    """Messages are for people and may be rephrased; ``reason`` is for programs."""
    view = ErrorView(kind="LeaseRevoked", message="no", do="Save.", transient=True, reason="fair_share")
    assert error_of(view).reason == "fair_share"
    unknown = ErrorView(kind="FromTheFuture", message="no", do="", transient=False, reason="odd")
    assert (type(error_of(unknown)), error_of(unknown).reason) == (SubletError, "odd")
    with pytest.raises(CapacityExceeded) as caught:
        acquire(script, refusal("too_big"), wait=0)
    assert (caught.value.reason, caught.value.transient) == ("too_big", False), (
        "it is never granted, whenever it is asked"
    )
    with pytest.raises(CapacityExceeded) as caught:
        acquire(script, refusal("capacity"), wait=0)
    assert caught.value.transient


def test_a_refusal_says_what_would_fit(script: Script) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        acquire(script, refusal(would_fit=1 << 29, estimate=12.5), wait=0)
    assert caught.value.offer == Offer(kind=Kind.GPU, asked=1 << 30, offered=1 << 29)
    assert caught.value.estimate == 12.5


def test_waiting_ends_when_it_was_to_end(script: Script) -> None:
    """The office ends the request; the error says how long was waited and for what."""
    with pytest.raises(CapacityExceeded) as caught:
        acquire(script, place(3), grant(ended("refused")), wait="10m")
    assert caught.value.message == "GPU unavailable: not granted within 10m, all devices are held"
    assert caught.value.estimate == 60.0
    assert caught.value.do == (
        "It had place 3 in the queue, with about 1m to go: ask again and wait up to 2m (`--wait 2m`), or ask for less."
    )
    assert len(script.calls) == 2


def test_a_wait_without_an_estimate_advises_to_wait_without_a_limit(script: Script) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        acquire(script, place(3, estimate=None), grant(ended("refused")), wait="10m")
    assert "place 3 in the queue, and the office cannot tell when its turn comes" in caught.value.do


def test_a_request_that_ran_out_before_it_was_asked_again_was_not_granted(script: Script) -> None:
    """Its first answer was lost, or somebody else had asked; the second finds it over. That is no lease that ended."""
    end = EndView(reason="refused", at="2026-11-21T07:01:00.000Z", detail="it was not granted in time")
    with pytest.raises(CapacityExceeded, match="not granted within 5m"):
        acquire(script, SILENCE, error("LeaseNotActive", status=410, end=end), wait="5m")


def test_a_grant_that_was_not_claimed_in_time_is_told(script: Script) -> None:
    with pytest.raises(LeaseNotActive, match="not claimed in time"):
        acquire(script, place(), grant(ended("holder_gone")))


def test_a_withdrawn_request_is_told_as_it_ended(script: Script) -> None:
    with pytest.raises(LeaseNotActive, match=r"ended \(drained\): the node goes") as caught:
        acquire(script, place(), grant(ended("drained", "the node goes")))
    assert caught.value.end is not None
    assert caught.value.end.reason is EndReason.DRAINED


# ---- offers


def test_an_offer_is_taken_since_the_holder_said_so_beforehand(script: Script) -> None:
    acquire(script, offer(), grant())
    assert script.asked == ["POST /v1/leases", "POST /v1/leases/l-1/claim"]


def test_an_offer_may_be_declined_and_the_waiting_goes_on(script: Script) -> None:
    seen: list[Offer] = []

    def decline(found: Offer) -> bool:
        seen.append(found)
        return False

    acquire(script, offer(), place(), grant(), hooks=Hooks(on_offer=decline))
    assert seen == [Offer(kind=Kind.GPU, asked=1 << 30, offered=1 << 29, valid=30.0)]
    assert script.asked[1] == "POST /v1/leases/l-1/decline"


def test_an_offer_may_come_out_of_the_line(script: Script) -> None:
    """Who asked for more than there is waits for the most there is, and is asked when it is his turn."""
    seen: list[Offer] = []

    def take(offered: Offer) -> bool:
        seen.append(offered)
        return True

    acquire(script, place(), offer(), grant(), hooks=Hooks(on_offer=take))
    assert seen == [Offer(kind=Kind.GPU, asked=1 << 30, offered=1 << 29, valid=30.0)]


def test_another_model_is_offered_with_time_and_price() -> None:
    """As an office says it; one of the version before says none of it."""
    view = {**msgspec.json.decode(offer().body), "model": "Tesla T4", "estimate": 540.0, "price": "0.50"}
    view |= {"asked_price": "2.00", "currency": "EUR", "asked": 16 << 30, "offered": 16 << 30}
    view["lease"]["wants"] = [{"kind": "gpu", "amount": 16 << 30, "model": "A100"}]
    found = _offer(msgspec.convert(view, OfferAnswer))
    assert str(found) == "16GiB on Tesla T4 now, instead of A100 (that in about 9m), at 25 % of the price"
    plain = _offer(msgspec.convert({**view, "price": None, "asked_price": None, "estimate": None}, OfferAnswer))
    assert str(plain) == "16GiB on Tesla T4 now, instead of A100"


def test_declining_without_waiting_ends_with_the_offer_in_the_error(script: Script) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        acquire(
            script,
            offer(),
            grant(ended("withdrawn", "the offer was declined")),
            wait=0,
            hooks=Hooks(on_offer=lambda _: False),
        )
    assert caught.value.message == "GPU unavailable: the offer of 512MiB instead of 1GiB was declined"
    assert isinstance(caught.value.offer, Offer)
    assert len(script.calls) == 2


# ---- nothing is left behind


@pytest.mark.parametrize("blow", [KeyboardInterrupt(), RuntimeError("a callback"), SystemExit(1)])
def test_giving_up_in_the_queue_leaves_it(script: Script, blow: BaseException) -> None:
    with pytest.raises(type(blow)):
        acquire(script, place(), blow, reply(view("ended")))
    assert script.asked[-1] == "POST /v1/leases/l-1/release"


def test_giving_up_before_the_answer_finds_out_what_it_became(script: Script) -> None:
    """The request may have arrived. The same request id tells which lease it is, and that is given back."""
    with pytest.raises(KeyboardInterrupt):
        acquire(script, KeyboardInterrupt(), grant(), reply(view("ended")))
    assert script.asked == ["POST /v1/leases", "POST /v1/leases", "POST /v1/leases/l-1/release"]
    assert script.calls[0].body == script.calls[1].body


def test_a_callback_that_fails_leaves_the_queue(script: Script) -> None:
    def fail(_: Place) -> None:
        raise ValueError("in the callback")

    with pytest.raises(ValueError, match="in the callback"):
        acquire(script, place(), reply(view("ended")), hooks=Hooks(on_place=fail))
    assert script.asked[-1] == "POST /v1/leases/l-1/release"


def test_leaving_the_queue_is_bounded_when_the_office_is_gone(script: Script) -> None:
    """Whoever pressed Ctrl-C waits for the prompt; the office notices the silence by itself."""
    started = script.clock.now_ns()
    with pytest.raises(KeyboardInterrupt):
        acquire(script, place(), KeyboardInterrupt(), *[NOBODY] * 50)
    assert (script.clock.now_ns() - started) / 1e9 < 4


def test_an_error_answer_leaves_nothing_to_withdraw(script: Script) -> None:
    with pytest.raises(InvalidRequest):
        acquire(script, error("InvalidRequest"))
    assert script.asked == ["POST /v1/leases"]


# ---- what the office says


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Unauthorized", Unauthorized),
        ("IdempotencyConflict", IdempotencyConflict),
        ("NotFound", NotFound),
        ("LeaseRevoked", LeaseRevoked),
        ("FromTheFuture", SubletError),
        ("SystemExit", SubletError),  # a name that is not in the tree is never looked up anywhere else
        ("Scope", SubletError),
    ],
)
def test_errors_travel_by_name(script: Script, kind: str, expected: type[SubletError]) -> None:
    with pytest.raises(SubletError) as caught:
        acquire(script, error(kind))
    assert type(caught.value) is expected
    assert str(caught.value) == "so it is. Do this."


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"answer": "grant"}', b'{"answer": "what"}', b"\xff"])
def test_what_cannot_be_read_is_an_error_of_ours(script: Script, body: bytes) -> None:
    """Never a KeyError, a DecodeError, or a lease that is none."""
    for status in (200, 201, 404, 500):
        with pytest.raises(SubletError):
            acquire(script, HttpReply(status, body, 0))


def test_a_proxy_in_front_of_a_dead_office_is_silence(script: Script) -> None:
    """502 to 504 from what is not an office: asked again, and then not known."""
    with pytest.raises(Disconnected) as caught:
        acquire(script, *[HttpReply(502, b"<html>bad gateway</html>", 0)] * 100)
    assert caught.value.sent


def test_a_claim_without_an_answer_is_asked_again_unchanged(script: Script) -> None:
    """A restart of the office in that moment must not cost the place in the queue. The epoch says which grant is meant,
    so that two claims are one."""
    ready = reply(GrantAnswer(lease=view("granted", claim_within=100.0)))
    assert acquire(script, ready, SILENCE, NOBODY, grant()).view.status == "active"
    claims = [call for call in script.calls if call.path == "/v1/leases/l-1/claim"]
    assert [call.body for call in claims] == [claims[0].body] * 3
    assert msgspec.json.decode(claims[0].body or b"")["epoch"] == [1, 7]


def test_a_claim_is_asked_again_only_as_long_as_it_can_be_claimed(script: Script) -> None:
    """After that the next one in line has it, and the caller is not kept waiting."""
    ready = reply(GrantAnswer(lease=view("granted", claim_within=1.0)))
    with pytest.raises(Disconnected):
        acquire(script, ready, *[SILENCE] * 100)
    assert [call.path for call in script.calls].count("/v1/leases/l-1/claim") == 1


# ---- releasing and looking


def run_release(script: Script, *answers: object) -> object:
    script.answers += answers  # type: ignore[arg-type]
    program: Program[object] = OfficeOperations(script.clock).release(LeaseId("l-1"), request_id="r-1", busy_s=1.5)
    return script.run(program)


@pytest.mark.parametrize("kind", ["LeaseExpired", "LeaseRevoked", "LeaseNotActive", "NotFound"])
def test_releasing_what_is_over_is_no_error(script: Script, kind: str) -> None:
    assert run_release(script, error(kind, status=410)) is None


def test_a_release_is_repeated_with_the_same_request_id(script: Script) -> None:
    run_release(script, SILENCE, NOBODY, reply(view("ending")))
    assert {call.body for call in script.calls} == {b'{"request_id":"r-1","busy":1.5}'}


def test_a_lease_that_another_program_has_attached_to_is_not_given_back(script: Script) -> None:
    """The first release was not answered, and may never have arrived; the lease is not ours to end by now."""
    owed = Owed(RequestId("r-1"))
    owed.lease, owed.epoch, owed.tries = LeaseId("l-1"), Epoch(1, 7), 1
    script.answers = [reply(GrantAnswer(lease=view(epoch=Epoch(1, 8))))]
    script.run(OfficeOperations(script.clock).give_back(owed))
    assert (owed.done, script.asked) == (True, ["GET /v1/leases/l-1"])
    owed.done, script.steps = False, []
    script.answers = [reply(GrantAnswer(lease=view())), reply(view("ending"))]
    script.run(OfficeOperations(script.clock).give_back(owed))
    assert (owed.done, script.asked) == (True, ["GET /v1/leases/l-1", "POST /v1/leases/l-1/release"])


@pytest.mark.parametrize("holds", [False, True])
def test_an_attach_that_was_given_up_is_given_back_unless_it_is_held_by_another_handle(
    script: Script, holds: bool
) -> None:
    """Whether the attach arrived is read from the lease. The name of the holder alone does not tell whose it is: this
    program may have held the lease all along."""
    owed = Owed(RequestId("r-1"))
    owed.lease, owed.attaching, owed.is_held = LeaseId("l-1"), "me", lambda lease, epoch: holds
    script.answers = [reply(GrantAnswer(lease=view(holder="me"))), reply(view("ending"))]
    script.run(OfficeOperations(script.clock).give_back(owed))
    assert owed.done
    assert script.asked == ["GET /v1/leases/l-1", *([] if holds else ["POST /v1/leases/l-1/release"])]


def test_of_many_leases_each_is_released_under_its_own_epoch(script: Script) -> None:
    """One that another program has attached to meanwhile is left to it by the office, which compares the epochs."""
    members = []
    for n in (7, 8):
        members.append(Owed(RequestId(f"r-{n}")))
        members[-1].lease, members[-1].epoch = LeaseId(f"l-{n}"), Epoch(1, n)
    script.answers = [reply(ReleasesAnswer(items=[None, None], errors=[None, None]))]
    script.run(OfficeOperations(script.clock).release_many(members))
    asked = msgspec.json.decode(script.calls[0].body or b"", type=ReleasesRequest)
    assert [(item.lease, item.epoch) for item in asked.items] == [("l-7", Epoch(1, 7)), ("l-8", Epoch(1, 8))]


def test_a_lease_that_was_claimed_from_the_line_is_bound_to_this_process_as_well(script: Script) -> None:
    """Else it would outlive the program for its whole time to live, and one that was granted at once would not."""
    script.answers = [place(), grant(view("granted", claim_within=10.0)), grant()]
    asked = structs.replace(request(), holder_pid=4321)
    script.run(OfficeOperations(script.clock).acquire(asked, Hooks()))
    assert [msgspec.json.decode(call.body or b"{}").get("holder_pid") for call in script.calls] == [4321, None, 4321]
    assert script.calls[-1].path.endswith("/claim")


def test_an_office_that_was_told_to_end_is_not_started_for_a_lease_that_it_has_ended(script: Script) -> None:
    """It is for a new one."""
    core = OfficeOperations(script.clock, lambda: True)
    book = LeaseTable(script.clock, lambda: "r-1")
    held = book.open(ReceivedGrant(view=view(), sent_ns=script.clock.now_ns()), RenewalPolicy())
    many = [held.owed, book.open(ReceivedGrant(view=view(id="l-2"), sent_ns=0), RenewalPolicy()).owed]
    alone = book.open(ReceivedGrant(view=view(id="l-3"), sent_ns=0), RenewalPolicy()).owed
    alone.tries = 1
    asked: list[Program[object]] = [
        core.give_back(alone),
        background_requests.renew_one(core, book, book.attempt(held, None), 1.0),
        core.release(held.id, request_id="r-1", busy_s=0.0),
        core.release_many(many),
        core.give_back(held.owed),
        core.unbind(held.id, held.epoch),
    ]
    for program in asked:
        script.answers, script.steps = [NOBODY], []
        script.run(program)
        assert [type(step).__name__ for step in script.steps] == ["HttpCall"]
    assert all(one.done for one in (*many, alone))
    script.answers, script.steps = [NOBODY, reply(GrantAnswer(lease=view()))], []
    script.run(core.acquire(request(), Hooks()))
    assert Revive() in script.steps


@pytest.mark.parametrize("lease", ["", "../tenants", "l 1", "l-1?x", "ü", "l/1"])
def test_an_id_that_is_none_is_not_sent(script: Script, lease: str) -> None:
    """It would become part of a path."""
    with pytest.raises(NotFound):
        script.run(OfficeOperations(script.clock).get_lease(LeaseId(lease)))
    assert script.calls == []


def test_a_query_may_be_repeated_a_command_is_not(script: Script) -> None:
    """Looking changes nothing. What has no request id is asked once, and silence stays silence."""
    core = OfficeOperations(script.clock)
    script.answers = [SILENCE, reply({"leases": 1})]
    assert script.run(core.query("/v1/x", dict)) == {"leases": 1}
    script.answers, script.steps = [SILENCE], []
    with pytest.raises(Disconnected):
        script.run(core.command("POST", "/v1/x", None, dict, 5.0))
    assert len(script.calls) == 1


def test_an_answer_with_more_in_it_than_we_know_is_read(script: Script) -> None:
    """An office that is one version newer may say more."""
    raw = msgspec.json.decode(msgspec.json.encode(GrantAnswer(lease=view())))
    raw["lease"]["mood"] = "fine"
    assert acquire(script, reply(raw, 201)).view.id == "l-1"


def test_an_answer_with_less_than_we_need_says_so(script: Script) -> None:
    script.answers = [reply({"pid": 1})]
    with pytest.raises(Unsupported, match="same version"):
        script.run(OfficeOperations(script.clock).query("/v1/status", StatusView))
