"""What a served program says is not believed: each text of it is checked before anything is done with it. And what its
driver does: with requests, the program's output, its lease and its volume."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self, cast

import pytest

from sublet.client.guests import Output
from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, NotFound, SubletError
from sublet.studio import serve
from sublet.studio.people import OWNER_TENANT
from sublet.studio.records import Terms
from sublet.studio.serve import ServedProgram, answer_head, message_in
from sublet.studio.serving import Limits, ProgramTransitionError
from sublet.values import TenantId
from sublet.wire.guests import GuestSpec
from sublet.wire.served import (
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
from tests.left_open import nothing_left_open


def test_the_head_of_an_answer() -> None:
    said = {"status": 201, "headers": [["X-Said", "ü"], ["Connection", "close"], ["Transfer-Encoding", "chunked"]]}
    head = answer_head(json.dumps(said).encode())
    assert (head.status, head.headers) == (201, [(b"x-said", b"\xfc")]), "without what is between two machines"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        b"{}",
        b"[" * 100_000,
        b'{"status": 1e999, "headers": []}',
        b'{"status": 99, "headers": []}',
        b'{"status": 600, "headers": []}',
        b'{"status": 200, "headers": 3}',
        b'{"status": 200, "headers": [["a"]]}',
        b'{"status": 200, "headers": [["a", "b\\r\\nset-cookie: c"]]}',
        b'{"status": 200, "headers": [["a\\n", "b"]]}',
        '{"status": 200, "headers": [["a", "\u2603"]]}'.encode(),
    ],
)
def test_what_is_no_head_is_refused(body: bytes) -> None:
    with pytest.raises(ProgramTransitionError, match="head of an answer"):
        answer_head(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff"])
def test_a_message_that_cannot_be_read_is_said_so(body: bytes) -> None:
    assert message_in(body) == "it said nothing that can be read"


def test_a_message_has_no_control_characters_and_an_end() -> None:
    body = json.dumps({"message": "\x1b[2J\nno" + "x" * 100_000}).encode()
    assert message_in(body).startswith(" [2J no")
    assert len(message_in(body)) == MESSAGE_MAX


# ------------------------------------------------------------------ the driver: sessions, guest and streams are doubles


KIND: Final = ServedFrameKind


class FakeStreams:
    """Input and output of the program, whose part the test plays."""

    def __init__(self) -> None:
        self.given: list[ServedFrame] = []
        """What the program was given, as frames."""
        self.is_over = self.wants_write = False
        self.lost: SubletError | None = None
        self._reader = ServedFrameReader(TO_PROGRAM)
        self._mine, self._its = socket.socketpair()
        self._pieces: list[Output] = []

    def fileno(self) -> int:
        return self._mine.fileno()

    def send(self, data: bytes) -> None:
        self.given += self._reader.feed(data)

    def pump(self) -> list[Output]:
        with contextlib.suppress(BlockingIOError):
            self._mine.recv(1 << 16, socket.MSG_DONTWAIT)
        pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        self.is_over = True
        self._mine.close()
        self._its.close()

    def put(self, stream: str, data: bytes) -> None:
        self._pieces.append(Output(stream, data))
        self._its.send(b".")

    def ends(self) -> None:
        self.is_over = True
        self._its.send(b".")


class FakeGuest:
    """The program's process. It ends when it is told to."""

    def __init__(self, stage: Stage) -> None:
        self.streams = FakeStreams()
        self.told: list[str] = []
        self.exit_code = 0
        self._stage = stage

    def _ends(self, how: str) -> None:
        self.told.append(how)
        self._stage.loop.call_soon_threadsafe(self.streams.ends)

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        self.told.append("asked to end")
        loop = self._stage.loop
        loop.call_soon_threadsafe(lambda: loop.call_later(0.05, self._saved))

    def _saved(self) -> None:
        self.told.append("saved")
        self.streams.put("stdout", encode(KIND.LEAVING))

    def close_stdin(self) -> None:
        self._ends("its input ended")

    def stop(self, grace_s: float) -> None:
        self._ends("killed")

    def wait(self, timeout: float) -> int:
        return 0

    def close(self) -> None:
        """Its connection."""


class FakeLease:
    """A lease, of the program or of its volume."""

    def __init__(self, name: str) -> None:
        self.id, self.end, self.is_released = name, None, False
        self._is_busy = False

    def is_busy(self) -> bool:
        """Whether it is in use now."""
        return self._is_busy

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_released = True


