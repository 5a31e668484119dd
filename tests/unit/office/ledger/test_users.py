"""A tenant that is bound to a user of the machine: one user, one tenant, and who may leave the token away."""

from __future__ import annotations

from typing import Any

import pytest

from sublet.errors import InvalidRequest
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.records import LOCAL_TENANT
from sublet.values import TenantId
from tests.unit.office.ledger.bench import LOCAL, Bench

LAB, OTHER = TenantId("lab-1"), TenantId("lab-2")


def added(bench: Bench, tenant: TenantId, **more: Any) -> object:
    return bench.do(cmd.AddTenant(by=LOCAL, tenant=tenant, token_hash=f"hash of {tenant}", **more)).answer


def changed(bench: Bench, tenant: TenantId, **more: Any) -> object:
    return bench.do(cmd.SetTenant(by=LOCAL, tenant=tenant, **more)).answer


def user_of(bench: Bench, tenant: TenantId) -> tuple[int | None, bool]:
    record = bench.state.tenants[tenant]
    return record.uid, record.needs_token


def test_a_user_is_bound_unbound_and_bound_to_another_tenant() -> None:
    bench = Bench()
    added(bench, LAB, uid=1001, needs_token=False)
    assert user_of(bench, LAB) == (1001, False)
    changed(bench, LAB, no_uid=True)
    assert user_of(bench, LAB) == (None, True), "without a user its token is needed again"
    added(bench, OTHER, uid=1001)
    assert user_of(bench, OTHER) == (1001, True)
    changed(bench, OTHER, needs_token=False)
    changed(bench, OTHER, tier_max=None)
    assert user_of(bench, OTHER) == (1001, False), "what is not given stays"


def test_what_was_opened_under_another_user_is_not_valid_any_more() -> None:
    """Nor what was opened without a token that is needed again; what only adds to its rights cuts nothing."""
    bench = Bench()
    added(bench, LAB)
    seen = [bench.state.tenants[LAB].generation]
    steps = ({"uid": 1001}, {"needs_token": False}, {"needs_token": True}, {"uid": 1002}, {"no_uid": True})
    for more in steps:
        changed(bench, LAB, **more)
        seen.append(bench.state.tenants[LAB].generation)
    assert seen == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"uid": 1001}, "user 1001 is tenant lab-1 already"),
        ({"uid": -1}, "no user number"),
        ({"uid": (1 << 32) - 1}, "no user number"),
        ({"needs_token": False}, "bound to no user"),
        ({"uid": 1002, "needs_token": False, "operator": True}, "an operator always shows its token"),
    ],
)
def test_a_binding_that_makes_no_sense_is_refused_and_changes_nothing(more: dict[str, Any], said: str) -> None:
    bench = Bench()
    added(bench, LAB, uid=1001)
    before = dict(bench.state.tenants)
    refused = added(bench, OTHER, **more)
    assert isinstance(refused, InvalidRequest), refused
    assert said in refused.message
    assert bench.state.tenants == before
    added(bench, OTHER)
    before = dict(bench.state.tenants)
    refused = changed(bench, OTHER, **more)
    assert isinstance(refused, InvalidRequest), refused
    assert said in refused.message
    assert bench.state.tenants == before


def test_the_owner_is_bound_to_no_user() -> None:
    refused = changed(Bench(), LOCAL_TENANT, uid=1001)
    assert isinstance(refused, InvalidRequest)
    assert "owner of the office" in refused.message
