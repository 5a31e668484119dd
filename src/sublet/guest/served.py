"""Runs a served program: a guest whose entry is `main`, with frames on its input and output.

The program is one Python file. It has ``handle(request)``, which returns what is answered, or ``app``, an ASGI
application. ``save()`` may return bytes, which are saved in the session's volume and given to ``restore(state)`` under
the next lease. What the program prints goes to its log: its standard output is its standard error here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, Final

from sublet.errors import NotFound
from sublet.guest.current import current
from sublet.lazy_dataclass import dataclass
from sublet.state.checkpoints.durable import Durable, Place
from sublet.wire.served import (
    HEAD_MAX,
    MESSAGE_MAX,
    PIECE_MAX,
    TO_PROGRAM,
    WINDOW,
    ServedFrame,
    ServedFrameKind,
    ServedFrameReader,
    encode,
    split_head,
)

READ: Final = 1 << 18
STATE_MAX: Final = 64 << 20
"""What ``save`` may return."""
SCHEMA: Final = "sublet-served/1"
"""Of what is saved: bytes."""
_Headers = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """What ``handle`` is given."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes


class Unfit(Exception):
    """The program, or an answer of it, is not what can be served."""


class RequestCancelled(Exception):
    """Nothing reads the answer any more."""


@dataclass
class _Open:
    """A request that is being answered."""

    credit: int = WINDOW
    cancelled: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, size: int) -> None:
        """Wait until so much may be sent."""
        with self.changed:
            self.changed.wait_for(lambda: self.cancelled or self.credit >= size)
            if self.cancelled:
                raise RequestCancelled
            self.credit -= size

    def takes_now(self, size: int) -> bool:
        """Whether so much may be sent now, in which case it is taken."""
        with self.changed:
            if self.cancelled:
                raise RequestCancelled
            has_credit = self.credit >= size
            self.credit -= size if has_credit else 0
            return has_credit

    def give(self, size: int, *, cancelled: bool = False) -> None:
        with self.changed:
            self.credit += size
            self.cancelled = self.cancelled or cancelled
            self.changed.notify_all()


