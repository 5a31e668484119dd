"""Mistakes in fair sharing, planted: each breaks a story that passes without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from sublet.errors import InvalidRequest
from sublet.office.ledger import admission, arrangement, groups, reservations
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.fairness import Account, Amounts, Decay
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.queue_order import InOrder
from sublet.office.ledger.records import GroupRecord, LeaseRecord
from sublet.office.ledger.state import State
from sublet.values import MILLIS_PER_DEVICE, GroupId
from tests.unit.office.ledger.bench import ANN, BEN, Bench, seconds

LAB = GroupId("lab")


def a_weight_of_zero_is_refused() -> None:
    """And no order is ever computed with one."""
    bench = Bench(gpus=1)
    answer = bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, weight=0))).answer
    bench.do(cmd.SetTenant(tenant=BEN, group=LAB))
    bench.granted(tenant=BEN)
    bench.wait(10)
    bench.queued(tenant=BEN)
    assert isinstance(answer, InvalidRequest)


def a_ceiling_holds_whatever_the_floor() -> None:
    """A floor above it is refused, so that no request is inside a floor and above the ceiling."""
    bench = Bench(gpus=2, policy=Policy(min_run_batch_ns=seconds(60)))
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=1, ceiling=1)))
    bench.do(cmd.SetTenant(tenant=BEN, group=LAB))
    bench.do(cmd.SetGroup(group=GroupRecord(id=LAB, floor=2, ceiling=1)))
    for _ in range(2):
        bench.granted(tenant=ANN, ttl_s=3600)
    for _ in range(2):
        bench.queued(tenant=BEN, ttl_s=3600)
    bench.wait(65)
    assert len(bench.state.promises) == 1, "within the floor and the ceiling, and no more"


def the_order_does_not_depend_on_how_often_it_is_asked() -> None:
    """Two offices with the same commands, one of which is asked for the order all the time; and the fold."""
    orders = []
    for asks in (False, True):
        rng, bench = (
            random.Random(5),
            Bench(gpus=2, policy=Policy(half_life_ns=seconds(40), max_hold_ns=seconds(10**6))),
        )
        bench.do(cmd.SetGroup(group=GroupRecord(id=LAB)))
        bench.do(cmd.SetTenant(tenant=BEN, group=LAB))
        for _ in range(12):
            lease = bench.granted(tenant=rng.choice((ANN, BEN)))
            for _ in range(rng.randrange(1, 9)):
                bench.at(bench.now_ns / seconds(1) + rng.randrange(1, 30))
                if asks:
                    list(InOrder(bench.state, bench.now_ns, bench.policy))
                    for tenant in (ANN, BEN):
                        account = bench.state.books.accounts.get(tenant)
                        if account is not None:
                            account.used_at(bench.now_ns, bench.state.decay)
            bench.release(lease)
        orders.append([bench.state.books.accounts[tenant].used for tenant in (ANN, BEN)])
        assert bench.state.snapshot() == bench.folded().snapshot()
    assert orders[0] == orders[1]


def _any_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangement, "check_weight", lambda weight, whose: None)


def _floor_above_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken, and goes before the ceiling."""
    plain = groups.over_ceiling

    def over_ceiling(state: State, lease: LeaseRecord, held_millis: int) -> str | None:
        group = state.group(state.group_of(lease.tenant))
        within = held_millis + MILLIS_PER_DEVICE <= group.floor * MILLIS_PER_DEVICE
        return None if within else plain(state, lease, held_millis)

    monkeypatch.setattr(reservations, "most_gpus", lambda group: None)
    monkeypatch.setattr(admission, "over_ceiling", over_ceiling)


def _decay_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floating-point sum that each look multiplies down, as with a timer."""

    def used_at(self: Account, at_ns: int, decay: Decay) -> list[int]:
        passed = max(0, at_ns - self.at_ns)
        kept = 0.5 ** (passed / decay.half_life_ns)
        self.used = [int(used * kept) + level * passed for used, level in zip(self.used, self.level, strict=True)]
        self.at_ns = max(at_ns, self.at_ns)
        return self.used

    def change(self: Account, by: Amounts, at_ns: int, decay: Decay) -> None:
        used_at(self, at_ns, decay)
        self.level = [level + more for level, more in zip(self.level, by, strict=True)]

    monkeypatch.setattr(Account, "used_at", used_at)
    monkeypatch.setattr(Account, "change", change)


@pytest.mark.parametrize(
    ("story", "mutant"),
    [
        (a_weight_of_zero_is_refused, _any_weight),
        (a_ceiling_holds_whatever_the_floor, _floor_above_ceiling),
        (the_order_does_not_depend_on_how_often_it_is_asked, _decay_when_asked),
    ],
    ids=["a weight of zero", "a floor above its ceiling obeyed", "decay that depends on when it is asked"],
)
def test_a_planted_mistake_is_caught(
    story: Callable[[], None], mutant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    story()
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        story()
