"""A whole office takes cards from programs: what is parked, how much is set aside for it, how long it may take.

So that a copy takes seconds and not half a minute, the office gives a suspend less time beside the copy. What a program
has on a card is its context, which takes no memory of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from sublet import Fabric, Lease, connect
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from sublet.errors import SubletError
from sublet.lease.parking import copy_ns
from sublet.values import GIB, NS_PER_S
from tests.commands import start_program
from tests.rig import card_functions
from tests.rig.personalities import ALL_IN_CONTAINER, LAPTOP
from tests.rig.rig import SOON_MS, Rig, clear, forking_rig
from tests.traces import PATIENCE_S, end_office, plain_env, until

pytestmark = [pytest.mark.needs("gcc"), pytest.mark.xdist_group("tests/rig/test_taken_cards.py")]

OFFICE: Final = """
import sys
import sublet.engines.local as local
from sublet.office.ledger.policy import Policy
local.Policy = lambda: Policy(suspend_ns=int(sys.argv[1]))
from sublet.cli import main
sys.exit(main(["up", "--foreground"]))
"""
SUSPEND_NS: Final = NS_PER_S * 3 // 2
OPERATING_SYSTEM: Final = 304
"""CUDA_ERROR_OPERATING_SYSTEM."""


class Taken(NamedTuple):
    """The machine, and its office."""

    rig: Rig
    fabric: Fabric

    def holds(self, amount: int) -> tuple[Lease, int]:
        """A lease of the lowest tier, and the process that has so much of its card, beside what it wrote."""
        lease = self.fabric.gpu(min_vram="8GiB", ttl="60s", wait="60s", spot=True, renew="always")
        before = [card.context for card in self.rig.state.cards]
        for card in self.rig.state.cards:
            card.context = amount
        pid, _, _ = lease.run(card_functions.begin)
        for card, context in zip(self.rig.state.cards, before, strict=True):
            card.context = context
        return lease, pid

    def take(self, lease: Lease) -> Lease:
        """Another request gets all cards, which it has only once they are clean."""
        count = len(self.rig.personality.cards)
        other = self.fabric.gpu(min_vram="8GiB", count=count, ttl="60s", wait="60s", renew="always")
        until("the end of its lease", lambda: lease.end is not None)  # the news of it has a connection of its own
        return other

    def set_aside(self, lease: Lease) -> int:
        """Bytes of memory for what was taken off its card."""
        assert lease.end is not None
        found = self.fabric.request("GET", f"/v1/leases/{lease.end.parked.partition('@')[0]}", shape=dict)["lease"]
        assert found["parks"]["of"] == lease.id
        (part,) = found["parts"]
        return int(part["amount"])


@pytest.fixture(scope="module")
def taken(request: pytest.FixtureRequest, rig_place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taken]:
    home = tmp_path_factory.mktemp("office").resolve()
    with (
        forking_rig(rig_place, request.param) as rig,
        open(home / "said", "wb") as said,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("LD_LIBRARY_PATH", str(rig.folder))
        rig.state.lingers_ms = SOON_MS
        env = plain_env() | {"SUBLET_HOME": str(home)}
        office = start_program(OFFICE, str(SUSPEND_NS), env=env, out=said, err=said)
        try:
            until("an office", lambda: office.poll() is not None or answers(socket_path(home)))
            with connect(home=home) as fabric:
                yield Taken(rig, fabric)
                fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
            office.wait(PATIENCE_S)
        finally:
            office.kill()
            office.wait(PATIENCE_S)
            end_office(runtime_dir(home))


@pytest.mark.parametrize("taken", [ALL_IN_CONTAINER], indirect=True, ids=lambda one: one.name)
def test_a_process_that_the_driver_does_not_report_is_not_parked(taken: Taken) -> None:
    """It counted as one that does not use CUDA: its guest was parked, with its memory still on the card, which never
    came clean for the next lease."""
    lease, pid = taken.holds(GIB)
    silent = taken.rig.trouble("cuCheckpointProcessGetState", code=OPERATING_SYSTEM)
    other = taken.take(lease)
    clear(silent)
    assert silent.met, "the driver was asked about it"
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(SubletError, match="could not be taken off its device alive"):
        taken.fabric.gpu(resume=lease, wait=0)
    other.release()


@pytest.mark.parametrize("taken", [ALL_IN_CONTAINER], indirect=True, ids=lambda one: one.name)
def test_the_time_of_a_suspend_includes_the_copy(taken: Taken) -> None:
    """What had 80 GB was given half a minute, as everything else, and was killed in the middle of the copy."""
    size = 3 * GIB
    assert copy_ns(size) >= SUSPEND_NS
    lease, pid = taken.holds(size)
    slow = taken.rig.trouble("cuCheckpointProcessCheckpoint", delay_ms=copy_ns(size) // 1_000_000)
    other = taken.take(lease)
    assert slow.met == 1
    clear(slow)
    other.release()
    again = taken.fabric.gpu(resume=lease, ttl="60s", wait="60s", renew="always")
    found, _, is_same = again.run(card_functions.look)
    assert (found, is_same) == (pid, True)
    again.release()


@pytest.mark.parametrize("taken", [LAPTOP], indirect=True, ids=lambda one: one.name)
def test_memory_is_set_aside_for_what_is_parked_where_pids_say_nothing(taken: Taken) -> None:
    """In a container the driver's pids are not those of guests: only what they have of the machine's memory was set
    aside, and the copy of a card was too much for it."""
    lease, _ = taken.holds(GIB)
    other = taken.take(lease)
    assert taken.set_aside(lease) > GIB
    other.release()
