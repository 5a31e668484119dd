"""A queue place lives on signs of life, and on nothing else."""

from __future__ import annotations

from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger.events import Ended, Granted, Queued, Ungranted
from sublet.office.ledger.queue_liveness import SILENCE_S, Presence
from sublet.office.ledger.records import EndRecord, LeaseRecord, Want
from sublet.values import (
    NS_PER_S,
    Epoch,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    TenantId,
    Tier,
)

SILENCE_NS = round(SILENCE_S * NS_PER_S)


def lease(name: str, status: LeaseStatus = LeaseStatus.QUEUED) -> LeaseRecord:
    return LeaseRecord(
        id=LeaseId(name),
        tenant=TenantId("t"),
        request_id=RequestId(name),
        fingerprint="",
        wants=(Want(kind=Kind.CPU, amount=1),),
        ttl_ns=1,
        tier=Tier.BATCH,
        arrival=1,
        asked_at_ns=0,
        asked_wall_ns=0,
        status=status,
    )


def queued(name: str) -> Queued:
    return Queued(lease=lease(name))


def granted(name: str) -> Granted:
    return Granted(lease=LeaseId(name), node=NodeId("n"), epoch=Epoch(1, 1), parts=(), claim_by_ns=1)


def ended(name: str) -> Ended:
    return Ended(lease=LeaseId(name), end=EndRecord(reason=EndReason.WITHDRAWN, at_ns=0, wall_ns=0))


def test_the_silent_are_named_once_and_in_the_order_of_their_silence() -> None:
    """Whoever was seen last is looked at last; a place that was lost is not lost twice."""
    presence = Presence()
    presence.note([queued("a"), queued("b")], 0)
    presence.note([queued("c")], 5)
    presence.seen(LeaseId("a"), 10)
    assert presence.silent_holders(SILENCE_NS - 1) == []
    assert presence.silent_holders(SILENCE_NS + 5) == ["b", "c"]
    assert presence.silent_holders(SILENCE_NS + 10) == ["a"]
    assert presence.silent_holders(10 * SILENCE_NS) == []
    assert len(presence) == 0


def test_an_open_connection_is_a_sign_of_life_that_lasts() -> None:
    """Two connections count as one until the last is closed; then the silence begins."""
    presence = Presence()
    presence.note([queued("a")], 0)
    presence.connected(LeaseId("a"))
    presence.connected(LeaseId("a"))
    assert presence.silent_holders(5 * SILENCE_NS) == []
    presence.disconnected(LeaseId("a"), 6 * SILENCE_NS)
    assert presence.silent_holders(8 * SILENCE_NS) == []
    presence.disconnected(LeaseId("a"), 8 * SILENCE_NS)
    assert presence.silent_holders(9 * SILENCE_NS - 1) == []
    assert presence.silent_holders(9 * SILENCE_NS) == ["a"]


def test_only_who_waits_is_watched() -> None:
    """A grant has its claim window, an ended lease nothing; a grant that came to nothing leads back into the line."""
    presence = Presence()
    presence.note([queued("a"), granted("a"), queued("b"), ended("b")], 0)
    assert len(presence) == 0
    presence.note([Ungranted(lease=LeaseId("a"), detail="")], 7)
    assert presence.silent_holders(7 + SILENCE_NS) == ["a"]


def test_after_a_restart_everybody_in_line_has_the_full_time_again() -> None:
    """Nobody loses a place because the office was away."""
    presence = Presence()
    presence.restored(lease("a"), 100)
    presence.restored(lease("b", LeaseStatus.ACTIVE), 100)
    assert presence.silent_holders(99 + SILENCE_NS) == []
    assert presence.silent_holders(100 + SILENCE_NS) == ["a"]


def test_a_sign_of_life_of_somebody_who_does_not_wait_is_nothing() -> None:
    """Asking about a running lease does not put it in line."""
    presence = Presence()
    presence.seen(LeaseId("x"), 1)
    presence.connected(LeaseId("x"))
    presence.disconnected(LeaseId("x"), 2)
    assert presence.silent_holders(10 * SILENCE_NS) == []
