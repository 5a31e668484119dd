"""What a caller is told of a call whose worker is gone."""

from __future__ import annotations

import os
import pickle
import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sublet.compute import posting
from sublet.compute.calls import ConnectionLost, PendingCall
from sublet.compute.futures import CallFuture
from sublet.compute.outcomes import CallResults
from sublet.compute.posting import AGAIN, outcome
from sublet.compute.worker_guest import Options
from sublet.compute.workers import WorkerCall
from sublet.errors import LeaseRevoked, SubletError, WorkerLost
from sublet.guest.answers import WorkerAnswer
from sublet.guest.cargo import encode
from sublet.values import Kind
from sublet.wire.link_events import Replied
from sublet.wire.work import OutgoingMessage, ResultBuffer, WorkerMessage, pack, unpack
from tests.cases import case

EXECUTING = 7


class Gone:
    """A worker that is no more, and why."""

    guest = object()

    def __init__(self, why: SubletError) -> None:
        self._why = why

    def why_lost(self, lease: object) -> SubletError:
        return self._why


def came_of(call: int, why: SubletError) -> Any:
    pending = PendingCall()
    pending.call, pending.lost = call, ConnectionLost(None, EXECUTING, 0)
    nobody = cast(Any, None)
    return outcome(nobody, cast(Any, Gone(why)), pending, WorkerCall(len, ((),), {}))


def test_what_was_in_line_when_the_lease_ended_can_go_to_another() -> None:
    """A lease may end between the look at it and the call; nothing was begun then, and nobody has to be told."""
    why = LeaseRevoked("lease L1 was revoked", do="Wait.", reason="ended")
    with pytest.raises(LeaseRevoked) as of_one_in_line:
        came_of(EXECUTING + 1, why)
    with pytest.raises(LeaseRevoked) as of_the_executing:
        came_of(EXECUTING, why)
    assert (of_one_in_line.value.begun, of_the_executing.value.begun) == (False, True)
    assert (str(of_one_in_line.value), of_one_in_line.value.reason) == (str(why), why.reason)


def many_came_of(
    call: int, why: SubletError, *, kept: list[object] | None = None, first: int = 0, said: list[object] | None = None
) -> Any:
    """Of five items: what the worker had said, and what it had only kept."""
    results = [pickle.dumps(one, 5) for one in kept or []]
    pending = PendingCall()
    pending.call, pending.lost = call, ConnectionLost(None, EXECUTING, first, results)
    if said is not None:
        body = pack(WorkerMessage.RESULTS, subject=call, amount=0, inline=(pickle.dumps(said, 5), b""))
        pending.parts.append((unpack(body), ()))
    job = WorkerCall(len, [()] * 5, {}, is_many=True)
    lease = SimpleNamespace(_held=SimpleNamespace(view=SimpleNamespace(tenant="local")))
    return outcome(cast(Any, lease), cast(Any, Gone(why)), pending, job)


def test_results_that_were_made_are_kept_when_the_worker_dies() -> None:
    """Only the item that was executing has the error; those behind it were not begun."""
    why = WorkerLost("the worker was killed")
    assert many_came_of(EXECUTING, why, kept=[1, 2]) == CallResults([1, 2], why, 0)
    assert many_came_of(EXECUTING, why, said=[1, 2], kept=[3], first=2) == CallResults([1, 2, 3], why, 0)
    assert many_came_of(EXECUTING, why, said=[1, 2, 3], kept=[2, 3], first=1) == CallResults([1, 2, 3], why, 0)
    assert many_came_of(EXECUTING, why) == CallResults([], why, 0)


def test_a_call_whose_last_item_was_finished_is_finished() -> None:
    """The worker died while it said so."""
    why = WorkerLost("the worker was killed")
    assert many_came_of(EXECUTING, why, kept=[1, 2, 3, 4, 5]) == CallResults([1, 2, 3, 4, 5], None, 0)
    assert many_came_of(EXECUTING + 1, why, said=[1, 2, 3, 4, 5]) == CallResults([1, 2, 3, 4, 5], None, 0)


def test_a_result_before_which_one_is_missing_is_not_taken() -> None:
    why = WorkerLost("the worker was killed")
    assert many_came_of(EXECUTING, why, kept=[9], first=3) == CallResults([], why, 0)


def test_a_call_of_many_that_was_not_begun_goes_back_to_who_sent_it() -> None:
    """What is in the buffer is of another call."""
    why = WorkerLost("the worker was killed")
    assert many_came_of(EXECUTING + 1, why, kept=[1]) == CallResults([], why, 0, is_begun=False)


