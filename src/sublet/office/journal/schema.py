"""The journal's tables, and their migrations.

A fact is stored once: in ``audit`` if it is audited, else in ``events``. Both count from one sequence without a gap, so
a row that vanished is noticed. Rows of ``events`` go when a snapshot stands for them; rows of ``audit`` stay for good.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

APPLICATION_ID: Final = 0x5355424C
"""``SUBL``, in the file's header."""
VERSION: Final = 1

TABLES: Final[dict[str, str]] = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID",
    "audit": (
        "CREATE TABLE audit (seq INTEGER PRIMARY KEY, ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL, "
        "kind TEXT NOT NULL, body BLOB NOT NULL, hash BLOB NOT NULL)"
    ),
    "events": (
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL, "
        "body BLOB NOT NULL, crc INTEGER NOT NULL)"
    ),
    "snapshot": "CREATE TABLE snapshot (part INTEGER PRIMARY KEY, body BLOB NOT NULL)",
}
"""The schema of ``VERSION``; what is in the file is compared with it, letter by letter."""

META_KEYS: Final = frozenset(("journal", "incarnation", "clock", "snapshot"))
"""Which journal this is; its incarnation; the last instant and its clock; which entry the snapshot stands for."""

MIGRATIONS: Final[dict[int, Callable[[sqlite3.Connection], None]]] = {}
"""Version → what makes the next one of it. Each runs in one transaction with the new version number. A journal of the
first version has nothing to come from."""


def connect_unpublished(path: Path) -> sqlite3.Connection:
    """To a file that is not relied on yet: it is synced as a whole when it gets its name, and thrown away otherwise."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = MEMORY").fetchall()
    db.execute("PRAGMA synchronous = OFF")
    return db


def close_to_publish(db: sqlite3.Connection) -> None:
    """Leave one file that is in write-ahead mode already: switching later would write a rollback log, and a kill there
    would leave what a reader cannot mend."""
    db.execute("PRAGMA journal_mode = WAL").fetchall()
    db.close()


def create(db: sqlite3.Connection) -> None:
    """An empty journal, inside the caller's transaction."""
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    for statement in TABLES.values():
        db.execute(statement)


_NUMBERS: Final = struct.Struct(">qqq")


def checksum(seq: int, ns: int, wall_ns: int, body: bytes) -> int:
    """Of a row of ``events``; a row of ``audit`` has its hash."""
    return zlib.crc32(body, zlib.crc32(_NUMBERS.pack(seq, ns, wall_ns)))


def get_meta(db: sqlite3.Connection, key: str) -> str | None:
    """None if there is no such key. A value that does not fit its checksum is a ``ValueError``."""
    row = db.execute("SELECT value, crc FROM meta WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    value, crc = row
    if not isinstance(value, str) or zlib.crc32(f"{key}={value}".encode()) != crc:
        raise ValueError(f"the entry {key!r} does not fit its checksum")
    return value


def check_meta(db: sqlite3.Connection) -> None:
    """Every entry has a key we know: one whose key was damaged would else pass for one that is not there."""
    for (key,) in db.execute("SELECT key FROM meta").fetchall():
        if key not in META_KEYS:
            raise ValueError(f"it has an entry {key!r} that no journal has")
        get_meta(db, key)


def put_meta(db: sqlite3.Connection, key: str, value: str) -> None:
    """Inside the caller's transaction."""
    db.execute(
        "INSERT INTO meta VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value, crc = excluded.crc",
        (key, value, zlib.crc32(f"{key}={value}".encode())),
    )
