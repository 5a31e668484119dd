"""Reservations: who may have a key, who may complete it, and what is forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from sublet.errors import CheckpointFailed, IdempotencyConflict, InvalidRequest, StaleEpoch
from sublet.replicated import Completed, Conflict, MemoryReplica, New, Pending, ReplicaGroup, ReplicatedIdempotencyStore
from sublet.state.replicated import idempotency
from sublet.state.replicated.ballot import Garbled
from sublet.state.replicated.idempotency_record import Book, KeyRecord
from sublet.values import NS_PER_S, Epoch

E1, E2, E3 = Epoch(1, 1), Epoch(1, 2), Epoch(1, 3)


class Stage:
    """Three replicas, a wall clock to hold, and leases that end when they are told to."""

    def __init__(self) -> None:
        self.replicas = [MemoryReplica() for _ in range(3)]
        self.now_ns = 1_000 * NS_PER_S
        self.ended: set[str] = set()
        self.asked: list[tuple[str, Epoch]] = []
        """Of which lease, under which epoch, it was asked whether it has ended."""
        self._groups: list[ReplicaGroup] = []

    def program(self, epoch: Epoch, owner: str, *, office: str = "a") -> ReplicatedIdempotencyStore:
        group = ReplicaGroup(self.replicas, office=office, patience=60.0)
        self._groups.append(group)
        return ReplicatedIdempotencyStore(
            "effects",
            replicas=group,
            epoch=epoch,
            owner=owner,
            lease_ended=self._has_ended,
            wall_ns=lambda: self.now_ns,
        )

    def _has_ended(self, owner: str, epoch: Epoch) -> bool:
        self.asked.append((owner, epoch))
        return owner in self.ended

    def close(self) -> None:
        for group in self._groups:
            group.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_reserve_do_complete(stage: Stage) -> None:
    """New, then completed for everybody; another fingerprint is a conflict."""
    one, two = stage.program(E1, "l1"), stage.program(E2, "l2")
    assert one.reserve("job/1", "f", ttl="1m") == New("job/1")
    one.complete("job/1", "f", "done")
    for store in (one, two):
        assert store.reserve("job/1", "f") == Completed("done")
        assert store.reserve("job/1", "g") == Conflict("f")
    one.complete("job/1", "f", "done")
    with pytest.raises(IdempotencyConflict):
        one.complete("job/1", "f", "done otherwise")
    with pytest.raises(IdempotencyConflict):
        one.complete("job/1", "g")


def test_a_store_that_is_full_says_so_before_a_replica_does_and_has_room_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told what to do, and that nothing was reserved."""
    monkeypatch.setattr(idempotency, "VALUE_MAX", 1024 + 300)
    store = stage.program(E1, "l1")
    store._shard = lambda key: 0  # type: ignore[method-assign]
    keys = [f"job/{step}" for step in range(50)]

    def fill() -> None:
        for step, key in enumerate(keys):
            store.reserve(key, "f", step=step)
            store.complete(key, "f")

    with pytest.raises(CheckpointFailed, match="is full") as told:
        fill()
    assert told.value.reason == "not_saved"
    assert store.peek(keys[-1]) is None
    store.expire(below=50)
    assert store.reserve(keys[-1], "f", step=50) == New(keys[-1])


def test_an_office_that_adopts_a_store_has_all_of_it(stage: Stage) -> None:
    """The keys are spread over several registers."""
    one, two = stage.program(E1, "l1"), stage.program(E2, "l2", office="b")
    of_each = {one._shard(key): key for key in map(str, range(100))}
    assert len(of_each) == idempotency.SHARDS
    for key in of_each.values():
        one.reserve(key, "f")
    stage.ended.add("l1")
    two.adopt()
    for key in of_each.values():
        assert two.reserve(key, "f") == New(key, took_over=True)


def test_whoever_has_it_may_reserve_again(stage: Stage) -> None:
    """A retry is not a stranger; another program under the same lease is."""
    one, two = stage.program(E1, "l1"), stage.program(E1, "l1")
    assert one.reserve("k", "f", ttl="1m") == New("k")
    assert one.reserve("k", "f", ttl="1m") == New("k")
    said = two.reserve("k", "f", ttl="1m")
    assert said == Pending("l1", stage.now_ns + 60 * NS_PER_S)


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("over", ["nothing", "lease", "time"])
def test_taking_over_needs_a_higher_epoch_and_an_end(stage: Stage, higher: bool, over: str) -> None:
    """Of the owner's lease, or of his reservation. Neither is enough by itself."""
    one, two = stage.program(E1, "l1"), stage.program(E2 if higher else E1, "l2")
    one.reserve("k", "f", ttl="1m")
    if over == "lease":
        stage.ended.add("l1")
    elif over == "time":
        stage.now_ns += 61 * NS_PER_S
    said = two.reserve("k", "f", ttl="1m")
    if not higher or over == "nothing":
        assert isinstance(said, Pending)
        one.complete("k", "f", "by one")
        return
    assert said == New("k", took_over=True)
    with pytest.raises(StaleEpoch, match="taken over"):
        one.complete("k", "f", "late")
    with pytest.raises(StaleEpoch, match="is older"):
        one.reserve("k", "f")
    two.complete("k", "f", "by two")
    assert one.reserve("k", "f") == Completed("by two")


