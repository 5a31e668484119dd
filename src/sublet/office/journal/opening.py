"""Opens a journal: creates it, compares it with its anchor, migrates it, and lays out its log."""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from pathlib import Path
from typing import Final

import msgspec

from sublet.errors import JournalError
from sublet.office.journal import audit
from sublet.office.journal import files as journal_files
from sublet.office.journal import schema as journal_schema
from sublet.office.journal.files import Anchors
from sublet.office.journal.reader import Reader, Tip, is_full, not_opened

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


def compare(path: Path, reader: Reader, tip: Tip, anchors: Anchors) -> None:
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
