"""What becomes of requests for a served program: who waits, for how long, and what each is told."""

from __future__ import annotations

import pytest

from sublet.studio.serving import (
    AcquireLease,
    Break,
    Cancel,
    Effect,
    GiveUp,
    LaunchProgram,
    Limits,
    ProgramState,
    ProgramTransitionError,
    Say,
    Send,
    Served,
    Why,
    Withdraw,
)

LIMITS = Limits(concurrent=2, waiting=3, patience_s=20, answer_s=30, load_s=100, retry_s=15, place_s=120)


def asked(limits: Limits = LIMITS) -> Served:
    """Request 1 came at 0, and a lease was asked for."""
    served = Served(limits)
    assert served.arrived(1, 0) == [AcquireLease()]
    return served


def loading(limits: Limits = LIMITS) -> Served:
    """Granted at 1."""
    served = asked(limits)
    assert served.granted(1) == [LaunchProgram()]
    return served


def serving(limits: Limits = LIMITS) -> Served:
    """Loaded at 2, and given request 1."""
    served = loading(limits)
    assert served.loaded(2) == [Send(1)]
    return served


def state(served: Served) -> ProgramState:
    """As of now."""
    served.check()
    return served.state


def test_as_many_requests_wait_as_may_and_the_next_is_told_so() -> None:
    served = asked()
    assert [served.arrived(number, 0) for number in (2, 3)] == [[], []]
    assert served.arrived(4, 0) == [Say(4, Why.BUSY)]
    assert served.waiting == 3


def test_a_place_in_the_queue_is_kept_for_a_while_after_the_last_request() -> None:
    served = asked()
    assert served.tick(20) == [Say(1, Why.NO_LEASE)]
    assert served.arrived(2, 100) == []
    assert served.tick(120) == [Say(2, Why.NO_LEASE)]
    assert served.tick(219) == []
    assert served.tick(220) == [Withdraw()]


def test_a_place_is_not_given_up_while_a_request_waits() -> None:
    served = asked(Limits(patience_s=20, place_s=5))
    assert served.tick(19) == []
    assert served.tick(20) == [Say(1, Why.NO_LEASE), Withdraw()]


def test_a_request_that_the_program_refused_has_waited_since_it_came() -> None:
    served = serving()
    assert served.leaving(10) == []
    assert served.requeue(1, 10) == [GiveUp()]
    assert served.lost("its lease ended", 11) == [AcquireLease()]
    assert served.tick(19) == []
    assert served.tick(20) == [Say(1, Why.NO_LEASE)]


def test_a_request_is_told_what_it_has_waited_for_in_vain() -> None:
    """That no GPU is free was said of a program, too, that had one and was imported for minutes."""
    assert loading().tick(20) == [Say(1, Why.LOADING)]
    busy = serving(Limits(concurrent=1, patience_s=20, answer_s=100))
    assert busy.arrived(2, 3) == []
    assert busy.tick(23) == [Say(2, Why.BUSY)]
    ends = serving(Limits(concurrent=2, patience_s=20, answer_s=100))
    assert ends.leaving(3) == []
    assert ends.arrived(2, 4) == []
    assert ends.tick(24) == [Say(2, Why.LEAVING)]


# ---- a program that cannot be loaded


def test_a_program_that_cannot_be_loaded_is_tried_again_after_a_while_and_not_before() -> None:
    """Until then each request is told why, also while what is left of it is ended."""
    served = loading()
    assert served.failed("no module named x", 5) == [Say(1, Why.BROKEN, "no module named x"), GiveUp()]
    assert served.arrived(2, 6) == [Say(2, Why.BROKEN, "no module named x")]
    assert served.lost("exit 1", 7) == []
    assert served.arrived(3, 19) == [Say(3, Why.BROKEN, "no module named x")]
    assert served.arrived(4, 20) == [AcquireLease()]
    served.granted(21)
    assert served.failed("", 22) == [Say(4, Why.BROKEN, "it cannot be loaded"), GiveUp()], "given back each time"


def test_a_program_that_has_changed_is_tried_again_at_once() -> None:
    served = loading()
    served.failed("no module named x", 5)
    served.lost("exit 1", 6)
    served.retry_load()
    assert served.arrived(2, 7) == [AcquireLease()]


def test_a_program_that_ends_while_it_is_loaded_is_not_started_again_for_the_same_requests() -> None:
    """Else one that ends the lease each time would take one after the other."""
    served = loading()
    assert served.lost("exit 137", 3) == [Say(1, Why.LOST, "exit 137")]
    assert state(served) is ProgramState.COLD


def test_a_program_that_is_not_loaded_in_time_is_given_up() -> None:
    """The time begins with the lease, however long that was waited for."""
    served = asked(Limits(patience_s=1000, load_s=100))
    served.granted(500)
    assert served.tick(599) == []
    assert served.tick(600) == [Say(1, Why.BROKEN, "it was not loaded within 100 s"), GiveUp()]


def test_a_program_that_says_it_is_loaded_when_its_lease_ends_already_takes_nothing() -> None:
    served = loading()
    assert served.leaving(3) == [GiveUp()], "nothing is inside, and a request waits for the next lease"
    assert served.loaded(4) == []
    assert state(served) is ProgramState.LEAVING
    assert served.lost("taken", 5) == [AcquireLease()]


# ---- answers


def test_an_answer_has_its_time_from_when_the_program_was_given_the_request() -> None:
    served = asked(Limits(patience_s=1000, answer_s=30))
    served.granted(500)
    served.loaded(501)
    assert served.tick(530) == []
    assert served.tick(531) == [Cancel(1), Say(1, Why.LATE)]


def test_an_answer_may_take_as_long_as_it_moves() -> None:
    """Its head, each piece of it, and each that its reader takes; then it is cut off."""
    served = serving()
    assert served.begun(1, 25)
    assert served.tick(54) == []
    assert served.moved(1, 54)
    assert served.tick(83) == []
    assert served.tick(84) == [Cancel(1), Break(1, Why.LATE)]
    assert served.tick(90) == [], "it is cut off once"


def test_a_program_that_hangs_at_all_requests_it_may_have_is_ended() -> None:
    """Not before it has had the time of an answer for each, and what was called off counts no sooner."""
    served = serving()
    assert served.arrived(2, 10) == [Send(2)]
    assert served.disconnected(1, 11) == [Cancel(1)]
    assert served.disconnected(1, 12) == [], "once"
    assert served.disconnected(2, 12) == [Cancel(2)]
    assert served.tick(39) == []
    assert state(served) is ProgramState.SERVING
    assert served.tick(40) == [GiveUp()]
    assert served.tick(41) == []


def test_a_program_that_leaves_answers_what_it_has_begun_before_it_is_ended() -> None:
    served = serving()
    for number, sent in ((2, [Send(2)]), (3, [])):
        assert served.arrived(number, 3) == sent
    assert served.leaving(4) == []
    assert served.requeue(2, 4) == []
    assert served.begun(1, 5)
    effects: list[Effect] = served.ended(1, 6)
    assert effects == [GiveUp()]
    assert served.arrived(4, 7) == [], "it is told so once"
    assert served.lost("taken", 8) == [AcquireLease()]


@pytest.mark.parametrize("again", ["begun", "requeue"])
def test_an_answer_that_was_begun_is_not_begun_again(again: str) -> None:
    """Nor does its request go to the next lease: it would be done twice."""
    served = serving()
    served.begun(1, 3)
    with pytest.raises(ProgramTransitionError, match="answered"):
        getattr(served, again)(1, 4)
