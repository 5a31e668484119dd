"""Starts the office of this machine, once, if none answers.

The office is a process of its own. It gets a session of its own, so an interrupt at the terminal or of a notebook's
kernel does not reach it; its parent is not the caller, so it outlives a kernel's restart and leaves no zombie; its
standard output and error go to a log in the state folder. The program that starts it holds a lock, so twenty programs
that connect at once start one office, and nineteen find it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sublet.client.home import log_path, make_private_dir, runtime_dir, socket_path, start_lock_path
from sublet.errors import Disconnected, JournalError, OfficeElsewhere, SubletError, Unsupported
from sublet.wire import unix

if TYPE_CHECKING:
    from sublet.wire.zygote import Warm

START_PATIENCE_S: Final = 120.0
"""From asking for an office to its first answer, while its process lives. It takes about a second; a machine that runs
twenty other programs may need half a minute, and an office that is given up too early goes on all the same."""
STARTING_S: Final = 30.0
"""Another office that has the journal and does not answer may be starting for so long; an older one has lost its
socket."""
LOG_BYTES_MAX: Final = 4 * 1024 * 1024
"""A longer log is put aside (one old one is kept) before an office is started."""
EMBEDDED: Final = ("up", "--embedded")
"""The command line of an embedded office: it ends by itself when it is idle."""
_IN_USE: Final = re.compile(re.escape(JournalError.IN_USE) + r"(\w+)\)")
_LOOK_EVERY_S: Final = 0.02
_LOG_TAIL_BYTES: Final = 2000
_ROOM_BYTES: Final = 256 * 1024
"""A new journal and a log that says why there is none need less."""

# The shell is there for one thing: it forks the office and ends, so that the office belongs to no process that may be
# killed with all its children. It says the office's pid, the only thing about it that is not in the log.
_DETACH: Final = '"$@" </dev/null >&2 & echo $!'


def ensure_office(
    home: Path,
    patience_s: float = START_PATIENCE_S,
    *,
    words: Sequence[str] = EMBEDDED,
    wish: Warm | None = None,
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Return when the office of this home accepts connections, having started it if need be.

    ``words`` is the command line of an office that is started: `sublet up` names its settings there. With a ``wish`` it
    begins by having a warm interpreter made. ``begun`` is called when a process was started for it.
    """
    path = socket_path(home)
    with _errors_as_disconnected(home):
        if answers(path):
            return
    if sys.platform != "linux":
        raise Unsupported(
            "an office runs on Linux only",
            do='Connect to one elsewhere: set SUBLET_URL, or sublet.connect("https://gpu.example.org").',
        )
    until = time.monotonic() + patience_s
    make_private_dir(home)
    make_private_dir(runtime_dir(home))
    with _errors_as_disconnected(home), _start_lock(start_lock_path(home), path, until) as mine:
        if mine and not answers(path):
            _start(home, path, until, words, wish, begun)


