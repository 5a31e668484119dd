"""What belongs to a request, field by field: its fingerprint, its record, and the busy time that holders report."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from sublet.errors import IdempotencyConflict, InvalidRequest, LeaseRevoked
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.admission import fingerprint
from sublet.office.ledger.answers import Granted
from sublet.office.ledger.bills import Rates
from sublet.office.ledger.budgets import prices_record
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, ProcessRecord, Want
from sublet.values import GIB, Epoch, Exclusivity, Kind, LeaseId, RenewMode, RequestId, TenantId, Tier
from tests.unit.office.ledger.bench import ANN, BEN, Bench, device, gpu, inventory, seconds

BASE: Final = cmd.Acquire(
    tenant=ANN, lease=LeaseId("L1"), request_id=RequestId("r1"), wants=(gpu(),), ttl_ns=seconds(300)
)
OTHER: Final[dict[str, Any]] = {
    "wants": (gpu(4),),
    "ttl_ns": seconds(301),
    "tier": Tier.BATCH,
    "wait_ns": 0,
    "expect_ns": seconds(10),
    "selector": {"zone": "a"},
    "renew": RenewMode.ALWAYS,
    "name": "ckpt",
    "labels": {"course": "ml"},
    "resume": LeaseId("L9"),
    "resume_epoch": Epoch(1, 9),
    "replaces": LeaseId("L9"),
    "replaces_epoch": Epoch(1, 9),
    "retain_ns": seconds(60),
    "pays_priority": True,
}
"""The content of a request: each field with a value other than that of ``BASE``."""
ABOUT_THE_CALLER: Final[dict[str, Any]] = {
    "operator": True,
    "lease": LeaseId("L2"),
    "holder": "another program",
    "peer": "uid 1001, pid 7",
    "process": ProcessRecord(pid=7, start_ticks=7, boot_id="b", namespaces="n"),
}
"""Who asks this time: a repeated request may come from a program that was started again."""
WANT: Final = Want(kind=Kind.GPU, amount=8 * GIB)
OTHER_WANTS: Final[dict[str, Any]] = {
    "kind": Kind.MEMORY,
    "amount": 4 * GIB,
    "count": 2,
    "exclusivity": Exclusivity.SHARED,
    "model": "H200",
    "least": GIB,
    "other": "A100",
}


def asked_again(first: cmd.Acquire, second: cmd.Acquire) -> tuple[LeaseRecord, object]:
    bench = Bench(inventory("n1", device("gpu0", model="H200"), device("gpu1", model="H200"), zone="a"))
    granted = bench.do(first).answer
    assert isinstance(granted, Granted), granted
    bench.at(1010)
    return granted.lease, bench.do(second).answer


def test_every_field_of_a_request_is_either_its_content_or_about_the_caller() -> None:
    """A new field has to be put into one of the two."""
    assert {*OTHER, *ABOUT_THE_CALLER, "tenant", "request_id"} == set(cmd.Acquire.__struct_fields__)
    assert set(OTHER_WANTS) == set(Want.__struct_fields__)


@pytest.mark.parametrize("field", [field for field in OTHER if not field.endswith("_epoch")])
def test_a_request_id_that_comes_again_with_other_content_is_refused(field: str) -> None:
    """Whatever differs: the answer to the first request would be no answer to the second."""
    second = msgspec.structs.replace(BASE, lease=LeaseId("L2"), **{field: OTHER[field]})
    lease, answer = asked_again(BASE, second)
    assert isinstance(answer, IdempotencyConflict), answer
    assert lease.ttl_ns == BASE.ttl_ns


@pytest.mark.parametrize("field", OTHER_WANTS)
def test_each_field_of_what_is_wanted_is_content(field: str) -> None:
    wanted = msgspec.structs.replace(WANT, model="H200") if field == "other" else WANT  # beside which alone it may be
    want = msgspec.structs.replace(wanted, **{field: OTHER_WANTS[field]})
    first = msgspec.structs.replace(BASE, wants=(wanted,))
    lease, answer = asked_again(first, msgspec.structs.replace(first, lease=LeaseId("L2"), wants=(want,)))
    assert isinstance(answer, IdempotencyConflict), answer
    assert lease.wants == (wanted,)


@pytest.mark.parametrize("field", ABOUT_THE_CALLER)
def test_a_request_that_is_repeated_by_another_program_has_the_same_answer(field: str) -> None:
    lease, answer = asked_again(BASE, msgspec.structs.replace(BASE, **{field: ABOUT_THE_CALLER[field]}))
    assert isinstance(answer, Granted), answer
    assert answer.lease is lease


def test_two_tenants_may_use_the_same_request_id() -> None:
    lease, answer = asked_again(BASE, msgspec.structs.replace(BASE, tenant=BEN, lease=LeaseId("L2"), wants=(gpu(4),)))
    assert isinstance(answer, Granted), answer
    assert answer.lease.id != lease.id


@pytest.mark.parametrize("names", ["resume", "replaces"])
def test_the_epoch_of_a_lease_that_is_named_is_content(names: str) -> None:
    epochs = (None, Epoch(1, 8), Epoch(1, 9))
    named = [msgspec.structs.replace(BASE, **{names: LeaseId("L9"), f"{names}_epoch": epoch}) for epoch in epochs]
    assert len({fingerprint(one) for one in named}) == len(epochs)


# ---- what is written down of it


def test_every_field_of_a_request_is_in_the_record_of_its_lease() -> None:
    """The journal has the record and not the request, so what is missing there is forgotten."""
    said: dict[str, Any] = {
        **OTHER,
        "wants": (gpu(8),),
        "wait_ns": seconds(5),
        "holder": "train.py",
        "process": ABOUT_THE_CALLER["process"],
    }
    for field in ("resume", "resume_epoch", "replaces", "replaces_epoch", "name", "retain_ns"):
        del said[field]
    bench = Bench(inventory("n1", device("gpu0"), zone="a"))
    bench.do(cmd.SetPrices(prices=prices_record(Rates(priority=1))))
    answer = bench.do(msgspec.structs.replace(BASE, **said)).answer
    assert isinstance(answer, Granted), answer
    record = bench.folded().leases[LeaseId("L1")]
    for field, value in {**said, "tenant": ANN, "request_id": RequestId("r1")}.items():
        if field == "wait_ns":
            assert record.wait_until_ns == record.asked_at_ns + value
        else:
            assert getattr(record, field) == value, field


# ---- busy time


def ended_with(bench: Bench) -> ev.Ending:
    (ending,) = (event for event in bench.events if isinstance(event, ev.Ending))
    return ending


def release(bench: Bench, lease: LeaseRecord, busy_s: float) -> ev.Ending:
    bench.do(cmd.Release(tenant=lease.tenant, lease=lease.id, busy_ns=seconds(busy_s)))
    return ended_with(bench)


def test_busy_time_that_comes_with_the_release_is_counted_once() -> None:
    """It is what the bill says: what renewals reported before, and what the release adds."""
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN)
    bench.at(1060)
    bench.renew(lease, busy_ns=seconds(10))
    bench.at(1120)
    ending = release(bench, lease, 20)
    assert ending.busy_ns == seconds(30)
    assert bench.folded().leases[lease.id].busy_ns == seconds(30)


def test_a_release_that_is_repeated_counts_its_busy_time_once() -> None:
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN)
    bench.at(1060)
    release(bench, lease, 20)
    assert release(bench, lease, 20).busy_ns == seconds(20)
    assert lease.busy_ns == seconds(20)


def test_nobody_was_busy_for_longer_than_they_held_the_lease() -> None:
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN)
    bench.at(1060)
    bench.renew(lease, busy_ns=seconds(50))
    assert release(bench, lease, 50).busy_ns == seconds(60)


@pytest.mark.parametrize("how", ["renews", "is refused", "says so"])
def test_busy_time_counts_whatever_it_comes_with(how: str) -> None:
    """Each way in which a holder reports is taken once. Also a renewal that is refused for want of work: the work that
    was done before is on the bill."""
    bench = Bench(policy=Policy())
    lease = bench.granted(gpu(), tenant=ANN)
    assert lease.epoch is not None
    bench.at(1060)
    if how == "says so":
        busy = seconds(25)
        bench.do(cmd.NoteActivity(tenant=TenantId(ANN), lease=lease.id, epoch=lease.epoch, active=False, busy_ns=busy))
    else:
        answer = bench.renew(lease, active=how == "renews", busy_ns=seconds(25))
        assert isinstance(answer, Granted if how == "renews" else LeaseRevoked)
    assert lease.busy_ns == seconds(25)
    assert release(bench, lease, 5).busy_ns == seconds(30)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "x" * 500, "two words"])
def test_a_name_that_is_none_is_refused_and_changes_nothing(name: str) -> None:
    """It becomes the name of a folder."""
    bench = Bench()
    refused = bench.do(msgspec.structs.replace(BASE, name=name)).answer
    assert isinstance(refused, InvalidRequest)
    assert "name" in str(refused)
    assert not bench.state.leases
