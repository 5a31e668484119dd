"""Both keepers, with their real transports, against an office that answers what a test tells it to, on a held clock.

The tests state what a program relies on: a renewal counts from before it was sent, one slow answer delays nothing else,
what the office tells is heard, and what was missed is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from sublet.client import aio_keeper
from sublet.client.address import Address
from sublet.client.aio_keeper import AioKeeper
from sublet.client.aio_transport import AioTransport
from sublet.client.background_requests import FLIGHT_S
from sublet.client.lease_entry import LeaseEntry
from sublet.client.lease_table import LeaseTable
from sublet.client.operations import OfficeOperations, ReceivedGrant
from sublet.client.renewal_thread import LISTEN_AFTER_S, LISTEN_AGAIN_S, LISTEN_LINGER_S, SILENCE_S, RenewalThread
from sublet.client.steps import HttpCall, Program, ask
from sublet.client.transport import Transport
from sublet.errors import Disconnected
from sublet.lease.policy import RenewalPolicy
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.values import NS_PER_S, Epoch, RenewMode
from sublet.wire.http import ErrorView, GrantAnswer, LeaseView, News, RenewalsAnswer, RenewalsRequest, RenewAnswer
from tests.traces import until as until_it_is
from tests.unit.client.script import HeldClock, ended, noticed, view

ALWAYS: Final = RenewalPolicy(mode=RenewMode.ALWAYS)
RENEWALS: Final = "POST /v1/renewals"
EVENTS: Final = "GET /v1/events"
LEASES: Final = "GET /v1/leases"
LONG_S: Final = 1e5
"""A time to live that no renewal is due in, however often a test moves the clock until something is so."""
Answer = Callable[[bytes], object]


def until(what: str, is_so: Callable[[], object]) -> None:
    until_it_is(what, is_so, 60.0)


class Office:
    """Answers by path; what has no answer stays unanswered until it has one."""

    def __init__(self, path: Path) -> None:
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.bodies: list[tuple[str, bytes]] = []
        self.answers: dict[str, Answer | None] = {LEASES: lambda _: []}
        """By request; a function of its body. None withholds the answer."""
        self.carried: defaultdict[str, list[socket.socket]] = defaultdict(list)
        """By which connection each request came."""
        self.streams: list[socket.socket] = []
        self.withheld: dict[str, int] = {}
        """So many of these requests, the first ones, stay unanswered whatever is set."""
        self._closed = False
        self._changed = threading.Condition()
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def set(self, request: str, answer: Answer | None) -> None:
        with self._changed:
            self.answers[request] = answer
            self._changed.notify_all()

    def count(self, request: str) -> int:
        return self.asked.count(request)

    def body(self, request: str) -> Any:
        """Of the last one."""
        return msgspec.json.decode([body for asked, body in self.bodies if asked == request][-1])

    def tell(self, what: str, lease: LeaseView | None = None) -> None:
        """News, to whoever listens."""
        data = msgspec.json.encode(News(what=what, lease=lease)).decode()
        self.say(f"event: {what}\ndata: {data}\n\n".encode())

    def say(self, raw: bytes) -> None:
        self.streams[-1].sendall(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file, contextlib.suppress(OSError, ValueError):
            while line := file.readline():
                request = " ".join(line.decode().split()[:2])
                length = 0
                while (header := file.readline().strip().lower()) != b"":
                    if header.startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                body = file.read(length)
                self.bodies.append((request, body))
                self.carried[request].append(sock)
                self.asked.append(request)
                if request == EVENTS:
                    sock.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                    self.streams.append(sock)
                    file.read(1)  # until it is closed
                    return
                sock.sendall(self._answer(request, body))
                self.answered.append(request)

    def _answer(self, request: str, body: bytes) -> bytes:
        number = self.count(request)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_answer(request, number))
            if self._closed:
                return b""
            answer = self.answers[request]
        assert answer is not None
        raw = msgspec.json.encode(answer(body))
        return f"HTTP/1.1 200 OK\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw

    def _may_answer(self, request: str, number: int) -> bool:
        return self.answers.get(request) is not None and number > self.withheld.get(request, 0)


def renewed(body: bytes, ttl: float = 100.0) -> RenewalsAnswer:
    """Yes to all."""
    items = msgspec.json.decode(body, type=RenewalsRequest).items
    answers = [RenewAnswer(lease=item.lease, epoch=item.epoch, deadline=0.0, ttl=ttl, number=1) for item in items]
    return RenewalsAnswer(items=list(answers), errors=[None] * len(answers))


class Side:
    """A book, and the keeper that is tested."""

    def __init__(self, office: Office, path: Path) -> None:
        self.office = office
        self.clock = HeldClock()
        self.core = OfficeOperations(self.clock)
        self.book = LeaseTable(self.clock, lambda: "r-release")
        self.address = Address(url=f"unix://{path}", socket=path, token="sublet_x")
        self.revived = 0

    def open(self, name: str = "l-1", policy: RenewalPolicy = ALWAYS, **facts: Any) -> LeaseEntry:
        return self.book.open(ReceivedGrant(view=view(id=name, **facts), sent_ns=self.clock.now_ns()), policy)

    def go(self, seconds: float) -> bool:
        """Time passes, and the keeper looks at the clock. False, so that it can go on until something is so."""
        self.clock.go(seconds)
        self.wake()
        return False

    def wake(self) -> None:
        raise NotImplementedError

    def hold(self, *names: str, **facts: Any) -> list[LeaseEntry]:
        """Leases, and the keeper started."""
        raise NotImplementedError

    def begin(self, program: Program[None]) -> None:
        """Something to do in the background."""
        raise NotImplementedError

    def do(self, work: Callable[[], Any]) -> Any:
        """Something with the book, while the keeper does nothing with it."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def revive(self) -> None:
        self.revived += 1


