"""Why a renewal was refused is a word, and each word is met."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet.errors import InvalidRequest, RenewalRefusal, SubletError
from sublet.lease.states import LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, Quota
from sublet.values import GIB, BudgetWindow, Epoch, Kind, LeaseId, NodeId, Suspend
from sublet.wire.orders import Extend, Held, Parkable
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, gpu, inventory, seconds

POLICY = Policy(max_hold_ns=seconds(600), cool_down_ns=seconds(10))


def idle(bench: Bench, lease: LeaseRecord) -> object:
    return bench.renew(lease, active=False)


def quota(bench: Bench, lease: LeaseRecord) -> object:
    bench.do(cmd.SetTenant(tenant=ANN, quota=Quota(gpu_seconds=5)))
    bench.at(1010)
    return bench.renew(lease)


def budget(bench: Bench, lease: LeaseRecord) -> object:
    """Only a parking lease hears it: others have notice by then, and a renewal changes nothing of that."""
    bench.is_empty = False
    bench.do(cmd.SetBudget(tenant=ANN, per=BudgetWindow.TOTAL, amount=0))
    assert lease.epoch is not None
    bench.report(Parkable(node=NodeId("n1"), lease=lease.id, epoch=lease.epoch, amount=GIB))
    assert lease.parked_under is not None
    return bench.renew(bench.lease(lease.parked_under))


def fair_share(bench: Bench, lease: LeaseRecord) -> object:
    for moment_s in (1200, 1400, 1550):
        bench.at(moment_s)
        bench.renew(lease)
    bench.queued(gpu(), tenant=BEN)
    bench.at(1601)
    return bench.renew(lease)


def ended(bench: Bench, lease: LeaseRecord) -> object:
    bench.release(lease)
    return bench.renew(lease)


def not_active(bench: Bench, lease: LeaseRecord) -> object:
    waiting = bench.queued(gpu(), tenant=ANN)
    return bench.renew(waiting, epoch=Epoch(1, 1))


def stale_epoch(bench: Bench, lease: LeaseRecord) -> object:
    return bench.renew(lease, epoch=Epoch(1, 999))


def unknown(bench: Bench, lease: LeaseRecord) -> object:
    assert lease.epoch is not None
    return bench.do(cmd.Renew(tenant=BEN, lease=LeaseId(lease.id), epoch=lease.epoch)).answer


CASES: dict[RenewalRefusal, Callable[[Bench, LeaseRecord], object]] = {
    RenewalRefusal.IDLE: idle,
    RenewalRefusal.QUOTA: quota,
    RenewalRefusal.BUDGET: budget,
    RenewalRefusal.FAIR_SHARE: fair_share,
    RenewalRefusal.ENDED: ended,
    RenewalRefusal.NOT_ACTIVE: not_active,
    RenewalRefusal.STALE_EPOCH: stale_epoch,
    RenewalRefusal.UNKNOWN: unknown,
}


@pytest.mark.parametrize("word", CASES, ids=str)
def test_the_word_of_a_refused_renewal(word: RenewalRefusal) -> None:
    node = inventory("n1", device("gpu0", suspend=Suspend.SAME_DEVICE), device("mem", Kind.MEMORY))
    bench = Bench(node, policy=POLICY)
    lease = bench.granted(gpu(), tenant=ANN)
    error = CASES[word](bench, lease)
    assert isinstance(error, SubletError)
    assert error.reason == word
    if word is RenewalRefusal.BUDGET:
        assert lease.parked_under is not None
        lease = bench.lease(lease.parked_under)
    if word in (RenewalRefusal.BUDGET, RenewalRefusal.IDLE, RenewalRefusal.QUOTA, RenewalRefusal.FAIR_SHARE):
        assert lease.status in (LeaseStatus.ACTIVE, LeaseStatus.NOTICED), "it is not over by that"
        assert str(lease.fate) == str(word), "and the end will say the same"


def test_every_word_is_met() -> None:
    """But for the one that only the driver says, of an agent that does not hold it."""
    assert set(RenewalRefusal) - set(CASES) == {RenewalRefusal.NOT_HELD}


def test_what_saving_has_come_to_need_is_had_as_far_as_it_may_be() -> None:
    """It was reckoned and not asked for by a person, so it is cut down; the order says what the holder goes by, also
    when it is sent again, and what the agent says of saves is there for the next answer."""
    bench = Bench(inventory("n1", device("gpu0")))
    lease = bench.granted(gpu(), tenant=BEN)
    most_ns = bench.policy.ttl_max_ns
    assert isinstance(bench.renew(lease, ttl_ns=2 * most_ns), InvalidRequest)
    assert isinstance(bench.renew(lease, ttl_ns=seconds(400), lead_ns=seconds(100)), Granted)
    assert (lease.ttl_ns, lease.deadline_ns) == (seconds(400), bench.now.ns + seconds(400))
    assert [order.lead_ns for order in bench.sent if isinstance(order, Extend)][-1] == seconds(100)
    assert isinstance(bench.renew(lease, ttl_ns=2 * most_ns, lead_ns=most_ns), Granted)
    assert lease.ttl_ns == most_ns
    assert lease.epoch is not None
    held = Held(node=NodeId("n1"), lease=lease.id, epoch=lease.epoch, number=lease.number, save_ns=seconds(100))
    bench.report(held)
    assert bench.ledger.save_ns(lease.id) == seconds(100)
    bench.release(lease)
    assert bench.ledger.save_ns(lease.id) == 0
