"""The records of sessions on disk: one SQLite database that any process of its user appends to.

An append compares and swaps: it says which record it believes to be the last, and is refused if another came in
between; then the caller reads what is new and decides again. It returns when the record is on disk. There is no state
beside the records, so nothing can disagree with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from blake3 import blake3

from sublet.client.home import make_private_dir
from sublet.errors import InvalidRequest, JournalError
from sublet.state.checkpoints.atomic_files import name_once, sync_file
from sublet.studio.records import Entry, Record
from sublet.wire.decoders import decoder

DATABASE: Final = "sessions.db"
LOCK: Final = "studio.lock"
"""Held by a studio as long as it runs."""
BUSY_S: Final = 10.0
"""How long another process may keep the database to itself; it takes milliseconds."""
CHECK_BYTES: Final = 16
FRESH_NS: Final = 50_000_000
"""Two writes within one tick of the kernel's clock leave the same time; a tick is at most 10 ms."""
NO_UPGRADES: Final[Mapping[int, Sequence[str]]] = {}
_SCHEMA: Final = """
CREATE TABLE record (
    seq INTEGER PRIMARY KEY,
    session TEXT NOT NULL,
    at_ns INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum BLOB NOT NULL
) STRICT
"""


class Store(Protocol):
    """Where records are kept. Safe to use from several threads and processes."""

    def read(self, after: int) -> list[Entry]:
        """Every record behind this one, in order."""

    def append(self, entry: Entry) -> bool:
        """Append a record; it is durable when this returns True. False: its ``seq`` is taken, and nothing was done."""