class Stage:
    """Everything that a served program needs of others: sessions, the office, guests. Made on the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.guests: list[FakeGuest] = []
        self.volumes: list[tuple[int | None, FakeLease]] = []
        self.sessions: dict[str, Any] = {}
        self.rests = 0
        self.notes = 0
        """How often it was put on record that the session is used."""
        self.waits = False
        self.printed = b""
        """By the program, before anything listens to it."""
        self.asked = 0
        """Requests for a lease."""
        self.answers: queue.SimpleQueue[FakeLease | SubletError] = queue.SimpleQueue()
        """What the office answers to them, one after the other."""
        self.cwd: list[str] = []
        self.tenant = OWNER_TENANT

    # ---- sessions

    def find(self, name: str) -> Any:
        found = [one for one in self.sessions.values() if name in (one.id, one.name)]
        if not found:
            raise NotFound(f"there is no session {name}")
        return found[-1]

    def start(self, name: str, terms: Terms) -> Any:
        ident = f"s-{len(self.sessions)}"
        made = SimpleNamespace(id=ident, name=name, terms=terms, volume=ident, is_over=False, leases=())
        self.sessions[ident] = made
        return made

    def end(self, ident: str) -> None:
        self.sessions[ident].is_over = True

    def acquire(self, ident: str, told: Mapping[str, Any]) -> FakeLease:
        self.asked += 1
        self.waits = True
        said = self.answers.get()
        self.waits = False
        if isinstance(said, SubletError):
            raise said
        return said

    def used(self, ident: str) -> None:
        self.notes += 1

    def rest(self, ident: str, *, even_if_busy: bool) -> None:
        assert even_if_busy
        self.rests += 1
        if self.waits:
            self.answers.put(SubletError("the request was withdrawn"))

    def grant(self) -> FakeLease:
        lease = FakeLease(f"l-{self.asked}")
        self.answers.put(lease)
        return lease

    # ---- the office

    def volume(self, name: str) -> None:
        if not self.volumes:
            raise NotFound("there is no volume")

    def block(self, size: int | None, **_: object) -> FakeLease:
        self.volumes.append((size, FakeLease("volume")))
        return self.volumes[-1][1]

    def lease(self, ident: str) -> Any:
        return SimpleNamespace(tenant=self.tenant)

    # ---- guests

    def start_spec(self, lease: FakeLease, spec: GuestSpec, *, busy: bool, volume: FakeLease) -> FakeGuest:
        self.cwd.append(spec.cwd)
        guest = FakeGuest(self)
        if self.printed:
            guest.streams._pieces.append(Output("stderr", self.printed))
        self.guests.append(guest)
        return guest

    @property
    def guest(self) -> FakeGuest:
        return self.guests[-1]

    def says(self, kind: ServedFrameKind, number: int = 0, body: bytes = b"") -> None:
        self.guest.streams.put("stdout", encode(kind, number, body))

    def given(self, kind: ServedFrameKind) -> list[ServedFrame]:
        return [frame for frame in self.guest.streams.given if frame.kind is kind] if self.guests else []


async def until(is_so: Callable[[], object]) -> None:
    """Threads and loop take their steps."""
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.001)


class Caller:
    """A request over HTTP, and what came back of its answer."""

    def __init__(self, app: ServedProgram, *, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b"") -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_whole = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.hangs_up = asyncio.Event()
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"a=1", "headers": list(headers)}
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self.hangs_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            await self.reads.wait()
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], dict(message["headers"])
            else:
                self.body += message["body"]
                self.is_whole = not message["more_body"]

        self.task = asyncio.ensure_future(app(scope, receive, send))

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


HEAD = json.dumps({"status": 200, "headers": []}).encode()
LIMITS = Limits(concurrent=2, patience_s=300, answer_s=30)
TERMS = Terms(vram=1 << 30)


def served(
    run: Callable[[ServedProgram, Stage], Coroutine[Any, Any, None]],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    limits: Limits = LIMITS,
    made: Callable[[Stage], None] = lambda stage: None,
) -> None:
    """Run this on an application whose program lies in ``place``."""

    async def main() -> None:
        stage = Stage()
        made(stage)
        monkeypatch.setattr(serve, "open_sessions", lambda office, name: stage)
        monkeypatch.setattr(serve, "start_spec", stage.start_spec)
        monkeypatch.setattr(serve, "open_streams", lambda guest: guest.streams)
        monkeypatch.setattr(serve, "environment", lambda lease, env: {})
        place_in_queue = {"state": "waiting", "position": 3, "estimate": 5000.0, "reason": "two are before you"}
        place_in_queue["estimate_error"] = 120.0
        monkeypatch.setattr(serve, "session_views", lambda fabric, sessions: [place_in_queue])
        (place / "app.py").write_text("app = 1\n")
        app = ServedProgram(place / "app.py", cast("Any", stage), "chat", TERMS, limits, volume_bytes=1 << 20)
        try:
            with nothing_left_open():
                await run(app, stage)
                await app.close()
                await until(lambda: all(guest.streams.is_over for guest in stage.guests))
        finally:
            app._ticking.cancel()

    with asyncio.Runner() as runner:
        runner.run(main())


async def answering(app: ServedProgram, stage: Stage, **how: Any) -> Caller:
    """A request that the program has been given, under its lease."""
    caller = Caller(app, **how)
    if not stage.guests:
        stage.grant()
        await until(lambda: stage.given(KIND.LOAD))
        stage.says(KIND.LOADED)
    before = len(stage.given(KIND.REQUEST))
    await until(lambda: len(stage.given(KIND.REQUEST)) > before or stage.given(KIND.REQUEST))
    return caller


def test_an_answer_comes_as_the_program_gives_it_and_the_lease_is_busy_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what is between two machines, in both directions; while it is loaded the lease is in use as well."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        headers = [(b"Connection", b"close"), (b"x-asked", b"yes")]
        caller = Caller(app, headers=headers, body=b"question")
        lease = stage.grant()
        await until(lambda: stage.given(KIND.LOAD))
        assert lease.is_busy()
        stage.says(KIND.LOADED)
        await until(lambda: stage.given(KIND.REQUEST))
        assert lease.is_busy()
        (request,) = stage.given(KIND.REQUEST)
        head, (body,) = split_head(request.body)
        assert (head["headers"], head["query"], body) == ([["x-asked", "yes"]], "a=1", b"question")
        stage.says(KIND.HEAD, 1, HEAD)
        stage.says(KIND.PIECE, 1, b"answer")
        stage.says(KIND.END, 1)
        await caller.task
        assert (caller.status, caller.body, caller.is_whole) == (200, b"answer", True)
        assert not lease.is_busy()
        assert stage.volumes[0][0] == 1 << 20

    served(run, tmp_path, monkeypatch)


def test_requests_are_the_sessions_last_activity_to_the_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record knew of none of them, whatever was served: only of the lease that the first one took."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        now_s = 1000.0
        monkeypatch.setattr(app, "_now", lambda: now_s)

        async def served_one(number: int, *, slow_s: float = 0.0) -> None:
            nonlocal now_s
            stage.says(KIND.HEAD, number, HEAD)
            now_s += slow_s
            app._do(app._served.tick(now_s))
            stage.says(KIND.END, number)

        caller = await answering(app, stage)
        await served_one(1)
        await caller.task
        await until(lambda: stage.notes == 1)
        for number, later_s in ((2, 59.0), (3, 1.0), (4, 30.0)):
            now_s += later_s
            caller = Caller(app)
            await until(lambda: len(stage.given(KIND.REQUEST)) == number)  # noqa: B023
            await served_one(number)
            await caller.task
        await until(lambda: stage.notes == 2)
        now_s += 20.0
        caller = Caller(app)
        await until(lambda: len(stage.given(KIND.REQUEST)) == 5)
        await served_one(5, slow_s=20.0)  # a long answer, in the middle of which a minute is over
        await caller.task
        await until(lambda: stage.notes == 3)

    served(run, tmp_path, monkeypatch)


@pytest.mark.parametrize("how", ["hangs up", "is cancelled"])
def test_the_program_hears_that_nobody_reads_its_answer_any_more(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = await answering(app, stage)
        if how == "hangs up":
            caller.hangs_up.set()
        else:
            caller.task.cancel()
        await until(lambda: stage.given(KIND.CANCEL))
        caller.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller.task
        assert [frame.request for frame in stage.given(KIND.CANCEL)] == [1], "once"

    served(run, tmp_path, monkeypatch)


def test_the_program_is_given_credit_for_what_its_reader_has_taken_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = await answering(app, stage)
        stage.says(KIND.HEAD, 1, HEAD)
        sent = 0
        while sent < 3 * WINDOW:
            stage.says(KIND.PIECE, 1, b"x" * PIECE_MAX)
            sent += PIECE_MAX
            await until(lambda: len(caller.body) == sent)  # noqa: B023
        stage.says(KIND.END, 1)
        await caller.task
        assert caller.is_whole
        credit = sum(int.from_bytes(frame.body, "big") for frame in stage.given(KIND.CREDIT))
        assert sent - serve.CREDIT_STEP < credit <= sent

    served(run, tmp_path, monkeypatch)


def test_a_program_that_sends_more_than_it_has_credit_for_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not read waits in the program, and takes no memory here."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = await answering(app, stage)
        caller.reads.clear()
        stage.says(KIND.HEAD, 1, HEAD)
        for _ in range(WINDOW // PIECE_MAX):
            stage.says(KIND.PIECE, 1, b"x" * PIECE_MAX)
        stage.says(KIND.PIECE, 1, b"x")
        await until(lambda: stage.guest.told == ["killed"])
        caller.reads.set()
        await caller.task
        assert not caller.is_whole

    served(run, tmp_path, monkeypatch)


def test_an_answer_that_is_read_slowly_is_not_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader takes a piece at 25 s: until 55 s it has moved."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        now_s = 0.0
        monkeypatch.setattr(app, "_now", lambda: now_s)
        caller = await answering(app, stage)
        caller.reads.clear()
        stage.says(KIND.HEAD, 1, HEAD)
        stage.says(KIND.PIECE, 1, b"first")
        await until(lambda: not stage.guest.streams._pieces)
        now_s = 25.0
        caller.reads.set()
        await until(lambda: caller.body)
        now_s = 54.0
        app._do(app._served.tick(now_s))
        assert not stage.given(KIND.CANCEL)
        now_s = 55.0
        app._do(app._served.tick(now_s))
        await caller.task
        assert not caller.is_whole

    served(run, tmp_path, monkeypatch)


@pytest.mark.parametrize("how", ["loaded twice", "prints too much", "has printed too much already"])
def test_a_program_that_misbehaves_is_ended_and_its_lease_given_back(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lease of its volume. The next lease has the volume as it is."""
    monkeypatch.setattr(serve, "PRINTED_MAX", 10)

    async def run(app: ServedProgram, stage: Stage) -> None:
        if how == "has printed too much already":
            stage.printed = b"x" * 11
            caller = Caller(app)
            stage.grant()
            await caller.task
            assert (caller.status, caller.error["kind"]) == (500, "broken")
            await until(lambda: app._run is None and stage.rests)
            return
        caller = await answering(app, stage)
        if how == "loaded twice":
            stage.says(KIND.LOADED)
        else:
            stage.guest.streams.put("stderr", b"x" * 11)
        await caller.task
        assert caller.error["kind"] == "lost"
        assert (caller.status, caller.headers[b"retry-after"]) == (503, b"600"), "as estimated, within bounds"
        assert caller.error["position"] == 3
        await until(lambda: stage.rests == 1 and stage.volumes[0][1].is_released)
        assert set(stage.guest.told) == {"killed"}
        again = Caller(app)
        stage.grant()
        await until(lambda: len(stage.guests) == 2)
        assert [size for size, _ in stage.volumes] == [1 << 20, None]
        again.task.cancel()

    served(run, tmp_path, monkeypatch)


