"""Serves a program under leases: the ASGI application before it, and the driver of ``serving.Served``.

The program is a guest of a session (``sublet session show NAME``), which this process holds. It needs no network:
requests and answers cross as frames over its input and output, which are never unpickled. It saves in the session's
volume itself. What is decided is decided on the event loop; what may wait is done on threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import html
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from sublet.background import start_task, start_thread
from sublet.client.fabric import Fabric
from sublet.client.guests import Guest, GuestStreams, Output, environment, open_streams, start_spec
from sublet.client.lease import Lease
from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, LeaseEnded, NotFound, SubletError
from sublet.state.checkpoints.atomic_files import read_whole
from sublet.studio.office import FabricOffice, open_sessions
from sublet.studio.people import OWNER_TENANT
from sublet.studio.records import Session, Terms
from sublet.studio.serving import (
    STATUS,
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
from sublet.studio.sessions import Sessions
from sublet.studio.views import estimate_of, session_views
from sublet.values import NS_PER_S
from sublet.wire.guests import GuestSpec, StdioKind
from sublet.wire.http_views import SESSION_LABEL
from sublet.wire.served import (
    BODY_MAX,
    FROM_PROGRAM,
    MESSAGE_MAX,
    WINDOW,
    BrokenFrames,
    ServedFrame,
    ServedFrameKind,
    ServedFrameReader,
    encode,
    with_head,
)

SOURCE_MAX: Final = 4 << 20
PRINTED_MAX: Final = 64 << 20
"""A program that prints more than this while it has one lease is ended."""
VOLUME_WAIT_S: Final = 30.0
"""So long the volume is waited for: a lease of it that has ended is put away first."""
SAVE_S: Final = 10.0
"""So long the program may take to save when the server is stopped."""
LEAVE_S: Final = 2.0
"""And to end when it was told to."""
TICK_S: Final = 0.25
CREDIT_STEP: Final = WINDOW // 4
"""Bytes that the reader of an answer has taken before the program is given credit for them again."""
RETRY_S: Final = 1.0
"""Before a lease is asked for again where the office did not answer."""
NOTE_S: Final = 60.0
"""So often requests are put on the session's record as its last activity, which is read to the minute."""
RETRY_AFTER_S: Final = 10
RETRY_AFTER_MAX_S: Final = 600
PROGRAM: Final = "sublet.guest.served:main"
_ONCE: Final = (ServedFrameKind.LOADED, ServedFrameKind.FAILED, ServedFrameKind.LEAVING)
"""What a program says at most once under a lease."""
_HOP_BY_HOP: Final = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendMessage: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Head(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]


class _Whole(NamedTuple):
    """Nothing more comes, and nothing is missing."""


_Part: TypeAlias = _Head | bytes | _Whole | Say | Break


class _Answer:
    """What came of an answer, on its way to its reader."""

    def __init__(self, head: dict[str, Any], body: bytes) -> None:
        self.head, self.body = head, body
        self.parts: asyncio.Queue[_Part] = asyncio.Queue()
        self.owed = WINDOW
        """Bytes that the program may still send."""
        self.taken = 0
        """Bytes that its reader took and that the program was given no new credit for."""


class _Run:
    """The program under one lease."""

    def __init__(self, guest: Guest, streams: GuestStreams) -> None:
        self.guest = guest
        self.streams = streams
        """Read and written on the loop alone, so that a request passes through no thread of its own."""
        self.reader = ServedFrameReader(FROM_PROGRAM)
        self.kinds_printed = set[ServedFrameKind]()
        self.printed = 0
        self.has_left = threading.Event()
        self.is_silent = threading.Event()
        """Nothing more comes from it."""
        self.is_gone = threading.Event()
        self.is_watched = False
        """Whether the loop waits for room to write to it."""
        self.is_unreadable = False
        """What it says is no sequence of frames any more."""
        self.broke = ""
        """How it broke the protocol, for which it is ended."""


