"""Saving into a volume, over a line that answers as the supervisor does; and how much room a save needs."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sublet.errors import (
    CapacityExceeded,
    CheckpointDamaged,
    CheckpointFailed,
    Disconnected,
    StaleEpoch,
    SubletError,
    VersionConflict,
)
from sublet.node.storage.copying_work import copy_in
from sublet.node.storage.publish import publish, run_and_encode
from sublet.node.storage.volume_folder import VolumeAccess, collect, lay_out
from sublet.state.checkpoints.durable import Durable, store_of
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.checkpoints.save_size import needed_bytes
from sublet.state.checkpoints.store import FolderStore, copy_checkpoint, verify
from sublet.state.checkpoints.volume import VolumeStore
from sublet.state.checkpoints.writer import PACKS_MAX, Base, Capture, Saver, Staged
from sublet.values import MIB, Epoch, LeaseId
from sublet.wire.codec import loads
from sublet.wire.refusals import refusal_of
from sublet.wire.volumes import Collect, CopyIn, OpenVolume, Publish, VolumeCall, VolumeOpened, VolumeReply

A = LeaseId("l-a")
E5, E6 = Epoch(1, 5), Epoch(1, 6)


@dataclass
class Desk:
    """A supervisor with one volume: ``VolumeLine`` and what is behind it."""

    folder: Path
    epoch: Epoch = E5
    """What lives."""
    mine: Epoch = E5
    """What the asker believes."""
    size: int = 64 * MIB
    counted: bool = False
    silent: str = ""
    """No answer comes: ``before`` or ``after`` it was done."""
    asked: list[str] = field(default_factory=list)

    def volume_line(self) -> Desk:
        return self

    def pair(self) -> tuple[LeaseId, Epoch]:
        return A, self.mine

    def ask(self, call: VolumeCall) -> VolumeReply:
        self.asked.append(type(call).__name__)
        if call.epoch != self.epoch:
            return refusal_of(StaleEpoch(f"epoch {call.epoch} of lease {A} is not live; {self.epoch} is"))
        if self.silent == "before" and isinstance(call, Publish):
            raise Disconnected("the supervisor hung up")
        answer: VolumeReply = loads(VolumeReply, run_and_encode(lambda: self._done(call)).encode())
        if self.silent == "after" and isinstance(call, Publish):
            raise Disconnected("the supervisor hung up")
        return answer

    def _done(self, call: VolumeCall) -> object:
        place = VolumeAccess(
            folder=str(self.folder),
            lock=f"{self.folder}.lock",
            size=self.size,
            counted=self.counted,
            owner=os.geteuid(),
            group=os.getegid(),
        )
        match call:
            case OpenVolume():
                self.folder.mkdir(exist_ok=True)
                said = VolumeOpened(
                    lease=A,
                    epoch=self.epoch,
                    name="ckpt",
                    folder=str(self.folder),
                    staging=str(self.folder / "staging" / str(self.epoch)),
                    size=self.size,
                    counted=self.counted,
                )
                return lay_out(place, said)
            case Publish():
                return publish(place, call)
            case Collect():
                return collect(place, call)
            case CopyIn():
                return copy_in(place, call.volume, call)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "volume")


def test_a_durable_saves_into_what_has_a_volume(desk: Desk) -> None:
    state = Durable({"n": 0}, desk, keep=2)
    for n in range(5):
        state.value["n"] = n
        state.checkpoint()
    state.close()
    assert Durable.restore(desk).value == {"n": 4}
    store = store_of(desk)
    assert isinstance(store, VolumeStore)
    assert (store.name, store.size) == ("ckpt", 64 * MIB)
    assert store.numbers() == [4, 5]
    assert store.manifest().epoch == E5
    assert os.listdir(desk.folder / "staging" / "1.5") == []
    assert verify(desk.folder).ok
    assert desk.asked.count("Collect") == 0, "it goes with the publication"


def test_who_goes_on_under_a_newer_epoch_saves_under_that(desk: Desk) -> None:
    state = Durable(1, desk)
    state.checkpoint()
    desk.epoch = desk.mine = E6
    state.value = 2
    state.checkpoint()
    assert FolderStore(desk.folder).manifest().epoch == E6


def test_who_believes_in_an_older_epoch_saves_nothing(desk: Desk) -> None:
    state = Durable(1, desk)
    state.checkpoint()
    desk.epoch = E6
    for call in (state.checkpoint, lambda: Durable(3, desk)):
        with pytest.raises(StaleEpoch):
            call()
    assert FolderStore(desk.folder).newest() == 1


def test_of_a_volume_that_is_gone_the_supervisor_says_why_and_nothing_is_called_damaged(desk: Desk) -> None:
    store = store_of(desk)
    assert store.newest() == 0
    shutil.rmtree(desk.folder)
    desk.epoch = E6
    with pytest.raises(StaleEpoch):
        store.newest()
    desk.epoch = E5
    with pytest.raises(CheckpointDamaged):  # the lease lives, so what was in it is lost
        store.newest()


def put_away(desk: Desk, then: Epoch) -> Callable[..., Staged]:
    """A save in the middle of which the volume goes: its lease is over, or (``then``) somebody lent it anew."""
    write = Saver.write

    def goes(self: Saver, capture: Capture, **named: Any) -> Staged:
        shutil.rmtree(desk.folder / "staging")
        desk.epoch = then
        return write(self, capture, **named)

    return goes


@pytest.mark.parametrize(("then", "told"), [(E6, StaleEpoch), (E5, CheckpointFailed)])
def test_whose_volume_goes_while_it_writes_is_told_why(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, then: Epoch, told: type[SubletError]
) -> None:
    """And not that a file was not found, nor to make room."""
    state = Durable(1, desk)
    state.checkpoint()
    state.value = 2
    with monkeypatch.context() as during:
        during.setattr(Saver, "write", put_away(desk, then))
        with pytest.raises(told) as failed:
            state.checkpoint()
    assert "No such file" not in str(failed.value)
    assert "room" not in str(failed.value)
    desk.mine = then
    state.checkpoint()
    assert Durable.restore(desk).value == 2


def test_where_the_whole_volume_is_gone_the_supervisor_says_why(desk: Desk) -> None:
    state = Durable(1, desk)
    shutil.rmtree(desk.folder)
    desk.epoch = E6
    with pytest.raises(StaleEpoch):
        state.checkpoint()


def test_an_answer_that_never_came_is_looked_up(desk: Desk) -> None:
    state = Durable(1, desk)
    desk.silent = "after"
    state.checkpoint()
    assert state.last is not None
    assert state.last.number == 1
    desk.silent = "before"
    state.value = 2
    with pytest.raises(Disconnected):
        state.checkpoint()
    desk.silent = ""
    state.checkpoint()
    assert Durable.restore(desk).value == 2
    assert FolderStore(desk.folder).newest() == 2


def test_of_two_who_save_one_is_told_that_the_other_did(desk: Desk) -> None:
    one, other = Durable(1, desk), Durable(2, desk)
    one.checkpoint()
    with pytest.raises(VersionConflict):
        other.checkpoint()
    assert Durable.restore(desk).value == 1


@pytest.mark.parametrize("counted", [True, False])
def test_what_does_not_fit_is_refused_before_anything_is_written(
    counted: bool, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.size, desk.counted = 300_000, counted
    if not counted:
        real = os.statvfs(desk.folder.parent)
        few = os.statvfs_result((*real[:4], 300_000 // real.f_frsize, *real[5:]))
        monkeypatch.setattr("sublet.state.checkpoints.store.os.statvfs", lambda _: few)
        monkeypatch.setattr("sublet.state.checkpoints.volume.os.statvfs", lambda _: few)
    state = Durable(random.Random(1).randbytes(200_000), desk)
    state.checkpoint()
    asked = len(desk.asked)
    state.value = random.Random(2).randbytes(400_000)
    with pytest.raises(CheckpointFailed, match=r"needs up to 39\d\.\dKiB|needs up to \d+"):
        state.checkpoint()
    assert desk.asked[asked:] == []
    assert os.listdir(desk.folder / "staging" / "1.5") == []
    state.value = bytes(8 * MIB)
    assert state.checkpoint() is not None, "it is all one chunk, and shrinks"


def test_room_is_measured_closely_only_where_it_is_short(tmp_path: Path) -> None:
    """What the base has, and what is there twice, needs no room."""
    np = pytest.importorskip("numpy")
    store = FolderStore(tmp_path / "f")
    saver = Saver()
    once = np.random.default_rng(1).integers(0, 255, 1 << 20, dtype="u1")
    capture = saver.capture(encode_roots({"x": [once, once.copy()]}), Base())
    most = needed_bytes(capture, Base(), 1 << 40)
    assert most > 2 << 20
    closely = needed_bytes(capture, Base(), 0)
    assert 1 << 20 < closely < (1 << 20) + 40_000
    staging = store.stage()
    staged = saver.write(capture, staging=staging, base=store.base(), author=store.author, wall_ns=0)
    assert staged.report.written_bytes <= closely
    store.publish(staged)
    once[5] += 1
    again = saver.capture(encode_roots({"x": [once, once.copy()]}), store.base())
    assert needed_bytes(again, store.base(), 0) < 400_000


def test_another_number_to_keep_is_seen_to_at_once(desk: Desk) -> None:
    store = store_of(desk)
    for n in range(4):
        state = Durable(n, store, keep=4)
        state.checkpoint()
    store.collect(2)
    assert desk.asked.count("Collect") == 1
    assert isinstance(store, VolumeStore)
    assert store.numbers() == [3, 4]


def test_what_is_nobodys_is_named_by_the_verifier_and_waited_for_by_nobody(desk: Desk) -> None:
    state = Durable(random.Random(1).randbytes(9000), desk)
    state.checkpoint()
    state.value = random.Random(2).randbytes(9000)
    state.checkpoint()
    (desk.folder / "checkpoints" / "notes.txt").write_text("mine")
    (desk.folder / "packs" / "~half").write_text("what a crash left")
    os.mkfifo(desk.folder / "checkpoints" / "0000000000000007.manifest")
    first = min(desk.folder.glob("packs/[0-9a-f]*.pack"))
    first.unlink()
    os.mkfifo(first)
    verdict = verify(desk.folder)
    assert not verdict.ok
    text = "\n".join(verdict.problems)
    assert "checkpoints/notes.txt is nothing that belongs there" in text
    assert "0000000000000007.manifest is no plain file" in text
    assert f"packs/{first.name} is no plain file" in text
    assert "~half" not in text


def test_a_lease_without_blocks_says_so(desk: Desk) -> None:
    class Refusing(Desk):
        def ask(self, call: VolumeCall) -> VolumeReply:
            raise SubletError("lease l-a has no blocks to save in")

    with pytest.raises(SubletError, match="no blocks"):
        Durable(1, Refusing(desk.folder))


def test_where_room_is_short_older_packs_stay_as_they_are(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a save that fits would fail for the sake of tidiness."""
    store = store_of(desk)
    numbers = random.Random(3)
    state = Durable([numbers.randbytes(40_000) for _ in range(24)], store, keep=1)
    state.checkpoint()
    for n in range(20):
        monkeypatch.setattr(VolumeStore, "room", property(lambda _: 75_000))
        state.value[n] = numbers.randbytes(40_000)
        state.checkpoint()
    assert isinstance(store, VolumeStore)
    assert len(store.manifest().packs) > PACKS_MAX + 1, "what is live of each lies where it lay"
    monkeypatch.undo()
    state.value[23] = numbers.randbytes(40_000)
    state.checkpoint()
    assert len(store.manifest().packs) <= PACKS_MAX // 2 + 1
    assert Durable.restore(desk).value == state.value
    assert verify(desk.folder).ok


