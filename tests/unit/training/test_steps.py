"""One training step: what it does, what it refuses, and what the next program finds when it died anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import (
    CheckpointFailed,
    Disconnected,
    GpuError,
    IdempotencyConflict,
    InvalidRequest,
    LeaseEnded,
    LeaseNotActive,
    NotFound,
    StaleEpoch,
    StepPending,
    SubletError,
    VersionConflict,
)
from sublet.replicated import Checkpoint, MemoryReplica, ReplicatedCheckpoint, SigningKey
from sublet.training import (
    Act,
    Completed,
    Duplicate,
    Launch,
    Recovered,
    TrainingBatch,
    TrainingStepOutcome,
    run_training_step,
)
from sublet.training.step_protocol import ACTS, StepVerdict
from sublet.training.steps import TIDY_EVERY, lease_has_ended
from sublet.values import Epoch
from tests.unit.training.stage import (
    JOB,
    TWO,
    Killed,
    World,
    after_death_before,
    batch,
    uninterrupted,
    wait_for_replicas,
)

ONCE = tuple(act for act in ACTS if act is not Act.CHECK)
OUTCOME = {StepVerdict.RUN: Completed, StepVerdict.SETTLE: Recovered, StepVerdict.DUPLICATE: Duplicate}


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_a_step_goes_through_its_acts_in_order(world: World) -> None:
    program = world.program(1)
    outcome = program.step(1, expected=0, kernel="train_step")
    assert isinstance(outcome, Completed)
    assert (outcome.job_id, outcome.step, outcome.version) == (JOB, 1, 1)
    assert tuple(program.seen) == ACTS
    assert program.state() == outcome.state
    assert program.device.launches == 1


def test_the_recipe(world: World) -> None:
    """A batch of four bytes and a state of four bytes, as the recipe has it."""
    program = world.program(1)
    outcome = run_training_step(
        program.lease,
        program.checkpoint,
        program.idempotency,
        TrainingBatch(job_id="spot-resnet", step=42, input=bytes([1, 2, 3, 4]), output_len=4),
        b"// a module",
        "train_step",
        expected=0,
        kind="ptx",
        session=program.device.open,
    )
    assert isinstance(outcome, Completed)
    assert len(outcome.state) == 4


def test_steps_follow_each_other(world: World) -> None:
    program, version = world.program(1), 0
    for step in range(1, 6):
        outcome = program.step(step, expected=version)
        assert isinstance(outcome, Completed)
        version = outcome.version
    assert program.state() == uninterrupted(5)


def test_a_state_that_the_program_has_is_not_read_again_if_it_is_the_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is not is not believed."""
    program, loads = world.program(1), list[int | None]()
    load = program.checkpoint.load

    def counted(name: str, version: int | None = None) -> Checkpoint | None:
        loads.append(version)
        return load(name, version)

    monkeypatch.setattr(program.checkpoint, "load", counted)
    first = program.step(1)
    assert isinstance(first, Completed)
    program.step(2, state=first.state)
    assert loads == []
    program.step(3, state=first.state)
    assert loads == [2]
    assert program.state() == uninterrupted(3)


# ---- dying


@pytest.mark.parametrize("same_lease", [False, True], ids=["a new lease", "the same lease"])
@pytest.mark.parametrize("act", ACTS)
def test_whoever_dies_before_an_act_leaves_what_the_law_says(world: World, act: Act, same_lease: bool) -> None:
    """The next program comes to what ``after_death_before`` says, and the weights are those of an uninterrupted run."""
    first = world.program(1)
    first.step(1, expected=0)
    with pytest.raises(Killed):
        first.step(2, expected=1, die_before=act)
    if same_lease:
        second = first  # the call was interrupted, and the program lives: it asks again
    else:
        world.end(first)
        second = world.program(2)
    outcome = second.step(2, expected=1)
    assert type(outcome) is OUTCOME[after_death_before(act)]
    assert outcome.version == 2
    assert second.state() == uninterrupted(2)
    assert type(second.step(2, expected=1)) is Duplicate
    assert type(second.step(3, expected=2)) is Completed
    assert second.state() == uninterrupted(3)


