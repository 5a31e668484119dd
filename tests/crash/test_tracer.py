"""The tracer itself: what it spoils is spoiled, and where it spoils nothing nothing is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import pytest

from tests.crash.tracer import KINDS, NUMBERS, Fault, Run, run

pytestmark = [
    pytest.mark.crash,
    pytest.mark.needs("tracer"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

CALLS: Final = ("openat", "write", "writev", "pwrite64", "pwritev2", "sendfile", "copy_file_range", "fsync", "unlink")
PIECE: Final = b"0123456789"
WRITERS: Final[dict[str, Callable[[int, int], int]]] = {
    "write": lambda fd, _: os.write(fd, PIECE),
    "pwrite64": lambda fd, _: os.pwrite(fd, PIECE, os.fstat(fd).st_size),
    "writev": lambda fd, _: os.writev(fd, [PIECE[:6], PIECE[6:]]),
    "pwritev2": lambda fd, _: os.pwritev(fd, [PIECE], os.fstat(fd).st_size),
    "sendfile": lambda fd, source: os.sendfile(fd, source, 0, len(PIECE)),
    "copy_file_range": lambda fd, source: os.copy_file_range(source, fd, len(PIECE), 0),
}
HALF: Final = dict.fromkeys(WRITERS, 5) | {"writev": 3}
"""How much of it is taken; of several pieces it is half of the first."""
EIO, ENOSPC, EDQUOT = errno.EIO, errno.ENOSPC, errno.EDQUOT


def traced(
    work: Callable[[], int],
    *faults: Fault | None,
    after: Callable[[], int] = int,
    calls: Iterable[str] = CALLS,
) -> list[tuple[Run, int]]:
    """The work once with each fault, and what ``after`` says then. In a process with one thread, as the tracer wants
    it; the suite's own may have more."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), open(writer, "w", encoding="utf-8") as said:
            runs = ((run(work, calls, fault, listed=True), after()) for fault in faults or (None,))
            said.write(json.dumps([(dataclasses.asdict(one), what) for one, what in runs]))
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as says:
        answer = says.read()
    os.waitpid(child, 0)
    return [(Run.of(one), what) for one, what in json.loads(answer)]


def three_times(folder: Path, call: str = "write") -> Callable[[], int]:
    """What it wrote is its exit status, or a hundred and an error's number."""

    def work() -> int:
        source = os.open(folder / "source", os.O_RDONLY)
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        written = 0
        try:
            for _ in range(3):
                written += WRITERS[call](fd, source)
            os.fsync(fd)
        except OSError as error:
            return 100 + (error.errno or 0)
        return written

    (folder / "source").write_bytes(PIECE)
    return work


@pytest.mark.parametrize("call", WRITERS)
def test_a_tracer_that_spoils_nothing_changes_nothing(call: str, tmp_path: Path) -> None:
    """The work does and says what it does and says without one, and every call is seen, in order."""
    work, file = three_times(tmp_path, call), tmp_path / "file"
    [(found, _)] = traced(work)
    there = file.read_bytes()
    assert (found.status, found.struck, found.answered) == (30, None, None)
    child = os.fork()
    if child == 0:
        os._exit(work())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 30
    assert there == file.read_bytes() == PIECE * 3
    source = "source" if call == "copy_file_range" else "file"
    expected = [("openat", "source"), ("openat", "file"), *[(call, source)] * 3, ("fsync", "file")]
    assert [(one.call, one.path) for one in found.seen] == [(name, str(tmp_path / what)) for name, what in expected]
    assert [one.size for one in found.seen if one.call == call] == [10, 10, 10]


@pytest.mark.parametrize("call", WRITERS)
def test_what_is_to_be_spoiled_is_spoiled(call: str, tmp_path: Path) -> None:
    """The second of three calls: how the work ended, what it was told, and how much is on the disk."""
    half = HALF[call]
    expected = {
        "kill": (-signal.SIGKILL, None, 10),
        "killed after": (-signal.SIGKILL, 10, 20),
        "torn": (-signal.SIGKILL, half, 10 + half),
        "short": (20 + half, half, 20 + half),
        "full": (100 + ENOSPC, half, 10 + half),
        "EIO": (100 + EIO, -EIO, 10),
        "ENOSPC": (100 + ENOSPC, -ENOSPC, 10),
        "EDQUOT": (100 + EDQUOT, -EDQUOT, 10),
    }
    assert set(expected) == set(KINDS)
    faults = [Fault(call, 2, kind) for kind in KINDS]
    found = traced(three_times(tmp_path, call), *faults, after=lambda: (tmp_path / "file").stat().st_size)
    for kind, (one, size) in zip(KINDS, found, strict=True):
        assert one.struck == 3, "two files are opened, and one piece is written before it"
        assert (one.status, one.answered, size) == expected[kind], kind


def test_what_a_torn_write_leaves_ends_at_a_grain(tmp_path: Path) -> None:
    """And where half of it is less than that, nothing of it is there."""
    faults = [Fault("write", 2, "torn", grain=grain) for grain in (4, 5, 8)]
    found = traced(three_times(tmp_path), *faults, after=lambda: (tmp_path / "file").stat().st_size)
    assert [(one.status, size) for one, size in found] == [(-signal.SIGKILL, size) for size in (14, 15, 10)]


