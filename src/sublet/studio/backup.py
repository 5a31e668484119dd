"""Backs up office and studio in one file, consistent with each other, and restores both.

The file is a tar archive without compression, so that people can look into it. Its first member lists the others, each
with size and BLAKE3 hash; then come the studio's files, then the journal of the office.

Consistent by order: **what names is copied before what is named.** People name sessions (the scope of a token), records
of sessions name leases and volumes of the journal; so people are copied first, then records, then the journal. Whatever
a copy names was there when the later copy was made. What was granted in between is in the journal alone, where the
studio looks for it by the session's label. To put them back the studio's files change places first, so that killed in
between the order holds as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import secrets
import shutil
import sqlite3
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, Literal

import msgspec
from blake3 import blake3

from sublet.client.home import make_private_dir
from sublet.errors import JournalError, SubletError
from sublet.state.checkpoints.atomic_files import name_once, read_whole, sync_file, sync_folder, write_synced
from sublet.studio.office import FOLDER
from sublet.studio.people import DATABASE as PEOPLE
from sublet.studio.people import People
from sublet.studio.records import Session, fold_all
from sublet.studio.right import FILE as OFFICE_TOKEN
from sublet.studio.states import SessionTransitionError
from sublet.studio.store import DATABASE as SESSIONS
from sublet.studio.store import LOCK, SqliteStore
from sublet.values import shown
from sublet.wire.decoders import decode_as

VERSION: Final = 1
MANIFEST: Final = "manifest.json"
MANIFEST_BYTES_MAX: Final = 16 << 20
FILE_BYTES_MAX: Final = 16 << 20
"""Of one that is no database."""
JOURNAL: Final = "journal.db"
RESTORING: Final = f"{FOLDER}.restoring"
"""In the state folder, while a backup is unpacked and checked."""
_PIECE: Final = 1 << 20
_RECORD: Final = tarfile.RECORDSIZE
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,200}(/[A-Za-z0-9][\w.-]{0,200}){0,8}", re.ASCII)
_LEFT_OUT: Final = re.compile(rf"\..*|.*~|.*-wal|.*-shm|.*-journal|{re.escape(LOCK)}|{re.escape(OFFICE_TOKEN)}")
"""Also the studio's secret for the office, which it makes anew where there is none."""
_SQLITE: Final = b"SQLite format 3\0"
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class BackupPart(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the backup."""

    name: str
    bytes: int
    blake3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is in it. Fields are only ever added, each with a usual value; what would be misread gets a new version."""

    kind: Literal["backup of office and studio"] = "backup of office and studio"
    version: int = VERSION
    made_at: str
    parts: list[BackupPart]


def write_backup(home: Path, path: Path, copy_journal: Callable[[Path], object], *, made_at: str) -> int:
    """Publish a copy of studio and office under a new name, once it is proven that it can be restored. Its size in
    bytes. ``copy_journal`` makes that of the office's journal; it is called after the studio was copied."""
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        raise _exists(path)
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    archive = staging / "archive"
    try:
        staging.mkdir(mode=0o700)
        try:
            copy = staging / FOLDER
            copy_studio(home / FOLDER, copy)
            copy_journal(staging / JOURNAL)
            check_studio(copy)
            _pack(staging, archive, made_at)
            name_once(archive, path)
            return path.stat().st_size
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except FileExistsError:
        raise _exists(path) from None
    except (OSError, sqlite3.Error) as error:
        raise JournalError(
            f"the backup {path} could not be written ({getattr(error, 'strerror', None) or error})",
            do="Make room, or name another place; nothing else was changed.",
        ) from error


def is_backup(path: Path) -> bool:
    """Whether this is a file of `write_backup`, cut off or whole, and not a journal alone."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MANIFEST) + 1) == MANIFEST.encode() + b"\0"
    except OSError:
        return False


@contextlib.contextmanager
def unpacked(source: Path, home: Path) -> Iterator[Path]:
    """A folder in this home with the files of a backup, checked as a whole; it is removed afterwards. The caller holds
    the studio's lock. Raises ``JournalError``."""
    folder = make_private_dir(home) / RESTORING
    shutil.rmtree(folder, ignore_errors=True)  # what a restore that was killed has left
    folder.mkdir(mode=0o700)
    try:
        try:
            _unpack(source, folder)
            check_studio(folder / FOLDER)
        except (OSError, sqlite3.Error, tarfile.TarError) as error:
            raise _damaged(source, getattr(error, "strerror", None) or str(error)) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(unpacked_folder: Path, home: Path, aside: Path) -> None:
    """Exchange the studio's files for those of the backup in one step; the old ones are in ``aside`` afterwards."""
    new, old = aside / FOLDER, home / FOLDER
    os.rename(unpacked_folder / FOLDER, new)
    sync_folder(aside)
    if old.exists():
        _exchange(new, old)
    else:
        os.rename(new, old)
    sync_folder(home)
    sync_folder(aside)
    if new.exists() and os.listdir(new) == [LOCK]:  # there was no studio
        shutil.rmtree(new)


# ---- copies


def copy_studio(source: Path, target: Path) -> None:
    """The studio's files as they are now, each as a whole: people first, then what they name."""
    target.mkdir(mode=0o700)
    for name in sorted(_files(source), key=lambda one: (one != PEOPLE, one)):
        copy = target / name
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_database(source / name):
            _copy_database(source / name, copy)
        else:
            write_synced(copy, read_whole(source / name, FILE_BYTES_MAX))


def check_studio(folder: Path) -> None:
    """Everything can be read: pages, people, and the records of each person up to the present form. A copy in an older
    form is brought to that of this program."""
    for name in _files(folder):
        path = folder / name
        if not _is_database(path):
            if path.suffix == ".db":
                raise JournalError(f"{path} is no database", do=_ANOTHER)
            continue
        with contextlib.closing(sqlite3.connect(path)) as db:
            found = db.execute("PRAGMA integrity_check").fetchall()
        if found != [("ok",)]:
            raise JournalError(f"the pages of {path} are damaged", do=_ANOTHER)
        if path.name == PEOPLE:
            People(path.parent, wall_ns=lambda: 0, random=os.urandom).all()
        elif path.name == SESSIONS:
            sessions: dict[str, Session] = {}
            try:
                fold_all(sessions, SqliteStore(path.parent).read(0))
            except SessionTransitionError as error:
                raise JournalError(f"the sessions in {path} are damaged: {error}", do=_ANOTHER) from error


_ANOTHER: Final = "Use another backup; nothing was changed."


def _files(folder: Path) -> list[str]:
    """The names of files below this folder that belong into a backup."""
    if not folder.is_dir():
        return []
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not _LEFT_OUT.fullmatch(one)]
        relative = Path(place).relative_to(folder)
        found += [
            str(relative / name)
            for name in names
            if not _LEFT_OUT.fullmatch(name) and stat.S_ISREG(os.lstat(Path(place) / name).st_mode)
        ]
    return sorted(found)


