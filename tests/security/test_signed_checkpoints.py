"""A save that somebody without the tenant's key wrote, moved or changed is refused before a byte of it is loaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore

import sublet
from sublet.errors import CheckpointFailed, InvalidRequest, Unauthorized
from sublet.office.api.signing import Signer
from sublet.replicated import FolderReplica, ReplicatedCheckpoint, S3Replica, Save, SigningKey
from sublet.state.replicated.checkpoint_record import SaveHistory
from sublet.state.replicated.replica import Replica
from sublet.training import training_records
from sublet.values import Epoch, TenantId
from sublet.wire.http import CheckpointKey
from tests.security.conftest import Place
from tests.unit.training.stage import HeldLease

RAN: list[str] = []
BIG = bytes(range(256)) * 64


class Trap:
    """What runs when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return RAN.append, ("code of another",)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Callable[..., ReplicatedCheckpoint]]:
    """Programs that open the same three folders, such as a bucket that others may write to."""
    RAN.clear()
    opened: list[ReplicatedCheckpoint] = []

    def program(epoch: int = 1, **how: object) -> ReplicatedCheckpoint:
        replicas = [FolderReplica(tmp_path / str(number)) for number in range(3)]
        made = ReplicatedCheckpoint("runs", schema="s.v1", replicas=replicas, epoch=Epoch(1, epoch), **how)  # type: ignore[arg-type]
        opened.append(made)
        return made

    yield program
    for one in opened:
        one.close()


def test_what_another_saved_is_not_loaded_and_what_the_key_signed_is(at: Callable[..., ReplicatedCheckpoint]) -> None:
    key = SigningKey.new()
    with at(key=key) as mine:
        mine.save("job", {"step": 1})
        mine.save_bytes("big", BIG)
    with at(2) as theirs:  # they need no key to write
        theirs.save("job", Trap())
    with at(3, key=SigningKey.new()) as theirs:
        theirs.save("forged", Trap())
    with at(4, key=key) as mine:
        with pytest.raises(CheckpointFailed, match="has no signature"):
            mine.load("job")
        with pytest.raises(CheckpointFailed, match="does not fit your key"):
            mine.load("forged")
        older = mine.load("job", version=1)
        assert older is not None
        assert older.value() == {"step": 1}
        found = mine.load("big")
        assert found is not None
        assert found.data == BIG
    assert RAN == []


def test_a_save_of_before_the_key_is_loaded_only_where_that_is_said(at: Callable[..., ReplicatedCheckpoint]) -> None:
    with at() as before:
        before.save("job", [1, 2])
    key = SigningKey.new()
    with at(2, key=key) as mine, pytest.raises(CheckpointFailed, match="has no signature") as error:
        mine.load("job")
    assert "unsigned=True" in error.value.do
    with at(3, key=key, unsigned=True) as mine:
        found = mine.load("job")
        assert found is not None
        mine.save("job", found.value(), expected=1)
    with at(4, key=key) as mine:
        found = mine.load("job")
        assert found is not None
        assert found.value() == [1, 2]


def test_a_new_key_loads_what_the_old_one_signed_where_that_is_given(at: Callable[..., ReplicatedCheckpoint]) -> None:
    old, new = SigningKey.new(), SigningKey.new()
    with at(key=old) as mine:
        mine.save_bytes("job", b"x")
    with at(2, key=new) as mine, pytest.raises(CheckpointFailed, match="older_keys"):
        mine.load("job")
    with at(3, key=new, older_keys=[old]) as mine:
        assert mine.load("job") is not None
        mine.save_bytes("job", b"y")
    with at(4, key=new) as mine:
        assert mine.load("job") is not None
    with at(5) as without:
        assert without.load("job") is not None, "who has no key checks none"


def a_bucket(folder: Path) -> Callable[[], Replica]:
    store = MemoryStore()
    return lambda: S3Replica(store, "runs")


def a_folder_open_to_all(folder: Path) -> Callable[[], Replica]:
    folder.mkdir()
    folder.chmod(0o777)
    return lambda: FolderReplica(folder)


def a_folder_of_another(folder: Path) -> Callable[[], Replica]:
    folder.mkdir()
    os.chown(folder, 65_534, 65_534)
    return lambda: FolderReplica(folder)


@pytest.mark.parametrize(
    "foreign",
    [
        a_bucket,
        a_folder_open_to_all,
        pytest.param(a_folder_of_another, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give it")),
    ],
)
def test_where_others_may_write_nothing_is_opened_without_a_key(
    tmp_path: Path, foreign: Callable[[Path], Callable[[], Replica]]
) -> None:
    """In silence nothing of it would be checked."""
    made = foreign(tmp_path / "a")

    def replicas() -> list[Replica]:
        return [made(), *(FolderReplica(tmp_path / name) for name in "bc")]

    def program(epoch: int, **how: object) -> ReplicatedCheckpoint:
        return ReplicatedCheckpoint("runs", schema="s.v1", replicas=replicas(), epoch=Epoch(1, epoch), **how)  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match=r"others may write to the (object store|folder)") as error:
        program(1)
    assert "fabric=fabric" in error.value.do
    with pytest.raises(InvalidRequest, match="others may write to"):
        training_records("runs", replicas(), HeldLease(1))
    with program(1, key=SigningKey.new()) as mine:
        mine.save_bytes("job", BIG)
    with program(2, unsigned=True) as trusting:
        found = trusting.load("job")
        assert found is not None
        assert found.data == BIG


