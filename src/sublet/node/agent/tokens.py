"""Verifies capability tokens offline, one per connection.

A token is never enough: what it opens must still be live where it arrives (``Node.check``). What is decided here
is only whether the office signed it, whether it is still valid, and what is left of it after each holder that handed it
on has narrowed it. All refusals are alike, so that a caller learns nothing from one.

A Biscuit is a signed block of facts and, behind it, blocks that holders appended. An appended block can state checks,
which must all hold; facts that it states are visible only to itself. So the claims are read from the first block
only, and where blocks were appended each operation they name is tried against all checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final

from biscuit_auth import (
    AuthorizationError,
    Authorizer,
    AuthorizerBuilder,
    Biscuit,
    BiscuitValidationError,
    BlockBuilder,
    PublicKey,
    Rule,
)

from sublet.errors import InvalidRequest, Unauthorized
from sublet.lease.token import TokenClaims, TokenOperation
from sublet.values import Epoch, LeaseId, TenantId

TOKEN_LENGTH_MAX: Final = 8192
"""Characters. A fresh token has 600; each narrowing adds about 250."""
_BLOCKS_MAX: Final = 16
_FACTS_MAX: Final = 200
_ROUNDS_MAX: Final = 20
_TIME_MAX: Final = timedelta(milliseconds=200)
"""Time limit of the checks in appended blocks, by any author."""

_NOT_OURS: Final = (BiscuitValidationError, AuthorizationError, InvalidRequest, KeyError, ValueError)

_CLAIMS: Final = Rule(
    "claims($tenant, $lease, $incarnation, $n, $office, $expires) <- "
    "tenant($tenant), lease($lease), epoch($incarnation, $n), office($office), expires($expires)"
)
_GENERATION: Final = Rule("of_generation($generation) <- generation($generation)")
_ACTOR: Final = Rule("of_actor($name, $generation) <- actor($name, $generation)")
_MAY: Final = Rule("may_do($operation) <- may($operation)")
_EARLIER: Final = re.compile(r"check if now\(\$now\), \$now < (\d{1,18});")


def verify(token: str, public_keys: Mapping[str, bytes], now_s: int) -> TokenClaims:
    """What the token says, if the office said it and it is valid now (``now_s``: seconds of the wall clock).

    ``public_keys`` are the office's, by key id. Raises ``Unauthorized`` for everything else.
    """
    try:
        biscuit, key_id = _read(token, public_keys)
        found = _judged(biscuit, now_s, None)
        claims = found.query(_CLAIMS)
        if len(claims) != 1:
            raise ValueError("not one set of claims")
        tenant, lease, incarnation, n, office, expires = claims[0].terms
        generations = found.query(_GENERATION)  # a token of an earlier version says none, and is of the first
        if len(generations) > 1:
            raise ValueError("not one generation")
        actors = found.query(_ACTOR)
        if len(actors) > 1:
            raise ValueError("not one actor")
        allowed = frozenset(TokenOperation(fact.terms[0]) for fact in found.query(_MAY))
        if biscuit.block_count() == 1:  # nothing was appended, so no check is about an operation
            found.authorize()
            operations = allowed
        else:
            operations = frozenset(operation for operation in allowed if _holds(biscuit, now_s, operation))
        return TokenClaims(
            tenant=TenantId(tenant),
            lease=LeaseId(lease),
            epoch=Epoch(incarnation, n),
            operations=operations,
            expires=_earliest(biscuit, expires),
            key_id=key_id,
            office=office,
            generation=generations[0].terms[0] if generations else 0,
            actor=(TenantId(actors[0].terms[0]), actors[0].terms[1]) if actors else None,
        )
    except _NOT_OURS:
        raise _refusal() from None


def narrow(
    token: str,
    public_keys: Mapping[str, bytes],
    *,
    operations: Iterable[TokenOperation] | None = None,
    expires: int | None = None,
) -> str:
    """A token for less, to hand on. No private key is needed, and what is asked for in excess is not there."""
    block = BlockBuilder("")
    if operations is not None:
        allowed = {operation.value for operation in operations}
        if not allowed:
            raise InvalidRequest("a token that allows nothing", do=f"Allow some of: {', '.join(TokenOperation)}.")
        block.add_code("check if operation($operation), {allowed}.contains($operation);", {"allowed": allowed})
    if expires is not None:
        block.add_code("check if now($now), $now < {expires};", {"expires": expires})
    try:
        return _read(token, public_keys)[0].append(block).to_base64()
    except _NOT_OURS:
        raise InvalidRequest("that is not a capability token of this office") from None


def _read(token: str, public_keys: Mapping[str, bytes]) -> tuple[Biscuit, str]:
    """A token with good signatures, and the id of its key."""
    key_ids: list[str] = []

    def key_of(number: int | None) -> PublicKey:
        key_ids.append(f"{number or 0:08x}")
        return PublicKey("ed25519/" + public_keys[key_ids[-1]].hex())

    if len(token) > TOKEN_LENGTH_MAX:
        raise ValueError("too long")
    biscuit = Biscuit.from_base64(token, key_of)
    # The same token can be written in many ways (unknown fields, other paddings); only one of them is ours.
    if biscuit.to_base64() != token or biscuit.block_count() > _BLOCKS_MAX:
        raise ValueError("not as the office writes it")
    return biscuit, key_ids[-1]


def _judged(biscuit: Biscuit, now_s: int, operation: TokenOperation | None) -> Authorizer:
    builder = AuthorizerBuilder("now({now}); allow if true;", {"now": now_s})
    if operation is not None:
        builder.add_code("operation({operation});", {"operation": operation.value})
    limits = builder.limits()  # type: ignore[attr-defined]  # the stubs do not know it
    limits.max_facts, limits.max_iterations, limits.max_time = _FACTS_MAX, _ROUNDS_MAX, _TIME_MAX
    builder.set_limits(limits)  # type: ignore[attr-defined]
    return builder.build(biscuit)


def _holds(biscuit: Biscuit, now_s: int, operation: TokenOperation) -> bool:
    try:
        _judged(biscuit, now_s, operation).authorize()
    except AuthorizationError:
        return False
    return True


def _earliest(biscuit: Biscuit, expires: int) -> int:
    """Every check on the time was just made; of those that say it in our words the earliest is the expiry."""
    expiries = (_EARLIER.findall(biscuit.block_source(index)) for index in range(1, biscuit.block_count()))
    return min([expires, *(int(text) for texts in expiries for text in texts)])


def _refusal() -> Unauthorized:
    return Unauthorized("the capability token opens nothing here", do="Get a fresh one with the lease's next renewal.")
