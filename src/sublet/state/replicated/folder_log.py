"""The log of a folder replica: opens it, catches up, appends, and rewrites it when full.

Everything happens under the lock of the folder, which all processes that use it share. A process that takes the lock
first reads what others have appended. An entry of another process counts only once it is known to be on the disk: its
writer says so in the lock file, bound to this boot of the machine, and where it could not, the next finder of the entry
syncs.

After a failed sync the pages may be marked clean without being on the disk, so nothing in this file is to be believed
any more: it is marked, which every process sees at once, and only a new replica takes its seat. A failed write is less:
nothing was promised, and what is left of it is made blank.
"""

from __future__ import annotations

import contextlib
import struct
import time
import zlib
from pathlib import Path
from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Garbled
from sublet.state.replicated.cell import EMPTY, ReplicaCell
from sublet.state.replicated.files import NotTried, RealFiles
from sublet.state.replicated.folder_format import SECTOR, Header, LogEntry, Torn, batch, entries_of, frame, scan
from sublet.state.replicated.quorum import ReplicaSet
from sublet.state.replicated.replica import ReplicaFaulty, ReplicaFull, ReplicaSilent

LOG: Final = "log"
NEW: Final = "log.new"
LOCK: Final = "lock"
_BLANK: Final = bytes(SECTOR)
_NOTE: Final = struct.Struct(">8sQQ")
LOCK_PATIENCE_S: Final = 5.0
"""It is held for a fraction of a millisecond, or while a log is made anew. A longer holder was stopped."""
SPARE: Final = 4
"""A new log has room for so many times what it begins with."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch that is about to be written."""

    entries: list[LogEntry]
    data: bytes


