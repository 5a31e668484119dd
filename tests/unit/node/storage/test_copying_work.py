"""What one volume has published comes into the staging of another: whole, while it goes on changing, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublet.errors import CapacityExceeded, CheckpointDamaged, InvalidRequest, NotFound
from sublet.node.storage import copying_work
from sublet.node.storage.copying_work import AROUND, copy_in
from sublet.node.storage.volume_folder import collect, has_files, sweep_staging
from sublet.state.checkpoints.format import CheckpointManifest
from sublet.state.checkpoints.store import Copied, FolderStore, copy_checkpoint, verify
from sublet.state.checkpoints.writer import Author
from sublet.values import MIB
from sublet.wire.manifest import manifest_name
from sublet.wire.volumes import COPIED, Collect, CopiedIn, CopyIn, bytes_below
from tests.unit.node.storage.test_publish import E5, A, Bench, big


@pytest.fixture
def source(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "source").open()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "volume").open()


def copied(bench: Bench, source: Bench, *, passing: str = "", name: str = "c") -> tuple[CopiedIn, Any]:
    """What was answered, and the value in what was put there."""
    folder = bench.staging / name
    folder.mkdir(exist_ok=True)
    asked = CopyIn(lease=A, epoch=E5, volume="t", staging=name, passing=passing)
    said = copy_in(bench.place, str(source.folder), asked)
    if not said.number:
        assert not os.listdir(folder)
        return said, None
    with Copied(CheckpointManifest.parse((folder / COPIED).read_bytes()), folder).open() as checkpoint:
        return said, checkpoint.load("value")


def everything(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_it_is_the_newest_and_the_other_volume_is_only_read(bench: Bench, source: Bench) -> None:
    for value in ("old", big(1)):
        source.save(value)
    before = everything(source.folder)
    assert copied(bench, source)[1] == big(1)
    said, value = copied(bench, source, name="d")
    assert (said.number, value) == (2, big(1))
    assert said.size > 300_000
    assert everything(source.folder) == before
    assert not bench.values()  # it is staged, and nobody takes that for a checkpoint


def test_asked_only_what_there_is_nothing_is_written(bench: Bench, source: Bench) -> None:
    asked = CopyIn(lease=A, epoch=E5, volume="t")
    assert copy_in(bench.place, str(source.folder), asked) == CopiedIn(number=0)
    source.save(1)
    before = everything(bench.folder)
    assert copy_in(bench.place, str(source.folder), asked).number == 1
    assert everything(bench.folder) == before


def test_of_a_folder_that_nobody_saved_in_there_is_nothing(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert copied(bench, Bench(tmp_path / "empty"))[0] == CopiedIn(number=0)


@pytest.mark.parametrize(
    ("notes", "number"), [(["cell 1", "within 2"], 1), (["within 1", "within 1"], 2), (["cell 1"], 1)]
)
def test_what_a_running_cell_saved_is_passed_over(notes: list[str], number: int, bench: Bench, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "noted")
    for n, note in enumerate(notes):
        with store.staging_folder() as folder:
            store.publish(
                bench.saver.save(
                    {"value": n}, staging=folder, base=store.base(), author=store.author, wall_ns=n, note=note
                )
            )
    said, value = copied(bench, Bench(store.folder), passing="within ")
    assert (said.number, value, said.note) == (number, number - 1, notes[number - 1])


def goes_on(source: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before each call of this, whoever has the volume saves and collects."""
    real: Callable[..., Any] = getattr(copying_work, name)
    state = {"n": 10}

    def meanwhile(*args: Any) -> Any:
        state["n"] += 1
        if state["n"] < 15:
            source.save(big(state["n"]))
            collect(source.place, Collect(lease=A, epoch=E5, keep=1))
        return real(*args)

    monkeypatch.setattr(copying_work, name, meanwhile)


