"""Checkpoints on replicas: versions, fences, effects, history, packs, damage."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sublet.state.replicated.group
from sublet.errors import (
    CheckpointFailed,
    IdempotencyConflict,
    InvalidRequest,
    OutOfMemory,
    StaleEpoch,
    VersionConflict,
)
from sublet.replicated import (
    FailureDomain,
    MemoryReplica,
    Placement,
    ReplicaGroup,
    ReplicaHealth,
    ReplicaPolicy,
    ReplicaRole,
    ReplicatedCheckpoint,
)
from sublet.state.replicated.checkpoint import PACK_BYTES
from sublet.state.replicated.checkpoint_record import Effect
from sublet.state.replicated.register import CasOperation, OperationUnknown, OutcomeReason
from sublet.values import Epoch
from tests.unit.training.stage import PATIENCE_S, wait_for_replicas

E1, E2, E3 = Epoch(1, 1), Epoch(1, 2), Epoch(1, 3)
BIG = bytes(range(256)) * 64


class Stage:
    """Three replicas in memory, and programs that open them."""

    def __init__(self, count: int = 3, policy: ReplicaPolicy | None = None) -> None:
        self.replicas = [MemoryReplica() for _ in range(count)]
        self.policy = policy
        self._groups: list[ReplicaGroup] = []

    def group(self, *, office: str = "a") -> ReplicaGroup:
        """As another program would have it."""
        group = ReplicaGroup(self.replicas, self.policy, office=office, patience=PATIENCE_S)
        self._groups.append(group)
        return group

    def program(
        self,
        epoch: Epoch | None = E1,
        *,
        schema: str = "s.v1",
        retain: int = 3,
        office: str = "a",
    ) -> ReplicatedCheckpoint:
        """One more writer or reader."""
        group = self.group(office=office)
        return ReplicatedCheckpoint("tests", schema=schema, replicas=group, epoch=epoch, retain=retain)

    def close(self) -> None:
        """End all threads."""
        for group in self._groups:
            group.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@contextmanager
def staged(count: int, policy: ReplicaPolicy) -> Iterator[Stage]:
    stage = Stage(count, policy)
    try:
        yield stage
    finally:
        stage.close()


def test_what_is_saved_is_loaded(stage: Stage) -> None:
    """By the same program and by another, small and large, again and again."""
    writer, reader = stage.program(), stage.program(None)
    assert reader.load("job") is None
    assert writer.open("job") is None
    for version, data in enumerate((b"", b"small", BIG, BIG + b"!", b"small again"), start=1):
        save = writer.save_bytes("job", data, expected=version - 1)
        assert (save.version, save.size, save.epoch) == (version, len(data), E1)
        found = reader.load("job")
        assert found is not None
        assert (found.version, found.data) == (version, data)
    assert reader.load("another job") is None


def test_the_history_is_kept_as_far_as_was_asked(stage: Stage) -> None:
    """And the packs of what was let go are removed."""
    writer = stage.program(retain=2)
    for n in range(5):
        writer.save_bytes("job", bytes([n]) * 10_000)
    assert [save.version for save in writer.versions("job")] == [5, 4]
    old = writer.load("job", version=4)
    assert old is not None
    assert old.data == b"\3" * 10_000
    assert writer.load("job", version=3) is None
    key = "c/tests/job"
    stage.group().close()
    # Who was late when something was let go keeps it until the next epoch opens.
    assert min(len(replica.packs(key)) for replica in stage.replicas) <= 3


def test_what_did_not_change_is_not_sent_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs that the last save has are named again."""
    monkeypatch.setattr("sublet.state.replicated.checkpoint.PACK_BYTES", 5_000)
    writer = stage.program()
    first = writer.save_bytes("job", b"a" * 5_000 + b"b" * 5_000 + b"c" * 10)
    second = writer.save_bytes("job", b"a" * 5_000 + b"B" * 5_000 + b"c" * 10)
    assert [one == two for one, two in zip(first.packs, second.packs, strict=True)] == [True, False, True]
    found = writer.load("job")
    assert found is not None
    assert found.data == b"a" * 5_000 + b"B" * 5_000 + b"c" * 10


