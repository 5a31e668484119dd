"""An office whose machine has (pretended) cards: the books know who is on them, and whether they are well."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from sublet.engines import local
from sublet.node.agent.health import Cards
from sublet.node.agent.inventory import machine_inventory
from sublet.node.agent.nvml import Nvml, survey
from sublet.node.agent.rehearsal import Rehearsal
from sublet.values import GIB, ResourceId
from tests.traces import PATIENCE_S
from tests.unit.node.agent.fake_nvml import FakeCard, FakeNvml, uuid_of

FIRST = ResourceId(f"local/{uuid_of(0)}")


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - what is waited for are the books
            await asyncio.sleep(0.01)


def test_the_books_know_who_is_on_a_card_and_that_it_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(0)
    library = FakeNvml([card])
    inventory = machine_inventory(tmp_path, None, found=survey(library))
    watched = functools.partial(Cards, open_driver=lambda: Nvml.open(library))
    monkeypatch.setattr(local, "machine_inventory", lambda home, gpus, **_: inventory)
    monkeypatch.setattr(local, "Cards", watched)

    async def untried(_cards: object, _caps: object) -> list[Rehearsal]:
        return []

    monkeypatch.setattr(local, "rehearse_all", untried)
    monkeypatch.setattr(local, "shows_pids", lambda _tried: True)
    monkeypatch.setattr("sublet.node.agent.health.LOOK_EVERY_NS", 50_000_000)
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path))
    card.used, card.processes = GIB, {os.getpid(): GIB}

    async def play() -> None:
        office = local.Office(tmp_path)
        await office.start()
        try:
            record = office.driver.ledger.state.resources[FIRST]
            await until(lambda: record.foreign is not None)
            assert record.foreign is not None
            assert str(os.getpid()) in record.foreign.detail
            assert office._cards is not None
            (supervisor, *_) = tuple(await office._cards._processes(office._cards._uses(), let_go=False))
            card.processes = {supervisor: GIB}  # ours, and under no lease: memory is counted, nobody is named
            await until(lambda: record.foreign is not None and str(os.getpid()) not in record.foreign.detail)
            assert "beyond what their leases have" in record.foreign.detail
            card.broken = pynvml.NVML_ERROR_GPU_IS_LOST
            await until(lambda: "lost" in record.detail)
        finally:
            await office.close()

    asyncio.run(play())
    assert library.opened == 0
