"""Background threads and tasks: what a shortage does to a loop, what an error does, and that all use the one helper."""

from __future__ import annotations

import ast
import asyncio
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from sublet import background
from sublet.background import (
    PAUSES_S,
    SHORTAGES,
    Guard,
    accept_connections,
    is_shortage,
    shortage_explained,
    start_task,
    start_thread,
    start_timer,
    troubles,
)
from sublet.errors import SubletError
from tests.shortages import fail_accepts
from tests.unit.package_source import LOOKS_AT_SOURCE, source_files

SHORT: Final = [OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)] + [MemoryError("no memory")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_troubles", {})
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))


def the_trouble(name: str) -> background.Trouble:
    return next(one for one in troubles() if one.name == name)


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    """What was logged of it. A thread of an earlier test, which may still end, logs under its own name."""
    return [record for record in caplog.records if record.getMessage().startswith(f"{name}: ")]


# ------------------------------------------------------------------------------------------------------- the guard


@pytest.mark.parametrize("error", SHORT, ids=repr)
def test_what_passes_by_itself_is_a_shortage(error: BaseException) -> None:
    assert is_shortage(error)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EBADF, "bad"), KeyError("x")], ids=repr)
def test_other_errors_are_none(error: BaseException) -> None:
    assert not is_shortage(error)


def test_that_no_thread_can_be_started_is_a_shortage() -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError) as caught:
            start_thread("never", lambda: None)
    assert is_shortage(caught.value)


