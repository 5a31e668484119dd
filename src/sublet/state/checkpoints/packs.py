"""Writes packs, and reads chunks out of them.

A chunk is copied into a batch, hashed there, and written from there: what others do to the memory meanwhile reaches
neither the hash nor the file. While one batch is filled another is on its way to the disk, in a thread of its own, so
that hashing costs no time of its own.

Batches follow each other in the file page by page, so they can go to the disk as they are, past the page cache: that
takes a tenth of the processor, which is what a save beside a program's own work should leave to that, and what a small
save would otherwise mostly be.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from blake3 import blake3

from sublet.background import start_thread
from sublet.errors import CheckpointDamaged, CheckpointFailed, NotFound
from sublet.state.checkpoints.format import (
    PACK_HEADER,
    TRAILER_BYTES,
    ChunkEncoding,
    PackEntry,
    PackRef,
    damaged,
    dump_index,
    dump_trailer,
    pack_name,
    parse_index,
    parse_trailer,
)
from sublet.state.transfer.memory import PAGE, fresh_memory

BATCH_ROOM: Final = 4 << 20
"""Two huge pages: smaller ones take five times as long to get, and to write from past the cache."""
BATCH_BYTES: Final = BATCH_ROOM - PAGE
"""Without what does not fill a page, which goes on from the batch before."""
FIRST_BYTES: Final = 1 << 20
"""With so much the first batch goes, so that the disk soon has something to do; each further one has twice as much."""
BATCHES: Final = 4
SPARE: Final = 2
SAMPLE_BYTES: Final = 8 * 1024
SHRINKS: Final = 0.8
"""A chunk is compressed where a sample of its buffer comes out below this share, and it itself does too."""
SHRINK_MIN: Final = 1024
SMALL_BYTES: Final = 16 * 1024
"""A chunk up to this is one of many small ones, of which a faster way of compressing takes a third less time."""
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
START_WRITING: Final = 2
"""SYNC_FILE_RANGE_WRITE."""


def file_name(name: bytes) -> str:
    return f"{name.hex()}.pack"


_spare: list[memoryview] = []


class PackWriter:
    """One pack, under a temporary name until ``finish``."""

    def __init__(self, folder: Path, *, past_cache: int = 0) -> None:
        """``past_cache``: so many bytes go past the page cache. To put them there takes the processor ten times as long
        as to have the disk fetch them; but a reader that comes soon need not wait for the disk."""
        self._folder = folder
        self._past_cache = past_cache > 0
        self._past_max = past_cache
        self._path = folder / "pack.part"
        self._fd = -1
        self._entries: list[PackEntry] = []
        self._at = len(PACK_HEADER)
        self._batch: memoryview | None = None
        self._used = 0
        self._made = 0
        self._enough = FIRST_BYTES
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._ref: PackRef | None = None
        self.hashes: dict[bytes, PackEntry] = {}
        self._pressing = Pressing()

    @property
    def nbytes(self) -> int:
        """What is in it so far."""
        return self._at

    def room(self, length: int) -> memoryview:
        """Memory for the next chunk. It counts once ``keep`` is called; until then it may be filled again."""
        if self._batch is None or self._used >= self._enough or self._used + length > self._batch.nbytes:
            self._turn_over(length)
        assert self._batch is not None
        return self._batch[self._used : self._used + length]

    def keep(self, digest: bytes, length: int, *, shrink: bool = False) -> None:
        """The chunk that was put in ``room`` is part of the pack."""
        assert self._batch is not None
        small = self._shrunk(self._batch[self._used : self._used + length]) if shrink else None
        self._store(digest, length, small)

    def _shrunk(self, data: memoryview | bytes) -> bytes | None:
        return self._pressing.compress(data) if len(data) >= SHRINK_MIN else None

    def _store(self, digest: bytes, length: int, small: bytes | None) -> None:
        if small is None:
            self._add(PackEntry(digest, self._at, length, length, 0, ChunkEncoding.RAW))
            return
        self.room(len(small))[:] = small
        self._add(PackEntry(digest, self._at, len(small), length, zlib.crc32(small), ChunkEncoding.ZSTD))

    def copy(self, entry: PackEntry, stored: bytes) -> None:
        """A chunk out of another pack, as it is stored there. The caller has checked it."""
        self.room(entry.stored)[:] = stored
        self._add(entry._replace(offset=self._at))

    def put(self, data: bytes, digest: bytes, *, shrink: bool = True) -> None:
        """A chunk that no other code can change."""
        small = self._shrunk(data) if shrink and self._pressing.is_worthwhile(memoryview(data)) else None
        if small is None:
            self.room(len(data))[:] = data
        self._store(digest, len(data), small)

    def worth_shrinking(self, data: memoryview) -> bool:
        return self._pressing.is_worthwhile(data)

    def write_rest(self) -> PackRef | None:
        """Everything is written, and nothing synced. None if it has no chunk."""
        if self._ref is None and self._entries:
            index = dump_index(self._entries)
            end = index + dump_trailer(index, self._at)
            self.room(len(end))[:] = end
            self._used += len(end)
            try:
                self._finish_writing()
            except OSError as error:
                raise self.failed(error) from error
            self._ref = PackRef(pack_name(index), self._at + len(end), len(self._entries))
        return self._ref

    def finish(self) -> tuple[PackRef, Path] | None:
        """Write the rest, sync, and give it the name of its content, in the same folder. None if it has no chunk."""
        ref = self.write_rest()
        if ref is None:
            self.close()
            return None
        path = self._folder / file_name(ref.name)
        try:
            os.fsync(self._fd)
            os.rename(self._path, path)
        except OSError as error:
            raise self.failed(error) from error
        self.close()
        return ref, path

    def close(self) -> None:
        """Give up what was not finished. Harmless twice."""
        if self._thread is not None:
            self._filled.put(None)
            self._thread.join()
            self._thread = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._give_back()

    def _give_back(self) -> None:
        """Some batches are kept for the next pack of this process, once no write uses them."""
        if self._batch is not None:
            self._free.put(self._batch)
            self._batch = None
        while not self._free.empty():
            batch = self._free.get()
            if batch.nbytes == BATCH_ROOM and len(_spare) < SPARE:
                _spare.append(batch)

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _add(self, entry: PackEntry) -> None:
        self._entries.append(entry)
        self.hashes[entry.hash] = entry
        self._at += entry.stored
        self._used += entry.stored

    def _next_batch(self, length: int) -> memoryview:
        if length > BATCH_BYTES:
            return fresh_memory(length + PAGE)
        if self._made < BATCHES and self._free.empty():
            self._made += 1
            try:
                return _spare.pop()
            except IndexError:
                return fresh_memory(BATCH_ROOM)
        batch = self._free.get()
        if self._failure is not None:
            raise self.failed(self._failure)
        return batch

    def _turn_over(self, length: int) -> None:
        """The next batch. What of this one does not fill a page begins it."""
        begin = PACK_HEADER
        batch, self._batch = self._batch, None  # a batch that is handed over must not be marked free here
        if batch is not None:
            whole = self._used - self._used % PAGE
            begin = bytes(batch[whole : self._used])
            self._hand_over(batch, whole)
            self._enough = min(2 * self._enough, BATCH_BYTES)
        self._batch, self._used = self._next_batch(length), len(begin)
        self._batch[: len(begin)] = begin

    def _hand_over(self, batch: memoryview, used: int) -> None:
        """To the thread, which is there from the second batch on."""
        self._open()
        if self._thread is None:
            if self._past_cache:
                self._past_cache = _set_direct(self._fd, on=True)
            self._thread = start_thread("pack", self._run, again=True)
        self._filled.put((batch, used))
        if self._failure is not None:
            raise self.failed(self._failure)

    def _finish_writing(self) -> None:
        """The only batch of a small pack is written here and now."""
        assert self._batch is not None
        if self._thread is None:
            self._open()
            self._past_cache = False
            self._write(self._batch[: self._used])
            return
        self._filled.put((self._batch, self._used))
        self._batch, self._used = None, 0
        self._filled.put(None)
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self.failed(self._failure)

    def _open(self) -> None:
        if self._fd >= 0:
            return
        try:
            self._fd = os.open(self._path, NEW_FILE, 0o600)
        except OSError as error:
            raise self.failed(error) from error

    def _run(self) -> None:
        written = 0
        while (job := self._filled.get()) is not None:
            batch, used = job
            if self._failure is None:
                try:
                    self._write(batch[:used])
                    if not self._past_cache:
                        _start_writing(self._fd, written, used)  # so that the disk works while we hash
                    written += used
                    if written >= self._past_max:
                        self._into_cache()
                except BaseException as error:  # noqa: BLE001 - raised where the pack is written to
                    self._failure = error
            self._free.put(batch)

    def _write(self, data: memoryview) -> None:
        while data:
            if self._past_cache and data.nbytes < PAGE:
                self._into_cache()
            try:
                rest = data.nbytes % PAGE if self._past_cache else 0
                written = os.write(self._fd, data[: data.nbytes - rest])
            except OSError as error:
                if error.errno != errno.EINVAL or not self._past_cache:
                    raise
                self._into_cache()  # a file system that has its own idea of what may go past the cache
                continue
            if written % PAGE:
                self._into_cache()
            data = data[written:]

    def _into_cache(self) -> None:
        """From here on as usual: what is left does not fill a page, or does not begin with one."""
        if self._past_cache:
            self._past_cache = False
            _set_direct(self._fd, on=False)

    def failed(self, error: BaseException) -> CheckpointFailed:
        self._failure = error
        why = getattr(error, "strerror", None) or str(error)
        return CheckpointFailed(
            f"the state could not be written to {self._folder}: {why}",
            do="Make room there or choose another place, then save again; earlier checkpoints are whole.",
        )


class Pressing:
    """zstd, where a sample shrinks. Loaded at the first chunk that is large enough to ask."""

    def __init__(self) -> None:
        self._compress: Any = None
        self._compress_small: Any = None

    def is_worthwhile(self, data: memoryview) -> bool:
        n = data.nbytes
        if n < SHRINK_MIN:
            return False
        if n <= 3 * SAMPLE_BYTES:
            return True
        middle = (n - SAMPLE_BYTES) // 2
        sample = bytes(data[:SAMPLE_BYTES]) + bytes(data[middle : middle + SAMPLE_BYTES]) + bytes(data[-SAMPLE_BYTES:])
        return self.compress(sample) is not None

    def compress(self, data: memoryview | bytes) -> bytes | None:
        if self._compress is None:
            import zstandard

            self._compress = zstandard.ZstdCompressor(level=1).compress
            self._compress_small = zstandard.ZstdCompressor(level=-1).compress
        small: bytes = (self._compress_small if len(data) <= SMALL_BYTES else self._compress)(data)
        return small if len(small) <= SHRINKS * len(data) else None


_libc: Any = None


def _set_direct(fd: int, *, on: bool) -> bool:
    """Whether writes go past the page cache from here on. Not every file system can do that."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return on


