"""What a forked job makes of staged files: a checkpoint, or a refusal that changes nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sublet.errors import (
    CapacityExceeded,
    CheckpointDamaged,
    CheckpointFailed,
    InvalidRequest,
    NotFound,
    StaleEpoch,
    SubletError,
    VersionConflict,
)
from sublet.node.storage import volume_folder
from sublet.node.storage.publish import check_pack, copy_bytes, publish, run_and_encode
from sublet.node.storage.volume_folder import VolumeAccess, collect, has_files, lay_out, sweep_staging
from sublet.state.checkpoints.format import CheckpointManifest
from sublet.state.checkpoints.store import FolderStore, verify
from sublet.state.checkpoints.writer import Author, Saver, Staged
from sublet.values import MIB, Epoch, LeaseId
from sublet.wire.codec import loads
from sublet.wire.manifest import manifest_name, number_of, read_manifest
from sublet.wire.refusals import Refusal
from sublet.wire.volumes import Collect, Publish, Published, VolumeOpened, VolumeReply

A = LeaseId("l-a")
E5, E6 = Epoch(1, 5), Epoch(1, 6)


@dataclass
class Bench:
    """A volume, and who saves there."""

    folder: Path
    counted: bool = False
    size: int = 64 * MIB
    epoch: Epoch = E5
    saver: Saver = field(default_factory=Saver)

    @property
    def place(self) -> VolumeAccess:
        return VolumeAccess(
            folder=str(self.folder),
            lock=f"{self.folder}.lock",
            size=self.size,
            counted=self.counted,
            owner=os.geteuid(),
            group=os.getegid(),
        )

    @property
    def staging(self) -> Path:
        return self.folder / "staging" / str(self.epoch)

    def open(self) -> Bench:
        self.folder.mkdir(exist_ok=True)
        said = VolumeOpened(lease=A, epoch=self.epoch, name="", folder="", staging="", size=self.size)
        assert lay_out(self.place, said) is said
        return self

    def stage(self, value: object, *, name: str = "s", author: Author | None = None) -> tuple[Publish, Staged]:
        folder = self.staging / name
        folder.mkdir()
        base = FolderStore(self.folder, create=False).base()
        author = author or Author(lease=A, epoch=self.epoch)
        staged = self.saver.save({"value": value}, staging=folder, base=base, author=author, wall_ns=0)
        asked = Publish(
            lease=A,
            epoch=self.epoch,
            staging=name,
            manifest="manifest",
            packs=tuple(pack.name for pack in staged.packs),
            parent=staged.manifest.parent,
        )
        return asked, staged

    def save(self, value: object) -> Published:
        asked, _ = self.stage(value, name=os.urandom(4).hex())
        return publish(self.place, asked)

    def values(self) -> dict[int, Any]:
        """Every checkpoint there is; all of them are whole, and nothing needed is missing."""
        store = FolderStore(self.folder, create=False)
        if not store.numbers():
            return {}
        verdict = verify(self.folder)
        assert verdict.ok, verdict.problems
        found = {}
        for number in store.numbers():
            with store.open(number) as checkpoint:
                found[number] = checkpoint.load("value")
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "volume").open()


def big(seed: int) -> bytes:
    """So large that it gets chunks of its own."""
    import random

    return random.Random(seed).randbytes(300_000)


def test_what_was_staged_is_a_checkpoint_that_nobody_writes_to(bench: Bench) -> None:
    asked, staged = bench.stage(big(1))
    done = publish(bench.place, asked)
    assert done.number == 1
    assert done.size == staged.report.written_bytes
    assert bench.values() == {1: big(1)}
    (pack,) = (bench.folder / "packs").iterdir()
    assert pack.stat().st_mode & 0o777 == 0o444
    assert (bench.folder / "checkpoints" / manifest_name(1)).stat().st_mode & 0o777 == 0o444
    bench.save([big(1), big(2)])
    assert bench.values()[2] == [big(1), big(2)]


@pytest.mark.parametrize("is_copied", [False, True], ids=["sealed", "copied"])
@pytest.mark.parametrize("nth", range(4))
def test_after_a_sync_that_failed_nothing_is_found_that_was_not_there(
    nth: int, is_copied: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the pack, of its folder, of the manifest, of its folder: whether the disk has it nobody knows, so nobody is
    told that it has. The same save succeeds when the disk does its work again."""
    bench.save(1)
    asked, _ = bench.stage(big(2))
    if is_copied:
        monkeypatch.setattr("sublet.node.storage.publish._seal", lambda fd, take_over: False)
    real, calls = os.fsync, 0

    def fails(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise OSError(errno.EIO, "an error of the disk")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="an error of the disk"):
            publish(bench.place, asked)
    assert calls == nth + 1, "and nothing is synced after it"
    assert bench.values() == {1: 1}
    assert publish(bench.place, asked).number == 2
    assert bench.values() == {1: 1, 2: big(2)}


