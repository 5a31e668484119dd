"""Fingerprints tell what is still the same; what they are not known of, or what they say differs, is hashed."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.writer import Saver
from sublet.state.transfer.changes import (
    CHUNK_BYTES,
    FINGERPRINT_BYTES,
    UNKNOWN,
    ChangeFinder,
    Fingerprint,
    chunk_hash,
    seeded_fingerprint,
    this_process,
)
from sublet.state.transfer.encoded import BufferKind, EncodedBuffer
from sublet.state.transfer.memory import Copies, address_of, fresh_memory
from sublet.state.transfer.pages import Pages, process_pages

CHUNKS = 12
LENGTH = CHUNKS * CHUNK_BYTES - 1000
SMALL = 16 * 1024


def slow(data: memoryview) -> bytes:
    """One that is there on every machine."""
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()


def untracked(fingerprint: Fingerprint = slow, chunk_bytes: int = CHUNK_BYTES) -> ChangeFinder:
    pages = Pages()
    pages.forget()
    return ChangeFinder(pages=pages, fingerprint=fingerprint, chunk_bytes=chunk_bytes)


def array() -> np.ndarray[Any, Any]:
    return np.frombuffer(fresh_memory(LENGTH), dtype="u1")


def buffer_of(data: Any) -> EncodedBuffer:
    view = memoryview(data).cast("B")
    return EncodedBuffer(view=view, address=address_of(view), kind=BufferKind.OTHER, writable=True)


@pytest.fixture
def quick() -> Fingerprint:
    found = seeded_fingerprint(1, 2)
    if found is None:
        pytest.skip("xxhash is not installed here")
    return found


def test_each_seed_counts_and_so_does_each_byte(quick: Fingerprint) -> None:
    chance = random.Random(0)
    data = bytearray(chance.randbytes(CHUNK_BYTES))
    before = quick(memoryview(data))
    assert len(before) == FINGERPRINT_BYTES
    for seeds in ((1, 3), (3, 2)):
        other = seeded_fingerprint(*seeds)
        assert other is not None
        assert other(memoryview(data)) != before
    found = {before}
    for at in chance.sample(range(CHUNK_BYTES), 300):
        data[at] ^= 1 << chance.randrange(8)
        found.add(quick(memoryview(data)))
    assert len(found) == 301


def test_words_that_change_places_are_found(quick: Fingerprint) -> None:
    """Within a KiB it adds up; what the sums do not tell the products do."""
    words = np.arange(1000, 1000 + CHUNK_BYTES // 8, dtype="u8")
    found = {quick(words.data.cast("B"))}
    for at in range(64):
        words[[at, at + 64]] = words[[at + 64, at]]
        found.add(quick(words.data.cast("B")))
        words[at] += 1
        words[at + 8] -= 1
        found.add(quick(words.data.cast("B")))
    assert len(found) == 129


def test_what_a_fingerprint_says_is_the_same_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    data, finder = array(), untracked()
    finder.changed(buffer_of(data))
    data[5 * CHUNK_BYTES] = 1
    hashed = []

    def counted(chunk: memoryview) -> bytes:
        hashed.append(chunk.nbytes)
        return chunk_hash(chunk)

    monkeypatch.setattr("sublet.state.transfer.changes.chunk_hash", counted)
    changed, table = finder.compared(buffer_of(data))
    assert changed == [5]
    assert hashed == [CHUNK_BYTES]
    assert table == b"".join(chunk_hash(data.data[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES]) for n in range(CHUNKS))


def test_what_was_hashed_without_a_fingerprint_is_hashed_again() -> None:
    """An old fingerprint beside a new hash would say that what it was before is what it is now."""
    data, finder = array(), untracked()
    finder.changed(buffer_of(data))
    data[0] = 1
    look = finder.begin(buffer_of(data))
    finder.record_hashes(look, {n: chunk_hash(look.chunk(n)) for n in look.candidates})
    data[0] = 0
    look = finder.begin(buffer_of(data))
    assert look.prints_before[:FINGERPRINT_BYTES] == UNKNOWN
    assert look.prints_before[FINGERPRINT_BYTES : 2 * FINGERPRINT_BYTES] not in (b"", UNKNOWN)
    assert finder.changed(buffer_of(data)) == [0]


def test_hash_and_fingerprint_are_of_the_same_bytes() -> None:
    """Also where somebody writes to the memory in that very moment. Else what is put back to what the one saw would be
    taken for what the other did."""
    data = array()
    values = iter(range(1, 250))

    def meddling(chunk: memoryview) -> bytes:
        found = slow(chunk)
        data[0] = next(values)
        return found

    finder = untracked(meddling)
    for _ in range(6):
        data[0] = 0
        look = finder.begin(buffer_of(data))
        hashes = dict(zip(look.candidates, look.hashes(list(look.candidates)), strict=True))
        finder.record_hashes(look, hashes)
        was = bytearray(data.data[:CHUNK_BYTES])
        for value in range(250):
            was[0] = value
            if chunk_hash(memoryview(was)) == hashes[0]:
                break
        assert finder.begin(buffer_of(data)).prints_before[:FINGERPRINT_BYTES] == slow(memoryview(was))


def test_a_change_that_a_fingerprint_misses_is_missed() -> None:
    """So this is what decides, where the kernel does not."""
    data, finder = array(), untracked(lambda _: b"x" * FINGERPRINT_BYTES)
    finder.changed(buffer_of(data))
    data[:] = 7
    assert finder.changed(buffer_of(data)) == []


def test_memory_that_moves_on_is_tracked_once_it_stayed() -> None:
    if not process_pages().usable():
        pytest.skip("this kernel does not track pages (6.7 does), or something here pins them")
    data, finder = array(), ChangeFinder(fingerprint=slow)
    seen = []
    for n in range(9):
        if n < 5:
            data[:] = n
        else:
            data[0] = n
        look = finder.begin(buffer_of(data), moving=True)
        seen.append((look.number > 0, look.tracked))
        finder.record_hashes(look, dict(zip(look.candidates, look.hashes(list(look.candidates)), strict=True)))
    assert seen == [(False, False)] * 6 + [(True, False)] + [(True, True)] * 2


@pytest.mark.parametrize("seed", range(3))
def test_every_save_restores_as_it_was(tmp_path: Path, seed: int) -> None:
    """Waited for or not, much changed or little, on top of another base or not."""
    chance = random.Random(seed)
    state = {"a": np.zeros(100_000), "b": np.zeros(3000)}
    store = FolderStore(tmp_path)
    saver = Saver(finder=untracked(chunk_bytes=SMALL), chunk_bytes=SMALL)
    base, copies = store.base(), Copies()
    for _ in range(9):
        share = chance.choice((0, 0.001, 0.3, 1))
        for one in state.values():
            start = chance.randrange(len(one))
            one[start : start + int(share * len(one))] = chance.random()
            one[chance.randrange(len(one))] += share > 0
        wanted = {name: one.copy() for name, one in state.items()}
        if chance.random() < 0.2:
            base = FolderStore(tmp_path).base()
        capture = saver.capture(encode_roots(state), base, copy=copies if chance.random() < 0.5 else None)
        if capture.is_copy:
            for one in state.values():
                one += 1
        staged = saver.write(capture, staging=store.stage(), base=base, author=store.author, wall_ns=0)
        store.publish(staged)
        base = staged.base
        copies.reset()
        with store.open() as checkpoint:
            found = checkpoint.load_all()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_child_takes_others_and_still_compares_those_it_has() -> None:
    data, mine = array(), this_process()
    finder = ChangeFinder(pages=untracked()._pages) if mine is not None else untracked()
    finder.changed(buffer_of(data))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            data[3 * CHUNK_BYTES] = 1
            found = finder.changed(buffer_of(data))
            status = 0 if found == [3] and (mine is None or this_process() is not mine) else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert this_process() is mine
    assert finder.changed(buffer_of(data)) == []