class Sent:
    """A call of many that its worker executes: what came of it, and what is in the worker's buffer."""

    def __init__(self, pickles: list[object], first: int = 0) -> None:
        self.buffer, fd = ResultBuffer.create()
        os.close(fd)
        self.buffer.begin(EXECUTING)
        self.buffer.restart_at(first)
        for one in pickles:
            assert self.buffer.put(pickle.dumps(one, 5))
        lease = SimpleNamespace(_held=SimpleNamespace(view=SimpleNamespace(tenant="local")), id="L1")
        exchange = SimpleNamespace(results=self.buffer, wait=self._wait)
        worker = SimpleNamespace(exchange=exchange, guest=None)
        self.future = CallFuture()
        job = WorkerCall(len, [()] * 9, {}, is_many=True)
        self.watched = posting._Watched(cast(Any, lease), cast(Any, worker), job, Options(), self.future)
        self.watched.pending.call = EXECUTING
        self.on_the_way: list[OutgoingMessage] = []

    def came(self, message: OutgoingMessage) -> None:
        self.watched.pending.parts.append((unpack(message.body), message.fds))

    def _wait(self, pending: PendingCall, until_ns: object) -> bool:
        if self.on_the_way:
            self.came(self.on_the_way.pop(0))
        return False

    def finish(self, *results: object) -> CallResults:
        """Its answer comes, and the rest of its results before."""
        if results:
            self.came(said_of(len(self.watched.pending.parts), *results))
        body = WorkerAnswer(WorkerMessage.MANY, encode(None, "nothing"), subject=EXECUTING).packed()[0]
        self.watched.pending.came, self.watched.pending.is_done = Replied(EXECUTING, body, ()), True
        self.watched.finish()
        many: CallResults = self.future.result(0)
        return many


def said_of(first: int, *results: object) -> OutgoingMessage:
    body = pack(WorkerMessage.RESULTS, subject=EXECUTING, amount=first, inline=(pickle.dumps(list(results), 5), b""))
    return OutgoingMessage(body, ())


def test_what_a_call_has_made_is_there_before_it_is_done_and_its_future_has_all_of_it() -> None:
    sent = Sent([1, 2])
    assert sent.future.made() == [1, 2]
    sent.buffer.put(pickle.dumps(3, 5))
    assert sent.future.made() == [1, 2, 3]
    assert sent.finish(1, 2, 3, 4).results == [1, 2, 3, 4]
    assert sent.future.made() == [1, 2, 3, 4]


def test_an_array_that_was_sent_is_in_what_a_call_has_made_and_in_its_future() -> None:
    """Reading it the first time leaves the descriptor to the second."""
    array, sent = np.arange(100_000.0), Sent([], first=1)
    sent.came(
        OutgoingMessage(
            *WorkerAnswer(WorkerMessage.RESULT, encode(array, "the result"), subject=EXECUTING, took_ns=0).packed()
        )
    )
    for found in (sent.future.made(), sent.finish().results):
        assert len(found) == 1
        assert np.array_equal(found[0], array)


def test_results_that_were_sent_and_have_not_come_are_waited_for() -> None:
    """The worker has sent what was in its buffer and gone on: what is there now is behind that."""
    sent = Sent([3, 4], first=2)
    sent.on_the_way.append(said_of(0, 1, 2))
    assert sent.future.made() == [1, 2, 3, 4]


def test_results_that_never_come_end_what_a_call_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "MADE_WITHIN_NS", 2_000_000)
    assert Sent([3, 4], first=2).future.made() == []


def test_a_call_that_was_not_sent_or_was_cancelled_has_made_nothing() -> None:
    sent = Sent([1])
    sent.watched.pending.call = 0
    assert sent.future.made() == []
    future = CallFuture()
    assert future.cancel()
    assert future.made() == []
    failed = CallFuture()
    failed.deliver(error=WorkerLost("killed"))
    assert failed.made() == []


