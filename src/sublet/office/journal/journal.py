"""The journal: makes events durable before any caller is answered.

One SQLite file in write-ahead mode with ``synchronous=FULL``, opened by one process (a lock beside it) and written
through one connection. A batch of events is one transaction: all of it is there, or none. When ``commit`` returns, it
survives a loss of power.

Three rules come from what storage really does:

- **A failed sync ends the office.** After it the kernel may have dropped the very pages that were not written, and a
  second sync would succeed without them. So nothing is tried twice on the same connection, not even the checkpoint that
  closing it would bring. A full disk is another matter: the kernel took none of it, and said so before any sync. The
  transaction is rolled back and written again, once, in the room that was reserved for it (``DiskRoom``).
- **What an opening finds in the write-ahead log is written once more.** The log may hold frames whose sync failed. The
  checkpoint at opening puts them into the file and syncs that, before anything is built on them.
- **The log is laid out beforehand.** A sync that must also grow a file costs twice as much, so after opening the log is
  filled with zeros once, and the checkpoints keep it within that size.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from sublet.errors import JournalError, JournalFailed
from sublet.lazy_dataclass import dataclass
from sublet.office.journal import audit, backup
from sublet.office.journal import files as journal_files
from sublet.office.journal import schema as journal_schema
from sublet.office.journal.disk_room import DiskRoom
from sublet.office.journal.files import AnchorFile, Anchors, HomeLock
from sublet.office.journal.reader import JournalReader, JournalRow, Tip, check_header, full_disk, is_full, not_opened
from sublet.office.ledger.events import AUDITED, EVENT_TYPES, Event, OfficeOpened
from sublet.office.ledger.records import Now
from sublet.wire.decoders import decoder
from sublet.wire.http import AuditReport

BEAT_EVERY_NS: Final = 1_000_000_000
"""More often the instant is not written down when nothing else is: what a reboot may add to a lease."""
CHECKPOINT_FRAMES: Final = 900
"""Pages in the log after which they are moved into the file; 1000 would fill ``LOG_BYTES``."""
SNAPSHOT_PART_BYTES: Final = 8 << 20
"""SQLite takes no value above 1 GB, and a state of a million leases comes near it."""

_KIND_OF: Final[dict[type, str]] = {event: kind for kind, event in EVENT_TYPES.items()}
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = decoder(Event).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One event as it was written."""

    seq: int
    ns: int
    wall_ns: int
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredJournal:
    """What the journal knows when it is opened."""

    snapshot: bytes | None
    snapshot_seq: int
    entries: Iterator[JournalEntry]
    """After the snapshot, in order. Read it to its end before the first commit."""
    incarnation: int
    last_ns: int | None
    """The last instant that is on disk, of the clock ``clock_domain``."""
    clock_domain: str | None
    restored: bool
    """No office was opened since a backup was put here: the opening and the end of every lease belong in one batch."""


