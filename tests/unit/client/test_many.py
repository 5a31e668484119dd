"""Asking for many leases and giving many back, step by step, without any office."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from sublet.client.lease_entry import Owed
from sublet.client.operations import POLL_S, RELEASES_MAX, Hooks, OfficeOperations, ReceivedGrant
from sublet.client.requests import LeaseOptions, ask_cpu, ask_many, check_many
from sublet.client.steps import HttpReply
from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, LeaseEnded, Unsupported
from sublet.values import NS_PER_S, Epoch, LeaseId, RequestId
from sublet.wire.http import (
    AcquisitionRequest,
    EndsAnswer,
    EndsRequest,
    ErrorView,
    FailedGrant,
    GrantsAnswer,
    LeaseView,
    ReleasesAnswer,
    ReleasesRequest,
)
from tests.unit.client.script import SILENCE, HeldClock, Script, error, grant, place, refusal, reply, view


@pytest.fixture
def script() -> Script:
    return Script(HeldClock())


def request(count: int = 3, at_least: int = 1, **terms: Any) -> AcquisitionRequest:
    return ask_many(ask_cpu(cast("LeaseOptions", terms), cores=1, or_smaller=False), count, at_least)


def told(kind: str, *, transient: bool = False) -> ErrorView:
    return ErrorView(kind=kind, message="so it is", do="Do this.", transient=transient)


def grants(count: int, failed: int = 0) -> HttpReply:
    """So many leases that are held, and so many whose machine did not confirm."""
    held = [view(id=f"l-{n}", epoch=Epoch(1, n)) for n in range(count)]
    lost = [FailedGrant(lease=f"f-{n}", error=told("Disconnected", transient=True)) for n in range(failed)]
    return reply(GrantsAnswer(leases=held, failed=lost), 201)


def released(*errors: ErrorView | None) -> HttpReply:
    items: list[LeaseView | None] = [view("ending") if one is None else None for one in errors]
    return reply(ReleasesAnswer(items=items, errors=list(errors)))


def acquire(script: Script, *answers: Any, asked: AcquisitionRequest | None = None) -> tuple[list[ReceivedGrant], Owed]:
    script.answers += answers
    owed = Owed(RequestId("r-back"))
    try:
        found = script.run(OfficeOperations(script.clock).acquire_many(asked or request(), Hooks(), owed))
    except BaseException as raised:
        raised.owed = owed  # type: ignore[attr-defined]
        raise
    return [one for one, _ in found], owed


def back(script: Script) -> list[str]:
    """What the last message gives back."""
    assert script.asked[-1] == "POST /v1/releases"
    return [one.lease for one in msgspec.json.decode(script.calls[-1].body or b"", type=ReleasesRequest).items]


def test_all_come_with_one_request_and_each_is_owed_by_itself(script: Script) -> None:
    found, owed = acquire(script, grants(3))
    assert script.asked == ["POST /v1/acquisitions"]
    assert [one.view.id for one in found] == ["l-0", "l-1", "l-2"]
    assert [(one.lease, one.epoch, one.left) for one in owed.members or ()] == [
        (f"l-{n}", Epoch(1, n), False) for n in range(3)
    ]


def test_their_time_counts_from_before_the_request_was_sent(script: Script) -> None:
    script.takes_s, sent_ns = 3.0, script.clock.now_ns()
    found, _ = acquire(script, grants(2))
    assert {one.sent_ns for one in found} == {sent_ns}


def test_a_lost_answer_is_asked_again_unchanged(script: Script) -> None:
    acquire(script, SILENCE, error("Disconnected", status=503), grants(3))
    assert (len(script.calls), len({call.body for call in script.calls})) == (3, 1)


def test_what_was_not_confirmed_is_not_in_the_result_and_is_given_back(script: Script) -> None:
    found, owed = acquire(script, grants(2, failed=1))
    assert len(found) == 2
    assert [one.lease for one in owed.members or () if one.left] == ["f-0"]


def test_with_too_few_confirmed_all_are_given_back(script: Script) -> None:
    with pytest.raises(Disconnected, match="1 of 3 leases were granted and are not held"):
        acquire(script, grants(2, failed=1), released(None, None, None), asked=request(3, 3))
    assert back(script) == ["l-0", "l-1", "f-0"]


def test_where_none_is_free_it_waits_for_one_and_claims_it(script: Script) -> None:
    found, owed = acquire(script, place(2), grant(view("granted", claim_within=10.0, remaining=None)), grant())
    assert script.asked == [
        "POST /v1/acquisitions",
        "GET /v1/leases/l-1?wait=5&after=queued",
        "POST /v1/leases/l-1/claim",
    ]
    assert [one.view.id for one in found] == ["l-1"]
    assert (owed.lease, owed.members) == ("l-1", None)


def test_a_refusal_leaves_nothing(script: Script) -> None:
    with pytest.raises(CapacityExceeded) as caught:
        acquire(script, refusal("capacity"))
    assert caught.value.owed.done  # type: ignore[attr-defined]
    assert script.asked == ["POST /v1/acquisitions"]


@pytest.mark.parametrize("blow", [KeyboardInterrupt(), SystemExit(1), RuntimeError("a driver")])
def test_giving_up_before_the_answer_finds_out_what_it_became(script: Script, blow: BaseException) -> None:
    """The request may have arrived: it is asked again, and every lease of the answer is given back in one message."""
    with pytest.raises(type(blow)):
        acquire(script, blow, grants(2, failed=1), released(None, None, None))
    assert script.asked == ["POST /v1/acquisitions", "POST /v1/acquisitions", "POST /v1/releases"]
    assert script.calls[0].body == script.calls[1].body
    assert back(script) == ["l-0", "l-1", "f-0"]


def test_giving_up_where_the_office_is_silent_leaves_it_to_the_keeper(script: Script) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        acquire(script, KeyboardInterrupt(), *[SILENCE] * 9)
    assert not caught.value.owed.done  # type: ignore[attr-defined]


def test_what_has_ended_meanwhile_is_nothing_to_give_back(script: Script) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        acquire(script, KeyboardInterrupt(), error("LeaseEnded", status=410))
    assert caught.value.owed.done  # type: ignore[attr-defined]


def test_an_office_that_does_not_know_the_route_is_older(script: Script) -> None:
    with pytest.raises(Unsupported, match="older"):
        acquire(script, error("NotFound", status=404))


def test_a_request_that_ended_is_told_as_it_ended(script: Script) -> None:
    with pytest.raises(LeaseEnded):
        acquire(script, error("LeaseEnded", status=410))


# ---- giving back


def owed_for(count: int) -> list[Owed]:
    found = []
    for number in range(count):
        one = Owed(RequestId(f"r-{number}"))
        one.lease, one.epoch, one.busy_s = LeaseId(f"l-{number}"), Epoch(1, number), 0.5
        found.append(one)
    return found


def test_many_go_back_in_as_few_messages_as_there_can_be(script: Script) -> None:
    many = owed_for(RELEASES_MAX + 1)
    script.answers = [released(*[None] * RELEASES_MAX), released(None)]
    views = script.run(OfficeOperations(script.clock).release_many(many))
    assert script.asked == ["POST /v1/releases"] * 2
    assert len(views) == RELEASES_MAX + 1
    assert all(one.done for one in many)
    items = msgspec.json.decode(script.calls[0].body or b"", type=ReleasesRequest).items
    assert (items[7].lease, items[7].epoch, items[7].busy) == ("l-7", Epoch(1, 7), 0.5)


def test_what_is_over_or_held_elsewhere_is_no_error(script: Script) -> None:
    many = owed_for(3)
    script.answers = [released(told("NotFound"), told("StaleEpoch"), None)]
    views = script.run(OfficeOperations(script.clock).release_many(many))
    assert [one is None for one in views] == [True, True, False]
    assert all(one.done for one in many)


def test_what_the_office_could_not_do_now_is_tried_again(script: Script) -> None:
    many = owed_for(2)
    script.answers = [released(None, told("Disconnected", transient=True))]
    with pytest.raises(Disconnected):
        script.run(OfficeOperations(script.clock).release_many(many))
    assert [one.done for one in many] == [True, False]


def test_nothing_to_give_back_sends_nothing(script: Script) -> None:
    assert script.run(OfficeOperations(script.clock).release_many([])) == []
    assert script.asked == []


def test_an_answer_of_another_length_settles_nothing(script: Script) -> None:
    many = owed_for(2)
    script.answers = [released(None)]
    with pytest.raises(Disconnected, match="another number"):
        script.run(OfficeOperations(script.clock).release_many(many))
    assert not any(one.done for one in many)


# ---- asking


@pytest.mark.parametrize(("count", "at_least"), [(0, 1), (1025, 1), (True, 1), ("4", 1), (4, 0), (4, 5), (4, 1.0)])
def test_numbers_that_no_request_can_have_are_refused(count: Any, at_least: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_many(count, at_least)


def test_all_or_nothing_does_not_wait() -> None:
    assert request(4, 2).request.wait == 0.0
    assert request(4, 2, wait=0).request.wait == 0.0
    assert request(4, 1).request.wait is None
    with pytest.raises(InvalidRequest, match="does not wait"):
        request(4, 2, wait="1m")


def test_cores_and_memory_go_under_one_lease() -> None:
    wants = ask_cpu(LeaseOptions(), cores=2, or_smaller=False, memory="2GiB").request.wants
    assert [(want.kind, want.amount) for want in wants] == [("cpu", 2), ("memory", 2 << 30)]
    for bad in ("much", 0, -1, "2", 5):
        with pytest.raises(InvalidRequest):
            ask_cpu(LeaseOptions(), cores=2, or_smaller=False, memory=bad)


LABELS = {"program": "burst", "job": "mine"}


def ended(script: Script, *answers: Any, timeout_s: float = 60, everyones: bool = False) -> int:
    script.answers += answers
    return script.run(
        OfficeOperations(script.clock).wait_ended(LABELS, round(timeout_s * NS_PER_S), everyones=everyones)
    )


def test_ends_are_waited_for_at_the_office_until_none_is_left(script: Script) -> None:
    left = [reply(EndsAnswer(left=count)) for count in (3, 1, 0)]
    assert ended(script, *left) == 0
    assert script.asked == ["POST /v1/ends"] * 3
    asked = [msgspec.json.decode(call.body or b"", type=EndsRequest) for call in script.calls]
    assert asked == [EndsRequest(labels=LABELS, wait=POLL_S)] * 3
    assert all(call.timeout_s > POLL_S for call in script.calls)


def test_ends_are_waited_for_no_longer_than_asked(script: Script) -> None:
    script.takes_s = POLL_S
    assert ended(script, *[reply(EndsAnswer(left=2))] * 3, timeout_s=7) == 2
    waits = [msgspec.json.decode(call.body or b"", type=EndsRequest).wait for call in script.calls]
    assert waits == [POLL_S, 2, 0]
    assert ended(script, SILENCE, reply(EndsAnswer(left=4)), timeout_s=0) == 4, "only counted, and asked again"


@pytest.mark.parametrize("everyones", [False, True])
def test_an_older_office_is_asked_for_its_leases_again_and_again(script: Script, everyones: bool) -> None:
    ours = view("ending", labels={**LABELS, "more": "x"})
    others = [view("ended", labels=LABELS), view(labels={"job": "mine"}), view()]
    listed = [reply([ours, *others]), reply([ours]), reply(others)]
    assert ended(script, error("NotFound", status=404), *listed, everyones=everyones) == 0
    path = "GET /v1/leases" if everyones else "GET /v1/leases?own=1"
    assert script.asked == ["POST /v1/ends", path, path, path]
