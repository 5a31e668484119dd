"""``sublet purge``: ends the office and removes its state on this machine, after a question.

Only what Sublet made is removed: entries of the state folder that have names of ours, and the runtime folder. Links are
removed and never followed, mounted volumes are unmounted first, and other files stay and are named.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from sublet.cli.call import CommandOffice, NoOffice
from sublet.cli.declare import Opt, UsageError
from sublet.cli.exit_status import DONE, FAILED
from sublet.cli.office import OfficeInUse, end_office
from sublet.cli.show import Json, plural, visible
from sublet.client.home import home_dir, runtime_dir
from sublet.client.office import answers
from sublet.errors import InvalidRequest, SubletError, Unsupported
from sublet.node.storage.mounts import detach_loop, loops_of, mounts_below, take_down, why_busy
from sublet.values import format_size
from sublet.wire import unix
from sublet.wire.sockets import peer_of

SUPERVISOR_GONE_S: Final = 15.0
"""How long the supervisor may take to end after its office, before it is killed."""
LEFT_GONE_S: Final = 30.0
"""How long what guests have left may take to end, before it is told."""
UNMOUNTED_S: Final = 10.0
"""How long a volume may stay busy after the last command that used it has ended."""
OTHERS_SHOWN: Final = 5
_LOOK_EVERY_S: Final = 0.05

KINDS: Final = (
    (re.compile(r"blocks"), "volumes and checkpoints"),
    (re.compile(r"jobs"), "notebooks that ran in the background"),
    (re.compile(r"guests"), "output of commands"),
    (re.compile(r"studio(?:\.restoring)?"), "sessions, and the people of the studio"),
    (
        re.compile(r"journal\.(?:db(?:-wal|-shm|-journal|\.new|\.restoring)?(?:-wal|-shm|-journal)?|lock|reserve)"),
        "leases, bills, audit log",
    ),
    (re.compile(r"replaced-\d+"), "a journal that was replaced"),
    (re.compile(r"incarnation(?:\.new)?|keys|uids"), "keys and numbers of the office"),
    (re.compile(r"(?:office|supervisor)\.log(?:\.1)?"), "logs"),
    (re.compile(r"(?:config|rates|policy|studio)\.toml|started-with(?:\.new)?"), "settings"),
    (re.compile(r"\.config\.toml\.\d+|\.room-\d+"), "an unfinished file"),
)
"""Names in the state folder that are Sublet's, and what they are."""
MARKS: Final = ("journal.db", "journal.lock", "incarnation", "config.toml", "office.log")
"""A folder with files of ours is only taken for a state folder if it has one of these."""


class FolderEntry(NamedTuple):
    """One entry of the state folder."""

    name: str
    kind: str
    """What it is; empty if it is not Sublet's."""
    nbytes: int


def purge(
    *,
    yes: Annotated[bool, Opt("--yes", "-y", help="Remove without asking.")] = False,
    now: Annotated[bool, Opt("--now", help="End live leases and running jobs too.")] = False,
) -> int:
    """End the office and remove its state, volumes and mounts from this machine.

    It lists what it will remove, with sizes, and asks first. It is refused while leases live or notebooks run in the
    background, unless --now is given. Where the supervisor was killed, what its guests have left running is ended.
    Files in the state folder that are not Sublet's stay, links are not followed, and a state folder that is / or a home
    folder is refused. The package itself is uninstalled with pip.

    Exit status: 0 if all is removed or nothing was there, 1 if you answered no or something could not be removed.
    """
    if os.environ.get("SUBLET_URL"):
        raise UsageError(
            "SUBLET_URL names an office elsewhere, and `purge` removes the one of this machine", do="Unset SUBLET_URL."
        )
    if sys.platform != "linux":
        raise Unsupported("an office runs on Linux only, so there is none here", do="Nothing needs to be removed.")
    home = home_dir()
    runtime = runtime_dir(home)
    if not home.exists() and not runtime.exists():
        print(f"There is nothing to remove: {visible(str(home))} does not exist.")
        return DONE
    refuse_place(home, os.getuid())
    office, running = _running(now=now)
    runners = _runners()
    if runners and not now:
        raise OfficeInUse(
            f"{plural(len(runners), 'notebook runs', 'notebooks run')} in the background",
            do="Wait for them, stop them with `sublet nb stop JOB`, or use --now.",
        )
    found = entries(home)
    ours = [entry for entry in found if entry.kind]
    if not ours and not runtime.exists():
        print(f"There is nothing to remove in {visible(str(home))}.")
        return DONE
    _announce(home, runtime, ours, sorted(entry.name for entry in found if not entry.kind), running)
    if not yes and not _agreed():
        print("Nothing was removed.")
        return FAILED
    with _none_starts(runtime):  # from before its end: a program whose lease goes on would start it again
        _end(office, running, runners, now=now, runtime=runtime)
        if answers(runtime / "office.sock"):
            raise OfficeInUse("another office was started meanwhile", do="Purge again.")
        _end_what_is_left(runtime)
        _unmount(home)
        _unmount(runtime)
        ours = [entry for entry in entries(home) if entry.kind]  # again: guests leave their output when they are ended
        _remove(home, ours)
        if runtime.exists():
            refuse_place(runtime, os.getuid(), marks=())
            shutil.rmtree(runtime)
    stays = f"{visible(str(home))} stays, with files that are not Sublet's." if home.exists() else ""
    print(f"Removed {format_size(sum(entry.nbytes for entry in ours))}. {stays}".rstrip())
    return DONE


