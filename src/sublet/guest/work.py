"""One holder's connection to its worker: requests in order, and their answers.

The thread that listens only sorts: what is to be done is queued for the main thread, which does it in the order it
came. A cancellation alone overtakes: it takes a call that waits out of the line, or interrupts the one that runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sublet.errors import InvalidRequest, LeaseEnded, LeaseInterrupt, SubletError
from sublet.guest.answers import WorkerAnswer, fault
from sublet.guest.at_work import at_work
from sublet.guest.calls import CallRunner, introduce
from sublet.guest.current import end_of
from sublet.guest.deferred import answering
from sublet.guest.launch_counter import flush_launches
from sublet.guest.main_thread import MainThreadQueue
from sublet.guest.streams import Speech, SpokenRecords
from sublet.lease_end import EndReason
from sublet.wire.conversation import Conversation
from sublet.wire.frames import close_all
from sublet.wire.guests import Visit
from sublet.wire.line import SharedConnection
from sublet.wire.link import Link
from sublet.wire.link_events import Called, Event, Over
from sublet.wire.page import PageReader, PageState
from sublet.wire.work import (
    Board,
    Flag,
    HolderMessage,
    ReceivedMessage,
    ResultBuffer,
    WorkerMessage,
    numbers_in,
    pack,
    unpack,
)

if TYPE_CHECKING:
    import asyncio

_LISTEN_S: Final = 1.0
_END_NOTICE_S: Final = 0.5
"""How long after a hang-up the supervisor may tell of the end of the lease."""


class GuestWorker:
    """What all connections of this guest share."""

    def __init__(self, main_queue: MainThreadQueue, page: PageReader, speech: Speech, records: SpokenRecords) -> None:
        self.main_queue = main_queue
        self.page = page
        self.speech = speech
        self.records = records

    def serve(self, conversation: Conversation, visit: Visit) -> None:
        """Until it is over. On a thread of its own."""
        _Connection(self, SharedConnection(conversation), visit).listen()


class _Connection:
    def __init__(self, worker: GuestWorker, line: SharedConnection, visit: Visit) -> None:
        self._worker = worker
        self._main_queue = worker.main_queue
        self._line = line
        self._visit = visit
        self._calls = CallRunner(self._main_queue)
        self._board: Board | None = None
        self._waiting: dict[int, Callable[[], None]] = {}
        """Calls that have not begun, by number."""
        self._withdrawn: set[int] = set()
        self._later: set[asyncio.Future[object]] = set()
        """What calls that were begun still wait for."""
        self._is_over = False

    def listen(self) -> None:
        """Sort what comes."""
        try:
            while not self._line.is_over:
                if (board := self._board) is not None:
                    board.mark()
                for happening in self._line.receive(_LISTEN_S):
                    match happening:
                        case Called(call, body, fds):
                            self._take_call(call, body, fds)
                        case Event(_, body, fds):
                            self._take_event(body, fds)
                        case Over():
                            return
                        case _:
                            pass
        finally:
            self._hang_up()

    def _take_call(self, call: int, body: bytes, fds: tuple[int, ...]) -> None:
        try:
            message = unpack(body)
        except InvalidRequest as error:
            close_all(fds)
            self._send_answer(call, fault(error))
            return
        with self._main_queue.lock:
            self._waiting[call] = lambda: None
        self._main_queue.put(functools.partial(self._do, call, message, fds))

    def _take_event(self, body: bytes, fds: tuple[int, ...]) -> None:
        message = unpack(body)
        match message.kind:
            case HolderMessage.CANCEL:
                self._cancel(message.subject)
            case HolderMessage.DEFINE:
                self._main_queue.put(lambda: self._done(lambda: self._calls.define(message, fds)))
            case HolderMessage.FORGET:
                forget = functools.partial(
                    self._calls.forget, numbers_in(message.data), Flag.FUNCTIONS in message.flags
                )
                self._main_queue.put(lambda: self._done(forget))
            case _:
                close_all(fds)

    def _cancel(self, call: int) -> None:
        with self._main_queue.lock:
            if call not in self._waiting:
                self._main_queue.interrupt((self, call))
                return
            del self._waiting[call]
            self._withdrawn.add(call)
        self._send_answer(call, WorkerAnswer(WorkerMessage.CANCELLED))

    # ---- on the main thread

    def _do(self, call: int, message: ReceivedMessage, fds: tuple[int, ...]) -> None:
        """The holder waits: it gets an answer, or the connection ends."""
        try:
            self._begin(call, message, fds)
        except Exception as error:  # noqa: BLE001 - such as that there was no memory for the answer
            self._main_queue.done()
            fault_of_ours = fault(SubletError(f"the worker could not answer: {type(error).__name__}: {error}"))
            self._done(lambda: self._send_answer(call, fault_of_ours))

    def _done(self, work: Callable[[], None]) -> None:
        """What fails here the holder would never hear of, so the connection ends with it."""
        try:
            work()
        except Exception:  # noqa: BLE001 - the same
            self._line.hang_up()

    def _begin(self, call: int, message: ReceivedMessage, fds: tuple[int, ...]) -> None:
        with self._main_queue.lock:
            begins = self._waiting.pop(call, None) is not None
            self._withdrawn.discard(call)
            self._main_queue.running = (self, call) if begins else None
        try:
            self._calls.store_buffers(message, fds)  # what is to be kept comes with it, whether it runs or not
        except BaseException:
            close_all(fds)
            raise
        if not begins or self._is_over:
            close_all(fds)
            return
        with answering():
            self._answered(call, message, fds)

    def _answered(self, call: int, message: ReceivedMessage, fds: tuple[int, ...]) -> None:
        began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if self._board is not None:
            self._board.begin(call, began_ns)
        try:
            with at_work():
                answer = self._answer(call, message, fds)
                flush_launches()
            if Flag.MANY in message.flags:  # its results so far are sent first, also where it failed
                answer = answer._replace(before=self._calls.unsent_results(call))
        finally:
            close_all(fds)
            self._main_queue.done()
        if answer.later is not None:
            self._later.add(answer.later)
            answer.later.add_done_callback(lambda later: self._done(lambda: self._answer_later(call, later, began_ns)))
        else:
            self._finish(call, answer, began_ns)

    def _answer_later(self, call: int, later: asyncio.Future[object], began_ns: int) -> None:
        """What the call waited for is done. If the lease is over by now, that is the answer."""
        self._later.discard(later)

        def came() -> WorkerAnswer:
            self._worker.page.check(self._visit.lease, self._visit.epoch)
            return self._calls.answer_later(later)

        answer = self._guarded(came)
        self._finish(call, answer._replace(flags=answer.flags | Flag.BEGAN), began_ns)

    def _finish(self, call: int, answer: WorkerAnswer, began_ns: int) -> None:
        self._send_answer(call, answer._replace(took_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns))
        if self._board is not None:
            self._board.finish()  # behind the answer: a call that was executed must not be taken for one in line

    def _answer(self, call: int, message: ReceivedMessage, fds: tuple[int, ...]) -> WorkerAnswer:
        worker = self._worker

        def came() -> WorkerAnswer:
            if message.kind == HolderMessage.OPEN:
                self._open(fds)
                return introduce(message)
            worker.page.check(self._visit.lease, self._visit.epoch)
            worker.speech.to(self._print)
            worker.records.send = self._log
            worker.records.level = message.amount
            return self._calls.answer(call, message, fds, self._board)

        try:
            return self._guarded(came)
        finally:
            worker.speech.to(None)
            worker.records.send = None

    def _guarded(self, came: Callable[[], WorkerAnswer]) -> WorkerAnswer:
        try:
            answer = came()
            return self._ended() if self._main_queue.is_ending else answer
        except LeaseEnded:
            return self._ended()
        except SubletError as error:
            return fault(error)
        except BaseException as error:  # noqa: BLE001 - the holder waits for an answer
            if self._main_queue.is_ending or isinstance(error, LeaseInterrupt):
                return self._ended()
            return fault(SubletError(f"internal error in the worker: {type(error).__name__}: {error}"))

    def _open(self, fds: tuple[int, ...]) -> None:
        if self._board is None and fds:
            self._board = Board.opened(fds[0])
        if self._calls.results is None and len(fds) > 1:
            self._calls.results = ResultBuffer.opened(fds[1])
            self._calls.send = self._send

    def _ended(self) -> WorkerAnswer:
        end = end_of(self._worker.page.read())
        return WorkerAnswer(WorkerMessage.ENDED, blob={"reason": EndReason(end.reason).value, "detail": end.detail})

    def _send_answer(self, call: int, answer: WorkerAnswer) -> None:
        body, fds = answer.packed()

        def send(link: Link) -> None:
            if answer.before is not None:
                link.event(answer.before)
            link.reply(call, body, fds)

        self._line.send(send)

    def _send(self, body: bytes, fds: tuple[int, ...]) -> None:
        self._line.send(lambda link: link.event(body, fds))

    def _print(self, stream: int, text: bytes) -> None:
        body = pack(WorkerMessage.OUTPUT, subject=stream, inline=(text,))
        with self._main_queue.undisturbed():
            self._line.send(lambda link: link.event(body), self._main_queue.raise_pending)

    def _log(self, record: bytes) -> None:
        body = pack(WorkerMessage.LOG, inline=(record,))
        with self._main_queue.undisturbed():
            self._line.send(lambda link: link.event(body), self._main_queue.raise_pending)

    def _hang_up(self) -> None:
        """The holder takes no results any more: what runs is interrupted, what waits is dropped."""
        self._is_over = True
        with self._main_queue.lock:
            self._waiting.clear()
        if not self._is_lease_ending():
            with self._main_queue.lock:
                running = self._main_queue.running
                if isinstance(running, tuple) and running[0] is self:
                    self._main_queue.interrupt(running)
        self._main_queue.put(self._close)

    def _is_lease_ending(self) -> bool:
        """A holder that releases the lease also closes the connection. The function is told of the end alone, once."""
        until_s = time.monotonic() + _END_NOTICE_S
        while self._worker.page.read().state is PageState.LIVE:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.02)
        return True

    def _close(self) -> None:
        self._calls.close()
        if self._board is not None:
            self._board.close()
        if self._calls.results is not None:
            self._calls.results.close()
        self._line.close()