@pytest.mark.parametrize("act", ACTS)
def test_dying_while_recovering_is_no_worse(world: World, act: Act) -> None:
    for n, before in enumerate((Act.COMPLETE, act, act), start=1):
        program = world.program(n)
        try:
            program.step(1, die_before=before)
        except Killed:
            world.end(program)
    last = world.program(9)
    last.step(1)
    assert last.state() == uninterrupted(1)
    assert [save.version for save in last.checkpoint.versions(batch(1).checkpoint_name)] == [1]


# ---- leases


def test_nothing_is_touched_under_a_lease_that_is_over(world: World) -> None:
    """Neither the device nor a replica; and the error is `LeaseNotActive`, whatever ended it."""
    program = world.program(1)
    program.lease.over = True
    asked = [replica.asked for replica in world.replicas if isinstance(replica, MemoryReplica)]
    with pytest.raises(LeaseNotActive, match="expired"):
        program.step(1)
    assert program.seen == [Act.CHECK]
    assert program.device.sessions == 0
    assert [replica.asked for replica in world.replicas if isinstance(replica, MemoryReplica)] == asked


@pytest.mark.parametrize(("check", "last"), [(2, Act.LAUNCH), (3, Act.LAUNCH), (4, Act.CHECK_AGAIN)])
def test_a_lease_that_ends_on_the_way_stops_it_before_the_next_launch_or_the_save(
    world: World, check: int, last: Act
) -> None:
    program = world.program(1)
    program.lease.ends_at_check = check
    with pytest.raises(LeaseEnded):
        program.step(1)
    assert program.seen[-1] is last
    assert program.device.launches == min(check - 2, 2)
    assert program.checkpoint.load(batch(1).checkpoint_name) is None
    following = world.program(2)
    assert type(following.step(1)) is Completed  # at once, though nobody said that the first lease has ended
    assert following.state() == uninterrupted(1)


@pytest.mark.parametrize("act", ONCE)
def test_a_zombie_that_wakes_before_any_act_is_refused(world: World, act: Act) -> None:
    """It believes in its lease; another has done the step and one more in the meantime. Nothing of it counts."""
    zombie = world.program(1, believes=True)
    done: list[TrainingStepOutcome] = []

    def meanwhile(now: Act) -> None:
        if now is act and not done:
            world.end(zombie)
            living = world.program(2)
            done.extend([living.step(1), living.step(2)])

    if act is Act.DONE:
        assert type(zombie.step(1, watch=meanwhile)) is Completed
        assert [type(outcome) for outcome in done] == [Duplicate, Completed]
    else:
        with pytest.raises(StaleEpoch):
            zombie.step(1, watch=meanwhile)
        assert [type(outcome) for outcome in done] == [Recovered if act is Act.COMPLETE else Completed, Completed]
    after = world.program(3)
    assert after.state() == uninterrupted(2)
    with pytest.raises(StaleEpoch):
        zombie.step(3)


def test_another_program_at_the_step_is_waited_for(world: World) -> None:
    """Until its lease has ended, or its reservation has run out."""
    first, second = world.program(1), world.program(2)
    with pytest.raises(Killed):
        first.step(1, die_before=Act.SAVE)
    with pytest.raises(StepPending, match="l-1") as caught:
        second.step(1)
    assert caught.value.owner == "l-1"
    assert caught.value.transient
    assert second.device.sessions == 0
    world.now_ns = caught.value.until_ns
    assert type(second.step(1)) is Completed
    assert second.state() == uninterrupted(1)


def test_what_was_saved_is_known_though_its_reservation_is_anothers(world: World) -> None:
    first, second = world.program(1), world.program(2)
    with pytest.raises(Killed):
        first.step(1, die_before=Act.COMPLETE)
    assert type(second.step(1)) is Recovered
    assert type(second.step(2)) is Completed
    assert second.state() == uninterrupted(2)


def test_a_step_that_nobody_completed_is_recovered_after_later_ones(world: World) -> None:
    """As long as its save is kept."""
    first = world.program(1)
    with pytest.raises(Killed):
        first.step(1, die_before=Act.COMPLETE)
    world.end(first)
    second = world.program(2)
    second.step(2)
    outcome = second.step(1)
    assert type(outcome) is Recovered
    assert outcome.version == 1
    assert second.state() == uninterrupted(2)


