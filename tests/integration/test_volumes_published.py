"""Checkpoints in volumes: written by guests and holders, published by the supervisor, and by nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.durable.durable import Durable
from sublet.values import MIB, Kind
from tests.integration.supervisor_stage import SupervisorStage
from tests.integration.test_blocks import E5, E6, A, B, end, grant, part, stage_at, torn_down
from tests.integration.volume_stage import program, store_at


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with stage_at(tmp_path) as found:
        yield found


SAVES = """
state = Durable({"step": 1}, current().volume)
state.checkpoint()
state.mutate(lambda it: it.update(step=2))
state.checkpoint()
say([current().volume.name, state.last.number, Durable.restore(current().volume).value])
"""


def test_a_guest_saves_and_the_next_lease_of_the_name_finds_it(stage: SupervisorStage) -> None:
    size = part(Kind.BLOCK, 8 * MIB)
    grant(stage, A, E5, size, name="ckpt")
    assert program(stage.holder(A, E5), stage, SAVES).hear() == ["ckpt", 2, {"step": 2}]
    end(stage, A, E5, size)
    torn_down(stage, 1)
    (saved,) = [one.saved for one in stage.office_line.reports if getattr(one, "saved", None)]
    assert (saved.version, saved.count, saved.volume) == (2, 2, "ckpt")
    grant(stage, B, E6, size, name="ckpt")
    again = store_at(stage, B, E6)
    state = Durable.restore(again)
    assert state.value == {"step": 2}
    state.mutate(lambda it: it.update(step=3))
    state.checkpoint()
    assert again.newest() == 3
