"""Crash points: which system calls a story makes, and how to make one of them the last, or fail, or do half of it.

Of kinds of calls, kinds of files and faults the suite meets every pair, at points that are drawn from a seed
(:func:`each_kind`); ``SUBLET_CRASH_ALL=1`` meets every point.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.crash.journal_program import REFUSED
from tests.crash.tracer import Fault, Run, Seen

__all__ = [
    "ALL",
    "FAULTS",
    "KILLS",
    "WRITES",
    "Judged",
    "Point",
    "Zygote",
    "each_kind",
    "lay_out",
    "pairs_of",
    "points_in",
    "zygote",
]

ROOT: Final = Path(__file__).parents[2]
ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"

WRITES: Final = frozenset(
    (
        *("openat", "open", "creat", "write", "pwrite64", "pwritev", "pwritev2", "writev", "ftruncate", "truncate"),
        *("fallocate", "fsync", "fdatasync", "sync_file_range", "msync", "rename", "renameat", "renameat2", "link"),
        *("linkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "chmod", "fchmod"),
        *("fchmodat", "fchown", "copy_file_range", "sendfile"),
    )
)
"""Calls that change what a later process finds, or that make it durable."""
FAULTS: Final = ("kill", "EIO", "ENOSPC")
HALVES: Final = ("short", "torn", "full")
"""What else becomes of a call that may take less than it was given."""
KILLS: Final = ("kill", "torn", "killed after")
ELSEWHERE: Final = ("/sys/", "/proc/sys/", "/proc/self/mountinfo", "/proc/self/fdinfo/", "/dev/pts/", "/dev/null")
"""What is asked of the system and stands on no disk; it takes more calls on a machine that has more devices."""
DRAWN: Final = re.compile(r"(?<=/)[0-9a-f]{16}(?=/|$)")
"""A name that is drawn by chance and says nothing."""
COUNTED: Final = re.compile(r"[0-9a-f]{16,}|\d+")
"""What differs between files of one kind: a number, or the hash of what is in it."""
PATIENCE_S: Final = 240.0


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """The n-th call of this name in this story (and with these flags, of ``openat``), and what becomes of it."""

    story: str
    call: str
    n: int
    fault: str
    flags: int = -1
    place: str = field(default="", compare=False)
    """The file that it is about, with ``#`` for what differs between files of one kind."""

    def spoil(self, *, first_thread: bool = False) -> Fault:
        flags = self.flags if self.flags >= 0 else None
        return Fault(self.call, self.n, self.fault, first_thread, flags=flags)


