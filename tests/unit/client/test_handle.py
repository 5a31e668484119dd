"""The lease objects that programs hold, blocking and asyncio: what they show, ask and refuse, on a held clock.

The objects, the book and the requests are the real ones; a script stands for the office and the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from sublet.background import shortage_explained
from sublet.client.aio_lease import Lease as AioLease
from sublet.client.handle import DroppedLease
from sublet.client.lease import Lease
from sublet.client.lease_entry import Owed
from sublet.client.steps import Program
from sublet.errors import Disconnected, InvalidRequest, LeaseExpired, LeaseNotActive, LeaseRevoked, SubletError
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.values import Epoch, LeaseId, RenewMode
from sublet.wire.http import RenewAnswer
from tests.unit.client.script import SILENCE, ended, error, noticed, reply, view
from tests.unit.client.test_lease_table import Desk

pytestmark = pytest.mark.filterwarnings("ignore::sublet.client.handle.DroppedLease")  # at the end of a test

NEVER = RenewalPolicy(mode=RenewMode.NEVER)
ALWAYS = RenewalPolicy(mode=RenewMode.ALWAYS, jitter_fraction=0.0)
WHILE_BUSY = RenewalPolicy(jitter_fraction=0.0)
RENEWED = reply(RenewAnswer(lease=LeaseId("l-1"), epoch=Epoch(1, 7), deadline=0.0, ttl=100.0, number=2))


class Fabric:
    """What a lease object asks of its fabric: programs are run by the script, callbacks are called at once."""

    def __init__(self, desk: Desk, *, waits: bool) -> None:
        self._waits = waits
        self._desk = desk
        self._clock = desk.clock
        self._core = desk.core
        self._lock = threading.RLock()
        self._keeper = self._callbacks = self
        self.wakes = 0
        self.given_up: list[Owed] = []
        self.unbound: list[tuple[LeaseId, Epoch]] = []

    def _run(self, program: Program[Any]) -> Any:
        if self._waits:
            return self._run_later(program)
        return self._desk.script.run(program)

    async def _run_later(self, program: Program[Any]) -> Any:
        await asyncio.sleep(0)
        return self._desk.script.run(program)

    def wake(self) -> None:
        self.wakes += 1

    wake_in_time = wake

    def deliver(self, callback: Callable[[Any], object], value: object) -> None:
        callback(value)

    _deliver = deliver

    def _release_in_background(self, owed: Owed) -> None:
        self.given_up.append(owed)

    def _unbind(self, lease: LeaseId, epoch: Epoch) -> None:
        self.unbound.append((lease, epoch))


class Side:
    """A lease of one kind, and the same verbs for both."""

    def __init__(self, kind: type[Lease] | type[AioLease]) -> None:
        self.desk = Desk()
        self.waits = kind is AioLease
        self.fabric = Fabric(self.desk, waits=self.waits)
        self._kind: Any = kind

    def open(self, policy: RenewalPolicy = WHILE_BUSY, **facts: Any) -> Any:
        held = self.desk.open(policy, **facts)

        async def make() -> Any:
            return self._kind(self.fabric, self.desk.book, held)

        lease = asyncio.run(make()) if self.waits else self._kind(self.fabric, self.desk.book, held)
        held.listeners.clear()
        return lease

    def do(self, call: Callable[[], Any], *answers: object) -> Any:
        """Carry it out; these are the answers to what it asks."""
        self.desk.script.answers += answers  # type: ignore[arg-type]

        async def awaited() -> Any:
            found = call()
            return await found if inspect.isawaitable(found) else found

        found = asyncio.run(awaited()) if self.waits else call()
        assert not self.desk.script.answers, "more was to be asked"
        return found

    def within(self, lease: Any, body: Callable[[], object], *answers: object) -> None:
        """As the body of a ``with``."""
        self.desk.script.answers += answers  # type: ignore[arg-type]

        async def awaited() -> None:
            async with lease:
                body()

        if self.waits:
            asyncio.run(awaited())
        else:
            with lease:
                body()
        assert not self.desk.script.answers, "more was to be asked"

    @property
    def asked(self) -> list[str]:
        return self.desk.script.asked


@pytest.fixture(params=[Lease, AioLease], ids=["blocking", "asyncio"])
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param)


# ---- facts


def test_what_is_left_runs_down_to_the_own_deadline(side: Side) -> None:
    """It is told in seconds of each clock: 100 s, less 5 % and the request time-out of 5 s."""
    lease = side.open(NEVER)
    began = lease.deadline
    assert (lease.remaining, lease.ttl) == (90.0, 100.0)
    wall = lease.expires_at
    side.desk.clock.go(30)
    assert lease.remaining == 60.0
    assert lease.deadline == began
    assert abs((lease.expires_at - wall).total_seconds()) < 1e-6, "it moves for no clock that only goes on"
    side.desk.clock.go(60)
    assert (lease.status, lease.remaining) == (LeaseStatus.ENDING, 0.0)
    assert lease.end.reason is EndReason.EXPIRED


def test_a_new_policy_holds_from_now_on(side: Side) -> None:
    """A lease that would not have been renewed is due at once under one that renews it."""
    lease = side.open(NEVER)
    side.desk.clock.go(80)
    assert side.desk.collect() == ()
    lease.use(ALWAYS)
    assert side.fabric.wakes == 1, "the keeper may be asleep"
    assert [attempt.lease for attempt in side.desk.collect()] == [lease.id]


def test_a_policy_that_does_not_suit_the_lease_is_refused_and_changes_nothing(side: Side) -> None:
    lease = side.open(NEVER)
    for wrong in ("always", RenewalPolicy(every="10m", mode=RenewMode.ALWAYS)):
        with pytest.raises(InvalidRequest):
            lease.use(wrong)
    side.desk.clock.go(80)
    assert side.desk.collect() == ()


@pytest.mark.parametrize(("needs", "may"), [(0, True), ("25s", True), (30.5, False), ("2m", False)])
def test_work_that_does_not_fit_before_the_lease_is_taken_may_not_begin(
    side: Side, needs: float | str, may: bool
) -> None:
    """It has notice of 30 s. Without one it is renewed, for as long as it takes."""
    lease = side.open(NEVER)
    lease.check("10m")
    side.desk.news("noticed", noticed(30))
    if may:
        lease.check(needs)
    else:
        with pytest.raises(LeaseRevoked, match=f"nothing may begin under lease {lease.id}"):
            lease.check(needs)


def test_what_is_over_says_how_it_ended(side: Side) -> None:
    lease = side.open(NEVER)
    side.desk.clock.go(91)
    with pytest.raises(LeaseExpired):
        lease.check()
    taken = side.open(id="l-2")
    side.desk.news("ended", ended("preempted", id="l-2"))
    with pytest.raises(LeaseRevoked):
        taken.check()


def test_a_lease_is_busy_until_the_last_that_uses_it_is_done(side: Side) -> None:
    """Activities overlap; what a body raises ends its own."""
    lease = side.open(WHILE_BUSY)
    with lease.activity("outer"):
        with contextlib.suppress(ValueError), lease.activity("inner"):
            assert lease.busy
            raise ValueError("of the body")
        assert lease.busy
        side.desk.clock.go(70)
        assert [attempt.active for attempt in side.desk.collect()] == [True]
    assert not lease.busy
    assert side.fabric.wakes == 4


def test_it_belongs_to_the_process_that_acquired_it(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork neither uses it nor gives it back."""
    lease = side.open(ALWAYS)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (lease.renew, lease.release, lease.leave, lambda: lease.activity().__enter__()):
        with pytest.raises(LeaseNotActive, match="belongs to the process"):
            side.do(use)
    side.within(lease, lambda: None)
    monkeypatch.undo()
    assert side.asked == []
    assert not side.fabric.given_up
    assert lease.status is LeaseStatus.ACTIVE


