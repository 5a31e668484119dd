"""What is parked has left its cards, and has room in memory for what it had there."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.node.processes.procs import ProcessInstance
from sublet.node.supervisor.parking import Caches, GuestFreezer, Parker
from sublet.values import GIB, NS_PER_S, Kind, ResourceId
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
        self.lock_ms = 0
        self.copy_s = 0.0
        self.groups: Sequence[Sequence[int]] = ()
        self.asked: list[Sequence[int]] = []

    def suspend(
        self,
        pids: Sequence[int],
        timeout_ms: int,
        told: Callable[[Mapping[str, Any]], None],
        *,
        copy_s: float,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self.asked.append(pids)
        self.lock_ms, self.copy_s, self.groups = timeout_ms, copy_s, groups
        told({"done": list(self.done)})

    def resume(self, pids: Sequence[int], pairs: Sequence[tuple[str, str]], told: object) -> None:
        self.resumed.append(pids)


class Stage:
    """One guest with two processes on a leased card."""

    def __init__(self, *done: int) -> None:
        usage = SimpleNamespace(memory_bytes=0)
        spec = SimpleNamespace(device=-1)
        self.guest: Any = SimpleNamespace(tree=1, state=None, spec=spec, usage=lambda: usage, volumes={})
        stats = [SimpleNamespace(pid=pid, rss_pages=1) for pid in (7, 8)]
        trees: Any = SimpleNamespace(scan=lambda _: SimpleNamespace(of=lambda _: stats))
        self.now_ns = 0
        self.later: list[Callable[[], None]] = []
        self.loop: Any = SimpleNamespace(now_ns=lambda: self.now_ns, after=lambda _, then: self.later.append(then))
        self.is_unsaved = True
        self.suspending = Suspending(*done)
        self.parker = Parker(self.loop, trees, SimpleNamespace(), self.suspending, lambda guest, why: None)  # type: ignore[arg-type]
        self.stopped: list[object] = []
        self.failed: list[str] = []
        parker: Any = self.parker
        parker._caches = SimpleNamespace(free=lambda guests, within_s, then: then())
        parker._freezer = SimpleNamespace(thaw=lambda guest: True)
        parker._stop = self.stopped.append
        self.tenancy: Any = SimpleNamespace(
            lease="l",
            parts=(PART,),
            suspended=(),
            parking=True,
            notice="taken",
            is_unsaved=lambda: self.is_unsaved,
            running=lambda: iter([self.guest]),
        )

    def leaving(self) -> Any:
        return SimpleNamespace(tenancy=self.tenancy, until_ns=0, failed=self.failed.append)

    def suspend(self, within_s: int = 30) -> None:
        self.parker._suspend(self.leaving(), within_s * NS_PER_S)


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


def test_most_of_the_time_is_for_copying_and_what_takes_longer_is_not_begun() -> None:
    """80 GB had 15 s for the copy, and their guest was killed in the middle of it: neither parked nor saved."""
    stage = Stage(7, 8)
    stage.parker.uses = (CardUse(card=CARD, pid=7, bytes=64 * GIB),)
    stage.suspend(within_s=62)
    assert not stage.failed
    assert (stage.suspending.lock_ms, stage.suspending.copy_s) == (5_000, 57.0)
    stage.suspend(within_s=33)
    assert (stage.suspending.lock_ms, stage.suspending.copy_s) == (1_000, 32.0)
    stage.suspend(within_s=31)
    assert stage.failed == ["64GiB on cards cannot be copied in the 31 s that are left"]


def test_what_saves_into_a_volume_is_waited_for_before_the_driver_is_asked() -> None:
    """A driver that fails in a guest takes along what was not saved: the trial came first, and the save too late."""
    stage = Stage(7, 8)
    stage.guest.volumes["v"] = 1
    stage.suspend()
    assert not stage.suspending.asked
    stage.later.pop()()
    assert not stage.suspending.asked
    stage.is_unsaved = False
    stage.later.pop()()
    assert stage.suspending.asked == [[7, 8]]


def test_a_save_is_waited_for_only_while_the_copy_does_not_need_the_time() -> None:
    stage = Stage(7, 8)
    stage.guest.volumes["v"] = 1
    stage.suspend()
    stage.now_ns = 5 * NS_PER_S
    stage.later.pop()()
    assert stage.suspending.asked, "one that takes longer"
    stage = Stage(7, 8)
    stage.guest.volumes["v"] = 1
    stage.parker.uses = (CardUse(card=CARD, pid=7, bytes=64 * GIB),)
    stage.suspend(within_s=36)
    assert not stage.later, "32 s for the copy, and up to 5 s for the work under way"


def test_without_a_volume_nothing_is_waited_for() -> None:
    stage = Stage(7, 8)
    stage.suspend()
    assert stage.suspending.asked


def test_the_processes_of_a_program_are_told_as_such() -> None:
    stage = Stage(7, 8)
    stage.suspend()
    assert stage.suspending.groups == [[7, 8]]


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


def no_descriptor(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("where", ["asking for caches", "looking for their processes", "looking again after the copy"])
def test_a_shortage_costs_the_parking_and_not_the_supervisor(where: str) -> None:
    """What these steps raised ended the supervisor, and with it the guests of all leases."""
    stage = Stage(7, 8)
    parker: Any = stage.parker
    parker._leaving[stage.tenancy.lease] = leaving = stage.leaving()
    if where == "asking for caches":
        parker._caches = Caches(stage.loop)
        stage.guest.visits, stage.guest.main_runs = SimpleNamespace(), True
    found = parker._trees.scan
    looks = {"asking for caches": 99, "looking for their processes": 1, "looking again after the copy": 3}[where]

    def look(*args: object) -> Any:
        nonlocal looks
        looks -= 1
        return no_descriptor() if looks < 0 else found(*args)

    parker._trees = SimpleNamespace(scan=look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socketpair", no_descriptor)
        parker._suspend(leaving, 30 * NS_PER_S)
        while stage.later:
            stage.later.pop(0)()
    if where == "asking for caches":
        assert stage.suspending.asked == [[7, 8]], "what they do not give back is copied along"
    else:
        assert [why.partition(" (")[0] for why in stage.failed] == ["the supervisor failed on it"]
        assert stage.tenancy.parking is False
        assert not parker._leaving


def test_guests_that_stand_still_go_on_once_there_is_a_descriptor_for_it() -> None:
    """To continue a process takes one. The error ended the supervisor; with a group it was not even seen, and the guest
    stood still for the rest of its lease."""
    stage = Stage()
    parker: Any = stage.parker
    sent: list[tuple[ProcessInstance, int]] = []
    first, second = ProcessInstance(7, 1), ProcessInstance(8, 1)
    tries = iter([True, False, True, True])

    def send(identity: ProcessInstance, number: int) -> bool:
        if next(tries):
            sent.append((identity, number))
            return True
        return bool(no_descriptor())

    thawed = iter([False, True])
    parker._freezer = freezer = GuestFreezer(SimpleNamespace(procs=SimpleNamespace(send=send)))  # type: ignore[arg-type]
    stage.guest.id, stage.guest.is_gone = "g", False
    stage.guest.tree = SimpleNamespace(group=SimpleNamespace(thaw=lambda: next(thawed)))
    freezer._frozen.add(stage.guest.id)
    freezer._stopped[stage.guest.id] = dict.fromkeys((first, second))
    parker._thaw(stage.guest)
    while stage.later:
        stage.later.pop(0)()
    assert sent == [(first, signal.SIGCONT), (second, signal.SIGCONT)]
    assert not freezer.is_going(stage.guest.id)


def test_a_guest_that_is_parked_again_is_not_set_going_by_an_earlier_attempt() -> None:
    stage = Stage()
    parker: Any = stage.parker
    parker._freezer = freezer = GuestFreezer(
        SimpleNamespace(procs=SimpleNamespace(send=no_descriptor), scan=lambda _: SimpleNamespace(of=lambda _: []))  # type: ignore[arg-type]
    )
    stage.guest.id, stage.guest.is_gone = "g", False
    stage.guest.tree = SimpleNamespace(group=None)
    freezer._stopped[stage.guest.id] = {ProcessInstance(7, 1): None}
    parker._thaw(stage.guest)
    (again,) = stage.later
    assert freezer.is_still([stage.guest])
    again()
    assert freezer._stopped[stage.guest.id], "nothing was sent, or what was stopped would be forgotten"
    assert stage.later == [again]