def test_leases_of_several_jobs_do_not_fence_each_other(stage: Stage) -> None:
    """An older lease goes on with its own keys."""
    old, new = stage.program(E1, "l1"), stage.program(E3, "l3")
    assert old.reserve("a/1", "f") == New("a/1")
    assert new.reserve("b/1", "f") == New("b/1")
    old.complete("a/1", "f")
    assert old.reserve("a/2", "f") == New("a/2")
    new.complete("b/1", "f")


def test_what_is_forgotten_does_not_come_back(stage: Stage) -> None:
    """A late request for a step below the floor is told that it is done."""
    store, late = stage.program(E1, "l1"), stage.program(E1, "l1")
    for step in range(6):
        store.reserve(f"job/{step}", "f", step=step)
        if step != 5:
            store.complete(f"job/{step}", "f", "ok")
    store.reserve("other/0", "f", step=0)
    store.expire(below=4, prefix="job/")
    assert store.peek("job/3") is None
    assert store.peek("job/4") is not None
    assert store.peek("other/0") is not None
    assert late.reserve("job/2", "f", step=2) == Completed("", expired=True)
    assert late.reserve("job/4", "f", step=4) == Completed("ok")
    assert isinstance(late.reserve("job/5", "f", step=5), Pending)
    store.expire(below=2, prefix="job/")
    assert late.reserve("job/3", "f", step=3) == Completed("", expired=True)


def test_a_reservation_can_be_given_back(stage: Stage) -> None:
    """By whoever has it, while it is not completed."""
    one, two = stage.program(E1, "l1"), stage.program(E2, "l2")
    one.reserve("k", "f")
    two.release("k")
    assert isinstance(two.reserve("k", "f"), Pending)
    one.release("k")
    assert two.reserve("k", "f") == New("k")


def test_input_is_checked(stage: Stage) -> None:
    """Sentences, not tracebacks."""
    store = stage.program(E1, "l1")
    for key, fingerprint in (("", "f"), ("k", ""), ("k" * 300, "f")):
        with pytest.raises(InvalidRequest):
            store.reserve(key, fingerprint)
    with pytest.raises(InvalidRequest, match="was not reserved"):
        store.complete("never", "f")
    store.reserve("k", "f")
    with pytest.raises(InvalidRequest, match="too large"):
        store.complete("k", "f", "x" * 5000)
    with pytest.raises(InvalidRequest):
        ReplicatedIdempotencyStore("", replicas=store.group)


def test_another_office_adopts_the_store(stage: Stage) -> None:
    """Its epochs count from then on."""
    stage.program(E1, "l1").reserve("k", "f")
    other = stage.program(E1, "l9", office="b")
    with pytest.raises(InvalidRequest, match="office"):
        other.reserve("k", "f")
    other.adopt()
    assert isinstance(other.reserve("k", "f"), Pending)


# ---- the law by itself, against a dumb second telling of it ----


def test_a_book_keeps_its_rules_in_random_company() -> None:
    """Ten thousand calls of five programs: at most one outcome for each key, completed only by whoever has it."""
    chance = random.Random(7)
    book, now = Book(), 0
    held: dict[str, tuple[str, Epoch]] = {}
    done: dict[str, str] = {}
    for _ in range(10_000):
        now += chance.randrange(3)
        key, who = f"k{chance.randrange(8)}", f"c{chance.randrange(5)}"
        epoch, fingerprint = Epoch(1, chance.randrange(6)), chance.choice(("f", "f", "f", "g"))
        try:
            if chance.random() < 0.6:
                claim = KeyRecord(fingerprint, who, who, epoch, now + chance.randrange(10))
                book, said = book.reserve(key, claim, now_ns=now)
                if isinstance(said, New):
                    assert key not in done
                    assert key not in held or held[key][0] == who or held[key][1] < epoch
                    held[key] = who, epoch
                elif isinstance(said, Completed):
                    assert said.outcome == done[key]
            else:
                book = book.complete(key, who, epoch, fingerprint, who)
                assert held[key] == (who, epoch)
                assert done.setdefault(key, who) == who
        except (StaleEpoch, InvalidRequest, IdempotencyConflict):
            continue
        assert Book.unpack(book.pack()) == book
    assert len(done) == 8


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"floors":{},"records":{"k":[1]}}', b"\xff"])
def test_anything_else_is_no_book(body: bytes) -> None:
    """And is said to be none."""
    with pytest.raises(Garbled):
        Book.unpack(body)


def test_whether_the_owner_has_ended_is_asked_of_the_epoch_that_it_reserved_under(stage: Stage) -> None:
    """Who attached to the same lease has a newer one: it is that which tells that the owner's time is over."""
    stage.program(E1, "l1").reserve("k", "f", ttl="1m")
    stage.program(E3, "l1").reserve("k", "f", ttl="1m")
    assert set(stage.asked) == {("l1", E1)}
