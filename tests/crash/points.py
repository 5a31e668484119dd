"""Crash points: which system calls a story makes, and how to make one of them the last, or fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.crash.journal_program import HELD, REFUSED

ROOT: Final = Path(__file__).parents[2]

WRITES: Final = frozenset(
    (
        *("openat", "open", "creat", "write", "pwrite64", "pwritev", "pwritev2", "writev", "ftruncate", "truncate"),
        *("fallocate", "fsync", "fdatasync", "sync_file_range", "msync", "rename", "renameat", "renameat2", "link"),
        *("linkat", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "chmod", "fchmod", "fchown", "copy_file_range"),
    )
)
"""Calls that change what a later process finds, or that make it durable."""
FAULTS: Final = {"kill": "signal=KILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}
PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """The n-th call of this name in this story, and what becomes of it."""

    story: str
    call: str
    n: int
    fault: str

    @property
    def inject(self) -> tuple[str, ...]:
        """In strace's words."""
        return ("-e", f"inject={self.call}:{FAULTS[self.fault]}:when={self.n}")


class Zygote:
    """Runs stories in forks of one process that has everything loaded, each under strace from its first call on."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(self, story: str, place: Path, *, trace: str, inject: tuple[str, ...] = (), log: Path | None = None) -> int:
        """The exit status, negative for a signal. The story's folders are under ``place``."""
        order = {
            "story": story,
            "home": str(place / "home"),
            "anchors": str(place / "anchors"),
            "diary": str(place / "diary"),
        }
        self._tell(json.dumps(order).encode() + b"\n")
        child = int(self._hear())
        # The child asks for its parent until the answer is this one. Then strace holds it, and counts from here.
        held = ("-e", f"trace={trace},getppid", "-e", f"inject=getppid:retval={HELD}")
        tracer = subprocess.Popen(
            ["strace", "-qq", "-o", str(log or "/dev/null"), *held, *inject, "-p", str(child)], stderr=subprocess.PIPE
        )
        _, said = tracer.communicate(timeout=PATIENCE_S)
        if tracer.returncode:
            os.kill(child, signal.SIGKILL)
        status = int(self._hear())
        assert not tracer.returncode, f"strace did not take hold: {said.decode()}"
        return status

    def run_point(self, point: Point, place: Path) -> int:
        status = self.run(point.story, place, trace=point.call, inject=point.inject)
        allowed = {-9} if point.fault == "kill" else {0, REFUSED}
        assert status in allowed, f"{point}: exit status {status}"
        return status

    def points(self, story: str, place: Path, faults: tuple[str, ...] = tuple(FAULTS)) -> list[Point]:
        """Every write-type call of a whole run, found by running it."""
        log = place / "calls"
        status = self.run(story, place, trace=",".join(f"?{call}" for call in sorted(WRITES)), log=log)
        assert status == 0, f"{story} ends with {status} when nothing is wrong"
        counts = Counter(line.partition("(")[0] for line in log.read_text().splitlines() if "(" in line)
        return [
            Point(story, call, n, fault)
            for call, count in sorted(counts.items())
            if call in WRITES
            for n in range(1, count + 1)
            for fault in faults
        ]

    def _tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def _hear(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that runs the stories is gone"
        return line


@contextmanager
def zygote(program: str) -> Iterator[Zygote]:
    """``program`` is a module under ``tests``."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT / "src"), str(ROOT)) if p)},
    )
    try:
        yield Zygote(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(timeout=PATIENCE_S)
        process.stdout.close()
