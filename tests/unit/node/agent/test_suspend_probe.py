"""What was seen to work is offered, and nothing else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sublet.node.agent import suspend_probe
from sublet.node.agent.suspend_probe import ability, probe_cards
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


def test_guests_behind_walls_are_asked_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their process is another user's, in a process namespace, and has the files of one card only."""
    monkeypatch.setattr(suspend_probe, "device_nodes", lambda leased: tuple(f"/dev/{name}" for name in leased[0]))
    card = replace(CARD, nodes=("nvidia3",))
    says = "import json, sys; print(json.dumps({'suspend': 'same_device' if sys.argv[1:] else 'same_type'}))"
    program = (sys.executable, "-c", says)

    async def tried(cards: Sequence[str], behind: Sequence[str], argv: Sequence[str] | None) -> suspend_probe._Answer:
        asked.append((tuple(cards), tuple(behind)))
        return await really([*cards], behind, (*program, *behind))

    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    really = suspend_probe._tried
    monkeypatch.setattr(suspend_probe, "_tried", tried)
    inventory = Inventory(node=NodeId("n"), domain="n", devices=(card, CARD))
    first, second = asyncio.run(probe_cards(inventory)).devices
    assert (first.suspend, first.suspend_walled) == (Suspend.SAME_TYPE, Suspend.SAME_DEVICE)
    assert (second.suspend, second.suspend_walled) == (Suspend.SAME_TYPE, Suspend.SAME_DEVICE), "of the same model"
    (_, plainly), (cards, behind) = asked
    assert (plainly, cards) == ((), ("GPU-1",))
    assert behind[-3:] == ("sublet.node.sandbox.trial", "GPU-1", "nvidia3")


def test_each_model_is_tried_and_cards_that_others_have_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    async def tried(cards: Sequence[str], behind: Sequence[str], argv: Sequence[str] | None) -> suspend_probe._Answer:
        asked.append(tuple(cards))
        return suspend_probe._Answer(Suspend.NONE if "GPU-9" in cards else Suspend.SAME_DEVICE, "")

    monkeypatch.setattr(suspend_probe, "_tried", tried)
    cards = [replace(CARD, id=ResourceId(f"n/GPU-{number}"), model=model) for number, model in enumerate("aba")]
    other = replace(CARD, id=ResourceId("n/GPU-9"), model="c")
    inventory = Inventory(node=NodeId("n"), domain="n", devices=(*cards, other))
    probed = asyncio.run(probe_cards(inventory, busy={"GPU-0"}))
    assert asked == [("GPU-2", "GPU-0"), ("GPU-1",), ("GPU-9",)]
    assert [device.suspend for device in probed.devices] == [*[Suspend.SAME_DEVICE] * 3, Suspend.NONE]
    assert {device.suspend_walled for device in probed.devices} == {Suspend.NONE}, "their device files are not known"


def test_without_a_card_nothing_is_tried() -> None:
    """Nor is anything changed."""
    assert found(HOST, CORES, says='{"suspend": "none"}') == [Suspend.SAME_TYPE, Suspend.NONE]


def test_a_program_that_is_not_there_offers_nothing() -> None:
    inventory = Inventory(node=NodeId("n"), domain="n", devices=(CARD,))
    probed = asyncio.run(probe_cards(inventory, ("/no/such/program",)))
    assert probed.devices[0].suspend is Suspend.NONE


def test_why_no_more_can_be_offered_is_what_the_trial_said() -> None:
    def why(says: str) -> str:
        return asyncio.run(ability(["GPU-1"], (), (sys.executable, "-c", f"print({says!r})"))).why

    assert why('{"suspend": "none", "why": "operation not supported"}') == "operation not supported"
    assert why("[]") == "the trial ended without an answer"
    assert asyncio.run(ability(["GPU-1"], (), ("/no/such/program",))).why.startswith("the trial could not be started (")