def refuse_place(home: Path, uid: int, *, marks: tuple[str, ...] = MARKS) -> None:
    """Raise if this is no folder to remove things from: a system's, a home, another user's, or none of Sublet's."""
    if not home.exists():
        return
    homes = {Path(os.path.expanduser("~")).resolve(), Path("/root"), Path("/home")}
    with contextlib.suppress(KeyError):
        homes.add(Path(pwd.getpwuid(uid).pw_dir).resolve())
    if home == Path("/") or any(home == one or home in one.parents for one in homes):
        raise InvalidRequest(
            f"{home} is a home folder or holds one",
            do="Set SUBLET_HOME to a state folder of its own, and remove by hand.",
        )
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidRequest(f"{home} is not a folder", do="Check SUBLET_HOME.")
    if found.st_uid != uid:
        raise InvalidRequest(f"{home} belongs to another user", do="Run this as the user whose office it is.")
    if marks and any(entry.kind for entry in entries(home)) and not any((home / mark).exists() for mark in marks):
        raise InvalidRequest(f"{home} is no state folder of Sublet", do="Check SUBLET_HOME.")


def entries(home: Path) -> list[FolderEntry]:
    """What the state folder holds, largest first; what is not Sublet's last."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(home):
            kind = next((kind for pattern, kind in KINDS if pattern.fullmatch(name)), "")
            found.append(FolderEntry(name, kind, _size(home / name)))
    return sorted(found, key=lambda entry: (not entry.kind, -entry.nbytes, entry.name))


def _size(path: Path) -> int:
    """Bytes on disk, of this file system alone: a mounted volume is counted by its image."""
    with contextlib.suppress(OSError):
        top = path.lstat()
        if not stat.S_ISDIR(top.st_mode):
            return top.st_blocks * 512
        total = 0
        for folder, below, files in os.walk(path):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            below[:] = [name for name in below if _device(os.path.join(folder, name)) == top.st_dev]
        return total
    return 0


def _device(path: str) -> int:
    try:
        return os.lstat(path).st_dev
    except OSError:
        return -1


def _announce(home: Path, runtime: Path, ours: list[FolderEntry], others: list[str], running: Json | None) -> None:
    print(f"This removes from {visible(str(home))}:")
    width = max((len(entry.name) for entry in ours), default=0)
    for entry in ours:
        link = ", a link (what it points to stays)" if (home / entry.name).is_symlink() else ""
        print(f"  {visible(entry.name.ljust(width))}  {format_size(entry.nbytes):>9}  {entry.kind}{link}")
    if runtime.exists():
        print(f"and {runtime}, with sockets{' and mounts' if mounts_below(str(runtime)) else ''}.")
    if mounted := mounts_below(str(home)):
        print(f"{plural(len(mounted), 'mounted volume')} {'is' if len(mounted) == 1 else 'are'} unmounted first.")
    if running is not None:
        leases = f" with {plural(running['live'], 'live lease')}" if running["live"] else ""
        print(f"The office (pid {running['pid']}) is ended{leases}.")
    if others:
        more = " …" if len(others) > OTHERS_SHOWN else ""
        print(f"Not Sublet's, and left alone: {', '.join(visible(name) for name in others[:OTHERS_SHOWN])}{more}")


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("`purge` asks before it removes, and stdin is no terminal", do="Use --yes.")
    sys.stdout.write("Remove all this? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# ---- what runs


def _running(*, now: bool) -> tuple[CommandOffice, Json | None]:
    """The office and its status. Raises if leases live, or may, and they are not to be ended."""
    office = CommandOffice.reach(start=False)
    try:
        view: Json = office.get("/v1/status")
    except NoOffice:
        assert office.address.home is not None
        if answers(runtime_dir(office.address.home) / "supervisor.sock") and not now:
            raise OfficeInUse(
                "no office runs, and leases of an earlier one may go on to their deadlines",
                do="Start one with `sublet up` to see them, or use --now.",
            ) from None
        return office, None
    waiting = view["live"] + view["queued"]
    if waiting and not now:
        raise OfficeInUse(
            f"{plural(waiting, 'lease is', 'leases are')} live or in the queue",
            do="See `sublet lease ls`; release them, or use --now, which ends them.",
        )
    return office, view


def _runners() -> list[tuple[int, int]]:
    """Notebooks that run in the background: job and process."""
    from sublet.notebook.batch.jobs import all_jobs

    return [(int(job.id), pid) for job in all_jobs() if (pid := job.runner)]


def _end(
    office: CommandOffice, running: Json | None, runners: list[tuple[int, int]], *, now: bool, runtime: Path
) -> None:
    """Jobs first: they would start another office. Then the office, and its supervisor, which may take a moment."""
    from sublet.notebook.batch.jobs import find_job

    for number, pid in runners:
        if pid <= 0:
            continue
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                if find_job(str(number)).runner == pid:  # it is still the process whose number was read
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
    if running is not None:
        end_office(office, running, "now" if now else "idle")
    path = runtime / "supervisor.sock"
    until = time.monotonic() + (SUPERVISOR_GONE_S if running is not None else 0.0)
    while answers(path):
        if time.monotonic() > until:
            _kill_supervisor(path)
            until = time.monotonic() + SUPERVISOR_GONE_S
        time.sleep(_LOOK_EVERY_S)


def _kill_supervisor(path: Path) -> None:
    """End the supervisor that listens there, if it is this office's: what runs under it ends with it."""
    try:
        sock = unix.connect(os.fspath(path), timeout_s=SUPERVISOR_GONE_S)
    except OSError:
        return
    with sock:
        pid, uid, _ = peer_of(sock)
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                is_one = any(name in command for name in (b"sublet.node.supervisor", b"sublet.supervisor"))
                if uid != os.getuid() or not is_one or os.fsencode(path.parent) not in command:
                    raise SubletError(
                        f"process {pid} listens at {path} and is no supervisor", do="See what it is, and end it."
                    )
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _end_what_is_left(runtime: Path) -> None:
    """End what guests of a supervisor that was killed had started, as the next supervisor would, and remove their
    control groups. A supervisor that ended by itself has left nothing, and its lock is gone."""
    try:
        office = (runtime / "supervisor.lock").read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        return
    if not office:  # it was killed before it had a guest
        return
    from sublet.node.processes.cgroups import Groups
    from sublet.node.processes.guest_records import GuestRecords
    from sublet.node.processes.procs import Procs
    from sublet.node.supervisor.recovery import Sweep

    groups = Groups.probe(office)
    try:
        if any(os.getpid() in group.pids() for tree in (groups, *groups.elsewhere()) for group in tree.found()):
            raise OfficeInUse(
                "this command itself runs under a lease of the office", do="Purge from a terminal outside of it."
            )
        notes, _ = GuestRecords(os.fspath(runtime / "notes")).read_all()
        sweep = Sweep(Procs(), groups, notes=notes)
        until = time.monotonic() + LEFT_GONE_S
        while not sweep.again():
            if time.monotonic() > until:
                left = [f"process {one.pid}" for found in sweep.left.values() for one in found] or sweep.groups_left
                why = "; ".join(filter(None, map(sweep.why_left, sweep.left)))
                raise SubletError(
                    f"what commands under leases had left could not be ended: {', '.join(left[:OTHERS_SHOWN])}"
                    + (f" ({why})" if why else ""),
                    do="End it, and purge again.",
                )
            time.sleep(_LOOK_EVERY_S)
    finally:
        groups.remove()
    if count := sum(map(len, sweep.found.values())):
        print(f"Ended {plural(count, 'process', 'processes')} that commands under leases had left.")


