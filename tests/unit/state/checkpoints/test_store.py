"""A folder of checkpoints: only what changed is written, only what is asked for is read, nothing needed is removed."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, NotFound, StaleEpoch, VersionConflict
from sublet.state.checkpoints import atomic_files, packs
from sublet.state.checkpoints.atomic_files import PIECE, read_whole
from sublet.state.checkpoints.store import FolderStore, collect, verify
from sublet.state.checkpoints.writer import PACKS_MAX, Author, Saver, SaveReport
from sublet.state.transfer.changes import CHUNK_BYTES
from sublet.values import Epoch, LeaseId


class Session:
    """Saves of one state into one folder."""

    def __init__(self, folder: Path, epoch: int = 1) -> None:
        self.store = FolderStore(folder, author=Author(lease=LeaseId("l"), epoch=Epoch(1, epoch)))
        self.saver = Saver()
        self.base = self.store.base()

    def save(self, roots: dict[str, Any]) -> SaveReport:
        staging = self.store.stage()
        try:
            staged = self.saver.save(roots, staging=staging, base=self.base, author=self.store.author, wall_ns=0)
            self.store.publish(staged)
        finally:
            self.store.discard(staging)
        self.base = staged.base
        return staged.report


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def noise(length: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype="u1")


def test_a_save_writes_what_changed_and_no_more(tmp_path: Path) -> None:
    session = Session(tmp_path)
    roots: dict[str, Any] = {"a": noise(40 * CHUNK_BYTES), "b": noise(10 * CHUNK_BYTES, 1), "step": 1}
    first = session.save(roots)
    assert first.written_bytes > 50 * CHUNK_BYTES
    roots["a"][7 * CHUNK_BYTES] ^= 1
    roots["step"] = 2
    second = session.save(roots)
    assert CHUNK_BYTES < second.written_bytes < 1.2 * CHUNK_BYTES
    third = session.save(roots)
    assert third.written_bytes < 1000
    with session.store.open() as checkpoint:
        assert same(checkpoint.load_all(), roots)
    with session.store.open(1) as checkpoint:
        assert checkpoint.load("step") == 1


def test_the_same_bytes_are_stored_once(tmp_path: Path) -> None:
    session = Session(tmp_path)
    report = session.save({name: noise(8 * CHUNK_BYTES) for name in "abcd"})
    assert report.written_bytes < 9 * CHUNK_BYTES
    with session.store.open() as checkpoint:
        assert same(checkpoint.load_all(), {name: noise(8 * CHUNK_BYTES) for name in "abcd"})


def test_what_shrinks_is_compressed_and_noise_is_not(tmp_path: Path) -> None:
    session = Session(tmp_path)
    assert session.save({"zeros": np.zeros(4 << 20)}).written_bytes < 100_000
    assert session.save({"noise": noise(1 << 20)}).written_bytes > 1 << 20


def test_a_value_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    session = Session(tmp_path)
    shared = [1, 2]
    session.save({"big": noise(8 * CHUNK_BYTES), "a": {"s": shared}, "z": [shared]})
    with session.store.open() as checkpoint:
        assert checkpoint.names == ["a", "big", "z"]
        assert checkpoint.together_with("a") == ("a", "z")
        assert checkpoint.load("a")["s"] is checkpoint.load("z")[0]
        (pack,) = session.store.packs.iterdir()
        pack.write_bytes(b"")  # the descriptor is open: damage from now on is seen where it is read
        with pytest.raises(CheckpointDamaged):
            checkpoint.load("big")
        assert checkpoint.load("a") == {"s": [1, 2]}
        with pytest.raises(NotFound, match="no 'nothing'"):
            checkpoint.load("nothing")


@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_keeps_few_packs_and_every_checkpoint_right(seed: int, tmp_path: Path) -> None:
    """Random changes, collections and restarts, each checkpoint compared with what was saved."""
    chance = random.Random(seed)
    session = Session(tmp_path)
    roots: dict[str, Any] = {f"n{n}": noise(chance.choice((10, 5000, 3 * CHUNK_BYTES)), n) for n in range(6)}
    kept: dict[int, dict[str, Any]] = {}
    for _ in range(60):
        for name in chance.sample(sorted(roots), chance.randrange(3)):
            array = roots[name]
            array[chance.randrange(len(array))] ^= 1 + chance.randrange(255)
        if chance.random() < 0.1:
            roots[f"n{chance.randrange(9)}"] = noise(chance.choice((1, 100, 2 * CHUNK_BYTES)), chance.randrange(99))
        report = session.save(roots)
        kept[report.number] = {name: array.copy() for name, array in roots.items()}
        assert len(session.store.manifest().packs) <= PACKS_MAX + 1
        if chance.random() < 0.1:
            collect(session.store, keep=chance.choice((1, 3, 10)))
        if chance.random() < 0.05:
            session = Session(tmp_path)
    assert verify(tmp_path).ok
    for number in session.store.numbers():
        with session.store.open(number) as checkpoint:
            assert same(checkpoint.load_all(), kept[number])
    total = sum(path.stat().st_size for path in session.store.packs.iterdir())
    collect(session.store, keep=1)
    live = sum(array.nbytes for array in roots.values())
    assert sum(path.stat().st_size for path in session.store.packs.iterdir()) < min(total + 1, 2.5 * live + 100_000)


def test_another_base_than_at_the_last_look_gets_everything_it_lacks(tmp_path: Path) -> None:
    """The memory is unchanged, but this folder has never seen it."""
    one, two = Session(tmp_path / "one"), Session(tmp_path / "two")
    roots = {"a": noise(20 * CHUNK_BYTES)}
    one.save(roots)
    two.saver = one.saver
    two.save(roots)
    with two.store.open() as checkpoint:
        assert same(checkpoint.load_all(), roots)


def test_of_two_writers_one_wins_and_the_other_is_told(tmp_path: Path) -> None:
    one, two = Session(tmp_path), Session(tmp_path)
    one.save({"a": 1})
    with pytest.raises(VersionConflict, match="checkpoint 1 is not the next one"):
        two.save({"a": 2})
    assert one.store.open().load("a") == 1
    two.base = two.store.base()
    assert two.save({"a": 2}).number == 2


def test_an_older_holder_cannot_save_any_more(tmp_path: Path) -> None:
    old, new = Session(tmp_path, epoch=1), Session(tmp_path, epoch=2)
    new.save({"a": 1})
    old.base = old.store.base()
    with pytest.raises(StaleEpoch):
        old.save({"a": 2})
    assert old.store.numbers() == [1]


def test_a_collection_leaves_what_is_being_read_and_written(tmp_path: Path) -> None:
    session = Session(tmp_path)
    for n in range(6):
        session.save({"a": noise(3 * CHUNK_BYTES, n)})
    reader = session.store.open(1)
    staging = session.store.stage()
    abandoned = session.store.staging / "abandoned"
    abandoned.mkdir()
    (abandoned / "pack.part").write_bytes(b"half")
    found = collect(FolderStore(tmp_path), keep=2)
    assert found.checkpoints == [1, 2, 3, 4]
    assert found.packs == 4
    assert session.store.numbers() == [5, 6]
    assert staging.exists()
    assert not abandoned.exists()
    assert np.array_equal(reader.load("a"), noise(3 * CHUNK_BYTES, 0))
    reader.close()
    assert verify(tmp_path).ok


def test_nothing_is_collected_while_a_checkpoint_that_stays_cannot_be_read(tmp_path: Path) -> None:
    session = Session(tmp_path)
    for n in range(4):
        session.save({"a": noise(2000, n)})
    session.store.manifest_path(4).write_bytes(b"damage")
    before = sorted(os.listdir(session.store.packs))
    with pytest.raises(CheckpointDamaged):
        collect(session.store, keep=1)
    assert sorted(os.listdir(session.store.packs)) == before
    assert session.store.numbers() == [1, 2, 3, 4]


def test_an_older_checkpoint_is_never_handed_out_for_a_damaged_newest(tmp_path: Path) -> None:
    session = Session(tmp_path)
    session.save({"a": 1})
    session.save({"a": 2})
    session.store.manifest_path(2).write_bytes(b"damage")
    with pytest.raises(CheckpointDamaged):
        session.store.open()
    assert session.store.open(1).load("a") == 1


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_is_an_error_and_harms_nothing(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tmp_path)
    session.save({"a": noise(30 * CHUNK_BYTES)})
    for which in range(4):
        calls = 0
        real = getattr(os, call)

        def failing(*args: Any, real: Any = real, which: int = which, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == which + 1:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                session.save({"a": noise(30 * CHUNK_BYTES, which + 1)})
            except CheckpointFailed as error:
                assert os.strerror(code) in str(error)  # noqa: PT017 - whether it fails depends on the call
            else:
                assert calls <= which
                continue
        assert session.store.newest() == session.base.number
        with session.store.open() as checkpoint:
            checkpoint.load_all()
    session.save({"a": noise(30 * CHUNK_BYTES, 99)})
    assert verify(tmp_path).ok
    assert np.array_equal(session.store.open().load("a"), noise(30 * CHUNK_BYTES, 99))


@pytest.mark.parametrize("seed", range(2))
def test_writes_that_do_part_of_the_work_change_nothing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, write = random.Random(seed), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: chance.randrange(len(data)) + 1]))
    session = Session(tmp_path)
    roots: dict[str, Any] = {"a": noise(9 * CHUNK_BYTES, seed), "text": "x" * 9000}
    for number in range(3):
        roots["a"][number * CHUNK_BYTES] ^= 1
        session.save(roots)
    collect(session.store, keep=1)
    monkeypatch.undo()
    assert verify(tmp_path).ok
    with session.store.open(3) as checkpoint:
        assert same(checkpoint.load_all(), roots)


def test_memory_that_changes_while_it_is_saved_is_never_stored_under_a_wrong_hash(tmp_path: Path) -> None:
    session = Session(tmp_path)
    data = noise(30 * CHUNK_BYTES)
    stop = threading.Event()

    def write() -> None:
        chance = random.Random(0)
        while not stop.is_set():
            data[chance.randrange(len(data))] ^= 0xFF

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(6):
            session.save({"a": data})
    finally:
        stop.set()
        thread.join()
    assert verify(tmp_path).ok
    session.save({"a": data})
    assert np.array_equal(session.store.open().load("a"), data)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest, match="cannot hold checkpoints"):
        FolderStore(tmp_path / "file" / "below")
    with pytest.raises(NotFound):
        FolderStore(tmp_path / "empty").open()
    with pytest.raises(NotFound):
        verify(tmp_path / "nothing")
    with pytest.raises(InvalidRequest):
        collect(FolderStore(tmp_path / "empty"), keep=0)


def test_ten_thousand_names_and_one_change(tmp_path: Path) -> None:
    session = Session(tmp_path)
    roots: dict[str, Any] = {f"v{n}": {"n": n, "text": str(n)} for n in range(10_000)}
    first = session.save(roots)
    roots["v77"] = {"n": -1, "text": "changed"}
    second = session.save(roots)
    assert second.written_bytes * 5 < first.written_bytes
    assert session.store.open().load("v77") == {"n": -1, "text": "changed"}
    assert session.store.open().load_all() == roots


def test_publication_syncs_before_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that everything else rests on."""
    said: list[str] = []
    for name in ("fsync", "rename", "link"):
        real = getattr(os, name)

        def told(*args: Any, real: Any = real, name: str = name) -> Any:
            target = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[1]
            said.append(f"{name} {os.path.basename(os.fspath(target))}")
            return real(*args)

        monkeypatch.setattr(os, name, told)
    session = Session(tmp_path)
    session.save({"a": noise(9000)})
    (pack,) = session.store.packs.iterdir()
    assert said == [
        "fsync pack.part",
        f"rename {pack.name}",
        "fsync manifest",
        f"rename {pack.name}",
        "fsync packs",
        "link 0000000000000001.manifest",
        "fsync checkpoints",
    ]
    assert atomic_files.__doc__ is not None
    assert packs.__doc__ is not None


def test_a_file_that_is_larger_than_it_could_rightly_be_is_not_read_whole(tmp_path: Path) -> None:
    """One byte more than the limit tells that it is too large; the rest, perhaps gigabytes, stays on the disk."""
    path = tmp_path / "manifest"
    path.write_bytes(bytes(3 * PIECE))
    assert len(read_whole(path, 10)) == 11
    assert len(read_whole(path, 2 * PIECE)) == 2 * PIECE + 1
    assert len(read_whole(path, 3 * PIECE)) == 3 * PIECE
