"""The watch over cards in an office: guests are no strangers, one report for each device, nothing without cards."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from sublet import background
from sublet.background import SHORTAGES
from sublet.errors import Disconnected
from sublet.node.agent.health import FIRST_S, HELD_NS, SOON_NS, Cards, has_cards
from sublet.node.agent.inventory import machine_inventory, parse_host_gpus
from sublet.node.agent.nvml import CardReading, Nvml, survey
from sublet.values import GIB, NS_PER_S, Epoch, LeaseId, NodeId, ResourceId
from sublet.wire.cards import UNSEEN, CardUse
from sublet.wire.orders import Fault, Foreign, Held, Inventory, Parkable, Report
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml, uuid_of

FIRST = ResourceId(f"local/{uuid_of(0)}")


class Desk:
    """One card, and an office that writes down what it hears."""

    def __init__(self, folder: Path, ours: Callable[[], tuple[int, ...]] = lambda: ()) -> None:
        self.card = FakeCard(0)
        self.library = FakeNvml([self.card])
        self.heard: list[Report] = []
        self.ended: list[str] = []
        self.uses: list[CardUse] = []
        self.leased = 0
        self.now_ns = 0
        self.inventory = machine_inventory(folder, None, found=survey(self.library))

        self.lets_go = False
        self.told_to_let_go: list[bool] = []

        async def processes(uses: tuple[CardUse, ...], *, let_go: bool) -> tuple[int, ...]:
            self.uses += uses
            self.told_to_let_go.append(let_go)
            return ours()

        self.cards = Cards(
            self.inventory,
            processes=processes,
            leased=lambda resource: self.leased,
            report=self.heard.append,
            now_ns=lambda: self.now_ns,
            open_driver=lambda: Nvml.open(self.library),
            sees_processes=True,
            lets_go=lambda: self.lets_go,
            die=self.ended.append,
        )

    async def look(self) -> list[Report]:
        """A whole look: asked, answered, judged. No time passes before the answer, or it would count as none."""
        self.heard.clear()
        self.now_ns += 10 * NS_PER_S
        async with asyncio.timeout(60):
            while not self.heard:
                await self.cards.turn()
                await asyncio.sleep(0.002)
        return list(self.heard)


def test_a_guest_is_no_stranger_and_another_process_is(tmp_path: Path) -> None:
    ours: list[int] = [4711]
    desk = Desk(tmp_path, lambda: tuple(ours))
    desk.card.processes = {4711: 2 * GIB}
    desk.card.used, desk.leased = 2 * GIB, 2 * GIB

    async def play() -> None:
        (first,) = await desk.look()
        assert first == Foreign(node=NodeId("local"), resource=FIRST)
        desk.card.processes[4712] = GIB
        desk.card.used += GIB
        (second,) = await desk.look()
        assert isinstance(second, Foreign)
        assert (second.amount, second.blocks) == (GIB, True)
        await desk.cards.close()

    asyncio.run(play())
    assert desk.library.opened == 0


def test_an_office_begins_when_it_has_seen_its_cards_without_its_own_rehearsal(tmp_path: Path) -> None:
    """The first look found the memory of the rehearsal that had just ended, and the first request was refused."""
    desk = Desk(tmp_path)
    desk.card.used = GIB

    async def play() -> None:
        seen = asyncio.create_task(desk.cards.seen())
        first = await desk.look()
        assert [report.blocks for report in first if isinstance(report, Foreign)] == [True]
        assert not seen.done()
        desk.card.used = 0
        desk.heard.clear()
        async with asyncio.timeout(60):
            while not desk.heard:
                desk.now_ns += SOON_NS  # not a whole look's time later
                await desk.cards.turn()
                await asyncio.sleep(0.002)
        assert [report.blocks for report in desk.heard if isinstance(report, Foreign)] == [False]
        await seen
        await desk.cards.close()

    asyncio.run(play())


@pytest.mark.parametrize("who", ["named", "not named", "slow"])
def test_no_stranger_and_no_slow_driver_keeps_an_office_from_beginning(who: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.card.used, desk.card.processes = GIB, {99: GIB} if who == "named" else {}

    async def play() -> None:
        began_s = asyncio.get_running_loop().time()
        if who != "slow":
            (found,) = await desk.look()
            assert isinstance(found, Foreign)
            assert found.blocks
            assert desk.cards.watch.has_seen == (who == "named")
        async with asyncio.timeout(60):
            await desk.cards.seen()
        took_s = asyncio.get_running_loop().time() - began_s
        assert (took_s < FIRST_S) == (who == "named")
        await desk.cards.close()

    asyncio.run(play())


def test_while_a_card_may_have_to_be_reset_the_driver_is_open_only_for_a_look(tmp_path: Path) -> None:
    """`nvidia-smi -r`, which we advise, said "in use by another client": by us."""
    desk = Desk(tmp_path)

    async def play() -> None:
        await desk.look()
        assert desk.library.opened == 1
        desk.lets_go = True
        desk.card.processes, desk.card.used = {99: GIB}, GIB
        await desk.look()
        assert desk.library.opened == 0
        assert desk.told_to_let_go[-1]
        desk.lets_go = False
        desk.card.processes, desk.card.used = {}, 0
        await desk.look()
        assert desk.library.opened == 1
        await desk.cards.close()

    asyncio.run(play())


def test_who_was_ours_at_the_last_look_still_counts(tmp_path: Path) -> None:
    """It may have ended between the driver's answer and ours."""
    known = [(4711,), (), ()]
    desk = Desk(tmp_path, lambda: known.pop(0) if known else ())
    desk.card.processes = {4711: GIB}
    desk.card.used = desk.leased = GIB

    async def play() -> None:
        await desk.cards.turn()
        desk.cards.watch.health.clear()
        await desk.cards._learn()
        assert 4711 in desk.cards._own(FIRST).pids
        await desk.cards._learn()
        assert 4711 not in desk.cards._own(FIRST).pids
        await desk.cards.close()

    asyncio.run(play())