# ---- renewal by hand


def test_a_renewal_by_hand_counts_from_its_sending_and_as_a_sign_of_life(side: Side) -> None:
    lease = side.open(WHILE_BUSY)
    side.desk.clock.go(50)
    side.do(lease.renew, RENEWED)
    assert side.asked == ["POST /v1/leases/l-1/renew"]
    assert b'"active":true' in (side.desk.script.calls[0].body or b"")
    assert lease.remaining == pytest.approx(90.0 - side.desk.script.takes_s)
    assert not lease.busy, "asking is no work"
    with lease.activity():
        side.desk.clock.go(69)
        assert side.desk.collect() == (), "the next one is due as if it had been renewed by itself"
        side.desk.clock.go(1)
        assert len(side.desk.collect()) == 1


def test_another_time_to_live_is_asked_for_and_is_the_lease_s_from_then_on(side: Side) -> None:
    lease = side.open(WHILE_BUSY)
    side.desk.clock.go(1)
    longer = reply(RenewAnswer(lease=LeaseId("l-1"), epoch=Epoch(1, 7), deadline=0.0, ttl=200.0, number=2))
    side.do(lambda: lease.renew("200s"), longer)
    assert b'"ttl":200.0' in (side.desk.script.calls[0].body or b"")
    assert lease.ttl == 200.0
    assert lease.remaining == pytest.approx(185.0 - side.desk.script.takes_s)


