"""What is parked has left its cards, and has room in memory for what it had there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sublet.node.supervisor.parking import Parker
from sublet.values import GIB, Kind, ResourceId
from sublet.wire.cards import UNSEEN, CardUse
from sublet.wire.orders import Part

CARD, OTHER = "GPU-0", "GPU-1"
PART = Part(resource=ResourceId(f"n/{CARD}"), kind=Kind.GPU, amount=8 * GIB)
PAGE = 4096


class Suspending:
    """Suspends these and passes the others over, as a driver does with what it does not tell about."""

    def __init__(self, *done: int) -> None:
        self.done = done
        self.resumed: list[Sequence[int]] = []

    def suspend(self, pids: Sequence[int], timeout_ms: int, told: Callable[[Mapping[str, Any]], None]) -> None:
        told({"done": list(self.done)})

    def resume(self, pids: Sequence[int], pairs: Sequence[tuple[str, str]], told: object) -> None:
        self.resumed.append(pids)


class Stage:
    """One guest with two processes on a leased card."""

    def __init__(self, *done: int) -> None:
        guest: Any = SimpleNamespace(tree=1, state=None, usage=lambda: SimpleNamespace(memory_bytes=0))
        stats = [SimpleNamespace(pid=pid, rss_pages=1) for pid in (7, 8)]
        trees: Any = SimpleNamespace(look=lambda _: SimpleNamespace(of=lambda _: stats))
        loop: Any = SimpleNamespace(now_ns=lambda: 0)
        self.suspending = Suspending(*done)
        self.parker = Parker(loop, trees, SimpleNamespace(), self.suspending)  # type: ignore[arg-type]
        self.stopped: list[object] = []
        self.failed: list[str] = []
        parker: Any = self.parker
        parker._caches = SimpleNamespace(free=lambda guests, within_s, then: then())
        parker._standstill = SimpleNamespace(go=lambda guest: None)
        parker._stop = self.stopped.append
        self.tenancy: Any = SimpleNamespace(
            lease="l", parts=(PART,), suspended=(), parking=True, running=lambda: iter([guest])
        )

    def suspend(self) -> None:
        leaving: Any = SimpleNamespace(tenancy=self.tenancy, until_ns=0, failed=self.failed.append)
        self.parker._suspend(leaving, 10**9)


def test_a_process_that_the_driver_passed_over_keeps_its_guest_from_being_parked() -> None:
    """It was declared parked with its memory still on the card, which then never came clean."""
    stage = Stage(7)
    stage.parker.uses = (CardUse(card=CARD, pid=8, bytes=GIB), CardUse(card=OTHER, pid=7, bytes=GIB))
    stage.suspend()
    assert stage.failed == ["process 8 has memory on a card, and the driver did not take it off"]
    assert stage.suspending.resumed == [(7,)], "what had been taken off goes on"
    assert not stage.stopped


def test_a_process_without_memory_on_a_card_needs_no_driver() -> None:
    stage = Stage(7)
    stage.parker.uses = (CardUse(card=CARD, pid=7, bytes=GIB), CardUse(card=OTHER, pid=8, bytes=GIB))
    stage.suspend()
    assert not stage.failed
    assert len(stage.stopped) == 1


def test_where_nobody_tells_whose_memory_it_is_all_of_the_lease_may_have_to_be_kept() -> None:
    """In a container it counted as nothing: the copy of a card was then too much for the machine."""
    stage = Stage()
    assert stage.parker._used(stage.tenancy) == 2 * PAGE
    stage.parker.uses = (CardUse(card=CARD, pid=UNSEEN, bytes=3 * GIB), CardUse(card=OTHER, pid=UNSEEN, bytes=GIB))
    assert stage.parker._used(stage.tenancy) == 2 * PAGE + 3 * GIB
    stage.parker.uses = (CardUse(card=CARD, pid=UNSEEN, bytes=80 * GIB),)
    assert stage.parker._used(stage.tenancy) == 2 * PAGE + 8 * GIB, "no more than it leased"
    stage.parker.uses = (CardUse(card=CARD, pid=8, bytes=GIB),)
    assert stage.parker._used(stage.tenancy) == 2 * PAGE + GIB
