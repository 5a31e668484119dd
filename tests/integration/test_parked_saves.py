"""What is parked saves before its parking lease ends it: real processes, stopped in the middle of what they do, with a
volume that another lease holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.lease_end import EndReason
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.store import verify
from sublet.values import MIB, Kind, LeaseId, ResourceId
from sublet.wire.orders import Device, End, EndedHere, Extend, Inventory, NotHeld, Parking, TornDown
from sublet.wire.page import PageReader, PageState
from tests.integration.supervisor_stage import SupervisorStage, inventory_of, supervisor_at
from tests.integration.test_blocks import E5, A, S, grant, part
from tests.integration.test_suspend import NOT_FROZEN, Desk
from tests.integration.test_volumes_published import lent
from tests.integration.volume_stage import Program, program, reader
from tests.traces import now_ns, until

BLOCK = part(Kind.BLOCK, 8 * MIB)
LONG_GRACE = "from sublet.lease import expiring\nexpiring.grace_ns = lambda ttl_ns: 60 * 10**9\n"
"""So that neither the test nor its guest has to be done within five seconds."""
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


def inventory() -> Inventory:
    """With a disk."""
    usual = inventory_of()
    blocks = Device(id=ResourceId("bench/block"), kind=Kind.BLOCK, capacity=64 * MIB)
    return replace(usual, devices=(*usual.devices[:-1], blocks, usual.devices[-1]))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path, faults=LONG_GRACE, inventory=inventory()) as found:
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
    """Soon; and most of a minute is left to whoever wants to save before it does."""
    desk.stage.office_line.order(
        Extend(lease=under.lease, epoch=under.epoch, number=99, deadline_ns=now_ns() + 55 * S, ttl_ns=50 * S)
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


def test_what_is_parked_saves_before_its_time_runs_out_and_leaves(stage: SupervisorStage) -> None:
    """It is told, has no device, saves, and is gone before it would be killed. Nobody goes on with it from there
    on: neither a longer life of its parking lease nor a device calls it back."""
    desk, under, guest = parked(stage, before_it_leaves="wait_for('it')")
    page = PageReader(str(next(path for path in stage.runtime.rglob("page") if path.parent.name.startswith("a."))))
    runs_out(desk, under)
    until("the warning", lambda: page.read().state is PageState.LEAVING)
    stage.office_line.order(
        Extend(lease=under.lease, epoch=under.epoch, number=100, deadline_ns=now_ns() + 600 * S, ttl_ns=600 * S)
    )
    number, of_device = guest.hear()
    assert of_device.startswith(("StaleEpoch", "Lease")), "nothing may be done on a device"
    desk.device = 1
    desk.grant("late", desk.gpu(), resume=under)
    (refused,) = [one for one in desk.reports if isinstance(one, NotHeld)]
    assert (refused.lease, refused.reason) == ("late", EndReason.REFUSED)
    assert "saves, and leaves" in refused.detail
    guest.go("it")
    until("its end", lambda: not stage.marked(LeaseId("a")))

    def ends() -> list[EndReason]:
        stage.office_line.wait(0.02)
        return [one.reason for one in desk.reports if isinstance(one, EndedHere) and one.lease == under.lease]

    until("word of the end", ends)
    assert set(ends()) == {EndReason.GUEST_FAILED}, "its time did not run out, for it was renewed"
    is_taken(desk, under, EndReason.GUEST_FAILED)
    assert_told(desk.torn_down(under.lease), number)
    assert int(str(saved_in(stage)["n"])) >= 50, "the step in which it was stopped is in it"


def test_it_saves_as_well_when_it_is_let_go_and_no_office_is_needed(tmp_path: Path) -> None:
    """An office that comes asks again for the end, and hears what was saved."""
    with supervisor_at(tmp_path, faults=NOT_FROZEN, inventory=inventory()) as stage:
        desk, under, guest = parked(stage)
        is_taken(desk, under, EndReason.RELEASED)
        stage.hang_up()
        number, _ = guest.hear()
        until("its end", lambda: not stage.marked(LeaseId("a")))
        stage.connect()
        is_taken(desk, under, EndReason.RELEASED)
        assert_told(desk.torn_down(under.lease), number)
        assert int(str(saved_in(stage)["n"])) >= 50


def assert_told(torn: TornDown, number: int) -> None:
    assert torn.saved is not None
    assert (torn.saved.version, torn.saved.volume) == (number, "ckpt")


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
