"""The machine a figure belongs to: what it has, what runs on it, and how busy it was with other things.

No host name, no address and no path is read: the result is for others to read.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.procs import cpu_seconds, tree, waited_for_seconds
from benchmarks.stats import percentile

__all__ = [
    "Disk",
    "Machine",
    "adopt_orphans",
    "busy_with_others",
    "disk_at",
    "home_for_state",
    "sublet_commit",
    "this_machine",
    "usable_cores",
    "versions_of",
]

_PR_SET_CHILD_SUBREAPER: Final = 36
_MEMORY_ONLY: Final = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cores: int
    """That this process may use."""
    cpu: str
    memory_bytes: int
    kernel: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Where both sides keep what must be durable."""

    filesystem: str
    fsync_us: float
    """Median of appending 4 KiB and fsync."""


def this_machine() -> Machine:
    return Machine(
        cores=len(usable_cores()),
        cpu=_cpu_model(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=(re.match(r"\d+\.\d+", platform.release()) or ["unknown"])[0],
        python=f"{platform.python_implementation()} {platform.python_version()}",
    )


def usable_cores() -> set[int]:
    """Those that this process may use: under ``taskset -c 0,1`` a row measures two cores of a larger machine."""
    return os.sched_getaffinity(0)


def versions_of(*distributions: str) -> dict[str, str]:
    """Installed versions, by distribution; SQLite's is that of the library Python is linked with."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def sublet_commit() -> str:
    """The commit of the tree that was measured; a plus sign says that src/ differs from it."""
    root = Path(__file__).parents[1]
    try:
        commit = _git(root, "rev-parse", "--short=10", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "src")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}+" if changed else commit


def home_for_state() -> Path:
    """A folder on a real disk: where temporary files live in memory, fsync would cost nothing and mean nothing."""
    for folder in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if folder.is_dir() and os.access(folder, os.W_OK) and _filesystem(folder) not in _MEMORY_ONLY:
            return folder
    raise RuntimeError("no writable folder on a disk was found; set TMPDIR to one.")


def disk_at(folder: Path, *, tries: int = 200) -> Disk:
    took: list[float] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(tries):
            before = time.perf_counter()
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
            took.append((time.perf_counter() - before) * 1e6)
    return Disk(filesystem=_filesystem(folder), fsync_us=percentile(took, 50))


def adopt_orphans() -> None:
    """From here on what loses its parent below us becomes our child: an office in the background, its supervisor and
    its guests leave whoever started them, and would else be counted as others'.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process may not adopt orphans")


def busy_with_others() -> Callable[[], float]:
    """Start counting; what comes back says how many of our cores were busy since then with work that was not ours.

    Ours is this process and all below it, once ``adopt_orphans`` was called. Work of the kernel on behalf of either
    side, such as writing back what was synced, counts as others'.
    """
    busy, own, at = _busy_seconds(), _own_seconds(), time.monotonic()

    def since() -> float:
        others = (_busy_seconds() - busy) - (_own_seconds() - own)
        return max(0.0, others / (time.monotonic() - at))

    return since


def _busy_seconds() -> float:
    """Of the cores that we may use, since the machine began."""
    ours = {f"cpu{core}" for core in usable_cores()}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of the living by their clocks, of the dead by what they left to who waited for them: a worker that ended leaves
    it to its supervisor, which lives."""
    _bury_the_adopted()
    left = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = left.ru_utime + left.ru_stime
    for pid in tree(os.getpid()):
        with contextlib.suppress(OSError):  # one may end between the two looks
            used += cpu_seconds(pid)
            if pid != os.getpid():
                used += waited_for_seconds(pid)
    return used


def _bury_the_adopted() -> None:
    """What a dead child used is ours only after it was waited for, and for those we adopted nobody else does that.

    Called between samples, when no command of a sample is still to be waited for.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _filesystem(folder: Path) -> str:
    """The type of the file system that holds the folder: the longest mount point above it."""
    best, kind = "", "unknown"
    real = os.path.realpath(folder)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()