def test_silence_is_raised_and_the_lease_goes_on_to_its_own_deadline(side: Side) -> None:
    lease = side.open(WHILE_BUSY)
    with pytest.raises(Disconnected, match="renewal of lease l-1 was not answered"):
        side.do(lease.renew, SILENCE)
    assert lease.end is None
    left = lease.remaining
    side.do(lease.renew, RENEWED)
    assert lease.remaining > left


@pytest.mark.parametrize("left_s", [80.0, 3.0])
def test_an_answer_is_awaited_for_as_long_as_it_would_help(side: Side, left_s: float) -> None:
    """By hand there is nothing else to do meanwhile: 5 s, or what is left of the lease if the wait would outlast it."""
    lease = side.open(NEVER)
    side.desk.clock.go(90.0 - left_s)
    with contextlib.suppress(Disconnected, LeaseExpired):
        side.do(lease.renew, SILENCE)
    (call,) = side.desk.script.calls
    assert min(left_s, 5.0) <= call.timeout_s <= 10.0


def test_a_refusal_is_raised_with_what_it_means(side: Side) -> None:
    """What the office will not renew runs to its deadline; what it has ended is over."""
    lease = side.open(WHILE_BUSY)
    with pytest.raises(LeaseRevoked, match="refused"):
        side.do(lease.renew, error("QuotaExceeded", "the quota of ann is used up", status=409))
    assert lease.status is not LeaseStatus.ENDED
    taken = side.open(WHILE_BUSY, id="l-2")
    gone = ended("preempted", id="l-2").end
    with pytest.raises(LeaseRevoked):
        side.do(taken.renew, error("LeaseRevoked", "it was taken", status=410, end=gone))
    assert taken.end.reason is EndReason.PREEMPTED
    with pytest.raises(LeaseRevoked):
        side.do(taken.renew)
    assert len(side.asked) == 2, "what is over is not asked for again"


# ---- the ways out


def test_a_release_is_asked_once_with_its_busy_time(side: Side) -> None:
    """Twice is harmless."""
    lease = side.open(WHILE_BUSY)
    with lease.activity():
        side.desk.clock.go(7)
    side.do(lease.release, reply(ended("released")))
    side.do(lease.release)
    assert side.asked == ["POST /v1/leases/l-1/release"]
    assert b'"busy":7.0' in (side.desk.script.calls[0].body or b"")
    assert lease.end.reason is EndReason.RELEASED
    assert side.desk.book.due_releases() == []
    assert side.fabric.given_up == []