@contextlib.contextmanager
def _none_starts(runtime: Path) -> Iterator[None]:
    """No program starts an office meanwhile: it would wait for the lock that is held here."""
    if not runtime.exists():
        yield
        return
    handle = os.open(runtime / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OfficeInUse("another program is starting the office", do="End it, and purge again.") from None
        yield
    finally:
        os.close(handle)


# ---- what lies there


def _unmount(folder: Path) -> None:
    """All mounts below it, the innermost first, and the loop devices of its images."""
    if not folder.exists():
        return
    until = time.monotonic() + UNMOUNTED_S
    while mounted := mounts_below(str(folder)):
        mount = mounted[0]
        if mount.point == os.fspath(folder):  # the state folder is on a disk of its own
            break
        try:
            take_down(mount.point, unwritten=True)
        except OSError as error:
            if error.errno == errno.EBUSY and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S)
                continue
            who = f": {why_busy(mount.source)}" if error.errno == errno.EBUSY else ""
            raise SubletError(
                f"{mount.point} cannot be unmounted ({error.strerror or error}{who})".replace(": )", ")"),
                do=f"End what uses it (`fuser -vm {mount.point}`), and purge again.",
            ) from error
    for device in loops_of(str(folder)):
        with contextlib.suppress(OSError):
            detach_loop(device)


def _remove(home: Path, ours: list[FolderEntry]) -> None:
    """By descriptor, so that nothing that is put in the folder's place meanwhile is taken for it."""
    if not home.exists():
        return
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for entry in ours:
            try:
                found = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    shutil.rmtree(entry.name, dir_fd=folder)
                else:
                    os.unlink(entry.name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SubletError(
                    f"{error.filename or home / entry.name} cannot be removed ({error.strerror})",
                    do="Remove what keeps it, and purge again.",
                ) from error
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):  # other files are in it, or it is a mount point
        home.rmdir()
