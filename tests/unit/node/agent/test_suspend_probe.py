"""What was seen to work is offered, and nothing else."""

from __future__ import annotations

import asyncio
import sys

import pytest

from sublet.node.agent.suspend_probe import probe_cards
from sublet.values import GIB, Kind, NodeId, ResourceId, Suspend
from sublet.wire.orders import Device, Inventory

CARD = Device(id=ResourceId("n/GPU-1"), kind=Kind.GPU, capacity=GIB)
PART = Device(id=ResourceId("n/MIG-1"), kind=Kind.GPU, capacity=GIB, partition=True)
HOST = Device(id=ResourceId("n/gpu0"), kind=Kind.GPU, capacity=GIB, host=True, suspend=Suspend.SAME_TYPE)
CORES = Device(id=ResourceId("n/cpu"), kind=Kind.CPU, capacity=8)


def found(*devices: Device, says: str = "") -> list[Suspend]:
    inventory = Inventory(node=NodeId("n"), domain="n", devices=devices)
    probed = asyncio.run(probe_cards(inventory, (sys.executable, "-c", f"print({says!r})")))
    return [device.suspend for device in probed.devices]


@pytest.mark.parametrize(
    ("says", "ability"),
    [
        ('{"suspend": "same_type"}', Suspend.SAME_TYPE),
        ('{"suspend": "same_device"}', Suspend.SAME_DEVICE),
        ('{"suspend": "none"}', Suspend.NONE),
        ('{"suspend": "always"}', Suspend.NONE),
        ("[]", Suspend.NONE),
        ("", Suspend.NONE),
    ],
)
def test_a_card_can_do_what_its_probe_says(says: str, ability: Suspend) -> None:
    """And its parts, cores and host devices are what they were."""
    assert found(CARD, PART, HOST, CORES, says=says) == [ability, Suspend.NONE, Suspend.SAME_TYPE, Suspend.NONE]


def test_without_a_card_nothing_is_tried() -> None:
    """Nor is anything changed."""
    assert found(HOST, CORES, says='{"suspend": "none"}') == [Suspend.SAME_TYPE, Suspend.NONE]


def test_a_program_that_is_not_there_offers_nothing() -> None:
    inventory = Inventory(node=NodeId("n"), domain="n", devices=(CARD,))
    probed = asyncio.run(probe_cards(inventory, ("/no/such/program",)))
    assert probed.devices[0].suspend is Suspend.NONE