class ServedProgram:
    """An ASGI application that passes requests on to a program under leases. Made on the loop that it runs on."""

    def __init__(
        self, path: Path, fabric: Fabric, name: str, terms: Terms, limits: Limits, *, volume_bytes: int
    ) -> None:
        """``volume_bytes``: the size of its volume, where that is made."""
        self._path, self._fabric, self._limits, self._volume_bytes = path, fabric, limits, volume_bytes
        self._sessions: Sessions[Lease] = open_sessions(FabricOffice(fabric), name="a served program")
        self.session = _session(self._sessions, name, terms)
        self._served = Served(limits)
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, _Answer] = {}
        self._number = 0
        self._lease: Lease | None = None
        self._run: _Run | None = None
        self._busy: contextlib.ExitStack | None = None
        self._noted_s = -math.inf
        """When the last activity was put on record."""
        self._is_withdrawn = threading.Event()
        self._acquiring: threading.Thread | None = None
        self._is_closing = False
        self._loaded: tuple[int, int] | None = None
        """The file as it was when it was loaded last."""
        self._ticking = start_task("served_tick", self._tick, again=True)

    async def close(self) -> None:
        """Let the program save, end it, and give its lease back. The session stays."""
        self._is_closing = True
        self._ticking.cancel()
        run = self._run
        if run is not None:
            await asyncio.to_thread(self._save_and_end, run)
        elif self._acquiring is not None:
            await asyncio.to_thread(self._withdraw)
            await asyncio.to_thread(self._acquiring.join)

    # ---- requests

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a served program speaks HTTP, not {scope['type']}")
        body = await _whole_body(receive)
        if body is None:
            await _send_error(scope, send, 413, f"the request has more than {BODY_MAX} bytes", "Send less at a time.")
            return
        self._number += 1
        number, answer = self._number, _Answer(_request_head(scope), body)
        self._answers[number] = answer
        if self._loaded != _stamp(self._path):
            self._served.retry_load()
        self._do(self._served.arrived(number, self._now()))
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: self._on_disconnect(number))
        try:
            await self._relay(number, answer, scope, send)
        finally:
            gone.cancel()
            self._on_disconnect(number)

    async def _relay(self, number: int, answer: _Answer, scope: Scope, send: SendMessage) -> None:
        while True:
            match await answer.parts.get():
                case _Head(status, headers):
                    await send({"type": "http.response.start", "status": status, "headers": headers})
                case bytes() as piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    self._credit(number, answer, len(piece))
                case _Whole():
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                case Say() as refusal:
                    await self._answer(refusal, scope, send)
                    return
                case Break():
                    return  # what has gone out is not whole, and the server hangs up on its reader

    def _credit(self, number: int, answer: _Answer, size: int) -> None:
        """The reader took a piece. Credit is given in steps, so that not every piece costs a frame."""
        if self._run is None or self._answers.get(number) is not answer:
            return
        answer.taken += size
        if answer.taken >= CREDIT_STEP:
            answer.owed += answer.taken
            self._send_frame(ServedFrameKind.CREDIT, number, answer.taken.to_bytes(8, "big"))
            answer.taken = 0
        with contextlib.suppress(ProgramTransitionError):
            self._served.moved(number, self._now())

    def _on_disconnect(self, number: int) -> None:
        if self._answers.pop(number, None) is not None:
            self._do(self._served.disconnected(number, self._now()))

    async def _answer(self, refusal: Say, scope: Scope, send: SendMessage) -> None:
        """An answer of ours in place of the program's."""
        more: dict[str, Any] = {}
        message, do = _SENTENCES[refusal.why]
        if refusal.why in (Why.NO_LEASE, Why.REFUSED, Why.LOST):
            with contextlib.suppress(SubletError):
                more = await asyncio.to_thread(self._place)
        if refusal.detail:
            message = f"{message}: {refusal.detail}"
        await _send_error(scope, send, STATUS[refusal.why], message, do, kind=refusal.why.value, **more)

    def _place(self) -> dict[str, Any]:
        (view,) = session_views(self._fabric, [self._sessions.find(self.session.id)])
        return {name: view[name] for name in ("state", "position", "estimate", "estimate_error", "reason")}

    # ---- what is decided, done

    def _now(self) -> float:
        return self._loop.time()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case AcquireLease():
                    self._is_withdrawn.clear()
                    self._acquiring = start_thread("served_acquire", self._acquire, failed=self._not_acquired)
                case Withdraw():
                    _ = start_thread("served_withdraw", self._withdraw)
                case LaunchProgram():
                    _ = start_thread("served_launch", self._launch)
                case Send(number):
                    self._give(number)
                case Cancel(number):
                    self._send_frame(ServedFrameKind.CANCEL, number)
                case Say(number) | Break(number):
                    if (answer := self._answers.pop(number, None)) is not None:
                        answer.parts.put_nowait(effect)
                case GiveUp():
                    if self._run is not None:
                        run = self._run
                        _ = start_thread("served_end", functools.partial(_end, run))
        self._note_busy()

    def _note_busy(self) -> None:
        """A request is activity: while the program works at one its lease is renewed."""
        if self._served.inside and self._now() - self._noted_s >= NOTE_S:
            self._noted_s = self._now()
            start_thread("served_note", self._note_used)
        is_busy = bool(self._served.inside) or self._served.state is ProgramState.LOADING
        if is_busy and self._busy is None and self._lease is not None:
            self._busy = contextlib.ExitStack()
            with contextlib.suppress(SubletError):  # it has ended, which comes as the end of the program
                self._busy.enter_context(self._lease.activity())
        elif not is_busy and self._busy is not None:
            busy, self._busy = self._busy, None
            with contextlib.suppress(SubletError):
                busy.close()

    def _note_used(self) -> None:
        with contextlib.suppress(SubletError):  # no request fails for that, and the next one notes it again
            self._sessions.used(self.session.id)

    def _give(self, number: int) -> None:
        if (answer := self._answers.get(number)) is not None:
            self._send_frame(ServedFrameKind.REQUEST, number, with_head(answer.head, answer.body))

    def _send_frame(self, kind: ServedFrameKind, number: int, body: bytes = b"") -> None:
        """A frame to the program. If it is gone its end will be heard of."""
        if (run := self._run) is not None:
            run.streams.send(encode(kind, number, body))
            self._watch(run)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._do(self._served.tick(self._now()))

    def _post(self, act: Callable[[], list[Effect]]) -> None:
        """Decide on the loop, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self._do(self._decided(act)))

    def _decided(self, act: Callable[[], list[Effect]]) -> list[Effect]:
        try:
            return act()
        except ProgramTransitionError as error:
            return self._broke(str(error))

    def _broke(self, how: str) -> list[Effect]:
        """The program sent what is no protocol: it is ended."""
        _log(f"The program broke the protocol: {how}.")
        if self._run is not None:
            self._run.broke = how
        with contextlib.suppress(ProgramTransitionError):
            return self._served.failed(how, self._now())
        return []

    # ---- on threads: the lease

    def _acquire(self) -> None:
        try:
            while True:
                try:
                    lease = self._sessions.acquire(self.session.id, {"wait": math.inf})
                    break
                except Disconnected:  # the office is started again; the next request has the id of this one
                    if self._is_withdrawn.wait(RETRY_S):
                        raise
        except SubletError as error:
            self._not_acquired(error)
            return

        def granted() -> list[Effect]:
            self._lease = lease
            return self._served.granted(self._now())

        self._post(granted)

    def _not_acquired(self, error: BaseException) -> None:
        if self._is_withdrawn.is_set():
            why = Why.NO_LEASE
        elif isinstance(error, CapacityExceeded) and not error.transient:
            why = Why.IMPOSSIBLE
        else:
            why = Why.REFUSED
        if why is not Why.NO_LEASE:  # what can be done is for the program's owner, not for those who ask it
            _log(f"The program gets no GPU: {error}")
        message = error.message if isinstance(error, SubletError) else str(error)
        self._post(lambda: self._served.refused(message, self._now(), why=why))

    def _withdraw(self) -> None:
        self._is_withdrawn.set()
        with contextlib.suppress(SubletError):
            self._sessions.rest(self.session.id, even_if_busy=True)

    def _launch(self) -> None:
        """Start the program, read what it says until it is gone, and give its lease back."""
        lease = self._lease
        assert lease is not None
        reason, block = "", contextlib.ExitStack()
        try:
            self._loaded = _stamp(self._path)
            source = read_whole(self._path, SOURCE_MAX)
            if len(source) > SOURCE_MAX:
                raise InvalidRequest(f"{self._path} has more than {SOURCE_MAX} bytes")
            volume = block.enter_context(self._volume())
            # requests are its use, and not that it runs
            guest = start_spec(lease, self._spec(lease), busy=False, volume=volume)
            try:
                run = _Run(guest, open_streams(guest))
                head = {"name": self._path.name, "threads": self._limits.concurrent}
                load = encode(ServedFrameKind.LOAD, 0, with_head(head, source))
                self._loop.call_soon_threadsafe(self._begin, run, load)
                run.is_silent.wait()
                with contextlib.suppress(TimeoutError, SubletError):  # how it ended is told on another connection
                    guest.wait(LEAVE_S)
                run.is_gone.set()
            finally:
                guest.close()
            if run.streams.lost is not None:
                raise run.streams.lost
            end = lease.end
            reason = run.broke or (f"exit {guest.exit_code}" if end is None else f"{end.reason}: {end.detail}")
        except LeaseEnded as error:  # before it was started
            reason = str(error)
        except (OSError, SubletError) as error:
            reason = str(error)
            _log(f"The program is ended: {reason}")
            self._post(lambda: self._load_failed(reason))
        with contextlib.suppress(SubletError):
            block.close()
        with contextlib.suppress(SubletError):
            self._sessions.rest(self.session.id, even_if_busy=True)
        self._post(lambda: self._lost(reason))

    def _volume(self) -> Lease:
        """A lease of the session's volume, which is made with the first."""
        name, labels = self.session.volume, {SESSION_LABEL: self.session.id}
        size: int | None = self._volume_bytes
        with contextlib.suppress(NotFound):
            self._fabric.volume(name)
            size = None
        return self._fabric.block(size, name=name, wait=VOLUME_WAIT_S, renew="always", labels=labels)

    def _spec(self, lease: Lease) -> GuestSpec:
        """It runs in this program's interpreter; that of another tenant in a folder and as a user of its own."""
        is_own = self._fabric.lease(lease.id).tenant == OWNER_TENANT
        return GuestSpec(
            entry=PROGRAM,
            python=sys.executable,
            env=environment(lease, None),
            cwd=str(self._path.parent.resolve()) if is_own else "",
            stdio=StdioKind.PIPES,
            name="served",
            grace_ns=NS_PER_S,
        )

    def _load_failed(self, reason: str) -> list[Effect]:
        return self._served.failed(reason, self._now()) if self._served.state is ProgramState.LOADING else []

    def _lost(self, reason: str) -> list[Effect]:
        self._run, self._lease = None, None
        effects = self._served.lost(reason, self._now())
        return [] if self._is_closing else effects

    def _save_and_end(self, run: _Run) -> None:
        with contextlib.suppress(SubletError):
            run.guest.send_signal(signal.SIGTERM)
            if not run.has_left.wait(SAVE_S):
                _log(f"The program did not save within {SAVE_S:g} s.")
        _end(run)
        run.is_gone.wait(SAVE_S)
        with contextlib.suppress(SubletError):
            self._sessions.rest(self.session.id, even_if_busy=True)

    # ---- on the loop: what the program says

    def _begin(self, run: _Run, load: bytes) -> None:
        self._run = run
        self._loop.add_reader(run.streams.fileno(), self._pump, run)
        run.streams.send(load)
        self._pump(run)  # it may have said something while it was attached to

    def _watch(self, run: _Run) -> None:
        """What found no room in the socket goes when there is some."""
        streams = run.streams
        if not streams.is_over and streams.wants_write is not run.is_watched:
            run.is_watched = streams.wants_write
            if run.is_watched:
                self._loop.add_writer(streams.fileno(), self._pump, run)
            else:
                self._loop.remove_writer(streams.fileno())

    def _pump(self, run: _Run) -> None:
        streams = run.streams
        for piece in streams.pump():
            self._on_output(run, piece)
        if not streams.is_over:
            self._watch(run)
        elif not run.is_silent.is_set():
            self._loop.remove_reader(streams.fileno())
            self._loop.remove_writer(streams.fileno())
            streams.close()
            run.is_silent.set()

    def _on_output(self, run: _Run, piece: Output) -> None:
        if piece.stream == "stderr":
            run.printed += len(piece.data)
            if run.printed - len(piece.data) <= PRINTED_MAX < run.printed:
                self._do(self._broke(f"it printed more than {PRINTED_MAX >> 20} MiB"))
        if piece.stream != "stdout" or run.is_unreadable:
            return
        try:
            for frame in run.reader.feed(piece.data):
                if frame.kind in _ONCE:
                    if frame.kind in run.kinds_printed:
                        raise BrokenFrames(f"it said {frame.kind.name} twice")
                    run.kinds_printed.add(frame.kind)
                if frame.kind is ServedFrameKind.LEAVING:
                    if error := message_in(frame.body):
                        _log(f"The program could not save, and what it saved before is kept: {error}")
                    run.has_left.set()
                self._do(self._decided(functools.partial(self._on_frame, frame)))
        except BrokenFrames as error:
            run.is_unreadable = True
            self._do(self._broke(str(error)))
            _ = start_thread("served_end", functools.partial(_end, run))

    def _on_frame(self, frame: ServedFrame) -> list[Effect]:
        """One frame, on the loop."""
        served, now_s, number = self._served, self._now(), frame.request
        answer = self._answers.get(number)
        match frame.kind:
            case ServedFrameKind.LOADED:
                _log("The program is loaded.")
                return served.loaded(now_s)
            case ServedFrameKind.FAILED:
                message = message_in(frame.body)
                _log(f"The program cannot be served: {message}")
                return served.failed(message, now_s)
            case ServedFrameKind.LEAVING:
                return served.leaving(now_s)
            case ServedFrameKind.HEAD:
                passes, head = served.begun(number, now_s), answer_head(frame.body)
                if passes and answer is not None:
                    answer.parts.put_nowait(head)
            case ServedFrameKind.PIECE:
                passes = served.moved(number, now_s)
                if passes and answer is not None:
                    answer.owed -= len(frame.body)
                    if answer.owed < 0:
                        raise ProgramTransitionError("more of an answer came than there was credit for")
                    answer.parts.put_nowait(frame.body)
            case ServedFrameKind.END:
                effects = served.ended(number, now_s)
                if (done := self._answers.get(number)) is not None and not any(
                    isinstance(effect, Say) and effect.request == number for effect in effects
                ):
                    del self._answers[number]
                    done.parts.put_nowait(_Whole())
                return effects
            case ServedFrameKind.ERROR:
                return served.erred(number, message_in(frame.body), now_s)
            case ServedFrameKind.REFUSED:
                if answer is not None:
                    answer.owed = WINDOW
                return served.requeue(number, now_s)
            case _:
                pass
        return []


