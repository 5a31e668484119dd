"""A request that replaces a lease is decided in one step; refused or waiting, the present lease stays."""

from __future__ import annotations

import pytest

from sublet.errors import InvalidRequest, LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.answers import Answer, Granted, Offer, Place, Refusal, RefusalCode
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.records import LeaseRecord, Quota, Want
from sublet.office.ledger.state import State
from sublet.values import GIB, Epoch, LeaseId, RequestId, TenantId, Tier
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, disk, gpu, inventory, seconds, shared


def status(lease: LeaseRecord) -> LeaseStatus:
    """As of now."""
    return lease.status


def replace(
    bench: Bench,
    old: LeaseRecord,
    *wants: Want,
    name: str = "new",
    wait_s: float | None = None,
    tenant: TenantId = BEN,
    epoch: Epoch | None = None,
    tier: Tier = Tier.INTERACTIVE,
    resume: LeaseId | None = None,
) -> Answer | SubletError:
    command = cmd.Acquire(
        tenant=tenant,
        lease=LeaseId(name),
        request_id=RequestId(name),
        wants=wants or (gpu(),),
        ttl_ns=seconds(300),
        tier=tier,
        wait_ns=None if wait_s is None else seconds(wait_s),
        replaces=old.id,
        replaces_epoch=epoch,
        resume=resume,
    )
    return bench.do(command).answer


def over(lease: LeaseRecord) -> tuple[EndReason, str]:
    assert lease.end is not None
    return lease.end.reason, lease.end.detail


# ---- decided at once


def test_where_another_device_is_free_it_is_granted_and_the_present_one_ends() -> None:
    bench = Bench(gpus=2)
    old = bench.granted(tenant=BEN)
    answer = replace(bench, old)
    assert isinstance(answer, Granted)
    assert answer.lease.parts[0].resource != "gpu0"
    assert over(old) == (EndReason.RELEASED, "replaced by new")


@pytest.mark.parametrize("wait_s", [None, 0, 60])
def test_what_needs_its_own_device_has_it_when_that_was_seen_to_be_clean(wait_s: float | None) -> None:
    """However short it would wait; and nobody gets in between, though another was there first."""
    bench = Bench(gpus=1)
    old = bench.granted(tenant=BEN)
    ann = bench.queued(tenant=ANN, lease="ann")
    bench.obedient = False
    answer = replace(bench, old, shared(4), wait_s=wait_s)
    assert isinstance(answer, Place)
    assert "being cleared" in answer.reason
    new = bench.lease("new")
    bench.wait(3)
    assert (status(new), status(ann)) == (LeaseStatus.QUEUED, LeaseStatus.QUEUED), "not before it is clean"
    bench.obey()
    assert (status(new), status(ann)) == (LeaseStatus.GRANTED, LeaseStatus.QUEUED)
    assert over(old) == (EndReason.RELEASED, "replaced by new")
    assert new.epoch is not None
    assert old.epoch is not None
    assert new.epoch > old.epoch


def test_two_devices_of_which_it_has_one() -> None:
    bench = Bench(gpus=2)
    old = bench.granted(tenant=BEN)
    assert isinstance(replace(bench, old, gpu(count=2)), Place)
    bench.obey()
    assert status(bench.lease("new")) is LeaseStatus.GRANTED
    assert isinstance(bench.claim(bench.lease("new")), Granted)


def test_its_own_part_counts_once_against_the_quota() -> None:
    bench = Bench(gpus=2, quotas={BEN: Quota(gpus=1)})
    old = bench.granted(tenant=BEN)
    assert isinstance(replace(bench, old), Granted)


def test_the_same_request_again_has_the_same_answer() -> None:
    """Though the lease that it names is over by then."""
    bench = Bench(gpus=2)
    old = bench.granted(tenant=BEN)
    first, again = replace(bench, old), replace(bench, old)
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert again.lease is first.lease


# ---- refused


@pytest.mark.parametrize("gib", [80, 16.5])
def test_what_can_never_be_had_leaves_the_present_lease_alone(gib: float) -> None:
    bench = Bench(gpus=1)
    old = bench.granted(tenant=BEN)
    answer = replace(bench, old, gpu(gib))
    assert isinstance(answer, Refusal)
    assert answer.code is RefusalCode.TOO_BIG
    assert (status(old), old.replaced_by) == (LeaseStatus.ACTIVE, None)


def test_a_refusal_counts_the_present_lease_as_free() -> None:
    """What would fit is what could be had in its place."""
    bench = Bench(gpus=2)
    old = bench.granted(tenant=BEN)
    bench.granted(tenant=ANN)
    answer = replace(bench, old, gpu(count=2), wait_s=0)
    assert isinstance(answer, Refusal)
    assert answer.would_fit == 16 * GIB
    assert status(old) is LeaseStatus.ACTIVE


def test_less_than_was_asked_for_is_offered_before_anything_ends() -> None:
    bench = Bench(inventory("n1", device("gpu0"), device("gpu1", capacity=8 * GIB)))
    old = bench.granted(gpu(12), tenant=BEN)
    answer = replace(bench, old, gpu(80, least=GIB))
    assert isinstance(answer, Offer)
    assert status(old) is LeaseStatus.ACTIVE
    assert isinstance(bench.claim(answer.lease), Granted)
    assert over(old)[0] is EndReason.RELEASED


