"""Areas that arrays live in: they change places, part from others, and are compared."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from sublet.state.transfer import pages, shared_arrays
from sublet.state.transfer.memory import PAGE, PARALLEL_MIN, address_of
from sublet.state.transfer.shared_arrays import (
    adopt,
    area_at,
    exchange,
    is_same,
    is_untouched,
    map_shared,
    part_all,
    separate,
)
from sublet.wire.persistent_memory import Lasting

SIZE = 6 * PAGE + 11


def made(byte: int) -> Lasting:
    return Lasting.filled(memoryview(bytes([byte]) * SIZE))


def start(area: Lasting) -> int:
    return address_of(memoryview(area))


def test_two_change_places_and_who_looks_at_the_target_sees_it() -> None:
    target, source = made(1), made(2)
    files = target.file, source.file
    looking = np.frombuffer(target, np.uint8)
    looking[3] = 9
    exchanged = exchange(target, source)
    assert exchanged is not None
    assert looking.tobytes() == bytes(source) == bytes([2]) * SIZE
    exchanged.finish()
    assert looking.tobytes() == bytes([2]) * SIZE
    assert bytes(source) == bytes([1, 1, 1, 9]) + bytes([1]) * (SIZE - 4)
    assert (target.file, source.file) == files[::-1]
    looking[0] = 5
    assert os.pread(target.file.fd, 1, 0) == b"\5"
    source[0] = 6
    assert os.pread(source.file.fd, 1, 0) == b"\6"


@pytest.mark.parametrize("why", ["another length", "itself", "a device may know its pages"])
def test_what_cannot_be_exchanged_is_left_to_be_copied(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(1)
    source = target if why == "itself" else Lasting.filled(memoryview(bytes(SIZE + (why == "another length"))))
    if why.startswith("a device"):
        monkeypatch.setattr(shared_arrays, "something_pins", lambda: True)
    assert exchange(target, source) is None
    assert bytes(target) == bytes([1]) * SIZE


def test_who_looks_at_an_area_that_is_given_up_keeps_what_is_there() -> None:
    area = made(1)
    adopt(area)
    other, address = Lasting.on(area.file), start(area)
    looking = np.frombuffer(area, np.uint8)
    assert area_at(address, SIZE) is area
    separate(area)
    assert area_at(address, SIZE) is None
    other[0] = 7
    assert looking.tobytes() == bytes([1]) * SIZE
    looking[1] = 8
    assert other[1] == 1


def test_an_area_that_parted_is_its_own_until_it_joins_again() -> None:
    area, unused = made(1), made(2)
    adopt(area)
    adopt(unused)
    other, looking = Lasting.on(area.file), np.frombuffer(area, np.uint8)
    part_all()
    assert (area.parted, area.file.is_spoilt) == (True, True)
    assert (unused.parted, unused.file.is_spoilt) == (False, False)
    if is_untouched(area) is False:
        pytest.skip("this kernel does not tell which pages are a file's (it does from 6.7 on)")
    looking[0] = 5
    assert not is_untouched(area)
    assert other[0] == 1
    map_shared(area)
    assert looking[0] == 1
    assert not area.parted


@pytest.mark.parametrize("size", [1, 5 * PAGE + 3, PARALLEL_MIN + 5])
def test_two_are_the_same_if_every_byte_is(size: int) -> None:
    one = np.frombuffer(random.Random(3).randbytes(size), np.uint8).copy()
    other = one.copy()
    assert is_same(one.ctypes.data, other.ctypes.data, size)
    for at in {0, size // 2, size - 1}:
        other[at] ^= 1
        assert not is_same(one.ctypes.data, other.ctypes.data, size)
        other[at] ^= 1


def test_whether_something_pins_is_asked_anew_when_a_library_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pages, "_is_loaded", asked.append)
    monkeypatch.setattr(pages, "_answer", (0, False))
    pages.something_pins()
    pages.something_pins()
    first = len(asked)
    assert first in (len(pages.PINNING), 2 * len(pages.PINNING))  # the second where libc does not count
    pages._loads[0] += 1
    monkeypatch.setattr(pages, "_answer", (pages._loads[0], False))
    pages.something_pins()
    assert len(asked) == first + len(pages.PINNING)
