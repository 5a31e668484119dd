"""How functions reach workers: what is sent once, and what workers share."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from typing import Any

import pytest

from sublet.compute.buffer_cache import BufferCache
from sublet.compute.functions import Functions, PackedFunction, PeerInterpreter
from sublet.errors import Unpicklable, Unsupported
from sublet.guest.cargo import fetch_buffers, load
from sublet.wire.frames import close_all
from sublet.wire.work import LARGE_BYTES, OutgoingMessage, unpack

SIZE = 4 * LARGE_BYTES


def length(data: Any, times: int) -> int:
    return len(data) * times


def worker(python: tuple[int, int, int] = sys.version_info[:3]) -> Functions:
    return Functions(PeerInterpreter(python, "python", cloudpickle=True), BufferCache())


def loaded(message: OutgoingMessage) -> object:
    """What a worker makes of a definition."""
    head, buffers = fetch_buffers(unpack(message.body), message.fds, lambda number: pytest.fail("nothing is kept"))
    return load(head, buffers)


def test_a_packed_function_is_sent_once_to_each_worker_and_its_arrays_are_copied_once_for_all() -> None:
    """An array of 1 GiB that every worker of a burst has lies in memory once, not once for each."""
    from numpy import ones

    packed = PackedFunction(functools.partial(length, ones(SIZE, dtype="u1")))
    files = []
    for one in (worker(), worker()):
        number, (definition,) = one.refer(packed)
        assert unpack(definition.body).subject == number
        files.append(os.fstat(definition.fds[0]).st_ino)
        assert loaded(definition)(2) == 2 * SIZE  # type: ignore[operator]
        close_all(definition.fds)
        assert one.refer(packed) == (number, [])
    assert files[0] == files[1]


def test_a_packed_function_is_what_it_was_when_it_was_first_sent() -> None:
    """All chunks of a job run the same function, on whichever worker and however late."""
    given = [1]
    packed = PackedFunction(functools.partial(sum, given))
    worker().refer(packed)
    given.append(1000)
    _, (definition,) = worker().refer(packed)
    assert loaded(definition)() == 1  # type: ignore[operator]


class Noted:
    """A callable that says when it is taken apart."""

    def __init__(self) -> None:
        self.is_taken = threading.Event()
        self.times = 0

    def __reduce__(self) -> tuple[object, ...]:
        self.times += 1
        self.is_taken.set()
        return int, ()

    def __call__(self) -> None:
        """Nobody calls it."""


def test_a_packed_function_is_taken_apart_before_a_worker_needs_it() -> None:
    """While leases are acquired its arrays are copied."""
    noted = Noted()
    packed = PackedFunction(noted)
    packed.prepare()
    assert noted.is_taken.wait(30)
    _, (definition,) = worker().refer(packed)
    close_all(definition.fds)
    assert noted.times == 1


def test_a_function_that_cannot_be_taken_apart_says_so_where_it_is_needed() -> None:
    packed = PackedFunction(functools.partial(length, threading.Lock()))
    packed.prepare()
    with pytest.raises(Unpicklable, match="lock"):
        worker().refer(packed)


def test_a_packed_function_goes_to_no_worker_that_could_not_read_it() -> None:
    with pytest.raises(Unsupported, match="goes by value"):
        worker((3, 9, 0)).refer(PackedFunction(length))


def test_a_packed_function_that_is_closed_keeps_nothing() -> None:
    """The arrays of a job go with its end, and not when the collector comes by."""
    from numpy import ones

    array = ones(SIZE, dtype="u1")
    packed = PackedFunction(functools.partial(length, array))
    one = worker()
    _, (definition,) = one.refer(packed)
    shared = packed.definition(9).fds  # copies, which are the caller's
    held = weakref.ref(array)
    file = os.fstat(shared[0]).st_ino
    close_all((*definition.fds, *shared))
    before = memory_files()
    assert file in before
    packed.close()
    packed.close()
    del array
    assert held() is None
    assert file not in memory_files()


def memory_files() -> set[int]:
    """Files that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.fstat(int(fd)).st_ino)
    return found