class Out:
    """Writes frames into a pipe, whole and in order, from any thread. Where nothing reads any more the program ends."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._lock = threading.Lock()
        self._rest = bytearray()
        """What the pipe has no room for."""

    def put(self, data: bytes = b"") -> bool:
        """Write this after what is left, as far as there is room; whether nothing is left. It never waits."""
        with self._lock:
            self._rest += data
            try:
                while self._rest:
                    del self._rest[: os.write(self.fd, self._rest)]
            except BlockingIOError:
                return False
            except BrokenPipeError:
                os._exit(1)
            return True

    def write_all(self, data: bytes) -> None:
        """Write all of it. For threads that may wait."""
        is_written = self.put(data)
        while not is_written:
            room = select.poll()
            room.register(self.fd, select.POLLOUT)
            room.poll()
            is_written = self.put()


class LoadedProgram:
    """The loaded program, and its end of the line."""

    def __init__(self, out: int, place: Callable[[], Place]) -> None:
        """``place``: where it saves."""
        self._out, self._place = Out(out), place
        self._kept: Durable[bytes] | None = None
        """What it saved last, and with what the next save goes on."""
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._is_leaving = False
        self._is_loaded = False
        self._todo: queue.SimpleQueue[tuple[int, dict[str, Any], bytes]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of an ASGI application, in a thread of its own: requests are refused also while the application blocks it."""
        self._answering = set[asyncio.Task[None]]()
        self._module = types.ModuleType("app")

    # ---- loading

    def load(self, body: bytes) -> None:
        """Import the program and restore what it saved; begin to serve it."""
        head, (source,) = split_head(body)
        module = self._module
        sys.path.insert(0, os.getcwd())
        module.__file__ = head["name"]
        sys.modules["app"] = module
        exec(compile(source, head["name"], "exec"), module.__dict__)  # noqa: S102 - that is what is to be served
        if callable(getattr(module, "app", None)):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        elif not callable(getattr(module, "handle", None)):
            raise Unfit("it has neither a function `handle` nor an ASGI application `app`")
        place = self._place()
        with contextlib.suppress(NotFound):  # it never saved anything
            self._kept = Durable.restore(place, schema=SCHEMA)
        if self._kept is not None:
            restore = getattr(module, "restore", None)
            if restore is None:
                raise Unfit("it saved something under an earlier lease, and has no function `restore` any more")
            restore(self._kept.value)
        for _ in range(head["threads"] if self._loop is None else 0):
            threading.Thread(target=self._work, daemon=True).start()
        self._is_loaded = True
        self.send_frame(ServedFrameKind.LOADED)

    # ---- requests

    def take(self, frame: ServedFrame) -> None:
        """One frame that came."""
        with self._lock:
            known = self._open.get(frame.request)
            refuses = self._is_leaving
            if frame.kind is ServedFrameKind.REQUEST and not refuses:
                self._open[frame.request] = _Open()
        match frame.kind:
            case ServedFrameKind.REQUEST if refuses:
                self.send_frame(ServedFrameKind.REFUSED, frame.request)
            case ServedFrameKind.REQUEST:
                head, (body,) = split_head(frame.body)
                if self._loop is None:
                    self._todo.put((frame.request, head, body))
                else:
                    self._loop.call_soon_threadsafe(self._begin_asgi, self._loop, frame.request, head, body)
            case ServedFrameKind.CANCEL if known is not None:
                known.give(0, cancelled=True)
            case ServedFrameKind.CREDIT if known is not None:
                known.give(int.from_bytes(frame.body, "big"))
            case _:
                pass

    def _work(self) -> None:
        while True:
            number, head, body = self._todo.get()
            try:
                last = self._handle(number, head, body)
            except BaseException as error:  # noqa: BLE001 - the caller is told
                last = _end_of(number, error)
            self._out.write_all(last)
            self._close(number)

    def _close(self, number: int) -> None:
        """Its answer is whole, or will not be."""
        with self._lock:
            self._open.pop(number, None)
            self._idle.notify_all()

    def _handle(self, number: int, head: dict[str, Any], body: bytes) -> bytes:
        """Answer it, but for the last frames, which are returned: those of a short answer go out together."""
        headers = {name.lower(): value for name, value in head["headers"]}
        request = Request(head["method"], head["path"], head["query"], headers, body)
        status, reply_headers, answer = _parts(self._module.handle(request))
        known, begin, end = (
            self._open[number],
            _head_of(number, status, reply_headers),
            encode(ServedFrameKind.END, number),
        )
        if isinstance(answer, bytes) and len(answer) <= PIECE_MAX:
            known.take(len(answer))
            return b"".join((begin, *(encode(ServedFrameKind.PIECE, number, part) for part in _parted(answer)), end))
        self._out.write_all(begin)
        for piece in (answer,) if isinstance(answer, bytes) else answer:
            if not isinstance(piece, bytes):
                raise Unfit(f"`handle` answered with a piece that is {type(piece).__name__}: pieces are bytes")
            for part in _parted(piece):
                known.take(len(part))
                self._out.write_all(encode(ServedFrameKind.PIECE, number, part))
        return end

    def _begin_asgi(self, loop: asyncio.AbstractEventLoop, number: int, head: dict[str, Any], body: bytes) -> None:
        task = loop.create_task(self._answer_asgi(loop, number, head, body))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_asgi(
        self, loop: asyncio.AbstractEventLoop, number: int, head: dict[str, Any], body: bytes
    ) -> None:
        frames = bytearray()
        """That go out together: the head with what follows it, and the last piece with the end."""

        def flush() -> None:
            data = bytes(frames)
            frames.clear()
            if not self._out.put(data):
                loop.add_writer(self._out.fd, self._write_rest, loop)

        def send_frame(data: bytes, now: bool) -> None:
            if not frames and not now:
                loop.call_soon(flush)  # at the latest when the application waits for something
            frames.extend(data)
            if now:
                flush()

        try:
            await self._asgi(number, head, body, send_frame)
            last = encode(ServedFrameKind.END, number)
        except BaseException as error:  # noqa: BLE001 - the caller is told
            last = _end_of(number, error)
        frames.extend(last)
        flush()
        self._close(number)

    def _write_rest(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._out.put():
            loop.remove_writer(self._out.fd)

    async def _asgi(
        self, number: int, head: dict[str, Any], body: bytes, send_frame: Callable[[bytes, bool], None]
    ) -> None:
        """``send_frame`` takes a frame, and whether it goes out now."""
        loop, known, came = asyncio.get_running_loop(), self._open[number], [False]
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": head["method"],
            "scheme": "http",
            "path": head["path"],
            "raw_path": head["path"].encode("utf-8", "surrogateescape"),
            "query_string": head["query"].encode("latin-1"),
            "root_path": "",
            "headers": raw,
            "client": None,
            "server": None,
        }

        async def receive() -> dict[str, Any]:
            if came[0]:
                await loop.create_future()
            came[0] = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [
                    (name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())
                ]
                send_frame(_head_of(number, message["status"], headers), False)
            elif message["type"] == "http.response.body":
                piece = message.get("body", b"")
                if not isinstance(piece, bytes):
                    raise Unfit(f"the application sent a body that is {type(piece).__name__}: bodies are bytes")
                for part in _parted(piece):
                    if not known.takes_now(len(part)):
                        await loop.run_in_executor(None, known.take, len(part))
                    send_frame(encode(ServedFrameKind.PIECE, number, part), bool(message.get("more_body")))

        await self._module.app(scope, receive, send)

    # ---- leaving

    def leave(self) -> None:
        """The lease is about to end: begin nothing more, wait for what runs, save, and say so."""
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
            self._idle.wait_for(lambda: not self._open)
        error = ""
        try:
            self._save()
        except BaseException as failed:  # noqa: BLE001 - the server is told
            traceback.print_exc()
            error = _text(failed)
        self.send_frame(ServedFrameKind.LEAVING, 0, json.dumps({"message": error}).encode())

    def _save(self) -> None:
        """What ``save`` returns is durable when this returns."""
        save: Callable[[], object] | None = getattr(self._module, "save", None)
        if save is None or not self._is_loaded:  # what is not restored yet would take the place of what is kept
            return
        state = save()
        if not isinstance(state, bytes):
            raise Unfit(f"`save` returned {type(state).__name__}: what is saved is bytes")
        if len(state) > STATE_MAX:
            raise Unfit(f"`save` returned {len(state)} bytes, and {STATE_MAX} is the most")
        if self._kept is None:
            self._kept = Durable(state, self._place(), schema=SCHEMA)
        else:
            self._kept.value = state
        self._kept.checkpoint()

    def send_frame(self, kind: ServedFrameKind, request: int = 0, body: bytes = b"") -> None:
        """A frame to the server."""
        self._out.write_all(encode(kind, request, body))


