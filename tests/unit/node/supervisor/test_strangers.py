"""Processes that run here and hide whose they are: they are ended, and until they are gone nothing counts as clean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sublet.lease.hardware import NotYet
from sublet.node.processes.guests import GuestTable
from sublet.node.supervisor.real_hardware import LOOK_AGAIN_NS, RealHardware
from sublet.values import Epoch, LeaseId, ResourceId


class Trees:
    """What is seen of all processes: so many that nobody here knows."""

    def __init__(self) -> None:
        self.there = 0
        self.killed = 0

    def scan(self, closely: object) -> Any:
        return SimpleNamespace(strangers=[object()] * self.there, of=lambda tree: [])

    def kill_strangers(self) -> None:
        self.killed += 1


def test_nothing_is_verified_while_a_stranger_runs() -> None:
    """It may hold the memory of the device that would be given to the next."""
    trees = Trees()
    guests: Any = SimpleNamespace(_trees=trees, _on_look=lambda look: None, strangers=0)
    stores = SimpleNamespace(remaining=lambda resource, lease, epoch: "")
    premises: Any = SimpleNamespace(
        _guests=guests, _of=lambda lease, epoch: (), _stores=stores, _kills={}, _metered={}, _saved_of={}.get
    )

    def look() -> object:
        GuestTable._see_all(guests, (), ())
        return RealHardware.verify(premises, ResourceId("n/gpu0"), LeaseId("l"), Epoch(1, 1), 7)

    assert not isinstance(look(), NotYet)
    trees.there = 2
    verdict = look()
    assert isinstance(verdict, NotYet)
    assert (verdict.what, verdict.again_ns) == ("2 processes run here and hide whose they are", 7 + LOOK_AGAIN_NS)
    assert trees.killed == 1
    trees.there = 0
    assert not isinstance(look(), NotYet)
