"""Each card is tried out in a process of its own: what happens to one of them is told of that card alone."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sublet.node.agent.rehearsal import AT_ONCE, Rehearsal, offered, rehearse_each, shows_pids
from sublet.values import GIB, Kind, NodeId, ResourceId
from sublet.wire.cards import VISIBLE
from sublet.wire.orders import Device, Inventory

LATE_S = 0.4


def tried(card: str) -> Rehearsal:
    """As a driver may behave."""
    if card == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if card == "ends":
        os._exit(3)
    if card == "raises":
        raise ValueError("a mistake")
    if card == "hangs":
        time.sleep(600)
    os.write(1, b"not an answer")
    return Rehearsal(card=card, do=os.environ[VISIBLE], cuda=os.getpid())


def test_what_becomes_of_one_process_is_told_of_its_card(capfd: pytest.CaptureFixture[str]) -> None:
    cards = ["first", "killed", "ends", "raises", "hangs", *map(str, range(AT_ONCE)), "last"]
    before = os.environ.get(VISIBLE)
    found = rehearse_each(cards, tried, longest_s=LATE_S)
    assert [one.card for one in found] == cards
    said = {one.card: one.failed for one in found if one.failed}
    assert said == {
        "killed": "the program that tried it out ended with signal 9",
        "ends": "the program that tried it out ended with status 3",
        "raises": "the program that tried it out ended with status 1",
        "hangs": "the driver did not answer in 0 s",
    }
    well = [one for one in found if not one.failed]
    assert [one.do for one in well] == [one.card for one in well], "each process is shown its card"
    assert len({one.cuda for one in well} - {os.getpid()}) == len(well)
    assert os.environ.get(VISIBLE) == before
    assert capfd.readouterr().out == ""


def test_no_card_takes_no_process() -> None:
    assert rehearse_each([], tried) == []
    assert shows_pids([]) is None


def test_a_card_that_guests_of_other_tenants_cannot_use_is_lent_and_says_so() -> None:
    """To tenant local; the supervisor refuses the others."""
    cards = [Device(id=ResourceId(f"n/GPU-{number}"), kind=Kind.GPU, capacity=GIB) for number in range(3)]
    tried = [Rehearsal(card="GPU-0", walled="why"), Rehearsal(card="GPU-1"), Rehearsal(card="GPU-2", failed="no")]
    found = offered(Inventory(node=NodeId("n"), domain="n", devices=tuple(cards)), tried)
    assert [(device.id, device.walled_trouble) for device in found.devices] == [("n/GPU-0", "why"), ("n/GPU-1", "")]
