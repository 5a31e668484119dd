"""Access tokens: who is calling, decided by a secret that the office itself does not know.

A token is ``sublet_`` and 32 random bytes. Only its SHA-256 is stored; there is no need for salt or a slow hash,
because 256 random bits cannot be guessed. It is looked up by that hash: what a caller could learn from the time of a
look-up is about the hash of his own guess, and the last comparison is constant-time all the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final, NamedTuple

from sublet.broker.records import LOCAL_TENANT, TenantRecord
from sublet.errors import Unauthorized
from sublet.values import TenantId

__all__ = ["LOCAL_CALLER", "TOKEN_PREFIX", "AccessList", "Caller", "new_token", "token_hash"]

TOKEN_PREFIX: Final = "sublet_"
_TOKEN_LENGTH_MAX: Final = 256


class Caller(NamedTuple):
    """Whose rights a request has."""

    tenant: TenantId
    operator: bool


LOCAL_CALLER: Final = Caller(LOCAL_TENANT, True)
"""Who comes over the owner-only socket without a token: only the owner of the machine's folder can."""


def new_token(random: bytes) -> str:
    """A secret made of 32 random bytes, to be shown once."""
    return TOKEN_PREFIX + base64.urlsafe_b64encode(random).rstrip(b"=").decode("ascii")


def token_hash(token: str) -> str:
    """What is stored of it."""
    return hashlib.sha256(token.encode()).hexdigest()


class AccessList:
    """The tenants by the hash of their token, and whether the rule of the local socket holds."""

    def __init__(self, *, local_rule: bool) -> None:
        self.local_rule = local_rule
        self._by_hash: dict[str, TenantRecord] = {}
        self._records: dict[TenantId, TenantRecord] = {}

    def put(self, tenant: TenantRecord) -> bool:
        """A tenant is new or changed: its old token, if it had one, opens nothing from now on. True if what was opened
        before must be closed: it has another token now, or fewer rights."""
        before = self._take(tenant.id)
        self._records[tenant.id] = tenant
        if tenant.token_hash is not None and not tenant.disabled:
            self._by_hash[tenant.token_hash] = tenant
        return before is not None and before.generation != tenant.generation

    def remove(self, tenant: TenantId) -> None:
        """There is no such tenant any more."""
        self._take(tenant)

    def generation(self, tenant: TenantId) -> int | None:
        """Which generation of a tenant's rights is valid; None: it has none."""
        record = self._records.get(tenant)
        return None if record is None or record.disabled else record.generation

    def _take(self, tenant: TenantId) -> TenantRecord | None:
        before = self._records.pop(tenant, None)
        if before is not None and before.token_hash is not None:
            self._by_hash.pop(before.token_hash, None)
        return before

    def caller(self, authorization: bytes | None) -> Caller:
        """Who sent this ``Authorization`` header (None: there was none)."""
        if authorization is None:
            if self.local_rule:
                return LOCAL_CALLER
            raise Unauthorized("this office asks for an access token")
        scheme, _, secret = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not secret.startswith(TOKEN_PREFIX.encode()):
            raise Unauthorized(f"what was sent is no access token: those begin with {TOKEN_PREFIX}")
        if len(secret) > _TOKEN_LENGTH_MAX:
            raise Unauthorized("the access token is not known")
        digest = hashlib.sha256(secret).hexdigest()
        tenant = self._by_hash.get(digest)
        if tenant is None or not hmac.compare_digest(digest, tenant.token_hash or ""):
            raise Unauthorized("the access token is not known")
        return Caller(tenant.id, tenant.operator)
