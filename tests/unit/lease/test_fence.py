"""The fence table alone, and against a second implementation that is too simple to be wrong."""

from __future__ import annotations

import random

import pytest

from sublet.errors import LeaseEnded, LeaseExpired, LeaseNotActive, LeaseRevoked, StaleEpoch
from sublet.lease.fence import FenceTable, is_exclusive
from sublet.lease_end import EndReason
from sublet.values import GIB, Epoch, Exclusivity, Kind, LeaseId, ResourceId
from sublet.wire.orders import Part

A, B = LeaseId("a"), LeaseId("b")
GPU = ResourceId("n/gpu0")


def part(exclusivity: Exclusivity = Exclusivity.SESSION, *, amount: int = GIB) -> Part:
    return Part(resource=GPU, kind=Kind.GPU, amount=amount, exclusivity=exclusivity)


def epoch(n: int) -> Epoch:
    return Epoch(1, n)


def test_only_shared_slices_and_things_that_are_not_devices_tolerate_others() -> None:
    """What no class was said for is exclusive, as in the ledger."""
    assert is_exclusive(part(Exclusivity.SESSION))
    assert is_exclusive(part(Exclusivity.DEVICE))
    assert is_exclusive(Part(resource=GPU, kind=Kind.GPU, amount=1))
    assert not is_exclusive(part(Exclusivity.SHARED))
    assert not is_exclusive(Part(resource=GPU, kind=Kind.CPU, amount=1))


def test_a_pair_is_accepted_up_to_its_deadline_and_not_at_it() -> None:
    """The deadline itself is too late."""
    table = FenceTable()
    table.admit(A, epoch(1), (1, 1), 100, (part(),))
    assert table.check(A, epoch(1), 99).lease == A
    with pytest.raises(LeaseExpired):
        table.check(A, epoch(1), 100)


def test_reasons_become_the_error_that_a_program_can_decide_by() -> None:
    """Ran out, given back, taken: three classes."""
    for reason, error in (
        (EndReason.EXPIRED, LeaseExpired),
        (EndReason.IDLE, LeaseExpired),
        (EndReason.RELEASED, LeaseNotActive),
        (EndReason.PREEMPTED, LeaseRevoked),
        (EndReason.DEVICE_LOST, LeaseRevoked),
    ):
        table = FenceTable()
        table.end(A, epoch(3), (part(),), reason)
        with pytest.raises(error):
            table.check(A, epoch(3), 0)
        with pytest.raises(LeaseNotActive):
            table.check(A, epoch(4), 0)  # a newer epoch is unknown here, not ended


def test_a_newer_number_moves_the_deadline_even_back_and_an_older_one_does_not() -> None:
    """What counts is which order is newer, not which deadline is later."""
    table = FenceTable()
    table.admit(A, epoch(1), (1, 1), 100, (part(),))
    assert table.extend(A, epoch(1), (1, 3), 300)
    assert table.extend(A, epoch(1), (1, 2), 900), "it is held: something newer is"
    assert table.check(A, epoch(1), 299).deadline_ns == 300
    assert table.next_deadline_ns() == 300
    assert table.extend(A, epoch(1), (2, 1), 200), "numbers of a newer incarnation come after all older ones"
    assert table.next_deadline_ns() == 200
    assert not table.extend(A, epoch(2), (2, 2), 500)
    assert not table.extend(B, epoch(1), (2, 2), 500)


def test_a_notice_and_an_extension_do_not_swallow_each_other() -> None:
    """They are numbered in one sequence and compared in two."""
    table = FenceTable()
    table.admit(A, epoch(1), (1, 1), 100, (part(),))
    assert table.notify(A, epoch(1), (1, 3)) is True
    assert table.notify(A, epoch(1), (1, 2)) is False
    assert table.notify(A, epoch(2), (1, 4)) is None
    table.extend(A, epoch(1), (1, 2), 400)
    assert table.next_deadline_ns() == 400


def test_the_floor_of_an_exclusive_resource_outlives_the_memory_of_names() -> None:
    """A late grant of a lease that was forgotten meets the epoch that its device has seen since."""
    table = FenceTable(ended_max=1)
    table.end(A, epoch(5), (part(),), EndReason.EXPIRED)
    table.end(B, epoch(7), (part(),), EndReason.EXPIRED)
    assert table.is_over(A, epoch(5), (part(),))
    assert not table.is_over(LeaseId("c"), epoch(8), (part(),))
    assert table.is_over(A, epoch(5), (part(Exclusivity.SHARED),)), "whatever it was on: its epoch is past"


def test_what_ended_long_ago_is_over_without_its_name() -> None:
    """Of very many leases only the last are known by name. Those before them are refused all the same; who is live
    stays so, and who came in time may go on waiting."""
    table, shared = FenceTable(ended_max=3), (part(Exclusivity.SHARED),)
    table.admit(A, epoch(1), (1, 1), 100, shared)
    for n in range(3, 1000):
        table.end(LeaseId(f"l-{n}"), epoch(n), shared, EndReason.RELEASED)
    assert len(table._ended) == 3
    assert not table.is_over(A, epoch(1), shared)
    assert table.check(A, epoch(1), 50).lease == A
    assert table.extend(A, epoch(1), (1, 2), 200)
    assert table.is_over(B, epoch(2), shared), "a grant that comes after thousands of later ones have ended"
    assert not table.is_over(B, epoch(2), shared, came=True)
    assert not table.is_over(B, epoch(1000), shared)
    assert not table.is_over(B, Epoch(2, 2), shared), "of another incarnation nothing is known"
    with pytest.raises(LeaseNotActive, match="over long ago"):
        table.check(LeaseId("l-7"), epoch(7), 0)
    with pytest.raises(LeaseNotActive, match="was given back"):
        table.check(LeaseId("l-999"), epoch(999), 0)
    table.end(A, epoch(1), shared, EndReason.RELEASED)
    assert table.is_over(A, epoch(1), shared, came=True)