def test_what_ran_out_is_not_given_back(side: Side) -> None:
    """The office knows by itself."""
    lease = side.open(NEVER)
    side.desk.clock.go(91)
    side.do(lease.release)
    side.within(lease, lambda: None)
    assert side.asked == []


def test_the_offices_word_on_the_end_is_the_last(side: Side) -> None:
    """It may have been taken a moment before it was given back."""
    lease = side.open(NEVER)
    side.do(lease.release, reply(ended("preempted")))
    assert lease.end.reason is EndReason.PREEMPTED


def test_a_release_without_an_answer_is_over_here_and_goes_on_in_the_background(side: Side) -> None:
    """With the same request id, so that it has one effect."""
    lease = side.open(ALWAYS)
    silent = [SILENCE] * 50
    side.desk.script.answers += silent
    with pytest.raises(Disconnected):
        side.do(lease.release)
    side.desk.script.answers.clear()
    assert lease.end is not None
    (owed,) = side.fabric.given_up
    assert owed.left
    assert owed is lease._held.owed
    assert {call.path for call in side.desk.script.calls} == {"/v1/leases/l-1/release"}
    assert all(b'"r-release"' in (call.body or b"") for call in side.desk.script.calls)


@pytest.mark.parametrize("raised", [None, ValueError("of the body")], ids=["", "and the body raised"])
def test_a_block_ends_with_what_its_body_raised(side: Side, raised: Exception | None) -> None:
    """That the lease could not be given back is said beside it, and by itself as a warning."""
    lease = side.open(ALWAYS)
    side.desk.script.answers += [SILENCE] * 50

    def body() -> None:
        if raised is not None:
            raise raised

    expected: Any = pytest.raises(ValueError, match="of the body") if raised else pytest.warns(RuntimeWarning)
    with contextlib.suppress(AssertionError), expected as seen:
        side.within(lease, body)
    side.desk.script.answers.clear()
    said = seen.value.__notes__[0] if raised else str(seen[0].message)
    assert "lease l-1 could not be given back yet; it is tried again" in said
    assert side.fabric.given_up


def test_what_was_left_is_neither_renewed_nor_given_back(side: Side) -> None:
    """Whoever attaches to it by its id has it from then on."""
    lease = side.open(ALWAYS, id="l-left")
    assert side.do(lease.leave) == "l-left"
    side.within(lease, lambda: None)
    side.desk.clock.go(80)
    assert side.desk.collect() == ()
    assert side.asked == []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del lease
        gc.collect()
    assert not [one for one in said if "l-left" in str(one.message)]
    assert not side.desk.book.dropped


def test_a_lease_that_would_end_with_this_process_is_unbound_before_it_is_left(side: Side) -> None:
    lease = side.open(ALWAYS, bound_to=7)
    side.do(lease.leave, *([] if side.waits else [reply(view())]))
    if side.waits:
        assert side.fabric.unbound == [("l-1", Epoch(1, 7))]
    else:
        assert side.asked == ["POST /v1/leases/l-1/unbind"]


def test_where_it_cannot_be_unbound_it_stays_as_it_was() -> None:
    """Blocking: else it would end with the program, and its id would be of no use to anybody."""
    side = Side(Lease)
    lease = side.open(ALWAYS, bound_to=7)
    side.desk.script.answers += [SILENCE] * 50
    with pytest.raises(Disconnected):
        side.do(lease.leave)
    side.desk.script.answers.clear()
    assert lease.status is LeaseStatus.ACTIVE
    assert not lease._left
    late = side.open(ALWAYS, id="l-2", bound_to=7)
    side.do(late.leave, error("StaleEpoch", "another epoch is live", status=409))
    assert late._left, "what is over already, or another's by now, is no error"