def test_the_expected_version_decides(stage: Stage) -> None:
    """One that is past, one that nobody wrote yet; nothing is written in either case."""
    writer = stage.program()
    writer.save_bytes("job", b"1", expected=0)
    writer.save_bytes("job", b"2", expected=1)
    with pytest.raises(VersionConflict, match="has version 2, not 1") as past:
        writer.save_bytes("job", b"x", expected=1)
    assert past.value.reason == "not_saved"
    with pytest.raises(VersionConflict, match="is not written yet"):
        writer.save_bytes("job", b"x", expected=7)
    with pytest.raises(VersionConflict):
        writer.save_bytes("new job", b"x", expected=1)
    found = writer.load("job")
    assert found is not None
    assert found.data == b"2"


def test_a_newer_epoch_fences_the_older_before_it_writes_anything(stage: Stage) -> None:
    """Opening is enough; a matching version does not help."""
    old, new = stage.program(E1), stage.program(E2)
    old.save_bytes("job", b"1")
    assert new.open("job") is not None
    with pytest.raises(StaleEpoch, match=r"epoch 1\.2"):
        old.save_bytes("job", b"late", expected=1)
    with pytest.raises(StaleEpoch):
        old.open("job")
    assert new.save_bytes("job", b"2", expected=1).version == 2
    with pytest.raises(StaleEpoch, match="is older"):
        new.save_bytes("job", b"3", epoch=E1)
    found = old.load("job")
    assert found is not None
    assert found.data == b"2"


def test_two_writers_of_one_lease_lose_nothing_to_each_other(stage: Stage) -> None:
    """They take turns at the register, and versions say who was first."""
    one, two = stage.program(E1), stage.program(E1)
    one.save_bytes("job", b"1", expected=0)
    two.save_bytes("job", b"2", expected=1)
    with pytest.raises(VersionConflict):
        one.save_bytes("job", b"x", expected=1)
    assert one.save_bytes("job", b"3", expected=2).version == 3
    assert two.save_bytes("job", b"4").version == 4
    assert [save.version for save in one.versions("job")] == [4, 3, 2]


def test_a_restored_office_has_higher_epochs(stage: Stage) -> None:
    """A new incarnation goes above every number of the lost one."""
    stage.program(Epoch(1, 900)).save_bytes("job", b"1")
    assert stage.program(Epoch(2, 1)).save_bytes("job", b"2", expected=1).version == 2
    with pytest.raises(StaleEpoch):
        stage.program(Epoch(1, 901)).open("job")


def test_another_office_must_adopt(stage: Stage) -> None:
    """And then the first is the stranger."""
    ours = stage.program(E3)
    ours.save_bytes("job", b"ours")
    theirs = stage.program(E1, office="b")
    with pytest.raises(InvalidRequest, match="belongs to the office 'a'"):
        theirs.open("job")
    adopted = theirs.open("job", adopt=True)
    assert adopted is not None
    assert adopted.version == 1
    assert theirs.save_bytes("job", b"theirs", expected=1).version == 2
    with pytest.raises(InvalidRequest, match="belongs to the office 'b'"):
        ours.save_bytes("job", b"late")


def test_an_effect_is_saved_once(stage: Stage) -> None:
    """The same step again returns what is there; other content under its key, or an older step, is refused."""
    writer = stage.program()
    first = writer.save_bytes("job", b"1", expected=0, effect=("job/1", "f1", 1))
    assert first.effect == Effect("job/1", "f1", 1)
    assert stage.program(E2).save_bytes("job", b"other bytes", expected=0, effect=("job/1", "f1", 1)) == first
    writer = stage.program(E3)
    writer.save_bytes("job", b"2", expected=1, effect=("job/2", "f2", 2))
    with pytest.raises(IdempotencyConflict):
        writer.save_bytes("job", b"x", effect=("job/2", "other", 2))
    with pytest.raises(VersionConflict, match="step 2 is saved already"):
        writer.save_bytes("job", b"x", effect=("job/0", "f0", 0))
    assert writer.find("job", "job/1") == first
    assert writer.find("job", "job/7") is None
    assert [save.version for save in writer.versions("job")] == [2, 1]


