"""Orders are given until they are confirmed or pointless, and no longer."""

from __future__ import annotations

from sublet.lease.states import LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.unconfirmed_orders import STALE_MAX
from sublet.values import RequestId, Tier
from sublet.wire.orders import End, Extend, Failed, Grant, Held, Notify, Order, Verify
from tests.unit.office.ledger.bench import ANN, BEN, Bench, seconds


def idle_agent() -> Bench:
    bench = Bench()
    bench.obedient = False
    return bench


def later(bench: Bench, after_s: float = 2) -> list[Order]:
    bench.now_ns += seconds(after_s)
    return list(bench.ledger.orders_due(bench.now))


def kinds(orders: list[Order]) -> list[type]:
    return [type(order) for order in orders]


def test_a_grant_is_given_again_until_it_is_held() -> None:
    bench = idle_agent()
    lease = bench.granted()
    assert lease.epoch is not None
    assert kinds(later(bench)) == [Grant]
    assert later(bench, 1) == []
    assert kinds(later(bench, 1)) == [Grant]
    bench.report(Held(node=lease.node, lease=lease.id, epoch=lease.epoch, number=lease.number))  # type: ignore[arg-type]
    assert later(bench, 10) == []
    assert bench.ledger.next_resend_ns() is None


def test_an_extension_is_a_whole_grant_as_long_as_the_grant_is_not_held() -> None:
    bench = idle_agent()
    lease = bench.granted()
    bench.unsent.clear()
    bench.renew(lease)
    assert kinds(bench.unsent) == [Grant]


def test_an_older_number_confirms_nothing_newer() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.obedient = False
    older = lease.number
    bench.renew(lease)
    assert lease.epoch is not None
    bench.report(Held(node=lease.node, lease=lease.id, epoch=lease.epoch, number=older))  # type: ignore[arg-type]
    assert kinds(later(bench)) == [Extend]


def test_a_word_about_a_notice_confirms_no_deadline() -> None:
    bench = Bench()
    lease = bench.granted(tier=Tier.SPOT, tenant=ANN)
    bench.obedient = False
    bench.renew(lease)
    bench.queued(tenant=BEN)
    assert lease.status is LeaseStatus.NOTICED
    assert lease.epoch is not None
    told = Held(node=lease.node, lease=lease.id, epoch=lease.epoch, number=lease.number, told=True)  # type: ignore[arg-type]
    bench.report(told)
    assert kinds(later(bench)) == [Extend]


def test_the_end_replaces_what_went_before_and_is_given_until_it_is_verified() -> None:
    bench = idle_agent()
    lease = bench.granted()
    bench.release(lease)
    assert kinds(later(bench)) == [End]
    assert kinds(later(bench)) == [End]
    bench.unsent.clear()
    bench.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
    assert kinds(bench.unsent) == [End]
    bench.obedient = True
    bench.obey()
    assert later(bench) == []


def test_an_end_is_forgotten_with_the_last_report_of_it() -> None:
    """Where nobody asks for what is to be sent again, as in a replay, it would be kept for ever."""
    bench = idle_agent()
    bench.obedient = True
    for _ in range(3):
        bench.release(bench.granted())
        bench.obey()
    assert bench.ledger.next_resend_ns() is None
    assert not bench.ledger._unconfirmed._orders


def test_what_was_confirmed_leaves_little_behind() -> None:
    bench = idle_agent()
    bench.obedient = True
    for _ in range(STALE_MAX):
        bench.release(bench.granted())
    bench.obey()
    assert len(bench.ledger._unconfirmed._due) <= STALE_MAX


def test_an_epoch_that_was_replaced_is_not_granted_again() -> None:
    bench = idle_agent()
    lease = bench.granted()
    bench.do(cmd.Attach(tenant=lease.tenant, lease=lease.id, request_id=RequestId("x")))
    assert [order.epoch for order in later(bench)] == [lease.epoch]


def test_a_spared_lease_is_told_so_until_it_is_heard() -> None:
    bench = idle_agent()
    victim = bench.granted(tier=Tier.SPOT, tenant=ANN)
    request = bench.queued(tenant=BEN)
    bench.release(request)
    told = [order for order in later(bench) if isinstance(order, Notify)]
    assert [(order.lease, order.take_at_ns) for order in told] == [(victim.id, None)]


def test_a_verification_is_asked_for_once() -> None:
    bench = Bench()
    lease = bench.granted()
    bench.obedient = False
    bench.release(lease)
    resource = lease.parts[0].resource
    assert lease.epoch is not None
    assert lease.node is not None
    bench.report(Failed(node=lease.node, lease=lease.id, epoch=lease.epoch, resource=resource, detail="late"))
    later(bench)
    bench.unsent.clear()
    bench.do(cmd.ClearFence(resource=resource))
    assert kinds(bench.unsent) == [Verify]
    assert later(bench) == []
