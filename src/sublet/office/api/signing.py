"""Signs capability tokens for live leases with the office's key; derives tenants' checkpoint keys.

The private key lies in the state folder, readable by its owner only, and is made whole or not at all. A program with
the public key can verify a token offline (``node.agent.tokens``); only this office can make one.

The key with which a tenant signs its checkpoints is made from a second secret beside it and the tenant's name, so that
it never changes and is no other tenant's. The office signs nothing with it: it gives it to the tenant.

A token is a Biscuit. Its first block, the only one the office signs, states facts; any bearer of the token may append
blocks, and a block can only add checks that must hold as well. What the facts mean is in ``lease.token``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from biscuit_auth import BiscuitBuilder, KeyPair, PrivateKey

from sublet.errors import InvalidRequest, LeaseNotActive
from sublet.lease.states import LIVE_STATES
from sublet.lease.token import TokenClaims
from sublet.office.journal.files import publish_new
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.values import NS_PER_S, TenantId

KEY_FILE: Final = "capability.key"
CHECKPOINT_FILE: Final = "checkpoint.key"
SECRET_BYTES: Final = 32
_SECRET_FORM: Final = "secret/"
_CHECKPOINT_FORM: Final = "sublet-checkpoint-key/"
_OF_TENANT: Final = b"ckpt tenant 1"
_FORM: Final = "ed25519-private/"
_FACTS: Final = """
tenant({tenant}); lease({lease}); epoch({incarnation}, {n}); office({office}); expires({expires});
generation({generation});
check if now($now), $now < {expires};
"""


def key_id_of(public_key: bytes) -> str:
    """Eight hexadecimal digits, so that a token can name its key in the 32 bits there are for it."""
    return hashlib.sha256(public_key).hexdigest()[:8]


class Signer:
    """One office's key."""

    def __init__(self, key: PrivateKey, office: str, secret: bytes = b"") -> None:
        """``secret``: that of tenants' checkpoint keys; without, one that is forgotten with this."""
        pair = KeyPair.from_private_key(key)
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)
        self._key = pair.private_key
        self._office = office
        self.public_key = bytes(pair.public_key.to_bytes())
        self.key_id = key_id_of(self.public_key)

    @classmethod
    def open(cls, folder: Path, office: str) -> Signer:
        """The key of this folder; the first time one is made."""
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / KEY_FILE
        if not path.exists():
            _create(path, _FORM + bytes(KeyPair().private_key.to_bytes()).hex() + "\n")
        beside = folder / CHECKPOINT_FILE
        if not beside.exists():
            _create(beside, _SECRET_FORM + secrets.token_hex(SECRET_BYTES) + "\n")
        return cls(_load(path), office, _load_secret(beside))

    @property
    def public_keys(self) -> dict[str, bytes]:
        """What an agent needs to verify tokens of this office."""
        return {self.key_id: self.public_key}

    def checkpoint_key(self, tenant: TenantId) -> str:
        """The text of this tenant's ``SigningKey``."""
        made = hashlib.blake2b(tenant.encode(), key=self._secret, person=_OF_TENANT, digest_size=SECRET_BYTES)
        return _CHECKPOINT_FORM + made.hexdigest()

    def mint(
        self, lease: LeaseRecord, now: Now, generation: int = 0, actor: tuple[TenantId, int] | None = None
    ) -> tuple[str, int]:
        """A token for everything that the lease allows, and its expiry (nanoseconds of the wall clock). ``generation``:
        of its tenant's rights. ``actor``: who acts for the tenant, with the generation of these rights."""
        if lease.epoch is None or lease.status not in LIVE_STATES:
            raise LeaseNotActive(f"lease {lease.id} is {lease.status}, so there is nothing to open with a token")
        claims = TokenClaims.issued(
            tenant=lease.tenant,
            lease=lease.id,
            epoch=lease.epoch,
            ttl_ns=lease.ttl_ns,
            now_s=now.wall_ns // NS_PER_S,
            key_id=self.key_id,
            office=self._office,
            generation=generation,
            actor=actor,
        )
        return self.sign(claims), claims.expires * NS_PER_S

    def sign(self, claims: TokenClaims) -> str:
        """The token that says exactly this."""
        builder = BiscuitBuilder(
            _FACTS,
            {
                "tenant": claims.tenant,
                "lease": claims.lease,
                "incarnation": claims.epoch.incarnation,
                "n": claims.epoch.n,
                "office": claims.office,
                "expires": claims.expires,
                "generation": claims.generation,
            },
        )
        for operation in sorted(claims.operations):
            builder.add_code("may({operation});", {"operation": operation.value})
        if claims.actor is not None:
            name, generation = claims.actor
            builder.add_code("actor({name}, {generation});", {"name": name, "generation": generation})
        builder.set_root_key_id(int(self.key_id, 16))
        return builder.build(self._key).to_base64()


def _create(path: Path, text: str) -> None:
    """Whole or not at all, and the first of two who try it wins."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
        with contextlib.suppress(FileExistsError):
            publish_new(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _read(path: Path) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, encoding="ascii", errors="replace") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidRequest(
                f"the key {path} can be read by others",
                do=f"If it may have been read, remove it (a new one is made); else `chmod 600 {path}`.",
            )
        return file.read(256).strip()


def _load_secret(path: Path) -> bytes:
    text = _read(path)
    with contextlib.suppress(ValueError):
        secret = bytes.fromhex(text.removeprefix(_SECRET_FORM))
        if text.startswith(_SECRET_FORM) and len(secret) == SECRET_BYTES:
            return secret
    raise InvalidRequest(
        f"the key {path} is damaged", do="Restore it from a copy; a new one does not fit what tenants have signed."
    )


def _load(path: Path) -> PrivateKey:
    text = _read(path)
    try:
        if not text.startswith(_FORM):
            raise ValueError(text[:16])
        return PrivateKey(text)
    except ValueError as error:
        raise InvalidRequest(
            f"the key {path} is damaged", do="Remove it; a new one is made, and tokens of the old one end."
        ) from error