class Blocking(Side):
    def __init__(self, office: Office, path: Path) -> None:
        super().__init__(office, path)
        self.lock = threading.RLock()
        self.transport = Transport(self.address, self.clock, wire=1)
        self.keeper = RenewalThread(self.book, self.core, self.transport, self.clock, self.lock, self.revive)

    def wake(self) -> None:
        self.keeper.wake()

    def hold(self, *names: str, **facts: Any) -> list[LeaseEntry]:
        with self.lock:
            held = [self.open(name, **facts) for name in names or ("l-1",)]
            self.keeper.start()
        return held

    def begin(self, program: Program[None]) -> None:
        self.keeper._note([program])
        self.keeper.start()

    def do(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()

    def close(self) -> None:
        self.keeper.stop(60.0)
        self.transport.close()


class Awaited(Side):
    """In a loop of its own, on another thread."""

    def __init__(self, office: Office, path: Path) -> None:
        super().__init__(office, path)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.transport = AioTransport(self.address, self.clock, wire=1)
        self.keeper = AioKeeper(self.book, self.core, self.transport, self.clock, self._revive)

    async def _revive(self) -> None:
        self.revive()

    def wake(self) -> None:
        self.keeper.wake()

    def do(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def hold(self, *names: str, **facts: Any) -> list[LeaseEntry]:
        held: list[LeaseEntry] = self.do(lambda: [self.open(name, **facts) for name in names or ("l-1",)])
        self.do(self.keeper.start)
        return held

    def begin(self, program: Program[None]) -> None:
        self.do(lambda: self.keeper._begin(program))

    def close(self) -> None:
        async def stop() -> None:
            await self.keeper.stop()
            await self.transport.close()

        asyncio.run_coroutine_threadsafe(stop(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=[Blocking, Awaited])
def side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Side]:
    office = Office(tmp_path / "s")
    made: Side = request.param(office, tmp_path / "s")
    yield made
    made.close()
    office.close()


# ---- renewals


def test_a_renewal_counts_from_before_it_was_sent_however_late_its_answer_comes(side: Side) -> None:
    """The office counts from when the request arrived. Half a second passes until the answer is there; after a longer
    time the request might be repeated, and would count from its second sending."""
    began_ns = side.clock.now_ns()

    def slow(body: bytes) -> object:
        side.clock.go(0.5)
        return renewed(body)

    side.office.set(RENEWALS, slow)
    (held,) = side.hold()
    first_ns = held.holder.deadline_ns
    assert first_ns is not None
    side.go(80)
    until("a renewal", lambda: held.view.renewals)
    assert held.holder.deadline_ns == first_ns + 80 * NS_PER_S, "as much later as the renewal was sent later"
    assert side.clock.now_ns() == began_ns + 80 * NS_PER_S + NS_PER_S // 2


def test_a_program_in_the_background_is_told_when_its_request_was_sent(side: Side) -> None:
    """The same for whatever the keeper asks: the answer carries the instant before the first byte."""
    sent: list[int] = []
    began_ns = side.clock.now_ns()

    def asks() -> Program[None]:
        reply = yield from ask(HttpCall(method="POST", path="/v1/something", body=b"{}", timeout_s=5.0))
        sent.append(reply.sent_ns)

    def slow(_: bytes) -> object:
        side.clock.go(4)
        return {}

    side.office.set("POST /v1/something", slow)
    side.begin(asks())
    until("an answer", lambda: sent)
    assert sent == [began_ns]


def test_a_renewal_without_an_answer_delays_no_other_lease(side: Side) -> None:
    """The second lease is due while the first one's request is stuck, and is renewed."""
    each_minute = RenewalPolicy(mode=RenewMode.ALWAYS, every=60)
    side.hold("l-1", policy=each_minute)
    side.clock.go(12)
    (other,) = side.hold("l-2", policy=each_minute)
    side.office.set(RENEWALS, None)
    side.go(49)
    until("a request", lambda: side.office.count(RENEWALS) == 1)
    side.office.withheld[RENEWALS] = 1
    side.office.set(RENEWALS, renewed)
    side.go(12)
    until("the other's renewal", lambda: other.view.renewals)


def test_an_office_that_is_gone_is_started_again_for_the_leases_that_outlive_it(side: Side) -> None:
    side.hold()
    side.office.close()
    side.go(75)
    until("a wish for an office", lambda: side.revived)


def test_what_the_office_says_of_a_renewal_is_the_leases_end(side: Side) -> None:
    (held,) = side.hold()
    end = ended("preempted").end
    error = ErrorView(kind="LeaseRevoked", message="taken", do="Go on.", transient=False, end=end)
    side.office.set(RENEWALS, lambda _: RenewalsAnswer(items=[None], errors=[error]))
    side.go(75)
    until("an end that the office has confirmed", lambda: held.confirmed)
    assert held.holder.end is not None
    assert held.holder.end.reason is EndReason.PREEMPTED


# ---- what the office tells


def listened(side: Side, *names: str) -> list[LeaseEntry]:
    """Leases whose keeper hears the news, and has read the state once."""
    held = side.hold(*names, ttl=LONG_S, remaining=LONG_S)
    side.office.set(LEASES, lambda _: [one.view for one in held if not one.over])
    until("a stream", lambda: side.go(LISTEN_AFTER_S) or side.office.streams)
    until("a look", lambda: LEASES in side.office.answered)  # an answer that is late would tell what was before
    side.go(0.001)  # a second look in the very moment of the first would count as older than what the first one saw
    return held


def test_what_happened_before_the_stream_was_open_is_read(side: Side) -> None:
    """A notice that was given in the first moments of the lease is in no event."""
    side.office.set(LEASES, lambda _: [noticed(30.0, id="l-1")])
    (held,) = side.hold(ttl=LONG_S, remaining=LONG_S)
    until("a stream", lambda: side.go(LISTEN_AFTER_S) or side.office.streams)
    until("the notice", lambda: held.notice)
    assert side.office.count(EVENTS) == 1


def test_the_state_is_read_once_for_each_stream(side: Side) -> None:
    """What comes later is in the news, and needs no second look: an office has thousands who listen."""
    (held,) = listened(side)
    for reason in (EndReason.PREEMPTED, EndReason.DRAINED, EndReason.FAIR_SHARE):
        side.office.tell("noticed", noticed(30.0, reason.value, id="l-1"))
        until("the news", lambda reason=reason: held.notice and held.notice.reason is reason)  # type: ignore[misc]
    assert side.office.count(LEASES) == 1


def test_the_end_of_a_lease_is_heard_at_once(side: Side) -> None:
    gone, stays = listened(side, "l-1", "l-2")
    side.office.tell("ended", ended("preempted", "for l-9", id="l-1"))
    until("an end", lambda: gone.holder.end)
    assert gone.holder.end is not None
    assert gone.holder.end.reason is EndReason.PREEMPTED
    assert not stays.over


def test_a_stream_that_lagged_is_made_up_for(side: Side) -> None:
    """The office dropped events for a slow listener, and says so."""
    (held,) = listened(side)
    side.office.set(LEASES, lambda _: [noticed(30.0, id="l-1")])
    side.office.tell("lagged")
    until("the notice", lambda: held.notice)


def test_a_lease_that_is_not_in_the_list_is_looked_at_by_itself(side: Side) -> None:
    """It ended while nobody listened: the list has what lives."""
    (held,) = listened(side)
    side.office.set("GET /v1/leases/l-1", lambda _: GrantAnswer(lease=ended("operator", id="l-1")))
    side.office.set(LEASES, lambda _: [])
    side.office.tell("lagged")
    until("its end", lambda: held.holder.end)
    assert held.holder.end is not None
    assert held.holder.end.reason is EndReason.OPERATOR


def test_a_stream_that_broke_is_opened_again_and_what_was_missed_is_read(side: Side) -> None:
    (held,) = listened(side)
    side.office.set(LEASES, lambda _: [noticed(30.0, id="l-1")])
    side.office.streams[-1].shutdown(socket.SHUT_RDWR)
    for pause_s in LISTEN_AGAIN_S[:2]:  # who comes first finds it broken
        side.go(pause_s)
    until("a second stream", lambda: side.go(0.2) or len(side.office.streams) == 2)
    until("the notice", lambda: held.notice)


def test_a_stream_that_the_office_has_ended_is_opened_again(blocking: Blocking) -> None:
    """In order, with the last of its chunks; the connection lives on, so that nothing broken is seen."""
    (held,) = listened(blocking)
    blocking.office.set(LEASES, lambda _: [noticed(30.0, id="l-1")])
    blocking.office.streams[-1].sendall(b"0\r\n\r\n")
    until("the end of the stream, without a wait", lambda: blocking.keeper._news is None)
    until("a second stream", lambda: blocking.go(0.2) or len(blocking.office.streams) == 2)
    until("the notice", lambda: held.notice)


# ---- what was dropped, and the end


def test_a_dropped_lease_is_given_back_once_with_its_busy_time(side: Side) -> None:
    side.office.set("POST /v1/leases/l-1/release", lambda _: ended("released", id="l-1"))
    side.office.set("POST /v1/leases/l-1/activity", lambda _: view(id="l-1"))
    (held,) = side.hold()
    side.do(lambda: side.book.begin(held))
    side.clock.go(7)
    side.do(lambda: side.book.finish(held))
    side.book.dropped.append(held)
    side.wake()
    until("a release", lambda: side.office.count("POST /v1/leases/l-1/release"))
    until("nothing held", lambda: not side.book.live)
    side.go(300)
    assert side.office.count("POST /v1/leases/l-1/release") == 1
    assert side.office.count(RENEWALS) == 0
    assert side.office.body("POST /v1/leases/l-1/release") == {"request_id": "r-release", "busy": 7.0}


def test_who_became_busy_or_idle_is_told(side: Side) -> None:
    """Idle not before a fifth of a second: a pause between two cells is none."""
    asked = "POST /v1/leases/l-1/activity"
    side.office.set(asked, lambda _: view(id="l-1"))
    (held,) = side.hold(policy=RenewalPolicy())
    side.do(lambda: side.book.begin(held))
    side.wake()
    side.do(lambda: side.book.finish(held))
    side.go(0.1)
    assert side.office.count(asked) == 0
    side.go(0.2)
    until("a word", lambda: side.office.count(asked) == 1)
    assert side.office.body(asked)["active"] is False
    side.do(lambda: side.book.begin(held))
    side.wake()
    until("another", lambda: side.office.count(asked) == 2)
    assert side.office.body(asked)["active"] is True
    assert held.holder.status is LeaseStatus.ACTIVE


# ---- the thread's own


@pytest.fixture
def blocking(tmp_path: Path) -> Iterator[Blocking]:
    office = Office(tmp_path / "s")
    made = Blocking(office, tmp_path / "s")
    yield made
    made.close()
    office.close()


def test_an_answer_that_never_comes_is_given_up_and_its_connection_with_it(blocking: Blocking) -> None:
    """After the time-out of the request, by the clock: the lease is renewed over another connection."""
    (held,) = blocking.hold(ttl=1000.0, remaining=1000.0)  # and is not over before, however often the clock is moved
    blocking.office.set(RENEWALS, None)
    blocking.go(750)
    until("a request", lambda: blocking.office.count(RENEWALS) == 1)
    stuck = blocking.office.carried[RENEWALS][0]
    blocking.go(FLIGHT_S + 0.1)
    until("a closed connection", lambda: has_hung_up(stuck))
    blocking.office.set(RENEWALS, renewed)
    until("a renewal", lambda: blocking.go(0.05) or held.view.renewals)


def has_hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:  # it was closed on this side, too
        return True


def test_a_stream_that_cannot_be_opened_is_asked_for_again_after_a_pause(
    blocking: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every turn of the keeper, which would be a loop without a pause in it."""
    launch, asked = blocking.transport.launch, list[int]()

    def refused(call: HttpCall) -> Any:
        if call.path != "/v1/events":
            return launch(call)
        asked.append(blocking.clock.now_ns())
        raise Disconnected("the office has too many streams", sent=False)

    monkeypatch.setattr(blocking.transport, "launch", refused)
    blocking.hold(ttl=LONG_S, remaining=LONG_S)
    until("a look at the leases", lambda: blocking.keeper._wanted_since_ns is not None)
    blocking.go(LISTEN_AFTER_S)

    def tried(count: int) -> bool:
        """So often, and the pause has begun."""
        return len(asked) == count and blocking.keeper._listen_at_ns > blocking.clock.now_ns()

    for count, pause_s in enumerate((*LISTEN_AGAIN_S[:2], 0.0), 1):
        until("a try", lambda count=count: tried(count))  # type: ignore[misc]
        for _ in range(20):
            blocking.wake()
            time.sleep(0.002)
        assert len(asked) == count
        blocking.go(pause_s)


def test_a_silent_stream_is_given_up_and_opened_again(blocking: Blocking) -> None:
    """The office gives a sign of life every 15 s. A comment is one."""
    listened(blocking)
    for _ in range(4):
        blocking.go(SILENCE_S - 20)
        blocking.office.say(b": still here\n\n")
        heard = blocking.clock.now_ns()
        until("the sign", lambda heard=heard: blocking.keeper._last_event_ns >= heard)  # type: ignore[misc]
    assert len(blocking.office.streams) == 1
    blocking.go(SILENCE_S)
    until("another stream", lambda: blocking.go(0.2) or len(blocking.office.streams) == 2)


def test_the_task_gives_up_a_silent_stream_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may die without a word: what happens to the leases would never be heard."""
    monkeypatch.setattr(aio_keeper, "LISTEN_AFTER_S", 0.0)
    monkeypatch.setattr(aio_keeper, "LISTEN_LINGER_S", 0.01)
    office = Office(tmp_path / "s")
    side = Awaited(office, tmp_path / "s")
    try:
        side.hold("l-1", ttl=LONG_S, remaining=LONG_S)
        until("a stream", lambda: len(office.streams) == 1 and office.count(LEASES))
        side.go(SILENCE_S - 1)
        office.say(b": still here\n\n")
        time.sleep(0.05)
        assert not has_hung_up(office.streams[0])
        side.go(SILENCE_S + 1)
        until("another stream", lambda: len(office.streams) == 2)
    finally:
        side.close()
        office.close()


def test_a_connection_of_a_loop_that_has_ended_is_not_used_by_the_next(tmp_path: Path) -> None:
    """A program calls ``asyncio.run`` for each of its steps, with one fabric."""
    office = Office(tmp_path / "s")
    address = Address(url="unix:///s", socket=tmp_path / "s", token="sublet_x")
    transport = AioTransport(address, HeldClock(), wire=1)
    call = HttpCall(method="GET", path="/v1/leases", timeout_s=60.0)

    async def abort(kept: list[Any]) -> None:
        for _, writer in kept:
            writer.transport.abort()

    try:
        with asyncio.Runner() as before, asyncio.Runner() as loop:
            assert before.run(transport.exchange(call)).body == b"[]"
            kept = list(transport._idle)
            assert kept
            assert loop.run(transport.exchange(call)).body == b"[]"
            loop.run(transport.close())
            before.run(abort(kept))
        assert len(set(office.carried[LEASES])) == 2
    finally:
        office.close()


def test_a_thread_that_holds_nothing_listens_to_nothing(blocking: Blocking) -> None:
    """It only has something to give back: no stream is opened for that, of which a tenant may have a few."""
    done: list[int] = []

    def give_back() -> Program[None]:
        done.append((yield from ask(HttpCall(method="GET", path="/v1/leases", timeout_s=60.0))).status)

    blocking.clock.go(LISTEN_AFTER_S + max(LISTEN_AGAIN_S))
    blocking.begin(give_back())
    until("an answer", lambda: done)
    blocking.keeper.stop(60.0)
    assert blocking.office.count(EVENTS) == 0


def test_the_stream_is_kept_a_little_after_the_last_lease(blocking: Blocking) -> None:
    """For the next is often near. Then it is closed, and the office keeps no connection of an idle program."""
    (held,) = listened(blocking)
    blocking.office.tell("ended", ended("released", id="l-1"))
    until("an end", lambda: held.over)
    blocking.go(LISTEN_LINGER_S - 1)
    (next_one,) = blocking.hold("l-2", ttl=LONG_S, remaining=LONG_S)
    blocking.go(LISTEN_LINGER_S)
    blocking.office.tell("notice", noticed(30.0, id="l-2"))
    until("its notice", lambda: next_one.notice)
    assert blocking.office.count(EVENTS) == 1, "the same stream serves the next lease"
    blocking.office.tell("ended", ended("released", id="l-2"))
    until("an end", lambda: next_one.over)
    until("rest", lambda: blocking.keeper._idle_since_ns is not None and blocking.keeper._wanted_since_ns is None)
    blocking.go(LISTEN_LINGER_S - 1)
    (last,) = blocking.hold("l-3", ttl=LONG_S, remaining=LONG_S)
    blocking.office.tell("notice", noticed(30.0, id="l-3"))
    until("its notice", lambda: last.notice)
    assert blocking.office.count(EVENTS) == 1, "it is counted from the end of the last lease"
    blocking.office.tell("ended", ended("released", id="l-3"))
    until("rest", lambda: last.over and blocking.keeper._wanted_since_ns is None)
    blocking.go(LISTEN_LINGER_S)
    until("a closed stream", lambda: has_hung_up(blocking.office.streams[-1]))


def test_a_keeper_that_retires_gives_back_first(blocking: Blocking) -> None:
    """The fabric was dropped with a lease that was dropped: the release is sent, and then the thread ends."""
    asked = "POST /v1/leases/l-1/release"
    blocking.office.set(asked, None)
    (held,) = blocking.hold()
    blocking.book.dropped.append(held)
    blocking.keeper.retire()
    until("a release", lambda: blocking.office.count(asked))
    thread = blocking.keeper._thread
    assert thread is not None
    assert thread.is_alive(), "the answer is not there yet"
    blocking.office.set(asked, lambda _: ended("released", id="l-1"))
    thread.join(60)
    assert not thread.is_alive()


def test_an_epoch_that_is_newer_than_ours_ends_the_lease_here(side: Side) -> None:
    """Another program attached: told by the stream, before any renewal is refused."""
    (held,) = listened(side)
    side.office.tell("attached", view(id="l-1", epoch=Epoch(1, 8)))
    until("an end", lambda: held.holder.end)
    assert held.holder.end is not None
    assert "attached" in held.holder.end.detail
