"""Capability tokens: what the office signed opens what it says, and nothing else opens anything."""

from __future__ import annotations

import os
import random
import string
from pathlib import Path

import pytest
from biscuit_auth import Authorizer, Biscuit, BiscuitBuilder, BlockBuilder, KeyPair, PublicKey

from sublet.errors import InvalidRequest, LeaseNotActive, Unauthorized
from sublet.lease.states import LeaseStatus
from sublet.lease.token import TokenClaims, TokenOperation
from sublet.node.agent import tokens
from sublet.node.agent.tokens import TOKEN_LENGTH_MAX, narrow, verify
from sublet.office.api import signing
from sublet.office.api.signing import CHECKPOINT_FILE, KEY_FILE, Signer
from sublet.office.ledger.records import LeaseRecord, Now, Want
from sublet.values import NS_PER_S, Epoch, Kind, LeaseId, RequestId, TenantId, Tier

NOW_S = 1_800_000_000
SIGNER = Signer(KeyPair().private_key, "office-1")
SEED = int(os.environ.get("SUBLET_SEED", "20261121"))


def lease(*, status: LeaseStatus = LeaseStatus.ACTIVE) -> LeaseRecord:
    return LeaseRecord(
        id=LeaseId("l-1"),
        tenant=TenantId("ann"),
        request_id=RequestId("r"),
        fingerprint="",
        wants=(Want(kind=Kind.GPU, amount=1),),
        ttl_ns=300 * NS_PER_S,
        tier=Tier.BATCH,
        arrival=1,
        asked_at_ns=0,
        asked_wall_ns=0,
        status=status,
        epoch=Epoch(1, 42),
    )


def minted() -> str:
    return SIGNER.mint(lease(), Now(5, NOW_S * NS_PER_S))[0]


def check(token: str, now_s: int = NOW_S) -> TokenClaims:
    return verify(token, SIGNER.public_keys, now_s)


def refused(token: str) -> bool:
    try:
        check(token)
    except Unauthorized:
        return True
    return False


def test_a_token_says_what_the_lease_is() -> None:
    """Tenant, lease, epoch, every operation, and an expiry of its time to live and a minute."""
    token, expires_ns = SIGNER.mint(lease(), Now(5, NOW_S * NS_PER_S))
    claims = check(token)
    assert (claims.tenant, claims.lease, claims.epoch, claims.office) == ("ann", "l-1", Epoch(1, 42), "office-1")
    assert claims.operations == frozenset(TokenOperation)
    assert claims.key_id == SIGNER.key_id
    assert claims.expires == NOW_S + 360 == expires_ns // NS_PER_S


@pytest.mark.parametrize("status", [s for s in LeaseStatus if s not in ("active", "noticed")])
def test_only_a_live_lease_has_tokens(status: LeaseStatus) -> None:
    """Queued, granted, ending and ended leases hold nothing that could be opened."""
    with pytest.raises(LeaseNotActive):
        SIGNER.mint(lease(status=status), Now(5, NOW_S * NS_PER_S))


def test_no_changed_byte_is_accepted() -> None:
    """Ten thousand mutations of a plain and a narrowed token: replaced, removed, doubled and swapped characters."""
    rng = random.Random(SEED)
    alphabet = string.ascii_letters + string.digits + "-_=+/ "
    tried = 0
    for token in (minted(), narrow(minted(), SIGNER.public_keys, operations=[TokenOperation.READ], expires=NOW_S + 60)):
        check(token)
        for at in range(len(token)):
            for kind in range(8):
                one = rng.choice(alphabet)
                changed = {
                    5: token[:at] + token[at + 1 :],
                    6: token[:at] + one + token[at:],
                    7: token[:at] + token[at + 1 : at + 2] + token[at] + token[at + 2 :],
                }.get(kind, token[:at] + one + token[at + 1 :])
                if changed == token:
                    continue
                tried += 1
                assert refused(changed), f"accepted a mutation at {at} (seed {SEED}): {changed}"
    assert tried >= 10_000


@pytest.mark.parametrize(
    "token", ["", " ", "x", "a.b.c", "é", "\ud800", "=" * 100, "A" * TOKEN_LENGTH_MAX, "A" * 10**6]
)
def test_what_is_no_token_is_refused_like_a_wrong_one(token: str) -> None:
    """One answer for every no."""
    with pytest.raises(Unauthorized) as wrong:
        check(token)
    with pytest.raises(Unauthorized) as expired:
        check(minted(), NOW_S + 10_000)
    assert str(wrong.value) == str(expired.value)


def test_it_opens_nothing_from_its_expiry_on() -> None:
    """The last second counts, the next does not."""
    assert check(minted(), NOW_S + 359).expires == NOW_S + 360
    with pytest.raises(Unauthorized):
        check(minted(), NOW_S + 360)