def test_a_call_that_fails_is_not_made(tmp_path: Path) -> None:
    def work() -> int:
        try:
            os.unlink(tmp_path / "file")
        except OSError as error:
            return error.errno or 0
        return 0

    (tmp_path / "file").touch()
    faults = Fault("unlink", 1, "EIO"), Fault("unlink", 2, "EIO")
    (first, left), (second, gone) = traced(work, *faults, after=lambda: len(list(tmp_path.iterdir())))
    assert (first.status, first.struck, left) == (EIO, 0, 1)
    assert (second.status, second.struck, gone) == (0, None, 0)


def test_who_writes_on_after_a_short_write_loses_nothing_and_writes_nothing_twice(tmp_path: Path) -> None:
    """The registers are the program's own again, on which a compiler may rely."""

    def work() -> int:
        with open(tmp_path / "file", "wb", buffering=0) as file:
            left = memoryview(PIECE * 100)
            while left:
                left = left[file.write(left) or 0 :]
        return 0

    [(found, _)] = traced(work, Fault("write", 1, "short"))
    assert (found.status, found.answered) == (0, 500)
    assert [one.size for one in found.seen if one.call == "write"] == [1000, 500]
    assert (tmp_path / "file").read_bytes() == PIECE * 100


def test_of_openings_only_those_with_the_flags_count_if_any_are_named(tmp_path: Path) -> None:
    """And only they stop the work."""
    (tmp_path / "file").touch()
    opened = (os.O_RDONLY, os.O_RDWR, os.O_RDONLY, os.O_WRONLY, os.O_RDWR)

    def work() -> int:
        for at, flags in enumerate(opened):
            try:
                os.close(os.open(tmp_path / "file", flags))
            except OSError:
                return at
        return len(opened)

    [(whole, _)] = traced(work)
    seen = [one.flags for one in whole.seen]
    assert [flags & os.O_ACCMODE for flags in seen] == list(opened)
    found = traced(work, *(Fault("openat", 2, "EIO", flags=flags) for flags in seen[1:4]), calls=("openat",))
    assert [(one.status, one.struck) for one, _ in found] == [(4, 1), (2, 1), (5, None)]
    assert [len(one.seen) for one, _ in found] == [2, 2, 1]


def test_threads_are_followed_and_counted_together(tmp_path: Path) -> None:
    """A kill in one of them ends all; a fault of the first thread leaves the others alone."""

    def work() -> int:
        fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for thread in (threading.Thread(target=os.write, args=(fd, PIECE)) for _ in range(4)):
            thread.start()
            thread.join()
        try:
            os.write(fd, PIECE)
        except OSError as error:
            return error.errno or 0
        return 0

    faults = None, Fault("write", 3, "kill"), Fault("write", 1, "EIO", first_thread=True)
    whole, killed, failed = traced(work, *faults, after=lambda: (tmp_path / "file").stat().st_size)
    assert [one.first_thread for one in whole[0].seen if one.call == "write"] == [False] * 4 + [True]
    assert [(one.status, size) for one, size in (whole, killed, failed)] == [(0, 50), (-signal.SIGKILL, 20), (EIO, 40)]


def test_children_are_followed_into_other_programs_and_end_with_the_work(tmp_path: Path) -> None:
    def work() -> int:
        subprocess.run(["/bin/sh", "-c", f"echo hello > {tmp_path}/file"], check=True)
        left = subprocess.Popen(["/bin/sleep", "300"])
        (tmp_path / "left").write_text(str(left.pid))
        left.returncode = 0  # or its end would be complained of
        return 5

    [(found, _)] = traced(work)
    assert found.status == 5
    assert str(tmp_path / "file") in {one.path for one in found.seen}
    assert (tmp_path / "file").read_text() == "hello\n"
    assert not is_there(int((tmp_path / "left").read_text()))


def is_there(pid: int) -> bool:
    """Living; somebody else may be about to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_works_own_signals_reach_it() -> None:
    def work() -> int:
        met: list[int] = []
        signal.signal(signal.SIGUSR1, lambda *_: met.append(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        return len(met)

    def ended() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert [one.status for one, _ in traced(work)] == [1]
    assert [one.status for one, _ in traced(ended)] == [-signal.SIGTERM]


def test_who_has_several_threads_does_not_fork() -> None:
    wait = threading.Event()
    other = threading.Thread(target=wait.wait)
    other.start()
    try:
        with pytest.raises(AssertionError, match="other threads"):
            run(lambda: 0, CALLS)
    finally:
        wait.set()
        other.join()


def test_the_numbers_are_this_systems() -> None:
    """As its headers say, where there are any; the most important ones were used above."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    lines: Iterable[str] = header.read_text().splitlines() if header.exists() else ()
    said = dict(line.split()[1:] for line in lines if line.startswith("#define __NR_"))
    assert {name: int(said.get(f"__NR_{name}", number)) for name, number in NUMBERS.items()} == NUMBERS
