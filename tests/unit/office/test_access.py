"""Who is calling: the secret decides, and it is known to its owner only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sublet.errors import Unauthorized
from sublet.office.access import LOCAL_CALLER, AccessList, Caller, Origin, new_token, token_hash
from sublet.office.ledger.records import LOCAL_TENANT, TenantRecord
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


# ---- who is at the other end of a socket ----

OWNER, ANA, STRANGER = 1000, 1001, 1002
BEARER = b"Bearer " + TOKEN.encode()


def bound(**more: Any) -> AccessList:
    """An office of user 1000's, whose tenant ann is user 1001."""
    found = AccessList(local_rule=True, owner=OWNER)
    found.put(TenantRecord(id=LOCAL_TENANT, operator=True, token_hash=token_hash("sublet_owner")))
    found.put(TenantRecord(**{"id": TenantId("ann"), "token_hash": token_hash(TOKEN), "uid": ANA, **more}))
    return found


def over(uid: int | None, *, shared: bool = True) -> Origin:
    return Origin(shared=shared, uid=uid, pid=77)


def test_over_the_shared_socket_no_token_is_nobody() -> None:
    """Not even for the owner and root, whose rule belongs to the other socket."""
    for uid in (STRANGER, ANA, OWNER, 0):
        with pytest.raises(Unauthorized) as refused:
            bound().caller(None, over(uid))
        assert "SUBLET_TOKEN" in refused.value.do, "it says how to get one"
    assert bound().caller(None, over(OWNER, shared=False)) == LOCAL_CALLER


def test_a_user_is_its_tenant_without_a_token_only_where_the_operator_said_so() -> None:
    caller = bound(needs_token=False).caller(None, over(ANA))
    assert caller == Caller(TenantId("ann"), False, "uid 1001, pid 77")
    with pytest.raises(Unauthorized, match="1002"):
        bound(needs_token=False).caller(None, over(STRANGER))


def test_a_bound_tenants_token_is_worth_nothing_to_other_users() -> None:
    """The token is the second factor then. One that is bound to no user opens for whoever shows it."""
    assert bound().caller(BEARER, over(ANA)).tenant == "ann"
    for uid in (STRANGER, None):
        with pytest.raises(Unauthorized, match="which is user 1001"):
            bound().caller(BEARER, over(uid))
    assert bound(uid=None).caller(BEARER, over(STRANGER)) == Caller(TenantId("ann"), False, "uid 1002, pid 77")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("uid", [0, OWNER])
def test_the_owners_process_is_another_tenant_only_if_it_says_so(uid: int, shared: bool) -> None:
    """Over either socket, bound to a user or not; with its own token it is itself."""
    origin = over(uid, shared=shared)
    for found in (bound(), bound(uid=None)):
        with pytest.raises(Unauthorized) as refused:
            found.caller(BEARER, origin)
        assert "--as-tenant" in refused.value.do
        assert found.caller(BEARER, origin, as_tenant=True) == Caller(TenantId("ann"), False, str(origin))
        assert found.caller(b"Bearer sublet_owner", origin) == Caller(LOCAL_TENANT, True)


def test_an_operator_acts_for_a_tenant_with_that_tenants_rights_alone() -> None:
    found = access(operator=True)
    found.put(TenantRecord(id=TenantId("bob"), operator=True))
    found.put(TenantRecord(id=TenantId("gone"), disabled=True))
    ann = found.caller(b"Bearer " + TOKEN.encode())
    assert found.acting_for(ann, b"bob") == Caller(TenantId("bob"), False, "for it: ann", actor=TenantId("ann"))
    assert found.acting_for(ann._replace(peer="uid 1, pid 2"), b"bob").peer == "for it: ann, uid 1, pid 2"
    for name in (b"", b"nobody", b"gone", b"\xff", b"b" * 100_000):
        with pytest.raises(Unauthorized, match="no such tenant"):
            found.acting_for(ann, name)
    with pytest.raises(Unauthorized, match="only an operator"):
        found.acting_for(access().caller(b"Bearer " + TOKEN.encode()), b"ann")


def test_to_mean_it_helps_no_other_user() -> None:
    with pytest.raises(Unauthorized):
        bound().caller(BEARER, over(STRANGER), as_tenant=True)
    with pytest.raises(Unauthorized):
        bound().caller(None, over(ANA), as_tenant=True)


def test_the_owners_own_token_opens_nothing_for_others() -> None:
    with pytest.raises(Unauthorized, match="of the office's owner"):
        bound().caller(b"Bearer sublet_owner", over(STRANGER), as_tenant=True)


def test_another_user_or_a_token_that_is_needed_again_cuts_off() -> None:
    found = bound(needs_token=False)
    ann = TenantRecord(id=TenantId("ann"), token_hash=token_hash(TOKEN), uid=ANA, needs_token=False)
    assert not found.put(ann)
    assert found.put(msgspec.structs.replace(ann, needs_token=True, generation=1))
    assert found.put(msgspec.structs.replace(ann, uid=STRANGER, generation=2))
    with pytest.raises(Unauthorized):
        found.caller(None, over(ANA))
    assert found.put(msgspec.structs.replace(ann, uid=None, needs_token=True, generation=3))
    with pytest.raises(Unauthorized):
        found.caller(None, over(STRANGER))
    found.put(msgspec.structs.replace(ann, generation=4))
    assert found.caller(None, over(ANA)).tenant == "ann"
    found.put(msgspec.structs.replace(ann, disabled=True, generation=5))
    with pytest.raises(Unauthorized):
        found.caller(None, over(ANA))
    found.remove(TenantId("ann"))
    with pytest.raises(Unauthorized):
        found.caller(None, over(ANA))
