"""Backs up the journal, and restores a backup.

A restored backup does not know what happened after it was made. So it begins a new incarnation, higher than any ever
used in its home; no lease in it goes on; and its audit chain names the heads that were given up for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sublet.errors import JournalError
from sublet.office.journal import audit
from sublet.office.journal import files as journal_files
from sublet.office.journal import schema as journal_schema
from sublet.office.journal.files import Anchors, HomeLock
from sublet.office.journal.reader import JournalReader, Tip, check_header

SURELY_NEW = 1_000_000
"""Added to the highest incarnation known where the file that says it is damaged."""


def write_backup(journal: Path, path: Path) -> int:
    """Publish a copy of the journal under a new name, once it is proven that it can be restored. Its size in bytes."""
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise JournalError(f"{path} exists; nothing was written", do="Name a new file.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with _removed(temporary):
            _copy(journal, temporary)
            _examine(temporary)
            journal_files.publish_new(temporary, path)
            return path.stat().st_size
    except FileExistsError:
        raise JournalError(f"{path} exists; nothing was written", do="Name a new file.") from None
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise JournalError(
            f"the backup {path} could not be written ({why}); the journal is unharmed",
            do="Make room, or name another place.",
        ) from error


def restore(
    source: Path,
    home: Path,
    *,
    wall_ns: int,
    anchors: Path | None = None,
    beside: Callable[[Path], object] | None = None,
) -> int:
    """Put a backup in the place of the journal of this home; the incarnation that begins with it.

    ``beside`` puts back what belongs to the journal, before it changes; it is given the folder for what is moved aside.

    The backup is checked as a whole first. The journal that was there is moved aside into ``replaced-N``. Killed at any
    point, this leaves the old journal, the restored one, or none, which the office refuses and a second call mends.
    """
    source = Path(os.path.abspath(source))
    if not source.is_file():
        raise JournalError(f"there is no backup {source}", do="Name a file that `sublet backup` wrote.")
    home = journal_files.prepare_home(home)
    lock = HomeLock.take(home)
    temporary = home / (journal_files.JOURNAL_NAME + ".restoring")
    try:
        with _removed(temporary):
            check_header(source)
            _copy(source, temporary)
            tip = _examine(temporary)
            noted = Anchors(anchors or Anchors.default_folder(), home)
            incarnation = _highest(home, tip) + 1
            tip = _stamp(temporary, tip, incarnation, noted.read_all(), wall_ns)
            # From here on every opening of this home begins this incarnation or a higher one, whatever it finds.
            journal_files.write_incarnation(home, incarnation)
            _move_aside(home, beside)
            journal_files.publish(temporary, home / journal_files.JOURNAL_NAME)
        anchor = journal_files.AnchorFile(noted, tip.journal)
        anchor.note(tip.seq, tip.audit_seq, tip.head)
        anchor.close()
        return incarnation
    except (OSError, sqlite3.Error) as error:
        raise JournalError(
            f"{source} could not be restored to {home} ({error})", do="Make room or mend the disk, then restore again."
        ) from error
    finally:
        lock.release()


def _copy(source: Path, target: Path) -> None:
    """Through SQLite, so that what still stands in a write-ahead log comes along; to one file that stands alone."""
    reader = JournalReader(source)
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        db = journal_schema.connect_unpublished(target)
        try:
            reader.copy_to(db)
            db.execute("PRAGMA journal_mode = DELETE").fetchall()
        finally:
            db.close()
    finally:
        reader.close()


def _examine(path: Path) -> Tip:
    """Everything: pages, schema, snapshot, entries, and the whole audit chain."""
    reader = JournalReader(path)
    try:
        tip = reader.check(whole=True)
        verdict = audit.verify(reader.records())
    finally:
        reader.close()
    if verdict.problem is not None:
        raise JournalError(
            f"the audit chain in {path} does not hold ({verdict.problem}); nothing was changed",
            do="Use another backup.",
        )
    return tip


def _highest(home: Path, tip: Tip) -> int:
    """The highest incarnation that this home, its journal or the backup knows of."""
    known = [tip.incarnation]
    with contextlib.suppress(JournalError):  # the journal may be what is broken; the file beside it knows as well
        reader = JournalReader(home / journal_files.JOURNAL_NAME)
        try:
            known.append(reader.tip().incarnation)
        finally:
            reader.close()
    try:
        known.append(journal_files.read_incarnation(home) or 0)
    except JournalError:
        return max(known) + SURELY_NEW
    return max(known)


def _stamp(path: Path, tip: Tip, incarnation: int, replaced: tuple[audit.Anchor, ...], wall_ns: int) -> Tip:
    """Write into the copy that it is a restored journal: a new identity, and a record in its chain."""
    identity, seq, ns = secrets.token_hex(16), tip.seq + 1, tip.last_ns or 0
    body = msgspec.json.encode(
        audit.RestoreRecord(
            journal=identity, incarnation=incarnation, replaced=tuple(anchor.text for anchor in replaced)
        )
    )
    head = audit.link(tip.head, seq, ns, wall_ns, audit.RESTORED, body)
    db = journal_schema.connect_unpublished(path)
    try:
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?)", (seq, ns, wall_ns, audit.RESTORED, body, head))
        journal_schema.put_meta(db, "journal", identity)
        journal_schema.put_meta(db, "incarnation", str(incarnation))
        db.execute("COMMIT")
        journal_schema.close_to_publish(db)
    finally:
        db.close()
    return tip._replace(journal=identity, incarnation=incarnation, seq=seq, audit_seq=seq, head=head)


def _move_aside(home: Path, beside: Callable[[Path], object] | None) -> None:
    """The file first: a journal without its log is refused, but a log without its journal would be taken for another's
    if it stayed."""
    names = [
        name
        for end in ("", "-wal", "-shm", "-journal")
        if os.path.lexists(home / (name := journal_files.JOURNAL_NAME + end))
    ]
    if not names and beside is None:
        return
    number = 1
    while os.path.lexists(aside := home / f"replaced-{number}"):
        number += 1
    aside.mkdir(mode=0o700)
    if beside is not None:
        beside(aside)
    for name in names:
        os.rename(home / name, aside / name)
        journal_files.sync_folder(home)
    journal_files.sync_folder(aside)
    if not os.listdir(aside):
        aside.rmdir()


@contextlib.contextmanager
def _removed(temporary: Path) -> Iterator[None]:
    """Nothing half-made is there before or after, except after a kill."""
    journal_files.remove_database(temporary)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            journal_files.remove_database(temporary)
