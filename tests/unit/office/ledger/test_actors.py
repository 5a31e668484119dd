"""Every audited fact says whose doing it was: a tenant's, an operator's, or the office's own."""

from __future__ import annotations

import pytest

from sublet.errors import NotFound
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.commands import OFFICE
from sublet.office.ledger.records import Quota, Want
from sublet.values import GIB, Kind, NodeId, RequestId, ResourceId, TenantId, Tier
from sublet.wire.orders import Failed
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, gpu

ANN_HERSELF = "tenant:ann"
OPERATOR = "operator:local"


def since(bench: Bench, mark: int) -> dict[str, set[str]]:
    """Who did what after that many facts, by the name of the fact."""
    found: dict[str, set[str]] = {}
    for event in bench.events[mark:]:
        if type(event) in ev.AUDITED:
            found.setdefault(type(event).__name__, set()).add(event.by)  # type: ignore[union-attr]
    return found


def test_what_a_holder_asks_is_the_holders_doing_and_what_the_agent_says_the_offices() -> None:
    bench = Bench()
    mark = len(bench.events)
    lease = bench.granted(gpu(), tenant=ANN)
    bench.do(cmd.Attach(tenant=ANN, lease=lease.id, request_id=RequestId("again")))
    bench.release(lease)
    assert since(bench, mark) == {
        "Queued": {ANN_HERSELF},
        "Granted": {ANN_HERSELF},
        "Claimed": {ANN_HERSELF},
        "Attached": {ANN_HERSELF},
        "Ending": {ANN_HERSELF},
        "TornDown": {OFFICE},
        "Ended": {OFFICE},
    }


def test_an_operator_that_asks_for_itself_is_told_apart_from_a_tenant() -> None:
    bench = Bench()
    mark = len(bench.events)
    lease = bench.granted(gpu())
    bench.do(cmd.Release(tenant=LOCAL, operator=True, lease=lease.id))
    assert since(bench, mark)["Ending"] == {OPERATOR}


def test_a_lease_that_an_operator_releases_for_another_is_named_with_the_command_that_ends_it() -> None:
    """A member learns no more than that it has no such lease."""
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN)
    refused = bench.do(cmd.Release(tenant=LOCAL, operator=True, lease=lease.id)).answer
    assert isinstance(refused, NotFound)
    assert (refused.message, refused.do) == (
        f"lease {lease.id} is held by tenant ann",
        f"`sublet lease revoke {lease.id}` ends it.",
    )
    hidden = bench.do(cmd.Release(tenant=BEN, lease=lease.id)).answer
    assert isinstance(hidden, NotFound)
    assert hidden.message == f"there is no lease {lease.id}"


def test_a_grant_out_of_the_line_is_by_the_office_and_its_claim_by_the_holder() -> None:
    bench = Bench()
    first = bench.granted(gpu(), tenant=ANN)
    second = bench.queued(gpu(), tenant=BEN)
    mark = len(bench.events)
    bench.release(first)
    bench.claim(second)
    found = since(bench, mark)
    assert (found["Ending"], found["Granted"], found["Claimed"]) == ({ANN_HERSELF}, {OFFICE}, {"tenant:ben"})


def test_a_preemption_is_decided_by_the_office_whoever_came() -> None:
    bench = Bench()
    bench.granted(gpu(), tenant=ANN, tier=Tier.SPOT)
    mark = len(bench.events)
    bench.queued(gpu(), tenant=BEN)
    assert since(bench, mark) == {"Queued": {"tenant:ben"}, "Promised": {OFFICE}, "Noticed": {OFFICE}}


def test_time_is_the_office_also_where_a_late_caller_makes_it_look() -> None:
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN, ttl_s=10)
    mark = len(bench.events)
    bench.at(2000)
    bench.renew(lease)
    assert since(bench, mark)["Ending"] == {OFFICE}


def test_declining_is_the_holders_doing_and_silence_the_offices() -> None:
    bench = Bench()
    bench.granted(Want(kind=Kind.GPU, amount=GIB), tenant=BEN)
    mark = len(bench.events)
    waiting = bench.queued(gpu(), tenant=ANN)
    bench.do(cmd.Release(tenant=ANN, lease=waiting.id, gone=True))
    assert since(bench, mark) == {"Queued": {ANN_HERSELF}, "Ended": {OFFICE}}
    other = bench.queued(gpu(), tenant=ANN)
    mark = len(bench.events)
    bench.do(cmd.Release(tenant=ANN, lease=other.id))
    assert since(bench, mark) == {"Ended": {ANN_HERSELF}}


def test_what_only_operators_may_do_names_the_operator() -> None:
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN)
    mark = len(bench.events)
    bench.do(cmd.Revoke(by=LOCAL, lease=lease.id))
    bench.do(cmd.SetTenant(by=LOCAL, tenant=ANN, quota=Quota(gpus=3)))
    bench.do(cmd.AddTenant(by=LOCAL, tenant=TenantId("new"), token_hash="x"))
    other = bench.granted(gpu(), tenant=ANN)
    drained = len(bench.events)
    bench.do(cmd.Drain(by=LOCAL, node=NodeId("n1")))
    assert since(bench, mark)["Ending"] == {OPERATOR}
    assert since(bench, mark)["TenantSet"] == {OPERATOR}
    assert since(bench, drained) == {"NodeDrained": {OPERATOR}, "Noticed": {OPERATOR}}
    assert other.notice is not None


@pytest.mark.parametrize(("vouch", "by"), [(True, OPERATOR), (False, OFFICE)])
def test_a_quarantine_ends_by_a_word_or_by_a_verification(vouch: bool, by: str) -> None:
    bench, gpu0 = Bench(), ResourceId("gpu0")
    lease = bench.granted(gpu(), tenant=ANN)
    assert lease.epoch is not None
    bench.obedient = False
    bench.release(lease)
    bench.report(Failed(node=NodeId("n1"), lease=lease.id, epoch=lease.epoch, resource=gpu0, detail="late"))
    bench.unsent.clear()
    bench.obedient = True
    mark = len(bench.events)
    bench.do(cmd.ClearFence(by=LOCAL, resource=gpu0, vouch=vouch))
    assert since(bench, mark)["Cleared"] == {by}


def test_no_audited_fact_is_without_a_name() -> None:
    """The opening of the office included; what is not audited names nobody."""
    bench = Bench()
    lease = bench.granted(gpu(), tenant=ANN)
    bench.renew(lease)
    for event in bench.events:
        assert bool(getattr(event, "by", "")) is (type(event) in ev.AUDITED), event
