"""Files beside the journal: the folder, its lock, the incarnation, and the external anchors.

A home folder has:

- ``journal.db`` (with SQLite's ``-wal`` and ``-shm``): everything the office must not forget.
- ``journal.lock``: held by the one process that has the journal open. It names that process.
- ``incarnation``: the highest incarnation ever used here. It survives what happens to the journal.
- ``replaced-N/``: a journal that a restore moved aside. Nothing here ever deletes one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import zlib
from pathlib import Path
from typing import Final

from sublet.errors import JournalError
from sublet.office.journal.audit import Anchor

JOURNAL_NAME: Final = "journal.db"
LOCK_NAME: Final = "journal.lock"
INCARNATION_NAME: Final = "incarnation"


def prepare_home(home: Path) -> Path:
    """The real path of a folder that is ours alone to write; made if it is not there."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = home.resolve(strict=True)
        about = home.stat()
    except OSError as error:
        raise _unusable(home, error) from error
    if about.st_uid != os.geteuid():
        raise JournalError(
            f"the state folder {home} belongs to another user (uid {about.st_uid})",
            do="Set SUBLET_HOME to a folder of your own.",
        )
    if stat.S_IMODE(about.st_mode) & 0o022:
        raise JournalError(
            f"others may write to the state folder {home}, so they could replace the journal",
            do=f"Take that right away: `chmod go-w {home}`.",
        )
    if not os.access(home, os.W_OK | os.X_OK):
        raise JournalError(
            f"the state folder {home} cannot be written",
            do="Give yourself the right to write there, or set SUBLET_HOME to another folder.",
        )
    return home


def _unusable(home: Path, error: OSError) -> JournalError:
    return JournalError(
        f"the state folder {home} cannot be used ({error.strerror})",
        do="Set SUBLET_HOME to a folder of your own on a disk that can be written.",
    )


class HomeLock:
    """The right to open the journal of this home. The system takes it back when the process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, home: Path) -> HomeLock:
        path = home / LOCK_NAME
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(home, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise JournalError(
                f"{JournalError.IN_USE}{pid or 'unknown'}) has the journal in {home} open",
                do="Use that office, or end it first with `sublet down`.",
            ) from None
        except OSError as error:
            os.close(fd)
            raise _unusable(home, error) from error
        try:
            line = f"{os.getpid()}\n".encode()
            os.pwrite(fd, line, 0)  # in place, which needs no room
            os.ftruncate(fd, len(line))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # who holds the lock is only for messages
                os.close(fd)
                raise _unusable(home, error) from error
        return cls(fd)

    def release(self) -> None:
        """Harmless twice. The file stays: removing it would let two processes lock two different files."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---- files published whole ----


def sync_folder(folder: Path) -> None:
    """Names are durable only when their folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name, in place of whatever has that name."""
    sync_file(temporary)
    os.rename(temporary, path)
    sync_folder(path.parent)


def publish_new(temporary: Path, path: Path) -> None:
    """Give a finished file its name, unless something has that name already (``FileExistsError``)."""
    sync_file(temporary)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a filesystem without hard links; between the question and the rename there is a window
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists") from None
        os.rename(temporary, path)
    else:
        os.unlink(temporary)
    sync_folder(path.parent)


def remove_database(path: Path) -> None:
    """A temporary one, with all that SQLite puts beside it: a left-over log would be taken for the next one's."""
    for end in ("", "-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{end}")


# ---- the incarnation ----


def read_incarnation(home: Path) -> int | None:
    """The highest incarnation ever used in this home, or None if there never was one."""
    path = home / INCARNATION_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(home, error) from error
    number, _, check = data.decode("ascii", "replace").strip().partition(" ")
    if not number.isdecimal() or check != f"{zlib.crc32(number.encode()):08x}":
        raise JournalError(
            f"{path} is damaged, so it cannot be told which epochs were used",
            do=f"Run `sublet restore` with a backup, or with {JOURNAL_NAME} itself: it begins an incarnation that is "
            "surely new.",
        )
    return int(number)


def write_incarnation(home: Path, incarnation: int) -> None:
    """Durable when it returns: temporary name, sync, rename, sync the folder."""
    number = str(incarnation)
    temporary = home / (INCARNATION_NAME + ".new")
    try:
        with open(temporary, "wb", opener=_open_private) as file:
            file.write(f"{number} {zlib.crc32(number.encode()):08x}\n".encode())
        publish(temporary, home / INCARNATION_NAME)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


# ---- anchors ----

_ANCHOR_BYTES: Final = 256


class Anchors:
    """Where the heads of the audit chains of one home are noted: outside of it, one small file per journal.

    They are named by a short hash of the home's path, so a journal that is replaced as a whole, with its identity,
    still meets the anchor of the one that was there.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self._key = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]

    @classmethod
    def default_folder(cls) -> Path:
        """Under the user's state folder, but in no home of an office."""
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return Path(state) / "sublet-anchors"

    def path(self, journal: str) -> Path:
        return self.folder / f"{self._key}-{journal}"

    def read_all(self) -> tuple[Anchor, ...]:
        """Every anchor that is noted for this home. A torn one is left out: it was never synced, so it may be. One that
        cannot be read is an error, since whether the journal is the newest can then not be told."""
        found = []
        try:
            names = sorted(os.listdir(self.folder))
            for name in names:
                if name.startswith(self._key):
                    anchor = Anchor.parse((self.folder / name).read_bytes()[:_ANCHOR_BYTES])
                    if anchor is not None:
                        found.append(anchor)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise JournalError(
                f"the anchors in {self.folder} cannot be read ({error.strerror}), so it is unknown whether the "
                "journal is the newest; it was not changed",
                do="Give yourself the right to read them. If the disk lost them, move that folder away.",
            ) from error
        return tuple(found)


class AnchorFile:
    """The anchor of the journal that is open.

    It is written after each commit and never synced: that costs microseconds, and after a loss of power an older anchor
    is still true. A newer one is never replaced by an older one. If it cannot be written the office goes on, since
    nothing rests on it but the proof; ``problem`` says so.
    """

    def __init__(self, anchors: Anchors, journal: str) -> None:
        self.problem: str | None = None
        self._journal = journal
        self._seq = -1
        self._fd = -1
        path = anchors.path(journal)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            before = Anchor.parse(os.pread(self._fd, _ANCHOR_BYTES, 0))
        except OSError as error:
            self.problem = f"the anchor {path} cannot be written ({error.strerror})"
            return
        if before is not None:
            self._seq = before.seq

    def note(self, seq: int, audit_seq: int, head: bytes) -> None:
        """Overwrite in place, in one call, so that a kill leaves the old anchor or the new one."""
        if self._fd < 0 or seq < self._seq:
            return
        line = Anchor(self._journal, seq, audit_seq, head).text.encode() + b"\n"
        try:
            os.pwrite(self._fd, line.ljust(_ANCHOR_BYTES), 0)
        except OSError as error:
            self.problem = f"the anchor cannot be written ({error.strerror})"
            return
        self._seq = seq
        self.problem = None

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