class FolderLog:
    """One open log. The caller holds ``lock`` around every use."""

    def __init__(self, folder: Path, files: RealFiles, size: int) -> None:
        self.folder, self.files, self._size_wanted = folder, files, size
        self._path = folder / LOG
        self._inode = 0
        self.cells: dict[str, ReplicaCell] = {}
        self.known: ReplicaSet | None = None
        self.dirty = False
        """Whether something known here may not be on the disk yet; nothing is said before ``make_durable``."""
        self.header: Header | None = None
        self._fd = -1
        self._lock_fd = files.open(folder / LOCK, create=True)
        self._boot = files.boot()
        self._at = self._number = 0
        """Where the next batch goes, and its number."""

    # ---- the lock ----

    def take(self, *, wait: bool = True) -> bool:
        """Take the lock, and catch up; whether it was to be had. After an error the lock is not held."""
        pause_s, waited_s = 0.0002, 0.0
        while not self.files.lock(self._lock_fd):
            if not wait:
                return False
            if waited_s > LOCK_PATIENCE_S:
                raise ReplicaSilent(
                    f"another process holds the lock of the replica in {self.folder}, and does not go on"
                )
            time.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(pause_s * 2, 0.01)
        try:
            self._catch_up()
        except BaseException:
            self.files.unlock(self._lock_fd)
            raise
        return True

    def unlock(self) -> None:
        """Give the lock back."""
        self.files.unlock(self._lock_fd)

    def close(self) -> None:
        """Harmless twice."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                self.files.close(fd)
        self._fd = self._lock_fd = -1

    # ---- making and opening ----

    def exists(self) -> bool:
        """Whether there is a log in the folder."""
        return LOG in self.files.names(self.folder)

    def make(self, identity: str, salt: bytes, made_ns: int) -> None:
        """The first log of a folder, empty."""
        while not self.files.lock(self._lock_fd):
            time.sleep(0.001)
        try:
            if not self.exists():
                self._publish(Header(0, 0, 0, identity, salt, made_ns), [])
        except OSError as error:
            raise self._no_room(error) from error
        finally:
            self.files.unlock(self._lock_fd)

    def peek(self) -> str:
        """Whose log it is. Without the lock, so that a process that was stopped while it held it keeps no other waiting
        but those who ask this replica."""
        try:
            self._open()
        except Garbled as error:
            raise self._faulty(str(error)) from error
        except OSError as error:
            raise self._no_room(error) from error
        return self._head().identity

    def _catch_up(self) -> None:
        try:
            state = self.files.state(self._path, self._inode) if self._fd >= 0 else "other"
            if state == "other":
                self._open()
                state = self.files.state(self._path, self._inode)
            if state != "same":
                raise self._faulty("a write to it failed earlier, and what is on its disk cannot be trusted")
            self._read_on()
        except Garbled as error:
            raise self._faulty(str(error)) from error
        except OSError as error:
            raise ReplicaSilent(f"the replica in {self.folder} cannot be read ({error.strerror})") from error

    def _open(self) -> None:
        if self._fd >= 0:
            self.files.close(self._fd)
            self._fd = -1
        try:
            self._fd = self.files.open(self.folder / LOG)
        except FileNotFoundError as error:
            raise self._faulty("its log is gone") from error
        except PermissionError as error:
            raise self._faulty("its log may not be written") from error
        try:
            self._begin()
        except BaseException:
            # Or the next look would find a file that is open, and go on with it.
            self.files.close(self._fd)
            self._fd = -1
            raise

    def _begin(self) -> None:
        header = Header.unpack(self.files.read(self._fd, SECTOR, 0))
        if self.header is not None and header.identity != self.header.identity:
            raise self._faulty("it is another replica now")
        which = self.files.which(self._fd)
        if (header.inode, header.inode_generation) != which:
            raise self._faulty("its log was copied or restored, so it may have forgotten what it promised")
        if header.size != self.files.size(self._fd):
            raise self._faulty(f"its log should have {header.size} bytes and has {self.files.size(self._fd)}")
        self._make_name_durable()
        self.header, self._inode = header, which[0]
        self.cells, self.known, self.dirty = {}, None, False
        self._at, self._number = SECTOR, 1

    def _make_name_durable(self) -> None:
        """The process that named it may have been killed before the folder was synced: then a power cut would bring
        the old log back."""
        try:
            self.files.sync_folder(self.folder)
        except NotTried:
            raise
        except OSError as error:
            self._mark()
            raise self._faulty(f"its folder could not be made durable ({error.strerror})") from error

    def _read_on(self) -> None:
        header = self._head()
        fast = self._number > 1 and self._at < header.size
        if fast and self.files.read(self._fd, SECTOR, self._at) == _BLANK:
            return
        rest = self.files.read(self._fd, header.size - self._at, self._at)
        found = 0
        for piece in scan(rest, self._at, self._number, header.salt):
            if isinstance(piece, Torn):
                self._mend(piece)
                break
            self._at, content = piece
            self._number += 1
            found += 1
            for entry in entries_of(content):
                self._apply(entry)
        if found and not self._is_synced(self._number - 1):
            # Before anything is said of it, and before anything is written behind it: a torn end is one batch, no more.
            self._sync()
            self._note_synced()

    def _mend(self, torn: Torn) -> None:
        """Entry torn and never confirmed. Its place is made blank, durably, before another entry goes there."""
        self.files.write(self._fd, bytes(torn.end - torn.at), torn.at)
        self._sync()

    def _apply(self, entry: LogEntry) -> None:
        if isinstance(entry.content, ReplicaCell):
            self.cells[entry.key] = entry.content
        else:
            self.known = entry.content

    # ---- writing ----

    def append(self, changed: dict[str, ReplicaCell], known: ReplicaSet | None) -> None:
        """These cells, and the set if it is new; ``make_durable`` syncs it, and may be called without the lock."""
        planned = self.plan(changed, known)
        if self.fits(planned):
            self.write(planned)
        else:
            self._compact(planned.entries)

    def plan(self, changed: dict[str, ReplicaCell], known: ReplicaSet | None) -> Planned:
        """A batch of these, ready to be written."""
        latest = known if known is not None else self.known
        generation = latest.generation if latest is not None else 0
        new = [LogEntry(generation, "", known)] if known is not None else []
        new += [LogEntry(generation, key, cell) for key, cell in changed.items()]
        return Planned(new, frame(batch(new), self._number, self._head().salt))

    def fits(self, planned: Planned) -> bool:
        """Whether there is room for it."""
        return self._at + len(planned.data) <= self._head().size

    def write(self, planned: Planned) -> None:
        """Into the file, and perhaps not yet on the disk."""
        try:
            self.files.write(self._fd, planned.data, self._at)
        except OSError as error:
            # It was never confirmed. A part of a sector would be taken for damage, and where not even this can be
            # written, the next taker of the lock tries again.
            with contextlib.suppress(OSError):
                self._mend(Torn(self._at, self._at + len(planned.data)))
            raise self._no_room(error) from error
        self.dirty = True
        self._at += len(planned.data)
        self._number += 1
        for entry in planned.entries:
            self._apply(entry)

    def make_durable(self) -> None:
        """All that is known here is on the disk. Needs no lock: a process that finds it before settles it itself."""
        if self.dirty:
            self._sync()
            self.dirty = False
            self._note_synced()

    def _sync(self) -> None:
        try:
            self.files.datasync(self._fd)
        except OSError as error:
            self._mark()
            raise self._faulty(f"its disk did not take a write ({error.strerror})") from error

    def _mark(self) -> None:
        try:
            self.files.mark(self._fd)
        except OSError:
            self.header = None  # at least this process never uses it again

    # ---- making it anew ----

    def _compact(self, new: list[LogEntry]) -> None:
        """A log that begins with what is still true takes the place of the full one, in one step."""
        cells = dict(self.cells)
        known = self.known
        for entry in new:
            if isinstance(entry.content, ReplicaCell):
                cells[entry.key] = entry.content
            else:
                known = entry.content
        generation = known.generation if known is not None else 0
        live = [LogEntry(generation, "", known)] if known is not None else []
        live += [LogEntry(generation, key, cell) for key, cell in cells.items()]
        try:
            self._publish(self._head(), live)
        except OSError as error:
            raise self._no_room(error) from error
        self._catch_up()
        self._note_synced()
        self.dirty = False

    def _publish(self, old: Header, live: list[LogEntry]) -> None:
        """Write a log whole under another name, then give it its name, then make the name durable."""
        files, path = self.files, self.folder / NEW
        data = frame(batch(live), 1, old.salt) if live else b""
        size = max(self._size_wanted, -(-(SECTOR + SPARE * len(data)) // SECTOR) * SECTOR)
        fd = files.open(path, fresh=True)
        try:
            inode, generation = files.which(fd)
            header = Header(size, inode, generation, old.identity, old.salt, old.made_ns)
            files.write(fd, (header.pack() + data).ljust(size, b"\0"), 0)
            files.sync(fd)
        except OSError:
            files.close(fd)
            files.remove(path)
            raise
        try:
            files.rename(path, self.folder / LOG)
        except OSError:
            files.close(fd)
            files.remove(path)
            raise
        try:
            files.sync_folder(self.folder)
        except NotTried:
            raise  # the next opener syncs the folder first
        except OSError as error:
            # Under this name the next boot may find the old log: what goes into the new one could be forgotten.
            files.mark(fd)
            raise self._faulty(f"its folder could not be made durable ({error.strerror})") from error
        finally:
            files.close(fd)

    # ---- who is known to be on the disk ----

    def _is_synced(self, number: int) -> bool:
        note = self.files.read(self._lock_fd, _NOTE.size + 4, 0)
        # Notes are written without the lock, so one may be read while it changes.
        if len(note) != _NOTE.size + 4 or zlib.crc32(note[:-4]).to_bytes(4, "big") != note[-4:]:
            return False
        boot, inode, synced = _NOTE.unpack(note[:-4])
        return bool(boot == self._boot and inode == self._inode and synced >= number)

    def _note_synced(self) -> None:
        note = _NOTE.pack(self._boot, self._inode, self._number - 1)
        try:
            self.files.write(self._lock_fd, note + zlib.crc32(note).to_bytes(4, "big"), 0)
        except OSError:
            return  # the next process syncs for itself

    # ---- said ----

    def _head(self) -> Header:
        if self.header is None:
            raise self._faulty("a write to it failed")
        return self.header

    def _faulty(self, why: str) -> ReplicaFaulty:
        return ReplicaFaulty(f"the replica in {self.folder} cannot be used: {why}")

    def _no_room(self, error: OSError) -> ReplicaFull:
        return ReplicaFull(
            f"the replica in {self.folder} could not write ({error.strerror})", do="Make room on that disk."
        )

    def cell(self, key: str) -> ReplicaCell:
        """What is kept for a key."""
        return self.cells.get(key, EMPTY)