def _start_writing(fd: int, offset: int, length: int) -> None:
    """A hint; what must be on disk is synced later in any case."""
    global _libc
    if _libc is None:
        _libc = ctypes.CDLL(None)
        _libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    _libc.sync_file_range(fd, offset, length, START_WRITING)


class PackSource(Protocol):
    """Packs in a folder that this process may not enter: the supervisor opens them."""

    def open_files(self, names: Sequence[str]) -> list[int]:
        """Descriptors for reading, one for each; the caller closes them. ``NotFound`` if one is not there."""


Packs = Path | PackSource
"""Where packs are: in a folder, or with a process that opens them."""


def open_packs(packs: Packs, refs: Sequence[PackRef]) -> Iterator[PackFile]:
    """Each of these, in order. All are opened before the first is looked at, where that is one question. A caller
    that stops before the end closes those that it got."""
    if isinstance(packs, Path):
        for ref in refs:
            yield PackFile(packs / file_name(ref.name), ref)
        return
    try:
        fds = packs.open_files([file_name(ref.name) for ref in refs])
    except NotFound as error:
        raise damaged(f"a pack cannot be read: {error.message}") from error
    try:
        for ref in refs:
            yield PackFile(Path(file_name(ref.name)), ref, fd=fds.pop(0))
    finally:
        for fd in fds:
            os.close(fd)


