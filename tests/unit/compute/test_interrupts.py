"""A Ctrl-C at every moment at which one can come: nobody else is left waiting, and nothing is closed twice."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.client.lease import Lease
from sublet.compute import decorator, posting
from sublet.compute.buffer_cache import BufferCache
from sublet.compute.calls import Exchange, PendingCall
from sublet.compute.functions import Functions, PeerInterpreter
from sublet.compute.futures import CallFuture
from sublet.compute.options import Calls
from sublet.compute.outcomes import CallResults
from sublet.compute.worker_guest import Options
from sublet.errors import Disconnected
from sublet.values import LeaseId
from sublet.wire.device import OpenSession
from sublet.wire.line import pair
from sublet.wire.link_events import Called, Event
from sublet.wire.work import HolderMessage, OutgoingMessage, WorkerMessage, pack, unpack
from tests.left_open import open_now
from tests.traces import until
from tests.unit.client.test_interrupts import Tracer
from tests.unit.compute.session_pair import EPOCH, SessionPair

PATIENCE_S = 60.0


class Interrupting:
    """A lock at whose n-th letting go, in the main thread, a Ctrl-C comes: Python looks for signals there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.left: int | None = None

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)
        if self.left is None or threading.current_thread() is not threading.main_thread():
            return
        if self.left == 0:
            self.left = None
            raise KeyboardInterrupt
        self.left -= 1