@dataclass
class Odd:
    """Something that is wrong with what was staged."""

    name: str
    spoil: Callable[[Bench, Publish, Staged], Publish | None]
    error: type[SubletError]


def changed(path: Path, at: int, data: bytes = b"\x55") -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= data[0]
    path.chmod(0o600)
    path.write_bytes(raw)


def put_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link_to(bench: Bench, asked: Publish) -> Publish:
    (bench.staging / "l").symlink_to("s")
    return replace(asked, staging="l")


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def in_place_of(bench: Bench, name: str) -> None:
    (bench.folder / name).rename(bench.folder / f"{name}.was")
    (bench.folder / name).symlink_to(f"{name}.was")


def named_twice_more(bench: Bench, pack: Path) -> None:
    """As by an attempt to publish it that was killed, and elsewhere."""
    os.link(pack, bench.folder / "packs" / pack.name)
    os.link(pack, bench.folder / "mine")


def of_another_parent(manifest: Path) -> None:
    """The number is the next one, and it was made from an older checkpoint."""
    made = CheckpointManifest.parse(manifest.read_bytes())
    assert (made.number, made.parent) == (2, 1)
    manifest.chmod(0o600)
    manifest.write_bytes(replace(made, parent=0).dump())


ODDITIES = [
    Odd("the manifest is a link", lambda b, a, s: put_link(s.manifest_path, "/etc/passwd"), InvalidRequest),
    Odd("the manifest is a pipe", lambda b, a, s: put_pipe(s.manifest_path), InvalidRequest),
    Odd(
        "the manifest is a folder",
        lambda b, a, s: put_folder(s.manifest_path),
        InvalidRequest,
    ),
    Odd("the manifest is not there", lambda b, a, s: s.manifest_path.unlink(), CheckpointFailed),
    Odd("the manifest has another name", lambda b, a, s: os.link(s.manifest_path, b.folder / "mine"), InvalidRequest),
    Odd("the manifest is cut off", lambda b, a, s: os.truncate(s.manifest_path, 90), CheckpointDamaged),
    Odd("the manifest is empty", lambda b, a, s: os.truncate(s.manifest_path, 0), CheckpointDamaged),
    Odd("the manifest was changed", lambda b, a, s: changed(s.manifest_path, 30), CheckpointDamaged),
    Odd("the manifest is longer", lambda b, a, s: os.truncate(s.manifest_path, 4096), CheckpointDamaged),
    Odd("the manifest is immense", lambda b, a, s: os.truncate(s.manifest_path, 65 << 20), CheckpointDamaged),
    Odd("it was made from another parent", lambda b, a, s: of_another_parent(s.manifest_path), VersionConflict),
    Odd("the pack is a link", lambda b, a, s: put_link(s.packs[0], "/etc/passwd"), InvalidRequest),
    Odd("the pack is a pipe", lambda b, a, s: put_pipe(s.packs[0]), InvalidRequest),
    Odd("the pack has another name", lambda b, a, s: os.link(s.packs[0], b.folder / "mine"), InvalidRequest),
    Odd("the pack has two more names", lambda b, a, s: named_twice_more(b, s.packs[0]), InvalidRequest),
    Odd(
        "the pack is cut off", lambda b, a, s: os.truncate(s.packs[0], s.packs[0].stat().st_size - 1), CheckpointDamaged
    ),
    Odd("the pack's end was changed", lambda b, a, s: changed(s.packs[0], -5), CheckpointDamaged),
    Odd("the pack's beginning was changed", lambda b, a, s: changed(s.packs[0], 3), CheckpointDamaged),
    Odd("the pack is not there", lambda b, a, s: s.packs[0].unlink(), CheckpointFailed),
    Odd("the pack is not named", lambda b, a, s: replace(a, packs=()), CheckpointFailed),
    Odd("another pack is named", lambda b, a, s: replace(a, packs=(*a.packs, "0" * 40 + ".pack")), InvalidRequest),
    Odd("the manifest is named as a pack", lambda b, a, s: replace(a, packs=("manifest",)), InvalidRequest),
    Odd("a name leads elsewhere", lambda b, a, s: replace(a, manifest="../s/manifest"), InvalidRequest),
    Odd("a folder leads elsewhere", lambda b, a, s: replace(a, staging=".."), InvalidRequest),
    Odd("a folder has no name", lambda b, a, s: replace(a, staging=""), InvalidRequest),
    Odd(
        "the folder is a link",
        lambda b, a, s: a_link_to(b, a),
        InvalidRequest,
    ),
    Odd("the folder is not there", lambda b, a, s: replace(a, staging="none"), CheckpointFailed),
    Odd("another parent is expected", lambda b, a, s: replace(a, parent=7), VersionConflict),
    Odd("it is another lease's", lambda b, a, s: replace(a, lease=LeaseId("l-b")), StaleEpoch),
    Odd("checkpoints is a link", lambda b, a, s: in_place_of(b, "checkpoints"), InvalidRequest),
    Odd("packs is a link", lambda b, a, s: in_place_of(b, "packs"), InvalidRequest),
    Odd("staging is a link", lambda b, a, s: in_place_of(b, "staging"), InvalidRequest),
]