def test_a_program_that_is_too_long_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SOURCE_MAX", 3)

    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = Caller(app)
        stage.grant()
        await caller.task
        assert "app.py has more than 3 bytes" in caller.error["message"]
        assert (caller.status, b"retry-after" in caller.headers) == (500, False), "it helps nobody to try again"
        assert not stage.guests
        await until(lambda: stage.rests == 1)

    served(run, tmp_path, monkeypatch)


def test_an_office_that_is_away_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "RETRY_S", 0.0)

    async def run(app: ServedProgram, stage: Stage) -> None:
        stage.answers.put(Disconnected("the office is away"))
        caller = await answering(app, stage)
        assert stage.asked == 2
        stage.says(KIND.HEAD, 1, HEAD)
        stage.says(KIND.END, 1)
        await caller.task
        assert caller.is_whole

    served(run, tmp_path, monkeypatch)


def test_a_program_that_is_stopped_saves_first_and_takes_no_further_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where requests wait for it. What has saved ends with its input, and is not killed."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        first = await answering(app, stage)
        second = Caller(app)
        await until(lambda: app._served.waiting == 1)
        await app.close()
        assert stage.guest.told == ["asked to end", "saved", "its input ended"]
        for caller in (first, second):
            caller.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await caller.task
        assert stage.asked == 1

    served(run, tmp_path, monkeypatch, limits=Limits(concurrent=1))


