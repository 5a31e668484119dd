"""A pack that is written past the page cache, beside a program's work, is the pack that any other way makes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.state.checkpoints import writer
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.format import PackRef
from sublet.state.checkpoints.packs import PackFile, PackWriter
from sublet.state.transfer.changes import chunk_hash

ALL = 1 << 40
SIZES = (0, 1, 700, 4095, 4096, 4097, 60_000, 256 * 1024, 256 * 1024, 3 << 20, 5 << 20, 100)


def written(folder: Path, chunks: list[bytes], *, past_cache: int) -> tuple[PackRef, bytes]:
    folder.mkdir()
    with PackWriter(folder, past_cache=past_cache) as filling:
        for chunk in chunks:
            filling.room(len(chunk))[:] = chunk
            filling.keep(chunk_hash(chunk), len(chunk), shrink=len(chunk) < 5000)
        made = filling.finish()
    assert made is not None
    ref, path = made
    pack = PackFile(path, ref)
    assert sorted(map(pack.content, pack.entries)) == sorted(chunks)
    pack.close()
    return ref, path.read_bytes()


def some_chunks(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice(SIZES)) for _ in range(chance.randrange(1, 40))]


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_same_to_the_byte(tmp_path: Path, seed: int) -> None:
    chunks = list(dict.fromkeys(some_chunks(seed)))
    some = 6 << 20 if seed % 2 else ALL
    assert written(tmp_path / "a", chunks, past_cache=some) == written(tmp_path / "b", chunks, past_cache=0)


@pytest.mark.parametrize("seed", range(4))
def test_writes_that_stop_early_or_are_refused_change_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes past the cache must begin and end with a page; what does not goes the usual way."""
    chunks = list(dict.fromkeys(some_chunks(seed)))
    wanted = written(tmp_path / "a", chunks, past_cache=0)
    chance = random.Random(seed)
    monkeypatch.setattr(os, "write", odd(chance, os.write))
    assert written(tmp_path / "b", chunks, past_cache=ALL) == wanted


def odd(chance: random.Random, write: Callable[[int, memoryview], int]) -> Callable[[int, memoryview], int]:
    direct: list[bool] = []

    def one(fd: int, data: memoryview) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if direct[-1] and chance.random() < 0.2:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not direct[-1] and len(data) > 1 and chance.random() < 0.3:
            return write(fd, data[: chance.randrange(1, len(data))])
        return write(fd, data[: 4096 * chance.randrange(1, 99)]) if direct[-1] else write(fd, data)

    return one


def test_a_first_save_stays_in_the_cache_and_a_small_one_after_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever restores reads most of a state from memory; and nothing reads what a save adds to another."""
    asked: list[int] = []

    class Noting(PackWriter):
        def __init__(self, folder: Path, *, past_cache: int = 0) -> None:
            asked.append(past_cache)
            super().__init__(folder, past_cache=past_cache)

    monkeypatch.setattr(writer, "PackWriter", Noting)
    with Durable(bytearray(100_000), tmp_path) as durable:
        durable.checkpoint()
        durable.mutate(lambda it: it.extend(b"more"))
        durable.checkpoint()
        durable.checkpoint(wait=False)
    assert asked == [0, writer.SMALL_SAVE, sys.maxsize]
