"""Of very many ends a few are obeyed in each turn; everything else is obeyed at once, and always in order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sublet.clock import SystemClock
from sublet.lease_end import EndReason
from sublet.node.loop import Loop
from sublet.node.supervisor.core import AT_ONCE_MAX, WAITS_MAX, OrderQueue
from sublet.values import Epoch, LeaseId
from sublet.wire.guests import Orders
from sublet.wire.orders import End, Extend, Order

MANY = 3 * AT_ONCE_MAX + 5


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(SystemClock())
    yield found
    found.close()


def end(number: int) -> End:
    return End(
        lease=LeaseId(f"l-{number}"),
        epoch=Epoch(1, number),
        number=number,
        parts=(),
        reason=EndReason.RELEASED,
        grace_ns=0,
    )


def extend(number: int) -> Extend:
    return Extend(lease=LeaseId(f"l-{number}"), epoch=Epoch(1, number), number=number, deadline_ns=1, ttl_ns=1)


def ends(first: int, last: int) -> list[Order]:
    return [end(number) for number in range(first, last)]


class Stage:
    """Who obeys, and whether somebody has left."""

    def __init__(self, loop: Loop) -> None:
        self.turns: list[tuple[list[int], int]] = []
        self.leaving = False
        self.loop = loop
        self.orders = OrderQueue(loop.soon, self._obey, lambda: self.leaving)

    def _obey(self, orders: Orders) -> None:
        self.turns.append(([order.number for order in orders.orders], orders.incarnation))  # type: ignore[union-attr]

    def take(self, orders: list[Order], incarnation: int = 1) -> None:
        self.orders.take(Orders(orders=tuple(orders), incarnation=incarnation))

    @property
    def done(self) -> list[int]:
        return [number for numbers, _ in self.turns for number in numbers]


@pytest.fixture
def stage(loop: Loop) -> Stage:
    return Stage(loop)


def test_of_many_ends_a_few_are_obeyed_in_each_turn_and_in_order(stage: Stage) -> None:
    stage.take(ends(0, MANY))
    assert stage.done == list(range(AT_ONCE_MAX)), "the first at once"
    for turn in range(2, 5):
        stage.loop.turn(0)
        assert stage.done == list(range(min(MANY, turn * AT_ONCE_MAX)))
    stage.loop.turn(0)
    assert len(stage.turns) == 4, "nothing is left to do"


def test_few_ends_do_not_wait(stage: Stage) -> None:
    stage.take(ends(0, AT_ONCE_MAX))
    assert stage.done == list(range(AT_ONCE_MAX))


def test_who_has_left_comes_first_for_a_while(stage: Stage) -> None:
    stage.leaving = True
    stage.take(ends(0, MANY))
    for expected in range(3):
        for _ in range(WAITS_MAX):
            assert stage.done == list(range(expected * AT_ONCE_MAX))
            stage.loop.turn(0)
        stage.loop.turn(0)
    stage.leaving = False
    stage.loop.turn(0)
    assert stage.done == list(range(MANY))


@pytest.mark.parametrize("comes_with", [True, False])
def test_whoever_waits_for_an_order_waits_for_no_crowd(stage: Stage, comes_with: bool) -> None:
    stage.leaving = True
    if comes_with:
        stage.take([*ends(0, MANY), extend(MANY), *ends(MANY + 1, MANY + 3)])
    else:
        stage.take(ends(0, MANY))
        stage.take([extend(MANY)])
        stage.take(ends(MANY + 1, MANY + 3))
        stage.orders.all()
    assert stage.done == list(range(MANY + 3))


def test_what_is_asked_for_comes_after_all_that_was_ordered(stage: Stage) -> None:
    stage.leaving = True
    stage.take(ends(0, MANY))
    stage.orders.all()
    assert stage.done == list(range(MANY))
    before = len(stage.turns)
    stage.loop.turn(0)
    assert len(stage.turns) == before


def test_each_incarnation_speaks_for_itself(stage: Stage) -> None:
    stage.leaving = True
    stage.take(ends(0, 3), incarnation=1)
    stage.take(ends(3, 5), incarnation=2)
    stage.orders.all()
    assert stage.turns == [([0, 1, 2], 1), ([3, 4], 2)]


def test_an_order_that_fails_is_told_once_and_the_rest_goes_on(loop: Loop) -> None:
    done, failed = list[int](), list[Exception]()

    def obey(orders: Orders) -> None:
        if not done and not failed:
            raise ValueError("a mistake")
        done.extend(order.number for order in orders.orders if isinstance(order, End))

    is_leaving = SimpleNamespace(now=True)
    orders = OrderQueue(loop.guarded(failed.append).soon, obey, lambda: is_leaving.now)
    orders.take(Orders(orders=tuple(ends(0, MANY)), incarnation=1))
    is_leaving.now = False
    for _ in range(5):
        loop.turn(0)
    assert [str(error) for error in failed] == ["a mistake"]
    assert done == list(range(AT_ONCE_MAX, MANY))