def test_a_session_goes_on_unless_it_has_ended_or_asks_for_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        assert app.session.id == "s-0"
        sessions = cast("Any", stage)
        assert serve._session(sessions, "chat", TERMS).id == "s-0"
        stage.sessions["s-0"].leases = ("l-1",)
        with pytest.raises(InvalidRequest, match="session chat asks for something else"):
            serve._session(sessions, "chat", Terms(vram=1))
        app.session.is_over = True  # type: ignore[misc]
        assert serve._session(sessions, "chat", Terms(vram=1)).id == "s-1"
        assert serve._session(sessions, "chat", TERMS).id == "s-2", "it asked for too much, and never had a lease"
        assert stage.sessions["s-1"].is_over

    served(run, tmp_path, monkeypatch)


def test_who_asks_is_told_why_there_is_no_gpu_and_the_owner_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the server's machine, with their paths, were sent to whoever asked."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = Caller(app)
        stage.answers.put(CapacityExceeded("80GiB is more than any node has", do="Ask for less: `sublet status`."))
        await caller.task
        assert caller.status == 503
        assert caller.error["message"] == "this program gets no GPU: 80GiB is more than any node has"
        assert "80GiB is more than any node has. Ask for less: " in capsys.readouterr().err

    served(run, tmp_path, monkeypatch)


