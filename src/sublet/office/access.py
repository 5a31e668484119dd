"""Authenticates callers: access tokens, and users of the machine.

Where a request comes over a unix socket the kernel says which user's process sent it (``Origin``). The rule belongs to
the socket: over the owner's, which no other user can reach, no token means the owner; over the shared one, which
every user can reach, no token means no tenant, unless the operator bound that user to a tenant that needs none.

A token is ``sublet_`` and 32 random bytes. Only its SHA-256 is stored; there is no need for salt or a slow hash,
because 256 random bits cannot be guessed. It is looked up by that hash: what a caller could learn from the time of a
look-up is about the hash of the caller's own guess, and the last comparison is constant-time all the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final, NamedTuple

from sublet.errors import Unauthorized
from sublet.office.ledger.records import LOCAL_TENANT, TenantRecord
from sublet.values import TenantId

TOKEN_PREFIX: Final = "sublet_"
_TOKEN_LENGTH_MAX: Final = 256
_ROOT: Final = 0
_GET_ONE: Final = "Ask the operator of this office for one (`sublet tenant add NAME`), and set SUBLET_TOKEN to it."


class Origin(NamedTuple):
    """Where a request came from, as the kernel says it."""

    shared: bool = False
    """Whether it came over the shared socket."""
    uid: int | None = None
    """The user whose process sent it; None: not known, as over TCP."""
    pid: int = 0
    """That process, where it can be seen; else 0."""

    def __str__(self) -> str:
        return f"uid {self.uid}, pid {self.pid or 'unknown'}"


UNKNOWN_ORIGIN: Final = Origin()


class Caller(NamedTuple):
    """Whose rights a request has."""

    tenant: TenantId
    operator: bool
    peer: str = ""
    """Which user and process of the machine it was, for the audit records; empty for the owner's own requests."""
    studio: TenantId | None = None
    """The studio that asks, for itself or for this tenant."""
    actor: TenantId | None = None
    """The operator or studio whose rights were shown, where it acts for this tenant."""


LOCAL_CALLER: Final = Caller(LOCAL_TENANT, True)
"""The caller over the owner-only socket without a token: only the owner of the machine's folder can use it."""


def new_token(random: bytes) -> str:
    """A secret made of 32 random bytes, to be shown once."""
    return TOKEN_PREFIX + base64.urlsafe_b64encode(random).rstrip(b"=").decode("ascii")


def token_hash(token: str) -> str:
    """What is stored of it."""
    return hashlib.sha256(token.encode()).hexdigest()