def test_a_state_that_was_replaced_in_the_middle_is_not_overwritten(world: World) -> None:
    """Somebody under the same lease saved by hand while the step was being computed from the state before."""
    program = world.program(1)
    program.step(1)

    def meanwhile(act: Act) -> None:
        if act is Act.LAUNCH and program.seen.count(act) == 1:
            program.checkpoint.save_bytes(batch(1).checkpoint_name, b"by hand")

    with pytest.raises(VersionConflict):
        program.step(2, watch=meanwhile)
    assert program.state() == b"by hand"


# ---- asking for what cannot be


@pytest.mark.parametrize("died", [Act.LAUNCH, Act.COMPLETE, None])
def test_a_step_that_was_begun_with_something_else_is_refused(world: World, died: Act | None) -> None:
    """However far it came; and again when it is asked again."""
    first = world.program(1)
    if died is None:
        first.step(1)
    else:
        with pytest.raises(Killed):
            first.step(1, die_before=died)
    world.end(first)
    for program in (first, world.program(2)):
        program.lease.over = False
        for _ in range(2):
            with pytest.raises(IdempotencyConflict, match="step 1"):
                program.step(1, data=b"else")
        assert program.device.sessions <= 1
    assert type(world.program(3).step(1)) in (Completed, Recovered, Duplicate)


@pytest.mark.parametrize("expected", [2, 99])
def test_a_version_from_the_future_is_refused(world: World, expected: int) -> None:
    program = world.program(1)
    program.step(1, expected=0)
    launches = program.device.launches
    with pytest.raises(VersionConflict, match="is not written yet"):
        program.step(2, expected=expected)
    assert program.device.launches == launches
    assert type(program.step(2, expected=1)) is Completed


def test_a_version_from_the_past_is_refused(world: World) -> None:
    program = world.program(1)
    program.step(1, expected=0)
    with pytest.raises(VersionConflict, match="version 1, not 0"):
        program.step(2, expected=0)
    assert program.state() == uninterrupted(1)


def test_a_step_that_was_left_out_comes_too_late(world: World) -> None:
    program = world.program(1)
    program.step(1)
    program.step(5)
    with pytest.raises(VersionConflict, match="step 5 is saved already"):
        program.step(4)


def test_an_old_step_is_a_duplicate_long_after_its_state_is_gone(world: World) -> None:
    program = world.program(1, retain=2)
    for step in range(1, 6):
        program.step(step)
    outcome = world.program(2, retain=2).step(1)
    assert outcome == Duplicate(JOB, 1, 1)


def test_what_is_completed_is_forgotten_in_time_and_still_not_done_again(world: World) -> None:
    """A store has room for so many keys, and a job has more steps."""
    program = world.program(1)
    for step in (1, TIDY_EVERY - 1, 2 * TIDY_EVERY - 1, 2 * TIDY_EVERY):
        program.step(step)
    assert program.idempotency.peek(batch(1).key) is None
    assert program.step(2 * TIDY_EVERY - 1) == Duplicate(JOB, 2 * TIDY_EVERY - 1, 3), "a late one is answered in full"
    assert program.step(1) == Duplicate(JOB, 1, None)
    assert program.step(2 * TIDY_EVERY) == Duplicate(JOB, 2 * TIDY_EVERY, 4)


def test_a_checkpoint_that_lost_a_completed_step_is_not_gone_on_from(world: World) -> None:
    """Other replicas, or older ones: nobody can tell, so nobody writes."""
    program, elsewhere = world.program(1), World()
    program.step(1)
    stray = elsewhere.program(2)
    stray.idempotency = program.idempotency
    with pytest.raises(CheckpointFailed, match="knows only nothing"):
        stray.step(1)
    assert stray.device.sessions == 0
    elsewhere.close()


def test_a_step_that_another_program_saved_between_two_looks_is_done(world: World) -> None:
    """It was not saved when the checkpoint was opened, and completed when it was to be reserved. One more look tells
    that from replicas that lost it."""
    other, program = world.program(1), world.program(1)
    reserve = program.idempotency.reserve

    def late(*args: Any, **facts: Any) -> Any:
        other.step(1)
        return reserve(*args, **facts)

    program.idempotency.reserve = late  # type: ignore[method-assign]
    assert program.step(1) == Duplicate(JOB, 1, 1)
    assert program.device.sessions == 0


