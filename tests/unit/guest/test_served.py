"""The process of a served program, spoken to in frames as the server does, without an office."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from sublet.errors import NotFound
from sublet.guest import served as served_module
from sublet.guest.served import SCHEMA, LoadedProgram, Out, Unfit, _head_of, _Open
from sublet.state.checkpoints.durable import Durable
from sublet.wire.served import (
    FROM_PROGRAM,
    HEAD_MAX,
    WINDOW,
    ServedFrame,
    ServedFrameKind,
    ServedFrameReader,
    encode,
    with_head,
)

K: Final = ServedFrameKind
HANDLERS: Final = """
import threading, os
seen, gate = [], threading.Event()
def handle(request):
    seen.append(request.path)
    match request.path:
        case "/body": return request.body[::-1]
        case "/whole": return 201, {"X-Said": request.headers["x-asked"]}, b"made"
        case "/many": return (b"ab" for _ in range(3))
        case "/large": return b"x" * 5_000_000
        case "/slow":
            print("slow", flush=True)
            gate.wait()
            return b"done"
        case "/open":
            gate.set()
            return b"opened"
        case "/text": return "text"
        case "/dict": return {}
        case "/none": return None
        case "/number": return 3
        case "/tuple": return (1, 2)
        case "/status": return 99, {}, b""
        case "/piece": return iter([b"a", "b"])
        case "/raise": raise KeyError("no")
        case "/exit": raise SystemExit(3)
def save(): return " ".join(seen).encode()
def restore(state): seen.append(state.decode())
"""


class Program:
    """One that is loaded."""

    def __init__(self, source: str, state: bytes | None = None) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="sublet-served-")
        if state is not None:
            Durable(state, self._place.name, schema=SCHEMA).close()
        runs = f"from sublet.guest.served import serve; serve(lambda: {self._place.name!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", runs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._reader, self._frames = ServedFrameReader(FROM_PROGRAM), list[ServedFrame]()
        self._number = 0
        self.tell(K.LOAD, 0, with_head({"name": "app.py", "threads": 2}, source.encode()))

    def saved(self) -> bytes | None:
        """What is saved now, for the next lease."""
        try:
            kept = Durable.restore(self._place.name, schema=SCHEMA)
        except NotFound:
            return None
        value: bytes = kept.value
        kept.close()
        return value

    def tell(self, kind: ServedFrameKind, request: int = 0, body: bytes = b"") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode(kind, request, body))

    def ask(self, path: str, body: bytes = b"", query: str = "", **headers: str) -> int:
        self._number += 1
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        head = {"method": "POST", "path": path, "query": query, "headers": named}
        self.tell(K.REQUEST, self._number, with_head(head, body))
        return self._number

    def next(self) -> ServedFrame:
        assert self.process.stdout is not None
        while not self._frames:
            data = self.process.stdout.read(1 << 16)
            assert data, "it ended"
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def answer(self, path: str, body: bytes = b"", **headers: str) -> tuple[Any, bytes]:
        """Head and body of a whole answer; of a failed one its error."""
        number, head, said = self.ask(path, body, **headers), None, b""
        while True:
            frame = self.next()
            assert frame.request == number, frame
            match frame.kind:
                case K.HEAD:
                    head = json.loads(frame.body)
                case K.PIECE:
                    said += frame.body
                case K.ERROR:
                    return json.loads(frame.body)["message"], said
                case K.END:
                    return head, said
                case _:
                    raise AssertionError(frame)

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._place.cleanup()
        return status


@contextlib.contextmanager
def program(source: str = HANDLERS, state: bytes | None = None) -> Iterator[Program]:
    made = Program(source, state)
    try:
        yield made
    finally:
        made.process.kill()
        made.close()


def test_answers_are_bytes_whole_or_in_pieces() -> None:
    with program() as served:
        assert served.next().kind is K.LOADED
        assert served.answer("/body", b"abc") == (
            {"status": 200, "headers": [["content-type", "application/octet-stream"]]},
            b"cba",
        )
        assert served.answer("/whole", x_asked="why") == ({"status": 201, "headers": [["X-Said", "why"]]}, b"made")
        assert served.answer("/many")[1] == b"ababab"
        assert served.close() == 0, "it ends with its input"


def test_what_is_no_answer_is_an_error_of_that_request_alone() -> None:
    with program() as served:
        assert served.next().kind is K.LOADED
        for path, says in (
            ("/text", "answered with str: answer with bytes"),
            ("/dict", "answered with dict"),
            ("/none", "answered with NoneType"),
            ("/number", "answered with int"),
            ("/tuple", "not (status, headers, body)"),
            ("/status", "99 is no status"),
            ("/raise", "KeyError: 'no'"),
            ("/exit", "SystemExit: 3"),
        ):
            error, body = served.answer(path)
            assert says in error, (path, error)
            assert body == b""
        error, body = served.answer("/piece")
        assert ("a piece that is str" in error, body) == (True, b"a")
        assert served.answer("/body", b"ok")[1] == b"ko", "it goes on"


LARGE_ASGI: Final = """
async def app(scope, receive, send):
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    size = 5_000_000 if scope["path"] == "/large" else 0
    await send({"type": "http.response.body", "body": b"x" * size + body[::-1]})