def _head_of(number: int, status: int, headers: _Headers) -> bytes:
    """The frame with which an answer begins."""
    if not 200 <= status <= 599:
        raise Unfit(f"{status!r:.40} is no status of an answer")
    body = json.dumps({"status": status, "headers": [[str(name), str(value)] for name, value in headers]}).encode()
    if len(body) > HEAD_MAX:
        raise Unfit(f"the headers of the answer take more than {HEAD_MAX} bytes")
    return encode(ServedFrameKind.HEAD, number, body)


def _end_of(number: int, error: BaseException) -> bytes:
    """The frame with which an answer ends where this was raised."""
    if isinstance(error, RequestCancelled):
        return encode(ServedFrameKind.END, number)
    traceback.print_exception(error)
    kind = "unfit" if isinstance(error, Unfit) else "raised"
    return encode(ServedFrameKind.ERROR, number, _message(kind, error))


def _parted(piece: bytes) -> Iterable[bytes]:
    """In parts of the size that one frame may have."""
    return (piece[at : at + PIECE_MAX] for at in range(0, len(piece), PIECE_MAX))


def _parts(answer: object) -> tuple[int, list[tuple[str, str]], bytes | Iterable[object]]:
    """Status, headers and body of what ``handle`` returned."""
    status, headers = 200, {"content-type": "application/octet-stream"}
    if isinstance(answer, tuple):
        if len(answer) != 3 or not isinstance(answer[1], Mapping):
            raise Unfit("`handle` answered with a tuple that is not (status, headers, body)")
        status, headers, answer = answer
    if isinstance(answer, str | bytearray | memoryview | Mapping) or (
        not isinstance(answer, bytes) and not isinstance(answer, Iterable)
    ):
        raise Unfit(f"`handle` answered with {type(answer).__name__}: answer with bytes, or an iterator of bytes")
    return status, list(headers.items()), answer


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE_MAX] if not isinstance(error, Unfit) else str(error)


def _message(kind: str, error: BaseException) -> bytes:
    return json.dumps({"kind": kind, "message": _text(error)}).encode()


def main() -> None:
    """Serve until the input ends, and save in the volume that the guest was started with."""
    serve(lambda: current().volume)


def serve(place: Callable[[], Place]) -> None:
    """Serve until the input ends. ``place``: where it saves."""
    came, out = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what is printed goes to the log, and never between the frames
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    program, reader = LoadedProgram(out, place), ServedFrameReader(TO_PROGRAM)
    is_loaded = False
    signal.signal(signal.SIGTERM, lambda number, frame: threading.Thread(target=program.leave, daemon=True).start())
    while data := os.read(came, READ):
        for frame in reader.feed(data):
            if is_loaded:
                program.take(frame)
                continue
            is_loaded = True
            try:
                program.load(frame.body)
            except BaseException as error:  # noqa: BLE001 - the server is told
                traceback.print_exc()
                with contextlib.suppress(OSError):
                    program.send_frame(ServedFrameKind.FAILED, 0, _message("load", error))
    os._exit(0)  # threads of the program do not keep it
