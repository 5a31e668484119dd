"""The claims of a capability token. Signing and verifying are elsewhere.

A token opens a data connection: once, offline, without the broker. It is never enough by itself, since (lease, epoch)
must still be live where the connection arrives. Its bearer can make a narrower one of it and hand that on; there
is no way to make a wider one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.values import NS_PER_S, Epoch, LeaseId, TenantId

LIFE_MAX_S: Final = 5 * 60
SLACK_S: Final = 60
"""For wall clocks that differ. It costs no safety: the lease's own deadline is checked on every call."""


class TokenOperation(enum.StrEnum):
    """What a connection may be used for."""

    RUN = "run"
    """Start functions and commands in guests of the lease."""
    DEVICE = "device"
    """The low road: device memory, modules, launches."""
    KERNEL = "kernel"
    """The channels of a Jupyter kernel."""
    READ = "read"
    """Read the lease's volume."""
    WRITE = "write"
    """Publish into the lease's volume."""
    LOGS = "logs"
    """Read what guests of the lease printed."""


def expires_latest(ttl_ns: int, now_s: int) -> int:
    """The latest expiry of a token issued now: min(TTL, 5 min) + 60 s, in seconds of the wall clock."""
    return now_s + min(ttl_ns // NS_PER_S, LIFE_MAX_S) + SLACK_S


def format_operations(operations: Iterable[TokenOperation]) -> str:
    """In the order of the enum, so that equal sets are equal texts."""
    wanted = frozenset(operations)
    return ",".join(operation.value for operation in TokenOperation if operation in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClaims:
    """A tenant's right to a lease: what may be done with it, until when."""

    tenant: TenantId
    lease: LeaseId
    epoch: Epoch
    operations: frozenset[TokenOperation]
    expires: int
    """Seconds of the wall clock since 1970; from then on it opens nothing."""
    key_id: str
    """Which key of the office signed it."""
    office: str
    """Which office; another one's keys and epochs mean nothing here."""
    generation: int = 0
    """Of the tenant's rights when it was signed: after a new access token, and after rights were taken away, it opens
    nothing more."""
    actor: tuple[TenantId, int] | None = None
    """The operator who acts for the tenant and was given it, with the generation of these rights."""

    def __post_init__(self) -> None:
        if not self.operations:
            raise InvalidRequest("a token that allows nothing", do=f"Allow some of: {', '.join(TokenOperation)}.")

    @classmethod
    def issued(
        cls,
        *,
        tenant: TenantId,
        lease: LeaseId,
        epoch: Epoch,
        ttl_ns: int,
        now_s: int,
        key_id: str,
        office: str,
        operations: Iterable[TokenOperation] = tuple(TokenOperation),
        expires: int | None = None,
        generation: int = 0,
        actor: tuple[TenantId, int] | None = None,
    ) -> TokenClaims:
        """What the office signs: by default everything, for as long as allowed."""
        latest = expires_latest(ttl_ns, now_s)
        if expires is not None and expires > latest:
            raise InvalidRequest(
                f"a token may live for {latest - now_s} s at most here, not {expires - now_s} s",
                do="Ask for a shorter one; each renewal brings a fresh one.",
            )
        return cls(
            tenant=tenant,
            lease=lease,
            epoch=epoch,
            operations=frozenset(operations),
            expires=latest if expires is None else expires,
            key_id=key_id,
            office=office,
            generation=generation,
            actor=actor,
        )

    def narrow(self, *, operations: Iterable[TokenOperation] | None = None, expires: int | None = None) -> TokenClaims:
        """The same for less: fewer operations, an earlier expiry. Anything wider is an error."""
        wanted = self.operations if operations is None else frozenset(operations)
        until = self.expires if expires is None else expires
        if not wanted <= self.operations:
            raise InvalidRequest(
                f"the token does not allow {format_operations(wanted - self.operations)}, so no token made of it can",
                do=f"Keep to: {format_operations(self.operations)}.",
            )
        if until > self.expires:
            raise InvalidRequest(
                f"the token ends {until - self.expires} s earlier than the one to be made of it",
                do="Give an expiry that is not later; a fresh token comes with each renewal.",
            )
        return replace(self, operations=wanted, expires=until)

    def allows(self, operation: TokenOperation, lease: LeaseId, epoch: Epoch, now_s: float) -> bool:
        """Whether it opens a connection for this, on this lease, in this epoch, now. One answer for every no: a caller
        is not told what was wrong with another holder's token."""
        return operation in self.operations and lease == self.lease and epoch == self.epoch and now_s < self.expires
