"""The contract of parking, kept on pretended cards: a real supervisor, and guests that the driver suspends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from sublet.testing import AgentBench, ParkingConformance
from sublet.testing.parking_conformance import E1, A
from sublet.values import GIB, MIB, Kind, ResourceId, Suspend
from sublet.wire.cards import CardUse
from sublet.wire.guests import ListProcesses
from sublet.wire.orders import Device, TornDown
from tests.integration.test_agent_conformance import RealBench
from tests.rig.rig import Rig
from tests.rig.test_interface import run_on
from tests.rig.test_machines import small_contexts

pytestmark = pytest.mark.needs("gcc")

GUEST: Final = """
import os, signal, sys, time
from tests.rig import card_functions
signal.signal(signal.SIGTERM, lambda *_: os.path.exists(os.environ["DEAF"]) or sys.exit())
card_functions.begin()
open(os.environ["READY"], "w").close()
while True:
    time.sleep(1000)
"""
LENT: Final = 256 * MIB
CHECKPOINTED: Final = 2


class CardBench(RealBench):
    """Its devices are two of the machine's cards."""

    guest = (sys.executable, "-c", GUEST)

    def __init__(self, place: Path, rig: Rig) -> None:
        super().__init__(place)
        self._stage.env |= rig.env | {"PYTHONPATH": str(Path(__file__).parents[2])}
        cards = tuple(
            Device(
                id=ResourceId(f"bench/{rig.card(index).name}"),
                kind=Kind.GPU,
                capacity=LENT,
                model="H100",
                suspend=Suspend.SAME_TYPE,
            )
            for index in range(2)
        )
        others = (device for device in self._stage.inventory.devices if device.kind is not Kind.GPU)
        self._stage.inventory = replace(self._stage.inventory, devices=(*cards, *others))

    def tell(self, asked: ListProcesses) -> None:
        """As an office does that has looked at the cards."""
        self._stage.office_line.ask(asked)


class TestRealAgentParksOnCards(ParkingConformance):
    """When a card is torn down nothing of its guest is on it, whether that lives on or not."""

    settle_s = 60.0

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path, rig: Rig) -> Iterator[None]:
        self._rig = rig
        for card in self._rig.state.cards[:4]:
            card.memory, card.reserved = 768 * MIB, 32 * MIB
        small_contexts(self._rig)
        self._made: list[CardBench] = []
        self._place = tmp_path
        yield
        for bench in self._made:
            bench.close()

    def make_bench(self) -> AgentBench:
        bench = CardBench(self._place, self._rig)
        self._made.append(bench)
        bench.open()
        return bench

    def torn_down(self, bench: AgentBench) -> TornDown:
        found = super().torn_down(bench)
        assert not self._rig.dirty(0)
        assert not any(row.taken and row.contexts[0] for row in self._rig.state.processes)
        assert found.parked == any(row.taken and row.state == CHECKPOINTED for row in self._rig.state.processes)
        return found


USES: Final = """
import json, sys
from sublet.node.agent.nvml import Nvml
print(json.dumps([[use.pid, use.bytes] for use in Nvml.open().read(sys.argv[1]).processes]))
"""
LARGE: Final = 8 * GIB
"""Four seconds of copying, of which the test waits for none."""


def test_no_copy_is_begun_that_does_not_fit_into_the_time_that_is_left(rig: Rig, tmp_path: Path) -> None:
    """What had 80 GB was killed in the middle of the copy, neither parked nor saved: now it has that time to save."""
    office, bench = ParkingConformance(), CardBench(tmp_path, rig)
    office.settle_s = 60.0
    state_asked = rig.trouble("cuCheckpointProcessGetState")
    try:
        bench.open()
        rig.card(0).context = LARGE
        office.grant(bench, A, E1)
        bench.work(A, E1)
        card = rig.card(0).name
        found = run_on(rig, USES, card)
        assert sum(amount for _, amount in found) > LARGE
        uses = tuple(CardUse(card=card, pid=pid, bytes=amount) for pid, amount in found)
        bench.tell(ListProcesses(uses=uses))
        office.set_aside(bench, amount=2 * LARGE)
        office.end_and_park(bench, grace_s=3)
        assert not office.torn_down(bench).parked
        assert state_asked.met == 0, "what is there was copied in part"
        assert not rig.dirty(0)
    finally:
        bench.close()
