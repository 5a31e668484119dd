"""The loop: what is guarded costs its own and nobody else, and the law's own turn is nobody's to swallow."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet import background
from sublet.background import SHORTAGES
from sublet.clock import SystemClock
from sublet.node.loop import MISTAKES, READ, Accepting, Loop, log_internal_error, reading


class Mistake(Exception):
    """Ours."""


def fail(*_: object) -> None:
    raise Mistake


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(SystemClock())
    yield found
    found.close()


def test_what_is_guarded_ends_nobody_else(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[Exception] = []
    did: list[str] = []
    guarded = loop.guarded(told.append)
    guarded.soon(fail)
    guarded.at(0, fail)
    guarded.after(0.0, fail)
    loop.soon(lambda: did.append("soon"))
    loop.after(0.0, lambda: did.append("timer"))
    loop.turn(0.05)
    loop.turn(0.05)
    assert [type(error) for error in told] == [Mistake] * 3
    assert did == ["soon", "timer"]
    assert "Mistake" in capfd.readouterr().err, "the log has it"


def test_a_descriptor_nobody_can_serve_does_not_spin(loop: Loop) -> None:
    told: list[Exception] = []
    reading, writing = os.pipe()
    loop.guarded(told.append).watch(reading, READ, fail)
    os.write(writing, b"x")
    for _ in range(3):
        loop.turn(0.01)
    assert len(told) == 1
    os.close(reading)
    os.close(writing)


def test_not_even_what_is_told_of_it_can_end_the_loop(loop: Loop) -> None:
    loop.guarded(fail).soon(fail)
    loop.turn(0.01)


def test_what_was_cancelled_is_not_kept_until_its_moment(loop: Loop) -> None:
    """The law sets its alarm anew with every order, most often for minutes ahead."""
    rang: list[str] = []
    loop.after(0.0, lambda: rang.append("first"))
    kept = [loop.after(300.0, lambda: rang.append("never")) for _ in range(100)]
    for _ in range(5000):
        loop.after(300.0, fail).cancel()
    assert len(loop._timers) <= 2 * len(kept) + 100
    loop.turn(0.05)
    assert rang == ["first"]


def test_the_law_is_not_guarded(loop: Loop) -> None:
    loop.soon(fail)
    with pytest.raises(Mistake):
        loop.turn(0.01)


# ---- accepting


class Short:
    """A listening socket that fails so many times."""

    def __init__(self, sock: socket.socket, error: BaseException, times: int) -> None:
        self._sock, self._error, self.left = sock, error, times

    def accept(self) -> tuple[socket.socket, object]:
        if self.left:
            self.left -= 1
            raise self._error
        return self._sock.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "door.sock"))
        sock.listen()
        yield sock


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))
    monkeypatch.setattr(background, "_troubles", {})


def trouble_of(name: str) -> background.Trouble:
    """The one of that name. A thread of an earlier test, which may still end, has another."""
    [found] = [one for one in background.troubles() if one.name == name]
    return found


def turns_until(loop: Loop, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        loop.turn(0.01)


@pytest.mark.parametrize(
    "error", [*(OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)), MemoryError()], ids=repr
)
@pytest.mark.parametrize("is_guarded", [False, True], ids=["door of offices", "publish door"])
def test_what_cannot_be_accepted_now_is_accepted_later(
    loop: Loop, listening: socket.socket, capfd: pytest.CaptureFixture[str], error: BaseException, is_guarded: bool
) -> None:
    came: list[socket.socket] = []
    short = Short(listening, error, 3)
    with_mistakes = loop.guarded(lambda _: None) if is_guarded else loop
    accepting = Accepting(with_mistakes, "door", short, came.append)  # type: ignore[arg-type]
    accepting.begin()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(listening.getsockname())
        turns_until(loop, lambda: came)
    assert not short.left
    if not isinstance(error, BlockingIOError):  # that one only says that nobody is there
        trouble = trouble_of("door")
        assert (trouble.shortages, trouble.failing) == (3, 0)
        assert capfd.readouterr().err.count(f"door: {type(error).__name__}") == 1
    accepting.close()
    came[0].close()


def test_a_door_that_cannot_be_watched_again_is_watched_later(
    loop: Loop, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[socket.socket] = []
    accepting = Accepting(loop, "door", Short(listening, OSError(errno.EMFILE, "short"), 1), came.append)  # type: ignore[arg-type]
    accepting.begin()
    real, left = loop.watch, [3]

    def watch(*words: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        real(*words)

    monkeypatch.setattr(loop, "watch", watch)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(listening.getsockname())
        turns_until(loop, lambda: came)
    assert not left[0]
    accepting.close()
    came[0].close()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), Mistake()], ids=repr)
def test_a_connection_that_fails_closes_no_door(
    loop: Loop, listening: socket.socket, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    came: list[socket.socket] = []

    def take(sock: socket.socket) -> None:
        came.append(sock)
        if len(came) == 1:
            raise error

    accepting = Accepting(loop, "door", listening, take)
    accepting.begin()
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.connect(listening.getsockname())
        second.connect(listening.getsockname())
        turns_until(loop, lambda: len(came) == 2)
        assert first.recv(1) == b""
    accepting.close()
    came[1].close()
    assert type(error).__name__ in capfd.readouterr().err


def test_a_mistake_that_comes_again_is_counted_and_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(100):
        try:
            raise Mistake("the same")
        except Mistake as error:
            log_internal_error(error)
    assert capfd.readouterr().err.count("Traceback") == 1
    trouble = trouble_of(MISTAKES)
    assert (trouble.errors, trouble.last) == (100, "Mistake: the same")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "no memory"), OSError(errno.ENOBUFS, "no buffer space")], ids=repr
)
def test_what_cannot_be_read_now_is_read_later(loop: Loop, error: OSError) -> None:
    """Meanwhile nothing spins, and a change of what is waited for is kept."""
    told: list[Exception] = []
    came: list[bytes] = []
    ours, theirs = os.pipe()
    left = [3]

    def read() -> bytes:
        if left[0]:
            left[0] -= 1
            raise error
        return os.read(ours, 10)

    guarded = loop.guarded(told.append)

    def on_ready(events: int) -> None:
        guarded.change(ours, READ)
        came.append(reading(read))

    guarded.watch(ours, READ, on_ready)
    os.write(theirs, b"x")
    loop.turn(0.01)
    guarded.change(ours, 0)
    guarded.change(ours, READ)
    assert left[0] == 2
    turns_until(loop, lambda: came)
    assert came == [b"x"]
    assert told == []
    turns_until(loop, lambda: not trouble_of("supervisor_loop").failing)
    guarded.forget(ours)
    os.close(ours)
    os.close(theirs)


def test_what_is_forgotten_while_it_waits_is_not_watched_again(loop: Loop) -> None:
    ours, theirs = os.pipe()

    def on_ready(events: int) -> None:
        reading(fail_to_read)

    def fail_to_read() -> bytes:
        raise OSError(errno.ENOMEM, "no memory")

    guarded = loop.guarded(lambda _: None)
    guarded.watch(ours, READ, on_ready)
    os.write(theirs, b"x")
    loop.turn(0.01)
    guarded.forget(ours)
    os.close(ours)
    os.close(theirs)
    for _ in range(5):
        loop.turn(0.01)
