"""Memory of a tenant's guests that its programs keep past the lease is counted, and takes nothing from others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

import sublet
from sublet.compute import outcomes
from sublet.errors import QuotaExceeded
from sublet.node.processes.trash import HELD_MAX
from sublet.values import MIB
from tests.security.conftest import Place
from tests.security.test_unleased import group_of, has
from tests.traces import until

pytestmark = pytest.mark.skipif(not has("memory"), reason="no control groups for this user here")

SMALL: Final = 64 * MIB
LARGE: Final = HELD_MAX + 32 * MIB


def ones(size: int) -> np.ndarray:
    return np.ones(size, np.uint8)


def taken(fabric: sublet.Fabric, size: int) -> tuple[np.ndarray, Path]:
    """A result of this size of a lease that has ended, and the control group that this lease had."""
    with fabric.memory("768MiB") as lease:
        group = group_of(lease.start(["sleep", "60"], cwd="/").pid, "memory")
        found = lease.run(ones, size)
    until("a lease of which nothing is left", lambda: all(one.id != lease.id for one in fabric.leases()))
    return found, next(one for one in (group, *group.parents) if one.parent.name.startswith("sublet-"))


def shared_bytes(group: Path) -> int:
    """Of files in memory that its guests wrote and that are still there."""
    stat = group / "memory.stat"
    lines = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return int(lines.get("total_shmem", lines.get("shmem", 0)))


def test_a_result_that_a_program_keeps_is_in_memory_of_its_own(place: Place) -> None:
    kept, group = taken(place.ben, SMALL)
    until("a control group that is gone", lambda: not group.exists())
    # The kernel returns the pages of a file after its last holder has closed it, and says so later still.
    until("memory of the guest that is given back", lambda: shared_bytes(group.parent) < SMALL)
    assert kept.sum() == SMALL


def test_who_keeps_memory_of_a_lease_that_ended_gets_no_other_and_the_others_do(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that does not copy what it is handed, as one may be written that shall harm others."""
    monkeypatch.setattr(outcomes, "take_over", tuple)
    kept, group = taken(place.ben, LARGE)
    until("memory that is charged to the lease that ended", lambda: shared_bytes(group) >= LARGE)
    with place.ben.block("1B") as lease:
        with pytest.raises(QuotaExceeded, match=r"programs of tenant ben keep .* of ended leases"):
            lease.start(["true"], cwd="/")
        with place.ana.block("1B") as other:
            assert other.start(["true"], cwd="/").wait(timeout=60) == 0
        assert kept.sum() == LARGE
        del kept
        until("memory that is given back", lambda: shared_bytes(group) < LARGE // 8)
        assert lease.start(["true"], cwd="/").wait(timeout=60) == 0
    until("a control group that is gone", lambda: not group.exists())