def test_due_names_each_lease_once_and_forgets_moved_deadlines() -> None:
    """However often a deadline was moved, only the last one counts."""
    table = FenceTable()
    table.admit(A, epoch(1), (1, 1), 100, (part(),))
    for number in range(2, 500):
        table.extend(A, epoch(1), (1, number), 100 + number)
    assert table.due(598) == []
    assert [live.lease for live in table.due(599)] == [A]
    assert table.due(599) == []


def test_what_is_in_use_follows_who_is_there() -> None:
    """Admission, attach and end keep the account of the resource."""
    table = FenceTable()
    shared = (part(Exclusivity.SHARED, amount=3),)
    table.admit(A, epoch(1), (1, 1), 100, shared)
    table.admit(B, epoch(2), (1, 1), 100, shared)
    table.admit(A, epoch(3), (1, 2), 100, shared)
    assert (table.in_use(GPU), set(table.on(GPU)), len(table)) == (6, {A, B}, 2)
    table.end(A, epoch(3), shared, EndReason.RELEASED)
    assert (table.in_use(GPU), set(table.on(GPU))) == (3, {B})


@pytest.mark.parametrize("seed", range(20))
def test_those_that_tolerate_nobody_are_known_without_looking_through_all(seed: int) -> None:
    draw = random.Random(seed)
    table = FenceTable()
    for n in range(1, 60):
        lease = draw.choice((A, B, LeaseId("c")))
        parts = (part(draw.choice((Exclusivity.SHARED, Exclusivity.SESSION))),)
        if draw.random() < 0.4:
            table.end(lease, epoch(n), parts, EndReason.RELEASED)
        else:
            table.admit(lease, epoch(n), (1, n), 100, parts)
        assert table.exclusive_on(GPU) == {one: its for one, its in table.on(GPU).items() if is_exclusive(its)}


class Dumb:
    """The same rules by looking through everything that ever happened."""

    def __init__(self) -> None:
        self.story: list[tuple[str, LeaseId, Epoch, int, int]] = []

    def accepts(self, lease: LeaseId, wanted: Epoch, now: int) -> bool:
        live: tuple[Epoch, int, int] | None = None
        ended: Epoch = epoch(0)
        for what, name, number, order, deadline in self.story:
            if name != lease:
                continue
            if what == "end":
                ended = max(ended, number)
                live = None if live is not None and live[0] <= number else live
                continue
            first = what == "admit" and number > ended and (live is None or number > live[0])
            if first or (what != "end" and live is not None and live[0] == number and order > live[1]):
                live = (number, order, deadline)
        return live is not None and live[0] == wanted and now < live[2]


def test_a_table_that_forgets_names_accepts_nothing_that_one_with_all_of_them_refuses() -> None:
    """Grants and ends of many leases, late and repeated."""
    for seed in range(100):
        draw, leases = random.Random(seed), [LeaseId(f"l-{n}") for n in range(6)]
        whole, small, shared = FenceTable(), FenceTable(ended_max=draw.randint(1, 3)), (part(Exclusivity.SHARED),)
        for step in range(80):
            lease, number = draw.choice(leases), epoch(draw.randint(1, 1 + step // 4))
            is_end = draw.random() < 0.4
            for table in (whole, small):
                if is_end:
                    table.end(lease, number, shared, EndReason.RELEASED)
                elif not table.is_over(lease, number, shared):
                    table.admit(lease, number, (1, step), 100, shared)
            assert all(small.get(one) in (None, whole.get(one)) for one in leases), f"seed {seed}"


def test_random_orders_are_judged_as_by_the_dumb_table() -> None:
    """Grants, extensions and ends in any order, repeated and late: the same pairs are accepted at the same times."""
    for seed in range(300):
        draw = random.Random(seed)
        table, dumb = FenceTable(), Dumb()
        shared = (part(Exclusivity.SHARED),)
        for _ in range(40):
            lease, number = draw.choice((A, B)), epoch(draw.randint(1, 6))
            order, deadline = draw.randint(1, 12), draw.randint(1, 100)
            match draw.choice(("admit", "extend", "extend", "end")):
                case "admit":
                    if not table.is_over(lease, number, shared):
                        table.admit(lease, number, (1, order), deadline, shared)
                    dumb.story.append(("admit", lease, number, order, deadline))
                case "extend":
                    table.extend(lease, number, (1, order), deadline)
                    dumb.story.append(("extend", lease, number, order, deadline))
                case _:
                    table.end(lease, number, shared, EndReason.RELEASED)
                    dumb.story.append(("end", lease, number, 0, 0))
            now = draw.randint(0, 100)
            for pair in ((lease, epoch(n)) for lease in (A, B) for n in range(8)):
                assert _accepts(table, *pair, now) == dumb.accepts(*pair, now), f"seed {seed}: {pair} at {now}"


def _accepts(table: FenceTable, lease: LeaseId, number: Epoch, now: int) -> bool:
    try:
        table.check(lease, number, now)
    except (LeaseEnded, StaleEpoch):
        return False
    return True