class PackFile:
    """A pack that is read. Its index was checked when this was made; a chunk is checked when it is read."""

    def __init__(self, path: Path, ref: PackRef, *, fd: int = -1) -> None:
        """``fd``: it is open already, and is this object's to close."""
        self.ref = ref
        try:
            self._fd = fd if fd >= 0 else os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise damaged(f"the pack {path.name} cannot be read: {error.strerror}") from error
        try:
            self.entries: Sequence[PackEntry] = self._index(path)
        except BaseException:
            self.close()
            raise

    def _index(self, path: Path) -> list[PackEntry]:
        size = os.fstat(self._fd).st_size
        if size != self.ref.size or size < len(PACK_HEADER) + TRAILER_BYTES:
            raise damaged(f"the pack {path.name} has {size} bytes instead of {self.ref.size}")
        header = self.read(0, len(PACK_HEADER))
        offset, length, index_hash = parse_trailer(header, self.read(size - TRAILER_BYTES, TRAILER_BYTES), size)
        index = self.read(offset, length)
        entries = parse_index(index, index_hash, offset)
        if pack_name(index) != self.ref.name or len(entries) != self.ref.entries:
            raise damaged(f"the pack {path.name} is another pack than its name says")
        return entries

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) != length:
            raise damaged("a pack ends too early")
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < into.nbytes:
            n = os.preadv(self._fd, [into[done:]], offset + done)
            if not n:
                raise damaged("a pack ends too early")
            done += n

    def stored(self, entry: PackEntry) -> bytes:
        """A chunk as it is stored, checked."""
        data = self.read(entry.offset, entry.stored)
        self.content_of(entry, data)
        return data

    def content(self, entry: PackEntry) -> bytes:
        return self.content_of(entry, self.read(entry.offset, entry.stored))

    def content_of(self, entry: PackEntry, stored: bytes) -> bytes:
        """What a stored chunk holds, compared with its hash."""
        if entry.encoding == ChunkEncoding.ZSTD:
            if zlib.crc32(stored) != entry.check:
                raise damaged("a chunk has another checksum than the index says")
            stored = _unpress(stored, entry.length)
        check_content(entry.hash, stored)
        return stored

    def close(self) -> None:
        """Harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_content(digest: bytes, content: memoryview | bytes) -> None:
    if blake3(content).digest() != digest:
        raise damaged("a chunk is not what was saved")


def _unpress(stored: bytes, length: int) -> bytes:
    import zstandard

    try:
        data: bytes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=length)
    except zstandard.ZstdError as error:
        raise damaged(f"a chunk cannot be unpacked: {error}") from error
    if len(data) != length:
        raise CheckpointDamaged("a chunk has another length than the index says")
    return data