@pytest.mark.parametrize("name", ["_opened", "copy_bytes", "check_pack", "_put"])
def test_the_other_saves_and_collects_meanwhile(
    name: str, bench: Bench, source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(big(1))
    goes_on(source, monkeypatch, name)
    said, value = copied(bench, source)
    assert value == big(said.number + 9 if said.number > 1 else 1)
    assert list(source.values().values())[-1] != big(1)


def test_one_that_never_holds_still_is_damage_and_not_a_loop(
    bench: Bench, source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(big(1))
    for pack in (source.folder / "packs").iterdir():
        pack.unlink()
    with pytest.raises(CheckpointDamaged, match="names packs that are not there"):
        copied(bench, source)


def test_a_pack_that_is_not_what_it_was_is_not_spread(bench: Bench, source: Bench) -> None:
    source.save(big(1))
    (pack,) = (source.folder / "packs").iterdir()
    pack.chmod(0o644)
    pack.write_bytes(pack.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match="is not the pack"):
        copied(bench, source)
    assert not os.listdir(bench.staging / "c")


@pytest.mark.parametrize("counted", [True, False])
def test_what_has_no_room_is_refused_before_anything_is_written(
    counted: bool, bench: Bench, source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(big(1))
    if counted:
        bench.counted, bench.size = True, 200_000
    else:
        real = os.statvfs(bench.folder)
        small = os.statvfs_result((real.f_bsize, real.f_bsize, *real[2:4], 2, *real[5:]))
        monkeypatch.setattr(os, "fstatvfs", lambda _: small)
    before = everything(bench.folder)
    with pytest.raises(CapacityExceeded, match=r"the copy needs 357.*KiB, and the volume has room for") as caught:
        copied(bench, source)
    assert "Ask for one with at least" in caught.value.do
    assert everything(bench.folder) == before


@pytest.mark.parametrize("name", ["..", "../x", "", "nowhere"])
def test_it_goes_into_a_folder_of_the_askers_own_staging_and_nowhere_else(
    name: str, bench: Bench, source: Bench
) -> None:
    source.save(1)
    asked = CopyIn(lease=A, epoch=E5, volume="t", staging=name)
    if not name:
        assert copy_in(bench.place, str(source.folder), asked).number == 1
        return
    with pytest.raises((InvalidRequest, NotFound)):
        copy_in(bench.place, str(source.folder), asked)


def test_what_lies_there_already_is_not_written_through(bench: Bench, source: Bench, tmp_path: Path) -> None:
    source.save(1)
    (pack,) = (source.folder / "packs").iterdir()
    (bench.staging / "c").mkdir()
    (tmp_path / "precious").write_bytes(b"mine")
    (bench.staging / "c" / pack.name).symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        copied(bench, source)
    assert (tmp_path / "precious").read_bytes() == b"mine"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of newer interpreters, beside pytest's threads
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_whoever_is_killed_in_the_middle_leaves_nothing_that_anybody_reads(
    after: int, bench: Bench, source: Bench
) -> None:
    bench.save("mine")
    for n in range(3):
        source.save([big(n), "small"] if n else big(0))
    pid = os.fork()
    if pid == 0:
        calls = [0]
        real = os.write

        def dies(fd: int, data: Any) -> int:
            if calls[0] == after:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return real(fd, data[: len(data) // 2 or 1])

        os.write = dies
        try:
            copied(bench, source)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert list(bench.values().values()) == ["mine"]
    assert verify(source.folder).ok
    sweep_staging(str(bench.folder))
    assert not has_files(str(bench.folder / "staging"))
    assert list(bench.values().values()) == ["mine"]


def test_a_copy_becomes_a_checkpoint_by_being_published_as_anything_is(bench: Bench, source: Bench) -> None:
    """Under the next number and the own epoch, whatever those were where it came from."""
    for n in range(3):
        source.save(big(n))
    there = FolderStore(bench.folder, author=Author(lease=A, epoch=E5))
    assert copy_checkpoint(there, str(source.folder)).number == 1
    bench.save("mine")
    assert copy_checkpoint(there, str(source.folder)).number == 3
    assert list(bench.values().values()) == [big(2), "mine", big(2)]
    with pytest.raises(NotFound):
        copy_checkpoint(there, str(bench.folder.parent / "nowhere"))


def test_a_folder_that_goes_on_changing_is_copied_as_it_was_at_one_moment(
    source: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    source.save(big(1))
    store, real = FolderStore(tmp_path / "copy"), shutil.copyfileobj

    def meanwhile(*args: Any) -> None:
        source.save(big(7))
        collect(source.place, Collect(lease=A, epoch=E5, keep=1))
        real(*args)

    monkeypatch.setattr(shutil, "copyfileobj", meanwhile)
    assert copy_checkpoint(store, str(source.folder)).number == 1
    with store.open() as checkpoint:
        assert checkpoint.load("value") == big(1)
    assert store.inspect(str(source.folder)).number == 2
    assert verify(store.folder).ok


def test_what_a_folder_has_no_room_for_is_not_begun(
    source: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(big(1))
    monkeypatch.setattr(FolderStore, "room", property(lambda _: MIB // 4))
    store = FolderStore(tmp_path / "copy")
    with pytest.raises(Exception, match="needs up to"):
        copy_checkpoint(store, str(source.folder))
    assert not everything(store.folder) or everything(store.folder) == {"lock": 0}


def test_a_copy_is_refused_to_who_has_the_volume_no_more(bench: Bench, source: Bench) -> None:
    """It is staged under an epoch; under a later one there is no such folder."""
    source.save(1)
    (bench.staging / "c").mkdir()
    later = replace(bench, epoch=type(E5)(1, 6)).open()
    assert later.epoch != E5
    with pytest.raises(NotFound):
        copy_in(bench.place, str(source.folder), CopyIn(lease=A, epoch=E5, volume="t", staging="c"))


def test_what_is_copied_may_be_read_by_its_asker(bench: Bench, source: Bench) -> None:
    source.save(big(1))
    copied(bench, source)
    assert {path.stat().st_mode & 0o777 for path in (bench.staging / "c").iterdir()} == {0o444}


def test_a_manifest_under_the_name_of_another_is_not_copied(bench: Bench, source: Bench) -> None:
    source.save(1)
    folder = source.folder / "checkpoints"
    (folder / manifest_name(1)).rename(folder / manifest_name(5))
    with pytest.raises(CheckpointDamaged, match="is the manifest of another checkpoint"):
        copied(bench, source)


def test_a_volume_whose_size_is_only_counted_has_room_for_what_is_left_of_it(bench: Bench, source: Bench) -> None:
    """With a margin for folders and a manifest of its own."""
    source.save(big(1))
    size = copied(bench, source)[0].size
    bench.counted = True
    for room, fits in ((size + AROUND, True), (size + AROUND - 1, False), (size, False)):
        bench.size = bytes_below(str(bench.folder)) + room
        if fits:
            copied(bench, source, name="fits")
        else:
            with pytest.raises(CapacityExceeded, match="has room for"):
                copied(bench, source, name="not")