def test_what_cannot_be_replaced_is_named() -> None:
    bench = Bench(inventory("n1", device("gpu0"), device("gpu1"), device("block", disk().kind)))
    old = bench.granted(tenant=BEN)
    blocks = bench.granted(disk(), tenant=BEN)
    assert isinstance(replace(bench, blocks), InvalidRequest)
    assert isinstance(replace(bench, old, tenant=ANN), NotFound)
    assert isinstance(replace(bench, old, epoch=Epoch(0, 1)), StaleEpoch)
    assert isinstance(replace(bench, old, wants := gpu(), resume=old.id), InvalidRequest), wants
    bench.release(old)
    assert isinstance(replace(bench, old), LeaseEnded)


# ---- waiting


def test_while_it_waits_the_present_lease_stays_and_is_renewed() -> None:
    """Its holder waits, so nothing runs under it."""
    bench = Bench(gpus=2)
    old = bench.granted(tenant=BEN)
    other = bench.granted(tenant=ANN)
    assert isinstance(replace(bench, old, gpu(count=2)), Place)
    bench.wait(200)
    assert isinstance(bench.renew(old, active=False), Granted)
    bench.renew(other)
    bench.wait(200)
    assert status(old) is LeaseStatus.ACTIVE
    assert isinstance(replace(bench, old, name="second"), InvalidRequest), "one request at a time"
    bench.release(other)
    assert over(old) == (EndReason.RELEASED, "replaced by new")
    assert status(bench.lease("new")) is LeaseStatus.GRANTED


@pytest.mark.parametrize("how", ["withdrawn", "lapsed"])
def test_a_request_that_comes_to_nothing_leaves_it(how: str) -> None:
    bench = Bench(gpus=2)
    old = bench.granted(tenant=BEN)
    bench.granted(tenant=ANN)
    replace(bench, old, gpu(count=2), wait_s=10)
    if how == "withdrawn":
        bench.release(bench.lease("new"))
    else:
        bench.wait(11)
    assert bench.lease("new").end is not None
    assert (status(old), old.replaced_by) == (LeaseStatus.ACTIVE, None)
    assert isinstance(bench.renew(old, active=False), SubletError), "nobody waits any more, and nothing runs"


def test_what_is_granted_elsewhere_keeps_it_until_the_claim() -> None:
    """And if the grant is not claimed, for good."""
    bench = Bench(inventory("n1", device("gpu0"), device("cpu", cores(1).kind)))
    old = bench.granted(cores(2), tenant=BEN)
    for name, is_claimed in (("first", False), ("second", True)):
        other = bench.granted(tenant=ANN)
        assert isinstance(replace(bench, old, name=name), Place)
        bench.release(other)
        assert status(bench.lease(name)) is LeaseStatus.GRANTED
        assert status(old) is LeaseStatus.ACTIVE
        if is_claimed:
            bench.claim(bench.lease(name))
        else:
            bench.wait(11)
            assert over(bench.lease(name))[0] is EndReason.HOLDER_GONE
            assert (status(old), old.replaced_by) == (LeaseStatus.ACTIVE, None)
    assert over(old)[0] is EndReason.RELEASED


def test_two_who_wait_for_what_the_other_has_do_not_wait_for_ever() -> None:
    """Both are idle while they wait; the first that may takes what the other has, and that one waits on."""
    bench = Bench(gpus=2)
    one, two = bench.granted(tenant=ANN), bench.granted(tenant=BEN)
    bench.idle(one)
    bench.idle(two)
    replace(bench, one, gpu(count=2), name="both1", tenant=ANN)
    replace(bench, two, gpu(count=2), name="both2", tenant=BEN)
    bench.wait(8)
    granted = [name for name in ("both1", "both2") if bench.lease(name).status is LeaseStatus.GRANTED]
    assert len(granted) == 1, [bench.lease(name).status for name in ("both1", "both2")]


def test_it_takes_turns_after_the_maximum_hold() -> None:
    """Who replaces his lease again and again holds no longer than others."""
    bench = Bench(gpus=1)
    old = bench.granted(tenant=BEN)
    for number in range(3):
        bench.wait(290)
        bench.renew(old)
        assert isinstance(replace(bench, old, name=f"new{number}"), Place)
        old = bench.lease(f"new{number}")
        assert isinstance(bench.claim(old), Granted)
    ann = bench.queued(tenant=ANN, lease="ann")
    for _ in range(4):
        bench.wait(280)
        if status(old) is LeaseStatus.ACTIVE:
            bench.renew(old)
    assert over(old)[0] is EndReason.FAIR_SHARE
    assert ann.granted_at_ns is not None


def test_a_device_that_does_not_come_clean_is_waited_for_like_any_other() -> None:
    """Free means verified: until then nobody has it."""
    bench = Bench(gpus=1)
    old = bench.granted(tenant=BEN)
    bench.obedient = False
    replace(bench, old, wait_s=5)
    bench.wait(20)
    assert status(bench.lease("new")) is LeaseStatus.QUEUED, "its wait is as long as the clearing needs"
    bench.wait(20)
    assert over(bench.lease("new"))[0] is EndReason.REFUSED


def test_a_restart_in_between_changes_nothing() -> None:
    bench = Bench(gpus=1)
    old = bench.granted(tenant=BEN)
    bench.obedient = False
    replace(bench, old)
    bench.unsent.clear()
    bench.ledger = Ledger(bench.policy, State.restore(bench.state.snapshot()))
    bench.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
    bench.do(cmd.NodeUp(inventory=inventory("n1", device("gpu0"))))
    bench.obey()
    assert status(bench.lease("new")) is LeaseStatus.GRANTED
    assert bench.folded().leases.keys() == bench.state.leases.keys()
