"""Who is calling: the secret decides, and it is known to its owner only."""

from __future__ import annotations

import msgspec
import pytest

from sublet.broker.access import LOCAL_CALLER, AccessList, new_token, token_hash
from sublet.broker.records import TenantRecord
from sublet.errors import Unauthorized
from sublet.values import TenantId

TOKEN = new_token(bytes(range(32)))


def access(*, local_rule: bool = False, operator: bool = False) -> AccessList:
    found = AccessList(local_rule=local_rule)
    found.put(TenantRecord(id=TenantId("ann"), token_hash=token_hash(TOKEN), operator=operator))
    return found


def test_a_token_has_its_tenants_rights_and_no_others() -> None:
    """Also on the owner's socket, where no token at all would mean the operator."""
    caller = access(local_rule=True).caller(b"Bearer " + TOKEN.encode())
    assert (caller.tenant, caller.operator) == ("ann", False)
    assert access(operator=True).caller(b"bearer " + TOKEN.encode()).operator


def test_without_a_token_the_local_rule_decides() -> None:
    """Only where the socket is the owner's alone does no token mean the owner."""
    assert access(local_rule=True).caller(None) == LOCAL_CALLER
    with pytest.raises(Unauthorized):
        access().caller(None)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sublet_",
        b"Basic " + TOKEN.encode(),
        TOKEN.encode(),
        b"Bearer " + TOKEN.encode()[:-1],
        b"Bearer " + TOKEN.encode() + b" ",
        b"Bearer  " + TOKEN.encode(),
        b"Bearer " + TOKEN.upper().encode(),
        b"Bearer " + token_hash(TOKEN).encode(),
        b"Bearer sublet_" + b"\xff" * 40,
        b"Bearer sublet_" + b"x" * 100_000,
    ],
)
def test_anything_else_is_nobody(header: bytes) -> None:
    """Near misses, other schemes, the stored hash itself: all the same no."""
    with pytest.raises(Unauthorized):
        access(local_rule=True).caller(header)


def test_a_new_token_ends_the_old_one() -> None:
    """Also when the tenant has none any more."""
    found = access()
    found.put(TenantRecord(id=TenantId("ann"), token_hash=token_hash("sublet_new")))
    with pytest.raises(Unauthorized):
        found.caller(b"Bearer " + TOKEN.encode())
    assert found.caller(b"Bearer sublet_new").tenant == "ann"
    found.put(TenantRecord(id=TenantId("ann")))
    with pytest.raises(Unauthorized):
        found.caller(b"Bearer sublet_new")


def test_who_must_be_cut_off_is_said() -> None:
    """Of an older generation, which the ledger says; what only adds to rights closes nothing."""
    ann = TenantRecord(id=TenantId("ann"), token_hash=token_hash(TOKEN))
    found = AccessList(local_rule=False)
    assert not found.put(ann)
    assert not found.put(msgspec.structs.replace(ann, operator=True))
    assert found.put(msgspec.structs.replace(ann, operator=False, generation=1))
    assert found.put(msgspec.structs.replace(ann, token_hash=token_hash("sublet_new"), generation=2))
    assert found.generation(ann.id) == 2
    assert found.put(msgspec.structs.replace(ann, token_hash=None, disabled=True, generation=3))
    assert found.generation(ann.id) is None
    found.remove(ann.id)
    assert found.generation(ann.id) is None


def test_a_disabled_tenant_has_no_token_whatever_its_record_says() -> None:
    found = access()
    found.put(TenantRecord(id=TenantId("ann"), token_hash=token_hash(TOKEN), disabled=True, generation=1))
    with pytest.raises(Unauthorized):
        found.caller(b"Bearer " + TOKEN.encode())


def test_a_token_can_be_typed_and_is_not_in_the_record() -> None:
    """Letters, digits, dash and underscore; what is stored does not lead back to it."""
    assert TOKEN.startswith("sublet_")
    assert len(TOKEN) == 50
    assert TOKEN.replace("_", "").replace("-", "").isalnum()
    record = TenantRecord(id=TenantId("ann"), token_hash=token_hash(TOKEN))
    assert TOKEN not in repr(record)