def test_an_effect_that_another_writer_saved_is_found_behind_a_version_that_does_not_fit(stage: Stage) -> None:
    """What is remembered is never the last word."""
    one, two = stage.program(E1), stage.program(E1)
    one.open("job")
    two.save_bytes("job", b"1", expected=0, effect=("job/1", "f", 1))
    assert one.save_bytes("job", b"1", expected=0, effect=("job/1", "f", 1)).version == 1


def test_another_schema_or_policy_is_refused(stage: Stage) -> None:
    """Before anything is written, and when loading."""
    stage.program().save_bytes("job", b"1")
    for other in (stage.program(E2, schema="s.v2"),):
        with pytest.raises(InvalidRequest, match=r"has the schema 's\.v1'"):
            other.load("job")
        with pytest.raises(InvalidRequest, match="has the schema"):
            other.save_bytes("job", b"2")
    group = stage.group()
    odd = ReplicatedCheckpoint("tests", schema="s.v1", replicas=group, epoch=E3, policy_hash=b"\x34" * 32)
    with pytest.raises(InvalidRequest, match="another policy"):
        odd.load("job")


@pytest.mark.parametrize("fault", ["silent", "faulty", "full"])
def test_one_replica_of_three_may_fail_in_any_way(stage: Stage, fault: str) -> None:
    """Nothing is lost, and it has everything again after the next save."""
    writer = stage.program()
    writer.save_bytes("job", BIG)
    setattr(stage.replicas[0], fault, True)
    writer.save_bytes("job", BIG + b"2", expected=1)
    found = stage.program(None).load("job")
    assert found is not None
    assert found.data == BIG + b"2"
    setattr(stage.replicas[0], fault, False)
    writer.save_bytes("job", b"3", expected=2)
    stage.replicas[1].silent = True
    found = stage.program(None).load("job")
    assert found is not None
    assert found.data == b"3"


def test_two_of_three_gone_is_an_error_and_never_a_guess(stage: Stage) -> None:
    """Nothing was sent, or it is not known."""
    writer = stage.program()
    writer.save_bytes("job", b"1")
    stage.replicas[0].silent = stage.replicas[1].silent = True
    writer.group.patience_s = 0.4
    with pytest.raises(CheckpointFailed, match="may or may not") as doubt:
        writer.save_bytes("job", b"2", expected=1)
    assert doubt.value.reason == "unknown"
    with pytest.raises(CheckpointFailed, match="nothing was written") as sure:
        writer.save_bytes("job", b"2", expected=1)
    assert sure.value.reason == "not_saved"
    with pytest.raises(CheckpointFailed):
        writer.load("job")
    stage.replicas[0].silent = stage.replicas[1].silent = False
    writer.group.patience_s = PATIENCE_S
    assert writer.save_bytes("job", b"3").version in (2, 3)
    found = stage.program(None).load("job")
    assert found is not None
    assert found.data == b"3"


@pytest.mark.parametrize("breaks", [KeyError("a mistake"), None])
def test_a_pack_that_some_replica_never_takes_is_not_waited_for_for_ever(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, breaks: Exception | None
) -> None:
    """It hangs, or raises what it should not: with a quorum that is nothing, without it is an error."""
    done = threading.Event()

    def put_pack(*_: object) -> None:
        if breaks is not None:
            raise breaks
        done.wait(PATIENCE_S)

    writer = stage.program()
    with monkeypatch.context() as odd:
        odd.setattr(sublet.state.replicated.group, "PACK_RATE", 1 << 40)
        odd.setattr(stage.replicas[0], "put_pack", put_pack)
        writer.save_bytes("job", bytes(10_000))
        odd.setattr(stage.replicas[1], "put_pack", put_pack)
        if breaks is None:  # the patience has to run out, and on a busy machine it does so before the third one has it
            writer.group.patience_s = 0.4
        with pytest.raises(CheckpointFailed, match=f"only {'[01]' if breaks is None else 1} of 3 replicas"):
            writer.save_bytes("job", bytes(20_000))
    done.set()
    found = stage.program().load("job")
    assert found is not None
    assert found.data == bytes(10_000)


