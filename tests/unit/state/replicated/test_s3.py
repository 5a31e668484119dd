"""The object store's replica among bad stores: conditions that are ignored, answers that are lost or wrong, damage."""

from __future__ import annotations

import datetime as dt
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore, S3Store

from sublet.errors import InvalidRequest, Unsupported
from sublet.replicated import S3Replica
from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import (
    Accept,
    AcceptedWrite,
    BallotPromised,
    Here,
    Install,
    Outdated,
    Prepare,
    Query,
    Took,
)
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.replica import ReplicaFaulty, ReplicaSilent
from sublet.values import Epoch

BALLOT = Ballot(1, "o", Epoch(1, 1), 0, b"12345678")
WRITE = AcceptedWrite(WriteStamp(BALLOT, 0), b"value")


class Lying:
    """obstore, with a `put` that does not behave."""

    def __init__(self) -> None:
        self.exceptions = obstore.exceptions
        self.get, self.list, self.delete = obstore.get, obstore.list, obstore.delete
        self.how: list[str] = []
        """What the next puts do; ordinary when it is empty."""
        self.before_put: Any = None

    def put(self, store: Any, path: str, data: bytes, **conditions: Any) -> Any:
        how = self.how.pop(0) if self.how else ""
        if self.before_put is not None:
            act, self.before_put = self.before_put, None
            act()
        if how == "ignores conditions":
            return obstore.put(store, path, data)
        if how == "lost before":
            raise obstore.exceptions.GenericError("time-out")
        done = obstore.put(store, path, data, **conditions)
        if how == "lost after":
            raise obstore.exceptions.GenericError("time-out")
        if how == "412 to a request that was sent twice":
            raise obstore.exceptions.PreconditionError("412")
        return done


def replica_on(store: MemoryStore | None = None) -> tuple[S3Replica, Lying]:
    replica, lying = S3Replica(MemoryStore() if store is None else store, "p"), Lying()
    replica._obstore = lying  # type: ignore[assignment]
    replica.ask([("", Install(ReplicaSet(1, Seats((replica.identity,), 1, 1))))])
    return replica, lying


@pytest.mark.parametrize("how", ["lost before", "lost after", "412 to a request that was sent twice"])
def test_what_an_answer_does_not_say_is_read(how: str) -> None:
    """A time-out, before or after it took effect; a refusal of what was done."""
    replica, lying = replica_on()
    for request, answer in ((Prepare(1, BALLOT), BallotPromised(None)), (Accept(1, WRITE), Took())):
        lying.how = [how]
        assert replica.ask([("k", request)]) == [answer]
    assert replica.ask([("k", Query(1))]) == [Here(WRITE, BALLOT)]


def test_a_record_that_changed_in_between_is_decided_anew() -> None:
    """Another program was faster, and its ballot is higher."""
    store = MemoryStore()
    replica, lying = replica_on(store)
    higher = Ballot(1, "o", Epoch(1, 2), 0, b"12345678")
    other = S3Replica(store, "p")
    lying.before_put = lambda: other.ask([("k", Prepare(1, higher))])
    (said,) = replica.ask([("k", Prepare(1, BALLOT))])
    assert said != BallotPromised(None)
    assert replica.ask([("k", Query(1))]) == [Here(None, higher)]


def test_what_was_put_while_the_set_changed_does_not_count() -> None:
    """The changer may have listed the records before this one was there."""
    store = MemoryStore()
    replica, lying = replica_on(store)
    second = ReplicaSet(2, Seats((replica.identity,), 1, 1))
    other = S3Replica(store, "p")
    lying.before_put = lambda: other.ask([("", Install(second))])
    assert replica.ask([("k", Accept(1, WRITE))]) == [Outdated(second)]


@pytest.mark.parametrize("how", [["", "ignores conditions"], ["", "", "", "ignores conditions"]])
def test_a_store_that_ignores_conditions_is_refused(how: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Create-if-absent, or compare-by-ETag."""
    lying = Lying()
    lying.how = how
    honest = S3Replica._probe_at

    def probe(self: S3Replica, place: str) -> None:
        self._obstore = lying  # type: ignore[assignment]
        honest(self, place)

    monkeypatch.setattr(S3Replica, "_probe_at", probe)
    with pytest.raises(Unsupported, match="ignores"):
        S3Replica(MemoryStore(), "p")


def test_a_client_that_repeats_by_itself_is_refused() -> None:
    """An answer might be to another request than the one we made."""
    with pytest.raises(InvalidRequest, match="repeats requests by itself"):
        S3Replica(S3Store("b", region="x", retry_config={"max_retries": 3, "retry_timeout": dt.timedelta(seconds=1)}))
    with pytest.raises(InvalidRequest, match="repeats requests by itself"):
        S3Replica(S3Store("b", region="x"))


def test_a_store_that_does_not_answer_is_silent() -> None:
    """Nothing is made up."""
    with pytest.raises(ReplicaSilent, match="did not answer"):
        S3Replica.connect(
            "b", endpoint="http://127.0.0.1:9", region="x", access_key_id="a", secret_access_key="b", timeout=1.0
        )
    replica, lying = replica_on()
    lying.get = lambda *_: (_ for _ in ()).throw(obstore.exceptions.GenericError("gone"))
    with pytest.raises(ReplicaSilent, match="gone"):
        replica.ask([("k", Query(1))])


def test_a_bucket_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and of one that goes later: nobody who asks is left without an answer."""

    def nowhere(*_: object, **__: object) -> None:
        raise FileNotFoundError("NoSuchBucket")  # as obstore says it

    replica, lying = replica_on()
    lying.put = nowhere  # type: ignore[method-assign]
    with pytest.raises(ReplicaSilent, match="NoSuchBucket"):
        replica.ask([("k", Prepare(1, BALLOT))])
    monkeypatch.setattr(obstore, "put", nowhere)
    with pytest.raises(InvalidRequest, match="no such bucket"):
        S3Replica(MemoryStore())


def test_damage_and_strangers_are_noticed() -> None:
    """A damaged object, another replica's object, an emptied prefix."""
    store = MemoryStore()
    replica, _ = replica_on(store)
    replica.ask([("k", Accept(1, WRITE))])
    (place,) = replica._list("cells/")
    whole = bytes(obstore.get(store, place).bytes())
    obstore.put(store, place, whole[:-1] + b"?")
    with pytest.raises(ReplicaFaulty, match="not what was written"):
        replica.ask([("k", Query(1))])
    assert replica.verify()
    other = S3Replica(store, "q")
    other.ask([("", Install(ReplicaSet(1, Seats((other.identity,), 1, 1)))), ("k", Accept(1, WRITE))])
    obstore.put(store, place, bytes(obstore.get(store, other._list("cells/")[0]).bytes()))
    with pytest.raises(ReplicaFaulty, match="another replica's"):
        replica.ask([("k", Query(1))])
    for page in obstore.list(store, "p/"):
        obstore.delete(store, [meta["path"] for meta in page])
    with pytest.raises(ReplicaFaulty, match="gone from the store"):
        replica.ask([("k", Query(1))])
