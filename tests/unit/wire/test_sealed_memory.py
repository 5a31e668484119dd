"""Shared memory that a peer could still change, shrink or leave empty is not read."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

import pytest

from sublet.errors import InvalidRequest
from sublet.wire.sealed_memory import SEALS, SHARED_MAX, SharedBuffer, map_shared, take_over
from tests.left_open import nothing_left_open


def published(data: bytes) -> int:
    with SharedBuffer.create(len(data)) as buffer:
        buffer.view[:] = data
        return buffer.publish()


def test_what_was_written_is_read_without_a_copy_and_without_the_descriptor() -> None:
    with nothing_left_open():
        data = bytes(range(256)) * 64
        fd = published(data)
        view = map_shared(fd, 0, len(data))
        os.close(fd)
        assert view == data
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
        view.release()


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (1, 1), (4095, 2), (4096, 4096), (5000, 11_384), (16_383, 1)])
def test_any_part_can_be_read(offset: int, length: int) -> None:
    data = os.urandom(16_384)
    fd = published(data)
    assert map_shared(fd, offset, length) == data[offset : offset + length]
    os.close(fd)


def test_after_publishing_nobody_changes_it_not_even_its_writer() -> None:
    fd = published(b"x" * 8192)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    for attempt in (
        lambda: os.pwrite(fd, b"y", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 1 << 20),
        lambda: mmap.mmap(fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.pwrite(again, b"y", 0),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(OSError, match="Errno"):
            attempt()
    assert map_shared(fd, 0, 8192) == b"x" * 8192
    os.close(again)
    os.close(fd)


def memory_file(size: int, seals: int, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | flags)
    os.posix_fallocate(fd, 0, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def never_taken() -> int:
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 30)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def with_a_hole() -> int:
    fd = os.memfd_create("attack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    os.pwrite(fd, b"x" * 4096, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def ordinary_file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    os.write(fd, bytes(8192))
    return fd


F_SEAL_FUTURE_WRITE = 16
SHRINK, GROW, WRITE = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: memory_file(8192, 0), "not sealed"),
        (lambda: memory_file(8192, 0, 0), "not sealed"),
        (lambda: memory_file(8192, SHRINK | GROW), "not sealed"),
        (lambda: memory_file(8192, WRITE | GROW), "not sealed"),
        (lambda: memory_file(8192, WRITE | SHRINK), "not sealed"),
        (lambda: memory_file(8192, SHRINK | GROW | F_SEAL_FUTURE_WRITE), "not sealed"),
        (never_taken, "part of its memory was never taken"),
        (with_a_hole, "part of its memory was never taken"),
        (ordinary_file, "no memory file"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "no memory file"),
        (lambda: os.open("/", os.O_RDONLY), "no memory file"),
        (lambda: os.eventfd(0), "no memory file"),
    ],
    ids=range(12),
)
def test_a_descriptor_that_could_do_harm_is_refused(make: Callable[[], int], words: str) -> None:
    with nothing_left_open():
        fd = make()
        with pytest.raises(InvalidRequest, match=words):
            map_shared(fd, 0, 4096)
        os.close(fd)


def test_what_is_taken_over_is_another_file_with_the_same_bytes() -> None:
    """The memory of the first is given back, and all but published buffers pass as they are."""
    with nothing_left_open():
        data = bytes(range(256)) * 40
        given = (published(data), memory_file(8192, SHRINK | GROW), published(b"x"))
        before = [os.fstat(fd).st_ino for fd in given]
        first, lasting, last = taken = take_over(given)
        after = [os.fstat(fd).st_ino for fd in taken]
        assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, False]
        assert bytes(map_shared(first, 0, len(data))) == data
        assert bytes(map_shared(last, 0, 1)) == b"x"
        with pytest.raises(InvalidRequest, match="not sealed"):
            map_shared(lasting, 0, 8192)
        for fd in taken:
            os.close(fd)


def test_what_cannot_be_taken_over_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left_open():
        given = (published(b"x"), published(b"y"))
        sent = [0, 1]  # bytes of each call, the last first
        monkeypatch.setattr(os, "sendfile", lambda *_: sent.pop())
        with pytest.raises(OSError, match="Input/output error"):
            take_over(given)


def test_the_seal_cannot_be_set_while_a_writer_has_it_mapped() -> None:
    """The attack on the seal itself: keep a writable mapping and seal all the same. The kernel refuses."""
    fd = memory_file(8192, SHRINK | GROW)
    writer = mmap.mmap(fd, 8192)
    with pytest.raises(OSError, match="busy"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, WRITE)
    writer.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, -1), (-1, 1), (0, 8193), (8192, 1), (4096, 4097), (1 << 63, 1), (0, (1 << 64) - 1), (-4096, 8192)],
)
def test_a_part_outside_is_refused(offset: int, length: int) -> None:
    fd = published(bytes(8192))
    with pytest.raises(InvalidRequest, match="not within"):
        map_shared(fd, offset, length)
    os.close(fd)


def test_a_reader_is_not_ended_by_a_peer_that_shrinks_the_file() -> None:
    """What would happen without the check, in a child: SIGBUS. With it: refused."""
    fd = memory_file(8192, 0)
    victim = (
        "import mmap, os, sys; fd = int(sys.argv[1]); view = mmap.mmap(fd, 8192, mmap.MAP_PRIVATE, mmap.PROT_READ);"
        "os.ftruncate(fd, 0); view[0]"
    )
    done = subprocess.run([sys.executable, "-I", "-c", victim, str(fd)], pass_fds=[fd], timeout=60)
    assert done.returncode == -signal.SIGBUS, "the attack is real here"
    with pytest.raises(InvalidRequest, match="not sealed"):
        map_shared(fd, 0, 4096)
    os.close(fd)


@pytest.mark.parametrize("size", [0, -1, SHARED_MAX + 1])
def test_a_size_beyond_the_limits_is_refused(size: int) -> None:
    with nothing_left_open(), pytest.raises(InvalidRequest, match="cannot have"):
        SharedBuffer.create(size)


def test_a_buffer_is_published_once_and_closed_as_often_as_one_likes() -> None:
    with nothing_left_open():
        buffer = SharedBuffer.create(10)
        part = buffer.view[2:4]
        with pytest.raises(ValueError, match="still holds a part"):
            buffer.publish()
        part.release()
        buffer.view[0] = 1
        os.close(buffer.publish())
        with pytest.raises(ValueError, match="published or closed before"):
            buffer.publish()
        buffer.close()
        given_up = SharedBuffer.create(10)
        given_up.close()
        given_up.close()
