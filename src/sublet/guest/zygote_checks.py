"""Checks what must hold of a zygote before guests are forked from it.

A fork copies the memory and one thread. Whatever another thread held (a lock, half of a change) stays so in the copy
for ever, and a device that was opened before the fork is shared by copies that believe it is theirs alone. So:

- no thread but the first. A pool of a linear algebra library that stops itself at a fork is tolerated, if a *trial*
  fork shows it: afterwards there is one thread here and one there, and the child computes correctly.
- no device open: of all devices only those that have no state. That is also the proof that CUDA was not initialised:
  its driver opens /dev/nvidiactl when it is, and keeps it open.
- torch, where it is loaded, says itself that it did not initialise CUDA, now or before a fork.

Each check says in words what is wrong, or nothing.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Final

STATELESS: Final = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
"""Devices that two processes may share and never notice."""
_MEMORY: Final = ("/dev/shm/", "/dev/zero", "/dev/mqueue/", "/dev/hugepages/")
"""What is mapped from below /dev and is no device."""
TRIAL_S: Final = 20.0
"""So long a trial child may take to compute a little; a deadlock takes longer."""
_SIDE: Final = 192
"""Matrices of this side are large enough that libraries share the work among threads."""


def find_fault(trial_s: float = TRIAL_S) -> str | None:
    """Why no guest may come from this process, or None. Forks once."""
    for check in (_threads_of_python, _device, _cuda):
        fault = check()
        if fault is not None:
            return fault
    return trial_fault(trial_s)


def _threads_of_python() -> str | None:
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"an import started the thread {others[0]}" if others else None


def _device() -> str | None:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    path = open_device(link for link in links if int(os.path.basename(link)) > 2)
    if path is not None:
        return f"an import opened {path}"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        path = mapped_device(file)
    return None if path is None else f"an import mapped {path}"


def open_device(links: Iterable[str]) -> str | None:
    """The first of these descriptors (as links in /proc) that is a device with a state of its own."""
    for link in links:
        try:
            path, mode = os.readlink(link), os.stat(link).st_mode
        except OSError:  # it was that of the listing itself
            continue
        if (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and path not in STATELESS:
            return path
    return None


def mapped_device(lines: Iterable[str]) -> str | None:
    """The first device in these lines of /proc/<pid>/maps."""
    for line in lines:
        path = line.split(maxsplit=5)[5].strip() if line.count("/dev/") else ""
        if path.startswith("/dev/") and not path.startswith(_MEMORY):
            return path
    return None


def _cuda() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return None
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        return "an import initialised CUDA"
    return None


# --------------------------------------------------------------------------------------------------- the trial fork


def trial_fault(trial_s: float = TRIAL_S, compute: Callable[[], str | None] | None = None) -> str | None:
    """Fork once, and let the child look at itself and compute. Why that went wrong, or None."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run_check(write, compute or compute_a_little)
    os.close(write)
    threads = forked_thread_count()
    report = _wait(read, pid, trial_s)
    if threads != 1:
        return f"{threads - 1} threads of native code did not stop at a fork"
    return None if report == "ok" else f"in a trial fork {report or 'the child ended without a word'}"


def forked_thread_count() -> int:
    """Threads of this process, of native code too."""
    return len(os.listdir("/proc/self/task"))


def compute_a_little() -> str | None:
    """What the libraries that are loaded share among threads, with a known outcome; what is wrong, or None."""
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "ones"):
        ones = numpy.ones((_SIDE, _SIDE))
        if float((ones @ ones).sum()) != float(_SIDE**3):
            return "numpy computed wrongly"
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "ones"):
        ones = torch.ones((_SIDE, _SIDE), dtype=torch.float64)
        if float((ones @ ones).sum()) != float(_SIDE**3) or float(torch.ones(1 << 18).sum()) != float(1 << 18):
            return "torch computed wrongly"
    return None


def _run_check(write: int, compute: Callable[[], str | None]) -> None:
    report = "the child could not look at itself"
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        count = forked_thread_count()
        report = f"the child had {count} threads" if count != 1 else compute() or "ok"
    except BaseException as error:  # noqa: BLE001 - nothing may return from here: this is a copy of the zygote
        report = f"{type(error).__name__}: {error}"
    os.write(write, report.encode("utf-8", "replace")[:1024])
    os._exit(0)


def _wait(read: int, pid: int, trial_s: float) -> str:
    poll = select.poll()
    poll.register(read, select.POLLIN)
    report = f"the child did not come to an end in {trial_s} s"
    if poll.poll(round(trial_s * 1000)):
        report = os.read(read, 4096).decode("utf-8", "replace")
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return report
