"""Memory that a job lends its workers: private to each of them, and filled again only for the next job."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import pickle
from types import SimpleNamespace
from typing import Any, Final

import pytest

from sublet.compute import buffer_cache
from sublet.compute.buffer_cache import LENT_MIN, LentFile, LentMemory
from sublet.compute.functions import PackedFunction
from sublet.errors import InvalidRequest
from sublet.guest.cargo import fetch_buffers, load
from sublet.wire.persistent_memory import LENT_SEALS, map_lent
from sublet.wire.work import unpack
from tests.left_open import nothing_left_open

SIZE: Final = LENT_MIN + 5 * mmap.PAGESIZE


def content(byte: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray([byte]) * size)


def test_what_is_lent_is_read_and_written_by_each_worker_for_itself() -> None:
    with nothing_left_open():
        one = LentFile(content(1))
        first, second = (map_lent(one.fd, SIZE, writable=True) for _ in range(2))
        first[7] = 9
        assert (first[7], second[7], second[8]) == (9, 1, 1)
        with pytest.raises(TypeError):
            map_lent(one.fd, 10, writable=False)[0] = 1
        del first, second, one
        gc.collect()


def test_nobody_but_the_holder_can_write_to_it_or_change_its_size() -> None:
    with nothing_left_open():
        one = LentFile(content(1))
        fd = one.fd
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        for attempt in (
            lambda: os.pwrite(fd, b"y", 0),
            lambda: os.pwrite(again, b"y", 0),
            lambda: os.ftruncate(again, 0),
            lambda: os.ftruncate(again, 2 * SIZE),
            lambda: mmap.mmap(again, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        ):
            with pytest.raises(OSError, match="Errno"):
                attempt()
        os.close(again)
        assert map_lent(one.fd, SIZE, writable=False) == content(1)
        del one
        gc.collect()


@pytest.mark.parametrize(("seals", "size"), [(0, 8192), (fcntl.F_SEAL_GROW, 8192), (LENT_SEALS, 4096), (LENT_SEALS, 0)])
def test_memory_that_could_do_harm_is_not_mapped(seals: int, size: int) -> None:
    """Its size can change, or part of it was never taken, or it is smaller than was said."""
    with nothing_left_open():
        fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 8192 if size else 4096)
        os.pwrite(fd, bytes(size), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(InvalidRequest, match="refused"):
            map_lent(fd, 8192, writable=True)
        os.close(fd)


def test_what_was_given_back_is_filled_for_the_next_of_about_its_size() -> None:
    with nothing_left_open():
        memory = LentMemory()
        first = memory.holding(content(1))
        inode = os.fstat(first.fd).st_ino
        other = memory.holding(content(2))
        assert os.fstat(other.fd).st_ino != inode, "the first is still lent"
        memory.give_back([first])
        assert memory.kept_bytes == SIZE
        for number, size in enumerate((SIZE // 2 - 1, SIZE + 1)):  # too small for it, too large
            assert os.fstat(memory.holding(content(3 + number, size)).fd).st_ino != inode
        del first
        second = memory.holding(content(5, SIZE - 3))
        assert os.fstat(second.fd).st_ino == inode
        assert map_lent(second.fd, SIZE - 3, writable=False) == content(5, SIZE - 3)
        assert memory.kept_bytes == 0
        del other, second, memory
        gc.collect()


def test_what_is_kept_is_bounded_in_bytes_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[object] = []
    monkeypatch.setattr(buffer_cache, "start_timer", lambda name, seconds, call: later.append(call))
    now_s = [100.0]
    monkeypatch.setattr(buffer_cache, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with nothing_left_open():
        memory = LentMemory(bytes_max=2 * SIZE)
        memory.give_back([memory.holding(content(n)) for n in range(3)])
        assert memory.kept_bytes == 2 * SIZE
        assert len(later) == 1, "one timer for all of them"
        now_s[0] += buffer_cache.KEPT_FOR_S
        memory.give_back([memory.holding(content(7))])  # used again, and free from now on
        memory._on_timer()
        assert memory.kept_bytes == SIZE
        now_s[0] += buffer_cache.KEPT_FOR_S
        memory._on_timer()
        assert (memory.kept_bytes, len(later)) == (0, 2)
        gc.collect()


def test_a_fork_keeps_nothing_and_gives_nothing_back_that_is_its_parents() -> None:
    memory = LentMemory()
    one = memory.holding(content(1))
    one.pid -= 1
    memory.give_back([one])
    assert memory.kept_bytes == 0


def test_the_function_of_a_job_takes_its_large_arrays_along_in_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives it back only where no worker has it any more."""
    memory = LentMemory()
    monkeypatch.setattr("sublet.compute.functions.lent_memory", memory)
    with nothing_left_open():
        for is_unused in (False, True):
            _call_it_once(is_unused=is_unused)
            assert memory.kept_bytes == (SIZE if is_unused else 0)
        memory.trim()
        gc.collect()


def _call_it_once(*, is_unused: bool) -> None:
    """As a worker does, which writes to the array."""
    function = _Reads(bytearray(b"x") * SIZE)
    packed = PackedFunction(function)
    message = packed.definition(1)
    said = unpack(message.body)
    assert [piece.is_lent for piece in said.pieces] == [False, True]
    head, buffers = fetch_buffers(said, message.fds, lambda number: -1)
    there = load(head, buffers)
    there.data[3] = ord("y")
    assert (there(3), there(4), function(3)) == (ord("y"), ord("x"), ord("x"))
    packed.close(is_unused=is_unused)
    packed.close(is_unused=True)
    for fd in message.fds:
        os.close(fd)


class _Reads:
    """A function with a large array of its own."""

    def __init__(self, data: object) -> None:
        self.data: bytearray = data  # type: ignore[assignment]

    def __call__(self, place: int) -> int:
        return self.data[place]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _Reads, (pickle.PickleBuffer(self.data),)