class Journal:
    """Made by ``Journal.open``. One call at a time, from any thread."""

    def __init__(
        self,
        *,
        path: Path,
        lock: HomeLock,
        reader: JournalReader,
        db: sqlite3.Connection,
        tip: Tip,
        anchors: Anchors,
        room: DiskRoom | None,
    ) -> None:
        self.path = path
        self._room = room
        self.id: Final = tip.journal
        self.incarnation: Final = tip.incarnation
        self.anchors: Final = anchors
        self._lock = lock
        self._reader = reader
        self._db = db
        self._tip = tip
        self._seq = tip.seq
        self._audit_seq = tip.audit_seq
        self._head = tip.head
        self._domain = tip.clock_domain
        self._last_ns = tip.last_ns or 0
        self._frames = 0
        self._failure: str | None = None
        self._closed = False
        self._anchor = AnchorFile(anchors, tip.journal)
        self._anchor.note(self._seq, self._audit_seq, self._head)

    # ---- opening and closing ----

    @classmethod
    def open(cls, home: Path, *, wall_ns: int, anchors: Path | None = None, room: DiskRoom | None = None) -> Journal:
        """Open the journal of this home, or begin one. ``anchors`` is the folder for the heads kept outside, ``room``
        what is reserved for it on the disk.

        Everything is looked at before anything is written; a ``JournalError`` leaves the journal as it was.
        """
        home = journal_files.prepare_home(home)
        lock = HomeLock.take(home)
        try:
            if room is not None:
                room.before_opening()
            anchored = Anchors(anchors or Anchors.default_folder(), home)
            journal = cls._open_locked(home, lock, wall_ns, anchored, room)
            if room is not None:
                room.lay_out()
            return journal
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_locked(cls, home: Path, lock: HomeLock, wall_ns: int, anchors: Anchors, room: DiskRoom | None) -> Journal:
        path = home / journal_files.JOURNAL_NAME
        least = journal_files.read_incarnation(home)
        if not path.exists():
            begin(home, least, wall_ns)
        check_header(path)
        reader = JournalReader(path)
        try:
            tip = reader.check()
            compare(path, reader, tip, anchors)
            db = open_to_write(path, max(tip.incarnation, least or 0))
            try:
                tip = reader.tip()
                if least != tip.incarnation:
                    journal_files.write_incarnation(home, tip.incarnation)
                return cls(path=path, lock=lock, reader=reader, db=db, tip=tip, anchors=anchors, room=room)
            except BaseException:
                db.close()
                raise
        except OSError as error:
            reader.close()
            if is_full(error):
                raise full_disk(home) from error
            raise JournalError(
                f"the state folder {home} cannot be written ({error.strerror})", do="Mend the disk."
            ) from error
        except BaseException:
            reader.close()
            raise

    def close(self) -> None:
        """Harmless twice. A journal that failed is left as it is; otherwise the log is moved into the file."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._reader.close()
            with contextlib.suppress(sqlite3.Error):  # everything is in the log, and synced; the next opening moves it
                self._db.close()
        self._anchor.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def recover(self) -> RecoveredJournal:
        """The state's beginning: the snapshot, and the events after it."""
        seq, snapshot = self._reader.snapshot()
        rows = self._reader.tail()
        restored = False
        for row in self._reader.tail():
            if row.kind == audit.RESTORED:
                restored = True
            elif row.kind == _KIND_OF[OfficeOpened]:
                restored = False
        return RecoveredJournal(
            snapshot=snapshot,
            snapshot_seq=seq,
            entries=self._entries(rows),
            incarnation=self.incarnation,
            last_ns=self._tip.last_ns,
            clock_domain=self._tip.clock_domain,
            restored=restored,
        )

    def _entries(self, rows: Iterator[JournalRow]) -> Iterator[JournalEntry]:
        for row in rows:
            with not_opened(self.path):
                entry = entry_of(row)
            if entry is not None:
                yield entry

    # ---- writing ----

    def commit(self, events: Sequence[Event], now: Now) -> None:
        """One batch, all or nothing; durable when this returns. If it raises, nothing may be believed."""
        self._refuse_if_failed()
        if not events:
            return
        seq, audit_seq, head, domain = self._seq, self._audit_seq, self._head, self._domain
        audited: list[tuple[int, int, int, str, bytes, bytes]] = []
        plain: list[tuple[int, int, int, bytes, int]] = []
        size = 0
        for event in events:
            seq += 1
            body = _encode(event)
            size += len(body)
            kind = _KIND_OF[type(event)]
            if type(event) in AUDITED:
                audit_seq, head = seq, audit.link(head, seq, now.ns, now.wall_ns, kind, body)
                audited.append((seq, now.ns, now.wall_ns, kind, body, head))
                if isinstance(event, OfficeOpened):
                    domain = event.clock_domain
            else:
                plain.append((seq, now.ns, now.wall_ns, body, journal_schema.checksum(seq, now.ns, now.wall_ns, body)))

        def write() -> None:
            if audited:
                self._db.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)", audited)
            if plain:
                self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", plain)
            if domain != self._domain:
                journal_schema.put_meta(self._db, "clock", f"{now.ns} {domain}")

        self._transact(write)
        self._frames += 2 + bool(plain) + (size + 100 * len(events)) // 2048
        self._seq, self._audit_seq, self._head, self._domain = seq, audit_seq, head, domain
        self._last_ns = now.ns
        self._anchor.note(seq, audit_seq, head)

    def beat(self, now: Now) -> None:
        """Write the instant down if nothing else did so within the last second; and tidy the log while it is quiet."""
        self._refuse_if_failed()
        if self._domain is None or now.ns - self._last_ns < BEAT_EVERY_NS:
            return
        clock = f"{now.ns} {self._domain}"
        self._transact(lambda: journal_schema.put_meta(self._db, "clock", clock), checkpoint_at=CHECKPOINT_FRAMES // 2)
        self._frames += 1
        self._last_ns = now.ns

    def compact(self, snapshot: bytes, now: Now) -> None:
        """Keep the snapshot of the state after the last commit in place of the events before it. The audit stays."""
        self._refuse_if_failed()

        def write() -> None:
            self._db.execute("DELETE FROM events")
            self._db.execute("DELETE FROM snapshot")
            parts = range(0, max(1, len(snapshot)), SNAPSHOT_PART_BYTES)
            self._db.executemany(
                "INSERT INTO snapshot VALUES (?, ?)",
                ((n, snapshot[at : at + SNAPSHOT_PART_BYTES]) for n, at in enumerate(parts)),
            )
            journal_schema.put_meta(self._db, "snapshot", f"{self._seq} {hashlib.sha256(snapshot).hexdigest()}")
            if self._domain is not None:
                journal_schema.put_meta(self._db, "clock", f"{now.ns} {self._domain}")

        self._transact(write)
        self._frames = CHECKPOINT_FRAMES
        self._last_ns = now.ns

    def _transact(self, write: Callable[[], object], *, checkpoint_at: int = CHECKPOINT_FRAMES) -> None:
        """Do it in one transaction, twice if the disk was full and room for it could be made. Whatever else goes wrong,
        the journal is not used again."""
        try:
            try:
                self._attempt(write, checkpoint_at)
            except sqlite3.Error as error:
                if self._room is None or not is_full(error) or not self._room.remove_file():
                    raise
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._attempt(write, checkpoint_at)
        except Exception as error:
            raise self._fail(error) from error
        except BaseException as error:
            self._fail(error)
            raise

    def _attempt(self, write: Callable[[], object], checkpoint_at: int) -> None:
        if self._frames >= checkpoint_at:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._frames = 0
        self._db.execute("BEGIN IMMEDIATE")
        write()
        self._db.execute("COMMIT")

    def _fail(self, error: BaseException) -> JournalFailed:
        """Let go of the file without another write: while the reader is open, closing the writer checkpoints nothing;
        and the reader cannot write."""
        self._failure = str(error) or type(error).__name__
        for end in (self._db.close, self._reader.close):
            with contextlib.suppress(sqlite3.Error):
                end()
        return self._failed()

    def _failed(self) -> JournalFailed:
        return JournalFailed(f"the journal {self.path} could not be written ({self._failure})")

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failed()

    # ---- looking ----

    @property
    def seq(self) -> int:
        """The number of the last entry."""
        return self._seq

    def head(self) -> str:
        """The last hash of the audit chain."""
        return self._head.hex()

    def records(self, after: int = 0) -> Iterator[audit.AuditRecord]:
        """The audited entries with a higher number than ``after``; bills are folded from these."""
        return self._reader.records(after)

    def latest(self, most: int, naming: str = "") -> list[audit.AuditRecord]:
        """The newest audited entries, oldest first. It may run in a thread of its own while the office writes."""
        reader = JournalReader(self.path)
        try:
            return reader.latest(most, naming)
        finally:
            reader.close()

    def verify(self) -> AuditReport:
        """Walk the whole chain. It may run in a thread of its own while the office writes."""
        verdict = verify_file(self.path, self.anchors)
        return AuditReport(ok=verdict.ok, records=verdict.records, head=verdict.head.hex(), problem=verdict.problem)

    def backup(self, path: Path) -> int:
        """Copy the journal, as it is at one moment, to a new file; its size in bytes. It may run in a thread of its
        own while the office writes."""
        return backup.write_backup(self.path, path)


def entry_of(row: JournalRow | audit.AuditRecord) -> JournalEntry | None:
    """The event of a row; None for what the journal wrote about itself."""
    if row.kind in (audit.BEGAN, audit.RESTORED):
        return None
    return JournalEntry(seq=row.seq, ns=row.ns, wall_ns=row.wall_ns, event=_decode(row.body))


def verify_file(path: Path, anchors: Anchors) -> audit.ChainVerdict:
    """Walk the chain of a journal and compare it with its anchors."""
    noted = anchors.read_all()
    reader = JournalReader(path)
    try:
        return audit.verify(reader.records(), noted, last_seq=reader.tip().seq)
    finally:
        reader.close()


# -------------------------------------------------------------------------------------------------------------- opening
#
# Opens a journal: creates it, compares it with its anchor, migrates it, and lays out its log.


LOG_BYTES: Final = 4 << 20
"""The write-ahead log as it is laid out."""


def begin(home: Path, least: int | None, wall_ns: int) -> None:
    """A journal where there was none. It gets its name only when it is whole, so half of one is never found."""
    path = home / journal_files.JOURNAL_NAME
    traces = [name for name in (path.name + "-wal", path.name + "-journal") if (home / name).exists()]
    if least is not None or traces:
        raise JournalError(
            f"the journal {path} is gone, though this folder had one",
            do="Put a backup in its place with `sublet restore FILE`. To begin with nothing, use a new folder.",
        )
    temporary = home / (path.name + ".new")
    try:
        journal_files.remove_database(temporary)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        db = journal_schema.connect_unpublished(temporary)
        try:
            db.execute("BEGIN IMMEDIATE")
            journal_schema.create(db)
            identity = secrets.token_hex(16)
            journal_schema.put_meta(db, "journal", identity)
            journal_schema.put_meta(db, "incarnation", "1")
            body = msgspec.json.encode(audit.Began(journal=identity, incarnation=1))
            hashed = audit.link(audit.GENESIS, 1, 0, wall_ns, audit.BEGAN, body)
            db.execute("INSERT INTO audit VALUES (1, 0, ?, ?, ?, ?)", (wall_ns, audit.BEGAN, body, hashed))
            db.execute("COMMIT")
            journal_schema.close_to_publish(db)
        finally:
            db.close()
        journal_files.publish(temporary, path)
    except (OSError, sqlite3.Error) as error:
        with contextlib.suppress(OSError):
            journal_files.remove_database(temporary)
        if is_full(error):
            raise JournalError(
                f"the disk of the state folder {home} has no room for a new journal", do="Make room there."
            ) from error
        raise JournalError(
            f"a new journal cannot be written to {home} ({error})", do="Make room or mend the disk."
        ) from error


def compare(path: Path, reader: JournalReader, tip: Tip, anchors: Anchors) -> None:
    """Refuse a journal that is older than what this office already answered on: its epochs would be given out twice."""
    for anchor in anchors.read_all():
        if anchor.journal != tip.journal:
            continue  # for `audit verify` to judge
        found = next(reader.records(anchor.audit_seq - 1), None)
        if anchor.seq > tip.seq or found is None or found.seq != anchor.audit_seq or found.hash != anchor.head:
            raise JournalError(
                f"the journal {path} ends at entry {tip.seq}, but entry {anchor.seq} of it was written: its end is "
                "lost, or an older copy was put in its place. It was not changed",
                do=f"If a copy was put back on purpose, say so with `sublet restore {path}`: epochs then begin anew "
                "and no lease goes on. Otherwise restore the newest backup.",
            )


def open_to_write(path: Path, incarnation: int) -> sqlite3.Connection:
    with not_opened(path):
        db = sqlite3.connect(path, isolation_level=None, timeout=1.0, check_same_thread=False)
        try:
            if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise JournalError(
                    f"the disk under {path} has no shared memory for a write-ahead log",
                    do="Set SUBLET_HOME to a folder on a local disk.",
                )
            for pragma in ("synchronous = FULL", "wal_autocheckpoint = 0", "cell_size_check = ON"):
                db.execute(f"PRAGMA {pragma}")
            _migrate(db)
            if journal_schema.get_meta(db, "incarnation") != str(incarnation):
                db.execute("BEGIN IMMEDIATE")
                journal_schema.put_meta(db, "incarnation", str(incarnation))
                db.execute("COMMIT")
            if db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                raise sqlite3.OperationalError("another program reads it")
            _lay_out_log(path)
        except BaseException:
            db.close()
            raise
        return db


def _migrate(db: sqlite3.Connection) -> None:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    while version < journal_schema.VERSION:
        db.execute("BEGIN IMMEDIATE")
        journal_schema.MIGRATIONS[version](db)
        version += 1
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("COMMIT")


def _lay_out_log(path: Path) -> None:
    """Zeros are no frames: SQLite overwrites them from the start, and a sync then changes no file size.

    The log's name is made durable here too. SQLite syncs the folder at the first commit, but does not look at what
    becomes of that; a log without a name would go with the power, and every answer in it.
    """
    fd = os.open(f"{path}-wal", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            os.pwrite(fd, bytes(LOG_BYTES), 0)
        except OSError as error:
            if not is_full(error):  # on a full disk a log that is not laid out will do
                raise
        os.fsync(fd)
    finally:
        os.close(fd)
    journal_files.sync_folder(path.parent)
