"""A token's claims can be narrowed and never widened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.lease.token import TokenClaims, TokenOperation, expires_latest
from sublet.values import NS_PER_S, Epoch, LeaseId, TenantId

NOW_S = 1_800_000_000
LEASE, EPOCH = LeaseId("L-1"), Epoch(1, 4)
CLAIMS = TokenClaims.issued(
    tenant=TenantId("ann"), lease=LEASE, epoch=EPOCH, ttl_ns=300 * NS_PER_S, now_s=NOW_S, key_id="k1", office="o1"
)
OPERATIONS = st.frozensets(st.sampled_from(TokenOperation), min_size=1)


@pytest.mark.parametrize(("ttl", "lives"), [(2, 62), (120, 180), (300, 360), (86_400, 360)])
def test_a_token_lives_for_the_ttl_or_five_minutes_and_a_minute_more(ttl: int, lives: int) -> None:
    assert expires_latest(ttl * NS_PER_S, NOW_S) == NOW_S + lives


def test_a_longer_life_is_refused_and_a_shorter_one_given() -> None:
    def issue(expires: int) -> TokenClaims:
        return TokenClaims.issued(
            tenant=TenantId("ann"),
            lease=LEASE,
            epoch=EPOCH,
            ttl_ns=NS_PER_S,
            now_s=NOW_S,
            key_id="k",
            office="o",
            expires=expires,
        )

    assert issue(NOW_S + 61).expires == NOW_S + 61
    with pytest.raises(InvalidRequest, match="may live for 61 s at most here, not 62 s"):
        issue(NOW_S + 62)


@given(operations=OPERATIONS, earlier=st.integers(0, 400))
def test_narrowing_keeps_the_lease_and_says_no_more_than_before(
    operations: frozenset[TokenOperation], earlier: int
) -> None:
    narrow = CLAIMS.narrow(operations=operations, expires=CLAIMS.expires - earlier)
    assert narrow == replace(CLAIMS, operations=operations, expires=CLAIMS.expires - earlier)


@given(had=OPERATIONS, wanted=OPERATIONS, later=st.integers(-5, 5))
def test_whatever_is_wider_is_an_error(
    had: frozenset[TokenOperation], wanted: frozenset[TokenOperation], later: int
) -> None:
    """A2: over every pair of rights and expiries, a narrowed token is within its parent or does not exist."""
    parent = CLAIMS.narrow(operations=had, expires=NOW_S)
    if wanted <= had and later <= 0:
        narrow = parent.narrow(operations=wanted, expires=NOW_S + later)
        assert narrow == replace(parent, operations=wanted, expires=NOW_S + later)
    else:
        with pytest.raises(InvalidRequest):
            parent.narrow(operations=wanted, expires=NOW_S + later)


@pytest.mark.parametrize(
    ("operation", "lease", "epoch", "now_s", "allowed"),
    [
        (TokenOperation.READ, LEASE, EPOCH, NOW_S, True),
        (TokenOperation.READ, LEASE, EPOCH, CLAIMS.expires - 0.001, True),
        (TokenOperation.READ, LEASE, EPOCH, CLAIMS.expires, False),
        (TokenOperation.WRITE, LEASE, EPOCH, NOW_S, False),
        (TokenOperation.READ, LeaseId("L-2"), EPOCH, NOW_S, False),
        (TokenOperation.READ, LEASE, Epoch(1, 3), NOW_S, False),
        (TokenOperation.READ, LEASE, Epoch(1, 5), NOW_S, False),
        (TokenOperation.READ, LEASE, Epoch(2, 4), NOW_S, False),
    ],
)
def test_it_opens_exactly_what_it_says(
    operation: TokenOperation, lease: LeaseId, epoch: Epoch, now_s: float, allowed: bool
) -> None:
    claims = CLAIMS.narrow(operations=[TokenOperation.READ, TokenOperation.LOGS])
    assert claims.allows(operation, lease, epoch, now_s) is allowed


def test_a_token_that_allows_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="allows nothing"):
        CLAIMS.narrow(operations=[])