"""


@pytest.mark.parametrize("source", [HANDLERS, LARGE_ASGI], ids=["handle", "asgi"])
def test_an_answer_waits_for_its_credit_and_ends_when_nothing_reads_it(source: str) -> None:
    with program(source) as served:
        assert served.next().kind is K.LOADED
        number, got = served.ask("/large"), 0
        assert served.next().kind is K.HEAD
        while got < WINDOW:
            got += len(served.next().body)
        assert got == WINDOW
        assert served.answer("/body", b"ab")[1] == b"ba", "others do not wait; and it has sent nothing more"
        served.tell(K.CREDIT, number, (1000).to_bytes(8, "big"))
        served.tell(K.CANCEL, number)
        while (frame := served.next()).kind is K.PIECE:
            got += len(frame.body)
        assert (frame.kind, frame.request) == (K.END, number)
        assert got <= WINDOW + 1000


def test_when_its_lease_is_about_to_end_it_begins_nothing_more_and_saves_after_the_last_answer() -> None:
    with program(state=b"before") as served:
        assert served.next().kind is K.LOADED
        slow = served.ask("/slow")
        opened = served.ask("/open")
        kinds = [served.next() for _ in range(6)]
        assert {(frame.kind, frame.request) for frame in kinds} == {
            (kind, number) for kind in (K.HEAD, K.PIECE, K.END) for number in (slow, opened)
        }
        served.process.send_signal(signal.SIGTERM)
        frame = served.next()
        assert frame.kind is K.LEAVING
        assert json.loads(frame.body) == {"message": ""}
        assert served.saved() == b"before /slow /open"
        late = served.ask("/body")
        assert served.next() == ServedFrame(K.REFUSED, late, b"")
        assert served.close() == 0


@pytest.mark.parametrize(
    ("source", "state", "says"),
    [
        ("def handle(:", None, "SyntaxError"),
        ("import nothing_like_it", None, "ModuleNotFoundError"),
        ("handle = 3", None, "neither a function `handle` nor"),
        ("raise SystemExit(2)", None, "SystemExit"),
        ("def handle(request): pass", b"x", "no function `restore`"),
        ("def handle(request): pass\ndef restore(state): 1/0", b"x", "ZeroDivisionError"),
    ],
)
def test_a_program_that_cannot_be_loaded_says_why(source: str, state: bytes | None, says: str) -> None:
    with program(source, state) as served:
        frame = served.next()
        assert frame.kind is K.FAILED
        assert says in json.loads(frame.body)["message"]


@pytest.mark.parametrize(("save", "says"), [("return 3", "returned int"), ("1/0", "ZeroDivisionError")])
def test_a_save_that_fails_is_told(save: str, says: str) -> None:
    with program(f"def handle(request): pass\ndef save():\n    {save}") as served:
        assert served.next().kind is K.LOADED
        served.process.send_signal(signal.SIGTERM)
        assert says in json.loads(served.next().body)["message"]
        assert served.saved() is None


ASGI: Final = """
async def app(scope, receive, send):
    assert (await receive())["body"] == b"in"
    assert scope["method"] == "POST" and (b"x-asked", b"y") in scope["headers"]
    await send({"type": "http.response.start", "status": 202, "headers": [(b"a", b"b")]})
    for piece in (b"one", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"" if scope["path"] == "/" else "text"})