class Workers:
    """Those of the lease of a map: ``lost`` says at which sending the worker dies before it begins what it is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lost: dict[int, str]) -> None:
        self.sent: list[tuple[str, list[int]]] = []
        self._lost = lost
        self._present = "first"
        monkeypatch.setattr(posting, "check_call", lambda lease, options: None)
        monkeypatch.setattr(posting, "workers_of", lambda lease: self)
        monkeypatch.setattr(posting, "_submit", self._submit)

    def find(self, lease: object, options: object) -> str:
        return self._present

    def _submit(self, future: CallFuture, lease: object, worker: str, job: WorkerCall, options: object) -> None:
        items = [n for (n,) in job.args]
        if (successor := self._lost.get(len(self.sent))) is None and worker == self._present:
            future.set_result(CallResults([-n for n in items], None, len(items)))
        else:
            self._present = successor or self._present
            future.set_result(CallResults([], WorkerLost("killed"), 0, is_begun=False))
        self.sent.append((worker, items))

    def mapped(self, count: int) -> list[int]:
        lease: Any = SimpleNamespace(devices=())
        return list(posting.map_calls(lease, Options(), abs, (range(1, count + 1),)))


def test_a_map_sends_what_a_dead_worker_had_not_begun_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its items are executed in another order than that in which they were given."""
    workers = Workers(monkeypatch, lost={1: "second"})
    assert workers.mapped(4) == [-1, -2, -3, -4]
    assert workers.sent == [("first", [1]), ("first", [2]), ("second", [2]), ("second", [3, 4])]


def test_a_map_sends_all_again_that_stood_in_line_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch, lost={0: "first", 1: "second"})
    assert workers.mapped(4) == [-1, -2, -3, -4]
    assert workers.sent[:4] == [("first", [1]), ("first", [2]), ("second", [1]), ("second", [2])]


def test_a_map_whose_workers_never_begin_says_so_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(monkeypatch, lost=dict.fromkeys(range(posting.TRIES), "next"))
    with pytest.raises(WorkerLost):
        workers.mapped(1)
    assert len(workers.sent) == posting.TRIES


def test_with_the_process_alone_what_was_in_line_goes_to_its_successor() -> None:
    why = WorkerLost("the worker was killed")
    assert came_of(EXECUTING + 1, why) is AGAIN
    with pytest.raises(WorkerLost):
        came_of(EXECUTING, why)


class Lane:
    """A worker of a map that executes one batch at a time, and dies when chance wants it."""

    def __init__(self, chance: random.Random, executed: list[int]) -> None:
        self._chance, self._executed = chance, executed
        self.is_lost = False
        self._line: list[tuple[list[tuple[int]], CallFuture]] = []

    def submit(self, future: CallFuture, job: WorkerCall) -> None:
        self._line.append((job.args, future))

    def step(self) -> None:
        """Execute what is first in line, or die before it, or in it."""
        if not self._line:
            return
        fate = self._chance.random()
        if fate < 0.85:
            items, future = self._line.pop(0)
            self._executed += [item for (item,) in items]
            future.deliver(CallResults([-item for (item,) in items], None, 1))
            return
        self.is_lost = True
        if fate < 0.88:
            items, future = self._line.pop(0)
            self._executed += [item for (item,) in items[:1]]
            future.deliver(CallResults([], WorkerLost("gone"), 0))
        for _, future in self._line:
            future.deliver(CallResults([], WorkerLost("gone"), 0, is_begun=False))
        self._line = []


def test_a_map_over_several_workers_gives_each_result_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them die: what was not begun is executed once, elsewhere; behind one that failed comes none."""
    for seed in range(200):
        with case("seed", seed):
            check_map(seed, monkeypatch)


def check_map(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, executed = random.Random(seed), cast(list[int], [])
    lanes: dict[Options, Lane] = {}

    def find(lease: object, options: Options) -> Lane:
        if options not in lanes or lanes[options].is_lost:
            lanes[options] = Lane(chance, executed)
        return lanes[options]

    def wait(future: Any, timeout: float | None = None) -> CallResults:
        while not future.done():
            chance.choice(list(lanes.values())).step()
        found: CallResults = Future.result(future)
        return found

    monkeypatch.setattr(CallFuture, "result", wait)
    monkeypatch.setattr(posting, "check_call", lambda lease, options: None)
    monkeypatch.setattr(posting, "workers_of", lambda lease: SimpleNamespace(find=find))
    monkeypatch.setattr(posting, "_submit", lambda future, lease, worker, job, options: worker.submit(future, job))
    devices = [SimpleNamespace(kind=Kind.GPU)] * chance.randint(1, 4)
    count, found = chance.randint(0, 60), cast(list[int], [])
    lease: Any = SimpleNamespace(devices=devices)
    options = Options(timeout_ns=chance.choice([None, 1]))  # with a limit they go one by one
    try:
        found.extend(posting._mapped(lease, options, abs, zip(range(count), strict=True)))
    except WorkerLost:
        assert len(found) < count
    else:
        assert len(found) == count
    assert found == [-n for n in range(len(found))]
    assert len(set(executed)) == len(executed)