def test_a_step_goes_on_from_nothing_but_what_the_opening_found(world: World) -> None:
    """Another program may have adopted the checkpoint and saved under the same number since."""
    program = world.program(1)
    program.step(1)
    load = program.checkpoint.load

    def other(name: str, version: int | None = None) -> Any:
        found = load(name, version)
        assert found is not None
        return SimpleNamespace(data=found.data, save=SimpleNamespace(hash="of something else"))

    program.checkpoint.load = other  # type: ignore[method-assign]
    with pytest.raises(VersionConflict, match="written by others"):
        program.step(2)


@pytest.mark.parametrize(
    "wrong",
    [{"job_id": ""}, {"job_id": "a:step:1"}, {"job_id": "x" * 101}, {"step": -1}, {"step": 1 << 63}, {"output_len": 0}],
)
def test_a_batch_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        TrainingBatch(**{"job_id": "job", "step": 1, "input": b"", "output_len": 4, **wrong})


def test_a_step_needs_a_kernel(world: World) -> None:
    with pytest.raises(InvalidRequest, match="does nothing"):
        world.program(1).step(1, kernel=())


def test_the_fingerprint_is_of_all_that_decides() -> None:
    base = batch(1)
    from dataclasses import replace

    from sublet.wire.device import ModuleKind

    warp = {ModuleKind.WARP: b"m"}
    prints = {
        base.fingerprint(warp, TWO),
        base.fingerprint({ModuleKind.PTX: b"m"}, TWO),
        base.fingerprint({ModuleKind.WARP: b"n"}, TWO),
        base.fingerprint(warp, TWO[:1]),
        base.fingerprint(warp, (Launch("train_step", 2), TWO[1])),
        base.fingerprint(warp, (TWO[0], Launch("decay", args=(4,)))),
        replace(base, step=2).fingerprint(warp, TWO),
        replace(base, job_id="other").fingerprint(warp, TWO),
        replace(base, input=b"x").fingerprint(warp, TWO),
        replace(base, initial=b"x").fingerprint(warp, TWO),
        replace(base, output_len=4).fingerprint(warp, TWO),
    }
    assert len(prints) == 11
    assert base.fingerprint(warp, TWO) in prints


# ---- devices and replicas that fail


@pytest.mark.parametrize("call", ["open", "mem_alloc", "module_load", "launch", "sync"])
def test_a_device_that_fails_costs_nothing_but_the_try(world: World, call: str) -> None:
    """The step is free at once, for this program and for others."""
    first, second = world.program(1), world.program(2)
    first.device.fails = call
    with pytest.raises(GpuError):
        first.step(1)
    assert not first.device.buffers
    assert not first.device.modules
    assert type(second.step(1)) is Completed


def set_replicas(world: World, count: int, **how: bool) -> None:
    for replica in world.replicas[:count]:
        for name, value in how.items():
            setattr(replica, name, value)


@pytest.mark.parametrize("how", ["silent", "faulty", "full"])
def test_one_replica_of_three_may_fail(world: World, how: str) -> None:
    program = world.program(1)
    program.step(1)
    set_replicas(world, 1, **{how: True})
    assert type(program.step(2)) is Completed
    assert program.state() == uninterrupted(2)


def test_without_a_quorum_nothing_is_begun(world: World) -> None:
    program = world.program(1)
    program.step(1)
    set_replicas(world, 2, silent=True)
    program.group.patience_s = 0.2
    with pytest.raises(CheckpointFailed):
        program.step(2)
    assert program.device.sessions == 1