class Zygote:
    """Runs stories in forks of one process that has everything loaded, each traced from its first call on."""

    def __init__(self, process: subprocess.Popen[bytes], grain: int) -> None:
        self._process, self._grain = process, grain

    def run(
        self, story: str, place: Path, fault: Fault | None = None, *, calls: Iterable[str] = (), listed: bool = False
    ) -> Run:
        """What came of it. The story's folders are under ``place``; the call of the fault is seen in any case."""
        fault = fault and dataclasses.replace(fault, grain=self._grain)
        order = {
            "story": story,
            "place": str(place),
            "calls": sorted({*calls, *([fault.call] if fault else ())}),
            "fault": dataclasses.asdict(fault) if fault else None,
            "listed": listed,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Run.of(json.loads(self._hear()))

    def run_point(self, point: Point, place: Path) -> int:
        """The exit status. The story must come to its point, and what is written half must be finished."""
        found = self.run(point.story, place, point.spoil())
        allowed = {-9} if point.fault in KILLS else {0} if point.fault == "short" else {0, REFUSED}
        assert found.status in allowed, f"{point}: exit status {found.status}"
        assert found.struck is not None, f"{point}: it did not come to that"
        return found.status

    def points(self, story: str, place: Path) -> list[Point]:
        """Every write-type call of a whole run, found by running it."""
        found = self.run(story, place, calls=WRITES, listed=True)
        assert found.status == 0, f"{story} ends with {found.status} when nothing is wrong"
        return sorted(points_in(story, found.seen, grain=self._grain))

    def _hear(self) -> bytes:
        """A line. Who is killed takes what it traces with it."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            self._process.kill()
            raise AssertionError("a story does not come to its end")
        line = self._process.stdout.readline()
        assert line, "the process that runs the stories is gone"
        return line


def points_in(
    story: str, seen: Iterable[Seen], faults: tuple[str, ...] = (*FAULTS, *HALVES), *, grain: int = 1
) -> Iterator[Point]:
    """Each call with each fault that it can have. There are halves only of what is written to a file."""
    counts: Counter[tuple[str, int]] = Counter()
    for one in seen:
        counts[one.call, one.flags] += 1
        if one.path.startswith(ELSEWHERE):
            continue
        size = one.size if one.path.startswith("/") else 0
        for fault in faults:
            if fault not in HALVES or size >= 2 * (grain if fault == "torn" else 1):
                place = COUNTED.sub("#", one.path)
                yield Point(story, one.call, counts[one.call, one.flags], fault, one.flags, place)


def each_kind(points: Iterable[Point], seed: int) -> list[Point]:
    """Each kind of call on each kind of file, each fault with each call, and each fault on each kind of file: every
    pair of the three is met, not their product. All of them with ``SUBLET_CRASH_ALL=1``."""
    drawn = sorted(points)
    random.Random(seed).shuffle(drawn)
    met = set[tuple[str, ...]]()
    chosen = list[Point]()
    for point in drawn:
        if ALL or not pairs_of(point) <= met:
            chosen.append(point)
            met |= pairs_of(point)
    return sorted(chosen)


def pairs_of(point: Point) -> set[tuple[str, ...]]:
    call = f"{point.call} {point.flags}"
    pairs = (("call, file", call, point.place), ("call, fault", call, point.fault))
    return {(point.story, *pair) for pair in (*pairs, ("file, fault", point.place, point.fault))}


class Judged:
    """Which disks were judged. Many points leave one and the same behind: what was answered is on it as well, and a
    judge sees nothing else, so it is asked once about each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.points = 0

    def met(self, place: Path, *words: object) -> bool:
        """Whether this is an old one. ``words``: what else the judge is told."""
        self.points += 1
        found = hashlib.blake2b(repr(words).encode())
        _digest(os.fspath(place), found)
        before = len(self._seen)
        self._seen.add(found.digest())
        return len(self._seen) == before

    def __str__(self) -> str:
        return f"{self.points} points, {len(self._seen)} disks"


def _digest(folder: str, into: hashlib.blake2b) -> None:
    """Names, modes and contents of all that is below."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda one: one.name)
    into.update(f"{DRAWN.sub('~', folder)} {os.stat(folder).st_mode} {len(entries)};".encode())
    for one in entries:
        if one.is_dir(follow_symlinks=False):
            _digest(one.path, into)
            continue
        state = one.stat(follow_symlinks=False)
        into.update(f"{DRAWN.sub('~', one.path)} {state.st_mode} {state.st_size};".encode())
        with open(one.path, "rb", buffering=0) as file:
            into.update(file.read())


def lay_out(start: Path, place: Path) -> None:
    """The folder as it was, with its modes and without anything that somebody has left in it. A thousand times over:
    what ``shutil`` does besides takes longer than all the rest."""
    if place.exists():
        _clear(os.fspath(place))
    _copy(os.fspath(start), os.fspath(place))


def _clear(folder: str) -> None:
    os.chmod(folder, 0o700)  # what is kept is read-only, also for who is not root
    with os.scandir(folder) as found:
        for one in list(found):
            _clear(one.path) if one.is_dir(follow_symlinks=False) else os.unlink(one.path)
    os.rmdir(folder)


def _copy(start: str, place: str) -> None:
    os.mkdir(place, 0o700)
    with os.scandir(start) as found:
        for one in found:
            target = os.path.join(place, one.name)
            if one.is_dir(follow_symlinks=False):
                _copy(one.path, target)
                continue
            with open(one.path, "rb", buffering=0) as source, open(target, "xb", buffering=0) as copy:
                copy.write(source.read())
                os.fchmod(copy.fileno(), one.stat(follow_symlinks=False).st_mode & 0o7777)
    os.chmod(place, os.stat(start).st_mode & 0o7777)


@contextmanager
def zygote(program: str, *, grain: int = 1) -> Iterator[Zygote]:
    """``program`` is a module under ``tests``; ``grain``: what its format takes for written whole or not at all."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT / "src"), str(ROOT)) if p)},
    )
    try:
        yield Zygote(process, grain)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(timeout=PATIENCE_S)
        process.stdout.close()
