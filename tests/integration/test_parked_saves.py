"""What is parked saves before its parking lease ends it: real processes, stopped in the middle of what they do, with a
volume that another lease holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.durable.durable import Durable
from sublet.durable.upkeep import verify
from sublet.supervisor.mounts import mounts_below
from sublet.values import MIB, EndReason, Kind, LeaseId, ResourceId
from sublet.wire.orders import Device, End, EndedHere, Extend, NotHeld, Parking, TornDown
from tests.integration.supervisor_stage import SupervisorStage, inventory_of
from tests.integration.test_blocks import E5, A, S, grant, part
from tests.integration.test_suspend import NOT_FROZEN, Desk
from tests.integration.test_volumes_published import lent
from tests.integration.volume_stage import Program, program, reader
from tests.traces import now_ns, until

BLOCK = part(Kind.BLOCK, 8 * MIB)
WORKS = """
import numpy as np
from sublet.guest.checkpoints import wait_for_save
here, first = current(), current().epoch
state = Durable({"n": 0, "array": np.zeros(1000)}, here.volume)
def step(it):
    it["n"] += 1
    it["array"] += 1
@here.on_checkpoint
def save():
    said_of_device = attempt(lambda: here.check(first))
    number = state.checkpoint().number
    say([number, said_of_device])
    BEFORE_IT_LEAVES
state.checkpoint()
while True:
    state.mutate(step)
    if state.value["n"] == 50:
        say("works")
    time.sleep(0.002)
"""


@contextlib.contextmanager
def stage_at(place: Path, faults: str = "") -> Iterator[SupervisorStage]:
    stage = SupervisorStage(place)
    blocks = Device(id=ResourceId("bench/block"), kind=Kind.BLOCK, capacity=64 * MIB)
    devices = inventory_of().devices
    stage.inventory = replace(stage.inventory, devices=(*devices[:-1], blocks, devices[-1]))
    stage.faults = faults
    try:
        stage.start()
        stage.connect()
        yield stage
    finally:
        stage.close()
        for mount in (*mounts_below(str(stage.state)), *mounts_below(str(stage.runtime))):
            os.system(f"umount '{mount.point}'")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with stage_at(tmp_path) as found:
        yield found


def parked(stage: SupervisorStage, *, before_it_leaves: str = "pass") -> tuple[Desk, Parking, Program]:
    """A guest that was in the middle of its work, and saves into the volume of another lease."""
    grant(stage, A, E5, BLOCK, name="ckpt")
    desk = Desk(stage)
    desk.n = 10
    desk.lease = LeaseId("a")
    desk.epoch = desk.grant("a", desk.gpu())
    code = WORKS.replace("BEFORE_IT_LEAVES", before_it_leaves)
    guest = program(stage.holder(desk.lease, desk.epoch), stage, code, volume=lent(stage, A, E5), bootstrap=True)
    assert guest.hear() == "works"
    return desk, desk.park(), guest


def runs_out(desk: Desk, under: Parking) -> None:
    """Soon; and five seconds are left to whoever wants to save before it does."""
    desk.stage.office_line.order(
        Extend(lease=under.lease, epoch=under.epoch, number=99, deadline_ns=now_ns() + 6 * S, ttl_ns=50 * S)
    )


def is_taken(desk: Desk, under: Parking, reason: EndReason) -> None:
    desk.stage.office_line.order(
        End(lease=under.lease, epoch=under.epoch, number=99, parts=(desk.memory(),), reason=reason, grace_ns=20 * S)
    )


def saved_in(stage: SupervisorStage) -> dict[str, object]:
    """What the next one finds."""
    folder = stage.state / "blocks" / "named" / "local" / "ckpt" / "0"
    until("the folder", folder.exists)
    assert verify(folder).ok
    found = Durable.restore(reader(str(folder))).value
    assert (found["array"] == found["n"]).all()
    return dict(found)


@pytest.mark.parametrize(
    ("how", "faults"),
    [("runs out", ""), ("runs out", NOT_FROZEN), ("released", ""), ("preempted", "")],
    ids=["runs out", "runs out, stopped one by one", "released", "preempted"],
)
def test_what_is_parked_saves_before_its_parking_lease_ends_it(tmp_path: Path, how: str, faults: str) -> None:
    """It is told, has no device, saves, and leaves before it would be killed. The report says what was saved."""
    with stage_at(tmp_path, faults) as stage:
        desk, under, guest = parked(stage)
        if how == "runs out":
            runs_out(desk, under)
        else:
            is_taken(desk, under, EndReason(how))
        number, of_device = guest.hear()
        assert of_device.startswith(("StaleEpoch", "Lease")), "nothing may be done on a device"
        until("its end", lambda: not stage.marked(LeaseId("a")))
        if how == "runs out":
            ends: list[EndReason] = []

            def ended() -> bool:
                stage.office_line.wait(0.02)
                ends.extend(
                    one.reason for one in desk.reports if isinstance(one, EndedHere) and one.lease == under.lease
                )
                return bool(ends)

            until("word of the end", ended)
            assert ends[0] is EndReason.EXPIRED
            is_taken(desk, under, EndReason.EXPIRED)
        torn = desk.torn_down(under.lease)
        assert torn.saved is not None
        assert (torn.saved.version, torn.saved.volume) == (number, "ckpt")
        assert int(str(saved_in(stage)["n"])) >= 50, "the step in which it was stopped is in it"


def test_who_saves_and_leaves_is_gone_on_with_by_nobody(stage: SupervisorStage) -> None:
    """Neither a longer life of its parking lease nor a device calls it back."""
    desk, under, guest = parked(stage, before_it_leaves="wait_for('it')")
    runs_out(desk, under)
    guest.hear()
    desk.stage.office_line.order(
        Extend(lease=under.lease, epoch=under.epoch, number=100, deadline_ns=now_ns() + 600 * S, ttl_ns=600 * S)
    )
    desk.device = 1
    desk.grant("late", desk.gpu(), resume=under)
    (refused,) = [one for one in desk.reports if isinstance(one, NotHeld)]
    assert (refused.lease, refused.reason) == ("late", EndReason.REFUSED)
    assert "saves, and leaves" in refused.detail
    guest.go("it")
    until("its end", lambda: not stage.marked(LeaseId("a")))
    assert int(str(saved_in(stage)["n"])) >= 50


def test_a_supervisor_that_dies_over_such_a_save_leaves_nobody_and_what_was_saved(stage: SupervisorStage) -> None:
    desk, under, guest = parked(stage, before_it_leaves="wait_for('ever')")
    is_taken(desk, under, EndReason.OPERATOR)
    guest.hear()
    stage.kill()
    until("everybody's end", lambda: not stage.marked())
    assert int(str(saved_in(stage)["n"])) >= 50
    stage.start()
    stage.connect()

    def is_clean() -> bool:
        stage.office_line.wait(0.02)
        return not stage.residue()

    until("nothing left", is_clean)


def test_an_end_without_time_is_the_end(stage: SupervisorStage) -> None:
    """As at a deadline that came while the supervisor could not look. What was saved before is whole."""
    desk, under, _ = parked(stage)
    desk.end_parking(under)
    until("its end", lambda: not stage.marked(LeaseId("a")))
    assert saved_in(stage)["n"] == 0
    assert not [one for one in desk.reports if isinstance(one, TornDown) and one.saved is not None]
