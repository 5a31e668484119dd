"""Whose job is started next: tenants take turns, of one tenant the earliest deadline is first, none starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.node.fair_slots import FairSlots


def filled(waiting: str, *, slots: int = 4) -> FairSlots[str]:
    """``"a9 b a1"``: jobs of tenants a and b, with their deadlines. Each job is named by what stands there."""
    found: FairSlots[str] = FairSlots(slots)
    for word in waiting.split():
        found.add(word, word[0], int(word[1:] or 100))
    return found


def started(queue: FairSlots[str]) -> list[str]:
    found = []
    while (job := queue.take()) is not None:
        found.append(job)
    return found


@pytest.mark.parametrize(
    ("waiting", "first"),
    [
        ("", ""),
        ("a1", "a1"),
        ("a1 a2 a3 a4 a5", "a1 a2"),
        ("a9 a1 a5", "a1 a5"),
        ("a1 a2 a3 a4 b1", "a1 b1"),
        ("a1 a2 b1 b2 c1", "a1 b1 c1"),
        ("a1 a2 b1 c1 d1 e1", "a1 b1 c1 d1"),
        ("a7 b1", "a7 b1"),
    ],
)
def test_what_is_started_of_four_slots(waiting: str, first: str) -> None:
    assert " ".join(started(filled(waiting))) == first


def test_a_tenant_that_comes_later_finds_a_slot_though_another_has_much_to_do() -> None:
    queue = filled(" ".join(f"a{n}" for n in range(100, 200)))
    assert started(queue) == ["a100", "a101"]
    queue.add("b", "b")
    queue.add("c", "c")
    assert started(queue) == ["b", "c"]
    queue.over("b")
    assert started(queue) == [], "half of the slots are for tenants that have nothing running"
    queue.over("a100")
    queue.over("a101")
    assert started(queue) == ["a102"]


def test_jobs_of_one_deadline_are_started_in_order() -> None:
    queue: FairSlots[int] = FairSlots(1)
    for n in range(5):
        queue.add(n, "a", 7)
    for n in range(5):
        assert queue.take() == n
        queue.over(n)


def test_what_is_dropped_is_never_started_and_what_runs_is_not_dropped() -> None:
    queue = filled("a1 a2 b1")
    assert queue.drop("a1")
    assert not queue.drop("a1")
    assert queue.take() == "a2"
    assert not queue.drop("a2")
    queue.clear()
    assert queue.take() is None
    assert len(queue) == 0
    queue.over("a2")
    queue.over("a2")
    queue.over("b1")


SLOTS = 6
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("aaaabcd"), st.integers(0, 9)),
        st.tuples(st.just("over"), st.integers(0, SLOTS), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@dataclass
class Model:
    """What is known from outside: who waits and who runs, and which tenants were started while one waited."""

    waiting: dict[int, tuple[str, int]] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)
    passed: dict[str, Counter[str]] = field(default_factory=dict)
    """For each tenant that waits with nothing running: how often each other one was started since."""

    def idle(self) -> set[str]:
        """Tenants that wait and have nothing running."""
        return {tenant for tenant, _ in self.waiting.values()} - set(self.running.values())

    def note(self) -> None:
        self.passed = {tenant: self.passed.get(tenant, Counter()) for tenant in self.idle()}

    def started(self, job: int) -> None:
        tenant, deadline = self.waiting[job]
        mine = [(due, number) for number, (whose, due) in self.waiting.items() if whose == tenant]
        assert (deadline, job) == min(mine), "the earliest deadline of a tenant is first"
        counts = Counter(self.running.values())
        if counts[tenant]:
            assert not self.idle(), "none gets a second slot while another has none"
            assert len(self.running) < SLOTS // 2
        for passed, counted in self.passed.items():
            counted[tenant] += 1
            assert passed == tenant or counted[tenant] == 1, "none is passed twice by the same tenant"
        del self.waiting[job]
        self.running[job] = tenant
        self.note()


@given(ACTS)
def test_turns_are_fair_and_no_slot_is_left_empty_that_could_be_used(
    acts: list[tuple[str, str | int, int]],
) -> None:
    queue: FairSlots[int] = FairSlots(SLOTS)
    model = Model()
    for number, (act, what, deadline) in enumerate(acts):
        if act == "add":
            queue.add(number, str(what), deadline)
            model.waiting[number] = str(what), deadline
        elif act == "over" and model.running:
            job = sorted(model.running)[int(what) % len(model.running)]
            queue.over(job)
            del model.running[job]
        elif act == "drop" and model.waiting:
            job = sorted(model.waiting)[int(what) % len(model.waiting)]
            assert queue.drop(job)
            del model.waiting[job]
        model.note()
        while (started := queue.take()) is not None:
            model.started(started)
        assert len(queue) == len(model.waiting)
        assert len(model.running) <= SLOTS
        if model.waiting:
            assert len(model.running) >= SLOTS // 2
            assert len(model.running) == SLOTS or not model.idle()


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40))
def test_who_waits_is_passed_by_each_other_tenant_once_at_most(tenants: list[str]) -> None:
    """With one slot, which is the hardest case."""
    queue: FairSlots[int] = FairSlots(1)
    for number, tenant in enumerate(tenants):
        queue.add(number, tenant)
    order = []
    while (job := queue.take()) is not None:
        order.append(tenants[job])
        queue.over(job)
    assert Counter(order) == Counter(tenants)
    left = Counter(tenants)
    while order:
        turn = order[: len(+left)]
        assert len(set(turn)) == len(turn), f"in one round each comes once, not {turn}"
        del order[: len(turn)]
        left.subtract(turn)