class AccessList:
    """The tenants by the hash of their token and by their user, and the rules of the two sockets."""

    def __init__(self, *, local_rule: bool, owner: int | None = None) -> None:
        """``local_rule``: without a token the caller is the owner, except over the shared socket. ``owner`` is the user
        whose office this is; None: not known, and no process is taken for the owner's."""
        self.local_rule = local_rule
        self._owner = owner
        self._by_hash: dict[str, TenantRecord] = {}
        self._records: dict[TenantId, TenantRecord] = {}
        self._by_uid: dict[int, TenantRecord] = {}
        self.changes = 0
        """How often it has changed: while this stays the same, so does who every caller is."""

    def is_owner(self, uid: int | None) -> bool:
        """Whether a process of this user has the owner's rights over the office anyway."""
        return self._owner is not None and uid in (_ROOT, self._owner)

    def put(self, tenant: TenantRecord) -> bool:
        """A tenant is new or changed: its old token, if it had one, opens nothing from now on. True if what was opened
        before must be closed: it has another token or another user now, or fewer rights."""
        before = self._take(tenant.id)
        self._records[tenant.id] = tenant
        if not tenant.disabled:
            if tenant.token_hash is not None:
                self._by_hash[tenant.token_hash] = tenant
            if tenant.uid is not None:
                self._by_uid[tenant.uid] = tenant
        return before is not None and before.generation != tenant.generation

    def remove(self, tenant: TenantId) -> None:
        """There is no such tenant any more."""
        self._take(tenant)

    def generation(self, tenant: TenantId) -> int | None:
        """Which generation of a tenant's rights is valid; None: it has none."""
        record = self._records.get(tenant)
        return None if record is None or record.disabled else record.generation

    def _take(self, tenant: TenantId) -> TenantRecord | None:
        self.changes += 1
        before = self._records.pop(tenant, None)
        if before is not None and before.token_hash is not None:
            self._by_hash.pop(before.token_hash, None)
        if before is not None and before.uid is not None:
            self._by_uid.pop(before.uid, None)
        return before

    def caller(
        self, authorization: bytes | None, origin: Origin = UNKNOWN_ORIGIN, *, as_tenant: bool = False
    ) -> Caller:
        """The sender of this ``Authorization`` header (None: there was none). ``as_tenant``: a process of the owner's
        says that it means to be the tenant whose token it shows."""
        if authorization is not None:
            tenant = self._of_token(authorization)
            self.check(tenant.id, origin, as_tenant=as_tenant)
            peer = str(origin) if origin.shared or self.is_owner(origin.uid) else ""
            studio = tenant.id if tenant.studio else None
            return Caller(tenant.id, tenant.operator, "" if tenant.id == LOCAL_TENANT else peer, studio)
        if origin.shared:
            return self._without_token(origin)
        if self.local_rule:
            return LOCAL_CALLER
        raise Unauthorized("this office asks for an access token")

    def check(self, tenant: TenantId, origin: Origin, *, as_tenant: bool = False) -> None:
        """See that this process may be the tenant whose token (of whichever kind) it has shown."""
        record = self._records.get(tenant)
        bound = None if record is None else record.uid
        if self.is_owner(origin.uid):
            if tenant != LOCAL_TENANT and not as_tenant:
                raise Unauthorized(
                    f"the access token is of tenant {tenant}, and this process runs as "
                    f"{'root' if origin.uid == _ROOT else 'the owner of the office'}: what a guest of that tenant "
                    "returns would be loaded with those rights",
                    do="Run it as a user of the tenant's own, over the shared socket (`sublet up --shared`). If it is "
                    "meant: `sublet --as-tenant …`, in programs connect(as_tenant=True). Unset SUBLET_TOKEN to be the "
                    "owner.",
                )
            return
        if origin.shared and tenant == LOCAL_TENANT:
            raise Unauthorized(
                f"the access token is of the office's owner, and this process runs as user {origin.uid}", do=_GET_ONE
            )
        if bound is not None and bound != origin.uid:
            runs = f"runs as user {origin.uid}" if origin.uid is not None else "is of no user that the office can see"
            raise Unauthorized(
                f"the access token is of tenant {tenant}, which is user {bound}, and this process {runs}",
                do=f"Use it as that user, over the shared socket; or `sublet tenant set {tenant} --uid none`.",
            )

    def acting_for(self, caller: Caller, name: bytes) -> Caller:
        """An operator or a studio that acts for a tenant: with the rights of that tenant at most, and both in the audit
        records."""
        if not caller.operator and caller.studio is None:
            raise Unauthorized("only an operator acts for a tenant", do="Use the access token of that tenant.")
        record = self._records.get(TenantId(name.decode("ascii", "replace")))
        if record is None or record.disabled or record.studio:
            raise Unauthorized("there is no such tenant, or it is disabled", do="See `sublet tenant ls`.")
        by = f"for it: {caller.tenant}"
        return Caller(record.id, False, f"{by}, {caller.peer}" if caller.peer else by, caller.studio, caller.tenant)

    def _without_token(self, origin: Origin) -> Caller:
        bound = None if origin.uid is None else self._by_uid.get(origin.uid)
        if bound is None:
            raise Unauthorized(
                f"over the shared socket an access token says who is calling, and there was none (user {origin.uid})",
                do=_GET_ONE,
            )
        if bound.needs_token:
            raise Unauthorized(
                f"user {origin.uid} is tenant {bound.id}, which must show its access token as well",
                do=f"Set SUBLET_TOKEN to it; or have the operator say `sublet tenant set {bound.id} "
                "--no-token-needed`.",
            )
        return Caller(bound.id, False, str(origin), bound.id if bound.studio else None)

    def _of_token(self, authorization: bytes) -> TenantRecord:
        """Whose access token this is."""
        scheme, _, secret = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not secret.startswith(TOKEN_PREFIX.encode()):
            raise Unauthorized(f"what was sent is no access token: those begin with {TOKEN_PREFIX}")
        if len(secret) > _TOKEN_LENGTH_MAX:
            raise Unauthorized("the access token is not known")
        digest = hashlib.sha256(secret).hexdigest()
        tenant = self._by_hash.get(digest)
        if tenant is None or not hmac.compare_digest(digest, tenant.token_hash or ""):
            raise Unauthorized("the access token is not known")
        return tenant