def test_a_state_for_which_there_is_no_memory_is_told_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    writer = stage.program()
    writer.save("job", [1])
    saved = writer.load("job")
    assert saved is not None
    with monkeypatch.context() as full:
        full.setattr("sublet.state.replicated.checkpoint.load_value", none_left)
        with pytest.raises(OutOfMemory):
            saved.value()
        full.setattr("sublet.state.replicated.checkpoint.dump_value", none_left)
        with pytest.raises(CheckpointFailed, match="memory"):
            writer.save("job", [2])
        full.setattr(writer, "_staged", none_left)
        with pytest.raises(CheckpointFailed, match="memory"):
            writer.save_bytes("job", b"2")
        full.setattr(writer, "_bytes", none_left)
        with pytest.raises(OutOfMemory):
            writer.load("job")
    assert saved.value() == [1]


def test_a_write_whose_answers_were_lost_is_found_in_the_record(stage: Stage) -> None:
    """Replicas that do as asked and do not say so."""
    writer = stage.program()
    writer.save_bytes("job", b"1")
    stage.replicas[0].deaf = stage.replicas[1].deaf = True
    writer.group.patience_s = 1.0
    with pytest.raises(CheckpointFailed, match="may or may not"):
        writer.save_bytes("job", b"2", expected=1)
    wait_for_replicas(writer.group)
    stage.replicas[0].deaf = stage.replicas[1].deaf = False
    later = stage.program(E2)
    assert later.open("job") is not None
    found = later.load("job")
    assert found is not None
    assert (found.version, found.data) == (2, b"2")


def test_a_damaged_pack_is_taken_from_another_replica_and_mended(stage: Stage) -> None:
    """Wherever it lies."""
    writer = stage.program()
    save = writer.save_bytes("job", BIG)
    assert stage.program(None).load("job") is not None
    end = time.monotonic() + PATIENCE_S
    while not stage.replicas[0].verify():  # a quorum has it, and this replica may be the one that is late
        assert time.monotonic() < end
        stage.replicas[0].lose_pack(save.packs[0])
        time.sleep(0.001)
    found = stage.program(None).load("job")
    assert found is not None
    assert found.data == BIG
    assert stage.replicas[0].verify() == []
    wait_for_replicas(writer.group)  # or the late one of them gets it again
    for replica in stage.replicas:
        replica.lose_pack(save.packs[0])
    with pytest.raises(CheckpointFailed, match="damaged or incomplete"):
        stage.program(None).load("job")


def test_packs_that_were_staged_in_vain_are_collected_by_the_next_epoch(stage: Stage) -> None:
    """Not by another writer of the same lease, who cannot know."""
    writer = stage.program(E1)
    writer.save_bytes("job", BIG)
    key = "c/tests/job"
    writer.group.put_pack(key, f"1.1.1.{'0' * 16}.{'f' * 32}", b"staged, and then its writer died")
    stage.program(E1).open("job")
    assert any(len(replica.packs(key)) == 2 for replica in stage.replicas)
    stage.program(E2).open("job")
    later = stage.program(E3)
    later.open("job")
    later.open("job")
    assert all(len(replica.packs(key)) <= 2 for replica in stage.replicas)
    found = later.load("job")
    assert found is not None
    assert found.data == BIG