"""


def test_an_asgi_application_is_served_as_it_is() -> None:
    with program(ASGI) as served:
        assert served.next().kind is K.LOADED
        head = {"status": 202, "headers": [["a", "b"]]}
        assert served.answer("/", b"in", x_asked="y") == (head, b"onetwo")
        error, body = served.answer("/text", b"in", x_asked="y")
        assert ("a body that is str" in error, body) == (True, b"onetwo")


@pytest.mark.parametrize("source", [HANDLERS, LARGE_ASGI], ids=["handle", "asgi"])
def test_a_short_answer_is_one_write(source: str) -> None:
    """Each write wakes the supervisor, and then the server: head, piece and end are not three of them."""
    with program(source) as served:
        assert served.next().kind is K.LOADED
        for _ in range(3):
            number = served.ask("/body", b"ab")
            assert served.process.stdout is not None
            frames = ServedFrameReader(FROM_PROGRAM).feed(served.process.stdout.read(1 << 16))
            assert [frame.kind for frame in frames] == [K.HEAD, K.PIECE, K.END]
            assert {frame.request for frame in frames} == {number}


BLOCKS: Final = """
import os, time
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    while not os.path.exists(scope["query_string"].decode()):
        time.sleep(0.01)
    await send({"type": "http.response.body", "body": b"done"})
"""


def test_while_an_application_blocks_its_loop_its_pieces_are_there_and_late_requests_are_refused(
    tmp_path: Path,
) -> None:
    """What is refused goes to the next lease, and is not lost with this one."""
    with program(BLOCKS) as served:
        assert served.next().kind is K.LOADED
        first = served.ask("/", query=str(tmp_path / "go"))
        assert [served.next().kind, served.next()] == [K.HEAD, ServedFrame(K.PIECE, first, b"begun")]
        served.process.send_signal(signal.SIGTERM)
        late = served.ask("/", query=str(tmp_path / "go"))
        assert served.process.stdout is not None
        while not select.select([served.process.stdout], [], [], 0.1)[0]:  # it was taken before the signal came
            late = served.ask("/", query=str(tmp_path / "go"))
        assert served.next() == ServedFrame(K.REFUSED, late, b"")
        (tmp_path / "go").touch()
        ends = [served.next(), served.next()]
        assert [(frame.kind, frame.request) for frame in ends] == [(K.PIECE, first), (K.END, first)]


def test_frames_of_many_threads_are_whole_and_in_order_where_the_pipe_is_full() -> None:
    reads, writes = os.pipe()
    out = Out(writes)
    try:
        while out.put(b"#" * 1000):
            pass

        def say(thread: int) -> None:
            for number in range(100):
                out.write_all(encode(K.PIECE, thread, str(number).encode() * 1000))

        threads = [threading.Thread(target=say, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        frames, reader, filling = list[ServedFrame](), ServedFrameReader(FROM_PROGRAM), True
        while len(frames) < 400:
            data = os.read(reads, 1 << 16)
            if filling:
                data = data.lstrip(b"#")
                filling = not data
            frames += reader.feed(data)
        for thread in threads:
            thread.join(60)
        assert out.put()
        for number in range(4):
            own = [frame.body for frame in frames if frame.request == number]
            assert own == [str(one).encode() * 1000 for one in range(100)]
    finally:
        os.close(reads)
        os.close(writes)


# ---- in this process


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[tuple[LoadedProgram, Callable[[], list[ServedFrame]]]]:
    """A program without a source, and what it has said so far."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    reader = ServedFrameReader(FROM_PROGRAM)

    def said() -> list[ServedFrame]:
        try:
            return list(reader.feed(os.read(reads, 1 << 16)))
        except BlockingIOError:
            return []

    try:
        yield LoadedProgram(writes, lambda: str(folder)), said
    finally:
        os.close(reads)
        os.close(writes)


