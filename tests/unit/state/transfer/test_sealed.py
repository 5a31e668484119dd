"""Memory that came in a sealed file: what was written to it is known, and it moves without a copy."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from sublet.state.transfer import changes, sealed
from sublet.state.transfer.changes import CHUNK_BYTES, HASH_BYTES, ChangeFinder, chunk_hash
from sublet.state.transfer.encoded import BufferKind, EncodedBuffer
from sublet.state.transfer.memory import PAGE, address_of
from sublet.wire.sealed_memory import map_shared, sealed_maps, write_shared

SIZE = 8 * CHUNK_BYTES + 3 * PAGE + 17


def came(content: bytes) -> memoryview:
    fd, _ = write_shared((memoryview(content),))
    try:
        return map_shared(fd, 0, len(content), writable=True)
    finally:
        os.close(fd)


def buffer(view: memoryview) -> EncodedBuffer:
    return EncodedBuffer(view=view, address=address_of(view), kind=BufferKind.OTHER, writable=True)


def hashes(content: bytes) -> bytes:
    return b"".join(chunk_hash(content[at : at + CHUNK_BYTES]) for at in range(0, len(content), CHUNK_BYTES))


@pytest.fixture
def content() -> bytes:
    return random.Random(7).randbytes(SIZE)


@pytest.fixture(autouse=True)
def _told() -> None:
    view = came(bytes(SIZE))
    if sealed.own_pages(address_of(view), SIZE) is None:
        pytest.skip("this kernel does not tell which pages are a file's (it does from 6.7 on)")


def test_pages_that_were_written_to_are_told_from_those_that_were_read(content: bytes) -> None:
    view = came(content)
    start = address_of(view)
    assert bytes(view) == content
    found = sealed.own_pages(start, SIZE)
    assert found is not None
    assert found[1] == []
    view[5 * PAGE + 3] ^= 1
    view[SIZE - 1] ^= 1
    after = sealed.own_pages(start, SIZE)
    assert after is not None
    assert after[0] == found[0]
    last = start + SIZE - SIZE % PAGE
    assert after[1] == [(start + 5 * PAGE, start + 6 * PAGE), (last, last + PAGE)]


def test_memory_of_ones_own_is_in_no_map() -> None:
    own = memoryview(bytearray(SIZE))
    assert sealed.own_pages(address_of(own), SIZE) is None


def test_a_map_that_nobody_has_any_more_is_forgotten(content: bytes) -> None:
    before = len(sealed_maps())
    view = came(content)
    assert len(sealed_maps()) == before + 1
    del view
    assert len(sealed_maps()) == before


def test_what_is_believed_is_not_read(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    finder, view = ChangeFinder(), came(content)
    monkeypatch.setattr(changes, "chunk_hash", lambda data: pytest.fail("it was hashed"))
    finder.believe(buffer(view), hashes(content))
    assert finder.changed(buffer(view)) == []


def test_of_what_is_believed_every_write_is_found(content: bytes) -> None:
    finder, view = ChangeFinder(), came(content)
    finder.believe(buffer(view), hashes(content))
    view[2 * CHUNK_BYTES] ^= 1
    view[SIZE - 1] ^= 1
    assert finder.changed(buffer(view)) == [2, 8]
    assert finder.changed(buffer(view)) == []
    view[2 * CHUNK_BYTES] ^= 1
    assert finder.changed(buffer(view)) == [2]


def test_a_write_that_leaves_all_as_it_was_is_no_change(content: bytes) -> None:
    finder, view = ChangeFinder(), came(content)
    finder.believe(buffer(view), hashes(content))
    view[PAGE] = view[PAGE]
    assert finder.changed(buffer(view)) == []


def test_what_was_written_before_it_is_believed_is_a_change(content: bytes) -> None:
    finder, view = ChangeFinder(), came(content)
    view[CHUNK_BYTES] ^= 1
    finder.believe(buffer(view), hashes(content))
    assert finder.changed(buffer(view)) == [1]


def test_untouched_memory_is_no_change_whatever_it_was_said_to_be(content: bytes) -> None:
    """The other side wrote to it between its look and its copy; that is not to come back as a change from here."""
    finder, view = ChangeFinder(), came(content)
    finder.believe(buffer(view), bytes(len(hashes(content))))
    assert finder.changed(buffer(view)) == []


def test_pages_that_are_dropped_are_the_files_again_and_that_is_a_change(content: bytes) -> None:
    finder, view = ChangeFinder(), came(content)
    finder.believe(buffer(view), hashes(content))
    view[0] ^= 1
    assert finder.changed(buffer(view)) == [0]
    one = view.obj
    one.madvise(4, 0, PAGE)  # type: ignore[attr-defined]  # MADV_DONTNEED
    assert finder.changed(buffer(view)) == [0]


def test_hashes_that_do_not_fit_are_not_believed(content: bytes) -> None:
    finder, view = ChangeFinder(), came(content)
    finder.believe(buffer(view), bytes(HASH_BYTES))
    assert finder.changed(buffer(view)) == []


def test_memory_of_ones_own_is_read_whatever_is_said(content: bytes) -> None:
    finder, own = ChangeFinder(), memoryview(bytearray(content))
    finder.believe(buffer(own), bytes(len(hashes(content))))
    assert finder.changed(buffer(own)) == []


def test_moved_memory_is_there_for_whoever_looks_and_the_source_as_it_came(content: bytes) -> None:
    target, source = came(bytes(SIZE)), came(content)
    looking = np.frombuffer(target, np.uint8)
    target[0] = target[SIZE - 1] = 77
    assert sealed.move(address_of(target), address_of(source), SIZE)
    assert looking.tobytes() == content
    assert bytes(source) == content
    looking[3] ^= 1
    assert bytes(source) == content
    del source
    assert looking.tobytes()[4:] == content[4:]


def test_who_remembered_the_target_finds_all_of_it_changed(content: bytes) -> None:
    finder, target, source = ChangeFinder(), came(bytes(SIZE)), came(content)
    finder.changed(buffer(target))
    assert sealed.move(address_of(target), address_of(source), SIZE)
    assert finder.changed(buffer(target)) == list(range(9))


@pytest.mark.parametrize("case", ["a part", "its own", "other length", "written to", "no map"])
def test_what_cannot_be_moved_is_left_to_be_copied(case: str, content: bytes) -> None:
    target, source = came(bytes(SIZE)), came(content)
    to, origin, length = address_of(target), address_of(source), SIZE
    match case:
        case "a part":
            to, origin, length = to + PAGE, origin + PAGE, SIZE - PAGE
        case "its own":
            origin = to
        case "other length":
            length = SIZE - PAGE
        case "written to":
            source[0] ^= 1
        case _:
            own = memoryview(bytearray(SIZE))
            to = address_of(own)
    assert not sealed.move(to, origin, length)
    assert bytes(target) == bytes(SIZE)
