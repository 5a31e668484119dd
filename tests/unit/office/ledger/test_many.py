"""Many leases of one request: as many as there are, no fewer than was said, and the same ones when asked again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sublet.errors import IdempotencyConflict, InvalidRequest, LeaseEnded, StaleEpoch, SubletError, Unauthorized
from sublet.lease.states import LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, GrantedMany, Outcome, Place, Refusal, RefusalCode
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, Quota, Want
from sublet.values import GIB, Epoch, Kind, LeaseId, RequestId, TenantId, Tier
from tests.unit.office.ledger.bench import ANN, LOCAL, Bench, cores, device, disk, gpu, inventory, seconds, shared


def nodes(count: int = 3, capacity: int = 8) -> Bench:
    """Machines with so many cores each, and 16 GiB of memory."""
    return Bench(
        *(
            inventory(f"n{i}", device(f"cpu{i}", Kind.CPU, capacity), device(f"mem{i}", Kind.MEMORY, 16 * GIB))
            for i in range(count)
        )
    )


def many(
    count: int,
    *wants: Want,
    at_least: int = 1,
    request: str = "r",
    prefix: str = "M",
    tenant: TenantId = LOCAL,
    wait_s: float | None = 0,
    **more: Any,
) -> cmd.AcquireMany:
    each = cmd.Acquire(
        tenant=tenant,
        lease=LeaseId(f"{prefix}0"),
        request_id=RequestId(request),
        wants=wants or (cores(1),),
        ttl_ns=seconds(300),
        wait_ns=None if wait_s is None else seconds(wait_s),
        **more,
    )
    leases = tuple(LeaseId(f"{prefix}{i}") for i in range(count))
    return cmd.AcquireMany(tenant=tenant, each=each, leases=leases, at_least=at_least)


def granted(outcome: Outcome) -> tuple[LeaseRecord, ...]:
    assert isinstance(outcome.answer, GrantedMany), outcome.answer
    return outcome.answer.leases


def refused(outcome: Outcome) -> Refusal:
    assert isinstance(outcome.answer, Refusal), outcome.answer
    assert not outcome.events
    assert not outcome.orders
    return outcome.answer


def test_each_lease_has_an_id_and_an_epoch_of_its_own_and_is_active_at_once() -> None:
    bench = nodes()
    leases = granted(bench.do(many(20, cores(1))))
    assert [lease.id for lease in leases] == [f"M{i}" for i in range(20)]
    assert [lease.epoch for lease in leases] == [Epoch(1, n) for n in range(1, 21)]
    assert {lease.status for lease in leases} == {LeaseStatus.ACTIVE}
    assert [lease.node for lease in leases] == ["n0"] * 8 + ["n1"] * 8 + ["n2"] * 4


def test_they_lie_where_single_requests_would_lie() -> None:
    """The place of each is what `fit` says when the ones before it are there."""
    wants = (cores(3), Want(kind=Kind.MEMORY, amount=5 * GIB))
    together, apart = nodes(), nodes()
    placed = [lease.parts for lease in granted(together.do(many(10, *wants)))]
    singly = []
    while isinstance(answer := apart.ask(*wants, wait_s=0), Granted):
        singly.append(answer.lease.parts)
    assert placed == singly
    assert len(placed) == 6


def test_fewer_are_granted_where_fewer_are_free() -> None:
    bench = nodes(1)
    assert len(granted(bench.do(many(20)))) == 8


def test_every_agent_must_hold_its_orders_before_the_answer_is_seen() -> None:
    outcome = nodes().do(many(10))
    leases = granted(outcome)
    assert outcome.holds == tuple((lease.id, lease.number) for lease in leases)
    assert len(outcome.orders) == 10


def test_with_fewer_than_at_least_nothing_is_granted_and_the_refusal_says_how_many_would_fit() -> None:
    bench = nodes(1)
    refusal = refused(bench.do(many(20, at_least=9)))
    assert refusal.code is RefusalCode.CAPACITY
    assert refusal.reason == "9 leases with 1 core each are not free now; 8 would fit"
    assert bench.state.live_count == 0
    assert len(granted(bench.do(many(20, at_least=8, request="again")))) == 8


def test_all_or_nothing_is_granted_as_a_whole() -> None:
    assert len(granted(nodes().do(many(24, at_least=24)))) == 24


def test_where_none_is_free_one_waits_in_the_queue() -> None:
    bench = nodes(1)
    granted(bench.do(many(8)))
    answer = bench.do(many(5, request="later", prefix="W", wait_s=None)).answer
    assert isinstance(answer, Place)
    assert answer.lease.id == "W0"
    assert bench.state.queued_count == 1
    bench.release(bench.lease("M3"))
    assert bench.lease("W0").status is LeaseStatus.GRANTED
    again = bench.do(many(5, request="later", prefix="X", wait_s=None)).answer
    assert isinstance(again, Granted)
    assert again.lease.id == "W0"
    assert isinstance(bench.claim(bench.lease("W0")), Granted)
    assert [lease.id for lease in granted(bench.do(many(5, request="later", prefix="X", wait_s=None)))] == ["W0"]


def test_where_none_is_free_and_nobody_waits_it_is_refused_as_for_one() -> None:
    bench = nodes(1)
    granted(bench.do(many(8)))
    refusal, single = refused(bench.do(many(5, request="b", prefix="W"))), bench.refused(cores(1), wait_s=0)
    assert refusal == single


def test_more_than_any_machine_has_is_refused_for_good() -> None:
    bench = nodes()
    for at_least in (1, 2):
        assert (
            refused(bench.do(many(2, cores(9), at_least=at_least, request=f"{at_least}"))).code is RefusalCode.TOO_BIG
        )


@pytest.mark.parametrize(
    ("quota", "most"),
    [
        (Quota(leases=3), 3),
        (Quota(cores=7), 3),
        (Quota(memory_bytes=4 * GIB), 4),
        (Quota(leases=5, cores=2), 1),
    ],
)
def test_the_quota_bounds_how_many(quota: Quota, most: int) -> None:
    bench = nodes()
    bench.do(cmd.SetTenant(tenant=LOCAL, quota=quota))
    wants = (cores(2), Want(kind=Kind.MEMORY, amount=GIB))
    assert len(granted(bench.do(many(9, *wants)))) == most
    over = refused(bench.do(many(9, *wants, at_least=2, request="more", prefix="X")))
    assert over.code is RefusalCode.QUOTA
    assert refused(bench.do(many(9, *wants, request="one more", prefix="Y"))).code is RefusalCode.QUOTA


def test_gpu_seconds_that_are_used_up_leave_none() -> None:
    bench = Bench(gpus=2, quotas={ANN: Quota(gpu_seconds=10)})
    lease = bench.granted(gpu(), tenant=ANN, ttl_s=300)
    bench.at(1020)
    bench.release(lease)
    assert refused(bench.do(many(2, gpu(), tenant=ANN))).code is RefusalCode.QUOTA


def test_exclusive_gpus_and_shared_slices_are_counted_as_such() -> None:
    assert len(granted(Bench(gpus=3).do(many(9, gpu(16))))) == 3
    assert len(granted(Bench(gpus=3).do(many(99, shared(4))))) == 12
    assert len(granted(Bench(gpus=5).do(many(9, gpu(16, count=2))))) == 2


def test_a_tier_that_the_tenant_may_not_have_is_refused() -> None:
    bench = nodes()
    bench.do(cmd.SetTenant(tenant=ANN, tier_max=Tier.BATCH))
    assert refused(bench.do(many(2, tenant=ANN, tier=Tier.INTERACTIVE))).code is RefusalCode.QUOTA


def test_the_limit_of_the_office_bounds_how_many() -> None:
    bench = Bench(inventory("n", device("cpu", Kind.CPU, 8)), policy=Policy(leases_max=5))
    assert len(granted(bench.do(many(8)))) == 5
    assert refused(bench.do(many(8, request="b", prefix="X"))).code is RefusalCode.LIMIT


# ---- the same request again


def test_the_same_request_again_is_the_same_leases_again() -> None:
    """The answer was lost. What has come free meanwhile is not added: it is one request."""
    bench = nodes(1)
    first = granted(bench.do(many(12)))
    bench.do(cmd.NodeUp(inventory=inventory("more", device("cpu-more", Kind.CPU))))
    again = bench.do(many(12, prefix="X"))
    assert [(lease.id, lease.epoch) for lease in granted(again)] == [(lease.id, lease.epoch) for lease in first]
    assert again.holds == tuple((lease.id, lease.number) for lease in first)
    assert not again.events
    assert bench.state.live_count == 8


def test_what_has_ended_of_it_is_not_in_the_answer_again() -> None:
    bench = nodes(1)
    granted(bench.do(many(4)))
    bench.release(bench.lease("M0"))
    bench.release(bench.lease("M2"))
    assert [lease.id for lease in granted(bench.do(many(4, prefix="X")))] == ["M1", "M3"]
    for name in ("M1", "M3"):
        bench.release(bench.lease(name))
    assert isinstance(bench.do(many(4, prefix="X")).answer, LeaseEnded)
    assert bench.state.live_count == 0


def test_it_is_known_by_its_other_leases_when_the_first_is_forgotten() -> None:
    bench = Bench(inventory("n", device("cpu", Kind.CPU, 8)), policy=Policy(ended_keep_ns=seconds(60)))
    granted(bench.do(many(3)))
    bench.release(bench.lease("M0"))
    for name in ("M1", "M2"):
        bench.renew(bench.lease(name))
    bench.wait(100)
    assert LeaseId("M0") not in bench.state.leases
    assert [lease.id for lease in granted(bench.do(many(3, prefix="X")))] == ["M1", "M2"]


@pytest.mark.parametrize(
    "other",
    [
        many(5, prefix="X"),
        many(4, prefix="X", at_least=2),
        many(4, cores(2), prefix="X"),
        many(4, prefix="X", name="n"),
    ],
)
def test_the_same_id_with_other_content_is_refused(other: cmd.AcquireMany) -> None:
    bench = nodes()
    granted(bench.do(many(4)))
    outcome = bench.do(other)
    assert isinstance(outcome.answer, IdempotencyConflict)
    assert not outcome.events


def test_an_id_of_one_lease_is_not_one_of_many_nor_the_other_way_round() -> None:
    bench = nodes()
    granted(bench.do(many(2, request="many")))
    assert isinstance(bench.ask(cores(1), request="many", wait_s=0), IdempotencyConflict)
    bench.granted(cores(1), request="one", wait_s=0)
    assert isinstance(bench.do(many(2, request="one", prefix="X")).answer, IdempotencyConflict)
    assert isinstance(bench.ask(cores(1), request="many/1", wait_s=0), IdempotencyConflict)


def test_a_repeated_request_finds_its_leases_after_a_restart() -> None:
    bench = nodes()
    first = [(lease.id, lease.epoch) for lease in granted(bench.do(many(9)))]
    state = bench.folded()
    assert {state.requests[LOCAL, RequestId("r")], state.requests[LOCAL, RequestId("r/8")]} == {"M0", "M8"}
    bench.ledger.state = state
    assert [(lease.id, lease.epoch) for lease in granted(bench.do(many(9, prefix="X")))] == first


def test_another_tenants_request_of_the_same_id_is_another_request() -> None:
    bench = nodes()
    granted(bench.do(many(2)))
    assert [lease.id for lease in granted(bench.do(many(2, tenant=ANN, prefix="A")))] == ["A0", "A1"]


# ---- what is refused


@pytest.mark.parametrize(
    "bad",
    [
        many(0),
        many(1025),
        many(4, at_least=0),
        many(4, at_least=5),
        many(4, at_least=2, wait_s=None),
        many(4, at_least=2, wait_s=1),
        many(4, resume=LeaseId("L9")),
        many(4, replaces=LeaseId("L9")),
        many(4, gpu(8, least=GIB)),
        many(4, disk(), name="ckpt"),
        many(4, disk(), retain_ns=seconds(5)),
        many(4, Want(kind=Kind.CPU, amount=0)),
        many(4, request="r" * 121),
        many(4, request=""),
        msgspec.structs.replace(many(2), leases=(LeaseId("M0"), LeaseId("M0"))),
    ],
)
def test_bad_requests_change_nothing(bad: cmd.AcquireMany) -> None:
    bench = nodes()
    before = bench.state.snapshot()
    outcome = bench.do(bad)
    assert isinstance(outcome.answer, InvalidRequest), outcome.answer
    assert not outcome.events
    assert not outcome.orders
    assert bench.state.snapshot() == before


def test_a_tenant_that_does_not_exist_gets_none() -> None:
    assert isinstance(nodes().do(many(2, tenant=TenantId("eve"))).answer, Unauthorized)


def test_a_lease_id_that_is_taken_is_refused() -> None:
    bench = nodes()
    bench.granted(cores(1), lease="M1")
    assert isinstance(bench.do(many(3)).answer, InvalidRequest)


# ---- what follows


def test_each_ends_by_itself() -> None:
    bench = nodes(1)
    leases = granted(bench.do(many(3)))
    bench.release(leases[1])
    bench.at(1200)
    bench.renew(leases[2])
    bench.wait(150)
    assert [str(bench.lease(f"M{i}").status) for i in range(3)] == ["ended", "ended", "active"]


def test_a_release_that_means_an_older_epoch_changes_nothing() -> None:
    """Another program attached to the lease meanwhile."""
    bench = nodes(1)
    (lease,) = granted(bench.do(many(1)))
    old = lease.epoch
    bench.do(cmd.Attach(tenant=LOCAL, lease=lease.id, request_id=RequestId("a")))
    refused_release = bench.do(cmd.Release(tenant=LOCAL, lease=lease.id, epoch=old)).answer
    assert isinstance(refused_release, StaleEpoch)
    assert str(lease.status) == "active"
    assert not isinstance(bench.do(cmd.Release(tenant=LOCAL, lease=lease.id, epoch=lease.epoch)).answer, SubletError)
    assert str(lease.status) == "ended"


def test_every_lease_is_in_the_journal_as_if_it_were_asked_for_alone() -> None:
    bench = nodes()
    events = bench.do(many(3)).events
    assert [type(event) for event in events] == [ev.Queued, ev.Granted, ev.Claimed] * 3
    assert {event.by for event in events if isinstance(event, ev.Granted)} == {f"tenant:{LOCAL}"}
