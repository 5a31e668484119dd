"""One supervisor per office on a machine: that of a copied state folder ends before it does anything.

A new supervisor ends what its predecessor left, and knows it by the id of the office. A copy of a state folder has the
same id, so its supervisor would take the guests of an office that runs for leftovers. Before that, each takes a lock
whose name is the id: of the kind that the kernel ties to one process (``fcntl``), gone when that process ends, however
it ends, and never shared with a child that it forked. The kernel names its owner; the file names the state folder.

The file belongs to one user and only that user can open it, so no other can keep an office from starting. That is
enough: a user can end the processes of no other, except root, whose files lie where only root can write. An office of
root's does not look at the locks of other users, which any of them could hold to keep it from starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from sublet.errors import OfficeElsewhere
from sublet.node.by_descriptor import change
from sublet.node.supervisor.locks import (
    FOLDERS,
    ROOTS,
    TEXT_MAX,
    LockUnusable,
    is_same,
    lock_folder,
    on_one_line,
    open_own,
)

PREFIX: Final = "sublet-office-"
MOVED_S: Final = 8.0
"""How long the lock is waited for where the folder of its holder was moved, or its runtime folder was removed: it sees
that and ends, unless it has guests."""
LOOK_S: Final = 0.05
_FLOCK: Final = struct.Struct("hhqqi4x")
"""``struct flock``: kind, whence, start, length, process."""


class OfficeLock:
    """The right to look after the guests of this office."""

    def __init__(self, office: str, state: str, *, folders: Iterable[str] | None = None) -> None:
        """``state``: its state folder, as others are told. ``folders``: where the file may lie, best first."""
        self._name = f"{PREFIX}{office}.{os.geteuid()}"
        self._state = state
        self._folders = list(_places()) if folders is None else list(folders)
        self._path, self._file = "", -1

    def take(
        self, *, clock: Callable[[], float] = time.monotonic, pause: Callable[[float], object] = time.sleep
    ) -> None:
        """Take it; raises ``OfficeElsewhere`` where another process has it, ``LockUnusable`` where there is no file."""
        until_s = clock() + MOVED_S
        while (holder := self._try()) is not None:
            pid, state = holder
            is_late = clock() > until_s
            if state == self._state and is_late and pid > 0:
                if self._end(pid):
                    return
            elif is_late or (state != self._state and os.path.isdir(state)):
                raise _elsewhere(pid, state, self._state)
            pause(LOOK_S)

    def _end(self, pid: int) -> bool:
        """End a supervisor of this very folder whose runtime folder was removed: no office can reach it any more. True
        if the lock is ours already."""
        with contextlib.suppress(OSError):
            found = os.pidfd_open(pid)
            try:
                if self._try() == (pid, self._state):  # it still has the lock, so the number is not another's by now
                    signal.pidfd_send_signal(found, signal.SIGKILL)
            finally:
                os.close(found)
        return self._file >= 0

    def refresh(self) -> None:
        """To be called now and then, so that nothing that cleans up old files removes it; if something did, anew."""
        if self._file < 0:
            return
        if is_same(self._file, self._path):
            os.utime(self._file)
        else:
            self._close_file()
            self._try()

    def release(self) -> None:
        """Harmless twice. The file goes, too."""
        if self._file >= 0 and is_same(self._file, self._path):
            os.unlink(self._path)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try(self) -> tuple[int, str] | None:
        """Process and state folder of another that has it; None: it is ours."""
        while True:
            path, file = self._opened()
            try:
                fcntl.fcntl(file, fcntl.F_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            except (BlockingIOError, PermissionError):
                found = fcntl.fcntl(file, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                state = os.pread(file, TEXT_MAX, 0).decode("utf-8", "replace")
                os.close(file)
                kind, _, _, _, pid = _FLOCK.unpack(found)
                if kind == fcntl.F_UNLCK:  # it has ended meanwhile
                    continue
                return pid, on_one_line(state.removesuffix("\n"))
            if is_same(file, path):
                os.ftruncate(file, 0)
                os.pwrite(file, on_one_line(self._state).encode() + b"\n", 0)
                self._path, self._file = path, file
                return None
            os.close(file)  # its holder removed it between our opening and our locking

    def _opened(self) -> tuple[str, int]:
        """The file, in the first folder where nothing that is not ours has its name."""
        why: LockUnusable | None = None
        for folder in self._folders:
            path = os.path.join(folder, self._name)
            try:
                return path, open_own(path, 0o600)
            except LockUnusable as error:
                why = error
        raise why or LockUnusable(
            "there is no folder for the lock of this office", do="Fix the permissions of /tmp: chmod 1777 /tmp."
        )


def _elsewhere(pid: int, state: str, mine: str) -> OfficeElsewhere:
    who = f"supervisor pid {pid}" if pid > 0 else "its supervisor is in another container"
    if not os.path.isdir(state):
        return OfficeElsewhere(
            f"{state}, which is not there any more ({who})",
            do=f"Its guests go on to their deadlines; {mine} starts after them. To end them now: `kill -9 {pid}`.",
        )
    return OfficeElsewhere(
        f"{state} ({who}), and {mine} is a copy of that folder",
        do=f"Use that office, or end it first: `SUBLET_HOME={state} sublet down`. "
        "A second office needs an empty folder of its own.",
    )


def _places() -> Iterator[str]:
    if os.geteuid() == 0:
        try:
            os.mkdir(ROOTS, 0o755)
            change(ROOTS, mode=0o755)  # whatever the umask
        except OSError:
            pass  # it is there; or, in a container, not to be made
        if os.path.isdir(ROOTS) and os.stat(ROOTS).st_uid == 0:
            yield ROOTS
    for folder in FOLDERS:
        try:
            yield lock_folder((folder,))
        except LockUnusable:
            continue
