"""Shared memory that stays: who is given some looks at it first."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator

import pytest

from sublet.errors import InvalidRequest
from sublet.wire.persistent_memory import SEALS, Lasting, LastingFile
from sublet.wire.sealed_memory import write_shared

SIZE = 3 * 4096 + 5


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield made
    os.close(made)


def test_what_one_side_writes_the_other_sees() -> None:
    mine = Lasting.filled(memoryview(b"ab" * SIZE))
    theirs = Lasting.of(mine.file.fd, 2 * SIZE)
    assert bytes(theirs) == b"ab" * SIZE
    theirs[7] = 1
    mine[8] = 2
    assert (mine[7], theirs[8]) == (1, 2)
    assert theirs.file.fd != mine.file.fd


def test_it_can_neither_shrink_nor_grow() -> None:
    mine = Lasting.filled(memoryview(bytes(SIZE)))
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(mine.file.fd, size)


def test_its_descriptor_is_closed_with_the_last_who_has_it() -> None:
    mine = Lasting.filled(memoryview(bytes(SIZE)))
    fd, file = mine.file.fd, mine.file
    again = Lasting.on(file)
    del mine, file
    gc.collect()
    os.fstat(fd)
    del again
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_what_could_do_harm_is_refused(fd: int) -> None:
    os.posix_fallocate(fd, 0, SIZE)
    with pytest.raises(InvalidRequest, match="sealed otherwise"):
        Lasting.of(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    Lasting.of(fd, SIZE)
    for length in (0, SIZE - 1, SIZE + 1, 1 << 50):
        with pytest.raises(InvalidRequest, match="bytes"):
            Lasting.of(fd, length)


def test_memory_that_was_never_taken_is_refused(fd: int) -> None:
    os.ftruncate(fd, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(InvalidRequest, match="0 of memory"):
        Lasting.of(fd, SIZE)


def test_what_is_no_such_file_is_refused() -> None:
    sealed, _ = write_shared((memoryview(bytes(SIZE)),))
    read, write = os.pipe()
    try:
        for fd in (sealed, read):
            with pytest.raises(InvalidRequest, match="lasting memory is refused"):
                Lasting.of(fd, SIZE)
    finally:
        for fd in (sealed, read, write):
            os.close(fd)


@pytest.mark.parametrize("size", [0])
def test_no_bytes_are_no_memory(size: int) -> None:
    with pytest.raises(InvalidRequest):
        Lasting.filled(memoryview(bytes(size)))
    assert LastingFile(os.memfd_create("test"), size).length == 0