class Database:
    """A SQLite file in a folder of its user's, which any process of that user may open."""

    def __init__(
        self, path: Path, schema: str, *, version: int, what: str, upgrades: Mapping[int, Sequence[str]] = NO_UPGRADES
    ) -> None:
        """``what`` it holds, for messages. ``upgrades``: by version, the statements that make the next one of it."""
        self.path = make_private_dir(path.parent) / path.name
        self._files = str(self.path), f"{self.path}-wal"
        self._schema, self._version, self._what, self._upgrades = schema, version, what, upgrades
        self._lock = threading.Lock()
        self._kept: sqlite3.Connection | None = None
        self._keepers = 0

    def make(self) -> None:
        """An empty one, where there is none yet."""
        with self._locked():
            if not self.path.exists():
                self._make()

    @contextlib.contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Opened for each use: a program holds it for years, forks, and asks it for something twice a day."""
        with self._locked(), contextlib.ExitStack() as stack:
            if not self.path.exists():
                self._make()
            db = self._kept
            if db is None:
                db = stack.enter_context(contextlib.closing(_connected(self.path)))
            if _version(db) in self._upgrades:
                self._upgrade(db)
            if (version := _version(db)) != self._version:
                raise JournalError(
                    f"{self._what} in {self.path} were written by another Sublet (version {version})",
                    do="Use that one, or upgrade this one. Nothing was changed.",
                )
            yield db

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (OSError, sqlite3.Error) as error:
                raise JournalError(
                    f"{self._what} in {self.path} cannot be read or written: {error}",
                    do="Make room on its disk, or mend it; nothing was changed.",
                ) from error

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """In one transaction, which is undone where the block raises, and on disk when it has ended."""
        with self.opened() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """In the block one connection is kept and used by all threads. A write is synced twice then, and not five
        times: SQLite moves the log into the file, and removes it, when the last connection is closed."""
        with self.opened():
            if self._kept is None:
                keeps = _connected(self.path)
                try:
                    _version(keeps)  # a connection that has read nothing keeps nothing
                except BaseException:
                    keeps.close()
                    raise
                self._kept = keeps
            self._keepers += 1
        try:
            yield
        finally:
            with self._locked():
                self._keepers -= 1
                if not self._keepers and self._kept is not None:
                    self._kept.close()
                    self._kept = None

    def mark(self) -> Hashable:
        """Another one whenever something was written, by whichever process; soon after that another one each time."""
        now_ns = time.time_ns()
        found: list[tuple[int, int]] = []
        for name in self._files:
            try:
                seen = os.stat(name)
            except OSError:
                seen = None
            # a log without content is there while another thread reads
            found.append((0, 0) if seen is None or not seen.st_size else (seen.st_mtime_ns, seen.st_size))
        is_fresh = any(abs(now_ns - at_ns) < FRESH_NS for at_ns, _ in found)
        return (*found, now_ns) if is_fresh else tuple(found)

    def _upgrade(self, db: sqlite3.Connection) -> None:
        """To the version of this program, wholly or not at all; another process may do it in this moment."""
        db.execute("BEGIN IMMEDIATE")
        try:
            while statements := self._upgrades.get(version := _version(db)):
                for statement in statements:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _make(self) -> None:
        """An empty database, which gets its name when it is whole; where two are made, one stays. It gets a log when
        all of it is in the file: moving a log there may fail at closing, and closing says nothing."""
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}~")
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            with contextlib.closing(_connected(temporary)) as db:
                db.execute("PRAGMA synchronous = OFF")  # it is synced as a whole, before it has its name
                db.executescript(f"BEGIN; {self._schema}; PRAGMA user_version = {self._version}; COMMIT")
                db.execute("PRAGMA journal_mode = WAL")
            sync_file(temporary)
            with contextlib.suppress(FileExistsError):
                name_once(temporary, self.path)
        finally:
            for name in (temporary, f"{temporary}-wal", f"{temporary}-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)


class SqliteStore:
    """The records of one user's sessions, in a database."""

    def __init__(self, folder: Path) -> None:
        self._database = Database(folder / DATABASE, _SCHEMA, version=1, what="the sessions")
        self.path = self._database.path
        self._decoder = decoder(Record)

    def read(self, after: int) -> list[Entry]:
        if not self.path.exists():
            return []
        with self._database.opened() as db:
            rows = db.execute(
                "SELECT seq, session, at_ns, body, sum FROM record WHERE seq > ? ORDER BY seq", (after,)
            ).fetchall()
        entries = [self._entry(*row) for row in rows]
        if [entry.seq for entry in entries] != list(range(after + 1, after + 1 + len(entries))):
            raise self._damaged("records are missing")
        return entries

    def make(self) -> None:
        """The first append need not make the database then, which is synced three times."""
        self._database.make()

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """In the block an append takes half of its time, on a disk. Other threads and processes notice nothing."""
        return self._database.kept()

    def mark(self) -> Hashable:
        """Another one whenever a record was appended, by whichever process."""
        return self._database.mark()

    def append(self, entry: Entry) -> bool:
        body = msgspec.json.encode(entry.record)
        row = (entry.seq, entry.session, entry.at_ns, body, _sum(entry.seq, entry.session, entry.at_ns, body))
        with self._database.changing() as db:
            last: int = db.execute("SELECT coalesce(max(seq), 0) FROM record").fetchone()[0]
            if entry.seq != last + 1:
                return False
            db.execute("INSERT INTO record VALUES (?, ?, ?, ?, ?)", row)
        return True

    def _entry(self, seq: int, session: str, at_ns: int, body: bytes, check: bytes) -> Entry:
        if check != _sum(seq, session, at_ns, body):
            raise self._damaged(f"record {seq} is not what was written")
        try:
            record = self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise self._damaged(f"record {seq} cannot be read ({error})") from error
        return Entry(seq=seq, session=session, at_ns=at_ns, record=record)

    def _damaged(self, how: str) -> JournalError:
        return JournalError(
            f"the sessions in {self.path} are damaged: {how}",
            do="Keep the file for inspection and put a backup in its place. Leases and volumes are not affected.",
        )


@contextlib.contextmanager
def studio_lock(folder: Path) -> Iterator[None]:
    """One studio for one folder of sessions, or a restore of it. The system takes it back when the process ends."""
    lock = os.open(make_private_dir(folder) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            do = "Use that one, or end it first."
            raise InvalidRequest(f"a studio runs already for {folder.parent}", do=do) from None
        yield
    finally:
        os.close(lock)


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _sum(seq: int, session: str, at_ns: int, body: bytes) -> bytes:
    head = f"{seq} {session} {at_ns} ".encode()
    return blake3(head + body).digest(CHECK_BYTES)