@pytest.mark.parametrize("odd", ODDITIES, ids=lambda odd: odd.name)
def test_what_is_odd_is_refused_and_nothing_is_found_that_was_not_there(odd: Odd, bench: Bench) -> None:
    bench.save("before")
    asked, staged = bench.stage(big(2))
    there = sorted(os.listdir(bench.folder / "checkpoints"))
    asked = odd.spoil(bench, asked, staged) or asked
    with pytest.raises(odd.error):
        publish(bench.place, asked)
    assert sorted(os.listdir(bench.folder / "checkpoints")) == there
    for name in ("checkpoints", "packs", "staging"):
        if (bench.folder / name).is_symlink():
            (bench.folder / name).unlink()
            (bench.folder / f"{name}.was").rename(bench.folder / name)
    assert bench.values() == {1: "before"}
    bench.save("after")
    assert bench.values()[2] == "after"


@pytest.mark.parametrize("at", [3, -5], ids=["beginning", "end"])
def test_what_is_copied_is_looked_at_as_what_is_sealed(at: int, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet.node.storage.publish._seal", lambda fd, take_over: False)
    asked, staged = bench.stage(big(2))
    changed(staged.packs[0], at)
    with pytest.raises(CheckpointDamaged):
        publish(bench.place, asked)
    assert os.listdir(bench.folder / "packs") == []


def test_a_pack_that_has_become_longer_or_shorter_is_none(bench: Bench) -> None:
    """Its writer may change it until it is sealed, which is after its size was looked at first."""
    _, staged = bench.stage(big(1))
    (pack,) = staged.packs
    contents = read_manifest(staged.manifest_path.read_bytes())
    size, entries = contents.packs[pack.name]
    with open(pack, "r+b") as file, open(bench.folder / "copy", "w+b") as copy:
        check_pack(file.fileno(), pack.name, (size, entries))
        with pytest.raises(CheckpointDamaged, match="is not the pack that the manifest names"):
            check_pack(file.fileno(), pack.name, (size + 1, entries))
        with pytest.raises(CheckpointDamaged, match="became shorter"):
            copy_bytes(file.fileno(), copy.fileno(), size + 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_pack_that_another_user_has_put_there_is_none_that_is_needed(bench: Bench) -> None:
    """A volume may be kept while its packs lay in a folder that others could write to."""
    bench.save(big(1))
    asked, _ = bench.stage([big(1), 2])
    for pack in (bench.folder / "packs").iterdir():
        os.chown(pack, 65_534, 65_534)
    with pytest.raises(CheckpointDamaged, match="is not what it was"):
        publish(bench.place, asked)


def test_a_guest_that_asks_to_keep_less_than_nothing_loses_no_checkpoint(bench: Bench) -> None:
    for number in range(3):
        asked, _ = bench.stage(number, name=f"s{number}")
        publish(bench.place, replace(asked, keep=-1))
    assert bench.values() == {1: 0, 2: 1, 3: 2}


def test_a_manifest_under_the_name_of_another_is_none(bench: Bench) -> None:
    bench.save(1)
    folder = bench.folder / "checkpoints"
    (folder / manifest_name(1)).rename(folder / manifest_name(5))
    with pytest.raises(CheckpointDamaged, match="is the manifest of checkpoint 1"):
        collect(bench.place, Collect(lease=A, epoch=E5, keep=1))
    assert os.listdir(bench.folder / "packs"), "what it needs is not known"


def test_no_pack_goes_before_it_is_durable_that_no_manifest_names_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could bring back a manifest whose packs are gone."""
    for number in range(3):
        bench.save(big(number))
    packs = sorted(os.listdir(bench.folder / "packs"))

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, "an error of the disk")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="an error of the disk"):
        collect(bench.place, Collect(lease=A, epoch=E5, keep=1))
    assert sorted(os.listdir(bench.folder / "packs")) == packs


def test_of_very_many_folders_only_the_first_are_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond counts as a file, so the volume is kept."""
    (bench.folder / "a" / "b" / "c").mkdir(parents=True)
    assert not has_files(str(bench.folder / "a"))
    monkeypatch.setattr(volume_folder, "FOLDERS_MAX", 1)
    assert has_files(str(bench.folder / "a"))


def test_the_same_twice_is_one(bench: Bench) -> None:
    asked, _ = bench.stage(big(1))
    publish(bench.place, asked)
    with pytest.raises(VersionConflict):
        publish(bench.place, asked)
    assert bench.values() == {1: big(1)}


def test_of_two_with_one_parent_the_first_wins(bench: Bench) -> None:
    first, _ = bench.stage(big(1), name="one")
    second, _ = bench.stage(big(2), name="two")
    publish(bench.place, first)
    with pytest.raises(VersionConflict, match="the newest is 1"):
        publish(bench.place, second)
    assert bench.values() == {1: big(1)}


def test_an_older_epoch_does_not_save_after_a_newer_one(bench: Bench) -> None:
    newer = Bench(bench.folder, epoch=E6).open()
    newer.save("newer")
    bench.open()
    asked, _ = bench.stage("older")
    with pytest.raises(StaleEpoch, match="has saved since"):
        publish(bench.place, asked)


def test_what_somebody_still_writes_to_is_copied(bench: Bench) -> None:
    asked, staged = bench.stage(big(1))
    with open(staged.packs[0], "r+b") as writer:
        publish(bench.place, asked)
        writer.seek(100)
        writer.write(b"something else")
        writer.flush()
        assert bench.values() == {1: big(1)}
    (pack,) = (bench.folder / "packs").iterdir()
    assert pack.stat().st_nlink == 1


def test_where_there_are_no_leases_of_files_it_is_copied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, what: int, argument: int = 0) -> int:
        assert what == fcntl.F_SETLEASE
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr("sublet.node.storage.publish.fcntl.fcntl", refuse)
    asked, staged = bench.stage(big(1))
    publish(bench.place, asked)
    staged.packs[0].chmod(0o600)
    staged.packs[0].write_bytes(b"gone")
    assert bench.values() == {1: big(1)}


def test_while_it_is_published_nobody_begins_to_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read lease is held until the pack has its name: who opens it for writing meanwhile waits (here: is told)."""
    seen: list[int] = []
    link = os.link

    def watched(*names: Any, **how: Any) -> None:
        try:
            os.close(os.open(staged.packs[0], os.O_WRONLY | os.O_NONBLOCK))
            seen.append(0)
        except OSError as error:
            seen.append(error.errno or 0)
        link(*names, **how)

    asked, staged = bench.stage(big(1))
    monkeypatch.setattr("sublet.node.storage.publish.os.link", watched)
    before = signal.getsignal(signal.SIGIO)
    try:
        answer = loads(VolumeReply, run_and_encode(lambda: publish(bench.place, asked)).encode())
    finally:
        signal.signal(signal.SIGIO, before)  # ignored for good, as in a process that does nothing else
    assert isinstance(answer, Published)
    assert seen[0] in (errno.EWOULDBLOCK, errno.EACCES)


def test_a_pack_that_a_checkpoint_needs_is_not_replaced(bench: Bench) -> None:
    """Whoever stages something else under its name does not reach what is saved."""
    _, first = bench.stage(big(1), name="first")
    name, size = first.packs[0].name, first.packs[0].stat().st_size
    asked = Publish(lease=A, epoch=E5, staging="first", manifest="manifest", packs=(name,), parent=0)
    publish(bench.place, asked)
    asked, again = bench.stage([big(1), big(2)], name="second")
    forged = again.folder / name
    forged.write_bytes((bench.folder / "packs" / name).read_bytes()[:100] + bytes(size - 160) + first_end(bench, name))
    assert forged.stat().st_size == size
    publish(bench.place, replace(asked, packs=(*asked.packs, name)))
    assert bench.values() == {1: big(1), 2: [big(1), big(2)]}


def first_end(bench: Bench, name: str) -> bytes:
    return (bench.folder / "packs" / name).read_bytes()[-60:]


def test_a_full_disk_is_a_refusal_and_the_next_save_is_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.save("before")
    asked, _ = bench.stage(big(1))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sublet.node.storage.publish.os.write", full)
        answer = loads(VolumeReply, run_and_encode(lambda: publish(bench.place, asked)).encode())
    assert isinstance(answer, Refusal)
    assert answer.kind == "CheckpointFailed"
    assert "earlier checkpoints are whole" in answer.do
    assert bench.values() == {1: "before"}
    publish(bench.place, asked)
    assert bench.values()[2] == big(1)


def test_a_counted_volume_is_kept_to_its_size(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "volume", counted=True, size=500_000).open()
    bench.save(big(1))
    asked, _ = bench.stage([big(2)], name="large")
    with pytest.raises(CapacityExceeded, match=r"needs 5\d\d\.\d KiB|needs \d+.* and the volume has"):
        publish(bench.place, asked)
    assert bench.values() == {1: big(1)}


def test_who_holds_the_lock_for_ever_delays_nobody_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_folder, "LOCKED_S", 0.05)
    asked, _ = bench.stage("x")
    fd = os.open(bench.place.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(CheckpointFailed, match="another program is at work"):
        publish(bench.place, asked)
    os.close(fd)
    publish(bench.place, asked)


# ---------------------------------------------------------------------------------------------------- what is removed


def test_a_collection_leaves_the_newest_and_all_they_need(bench: Bench) -> None:
    for n in range(6):
        bench.save({"same": big(0), "now": big(n + 1)})
    done = collect(bench.place, Collect(lease=A, epoch=E5, keep=2))
    assert done.checkpoints == (1, 2, 3, 4)
    assert done.packs
    assert done.freed_bytes > 300_000
    assert bench.values() == {n: {"same": big(0), "now": big(n)} for n in (5, 6)}
    assert collect(bench.place, Collect(lease=A, epoch=E5, keep=2)).packs == 0
    bench.save("and on")
    assert bench.values()[7] == "and on"


def test_a_publication_collects_in_the_same_go_and_is_published_even_if_it_cannot(bench: Bench) -> None:
    for n in range(4):
        asked, _ = bench.stage(big(n), name=f"s{n}")
        publish(bench.place, replace(asked, keep=2))
    assert bench.values() == {3: big(2), 4: big(3)}
    changed(bench.folder / "checkpoints" / manifest_name(3), 40)
    asked, _ = bench.stage(big(9), name="last")
    assert publish(bench.place, replace(asked, keep=3)).number == 5
    assert number_of(max(os.listdir(bench.folder / "checkpoints"))) == 5
    assert len(os.listdir(bench.folder / "packs")) == 3, "nobody knows what the damaged one needs"


def test_a_collection_takes_what_broken_publications_left(bench: Bench) -> None:
    bench.save(big(1))
    (bench.folder / "packs" / ("0" * 40 + ".pack")).write_bytes(b"of no checkpoint")
    (bench.folder / "packs" / f"~{'1' * 40}.pack").write_bytes(b"half a copy")
    (bench.folder / "checkpoints" / "~2").write_bytes(b"half a manifest")
    assert collect(bench.place, Collect(lease=A, epoch=E5, keep=1)).packs == 2
    assert os.listdir(bench.folder / "checkpoints") == [manifest_name(1)]
    assert bench.values() == {1: big(1)}


def test_where_a_manifest_cannot_be_read_nothing_is_removed(bench: Bench) -> None:
    for n in range(3):
        bench.save(big(n))
    changed(bench.folder / "checkpoints" / manifest_name(3), 40)
    packs = sorted(os.listdir(bench.folder / "packs"))
    with pytest.raises(CheckpointDamaged):
        collect(bench.place, Collect(lease=A, epoch=E5, keep=1))
    assert sorted(os.listdir(bench.folder / "packs")) == packs
    assert len(os.listdir(bench.folder / "checkpoints")) == 3


@pytest.mark.parametrize("keep", [0, -1])
def test_a_collection_never_takes_the_last(keep: int, bench: Bench) -> None:
    with pytest.raises(InvalidRequest):
        collect(bench.place, Collect(lease=A, epoch=E5, keep=keep))


def test_what_earlier_epochs_staged_goes_with_the_next_that_opens(bench: Bench) -> None:
    bench.stage("never published")
    (bench.folder / "staging" / "notes").mkdir()
    newer = Bench(bench.folder, epoch=E6).open()
    assert sorted(os.listdir(bench.folder / "staging")) == ["1.6", "notes"]
    newer.save("newer")
    sweep_staging(str(bench.folder))
    assert os.listdir(bench.folder / "staging") == []
    assert newer.values() == {1: "newer"}


def test_only_files_are_worth_keeping(bench: Bench) -> None:
    assert not has_files(str(bench.folder))
    (bench.folder / "a" / "b").mkdir(parents=True)
    (bench.folder / "lock").touch()
    assert not has_files(str(bench.folder))
    (bench.folder / "a" / "b" / "link").symlink_to("nowhere")
    assert has_files(str(bench.folder))


def test_a_volume_in_which_something_lies_in_the_way_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    (folder / "packs").write_text("mine")
    with pytest.raises(InvalidRequest, match="packs in this volume is not the folder"):
        Bench(folder).open()
    assert (folder / "packs").read_text() == "mine"


def test_a_volume_that_was_not_opened_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    bench = Bench(tmp_path / "volume")
    with pytest.raises(InvalidRequest, match="nothing was staged"):
        publish(bench.place, Publish(lease=A, epoch=E5, staging="s", manifest="manifest"))
    with pytest.raises(NotFound):
        FolderStore(tmp_path / "volume", create=False)


@pytest.mark.parametrize(
    "name", ["1.manifest", "000000000000000x.manifest", "0000000000000001.manifest~", "", "²" * 16 + ".manifest"]
)
def test_only_manifests_have_numbers(name: str) -> None:
    assert number_of(name) == 0
    assert number_of(manifest_name(12)) == 12


@pytest.mark.parametrize("is_open", [False, True])
def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all_of_them(
    is_open: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    asked, staged = bench.stage(big(1)[:20_000])
    with open(staged.packs[0] if is_open else os.devnull, "r+b"):
        monkeypatch.setattr("sublet.node.storage.publish.os.write", lambda fd, data: write(fd, bytes(data[:777])))
        publish(bench.place, asked)
    monkeypatch.undo()
    assert bench.values() == {1: big(1)[:20_000]}


# ----------------------------------------------------------------------------------------------------- another user's

SOMEBODY = 1_900_000_017
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play two users")


@as_root
def test_what_another_user_staged_is_taken_over(bench: Bench) -> None:
    place = replace(bench.place, owner=SOMEBODY, group=SOMEBODY)
    asked, staged = bench.stage(big(1))
    for path in (staged.folder, staged.manifest_path, *staged.packs):
        os.chown(path, SOMEBODY, SOMEBODY)
    publish(place, asked)
    for path in (bench.folder / "packs" / staged.packs[0].name, bench.folder / "checkpoints" / manifest_name(1)):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o444)
    assert bench.values() == {1: big(1)}


@as_root
@pytest.mark.parametrize("whose", ["packs", "manifest"])
def test_what_belongs_to_a_third_is_refused(whose: str, bench: Bench) -> None:
    asked, staged = bench.stage(big(1))
    os.chown(staged.packs[0] if whose == "packs" else staged.manifest_path, SOMEBODY, SOMEBODY)
    with pytest.raises(InvalidRequest, match="belongs to another user"):
        publish(bench.place, asked)
    assert bench.values() == {}


@as_root
@pytest.mark.parametrize("name", ["checkpoints", "packs", "staging"])
def test_a_folder_that_somebody_else_made_is_not_used(name: str, bench: Bench) -> None:
    asked, _ = bench.stage(big(1))
    os.chown(bench.folder / name, SOMEBODY, SOMEBODY)
    with pytest.raises(InvalidRequest, match="is not the folder that Sublet makes"):
        publish(bench.place, asked)
    with pytest.raises(InvalidRequest):
        bench.open()


@as_root
def test_who_stages_as_another_user_has_a_folder_of_his_own(bench: Bench) -> None:
    said = VolumeOpened(lease=A, epoch=E6, name="", folder="", staging="", size=1)
    lay_out(replace(bench.place, owner=SOMEBODY, group=SOMEBODY), said)
    lay_out(replace(bench.place, apart=True), said)
    found = {path.name: path.stat().st_uid for path in (bench.folder / "staging").iterdir()}
    assert found == {"1.6": SOMEBODY, "1.6.holder": 0}
    assert {(bench.folder / name).stat().st_uid for name in ("staging", "packs", "checkpoints")} == {0}