def test_pauses_grow_to_a_bound_and_begin_anew_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES_S", PAUSES_S)
    guard = Guard("loop")
    pauses = [guard.failed(SHORT[0]) for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[0] == PAUSES_S[0]
    assert pauses[-1] == PAUSES_S[-1] <= 1.0
    guard.passed()
    assert guard.failed(SHORT[0]) == PAUSES_S[0]


def test_the_first_failure_is_logged_and_every_one_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("loop")
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            guard.failed(OSError(errno.EMFILE, "Too many open files"))
        guard.failed(KeyError("x"))
        assert the_trouble("loop").failing == 1
        guard.passed()
        for _ in range(50):  # it comes back within the minute
            guard.failed(OSError(errno.EMFILE, "Too many open files"))
            guard.passed()
    said = [record.getMessage() for record in logged(caplog, "loop")]
    assert said == ["loop: OSError: [Errno 24] Too many open files; it goes on", "loop: works again after 51 failures"]
    found = the_trouble("loop")
    assert (found.shortages, found.errors, found.failing) == (100, 1, 0)


def test_a_mistake_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        Guard("loop").failed(error)
    (record,) = logged(caplog, "loop")
    assert record.exc_info is not None
    assert record.levelno == logging.ERROR


# -------------------------------------------------------------------------------------------------- threads, tasks


@pytest.mark.parametrize("error", [*SHORT, KeyError("x"), SystemExit(1)], ids=repr)
def test_a_thread_is_started_again_until_it_returns(error: BaseException) -> None:
    turns = []

    def run() -> None:
        turns.append(1)
        if len(turns) < 5:
            raise error

    thread = start_thread("loop", run, again=True)
    thread.join(20)
    assert len(turns) == 5
    found = the_trouble("loop")
    assert (found.shortages + found.errors, found.failing) == (4, 0)
    assert thread.daemon
    assert thread.name == "sublet-loop"


def test_a_thread_that_ends_by_an_error_says_so(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []

    def run() -> None:
        raise KeyError("x")

    start_thread("once", run, failed=told.append).join(20)
    assert [type(error) for error in told] == [KeyError]
    assert [record.getMessage() for record in logged(caplog, "once")] == ["once: KeyError: 'x'; it has ended"]
    assert the_trouble("once").failing == 1


def test_a_timer_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def call() -> None:
        raise KeyError("x")

    timer = start_timer("later", 0.0, call)
    timer.join(20)
    assert the_trouble("later").errors == 1
    assert timer.daemon


@pytest.mark.parametrize("error", [*SHORT, KeyError("x")], ids=repr)
def test_a_task_is_started_again_until_it_returns(error: BaseException) -> None:
    turns = []

    async def work() -> None:
        turns.append(1)
        await asyncio.sleep(0)
        if len(turns) < 5:
            raise error

    async def story() -> None:
        await asyncio.wait_for(start_task("loop", work, again=True), 20)

    asyncio.run(story())
    assert len(turns) == 5
    assert the_trouble("loop").failing == 0


def test_a_task_that_ends_by_an_error_says_so_and_one_that_is_cancelled_does_not() -> None:
    told: list[BaseException] = []

    async def fail() -> None:
        raise KeyError("x")

    async def story() -> None:
        await start_task("once", fail, failed=told.append)
        endless = start_task("endless", asyncio.Event().wait, failed=told.append)
        await asyncio.sleep(0)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless

    asyncio.run(story())
    assert [type(error) for error in told] == [KeyError]
    assert {"once", "endless"}.intersection(one.name for one in troubles()) == {"once"}


# ---------------------------------------------------------------------------------------------------------- accept


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - what is waited for is no event
            await asyncio.sleep(0.002)


class _Door:
    """A listening socket, the loop that accepts on it, and what came."""

    def __init__(self, place: Path) -> None:
        self.path = str(place / "door.sock")
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(self.path)
        self.listening.listen()
        self.listening.setblocking(False)
        self.came: list[socket.socket] = []

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.path)
        return sock


@pytest.mark.parametrize("error", [*SHORT, OSError(errno.ECONNABORTED, "gone"), OSError(errno.EPROTO, "?")], ids=repr)
def test_accepting_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def story() -> None:
        door = _Door(tmp_path)
        fail_accepts(monkeypatch, error)
        task = start_task("door", lambda: accept_connections("door", door.listening, door.came.append))
        with door.connect(), door.connect():
            await until(lambda: len(door.came) == 2)
        task.cancel()
        for sock in (*door.came, door.listening):
            sock.close()
        assert the_trouble("door").failing == 0

    asyncio.run(story())


def test_a_closed_socket_ends_the_accepting_loudly(tmp_path: Path) -> None:
    async def story() -> None:
        door, told = _Door(tmp_path), list[BaseException]()
        door.listening.close()
        work = start_task(
            "door", lambda: accept_connections("door", door.listening, door.came.append), failed=told.append
        )
        await asyncio.wait_for(work, 20)
        assert [type(error) for error in told] in ([OSError], [ValueError])

    asyncio.run(story())


def test_one_connection_that_fails_closes_no_door(tmp_path: Path) -> None:
    async def story() -> None:
        door, turns = _Door(tmp_path), []

        def take(sock: socket.socket) -> None:
            turns.append(sock)
            if len(turns) == 1:
                raise KeyError("x")
            door.came.append(sock)

        task = start_task("door", lambda: accept_connections("door", door.listening, take))
        with door.connect() as first, door.connect():
            await until(lambda: door.came)
            assert first.recv(1) == b""
        task.cancel()
        for sock in (*door.came, door.listening):
            sock.close()

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------------ lint


@dataclass(frozen=True, kw_only=True, slots=True)
class Exemption:
    module: str
    call: str
    count: int
    reason: str


EXEMPT: Final = (
    Exemption(module="background", call="Thread", count=1, reason="the helper itself"),
    Exemption(module="background", call="Timer", count=1, reason="the helper itself"),
    Exemption(module="background", call="create_task", count=1, reason="the helper itself"),
    Exemption(
        module="client.aio_guests",
        call="run_in_executor",
        count=1,
        reason="awaited in the same function; what it raises is raised there",
    ),
    Exemption(
        module="compute.aio_calls",
        call="ensure_future",
        count=1,
        reason="handed to the caller, whose future it is",
    ),
    Exemption(
        module="client.aio_fabric",
        call="create_task",
        count=1,
        reason="closing is awaited by whoever closes; left alone, it hands what it could not give back to a thread",
    ),
    Exemption(
        module="guest.kernel",
        call="create_task",
        count=1,
        reason="runs in the context of cells; kept and answered by the connection",
    ),
    Exemption(
        module="guest.kernel_app",
        call="create_task",
        count=1,
        reason="runs in the context of cells; awaited in the same function",
    ),
    Exemption(
        module="testing.replica_conformance",
        call="Thread",
        count=1,
        reason="joined in the same function, which then looks at what each has left",
    ),
    Exemption(
        module="guest.served",
        call="Thread",
        count=3,
        reason="in a guest: the loop of an application, workers that tell each failure to who asked, the last save",
    ),
    Exemption(
        module="guest.served",
        call="run_in_executor",
        count=1,
        reason="awaited by the application that sends",
    ),
    Exemption(
        module="guest.served",
        call="create_task",
        count=1,
        reason="in a guest: one request to an application; each failure is told to who asked",
    ),
    Exemption(
        module="studio.serve",
        call="create_task",
        count=1,
        reason="waits until a caller is gone; cancelled in the same function, and its end has a callback",
    ),
    *(
        Exemption(
            module="studio.turns",
            call=call,
            count=1,
            reason="awaited by the request that it answers; left alone by it, what it raises is taken",
        )
        for call in ("ThreadPoolExecutor", "create_task", "run_in_executor")
    ),
    Exemption(
        module="simulate.find",
        call="Process",
        count=1,
        reason="its end is read from its pipe, and what it raised is raised where its result is asked for",
    ),
    Exemption(
        module="durable.rebuild",
        call="Thread",
        count=1,
        reason="made for the attributes that a new one has; it is never started",
    ),
    *(
        Exemption(
            module=f"state.{module}",
            call="ThreadPoolExecutor",
            count=1,
            reason="left at the end of the block, in which every result is asked for",
        )
        for module in ("checkpoints.reader", "transfer.memory", "transfer.changes", "transfer.shared_arrays")
    ),
)
"""Starts of threads and tasks beside the helper. Each has a reason; one that is no longer there is an error."""

STARTS: Final = frozenset(
    (
        *("Thread", "Timer", "Process", "start_new_thread", "start_joinable_thread"),
        *("ThreadPoolExecutor", "ProcessPoolExecutor"),
        *("create_task", "ensure_future", "run_in_executor", "TaskGroup"),
        *("start_server", "start_unix_server", "create_server", "create_unix_server"),
    )
)
OWN: Final = frozenset(("node.loop.Timer",))
"""Names of ours that are called like one of these."""


def starts_in(module: str, nodes: Iterable[ast.AST]) -> Iterator[str]:
    own = {name.rpartition(".")[2] for name in OWN if name.startswith(module + ".")}
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in STARTS - own:
                yield name
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                if name in ("Thread", "Timer"):
                    yield name


@LOOKS_AT_SOURCE
def test_nothing_is_started_beside_the_helper() -> None:
    found: dict[tuple[str, str], int] = {}
    for file in source_files():
        for name in starts_in(file.module, file.nodes):
            found[file.module, name] = found.get((file.module, name), 0) + 1
    allowed = {(one.module, one.call): one.count for one in EXEMPT}
    assert all(one.reason for one in EXEMPT)
    assert found == allowed, (
        "start threads and tasks with sublet.background (start_thread, start_timer, start_task), or list the exemption"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import threading\nthreading.Thread(target=print).start()",
        "from threading import Thread\nThread(target=print).start()",
        "import asyncio\nasyncio.create_task(work())",
        "loop.create_task(work())",
        "asyncio.ensure_future(work())",
        "loop.run_in_executor(None, work)",
        "class Mine(threading.Thread): pass",
    ],
)
def test_the_lint_sees_each_way(text: str) -> None:
    assert list(starts_in("module", ast.walk(ast.parse(text))))