class Two:
    """The main thread listens, another waits for it; then the answers of both come, or the end."""

    def __init__(self) -> None:
        self.ours, self.theirs = pair()
        self.exchange = Exchange(self.ours, lambda: None)
        self.first, self.second = PendingCall(), PendingCall()
        self.asked: dict[int, int] = {}
        for one in (self.first, self.second):
            self.exchange.send(one, lambda: OutgoingMessage(pack(WorkerMessage.FAULT, inline=(b'"x"',))))
        self.calls = [one.call for one in self.heard(Called)]
        self.thread = threading.Thread(target=self.exchange.wait, args=(self.second,), daemon=True)

    def heard(self, kind: type) -> list[Any]:
        found: list[Any] = []
        end_s = time.monotonic() + PATIENCE_S
        while len(found) < 2 and time.monotonic() < end_s:
            found += [one for one in self.theirs.receive(0.1) if isinstance(one, kind)]
        return found

    def answer(self, number: int) -> None:
        said = OutgoingMessage(pack(WorkerMessage.FAULT, inline=(json.dumps(number).encode(),)))
        self.theirs.send(lambda link: link.reply(self.calls[number], said.body))

    def begin(self, come: Callable[[], object], armed: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        plain = self.ours.receive

        def hear(timeout_s: float | None) -> Any:
            if threading.current_thread() is threading.main_thread() and self.thread.ident is None:
                self.thread.start()
                until("a follower", lambda: self.exchange._followers, PATIENCE_S)
                come()
                armed()
            return plain(timeout_s)

        monkeypatch.setattr(self.ours, "receive", hear)

    def close(self) -> None:
        self.theirs.hang_up()
        self.exchange.close()
        self.theirs.close()
        self.thread.join(PATIENCE_S)


def said(pending: PendingCall) -> Any:
    return None if pending.came is None else json.loads(unpack(pending.came.body).blob)  # type: ignore[union-attr]


@pytest.mark.parametrize("which", ["of the exchange", "of the line"])
@pytest.mark.parametrize("how", ["answers", "the end"])
def test_a_ctrl_c_while_listening_for_others_keeps_nobody_waiting(
    how: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each letting go of a lock in turn, until the last one is behind the end of the wait."""
    interrupts = 0
    while True:
        two, lock = Two(), Interrupting()
        if which == "of the exchange":
            two.exchange._lock = lock  # type: ignore[assignment]
        else:
            two.ours._lock = lock  # type: ignore[assignment]

        def come(two: Two = two) -> None:
            if how == "answers":
                two.answer(1)
                two.answer(0)
            else:
                two.theirs.hang_up()

        def armed(lock: Interrupting = lock, after: int = interrupts) -> None:
            lock.left = after

        try:
            two.begin(come, armed, monkeypatch)
            was_interrupted = False
            try:
                two.exchange.wait(two.first)
            except KeyboardInterrupt:
                was_interrupted = True
            lock.left = None
            two.thread.join(PATIENCE_S)
            assert not two.thread.is_alive(), f"the other waits on, after interrupt {interrupts}"
            assert two.exchange.wait(two.first), "and so can who was interrupted"
            if how == "answers" and two.second.lost is None and two.first.lost is None:
                assert (said(two.first), said(two.second)) == (0, 1)
            assert two.first.is_done
            assert two.second.is_done
            third = PendingCall()
            two.exchange.send(third, lambda: OutgoingMessage(pack(WorkerMessage.FAULT)))
            two.theirs.hang_up()
            assert two.exchange.wait(third)
            assert two.exchange.under_way == 0 or how == "the end", "whoever listens next puts away what is left"
        finally:
            two.close()
        if not was_interrupted:
            assert interrupts
            return
        interrupts += 1
        assert interrupts < 200


def test_who_follows_and_is_interrupted_does_not_take_the_turn_along() -> None:
    """What is handed to one who has left must reach the next."""
    two = Two()
    left = threading.Event()
    try:
        two.exchange._leader = "somebody"
        signal = two.exchange._lead_or_follow(two.first, object())
        assert signal is not None
        two.thread.start()
        until("both followers", lambda: len(two.exchange._followers) == 2, PATIENCE_S)
        two.exchange._stop_waiting(two.first, object())  # by a Ctrl-C
        two.exchange._pass_on("somebody")
        two.answer(1)
        two.thread.join(PATIENCE_S)
        assert not two.thread.is_alive()
    finally:
        left.set()
        two.close()


@pytest.mark.parametrize("when", ["before it is said", "when it is said"])
def test_a_call_whose_sending_was_interrupted_does_not_run_for_nobody(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair()
    exchange = Exchange(ours, lambda: None)
    plain = ours.send

    def say(*args: Any) -> Any:
        monkeypatch.setattr(ours, "send", plain)
        if when == "when it is said":
            plain(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(ours, "send", say)
    pending = PendingCall()
    with pytest.raises(KeyboardInterrupt):
        exchange.send(pending, lambda: OutgoingMessage(pack(WorkerMessage.FAULT)))
    heard: list[Any] = []
    while when == "when it is said" and len(heard) < 2:
        heard += theirs.receive(1.0)
    if heard:
        assert isinstance(heard[0], Called)
        assert isinstance(heard[1], Event)
        cancelled = unpack(heard[1].body)
        assert (cancelled.kind, cancelled.subject) == (HolderMessage.CANCEL, heard[0].call)
    else:
        assert exchange.under_way == 0
    exchange.close()
    theirs.close()


@pytest.mark.parametrize("when", ["before it is said", "when it is said", "when it was said"])
def test_a_caller_that_is_interrupted_as_its_call_is_sent_leaves_none_running(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the sending and the waiting. The call is cancelled once: a second time would interrupt what it does
    to leave. The number of one that was not sent is the next call's, which is not cancelled for it."""
    ours, theirs = pair()
    exchange = Exchange(ours, lambda: None)
    plain = ours.send

    def say(*args: Any) -> Any:
        monkeypatch.setattr(ours, "send", plain)
        if when == "when it is said":
            plain(*args)
        raise KeyboardInterrupt

    def send(pending: PendingCall, job: Any) -> None:
        exchange.send(pending, lambda: OutgoingMessage(pack(WorkerMessage.FAULT)))
        raise KeyboardInterrupt

    if when != "when it was said":
        monkeypatch.setattr(ours, "send", say)
    worker: Any = SimpleNamespace(exchange=exchange, send=send, completions=SimpleNamespace(wake=lambda: None))
    with pytest.raises(KeyboardInterrupt):
        posting._run_once(None, worker, None, Options())  # type: ignore[arg-type]
    exchange.ask_nobody(OutgoingMessage(pack(WorkerMessage.FAULT)))  # what is heard before it is all that was said
    heard: list[Any] = []
    calls = 1 if when == "before it is said" else 2
    while [type(one) for one in heard].count(Called) < calls:
        heard += theirs.receive(1.0)
    if calls == 1:
        assert [type(one) for one in heard] == [Called]
    else:
        assert [type(one) for one in heard] == [Called, Event, Called]
        cancelled = unpack(heard[1].body)
        assert (cancelled.kind, cancelled.subject) == (HolderMessage.CANCEL, heard[0].call)
    exchange.close()
    theirs.close()


class Sending:
    """A worker's calls that were handed over to be sent, and have not been taken back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: list[Any] = []
        self.in_use = 0
        self.is_interrupted = False
        """Who waits for a result."""
        self.lease: Any = SimpleNamespace()
        keeps = SimpleNamespace(add=self.left.append, withdraw=self._withdraw, wake=lambda: None)
        exchange = SimpleNamespace(under_way=posting.RUN_MAX, cancel=self._cancel)
        worker = SimpleNamespace(life=self, completions=keeps, exchange=exchange)
        patch.setattr(posting, "_ready", lambda *_: worker)
        patch.setattr(CallFuture, "result", self._wait)

    @contextlib.contextmanager
    def use(self, lease: object) -> Iterator[None]:
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1

    def _withdraw(self, one: object) -> bool:
        if was_left := one in self.left:
            self.left.remove(one)
        return was_left

    def _cancel(self, pending: PendingCall) -> None:
        assert not pending.call, "it was not sent"

    def _wait(self) -> CallResults:
        """Until it is done."""
        if self.is_interrupted:
            raise KeyboardInterrupt
        while self.left:
            self.left.pop()._end()
        return CallResults([3], None, 0)


@pytest.mark.parametrize("way", ["lease.submit", "options.submit", "run", "map"])
def test_a_ctrl_c_before_the_future_is_there_leaves_no_call_that_nobody_can_cancel(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every place at which one can come, until the caller has the future. ``run`` beside very many calls, and
    ``map``, wait for one that only they have."""
    sending, at = Sending(monkeypatch), 0
    if way == "map":
        monkeypatch.setattr(posting, "check_call", lambda *_: None)
        monkeypatch.setattr(posting, "lanes_of", lambda _, options: [options])
        monkeypatch.setattr(posting, "workers_of", lambda _: SimpleNamespace(find=posting._ready))
    calls = Calls(sending.lease, Options())
    ways: dict[str, Callable[[], object]] = {
        "lease.submit": lambda: Lease.submit(sending.lease, len, "one"),
        "options.submit": lambda: calls.submit(len, "one"),
        "run": lambda: calls.run(len, "one"),
        "map": lambda: list(calls.map(len, ["one"])),
    }
    while True:
        at += 1
        tracer = Tracer(at)
        try:
            tracer.run(lambda *_: ways[way](), None, None)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            assert (sending.left, sending.in_use) == ([], 0), f"interrupted at {tracer.place}"
        if not tracer.place:
            break
    assert at > 10
    assert len(sending.left) == ("submit" in way), "the caller has it"
    if "submit" not in way:
        sending.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            ways[way]()
        assert (sending.left, sending.in_use) == ([], 0)


def test_a_ctrl_c_as_the_thread_of_a_decorated_call_starts_leaves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread runs already, and the future is cancelled before it has sent anything, or reaches what it has sent."""
    begun: list[Callable[[], None]] = []

    def start(_: str, run: Callable[[], None]) -> None:
        begun.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(decorator, "start_thread", start)
    sent: list[object] = []
    calls = SimpleNamespace(submit=lambda *_: sent.append("a call"))
    function: Any = decorator.GpuFunction(len, {})
    monkeypatch.setattr(function, "_leased", lambda *_: contextlib.nullcontext(calls))
    with pytest.raises(KeyboardInterrupt):
        function.submit("one")
    begun[0]()
    assert sent == []


def test_what_a_worker_may_not_have_is_sent_again() -> None:
    """After a message that was cut short both sides begin anew with what is kept."""
    kept = BufferCache(bytes_max=1 << 24)
    functions = Functions(PeerInterpreter((9, 9, 9), "python", cloudpickle=True), kept)
    data = memoryview(bytearray(b"1" * (1 << 18)))
    fd = os.memfd_create("kept")
    try:
        os.write(fd, data)
        number = kept.took(data, fd)
        assert kept.find(data) == number
        first, before = functions.refer(os.path.join)
        assert before
        assert functions.refer(os.path.join) == (first, [])
        kept.forget_all()
        forget = unpack(functions.forget_all().body)
        assert forget.kind == HolderMessage.FORGET
        assert kept.find(data) == 0
        assert kept.to_forget() == [number]
        again, before = functions.refer(os.path.join)
        assert again > first
        assert before
    finally:
        os.close(fd)


@pytest.mark.parametrize("when", ["before", "after"])
def test_descriptors_are_closed_once_whenever_a_ctrl_c_comes(
    pair: SessionPair, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """One who closed them twice would close somebody else's, who has got the same number since."""
    line = pair.line()
    link = line._talk.link
    plain = link.call

    def call(*args: Any) -> int:
        if when == "after":
            plain(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "call", call)
    given = os.memfd_create("given")
    lent = (given, os.readlink(f"/proc/self/fd/{given}"))
    with pytest.raises(KeyboardInterrupt):
        line.ask(OpenSession(lease=LeaseId("l-7"), epoch=EPOCH, device=0), (given,))
    assert (lent in open_now()) is (when == "after"), "the link has taken it, or nobody has"
    file = os.memfd_create("somebody's")
    somebodys = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, given)  # the same number again, where it is free
    with pytest.raises(Disconnected):
        line.answer()
    line.close()
    line.close()
    assert lent not in open_now()
    os.close(file)
    os.close(somebodys)  # still there


def test_an_answer_that_nobody_took_is_let_go_of_once(pair: SessionPair) -> None:
    line = pair.line()
    fd = os.open(os.devnull, os.O_RDONLY)
    from sublet.wire.link_events import Replied

    line._come = Replied(1, b"", (fd,))
    line.close()
    again = os.open(os.devnull, os.O_RDONLY)
    try:
        line.close()
        os.fstat(again)
    finally:
        os.close(again)