def test_who_asks_a_program_that_asks_for_too_much_is_not_told_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = Caller(app)
        error = CapacityExceeded("80GiB is more than any node has")
        error.transient = False
        stage.answers.put(error)
        await caller.task
        assert (caller.status, caller.error["kind"]) == (500, "impossible")
        assert caller.error["message"].endswith("never get what it asks for: 80GiB is more than any node has")
        assert caller.error["do"] == "Its owner has to ask for less."

    served(run, tmp_path, monkeypatch)


def test_a_place_in_the_queue_that_nobody_waits_for_is_given_up_and_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes as it is given up hears that no GPU is free yet; a refusal after that is the office's again."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        now_s = 0.0
        monkeypatch.setattr(app, "_now", lambda: now_s)
        first = Caller(app)
        await until(lambda: stage.waits)
        now_s = 20.0
        app._do(app._served.tick(now_s))
        await first.task
        assert first.error["kind"] == "no_lease"
        assert "Place 3" not in first.error["message"]
        second = Caller(app)
        await until(lambda: app._served.waiting)
        app._withdraw()
        await second.task
        assert second.error["kind"] == "no_lease"
        third = Caller(app)
        await until(lambda: stage.waits)
        stage.answers.put(InvalidRequest("the budget is used up"))
        await third.task
        assert third.error["kind"] == "refused"
        assert "the budget is used up" in third.error["message"]

    served(run, tmp_path, monkeypatch, limits=Limits(patience_s=20))


def test_a_browser_sees_place_and_estimate_in_the_words_of_the_sessions_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        now_s = 0.0
        monkeypatch.setattr(app, "_now", lambda: now_s)
        caller = Caller(app, headers=[(b"accept", b"text/html")])
        await until(lambda: stage.waits)
        now_s = 20.0
        app._do(app._served.tick(now_s))
        await caller.task
        text = caller.body.decode()
        said = "in about 1h 23m (nine tenths of such estimates were within about 2m): two are before you"
        assert f"<p>Place 3 in the queue, {said}</p>" in text
        app._withdraw()
        await until(lambda: not stage.waits)

    served(run, tmp_path, monkeypatch, limits=Limits(patience_s=20))


def test_a_server_that_is_stopped_leaves_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = Caller(app)
        await until(lambda: stage.waits)
        await app.close()
        assert not stage.waits
        caller.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await caller.task

    served(run, tmp_path, monkeypatch)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_program_runs_in_its_folder_and_that_of_another_tenant_in_one_of_its_tenants(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(app: ServedProgram, stage: Stage) -> None:
        stage.tenant = OWNER_TENANT if is_own else TenantId("ana")
        caller = await answering(app, stage)
        assert stage.cwd == [str(tmp_path) if is_own else ""]
        caller.task.cancel()

    served(run, tmp_path, monkeypatch)


def test_room_to_write_is_waited_for_only_while_something_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the loop would turn for as long as the program has its lease."""

    async def run(app: ServedProgram, stage: Stage) -> None:
        caller = await answering(app, stage)
        streams = stage.guest.streams
        streams.wants_write = True
        stage.guest.streams.put("stderr", b"x")
        await until(lambda: not streams._pieces)
        assert app._run is not None
        assert app._run.is_watched
        streams.wants_write = False
        await until(lambda: not app._run.is_watched)  # type: ignore[union-attr]
        assert not stage.loop.remove_writer(streams.fileno())
        caller.task.cancel()

    served(run, tmp_path, monkeypatch)
