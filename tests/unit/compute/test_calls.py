"""The holder's end of a connection for work, against a worker that is pretended to."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator

import pytest

from sublet.compute import calls as calls_module
from sublet.compute.calls import Exchange, PendingCall
from sublet.compute.completion_thread import CompletionThread
from sublet.compute.kernel_guest import CellCall
from sublet.wire.line import SharedConnection, pair
from sublet.wire.link_events import Called, Event, Over
from sublet.wire.work import Board, Flag, HolderMessage, OutgoingMessage, WorkerMessage, pack, unpack
from tests.left_open import left_of, open_now, threads_now
from tests.traces import until

PATIENCE_S = 60.0


class Pretended:
    """Answers each call with its own body, or not at all while it is told to wait."""

    def __init__(self, line: SharedConnection) -> None:
        self.line = line
        self.answers = threading.Event()
        self.answers.set()
        self.cancelled: list[int] = []
        self.calls: list[int] = []
        self.board: Board | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            for happening in self.line.receive(0.2):
                match happening:
                    case Called(call, body, fds):
                        if fds:
                            self.board = Board.opened(fds[0])
                        self.calls.append(call)
                        self.answers.wait()
                        self.line.send(lambda link, call=call, body=body: link.reply(call, body))  # type: ignore[misc]
                    case Event(_, body, _):
                        self.cancelled.append(unpack(body).subject)
                    case Over():
                        self.line.close()
                        return
                    case _:
                        pass


@pytest.fixture
def both() -> Iterator[tuple[Exchange, Pretended]]:
    ours, theirs = pair()
    ended: list[bool] = []
    exchange, pretended = Exchange(ours, lambda: ended.append(True)), Pretended(theirs)
    exchange.ended = ended  # type: ignore[attr-defined]
    yield exchange, pretended
    pretended.answers.set()
    exchange.close()
    pretended.thread.join(PATIENCE_S)


def shared_descriptors() -> frozenset[tuple[int, str]]:
    return frozenset(one for one in open_now() if one[1].startswith("/memfd:sublet-"))


def test_what_was_not_handed_over_is_closed_with_the_exchange() -> None:
    """Else each worker that does not begin would cost its holder two descriptors."""
    gc.collect()
    ours, theirs = pair()
    before = shared_descriptors()
    exchange = Exchange(ours, lambda: None)
    new = shared_descriptors() - before  # what others close meanwhile is theirs
    assert len(new) == 4, "of board and result buffer: one for the other side, one of the mapping"
    for _ in range(2):
        exchange.close()
    assert len(new & shared_descriptors()) == 2
    theirs.close()


def body(text: str) -> OutgoingMessage:
    return OutgoingMessage(pack(WorkerMessage.FAULT, inline=(json.dumps(text).encode(),)))


def said(pending: PendingCall) -> str:
    assert pending.came is not None
    return str(json.loads(unpack(pending.came.body).blob))  # type: ignore[union-attr]


def test_who_looks_takes_in_what_came_and_never_waits(both: tuple[Exchange, Pretended]) -> None:
    """As who waits for another connection as well."""
    exchange, pretended = both
    pretended.answers.clear()
    pending = PendingCall()
    exchange.send(pending, lambda: body("one"))
    assert not exchange.poll(pending)
    pretended.answers.set()
    until("an answer", lambda: exchange.poll(pending), PATIENCE_S)
    assert said(pending) == "one"
    assert exchange.poll(pending), "and once more"


def test_who_waits_listens(both: tuple[Exchange, Pretended]) -> None:
    """No thread of ours is needed for one call after the other."""
    exchange, _ = both
    before = frozenset(threading.enumerate())
    for n in range(100):
        pending = PendingCall()
        exchange.send(pending, lambda n=n: body(f"call {n}"))  # type: ignore[misc]
        assert exchange.wait(pending)
        assert said(pending) == f"call {n}"
    assert not left_of(lambda: frozenset(threading.enumerate()), before)
    assert exchange.under_way == 0


def test_many_wait_and_each_gets_its_own(both: tuple[Exchange, Pretended]) -> None:
    exchange, _ = both
    wrong: list[object] = []

    def ask(name: int) -> None:
        for n in range(50):
            pending = PendingCall()
            exchange.send(pending, lambda n=n: body(f"{name} {n}"))  # type: ignore[misc]
            if not exchange.wait(pending) or said(pending) != f"{name} {n}":
                wrong.append((name, n))

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_who_gives_up_waiting_hands_over(both: tuple[Exchange, Pretended]) -> None:
    """The answer comes while nobody listens, and the next who waits finds it."""
    exchange, pretended = both
    pretended.answers.clear()
    first, second = PendingCall(), PendingCall()
    exchange.send(first, lambda: body("first"))
    soon_ns = time.monotonic_ns() + 50_000_000
    assert not exchange.wait(first, lambda: soon_ns)
    exchange.send(second, lambda: body("second"))
    pretended.answers.set()
    assert exchange.wait(second)
    assert exchange.wait(first)
    assert (said(first), said(second)) == ("first", "second")


def test_the_end_of_the_line_reaches_everybody(both: tuple[Exchange, Pretended]) -> None:
    exchange, pretended = both
    pretended.answers.clear()
    pending = [PendingCall() for _ in range(5)]
    for one in pending:
        exchange.send(one, lambda: body("x"))
    waiting = [threading.Thread(target=exchange.wait, args=(one,)) for one in pending]
    for thread in waiting:
        thread.start()
    until("a call", lambda: pretended.calls, PATIENCE_S)
    pretended.line.hang_up()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert all(one.lost is not None and one.came is None for one in pending)
    late = PendingCall()
    exchange.send(late, lambda: body("late"))
    assert late.lost is not None


def test_the_board_says_which_call_is_to_blame(both: tuple[Exchange, Pretended]) -> None:
    exchange, pretended = both
    first = PendingCall()
    exchange.send(first, lambda: OutgoingMessage(pack(HolderMessage.OPEN), exchange.take_shared()))
    assert exchange.wait(first)
    pretended.answers.clear()
    pending = [PendingCall() for _ in range(3)]
    for one in pending:
        exchange.send(one, lambda: body("x"))
    assert pretended.board is not None
    pretended.board.begin(pending[1].call, 5)
    assert [exchange.is_executing(one) for one in pending] == [False, True, False]
    exchange.close()
    assert [one.was_begun for one in pending] == [False, True, False]
    pretended.board.close()


def test_a_cancelled_call_that_does_not_leave_ends_its_process(
    both: tuple[Exchange, Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "GRACE_S", 0.05)
    exchange, pretended = both
    completions = CompletionThread(exchange)
    pretended.answers.clear()
    pending = PendingCall()
    exchange.send(pending, lambda: body("x"))
    exchange.cancel(pending)
    completions.wake()
    until("the end", lambda: exchange.ended, PATIENCE_S)  # type: ignore[attr-defined]
    pretended.answers.set()
    until("a cancelled call", lambda: pretended.cancelled == [pending.call], PATIENCE_S)


def test_a_message_that_cannot_be_made_leaves_nothing(both: tuple[Exchange, Pretended]) -> None:
    exchange, _ = both

    def fail() -> OutgoingMessage:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        exchange.send(PendingCall(), fail)
    assert exchange.under_way == 0
    pending = PendingCall()
    exchange.send(pending, lambda: body("fine"))
    assert exchange.wait(pending)


def test_the_housekeeper_completes_what_nobody_waits_for_and_leaves(both: tuple[Exchange, Pretended]) -> None:
    exchange, _ = both
    before = threads_now("sublet-calls")
    completions = CompletionThread(exchange)
    finished: list[int] = []

    class Watched:
        def __init__(self, number: int) -> None:
            self.number = number
            self.pending = PendingCall(None, lambda: completions.done(self))

        def begin(self) -> bool:
            exchange.send(self.pending, lambda: body(str(self.number)))
            return True

        def finish(self) -> None:
            finished.append(self.number)

        def time_is_up(self) -> None:
            raise AssertionError("there is no limit")

    for number in range(300):
        completions.add(Watched(number))
    until("all 300 answers", lambda: len(finished) == 300, PATIENCE_S)
    assert finished == sorted(finished)
    assert not left_of(lambda: threads_now("sublet-calls"), before)


@pytest.mark.parametrize(
    ("flags", "may_have_begun"), [(Flag.NONE, False), (Flag.BEGAN, True)], ids=["refused", "answered when it is over"]
)
def test_the_answer_of_a_cells_call_tells_whether_the_cell_began(
    both: tuple[Exchange, Pretended], flags: Flag, may_have_begun: bool
) -> None:
    """A cell that was on its way when its lease ended runs on the next one."""
    exchange, _ = both
    call = CellCall(exchange, PendingCall())
    assert not call.has_failed()
    exchange.send(call.pending, lambda: OutgoingMessage(pack(WorkerMessage.ENDED, flags=flags, inline=(b"{}",))))
    until("an answer", lambda: exchange.poll(call.pending), PATIENCE_S)
    assert call.may_have_begun() is may_have_begun
    assert call.has_failed() is not may_have_begun


@pytest.mark.parametrize("is_executing", [False, True])
def test_of_a_lost_call_the_board_tells_whether_the_cell_may_have_begun(
    both: tuple[Exchange, Pretended], is_executing: bool
) -> None:
    exchange, pretended = both
    introduced, call = PendingCall(), CellCall(exchange, PendingCall())
    exchange.send(introduced, lambda: OutgoingMessage(body("one").body, exchange.take_shared()))
    assert exchange.wait(introduced)
    pretended.answers.clear()
    exchange.send(call.pending, lambda: body("two"))
    until("two calls", lambda: len(pretended.calls) == 2, PATIENCE_S)
    assert pretended.board is not None
    if is_executing:
        pretended.board.begin(call.pending.call, 1)
    pretended.line.hang_up()
    until("an answer", lambda: exchange.poll(call.pending), PATIENCE_S)
    assert call.may_have_begun() is is_executing
    assert not call.has_failed(), "nobody answered"