def test_a_thread_that_never_takes_its_first_step_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that found no memory for it: the interpreter drops it, and ``Thread.start`` would wait without end."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    begun: list[Callable[[], object]] = []

    def starts_nothing(bootstrap: Callable[[], object], *_: object, **__: object) -> None:
        begun.append(bootstrap)

    monkeypatch.setattr(background, "START_S", 0.05)
    monkeypatch.setattr(threading, name, starts_nothing)
    ran: list[bool] = []
    with pytest.raises(RuntimeError) as caught:
        start_thread("dropped", lambda: ran.append(True))
    assert is_shortage(caught.value)
    monkeypatch.undo()
    late: Any = begun[0]
    late.__self__.run()  # it comes after all, when nobody counts on it any more
    assert not ran


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
def test_a_shortage_of_a_program_is_told_with_what_to_do(error: Exception) -> None:
    """A bare ``OSError`` says neither of whose descriptors it speaks nor what helps."""
    with pytest.raises(SubletError, match="this program is short of a resource") as told, shortage_explained():
        raise error
    assert "ulimit -n" in told.value.do
    assert told.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "x"), RuntimeError("x"), SubletError("x"), KeyError()]
)
def test_other_errors_of_a_program_are_left_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as told, shortage_explained():
        raise error
    assert told.value is error
