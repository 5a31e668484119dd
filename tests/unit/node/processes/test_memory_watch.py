"""Who has more of a card than its lease: that one is ended, and never a neighbour."""

from __future__ import annotations

from typing import NamedTuple

from sublet.node.processes.memory_watch import CONTEXT_BYTES, ProcessOwner, VramWatch
from sublet.values import GIB, GuestId, Kind, LeaseId, ResourceId
from sublet.wire.cards import CardUse
from sublet.wire.orders import Part

CARD, OTHER = "GPU-0", "GPU-1"


class Guest(NamedTuple):
    id: GuestId
    lease: LeaseId


def part(amount: int, card: str = CARD) -> Part:
    return Part(resource=ResourceId(f"local/{card}"), kind=Kind.GPU, amount=amount)


A, B = LeaseId("a"), LeaseId("b")
OWNERS: dict[int, ProcessOwner] = {
    1: Guest(GuestId("a1"), A),
    2: Guest(GuestId("a1"), A),
    3: Guest(GuestId("a2"), A),
    4: Guest(GuestId("b1"), B),
}
PARTS = {A: (part(4 * GIB),), B: (part(4 * GIB), part(GIB, OTHER))}


def ended(**uses: int) -> list[str]:
    found = [CardUse(card=CARD, pid=int(pid[1:]), bytes=count) for pid, count in uses.items()]
    watch = VramWatch()
    warned = watch.offenders(found, OWNERS, PARTS)
    assert not any(one.is_warned for one in warned)
    again = watch.offenders(found, OWNERS, PARTS)
    assert [one.guest for one in again] == [one.guest for one in warned]
    assert all(one.is_warned for one in again)
    return [one.guest for one in again]


def test_a_context_for_each_process_is_allowed_besides() -> None:
    assert ended(p4=4 * GIB + CONTEXT_BYTES) == []
    assert ended(p4=4 * GIB + CONTEXT_BYTES + 1) == ["b1"]
    assert ended(p1=2 * GIB + CONTEXT_BYTES, p3=2 * GIB + CONTEXT_BYTES) == []


def test_of_a_lease_the_guest_with_the_most_goes() -> None:
    assert ended(p1=3 * GIB, p2=2 * GIB, p3=4 * GIB) == ["a1"]
    assert ended(p1=GIB, p2=GIB, p3=6 * GIB) == ["a2"]


def test_neighbours_and_strangers_are_left_alone() -> None:
    assert ended(p1=70 * GIB, p4=4 * GIB, p99=70 * GIB) == ["a1"]


def test_each_card_counts_for_itself_and_it_is_said_how_much() -> None:
    uses = [CardUse(card=CARD, pid=4, bytes=GIB), CardUse(card=OTHER, pid=4, bytes=3 * GIB)]
    [found] = VramWatch().offenders(uses, OWNERS, PARTS)
    assert found.guest == "b1"
    assert "the lease has 1GiB of GPU-1 and its guests used 3GiB" in found.line
    gone = VramWatch().offenders([CardUse(card=CARD, pid=1, bytes=2 * GIB)], OWNERS, {})
    assert gone != [], "a lease that is gone has nothing"


def test_who_frees_enough_after_the_warning_goes_on_and_is_warned_again_the_next_time() -> None:
    """A framework that takes most of a card at its first line was ended before its user had read a word."""
    watch = VramWatch()

    def look(count: int) -> list[tuple[bool, str]]:
        found = watch.offenders([CardUse(card=CARD, pid=4, bytes=count)], OWNERS, PARTS)
        return [(one.is_warned, one.line.rpartition(" ")[2]) for one in found]

    assert look(70 * GIB) == [(False, "seconds")]
    assert look(4 * GIB) == []
    assert look(70 * GIB) == [(False, "seconds")]
    assert look(70 * GIB) == [(True, "(out_of_memory)")]