def test_a_folder_that_was_opened_to_all_later_is_not_read_without_a_key(
    tmp_path: Path, at: Callable[..., ReplicatedCheckpoint]
) -> None:
    with at() as mine:
        mine.save("job", Trap())
        (tmp_path / "1").chmod(0o777)
        with pytest.raises(InvalidRequest, match="others may write to"):
            mine.load("job")
    assert RAN == []


def test_an_effect_that_another_wrote_is_not_believed(at: Callable[..., ReplicatedCheckpoint]) -> None:
    """Else a step would count as done that never was."""
    key = SigningKey.new()
    with at() as theirs:
        theirs.save_bytes("job", b"x", effect=("step-1", "f", 1))
    with at(2, key=key) as mine:
        with pytest.raises(CheckpointFailed, match="no signature"):
            mine.find("job", "step-1")
        with pytest.raises(CheckpointFailed, match="no signature"):
            mine.save_bytes("job", b"y", effect=("step-1", "f", 1))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"size": 9},
        {"hash": "0" * 64},
        {"schema": "other"},
        {"policy": "00"},
        {"epoch": Epoch(9, 9)},
        {"wall_ns": 9},
        {"packs": ("p",)},
        {"signature": ""},
        {"signature": "0" * 16 + ":" + "0" * 64},
    ],
    ids=str,
)
def test_every_field_of_a_save_is_signed_and_its_name(change: dict[str, object]) -> None:
    key = SigningKey.new()
    save = Save(version=1, size=1, hash="a" * 64, schema="s", policy="p", epoch=Epoch(1, 1), wall_ns=1, inline=b"x")
    save = replace(save, signature=key.sign(save.signed_part("c/runs/job")))
    assert SaveHistory.unpack(SaveHistory((save,)).pack()).latest == save
    assert key.fits(save.signature, save.signed_part("c/runs/job"))
    assert not key.fits(save.signature, save.signed_part("c/runs/other"))
    changed = replace(save, **change)  # type: ignore[arg-type]
    assert not key.fits(changed.signature, changed.signed_part("c/runs/job"))


def test_a_key_lies_in_a_file_for_its_owner_alone_and_is_carried_as_text(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "checkpoint.key"
    key = SigningKey.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.open(path).id == key.id == SigningKey.parse(key.text()).id
    assert key.text() not in repr(key)
    assert os.listdir(path.parent) == ["checkpoint.key"], "nothing is left beside it"
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match="not yours alone"):
        SigningKey.open(path)
    for text in ("", "x", key.text()[:-1], key.text().upper()):
        with pytest.raises(InvalidRequest, match="no key for checkpoints"):
            SigningKey.parse(text)


# ---- the key that the office keeps for a tenant


def key_of(fabric: sublet.Fabric) -> SigningKey:
    return SigningKey.parse(fabric.request("GET", "/v1/checkpoint-key", shape=CheckpointKey).key)


def test_each_tenant_has_a_key_of_its_own_and_is_given_no_other(place: Place, tmp_path: Path) -> None:
    """An operator has its own as well. The office's secret lies where only its owner reads it, and is not changed."""
    keys = [key_of(fabric).id for fabric in (place.ana, place.ben, place.owner)]
    assert len(set(keys)) == 3
    assert key_of(place.ben).id == keys[1]
    file = place.home / "keys" / "checkpoint.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = Signer.open(place.home / "keys", "another")
    assert SigningKey.parse(again.checkpoint_key(TenantId("ben"))).id == keys[1]
    with pytest.raises(Unauthorized), place.connect("sublet_" + "x" * 43) as nobody:
        key_of(nobody)
    damaged = tmp_path / "checkpoint.key"
    damaged.write_text("secret/00\n")
    damaged.chmod(0o600)
    with pytest.raises(InvalidRequest, match="is damaged"):
        Signer.open(tmp_path, "office")
    assert damaged.read_text() == "secret/00\n"


def test_the_state_of_a_job_that_another_tenant_wrote_is_refused(place: Place, tmp_path: Path) -> None:
    """As in a bucket to which both may write."""
    folders = [tmp_path / str(number) for number in range(3)]
    with place.ben.cpu() as lease:
        with training_records("runs", folders, lease) as (before, _):
            before.save("old", Trap())
        with training_records("runs", folders, lease, fabric=place.ben) as (mine, _):
            mine.save("job", [1, 2])
            with pytest.raises(CheckpointFailed, match="has no signature"):
                mine.load("old")
        with training_records("runs", folders, lease, fabric=place.ben, unsigned=True) as (mine, _):
            assert mine.load("old") is not None
    with place.ana.cpu() as lease, training_records("runs", folders, lease, fabric=place.ana) as (theirs, _):
        with pytest.raises(CheckpointFailed, match="does not fit your key"):
            theirs.load("job")
        theirs.save("forged", Trap())
    with place.ben.cpu() as lease, training_records("runs", folders, lease, fabric=place.ben) as (mine, _):
        with pytest.raises(CheckpointFailed, match="does not fit your key"):
            mine.load("forged")
        found = mine.load("job")
        assert found is not None
        assert found.value() == [1, 2]
    assert RAN == []
