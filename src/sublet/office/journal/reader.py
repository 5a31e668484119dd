"""Reads a journal without changing it, and verifies everything it reads.

Each row has a checksum or is a link of the audit chain, the sequence has no gap, the schema is compared letter by
letter and SQLite checks its pages. What does not fit is refused as a whole: a journal that was damaged is put right by
a backup, never by guessing.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from sublet.errors import JournalError
from sublet.office.journal import audit
from sublet.office.journal.disk_room import FULL
from sublet.office.journal.schema import APPLICATION_ID, TABLES, VERSION, check_meta, checksum, get_meta

CHECK_WHOLE_MAX_BYTES: Final = 256 << 20
"""Up to this size every page is checked whenever the journal is opened; above it, only what is read, so that an office
with years of audit still starts at once. ``verify`` and ``backup`` always check everything."""

_HEADER_BYTES: Final = 100
_PAGE_ROWS: Final = 1000


class JournalRow(NamedTuple):
    """One entry. ``kind`` is None where it is not audited."""

    seq: int
    ns: int
    wall_ns: int
    kind: str | None
    body: bytes


class Tip(NamedTuple):
    """Where a journal stands."""

    journal: str
    incarnation: int
    seq: int
    audit_seq: int
    head: bytes
    snapshot_seq: int
    clock_domain: str | None
    last_ns: int | None


@contextmanager
def not_opened(path: Path) -> Iterator[None]:
    """Foreign errors become ours: what happened, and that nothing was changed."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if is_full(error):
            raise full_disk(path.parent) from error
        raise JournalError(
            f"the journal {path} cannot be read ({error}); it was not changed",
            do="Check the disk, and that no other program has the file open. If it stays so, put a backup in its place "
            "with `sublet restore FILE`.",
        ) from error
    except (sqlite3.Error, struct.error, AttributeError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def is_full(error: sqlite3.Error | OSError) -> bool:
    """Whether the disk had no room. SQLite says so when the kernel took less than it was to write; of a sync that
    failed it says something else."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def full_disk(home: Path) -> JournalError:
    """A disk that is full is no reason to put a backup in the journal's place."""
    return JournalError(
        f"the disk of the state folder {home} is full, so the journal cannot be opened; it was not changed",
        do="Make some MiB of room there (remove or move other files) and start again: no backup is needed. What leases "
        "have on the disk the office gives back once it runs.",
    )


def _damaged(path: Path, what: str) -> JournalError:
    return JournalError(
        f"the journal {path} is damaged ({what}); it was not changed",
        do="Put a backup in its place with `sublet restore FILE`; the damaged one is moved aside, not deleted.",
    )


def check_header(path: Path) -> int:
    """The schema version, from the first bytes of the file, so that nothing is touched that is not ours to open."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise JournalError(
            f"the journal {path} cannot be read ({error.strerror})", do="Give yourself the right to read it."
        ) from error
    if len(header) < _HEADER_BYTES or header[:16] != b"SQLite format 3\0":
        raise _damaged(path, "it is not a database")
    if int.from_bytes(header[68:72]) != APPLICATION_ID:
        raise _damaged(path, "it is not a journal of Sublet")
    return _check_version(path, int.from_bytes(header[60:64]))


def _check_version(path: Path, version: int) -> int:
    if version > VERSION:
        raise JournalError(
            f"the journal {path} has version {version}; this Sublet reads versions up to {VERSION}. It was not changed",
            do="Use the newer Sublet that wrote it, or restore a backup from before the update.",
        )
    if version < 1:
        raise _damaged(path, f"its version is {version}")
    return version


class JournalReader:
    """A connection that cannot write. Each method leaves no transaction open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with not_opened(path):
            self._db = sqlite3.connect(
                f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            try:
                self._db.execute("PRAGMA cell_size_check = ON")
                self._db.execute("PRAGMA query_only = ON")
                self.version = _check_version(path, self._db.execute("PRAGMA user_version").fetchone()[0])
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        self._db.close()

    # ---- checks ----

    def check(self, *, whole: bool = False) -> Tip:
        """Everything the office starts from: pages, schema, snapshot, the entries after it, the end of the chain."""
        with not_opened(self.path):
            if whole or self.path.stat().st_size <= CHECK_WHOLE_MAX_BYTES:
                found = self._db.execute(f"PRAGMA {'integrity_check' if whole else 'quick_check'}(1)").fetchone()[0]
                if found != "ok":
                    raise ValueError(found)
            if self.version == VERSION:
                self._check_schema()
                check_meta(self._db)
            self.snapshot()
            for _ in self.tail():
                pass
            return self.tip()

    def _check_schema(self) -> None:
        found = self._db.execute("SELECT name, type, sql FROM sqlite_schema").fetchall()
        if sorted(found) != sorted((name, "table", sql) for name, sql in TABLES.items()):
            raise ValueError("its tables are not those of a journal")

    # ---- what is in it ----

    def tip(self) -> Tip:
        with not_opened(self.path):
            journal = get_meta(self._db, "journal")
            incarnation = get_meta(self._db, "incarnation")
            if journal is None or incarnation is None:
                raise ValueError("it does not say which journal it is")
            snapshot_seq, _ = self._snapshot_about()
            last = self._db.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
            if last is None:
                raise ValueError("its audit chain is empty")
            entry = self._db.execute(
                "SELECT seq, ns FROM (SELECT * FROM (SELECT seq, ns FROM audit ORDER BY seq DESC LIMIT 1) "
                "UNION ALL SELECT * FROM (SELECT seq, ns FROM events ORDER BY seq DESC LIMIT 1)) ORDER BY seq DESC"
            ).fetchone()
            clock = get_meta(self._db, "clock")
            domain, last_ns = None, None
            if clock is not None:
                beat, _, domain = clock.partition(" ")
                last_ns = max(int(beat), entry[1])
            return Tip(
                journal=journal,
                incarnation=int(incarnation),
                seq=max(entry[0], snapshot_seq),
                audit_seq=last[0],
                head=bytes(last[1]),
                snapshot_seq=snapshot_seq,
                clock_domain=domain,
                last_ns=last_ns,
            )

    def _snapshot_about(self) -> tuple[int, str]:
        about = get_meta(self._db, "snapshot")
        if about is None:
            return 0, ""
        seq, _, digest = about.partition(" ")
        return int(seq), digest

    def snapshot(self) -> tuple[int, bytes | None]:
        """(seq, snapshot): the state after the entry of that number. (0, None) if none was written."""
        with not_opened(self.path):
            seq, digest = self._snapshot_about()
            if not digest:
                return 0, None
            body = b"".join(row[0] for row in self._db.execute("SELECT body FROM snapshot ORDER BY part"))
            if hashlib.sha256(body).hexdigest() != digest:
                raise ValueError("its snapshot does not fit its checksum")
            return seq, body

    def tail(self) -> Iterator[JournalRow]:
        """The entries after the snapshot, each checked, without a gap; and at least the last link of the chain."""
        with not_opened(self.path):
            snapshot_seq, _ = self._snapshot_about()
            # The chain is taken up two records before, so that its last link is looked at even if nothing follows.
            known = self._db.execute(
                "SELECT seq, ns, wall_ns, kind, body, hash FROM audit WHERE seq <= ? ORDER BY seq DESC LIMIT 2",
                (snapshot_seq,),
            ).fetchall()
            prev = bytes(known[1][5]) if len(known) == 2 else audit.GENESIS
            if known:
                prev = _linked(prev, *known[0])
            expected = snapshot_seq
            cursor = self._db.execute(
                "SELECT seq, ns, wall_ns, kind, body, hash FROM audit WHERE seq > ? UNION ALL "
                "SELECT seq, ns, wall_ns, NULL, body, crc FROM events WHERE seq > ? ORDER BY seq",
                (snapshot_seq, snapshot_seq),
            )
            for seq, ns, wall_ns, kind, body, proof in cursor:
                expected += 1
                if seq != expected:
                    raise ValueError(f"entry {expected} is missing")
                if kind is not None:
                    prev = _linked(prev, seq, ns, wall_ns, kind, body, proof)
                elif checksum(seq, ns, wall_ns, body) != proof:
                    raise ValueError(f"entry {seq} does not fit its checksum")
                yield JournalRow(seq, ns, wall_ns, kind, body)

    def records(self, after: int = 0) -> Iterator[audit.AuditRecord]:
        """The audit chain, in pages of rows, so that a slow reader blocks nothing. ``audit.verify`` checks it."""
        while True:
            with not_opened(self.path):
                rows = self._db.execute(
                    "SELECT seq, ns, wall_ns, kind, body, hash FROM audit WHERE seq > ? ORDER BY seq LIMIT ?",
                    (after, _PAGE_ROWS),
                ).fetchall()
            for row in rows:
                yield audit.AuditRecord(*row)
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1][0]

    def latest(self, most: int, naming: str = "") -> list[audit.AuditRecord]:
        """The newest records of the chain, oldest first; only those that name this lease, tenant, device, group,
        reservation or budget, if one is given. Not checked: a proof walks the whole chain."""
        named = json.dumps(naming, ensure_ascii=False)
        budgets = (f'"tenant/{named[1:-1]}/', f'"group/{named[1:-1]}/')  # their ids begin with whose they are
        with not_opened(self.path):
            rows = self._db.execute(
                "SELECT seq, ns, wall_ns, kind, body, hash FROM audit WHERE instr(body, CAST(? AS BLOB)) "
                "OR instr(body, CAST(? AS BLOB)) OR instr(body, CAST(? AS BLOB)) ORDER BY seq DESC LIMIT ?",
                (*((named, *budgets) if naming else ("{", "{", "{")), most),
            ).fetchall()
        return [audit.AuditRecord(*row) for row in reversed(rows)]

    def copy_to(self, target: sqlite3.Connection) -> None:
        """A consistent copy, also while the office writes."""
        with not_opened(self.path):
            self._db.backup(target)


def _linked(prev: bytes, seq: int, ns: int, wall_ns: int, kind: str, body: bytes, hashed: bytes) -> bytes:
    if audit.link(prev, seq, ns, wall_ns, kind, body) != hashed:
        raise ValueError(f"audit record {seq} does not fit the one before it")
    return hashed