def test_a_lost_replica_is_replaced_and_the_new_one_has_everything(stage: Stage) -> None:
    """Afterwards the other two may fail one after the other."""
    writer = stage.program(E1)
    writer.save_bytes("job", BIG)
    writer.save_bytes("small", b"s")
    stage.replicas[2].faulty = True
    new = MemoryReplica()
    settled = writer.group.replace(stage.replicas[2], new, epoch=E1)
    assert settled.generation == 3
    assert new.identity in settled.now.members
    stage.replicas[2] = new
    stage.replicas[0].silent = True
    reader = stage.program(None)
    for name, data in (("job", BIG), ("small", b"s")):
        found = reader.load(name)
        assert found is not None
        assert found.data == data
    assert writer.save_bytes("job", b"after", expected=1).version == 2
    roles = {view.identity: (view.role, str(view.health)) for view in writer.group.health()}
    assert roles[new.identity] == ("voter", "healthy")
    assert roles[stage.replicas[0].identity] == ("voter", "silent")


def test_a_replica_that_forgot_everything_is_a_stranger(stage: Stage) -> None:
    """It does not vote; a spare takes its seat."""
    writer = stage.program(E1)
    writer.save_bytes("job", b"1")
    stage.replicas[0].forget()
    group = stage.group()
    by_role = [view.role for view in group.health()]
    assert by_role == ["voter", "voter", "voter", "spare"]
    assert group.replace_lost(epoch=E2)
    assert [view.role for view in group.health()] == ["voter"] * 3
    stage.replicas[1].silent = True
    found = ReplicatedCheckpoint("tests", schema="s.v1", replicas=group).load("job")
    assert found is not None
    assert found.data == b"1"


def test_a_set_grows_and_shrinks_by_one(stage: Stage) -> None:
    """Never below what the policy asks for."""
    writer = stage.program(E1)
    writer.save_bytes("job", b"1")
    extra = MemoryReplica()
    assert len(writer.group.add(extra, epoch=E1).now.members) == 4
    assert writer.save_bytes("job", b"2").version == 2
    assert len(writer.group.remove(stage.replicas[0], epoch=E1).now.members) == 3
    stage.replicas[0].silent = True
    found = writer.load("job")
    assert found is not None
    assert found.data == b"2"
    with staged(2, ReplicaPolicy(min_replicas=2)) as small, pytest.raises(InvalidRequest, match="leave 1 replicas"):
        small.group().remove(small.replicas[0], epoch=E1)


