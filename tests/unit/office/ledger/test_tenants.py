"""Rights that are taken away: the generation rises, leases end as they should, and what is left is named."""

from __future__ import annotations

import pytest

from sublet.errors import InvalidRequest, NotFound, SubletError, Unauthorized
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.state import State
from sublet.values import GIB, Kind, NodeId, TenantId
from sublet.wire.orders import Failed
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, device, disk, gpu, inventory


def raise_refusal(answer: object) -> None:
    assert isinstance(answer, SubletError), answer
    raise answer


def generation(bench: Bench, tenant: TenantId = ANN) -> int:
    return bench.state.tenants[tenant].generation


def test_every_change_that_takes_something_away_is_a_new_generation_and_no_other_is() -> None:
    bench = Bench()
    assert generation(bench) == 0
    for changed, expected in (
        (cmd.SetTenant(by=LOCAL, tenant=ANN, operator=True), 0),
        (cmd.SetTenant(by=LOCAL, tenant=ANN, operator=False), 1),
        (cmd.SetTenant(by=LOCAL, tenant=ANN, token_hash="other"), 2),
        (cmd.SetTenant(by=LOCAL, tenant=ANN, token_hash="other"), 2),
        (cmd.DisableTenant(by=LOCAL, tenant=ANN), 3),
        (cmd.DisableTenant(by=LOCAL, tenant=ANN), 3),
        (cmd.EnableTenant(by=LOCAL, tenant=ANN, token_hash="third"), 4),
    ):
        bench.do(changed)
        assert generation(bench) == expected, changed


@pytest.mark.parametrize("notice", [True, False])
def test_disabling_ends_what_waits_at_once_and_the_rest_with_the_notice_of_its_tier(notice: bool) -> None:
    bench = Bench(gpus=2)
    held = bench.granted(gpu(), tenant=ANN)
    others = bench.granted(gpu(), tenant=BEN)
    waiting = bench.queued(gpu(), tenant=ANN)
    bench.do(cmd.DisableTenant(by=LOCAL, tenant=ANN, notice=notice))
    assert waiting.status is LeaseStatus.ENDED
    assert others.status is LeaseStatus.ACTIVE
    if notice:
        assert held.notice is not None
        assert held.notice.reason is EndReason.OPERATOR
        bench.wait(bench.policy.notice_for_ns(held.tier) / 1e9 + 1)
    assert held.end is not None
    assert (held.end.reason, held.status) == (EndReason.OPERATOR, LeaseStatus.ENDED)
    with pytest.raises(Unauthorized, match="is disabled"):
        raise_refusal(bench.ask(gpu(), tenant=ANN))


def test_a_tenant_is_removed_when_nothing_of_it_is_left_and_comes_back_behind_its_generation() -> None:
    bench = Bench(inventory("n1", device("disk0", Kind.BLOCK, GIB)))
    lease = bench.granted(disk(), tenant=ANN, name="kept")
    remove = cmd.RemoveTenant(by=LOCAL, tenant=ANN)
    with pytest.raises(InvalidRequest, match="still has 1 lease, 1 volume"):
        raise_refusal(bench.do(remove).answer)
    bench.release(lease)
    with pytest.raises(InvalidRequest, match="still has 1 volume"):
        raise_refusal(bench.do(remove).answer)
    bench.do(cmd.RemoveVolume(tenant=ANN, name="kept"))
    bench.do(remove)
    with pytest.raises(Unauthorized, match="no such tenant"):
        raise_refusal(bench.ask(disk(), tenant=ANN))
    with pytest.raises(NotFound):
        raise_refusal(bench.do(remove).answer)
    check_books(bench.state)
    folded = State.restore(bench.state.snapshot())
    assert folded.books.removed == {ANN: 1}
    bench.do(cmd.AddTenant(by=LOCAL, tenant=ANN, token_hash="new"))
    assert generation(bench) == 2
    assert bench.state.books.removed == {}


def test_a_device_that_another_tenant_left_in_quarantine_does_not_keep_a_tenant() -> None:
    bench = Bench()
    lease = bench.granted(gpu(), tenant=BEN)
    assert lease.epoch is not None
    bench.obedient = False
    bench.release(lease)
    of = lease.parts[0].resource
    bench.report(Failed(node=NodeId("n1"), lease=lease.id, epoch=lease.epoch, resource=of, detail="scrub", hard=True))
    with pytest.raises(InvalidRequest, match="1 quarantined device"):
        raise_refusal(bench.do(cmd.RemoveTenant(by=LOCAL, tenant=BEN)).answer)
    bench.do(cmd.RemoveTenant(by=LOCAL, tenant=ANN))
    assert ANN not in bench.state.tenants


def test_a_tenant_that_is_given_no_weight_has_one() -> None:
    """As in the books of an office that knew no weights; shares of tenants are read by it."""
    assert Bench().state.tenants[ANN].weight == 1


def test_a_weight_has_a_largest_and_a_smallest() -> None:
    """As the documents say: shares of the whole queue are computed with them, exactly."""
    bench = Bench()
    for weight in (1, 10_000):
        bench.do(cmd.SetTenant(by=LOCAL, tenant=ANN, weight=weight))
        assert bench.state.tenants[ANN].weight == weight
    for weight in (0, 10_001):
        with pytest.raises(InvalidRequest, match="weight"):
            raise_refusal(bench.do(cmd.SetTenant(by=LOCAL, tenant=ANN, weight=weight)).answer)


def test_the_owner_of_the_office_is_neither_disabled_nor_removed() -> None:
    bench = Bench()
    for command in (cmd.DisableTenant(by=LOCAL, tenant=LOCAL), cmd.RemoveTenant(by=LOCAL, tenant=LOCAL)):
        with pytest.raises(InvalidRequest, match="owner of this office"):
            raise_refusal(bench.do(command).answer)
