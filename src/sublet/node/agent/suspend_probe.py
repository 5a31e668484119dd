"""Probes once, at an office's start, whether guests on this machine's cards can be suspended.

The trial is a program of its own (``devices.suspend --probe``), since this process must never touch CUDA: it suspends
and resumes a small process that has memory on a card, and says what that came to. Each model is tried, with a process
as guests of tenant local are, and with one behind the walls of other tenants' guests, which has the files of one card
only and so goes on there or nowhere. Only what was seen to work is offered. A part of a card (MIG) is never asked: the
driver does not suspend there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from sublet.lazy_dataclass import dataclass
from sublet.node.agent.inventory import card_of
from sublet.node.agent.starting import supervisor_environment
from sublet.values import Suspend
from sublet.wire.cards import device_nodes
from sublet.wire.orders import Device, Inventory
from sublet.wire.zygote import python_argv

PROBE_S: Final = 90.0
"""A driver takes its time to come up; after that nothing is offered."""
PROGRAM: Final = "sublet.devices.suspend"
WALLED: Final = "sublet.node.sandbox.trial"


@dataclass(frozen=True, slots=True)
class Ability:
    """What was seen to work with cards of one model."""

    local: Suspend = Suspend.NONE
    """For guests of tenant local."""
    walled: Suspend = Suspend.NONE
    """For guests of other tenants."""
    why: str = ""
    """Why guests of tenant local can do no more, as the trial said; empty if it said nothing."""
    walled_why: str = ""
    took_ns: int = 0


class _Answer(NamedTuple):
    """Of one trial."""

    suspend: Suspend
    why: str


async def probe_cards(inventory: Inventory, argv: Sequence[str] | None = None, busy: Collection[str] = ()) -> Inventory:
    """The inventory with what may be offered; the same where there is no card to try. ``busy``: cards that others have,
    which are tried last."""
    models: dict[str, list[Device]] = {}
    for device in inventory.devices:
        if card_of(device) and not device.partition:
            models.setdefault(device.model, []).append(device)
    tried = []
    for cards in models.values():
        cards.sort(key=lambda device: card_of(device) in busy)
        tried.append(ability([card_of(device) for device in cards], cards[0].nodes, argv))
    can = dict(zip(models, await asyncio.gather(*tried), strict=True))
    devices = [
        replace(device, suspend=can[device.model].local, suspend_walled=can[device.model].walled)
        if card_of(device) and not device.partition
        else device
        for device in inventory.devices
    ]
    return replace(inventory, devices=tuple(devices))


async def ability(cards: Sequence[str], nodes: Sequence[str], argv: Sequence[str] | None = None) -> Ability:
    """What was seen to work with these cards of one model; ``nodes``: the device files of the first of them. One after
    the other: a card may let only one process in at a time."""
    began_ns = time.monotonic_ns()
    local = await _tried(cards, (), argv)
    walled = _Answer(Suspend.NONE, "")
    if local.suspend is not Suspend.NONE and device_nodes([nodes]):
        walled = await _tried(cards[:1], python_argv(sys.executable, WALLED, cards[0], ",".join(nodes)), argv)
    took_ns = time.monotonic_ns() - began_ns
    return Ability(local.suspend, walled.suspend, local.why, walled.why, took_ns)


async def _tried(cards: Sequence[str], behind: Sequence[str], argv: Sequence[str] | None) -> _Answer:
    program = argv or python_argv(sys.executable, PROGRAM, "--probe", ",".join(cards), *behind)
    try:
        process = await asyncio.create_subprocess_exec(
            *program,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=supervisor_environment(),  # the supervisor suspends, and sees all cards whatever this process may see
        )
    except OSError as error:
        return _Answer(Suspend.NONE, f"the trial could not be started ({error.strerror})")
    try:
        output, _ = await asyncio.wait_for(process.communicate(), PROBE_S)
        found = json.loads(output)
        return _Answer(Suspend(found["suspend"]), str(found.get("why", "")))
    except TimeoutError:
        return _Answer(Suspend.NONE, f"the driver did not answer in {PROBE_S:.0f} s")
    except (ValueError, KeyError, TypeError):
        return _Answer(Suspend.NONE, "the trial ended without an answer")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