def test_a_token_without_appended_blocks_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data connection shows one, and judging it once for each operation took 1.5 ms."""
    judged: list[object] = []
    really = tokens._judged

    def counted(biscuit: Biscuit, now_s: int, operation: TokenOperation | None) -> Authorizer:
        judged.append(operation)
        return really(biscuit, now_s, operation)

    monkeypatch.setattr(tokens, "_judged", counted)
    assert check(minted()).operations == frozenset(TokenOperation)
    assert len(judged) == 1
    assert check(narrow(minted(), SIGNER.public_keys, operations=[TokenOperation.READ])).operations == {
        TokenOperation.READ
    }
    assert len(judged) == 2 + len(TokenOperation)


def test_another_offices_key_signs_nothing_here() -> None:
    """Also not under the id of ours."""
    other = Signer(KeyPair().private_key, "office-1")
    token = other.mint(lease(), Now(5, NOW_S * NS_PER_S))[0]
    with pytest.raises(Unauthorized):
        check(token)
    with pytest.raises(Unauthorized):
        verify(token, {other.key_id: SIGNER.public_key}, NOW_S)


def test_replayed_for_another_lease_or_epoch_it_allows_nothing() -> None:
    """The signature is good; what it says is about something else."""
    claims = check(minted())
    assert claims.allows(TokenOperation.RUN, LeaseId("l-1"), Epoch(1, 42), NOW_S)
    assert not claims.allows(TokenOperation.RUN, LeaseId("l-2"), Epoch(1, 42), NOW_S)
    assert not claims.allows(TokenOperation.RUN, LeaseId("l-1"), Epoch(1, 43), NOW_S)
    assert not claims.allows(TokenOperation.RUN, LeaseId("l-1"), Epoch(2, 42), NOW_S)


def test_narrowing_takes_away_and_never_gives() -> None:
    """Fewer operations and an earlier expiry hold; asking for more afterwards leaves what there was."""
    read = narrow(
        minted(), SIGNER.public_keys, operations=[TokenOperation.READ, TokenOperation.LOGS], expires=NOW_S + 60
    )
    claims = check(read)
    assert claims.operations == {TokenOperation.READ, TokenOperation.LOGS}
    assert claims.expires == NOW_S + 60
    wider = narrow(read, SIGNER.public_keys, operations=list(TokenOperation), expires=NOW_S + 10_000)
    assert check(wider) == claims
    with pytest.raises(Unauthorized):
        check(wider, NOW_S + 60)
    with pytest.raises(Unauthorized):
        check(narrow(read, SIGNER.public_keys, operations=[TokenOperation.WRITE]))


def test_an_appended_block_cannot_add_facts() -> None:
    """Whatever it claims about tenant, lease, epoch, expiry or rights is seen by nobody but itself."""
    narrowed = Biscuit.from_base64(minted(), PublicKey("ed25519/" + SIGNER.public_key.hex()))
    lies = 'tenant("bob"); lease("l-2"); epoch(9, 9); may("everything"); expires(99999999999); now(0); office("o");'
    assert check(narrowed.append(BlockBuilder(lies)).to_base64()) == check(minted())


def test_an_appended_block_cannot_cost_much() -> None:
    """A rule that multiplies facts without end runs into the limits, and the token opens nothing."""
    rules = " ".join(f"f({n});" for n in range(50)) + " g($a, $b, $c) <- f($a), f($b), f($c); check if g(1, 2, 3);"
    token = Biscuit.from_base64(minted(), PublicKey("ed25519/" + SIGNER.public_key.hex()))
    with pytest.raises(Unauthorized):
        check(token.append(BlockBuilder(rules)).to_base64())


def test_narrowing_what_is_not_ours_is_an_error() -> None:
    """And so is a token that would allow nothing."""
    with pytest.raises(InvalidRequest):
        narrow("garbage", SIGNER.public_keys, operations=[TokenOperation.RUN])
    with pytest.raises(InvalidRequest):
        narrow(minted(), SIGNER.public_keys, operations=[])


# ---- the key ----


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    """A restarted office verifies what it signed before; nobody else can read the key; nothing else is left behind."""
    folder = tmp_path / "keys"
    first = Signer.open(folder, "o")
    again = Signer.open(folder, "o")
    token = first.mint(lease(), Now(5, NOW_S * NS_PER_S))[0]
    assert verify(token, again.public_keys, NOW_S).lease == "l-1"
    assert sorted(path.name for path in folder.iterdir()) == [KEY_FILE, CHECKPOINT_FILE]
    assert (folder / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    """It may have been copied; a person has to decide."""
    Signer.open(tmp_path / "keys", "o")
    (tmp_path / "keys" / KEY_FILE).chmod(0o644)
    with pytest.raises(InvalidRequest, match="read by others"):
        Signer.open(tmp_path / "keys", "o")


@pytest.mark.parametrize(
    "text", ["", "ed25519-private/", "ed25519-private/zz", "ed25519-private/00ff", "\x00\xff", "x" * 999]
)
def test_a_damaged_key_is_said_to_be_one(tmp_path: Path, text: str) -> None:
    """Not a traceback, and not silently a new key under which old tokens end."""
    Signer.open(tmp_path / "keys", "o")
    (tmp_path / "keys" / KEY_FILE).write_text(text)
    with pytest.raises(InvalidRequest, match="damaged"):
        Signer.open(tmp_path / "keys", "o")


def test_the_secret_key_is_in_no_repr() -> None:
    """Secrets keep out of logs."""
    assert "private" not in repr(SIGNER)


@pytest.mark.parametrize(("generations", "means"), [((), 0), ((3,), 3), ((3, 4), None)])
def test_a_token_of_before_generations_is_of_the_first_and_none_is_of_two(
    generations: tuple[int, ...], means: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that was granted before an upgrade keeps its token."""
    facts = signing._FACTS.replace("generation({generation});", "".join(f"generation({n});" for n in generations))
    monkeypatch.setattr(signing, "_FACTS", facts)
    monkeypatch.setattr(signing, "BiscuitBuilder", _without_generation)
    if means is None:
        assert refused(minted())
    else:
        assert check(minted()).generation == means


def _without_generation(facts: str, values: dict[str, object]) -> BiscuitBuilder:
    return BiscuitBuilder(facts, {name: value for name, value in values.items() if name != "generation"})