@contextlib.contextmanager
def _errors_as_disconnected(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = (error.strerror or "cannot be used").lower()
        raise Disconnected(
            f"the office could not be started: {why}: {error.filename or home}",
            do="See that the folder can be written and that there is room, or set SUBLET_HOME to another one.",
            sent=False,
        ) from error


def answers(path: Path) -> bool:
    """Whether an office (or supervisor) of this user accepts connections there. A socket left by a dead one does not.

    Raises ``InvalidRequest`` where it could be another user's."""
    try:
        unix.connect(os.fspath(path), timeout_s=1.0).close()
    except TimeoutError:  # it listens, and many are before this one
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _start_lock(lock: Path, path: Path, until: float) -> Iterator[bool]:
    """Hold the right to start (True), or see that another process did (False)."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if answers(path):
                    yield False
                    return
                if time.monotonic() >= until:
                    raise Disconnected(
                        "another program has been starting the office and it does not answer", sent=False
                    ) from None
                time.sleep(_LOOK_EVERY_S)
            else:
                yield True
                return
    finally:
        os.close(handle)


def _start(
    home: Path, path: Path, until: float, words: Sequence[str], wish: Warm | None, begun: Callable[[], None]
) -> None:
    log = log_path(home)
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        log_start = os.fstat(handle).st_size
        pid = _spawn(home, handle, words, wish)
    finally:
        os.close(handle)
    begun()
    begun_s = time.monotonic()
    failed: SubletError | None = None
    with _watched(pid) as gone:
        while not answers(path):
            if failed is None and gone():
                failed = _failed(log, log_start, "the office could not be started")
            # An office that an interrupted program has started may hold the journal and not answer yet.
            now_s = time.monotonic()
            if failed is not None and (now_s >= until or not _another_starts(failed.message, now_s - begun_s)):
                raise failed
            if now_s >= until:
                raise _failed(log, log_start, f"the office was started (pid {pid}) but does not answer")
            time.sleep(_LOOK_EVERY_S)


def _another_starts(why: str, waited_s: float) -> bool:
    """Whether an office did not come up since one that was started shortly before has the journal."""
    found = _IN_USE.search(why)
    if found is None:
        return False
    age_s = waited_s  # where no process is known: it has the journal, and has not yet written down its pid
    with contextlib.suppress(OSError), open(f"/proc/{found[1]}/stat", encoding="utf-8", errors="replace") as file:
        began_ticks = int(file.read().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_ticks / os.sysconf("SC_CLK_TCK")
    return age_s < STARTING_S


def _spawn(home: Path, log: int, words: Sequence[str], wish: Warm | None) -> int:
    from sublet.wire.codec import dumps  # who finds an office does without these
    from sublet.wire.program_files import environment_for_root, is_root
    from sublet.wire.version import AS_TENANT_VARIABLE
    from sublet.wire.zygote import WARM_VARIABLE

    not_theirs = ("SUBLET_TOKEN", "SUBLET_URL", AS_TENANT_VARIABLE, WARM_VARIABLE)
    env = {name: value for name, value in os.environ.items() if name not in not_theirs}
    if is_root():
        env = environment_for_root(env)
    if wish is not None:  # not on the command line, which every user can read
        env[WARM_VARIABLE] = dumps(wish).decode()
    env["SUBLET_HOME"] = os.fspath(home)
    env["PYTHONPATH"] = _search_path(env.get("PYTHONPATH", ""))
    return _detach([sys.executable, "-m", "sublet", *words], env, log)


def _detach(command: Sequence[str], env: Mapping[str, str], log: int) -> int:
    """Start a process that is no child of this one; its pid."""
    done = subprocess.run(
        ["/bin/sh", "-c", _DETACH, "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd="/",  # a folder that was the caller's must not be kept busy by a process it does not know
        env=env,
        start_new_session=True,
        check=True,
    )
    return int(done.stdout)


def _search_path(value: str) -> str:
    """The office runs elsewhere, so relative folders are spelt out; and it must be the same Sublet as the caller's,
    which may have come from a folder that only the caller's ``sys.path`` names."""
    folders = [os.path.abspath(folder) for folder in value.split(os.pathsep) if folder]
    ours = os.fspath(Path(__file__).parents[2])
    if os.path.basename(ours) not in ("site-packages", "dist-packages") and ours not in folders:
        folders.append(ours)
    return os.pathsep.join(folders)


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[Callable[[], bool]]:
    """A question: has this process ended? It is no child of this process, so it is asked through a descriptor."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # ended already
        yield lambda: True
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    try:
        yield lambda: bool(poll.poll(0))
    finally:
        os.close(handle)


def _failed(log: Path, log_start: int, what: str) -> Disconnected:
    """The reason stands at the end of what the office said, as the command line says every error: one sentence of what
    happened, after ``sublet:``, and below it what to do."""
    with open(log, "rb") as file:
        file.seek(max(log_start, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if line.startswith("sublet: ")]
    if errors:
        lines = [lines[errors[-1]].removeprefix("sublet: "), *lines[errors[-1] + 1 :]]
        if lines[0].startswith(OfficeElsewhere.OPENING):
            return OfficeElsewhere(lines[0], do=" ".join(lines[1:]))
        return Disconnected(f"{what}: {lines[0]}", do=" ".join(lines[1:]) or f"Its log is {log}.", sent=False)
    if not lines and (why := _no_room(log.parent)):
        return Disconnected(
            f"{what}: {why.lower()} in {log.parent}",
            do="Make room there, or set SUBLET_HOME to a folder elsewhere.",
            sent=False,
        )
    reason = lines[-1].rstrip(".") if lines else "it wrote nothing to its log"
    return Disconnected(f"{what}: {reason}", do=f"Its log is {log}.", sent=False)


def _no_room(folder: Path) -> str:
    """Why the folder cannot be written to, such as a full disk: then there is no log either. Empty if it can."""
    trial = folder / f".room-{os.getpid()}"
    try:
        trial.write_bytes(b"x" * _ROOM_BYTES)
    except OSError as error:
        return error.strerror or "cannot be written to"
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
    return ""
