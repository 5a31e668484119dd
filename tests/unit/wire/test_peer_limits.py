"""Limits on connections: what each user has, what is the owner's, and which silent connection makes room."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.wire.peer_limits import Admitted, PeerLimits, PeerRefused

OWNER: Final = 0
ANA: Final = 1
BEN: Final = 2
CAT: Final = 3


def limits(most: int = 8, per_user: int = 3, reserved: int = 2) -> PeerLimits[int]:
    return PeerLimits(most=most, per_user=per_user, reserved=reserved, owners=frozenset({OWNER}))


def fill(to: PeerLimits[int], users: list[int], *, spoke: bool) -> None:
    for key, user in enumerate(users):
        assert isinstance(to.admit(key, user), Admitted)
        if spoke:
            to.handshake_done(key)


@pytest.mark.parametrize(
    ("there", "spoke", "user", "answer"),
    [
        ([], False, ANA, Admitted()),
        ([ANA, ANA], True, ANA, Admitted()),
        ([ANA] * 3, True, ANA, "connections_of_user"),
        ([ANA] * 3, True, BEN, Admitted()),
        ([ANA] * 3, False, ANA, Admitted(0)),
        ([ANA] * 3 + [BEN] * 3, True, CAT, "connections"),
        ([ANA] * 3 + [BEN] * 3, True, OWNER, Admitted()),
        ([ANA] * 2 + [BEN] * 3 + [CAT], False, OWNER, Admitted()),
        ([OWNER] + [ANA] * 2 + [BEN] * 3 + [CAT], False, CAT, Admitted(3)),
        ([OWNER] * 8, True, OWNER, "connections"),
        ([OWNER] * 8, False, OWNER, Admitted(0)),
        ([OWNER] * 8, False, ANA, "connections"),
        ([OWNER] * 8, True, ANA, "connections"),
    ],
)
def test_who_is_admitted(there: list[int], spoke: bool, user: int, answer: Admitted[int] | str) -> None:
    tested = limits()
    fill(tested, there, spoke=spoke)
    found = tested.admit(99, user)
    assert (found.limit if isinstance(found, PeerRefused) else found) == answer
    assert len(tested) == len(there) + (isinstance(found, Admitted) and found.closed is None)


def test_a_connection_that_has_spoken_is_never_closed_for_another() -> None:
    tested = limits()
    fill(tested, [ANA, ANA, ANA], spoke=False)
    tested.handshake_done(0)
    assert tested.admit(3, ANA) == Admitted(1)
    tested.handshake_done(2)
    tested.handshake_done(3)
    assert isinstance(tested.admit(4, ANA), PeerRefused)


ACTS = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "admit", "spoke", "left"]), st.integers(0, 3)), max_size=80
)


@given(ACTS)
def test_counts_stay_within_limits_and_a_speaker_stays(acts: list[tuple[str, int]]) -> None:
    tested, there, spoken = limits(), dict[int, int](), set[int]()
    for key, (act, user) in enumerate(acts):
        some = sorted(there)[user % len(there)] if there else -1
        if act == "admit":
            found = tested.admit(key, user)
            if isinstance(found, Admitted):
                if found.closed is not None:
                    assert found.closed in there
                    assert found.closed not in spoken
                    assert user == OWNER or there[found.closed] != OWNER
                    del there[found.closed]
                there[key] = user
        elif act == "spoke":
            tested.handshake_done(some)
            spoken.add(some)
        else:
            tested.disconnected(some)
            there.pop(some, None)
        counts = Counter(there.values())
        assert len(tested) == len(there) <= 8
        assert all(counts[user] <= 3 for user in (ANA, BEN, CAT))
        assert sum(counts.values()) - counts[OWNER] <= 6
