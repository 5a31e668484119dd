"""Which chunks changed: compared with a dumb finder that hashes everything, whoever wrote, and however.

Every test here runs with page tracking and with fingerprints alone; on kernels without the one it is twice the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.state.transfer.changes import CHUNK_BYTES, TRACKED_MIN, ChangeFinder, chunk_count, chunk_hash
from sublet.state.transfer.encoded import BufferKind, EncodedBuffer
from sublet.state.transfer.memory import HUGE, PAGE, address_of, fresh_memory
from sublet.state.transfer.pages import Pages, process_pages

CHUNKS = 24
LENGTH = CHUNKS * CHUNK_BYTES - 1000
MADV_DONTNEED = 4
MREMAP_MAYMOVE = 1


@pytest.fixture(params=["tracked", "compared"])
def pages(request: pytest.FixtureRequest) -> Pages:
    return process_pages() if request.param == "tracked" else never()


def never() -> Pages:
    """What knows of nothing."""
    pages = Pages()
    pages.forget()
    return pages


def buffer_of(data: Any) -> EncodedBuffer:
    view = memoryview(data).cast("B")
    return EncodedBuffer(view=view, address=address_of(view), kind=BufferKind.OTHER, writable=True)


class Dumb:
    """Hashes everything and compares."""

    def __init__(self) -> None:
        self.before: list[bytes] = []

    def changed(self, data: Any) -> list[int]:
        view = memoryview(data).cast("B")
        count = chunk_count(view.nbytes)
        now = [chunk_hash(view[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES]) for n in range(count)]
        found = [n for n in range(count) if n >= len(self.before) or now[n] != self.before[n]]
        self.before = now
        return found


def array(length: int = LENGTH) -> np.ndarray[Any, Any]:
    return np.frombuffer(fresh_memory(length), dtype="u1")


def numpy_memory(folder: Path) -> Any:
    return np.zeros(LENGTH, dtype="u1")


def bytearray_memory(folder: Path) -> Any:
    return bytearray(LENGTH)


def shared_map(folder: Path) -> Any:
    return mmap.mmap(-1, LENGTH)


def file_map(folder: Path) -> Any:
    path = folder / "mapped"
    path.write_bytes(bytes(LENGTH))
    return np.memmap(path, dtype="u1", mode="r+")


def private_file_map(folder: Path) -> Any:
    path = folder / "private"
    path.write_bytes(bytes(LENGTH))
    return np.memmap(path, dtype="u1", mode="c")


def unaligned(folder: Path) -> Any:
    return memoryview(bytearray(LENGTH + 77))[77:]


def huge(folder: Path) -> Any:
    area = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)[: 8 << 20]


KINDS = [numpy_memory, bytearray_memory, shared_map, file_map, private_file_map, unaligned, huge]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_write_is_found_in_every_kind_of_memory(make: Any, seed: int, pages: Pages, tmp_path: Path) -> None:
    chance = random.Random(seed)
    data = make(tmp_path)
    view = memoryview(data).cast("B")
    finder, dumb = ChangeFinder(pages=pages), Dumb()
    for _ in range(25):
        for _ in range(chance.choice((0, 0, 1, 3, 40))):
            at = chance.randrange(len(view))
            length = min(chance.choice((1, 10, PAGE, 3 * CHUNK_BYTES)), len(view) - at)
            view[at : at + length] = bytes([chance.randrange(256)]) * length
        assert finder.changed(buffer_of(data)) == dumb.changed(data)


def test_without_fingerprints_the_hashes_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sublet.state.transfer.changes.this_process", lambda: None)
    test_every_write_is_found_in_every_kind_of_memory(numpy_memory, 0, never(), tmp_path)


@given(st.lists(st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(0, 3)), max_size=4), max_size=8))
@settings(max_examples=20)
def test_two_finders_of_one_array_do_not_take_each_others_news_away(rounds: list[list[tuple[int, int]]]) -> None:
    """Each looks at its own times; so do finders of a part and of the whole."""
    data = array()
    finders = [
        (ChangeFinder(), Dumb(), data),
        (ChangeFinder(), Dumb(), data),
        (ChangeFinder(), Dumb(), data[5000:-9000]),
    ]
    for number, writes in enumerate(rounds):
        for at, value in writes:
            data[at] = value
        for n, (finder, dumb, part) in enumerate(finders):
            if number % (n + 1) == 0:
                assert finder.changed(buffer_of(part)) == dumb.changed(part)


def test_nothing_is_read_of_what_was_not_written() -> None:
    if not process_pages().usable():
        pytest.skip("this kernel does not track pages (6.7 does), or something here pins them")
    data = array(64 << 20)
    finder = ChangeFinder()
    finder.changed(buffer_of(data))
    data[5 * CHUNK_BYTES + 3] = 1
    look = finder.begin(buffer_of(data))
    assert look.tracked
    assert 5 in look.candidates
    assert len(look.candidates) <= 1 + 2 * HUGE // CHUNK_BYTES  # the kernel counts pages that it has put together, too


def test_a_write_between_look_and_copy_is_found_next_time(pages: Pages) -> None:
    """The look protects before anything is read, so a write during the copy belongs to the next look."""
    data = array()
    finder = ChangeFinder(pages=pages)
    finder.changed(buffer_of(data))
    data[0] = 1
    look = finder.begin(buffer_of(data))
    hashes = {n: chunk_hash(look.chunk(n)) for n in look.candidates}
    data[3 * CHUNK_BYTES] = 7
    finder.record_hashes(look, hashes)
    assert finder.changed(buffer_of(data)) == [3]


def test_a_look_that_was_not_settled_is_repeated(pages: Pages) -> None:
    """A save that failed must not have eaten the news."""
    data = array()
    finder = ChangeFinder(pages=pages)
    finder.changed(buffer_of(data))
    data[0] = 1
    assert 0 in finder.begin(buffer_of(data)).candidates
    assert 0 in finder.begin(buffer_of(data)).candidates
    assert finder.changed(buffer_of(data)) == [0]
    assert finder.changed(buffer_of(data)) == []


def test_writing_threads_are_never_missed(pages: Pages) -> None:
    data = array()
    finder, stop = ChangeFinder(pages=pages), threading.Event()

    def write() -> None:
        chance = random.Random(1)
        while not stop.is_set():
            data[chance.randrange(LENGTH)] = chance.randrange(256)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(8):
            finder.changed(buffer_of(data))
    finally:
        stop.set()
        thread.join()
    finder.changed(buffer_of(data))
    memory = finder.begin(buffer_of(data)).before
    assert memory is not None
    assert memory == b"".join(chunk_hash(data.data[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES]) for n in range(CHUNKS))


def test_memory_that_was_freed_and_given_out_again_is_looked_at(pages: Pages) -> None:
    """The same address, another array: what it holds decides."""
    finder, dumb = ChangeFinder(pages=pages), Dumb()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    fixed, anonymous, both = 0x10, 0x22, 3
    address = libc.mmap(None, LENGTH, both, anonymous, -1, 0)
    for value in (1, 2, 2, 0):
        data = (ctypes.c_ubyte * LENGTH).from_address(address)
        if value:
            ctypes.memset(address, value, LENGTH)
        assert finder.changed(buffer_of(data)) == dumb.changed(data)
        del data
        libc.munmap(address, LENGTH)
        assert libc.mmap(address, LENGTH, both, anonymous | fixed, -1, 0) == address
    libc.munmap(address, LENGTH)


def test_memory_that_was_dropped_or_moved_is_looked_at(pages: Pages) -> None:
    area = mmap.mmap(-1, LENGTH, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    finder, dumb = ChangeFinder(pages=pages), Dumb()
    area[:] = b"x" * LENGTH
    assert finder.changed(buffer_of(area)) == dumb.changed(area)
    area.madvise(MADV_DONTNEED, 4 * CHUNK_BYTES // PAGE * PAGE, CHUNK_BYTES)
    assert finder.changed(buffer_of(area)) == dumb.changed(area) != []
    area.resize(2 * LENGTH)  # mremap, which may move it
    assert set(finder.changed(buffer_of(area))) >= set(dumb.changed(area))
    for _ in range(3):
        assert finder.changed(buffer_of(area)) == dumb.changed(area)
        area[LENGTH + 5] = area[LENGTH + 5] ^ 1


def test_a_child_finds_its_own_writes_and_the_parent_its_own(pages: Pages) -> None:
    data = array()
    finder, dumb = ChangeFinder(pages=pages), Dumb()
    finder.changed(buffer_of(data))
    dumb.changed(data)
    data[0] = 1
    child = os.fork()
    if child == 0:
        status = 1
        try:
            data[2 * CHUNK_BYTES] = 1
            first = finder.changed(buffer_of(data)) == dumb.changed(data) == [0, 2]
            data[4 * CHUNK_BYTES] = 1
            status = 0 if first and finder.changed(buffer_of(data)) == [4] else 1
        finally:
            os._exit(status)
    data[6 * CHUNK_BYTES] = 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert finder.changed(buffer_of(data)) == dumb.changed(data) == [0, 6]
    data[1] = 9
    assert finder.changed(buffer_of(data)) == [0]


def test_system_calls_that_write_are_seen(pages: Pages) -> None:
    """read() into an array goes past no protection."""
    data = array()
    finder = ChangeFinder(pages=pages)
    finder.changed(buffer_of(data))
    with open("/dev/urandom", "rb", buffering=0) as file:
        file.readinto(data.data[7 * CHUNK_BYTES : 7 * CHUNK_BYTES + 100])
    assert finder.changed(buffer_of(data)) == [7]


def test_memory_that_is_written_all_the_time_is_hashed_instead(pages: Pages) -> None:
    """Faults would cost more than the hash; and every write is still found."""
    data = array()
    finder, dumb = ChangeFinder(pages=pages), Dumb()
    tracked = []
    for n in range(12):
        data[:] = n
        tracked.append(finder.begin(buffer_of(data)).tracked)
        assert finder.changed(buffer_of(data)) == dumb.changed(data)
    assert sum(tracked) <= 2


def test_more_arrays_than_are_remembered_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.state.transfer.pages.REGIONS_MAX", 3)
    finder = ChangeFinder()
    dumb = [Dumb() for _ in range(6)]
    data = [array(TRACKED_MIN + 5) for _ in range(6)]
    for number in range(4):
        for n in range(6):
            data[n][number * 1000] = number + n
            assert finder.changed(buffer_of(data[n])) == dumb[n].changed(data[n])
            assert finder.changed(buffer_of(data[n])) == dumb[n].changed(data[n]) == []


class Liar(Pages):
    """Says that nothing was ever written."""

    def written_since(self, address: int, length: int, since: int) -> tuple[int, list[tuple[int, int]] | None]:
        if self._off:
            return 0, None
        self._look += 1
        return self._look, None if since == 0 else []


def test_a_kernel_that_does_not_tell_the_truth_is_caught(caplog: pytest.LogCaptureFixture) -> None:
    data = array(TRACKED_MIN)
    pages = Liar()
    finder, dumb = ChangeFinder(pages=pages), Dumb()
    for n in range(10):
        data[:] = n
        if pages._off:
            assert finder.changed(buffer_of(data)) == dumb.changed(data)
        else:
            finder.changed(buffer_of(data))
            dumb.changed(data)
    assert pages._off
    assert "missed a write" in caplog.text


@pytest.fixture(autouse=True)
def still_tracking() -> Iterator[None]:
    """No test may have found the real thing to be wrong."""
    before = process_pages().usable()
    yield
    assert process_pages().usable() == before