def _session(sessions: Sessions[Lease], name: str, terms: Terms) -> Session:
    """The session of this name, which goes on, or a new one."""
    try:
        found = sessions.find(name)
    except NotFound:
        return sessions.start(name, terms)
    if found.is_over:
        return sessions.start(name, terms)
    if found.terms != terms and not found.leases:  # nothing of it would be lost
        sessions.end(found.id)
        return sessions.start(name, terms)
    if found.terms != terms:
        raise InvalidRequest(
            f"session {name} asks for something else",
            do=f"Leave it as it is, or end it first (`sublet session end {name}`), or use another --name.",
        )
    return found


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes with a file; None where there is none."""
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size


def _end(run: _Run) -> None:
    """What has saved ends when its input does; all else is ended."""
    with contextlib.suppress(OSError, SubletError):
        if run.has_left.is_set():
            run.guest.close_stdin()
            with contextlib.suppress(TimeoutError):
                run.guest.wait(LEAVE_S)
                return
        run.guest.stop(0)


def _request_head(scope: Scope) -> dict[str, Any]:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"].decode("latin-1"),
        "headers": [one for one in headers if one[0].lower() not in _HOP_BY_HOP],
    }


def answer_head(body: bytes) -> _Head:
    """The head of an answer. Raises ``ProgramTransitionError`` where it is none."""
    try:
        head = json.loads(body)
        headers = [
            (str(name).lower().encode("latin-1"), str(value).encode("latin-1")) for name, value in head["headers"]
        ]
        status = int(head["status"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ProgramTransitionError("the head of an answer cannot be read") from None
    if not 200 <= status <= 599 or any(b"\r" in text or b"\n" in text for pair in headers for text in pair):
        raise ProgramTransitionError("the head of an answer is none of HTTP")
    return _Head(status, [one for one in headers if one[0].decode("latin-1") not in _HOP_BY_HOP])


def message_in(body: bytes) -> str:
    """What the program says of an error; it is shown to people as text."""
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it said nothing that can be read"
    return _printable(message)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text[:MESSAGE_MAX])


async def _whole_body(receive: Receive) -> bytes | None:
    """None: it is too large."""
    pieces, size = [], 0
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > BODY_MAX:
            return None
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_AGAIN: Final = "Try again later."
_SENTENCES: Final[Mapping[Why, tuple[str, str]]] = {
    Why.NO_LEASE: ("no GPU is free for this program yet", _AGAIN),
    Why.LOADING: ("this program has a GPU and is still being loaded", _AGAIN),
    Why.LEAVING: ("the lease of this program is about to end, and it begins nothing more under it", _AGAIN),
    Why.REFUSED: ("this program gets no GPU", _AGAIN),
    Why.IMPOSSIBLE: ("this program can never get what it asks for", "Its owner has to ask for less."),
    Why.BUSY: ("this program has as many requests as it takes", _AGAIN),
    Why.BROKEN: ("this program cannot be loaded", "Its owner finds more with `sublet logs`."),
    Why.LOST: ("the program ended while it answered; whether it did what was asked is not known", _AGAIN),
    Why.LATE: ("the program did not answer in time; whether it did what was asked is not known", _AGAIN),
    Why.WRONG: ("the program failed at this request", "Its owner finds more with `sublet logs`."),
}


async def _send_error(
    scope: Scope, send: SendMessage, status: int, message: str, do: str, *, kind: str = "", **more: Any
) -> None:
    """JSON for programs, a page for browsers; with when to try again."""
    estimate = more.get("estimate")
    after_s = RETRY_AFTER_S if not estimate else min(RETRY_AFTER_MAX_S, max(1, math.ceil(estimate)))
    accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    if b"text/html" in accepts:
        in_queue = ""
        if more.get("position"):
            sentence = f"Place {more['position']} in the queue{estimate_of(more)}: {more['reason']}"
            in_queue = f"<p>{html.escape(sentence)}</p>"
        body = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{status}</title><h1>{status}</h1>'
            f"<p>{html.escape(message)}.</p>{in_queue}<p>{html.escape(do)}</p></html>\n"
        ).encode()
        content_type = b"text/html; charset=utf-8"
    else:
        body = json.dumps({"error": {"kind": kind, "message": message, "do": do, **more}}).encode()
        content_type = b"application/json"
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", str(after_s).encode())] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _log(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