def _is_database(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _copy_database(source: Path, target: Path) -> None:
    """Through SQLite, so that what still stands in a write-ahead log comes along, at one moment of the database."""
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
        old.backup(new)


# ---- the archive


def _pack(staging: Path, archive: Path, made_at: str) -> None:
    names = [f"{FOLDER}/{name}" for name in _files(staging / FOLDER)] + [JOURNAL]
    parts = [_part(staging, name) for name in names]
    manifest = msgspec.json.encode(Manifest(made_at=made_at, parts=parts))
    with open(archive, "xb") as file, tarfile.open(fileobj=file, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(_member(MANIFEST, len(manifest)), io.BytesIO(manifest))
        for part in parts:
            with open(staging / part.name, "rb") as content:
                tar.addfile(_member(part.name, part.bytes), content)
    os.chmod(archive, 0o600)
    sync_file(archive)


def _part(folder: Path, name: str) -> BackupPart:
    hashed, size = blake3(), 0
    with open(folder / name, "rb") as file:
        while piece := file.read(_PIECE):
            hashed.update(piece)
            size += len(piece)
    return BackupPart(name=name, bytes=size, blake3=hashed.hexdigest())


def _member(name: str, size: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.mode = size, 0o600
    return made


def _unpack(source: Path, folder: Path) -> None:
    """Exactly the files that the manifest lists, each as it was written."""
    size = source.stat().st_size
    if size % _RECORD:
        raise _damaged(source, "it is cut off")
    with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        manifest = _read_manifest(source, tar)
        for part in manifest.parts:
            _unpack_part(source, tar, part, folder)
        if tar.next() is not None:
            raise _damaged(source, "it has more files than it lists")
    if JOURNAL not in [part.name for part in manifest.parts]:
        raise _damaged(source, "the journal of the office is missing")
    make_private_dir(folder / FOLDER)


def _read_manifest(source: Path, tar: tarfile.TarFile) -> Manifest:
    member = tar.next()
    if member is None or member.name != MANIFEST or not member.isfile() or member.size > MANIFEST_BYTES_MAX:
        raise _damaged(source, "it does not begin with a list of its files")
    raw = _content(source, tar, member).read()
    try:
        version = decode_as(raw, dict[str, object]).get("version")
        if version != VERSION:
            raise JournalError(
                f"{source} was written by another Sublet (version {shown(version)} of backups, not {VERSION})",
                do="Restore it with that one. Nothing was changed.",
            )
        return decode_as(raw, Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(source, f"its list of files cannot be read: {error}") from error


def _unpack_part(source: Path, tar: tarfile.TarFile, part: BackupPart, folder: Path) -> None:
    if not _NAME.fullmatch(part.name) or not (part.name == JOURNAL or part.name.startswith(f"{FOLDER}/")):
        raise _damaged(source, f"it lists {shown(part.name)}, which is no file of a backup")
    member = tar.next()
    if member is None:
        raise _damaged(source, f"it is cut off before {part.name}")
    if member.name != part.name or not member.isfile() or member.size != part.bytes:
        raise _damaged(source, f"{part.name} is not where it should be")
    target = folder / part.name
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = _content(source, tar, member)
    with open(target, "xb", opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600)) as file:
        shutil.copyfileobj(content, file, _PIECE)
        file.flush()
        os.fsync(file.fileno())
    if _part(folder, part.name) != part:
        raise _damaged(source, f"{part.name} is not what was written")


def _content(source: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise _damaged(source, f"{member.name} is no file")
    return content


def _damaged(source: Path, how: str) -> SubletError:
    return JournalError(f"the backup {source} is damaged: {how}", do=_ANOTHER)


def _exists(path: Path) -> SubletError:
    return JournalError(f"{path} exists; nothing was written", do="Name a new file.")


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places at once; in two steps on a file system that cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(other))
    between = one.with_name(f"{one.name}.old")
    os.rename(other, between)
    os.rename(one, other)
    os.rename(between, one)