def test_quorums_that_could_miss_each_other_are_refused() -> None:
    """With a sentence that says which."""
    three = [MemoryReplica() for _ in range(3)]
    for policy, words in (
        (ReplicaPolicy(read_quorum=1, write_quorum=2), "could miss each other"),
        (ReplicaPolicy(read_quorum=4), "do not fit"),
        (ReplicaPolicy(write_quorum=4), "do not fit"),
        (ReplicaPolicy(min_replicas=4), "at least 4"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            ReplicaGroup(three, policy)
    with pytest.raises(InvalidRequest, match="at least one replica"):
        ReplicaGroup([])
    with pytest.raises(InvalidRequest, match="keeps nothing"):
        ReplicaPolicy(min_replicas=0)


@pytest.mark.parametrize(
    ("least", "read", "write", "words"),
    [
        (3, 1, 2, "reading from 1 and writing to 2 of 3 replicas could miss each other"),
        (3, 1, None, "reading from 1 and writing to 2 of 3"),
        (5, None, 2, "reading from 3 and writing to 2 of 5"),
        (1, 3, 1, "two writers could each have 1 of 3"),
        (1, 0, None, "quorums of 0 .read. and 1 .write. do not fit 1"),
        (1, None, -1, "quorums of 1 .read. and -1 .write. do not fit 1"),
    ],
)
def test_a_policy_that_fits_no_set_is_refused_at_once(
    least: int, read: int | None, write: int | None, words: str
) -> None:
    """R + W > N and 2W > N, for the smallest N that the policy allows."""
    with pytest.raises(InvalidRequest, match=words) as refused:
        ReplicaPolicy(min_replicas=least, read_quorum=read, write_quorum=write)
    assert refused.value.do.startswith("Choose")


def test_a_policy_is_refused_only_if_no_set_could_have_it() -> None:
    """Against all small sets, one by one."""
    for least, read, write in itertools.product(range(1, 5), (None, 0, 1, 2, 3, 4, 5), (None, 0, 1, 2, 3, 4, 5)):
        fits = [
            count
            for count in range(least, 12)
            for r, w in [(read if read is not None else count // 2 + 1, write if write is not None else count // 2 + 1)]
            if 1 <= r <= count and 1 <= w <= count and r + w > count and 2 * w > count
        ]
        try:
            policy = ReplicaPolicy(min_replicas=least, read_quorum=read, write_quorum=write)
        except InvalidRequest:
            assert not fits, (least, read, write)
        else:
            assert fits, (least, read, write)
            assert len(policy.seats([str(n) for n in range(fits[0])]).members) == fits[0]


def test_a_new_set_is_only_made_when_everybody_is_there() -> None:
    """Who is silent may have what we would overwrite."""
    three = [MemoryReplica() for _ in range(3)]
    three[0].silent = True
    with pytest.raises(CheckpointFailed, match="did not answer"):
        ReplicaGroup(three)
    three[0].silent = False
    ReplicaGroup(three).close()
    three[0].silent = True
    ReplicaGroup(three).close()
    with pytest.raises(InvalidRequest, match="were made a set with 2"):
        ReplicaGroup(three, ReplicaPolicy(read_quorum=3))


def test_placement_keeps_replicas_apart() -> None:
    """By any level of failure domain."""
    here = FailureDomain("eu", "north", "h1", "d1")
    assert FailureDomain("eu", "north").covers(here)
    assert not FailureDomain("eu", "south").covers(here)
    assert str(here) == "eu/north/h1/d1"
    same_host = [MemoryReplica(domain=FailureDomain("eu", "north", "h1", f"d{n}")) for n in range(2)]
    ReplicaGroup(same_host, ReplicaPolicy(placement=Placement(spread="disk"))).close()
    with pytest.raises(InvalidRequest, match="share the host"):
        ReplicaGroup(same_host, ReplicaPolicy(placement=Placement(spread="host")))
    with pytest.raises(InvalidRequest, match="does not allow"):
        ReplicaGroup(same_host, ReplicaPolicy(placement=Placement(allow=(FailureDomain("us"),))))
    with pytest.raises(InvalidRequest, match="not a level"):
        Placement(spread="planet")


def test_names_and_numbers_are_checked(stage: Stage) -> None:
    """Before anything is asked of a replica."""
    writer = stage.program()
    for name in ("", "x" * 300, "line\nbreak"):
        with pytest.raises(InvalidRequest):
            writer.save_bytes(name, b"")
    with pytest.raises(InvalidRequest, match="needs the epoch"):
        stage.program(None).save_bytes("job", b"")
    with pytest.raises(InvalidRequest, match="retain"):
        ReplicatedCheckpoint("x", schema="s", replicas=stage.group(), retain=0)
    assert PACK_BYTES > 4096


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda c: c.save_bytes("a", "text"), "a str is not bytes"),
        (lambda c: c.save_bytes("a", b"", expected="1"), "expected='1' is no version"),
        (lambda c: c.save_bytes("a", b"", effect=("key",)), "not what a save is the effect of"),
        (lambda c: c.save_bytes("a", b"", effect=("key", "print", "1")), "not what a save is the effect of"),
        (lambda c: c.open("a", epoch=7), "7 is no epoch"),
        (lambda c: c.open("a", epoch=(1, 7)), r"\(1, 7\) is no epoch"),
        (lambda _: ReplicaGroup([5]), "5 is not a replica"),  # type: ignore[list-item]
        (lambda _: ReplicaGroup("abc"), "'abc' is not a list of replicas"),
        (lambda c: ReplicaGroup([c.group.replicas()[0], *c.group.replicas()]), "of 4 replicas two are the same"),
        (lambda _: ReplicaPolicy(write_quorum="2"), "write_quorum is '2'"),  # type: ignore[arg-type]
        (lambda c: ReplicatedCheckpoint("t", schema="s", replicas=c.group, office="other"), "trusts 'local' already"),
    ],
)
def test_what_is_of_the_wrong_kind_is_told_in_a_sentence(wrong: Callable[[Any], object], said: str) -> None:
    """Before anything is sent; and one replica that is given twice is not two."""
    checkpoint = ReplicatedCheckpoint("t", schema="s", replicas=[MemoryReplica() for _ in range(3)], epoch=Epoch(1, 1))
    with checkpoint.group, pytest.raises(InvalidRequest, match=said):
        wrong(checkpoint)
    assert checkpoint._open == {}


def test_a_program_begins_with_the_folders_that_are_left(tmp_path: Path) -> None:
    """Of three one is damaged: named by their folders the two others work, and its seat goes to a new one."""
    folders = [tmp_path / f"replica-{n}" for n in range(3)]

    def program(*more: Path) -> ReplicatedCheckpoint:
        return ReplicatedCheckpoint("t", schema="s", replicas=[*folders, *more], epoch=E1)

    first = program()
    assert first.save_bytes("a", BIG, expected=0).version == 1
    first.group.close()
    log = folders[1] / "log"
    log.write_bytes(log.read_bytes()[:1000])
    second = program(tmp_path / "new")
    try:
        assert second.save_bytes("a", b"2", expected=1).version == 2
        lost = [view for view in second.group.health() if view.health is ReplicaHealth.FAULTY]
        assert [view.role for view in lost] == [ReplicaRole.SPARE], "whose it was cannot be read there"
        assert "its log" in lost[0].detail
        assert len(second.group.replace_lost(epoch=E1)) == 1
        views = second.group.health()
        assert [view.health for view in views if view.role == ReplicaRole.VOTER] == [ReplicaHealth.HEALTHY] * 3
        assert second.load("a") is not None
    finally:
        second.group.close()
    for folder in folders[::2]:
        (folder / "log").write_bytes(b"GIF89a")
    with pytest.raises(CheckpointFailed, match="3 did not answer"):
        program()


def test_an_effect_that_is_remembered_is_told_only_while_the_record_has_it(stage: Stage) -> None:
    """The writer was fenced since, and the others have gone on: what it remembers is no longer what is saved."""
    effect = Effect("step-1", "f", 1)
    older, newer = stage.program(E1, retain=1), stage.program(E2, retain=1)
    saved = older.save_bytes("job", b"1", effect=effect)
    assert older.save_bytes("job", b"1", effect=effect) == saved
    newer.save_bytes("job", b"2", effect=Effect("step-2", "f", 2))
    with pytest.raises(StaleEpoch):
        older.save_bytes("job", b"1", effect=effect)


@pytest.mark.parametrize("took", [True, False])
def test_a_write_that_was_not_answered_is_looked_up_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, took: bool
) -> None:
    """Where the record tells, the caller is not left to find out: it was saved, or it is tried again."""
    writer, other = stage.program(), stage.program()
    writer.save_bytes("job", b"1")
    run, results = writer.group.run, list[str]()

    def lose_the_answer(key: str, operation: Any, **how: Any) -> Any:
        if isinstance(operation, CasOperation) and not results:
            if took:
                run(key, operation, **how)
            else:
                other.save_bytes("job", b"2 of another")
            results.append("unknown")
            return OperationUnknown(OutcomeReason.NO_QUORUM)
        results.append(type(operation).__name__)
        return run(key, operation, **how)

    monkeypatch.setattr(writer.group, "run", lose_the_answer)
    saved = writer.save_bytes("job", b"2")
    assert saved.version == (2 if took else 3)
    assert ("CasOperation" in results) is not took, "it is not written twice"
    found = other.load("job")
    assert found is not None
    assert (found.save.version, found.data) == (saved.version, b"2")
