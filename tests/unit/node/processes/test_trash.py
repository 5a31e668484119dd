"""What is put aside waits for the last that comes, so that of many ends none waits for it; and not for ever."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.errors import QuotaExceeded
from sublet.node.loop import Loop
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.trash import (
    AGAIN_MAX_S,
    AGAIN_S,
    HELD_GROUPS_MAX,
    HELD_LOOK_S,
    HELD_MAX,
    WAIT_S,
    WAITING_MAX,
    HeldMemory,
    Trash,
)
from sublet.node.sandbox.cleaning import Left
from sublet.testing.clock import HeldClock
from sublet.values import TenantId

NEARLY_NS = round(WAIT_S * 0.9e9)


@pytest.fixture
def clock() -> HeldClock:
    return HeldClock()


@pytest.fixture
def loop(clock: HeldClock) -> Iterator[Loop]:
    found = Loop(clock)
    yield found
    found.close()


def test_it_waits_for_the_last_that_comes(loop: Loop, clock: HeldClock) -> None:
    did: list[int] = []
    aside = Trash(loop, no_forked_jobs())
    for number in range(20):
        aside.later(lambda number=number: did.append(number))  # type: ignore[misc]
        clock.advance_ns(NEARLY_NS)
        loop.turn(0)
    assert not did
    clock.advance_ns(NEARLY_NS)
    while len(did) < 20:
        before = len(did)
        loop.turn(0)
        assert len(did) > before, "a few in each turn"
    assert did == list(range(20))


def test_where_somebody_ends_at_every_moment_it_does_not_pile_up(loop: Loop, clock: HeldClock) -> None:
    did: list[int] = []
    aside = Trash(loop, no_forked_jobs())
    for number in range(2 * WAITING_MAX):
        aside.later(lambda number=number: did.append(number))  # type: ignore[misc]
        if number % 4 == 0:
            clock.advance_ns(NEARLY_NS)
            loop.turn(0)
        assert number - len(did) <= WAITING_MAX + 8
    aside.finish()
    assert did == list(range(2 * WAITING_MAX))


def test_one_that_fails_harms_no_other(loop: Loop, clock: HeldClock) -> None:
    did: list[str] = []
    aside = Trash(loop, no_forked_jobs())

    def fail() -> None:
        raise OSError("a disk that is full")

    for act in (lambda: did.append("first"), fail, lambda: did.append("last")):
        aside.later(act)
    clock.advance_ns(2 * NEARLY_NS)
    for _ in range(3):
        loop.turn(0)
    assert did == ["first", "last"]


@pytest.mark.parametrize("fails", ["raises", "is not clean"])
def test_a_folder_that_cannot_be_removed_now_is_removed_later(
    loop: Loop, clock: HeldClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """As while there are no descriptors left."""
    folder = tmp_path / "leases" / "l-1"
    (folder / "inner").mkdir(parents=True)
    aside = Trash(loop, no_forked_jobs())
    aside.put(str(folder))
    tries: list[int] = []

    def no_descriptor(path: str, *, count_max: int) -> Left:
        tries.append(clock.now_ns())
        if fails == "raises":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Left(left=1, named=[f"{path}: Too many open files"])

    with monkeypatch.context() as patch:
        patch.setattr("sublet.node.processes.trash.remove_tree", no_descriptor)
        for _ in range(40):
            clock.advance_ns(NEARLY_NS * 10)
            loop.turn(0)
    assert len(tries) > 1
    assert [path.name for path in (tmp_path / "leases").iterdir()] == ["~l-1"]
    clock.advance_ns(round(AGAIN_MAX_S * 1e9))
    loop.turn(0)
    assert list((tmp_path / "leases").iterdir()) == []


class Box:
    """A group in which somebody may be."""

    def __init__(self, *, is_guests: bool = True, name: str = "sublet-o/l/g", people: int = 0) -> None:
        self.is_guests = is_guests
        self.name = name
        self.people = people
        self.did: list[str] = []
        self.shared = 0

    def shared_bytes(self) -> int:
        return self.shared

    def remove(self) -> list[str]:
        self.did.append("remove")
        return [self.name] if self.people else []

    def kill(self) -> None:
        self.did.append("kill")

    def as_group(self) -> ControlGroup:
        return cast(ControlGroup, self)


def pass_time(loop: Loop, clock: HeldClock, seconds: float) -> None:
    clock.advance_ns(round(seconds * 1e9))
    for _ in range(3):
        loop.turn(0)


def test_a_group_goes_when_nobody_waits_and_what_is_asked_of_it_comes_first(loop: Loop, clock: HeldClock) -> None:
    aside, box = Trash(loop, no_forked_jobs()), Box()
    aside.leave(box.as_group(), lambda: box.did.append("count"))
    aside.leave(None, lambda: box.did.append("another"))
    assert box.did == []
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == ["count", "remove", "another"]
    pass_time(loop, clock, 2 * AGAIN_MAX_S)
    assert box.did == ["count", "remove", "another"]


def test_a_group_goes_even_if_what_is_asked_of_it_fails(loop: Loop, clock: HeldClock) -> None:
    aside, box = Trash(loop, no_forked_jobs()), Box()
    aside.leave(box.as_group(), lambda: 1 // 0)
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == ["remove"]


def test_what_is_asked_of_a_group_waits_for_descriptors_and_the_group_for_it(loop: Loop, clock: HeldClock) -> None:
    """Without its count the bill would say that the guest did nothing; without its note the next supervisor would
    look for it."""
    aside, box = Trash(loop, no_forked_jobs()), Box()
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError()]

    def count() -> None:
        if failures:
            raise failures.pop()
        box.did.append("count")

    aside.leave(box.as_group(), count, lambda: box.did.append("note"))
    pass_time(loop, clock, 2 * WAIT_S)
    pass_time(loop, clock, 2 * AGAIN_S)
    assert box.did == []
    pass_time(loop, clock, 4 * AGAIN_S)
    assert box.did == ["count", "note", "remove"]


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError()], ids=repr)
def test_a_group_that_cannot_be_looked_at_now_goes_later(loop: Loop, clock: HeldClock, error: BaseException) -> None:
    """As while there are no descriptors left, or no memory."""
    aside, box = Trash(loop, no_forked_jobs()), Box()
    failures = [error]
    remove = box.remove

    def once() -> list[str]:
        if failures:
            raise failures.pop()
        return remove()

    box.remove = once  # type: ignore[method-assign]
    aside.leave(box.as_group())
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == []
    pass_time(loop, clock, 2 * AGAIN_S)
    assert box.did == ["remove"]


def test_who_was_put_into_the_group_of_a_guest_that_is_gone_is_ended(loop: Loop, clock: HeldClock) -> None:
    aside, box = Trash(loop, no_forked_jobs()), Box(people=1)
    aside.leave(box.as_group())
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == ["remove", "kill"]
    pass_time(loop, clock, 2 * AGAIN_S)
    assert box.did == ["remove", "kill"] * 2
    box.people = 0
    for _ in range(3):
        pass_time(loop, clock, 2 * AGAIN_MAX_S)
    assert box.did == ["remove", "kill", "remove", "kill", "remove"]


def test_of_a_lease_it_is_only_tried_again_and_never_once_another_has_its_name(loop: Loop, clock: HeldClock) -> None:
    """What is in the group of a lease may be there by right, a moment later: the lease may be had again."""
    aside, box = Trash(loop, no_forked_jobs()), Box(is_guests=False, people=1)
    aside.leave(box.as_group())
    pass_time(loop, clock, 2 * WAIT_S)
    pass_time(loop, clock, 2 * AGAIN_S)
    assert box.did == ["remove", "remove"]
    aside.make_way(Box(is_guests=False).as_group())
    for _ in range(3):
        pass_time(loop, clock, 2 * AGAIN_MAX_S)
    assert box.did == ["remove", "remove"]


def test_a_group_makes_way_for_another_of_its_name(loop: Loop, clock: HeldClock) -> None:
    aside, box, other = Trash(loop, no_forked_jobs()), Box(is_guests=False), Box(name="sublet-o/other")
    aside.leave(box.as_group())
    aside.make_way(other.as_group())
    aside.make_way(None)
    assert box.did == []
    aside.make_way(Box(is_guests=False).as_group())
    assert box.did == ["remove"]
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == ["remove"]


ANA, BEN = TenantId("ana"), TenantId("ben")


def test_a_group_stays_while_memory_of_it_is_kept(loop: Loop, clock: HeldClock) -> None:
    held, box = HeldMemory(loop, Trash(loop, no_forked_jobs())), Box(is_guests=False)
    box.shared = 4096
    held.leave(ANA, box.as_group())
    for _ in range(5):
        pass_time(loop, clock, HELD_LOOK_S)
    assert box.did == []
    box.shared = 0
    pass_time(loop, clock, HELD_LOOK_S)
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == ["remove"]
    pass_time(loop, clock, 5 * HELD_LOOK_S)
    assert box.did == ["remove"]


def test_who_keeps_too_much_is_told_and_nobody_else_is(loop: Loop) -> None:
    held, boxes = (
        HeldMemory(loop, Trash(loop, no_forked_jobs())),
        [Box(is_guests=False, name=f"sublet-o/{n}") for n in range(2)],
    )
    for box in boxes:
        box.shared = HELD_MAX // 2
        held.leave(ANA, box.as_group())
    held.check(ANA)
    boxes[0].shared += 1
    with pytest.raises(QuotaExceeded, match=r"programs of tenant ana keep .* of ended leases \(2\)"):
        held.check(ANA)
    held.check(BEN)
    held.make_way(Box(is_guests=False, name="sublet-o/1").as_group())  # granted anew
    held.check(ANA)


def test_very_many_small_parts_are_too_much_as_well(loop: Loop) -> None:
    held = HeldMemory(loop, Trash(loop, no_forked_jobs()))
    for number in range(HELD_GROUPS_MAX + 1):
        held.check(ANA)
        box = Box(is_guests=False, name=f"sublet-o/{number}")
        box.shared = 4096
        held.leave(ANA, box.as_group())
    with pytest.raises(QuotaExceeded, match=r"\(257\)"):
        held.check(ANA)


@pytest.mark.parametrize(("tenant", "finish"), [("local", False), ("ana", True)])
def test_of_the_owner_and_at_the_end_no_memory_is_waited_for(
    loop: Loop, clock: HeldClock, tenant: str, finish: bool
) -> None:
    held, box = HeldMemory(loop, Trash(loop, no_forked_jobs())), Box(is_guests=False)
    box.shared = HELD_MAX
    held.leave(TenantId(tenant), box.as_group())
    if finish:
        held.finish()
    pass_time(loop, clock, 2 * WAIT_S)
    assert box.did == ["remove"]


def no_forked_jobs() -> Any:
    return SimpleNamespace(run=lambda *_: pytest.fail("nothing here is large"))
