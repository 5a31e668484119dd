"""Probes once, at an office's start, whether guests on this machine's cards can be suspended.

The trial is a program of its own (``devices.suspend --probe``), since this process must never touch CUDA: it suspends
and resumes a small process that has memory on a card, and says what that came to. Only what was seen to work is
offered. A part of a card (MIG) is never asked: the driver does not suspend there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sublet.node.agent.inventory import card_of
from sublet.node.agent.starting import supervisor_environment
from sublet.values import Suspend
from sublet.wire.orders import Inventory
from sublet.wire.zygote import python_argv

PROBE_S: Final = 90.0
"""A driver takes its time to come up; after that nothing is offered."""
PROGRAM: Final = "sublet.devices.suspend"


async def probe_cards(inventory: Inventory, argv: Sequence[str] | None = None) -> Inventory:
    """The inventory with what may be offered; the same where there is no card to try."""
    if not any(card_of(device) and not device.partition for device in inventory.devices):
        return inventory
    return with_ability(inventory, await ability(argv))


def with_ability(inventory: Inventory, can: Suspend) -> Inventory:
    """Each whole card can do this."""
    devices = [
        replace(device, suspend=can) if card_of(device) and not device.partition else device
        for device in inventory.devices
    ]
    return replace(inventory, devices=tuple(devices))


async def ability(argv: Sequence[str] | None = None) -> Suspend:
    """What was seen to work."""
    program = argv or python_argv(sys.executable, PROGRAM, "--probe")
    try:
        process = await asyncio.create_subprocess_exec(
            *program,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=supervisor_environment(),  # the supervisor suspends, and sees all cards whatever this process may see
        )
    except OSError:
        return Suspend.NONE
    try:
        said, _ = await asyncio.wait_for(process.communicate(), PROBE_S)
        return Suspend(json.loads(said)["suspend"])
    except (TimeoutError, ValueError, KeyError, TypeError):
        return Suspend.NONE
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