def test_it_saves_once_however_often_it_is_told_to_leave(tmp_path: Path) -> None:
    saves: list[bytes] = []

    def save() -> bytes:
        saves.append(b"state")
        return b"state"

    with loaded(tmp_path / "volume") as (program, said):
        program._module.save = save  # type: ignore[attr-defined]
        program._is_loaded = True
        program.leave()
        program.leave()
        assert [frame.kind for frame in said()] == [K.LEAVING]
    assert saves == [b"state"]


def test_what_is_kept_is_not_replaced_by_a_program_that_was_told_to_leave_as_it_was_loaded(tmp_path: Path) -> None:
    """It has not been given what it saved before, so what it has now is nothing."""
    with loaded(tmp_path / "volume") as (program, said):
        program._module.save = lambda: b"empty"  # type: ignore[attr-defined]
        program.leave()
        (frame,) = said()
        assert json.loads(frame.body) == {"message": ""}
    assert not (tmp_path / "volume").exists()


def test_a_save_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "STATE_MAX", 3)
    with loaded(tmp_path / "volume") as (program, said):
        program._module.save = lambda: b"four"  # type: ignore[attr-defined]
        program._is_loaded = True
        program.leave()
        (frame,) = said()
        assert "returned 4 bytes, and 3 is the most" in json.loads(frame.body)["message"]
    assert not (tmp_path / "volume").exists()


def test_the_headers_of_an_answer_are_bounded() -> None:
    """They go out in one frame, and a larger one would end the connection of all requests."""
    assert _head_of(1, 200, [("x", "y" * (HEAD_MAX // 2))])
    with pytest.raises(Unfit, match="take more than"):
        _head_of(1, 200, [("x", "y" * HEAD_MAX)])


def test_credit_that_does_not_suffice_is_not_used_up() -> None:
    request = _Open(credit=5)
    assert not request.takes_now(10)
    request.give(5)
    assert request.takes_now(10)


def test_an_application_that_listens_for_more_waits_until_its_answer_is_done(tmp_path: Path) -> None:
    """As frameworks do to hear that nothing reads the answer any more; a second body would be a second request."""
    heard: list[object] = []

    async def app(scope: object, receive: Any, send: object) -> None:
        heard.append(await receive())
        more = asyncio.ensure_future(receive())
        for _ in range(3):
            await asyncio.sleep(0)
        heard.append(more.done())
        more.cancel()

    with loaded(tmp_path) as (program, _):
        program._module.app = app  # type: ignore[attr-defined]
        program._open[1] = _Open()
        head = {"method": "GET", "path": "/", "query": "", "headers": []}
        asyncio.run(program._asgi(1, head, b"body", lambda *_: None))
    assert heard == [{"type": "http.request", "body": b"body", "more_body": False}, False]


def test_a_pipe_that_has_taken_all_is_watched_no_more(tmp_path: Path) -> None:
    """Else the loop would wake up for it again and again."""
    unwatched: list[int] = []
    with loaded(tmp_path) as (program, _):
        program._write_rest(SimpleNamespace(remove_writer=unwatched.append))  # type: ignore[arg-type]
        assert unwatched == [program._out.fd]