def test_another_office_and_a_stranger_are_one_report(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.card.processes = {99: GIB}
    desk.card.used = GIB

    async def play() -> None:
        await desk.look()
        desk.heard.clear()
        desk.cards.on_report(
            Foreign(node=NodeId("local"), resource=FIRST, amount=5, blocks=True, detail="office of bo")
        )
        (said,) = desk.heard
        assert isinstance(said, Foreign)
        assert said.amount == GIB
        assert "office of bo" in said.detail
        assert "process 99" in said.detail
        await desk.cards.close()

    asyncio.run(play())


def test_other_reports_pass_and_a_lost_card_is_a_fault(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def play() -> None:
        held = Held(node=NodeId("local"), lease=None, epoch=None, number=1)  # type: ignore[arg-type]
        desk.cards.on_report(held)
        assert desk.heard == [held]
        desk.card.broken = pynvml.NVML_ERROR_GPU_IS_LOST
        assert any(isinstance(one, Fault) for one in await desk.look())
        await desk.cards.close()

    asyncio.run(play())


def test_without_a_supervisor_the_last_answer_stands(tmp_path: Path) -> None:
    def away() -> tuple[int, ...]:
        raise Disconnected("it has ended")

    desk = Desk(tmp_path, away)

    async def play() -> None:
        assert await desk.look()
        await desk.cards.close()

    asyncio.run(play())


def test_nothing_is_watched_without_cards(tmp_path: Path) -> None:
    assert not has_cards(machine_inventory(tmp_path, parse_host_gpus("1x1GiB")))
    assert not has_cards(Inventory(node=NodeId("local"), domain="local"))
    assert has_cards(Desk(tmp_path).inventory)


def test_what_each_process_has_is_handed_on_once_for_each_look(tmp_path: Path) -> None:
    """So that who has more than its lease is ended. Where pids say nothing, nobody is; but what is parked needs room in
    memory for what it may have on the card, which was counted as nothing."""
    desk = Desk(tmp_path, lambda: (4711,))
    desk.card.processes = {4711: GIB, 4712: None}

    async def play() -> None:
        await desk.look()
        assert desk.uses == [CardUse(card=uuid_of(0), pid=4711, bytes=GIB)], "with this look, not with the next"
        for _ in range(3):
            await desk.cards.turn()
        await desk.cards.close()

    asyncio.run(play())
    assert desk.uses == [CardUse(card=uuid_of(0), pid=4711, bytes=GIB)]
    (health,) = desk.cards.watch.health.values()
    desk.cards.watch.judge([dataclasses.replace(health.reading)], 0)
    assert desk.cards._uses() == (CardUse(card=uuid_of(0), pid=4711, bytes=GIB),), "also where nothing has changed"
    desk.cards.watch.sees_processes = False
    desk.cards.watch.judge([CardReading(uuid=uuid_of(0), used=3 * GIB)], 0)
    assert desk.cards._uses() == (CardUse(card=uuid_of(0), pid=UNSEEN, bytes=3 * GIB),)
    assert desk.cards._uses() == (), "each look once"


NEED = Parkable(node=NodeId("local"), lease=LeaseId("l-1"), epoch=Epoch(1, 2), amount=GIB)


def test_what_guests_need_is_told_once_the_driver_was_asked_what_they_have_now(tmp_path: Path) -> None:
    """It was what they had up to five seconds ago; who had taken more since ended unparked."""
    desk = Desk(tmp_path, lambda: (4711,))
    desk.card.processes, desk.leased = {4711: GIB}, 4 * GIB
    desk.card.used = GIB

    async def play() -> None:
        await desk.look()
        desk.heard.clear()
        desk.uses.clear()
        desk.card.processes = {4711: 3 * GIB}
        desk.card.used = 3 * GIB
        desk.cards.on_report(NEED)
        assert desk.heard == [], "as of the look before"
        async with asyncio.timeout(60):
            while not desk.uses:
                desk.now_ns += 1  # nothing but the report brings the next look about
                await desk.cards.turn()
                await asyncio.sleep(0.002)
        assert desk.uses == [CardUse(card=uuid_of(0), pid=4711, bytes=3 * GIB)]
        newer = dataclasses.replace(NEED, amount=3 * GIB)
        desk.cards.on_report(newer)
        assert desk.heard == [newer]
        desk.now_ns += NS_PER_S
        desk.cards.on_report(newer)
        assert desk.heard == [newer], "each time it is said again it is counted anew"
        await desk.cards.close()

    asyncio.run(play())


def test_where_nothing_is_on_a_card_or_the_driver_hangs_it_is_told_as_it_is(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    async def play() -> None:
        await desk.look()
        desk.heard.clear()
        desk.cards.on_report(NEED)
        async with asyncio.timeout(60):
            while NEED not in desk.heard:
                desk.now_ns += 1
                await desk.cards.turn()
                await asyncio.sleep(0.002)
        desk.heard.clear()
        desk.cards.on_report(NEED)
        desk.now_ns += HELD_NS - 1
        desk.cards.on_report(NEED)
        assert desk.heard == []
        desk.now_ns += 1
        desk.cards.on_report(NEED)
        assert desk.heard == [NEED], "no look came"
        none = dataclasses.replace(NEED, amount=0)
        desk.cards.on_report(none)
        assert desk.heard == [NEED, none], "without guests there is nothing to count"
        await desk.cards.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    "error",
    [*(OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)), MemoryError(), KeyError("a mistake")],
    ids=repr,
)
def test_a_look_that_fails_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))
    left = [3]

    def ours() -> tuple[int, ...]:
        if left[0]:
            left[0] -= 1
            raise error
        return ()

    desk = Desk(tmp_path, ours)

    async def play() -> None:
        desk.now_ns = NS_PER_S
        desk.cards.start()
        async with asyncio.timeout(60):
            while not desk.heard:  # noqa: ASYNC110 - what is waited for is no event
                await asyncio.sleep(0.005)
        assert desk.heard == [Foreign(node=NodeId("local"), resource=FIRST)]
        assert desk.ended == []
        await desk.cards.close()

    asyncio.run(play())