def test_what_was_refused_for_want_of_room_is_still_to_be_saved(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Durable([b""], desk)
    state.mutate(lambda it: it.append(random.Random(1).randbytes(9_000)))
    with monkeypatch.context() as patch:
        patch.setattr(VolumeStore, "room", property(lambda _: 100))
        with pytest.raises(CheckpointFailed):
            state.checkpoint()
    state.close()
    assert len(Durable.restore(desk).value) == 2


def test_a_copy_of_another_volume_is_published_as_ones_own(desk: Desk, tmp_path: Path) -> None:
    other = Desk(tmp_path / "other", epoch=E6, mine=E6)
    Durable({"n": 1}, other).checkpoint()
    store = VolumeStore(desk)
    assert copy_checkpoint(store, str(other.folder)).number == 1
    assert store.manifest().epoch == E5
    assert Durable.restore(desk).value == {"n": 1}
    state = Durable.restore(desk)
    state.value["n"] = 2
    state.checkpoint()
    assert Durable.restore(other).value == {"n": 1}
    assert store.inspect(str(other.folder)).number == 1
    assert not list((desk.folder / "staging" / str(E5)).iterdir())


def test_damage_is_not_copied(desk: Desk, tmp_path: Path) -> None:
    other = Desk(tmp_path / "other")
    Durable(os.urandom(300_000), other).checkpoint()
    (pack,) = (other.folder / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    store = VolumeStore(desk)
    with pytest.raises(CheckpointDamaged):
        copy_checkpoint(store, str(other.folder))
    assert store.newest() == 0
    assert not list((desk.folder / "staging" / str(E5)).iterdir())


def test_what_has_no_room_is_refused_with_what_it_needs(desk: Desk, tmp_path: Path) -> None:
    other = Desk(tmp_path / "other")
    Durable(os.urandom(300_000), other).checkpoint()
    desk.size, desk.counted = 100_000, True
    with pytest.raises(CapacityExceeded, match="the copy needs"):
        copy_checkpoint(VolumeStore(desk), str(other.folder))
    assert not list((desk.folder / "staging" / str(E5)).iterdir())