@pytest.mark.parametrize("act", [Act.SAVE, Act.COMPLETE])
@pytest.mark.parametrize("how", ["silent", "deaf"])
def test_a_save_or_completion_that_nobody_answered_is_settled_by_asking_again(world: World, act: Act, how: str) -> None:
    """It is an error that the user sees. Whether it came through is then read from the record, never assumed."""
    program = world.program(1)
    program.step(1)
    patience_s = program.group.patience_s

    def meanwhile(now: Act) -> None:
        if now is act:  # and not before, or the step might not come so far
            set_replicas(world, 3, **{how: True})
            program.group.patience_s = 0.2

    with pytest.raises(CheckpointFailed) as caught:
        program.step(2, watch=meanwhile)
    program.group.patience_s = patience_s
    wait_for_replicas(program.group)
    set_replicas(world, 3, **{how: False})
    came_through = act is Act.COMPLETE or how == "deaf"
    if act is Act.COMPLETE:
        assert any("saved as version 2" in note for note in caught.value.__notes__)
    again = world.program(2) if how == "deaf" else program
    if again is not program:
        world.end(program)
    outcome = again.step(2)
    assert type(outcome) in ((Recovered, Duplicate) if came_through else (Completed,))
    assert outcome.version == 2
    assert again.state() == uninterrupted(2)


# ---- that these tests can fail


def test_a_program_that_ignores_the_record_is_caught(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that saves without the step's name applies a step twice after a death before ``complete``."""
    from sublet.training import steps

    monkeypatch.setattr(steps._Step, "saved", _saved_without_effect)
    first = world.program(1)
    with pytest.raises(Killed):
        first.step(1, die_before=Act.COMPLETE)
    world.end(first)
    second = world.program(2)
    second.step(1)
    assert second.state() != uninterrupted(1)


def _saved_without_effect(step: Any, state: bytes, latest: Any) -> Any:
    step.at(Act.SAVE)
    return step.checkpoint.save_bytes(step.name, state, epoch=step.epoch)


def test_with_a_key_a_step_that_another_saved_is_not_taken_for_done(world: World) -> None:
    """Who may write to the replicas must not be able to have a step left out."""
    theirs = world.program(1)
    with pytest.raises(Killed):
        theirs.step(1, die_before=Act.COMPLETE)
    theirs.lease.over = True
    mine = world.program(2)
    assert isinstance(mine.step(1), Recovered), "without a key it is"
    with pytest.raises(Killed):
        mine.step(2, die_before=Act.COMPLETE)
    mine.lease.over = True
    careful = world.program(3)
    careful.checkpoint = ReplicatedCheckpoint(
        "runs", schema="w.v1", replicas=careful.group, epoch=careful.lease.epoch, key=SigningKey.new()
    )
    with pytest.raises(CheckpointFailed, match="no signature"):
        careful.step(2)


def test_a_step_that_is_refused_is_reserved_for_nobody(world: World) -> None:
    """Nothing of it was begun: the program that asks rightly need not wait until a reservation ends."""
    first, second = world.program(1), world.program(2)
    first.step(1)
    with pytest.raises(VersionConflict):
        first.step(2, expected=0)
    assert isinstance(second.step(2, expected=1), Completed)


def test_the_first_state_of_a_job_is_not_written_over_that_of_another_program(world: World) -> None:
    """Both have found nothing, under one lease; one was quicker."""
    slow, quick = world.program(1), world.program(1)

    def at(act: Act) -> None:
        if act is Act.SAVE:
            quick.checkpoint.save_bytes(batch(1).checkpoint_name, b"of the other program", expected=0)

    with pytest.raises(SubletError) as refused:
        slow.step(1, watch=at)
    assert isinstance(refused.value, VersionConflict | StaleEpoch)
    assert quick.state() == b"of the other program"


@pytest.mark.parametrize(
    ("seen", "ended"),
    [
        (SimpleNamespace(end=None, epoch=Epoch(1, 5)), False),
        (SimpleNamespace(end=None, epoch=Epoch(1, 6)), True),
        (SimpleNamespace(end="expired", epoch=None), True),
        (NotFound("no such lease"), False),
        (Disconnected("no answer"), False),
    ],
)
def test_the_owner_of_a_reservation_has_ended_if_the_office_says_so(seen: object, ended: bool) -> None:
    """Or if another program has attached to its lease since, which fences it. What is not known is no end."""

    def lease(name: str) -> object:
        if isinstance(seen, Exception):
            raise seen
        return seen

    fabric: Any = SimpleNamespace(lease=lease)
    assert lease_has_ended(fabric)("l-1", Epoch(1, 5)) is ended