def test_a_lease_that_nothing_holds_any_more_is_given_back_with_a_warning(side: Side) -> None:
    lease = side.open(ALWAYS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del lease
        gc.collect()
    dropped = [str(one.message) for one in said if one.category is DroppedLease]
    assert "lease l-1 was dropped without a release; use `with`, or call release()" in dropped
    assert [owed.lease for owed in side.desk.book.due_releases()] == ["l-1"]
    assert side.fabric.wakes == 1


# ---- callbacks


def test_a_notice_and_the_end_are_told_to_those_who_asked(side: Side) -> None:
    lease = side.open(ALWAYS)
    heard: list[object] = []
    side.do(lambda: [lease.on_notice(heard.append), lease.on_end(heard.append)])
    side.desk.news("noticed", noticed(30))
    side.desk.news("ended", ended("preempted"))
    assert [type(one).__name__ for one in heard] == ["Notice", "LeaseEnd"]


def test_who_asks_late_is_told_at_once(side: Side) -> None:
    """A notice that was there before is news for the callback, and so is the end."""
    lease = side.open(ALWAYS)
    heard: list[object] = []
    side.desk.news("noticed", noticed(30))
    side.do(lambda: [lease.on_notice(heard.append)])
    assert [type(one).__name__ for one in heard] == ["Notice"]
    side.desk.news("ended", ended("preempted"))
    side.do(lambda: [lease.on_end(heard.append)])
    assert [type(one).__name__ for one in heard] == ["Notice", "LeaseEnd"]


def test_what_cannot_be_called_is_refused(side: Side) -> None:
    lease = side.open(ALWAYS)
    for ask in (lease.on_notice, lease.on_end):
        with pytest.raises(InvalidRequest, match="cannot be called"):
            ask("print")


def test_a_lease_is_kept_while_a_request_waits_that_is_to_take_its_place(side: Side) -> None:
    """Whatever runs under it; afterwards its own policy holds again."""
    lease = side.open(WHILE_BUSY)
    with lease._kept():
        side.desk.clock.go(70)
        (attempt,) = side.desk.collect()
        assert attempt.lease == lease.id
        side.do(lease.renew, RENEWED)
    side.desk.clock.go(85)
    assert side.desk.collect() == ()


def test_a_renewal_by_hand_that_is_lost_is_repeated_before_its_caller_gives_up(side: Side) -> None:
    """As any other: its caller waits for five seconds, the plan of the lease for one."""
    lease = side.open(ALWAYS)
    side.desk.clock.go(50)
    lease._renewal_by_hand(None)
    side.desk.clock.go(1.5)
    assert [attempt.lease for attempt in side.desk.collect()] == [lease.id]


# ---- a shortage


class NoDescriptor:
    """Finds no module, for want of a descriptor."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("sublet."):
            raise self._error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        ImportError(f"/lib/x.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"),
    ],
    ids=["module", "library"],
)
@pytest.mark.parametrize("verb", ["start", "submit", "run", "map", "options", "volume_line"])
def test_where_there_is_no_descriptor_for_the_first_import_the_program_hears_what_helps(
    side: Side, verb: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts something under a lease is imported when it is first asked for, and a program may be short by
    then."""
    lease = side.open(NEVER)
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: lease.start(["true"]),
        "submit": lambda: lease.submit(len, ""),
        "run": lambda: lease.run(len, ""),
        "map": lambda: lease.map(len, [""]),
        "options": lease.options,
        "volume_line": lease.volume_line,
    }
    with monkeypatch.context() as patch:
        for name in [one for one in sys.modules if one.startswith(("sublet.client.", "sublet.compute."))]:
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "meta_path", [NoDescriptor(error), *sys.meta_path])
        with pytest.raises(SubletError, match="short of a resource") as told:
            side.do(calls[verb])
    assert "ulimit -n" in told.value.do


def test_a_module_that_is_missing_is_told_as_it_is() -> None:
    with pytest.raises(ImportError, match="nowhere"), shortage_explained():
        raise ImportError("cannot import name 'nowhere'")
