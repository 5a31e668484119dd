"""What every replica must do, as tests. Subclass it in a test file and say how a replica is made and found again::

    class TestMyReplica(ReplicaConformance):
        def new_replica(self) -> Replica:
            return MyReplica(somewhere_new())

        def again(self, replica: Replica) -> Replica:
            return MyReplica(replica.place)        # what another program that opens the same one would have

A replica that lives only as long as its object returns that object from ``again``.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import (
    VALUE_MAX,
    Accept,
    AcceptedWrite,
    BallotPromised,
    BallotRefused,
    Behind,
    ForeignRegister,
    Here,
    Install,
    Installed,
    MissingPacks,
    Outdated,
    Prepare,
    Query,
    Took,
)
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.replica import PackName, Replica, ReplicaSilent
from sublet.values import Epoch

KEY = "c/tests/a name with spaces, and ünicode"


def answered(replica: Replica, requests: list[Any]) -> list[Any]:
    """A store on which two write at once may be silent; the same is asked again, as a proposer does."""
    for _ in range(5):
        with contextlib.suppress(ReplicaSilent):
            return replica.ask(requests)
    return replica.ask(requests)


def ballot(n: int, *, attempt: int = 0, office: str = "a", reign: int = 1, nonce: bytes = b"01234567") -> Ballot:
    """Of epoch 1.n."""
    return Ballot(reign, office, Epoch(1, n), attempt, nonce)


def write(by: Ballot, seq: int = 0, value: bytes = b"value", packs: tuple[str, ...] = ()) -> AcceptedWrite:
    """One write of a ballot."""
    return AcceptedWrite(WriteStamp(by, seq), value, packs)


def pack(n: int, digest: str = "0" * 32) -> str:
    """The name of a pack that epoch 1.n staged."""
    return str(PackName(1, 1, n, "ab" * 8, digest))


class ReplicaConformance:
    """The contract of ``state.replicated.replica.Replica``."""

    def new_replica(self) -> Replica:
        raise NotImplementedError("say how a new replica is made")

    def again(self, replica: Replica) -> Replica:
        raise NotImplementedError("say how another program opens the same replica")

    def seated(self) -> Replica:
        """A new replica that knows a set of which it is the only voter."""
        replica = self.new_replica()
        assert replica.ask([("", Install(self.set_of(replica, 1)))]) == [Installed()]
        return replica

    def set_of(self, replica: Replica, generation: int) -> ReplicaSet:
        """A set of one."""
        return ReplicaSet(generation, Seats((replica.identity,), 1, 1))

    # ---- who it is ----

    def test_identities_are_drawn_by_chance_and_kept(self) -> None:
        """Two replicas are never the same; one keeps its identity each time it is opened."""
        first, second = self.new_replica(), self.new_replica()
        assert first.identity != second.identity
        assert len(bytes.fromhex(first.identity)) == 16
        assert self.again(first).identity == first.identity

    def test_a_new_replica_knows_no_set_and_answers_nobody(self) -> None:
        """So an empty disk cannot vote."""
        replica = self.new_replica()
        assert replica.known() is None
        assert replica.keys() == []
        for request in (Query(1), Prepare(1, ballot(1)), Accept(1, write(ballot(1)))):
            assert replica.ask([(KEY, request)]) == [Behind(0)]
        assert replica.keys() == []

    # ---- promises and writes ----

    def test_what_was_taken_is_told(self) -> None:
        """To every caller, and also after it was opened again."""
        replica = self.seated()
        assert replica.ask([(KEY, Query(1))]) == [Here(None)]
        assert replica.ask([(KEY, Prepare(1, ballot(1)))]) == [BallotPromised(None)]
        assert replica.ask([(KEY, Accept(1, write(ballot(1))))]) == [Took()]
        for opened in (replica, self.again(replica)):
            assert opened.ask([(KEY, Query(1))]) == [Here(write(ballot(1)), ballot(1))]
            assert opened.keys() == [KEY]

    def test_a_promise_is_kept(self) -> None:
        """Against older epochs, fewer attempts and smaller nonces, and also after it was opened again."""
        replica = self.seated()
        promised = ballot(5, attempt=3, nonce=b"5" * 8)
        replica.ask([(KEY, Prepare(1, promised))])
        for lower in (ballot(4, attempt=9), ballot(5, attempt=2), ballot(5, attempt=3, nonce=b"4" * 8)):
            for opened in (replica, self.again(replica)):
                answers = opened.ask([(KEY, Prepare(1, lower)), (KEY, Accept(1, write(lower)))])
                assert answers == [BallotRefused(promised), BallotRefused(promised)]

    def test_the_same_request_twice_has_one_effect_and_the_same_answer(self) -> None:
        """Messages come twice."""
        replica = self.seated()
        for _ in range(2):
            assert replica.ask([(KEY, Prepare(1, ballot(1)))]) == [BallotPromised(None)]
        for _ in range(2):
            assert replica.ask([(KEY, Accept(1, write(ballot(1))))]) == [Took()]

    def test_a_write_is_taken_again_even_after_a_newer_promise(self) -> None:
        """It was taken: to say otherwise would be a lie."""
        replica = self.seated()
        replica.ask([(KEY, Accept(1, write(ballot(1)))), (KEY, Prepare(1, ballot(2)))])
        assert replica.ask([(KEY, Accept(1, write(ballot(1))))]) == [Took()]
        (answer,) = replica.ask([(KEY, Accept(1, write(ballot(1), 1)))])
        assert answer == BallotRefused(ballot(2), WriteStamp(ballot(1), 0))

    def test_writes_of_a_ballot_come_in_order(self) -> None:
        """A late one changes nothing."""
        replica = self.seated()
        replica.ask([(KEY, Accept(1, write(ballot(1), 1, b"second")))])
        assert replica.ask([(KEY, Accept(1, write(ballot(1), 0, b"first")))]) == [
            BallotRefused(ballot(1), WriteStamp(ballot(1), 1))
        ]
        assert replica.ask([(KEY, Query(1))]) == [Here(write(ballot(1), 1, b"second"), ballot(1))]

    def test_another_office_is_a_stranger_until_a_new_reign(self) -> None:
        """However high its epochs are."""
        replica = self.seated()
        replica.ask([(KEY, Prepare(1, ballot(5)))])
        assert replica.ask([(KEY, Prepare(1, ballot(9, office="b")))]) == [ForeignRegister(ballot(5))]
        adopted = ballot(1, office="b", reign=2)
        assert replica.ask([(KEY, Prepare(1, adopted))]) == [BallotPromised(None)]
        assert replica.ask([(KEY, Prepare(1, ballot(6)))]) == [BallotRefused(adopted)]

    def test_keys_do_not_touch_each_other(self) -> None:
        """Each has a promise and a value of its own."""
        replica = self.seated()
        replica.ask([("a", Prepare(1, ballot(9))), ("b", Prepare(1, ballot(1))), ("b", Accept(1, write(ballot(1))))])
        assert replica.ask([("a", Query(1)), ("b", Query(1))]) == [
            Here(None, ballot(9)),
            Here(write(ballot(1)), ballot(1)),
        ]

    def test_requests_that_come_together_are_carried_out_in_order(self) -> None:
        """As if they had come one by one."""
        replica = self.seated()
        answers = replica.ask(
            [
                (KEY, Prepare(1, ballot(1))),
                (KEY, Accept(1, write(ballot(1)))),
                (KEY, Prepare(1, ballot(2))),
                (KEY, Accept(1, write(ballot(1), 1))),
                (KEY, Query(1)),
            ]
        )
        assert answers[:3] == [BallotPromised(None), Took(), BallotPromised(write(ballot(1)))]
        assert answers[3:] == [BallotRefused(ballot(2), WriteStamp(ballot(1), 0)), Here(write(ballot(1)), ballot(2))]

    def test_values_of_any_size_come_back_as_they_were(self) -> None:
        """From nothing to the most that a record may hold, one over the other."""
        replica = self.seated()
        for seq, size in enumerate((0, 1, 493, 494, 495, 5_000, VALUE_MAX, 3)):
            value = bytes(range(256)) * (size // 256 + 1)
            replica.ask([(KEY, Accept(1, write(ballot(1), seq, value[:size])))])
            assert self.again(replica).ask([(KEY, Query(1))]) == [Here(write(ballot(1), seq, value[:size]), ballot(1))]

    def test_very_many_writes_and_keys(self) -> None:
        """More than any first allocation holds."""
        replica = self.seated()
        for n in range(40):
            for key in ("x", "y", "z"):
                assert replica.ask([(key, Accept(1, write(ballot(1), n, bytes(700))))]) == [Took()]
        opened = self.again(replica)
        assert opened.keys() == ["x", "y", "z"]
        assert opened.ask([("y", Query(1))]) == [Here(write(ballot(1), 39, bytes(700)), ballot(1))]

    def test_of_two_who_come_at_once_one_promise_stands(self) -> None:
        """Two programs, each with a handle of its own, race."""
        replica = self.seated()
        handles = [self.again(replica) for _ in range(2)]
        taken: list[Ballot] = []

        def race(who: int) -> None:
            for attempt in range(8):
                mine = ballot(1, attempt=attempt, nonce=bytes([who]) * 8)
                (answer,) = answered(handles[who], [(KEY, Prepare(1, mine))])
                if isinstance(answer, BallotPromised):
                    taken.append(mine)

        threads = [threading.Thread(target=race, args=(who,)) for who in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (answer,) = replica.ask([(KEY, Query(1))])
        assert isinstance(answer, Here)
        assert answer.promised == max(taken)

    # ---- the set ----

    def test_only_a_newer_set_is_installed(self) -> None:
        """And requests of another generation are turned away."""
        replica = self.new_replica()
        second = self.set_of(replica, 2)
        replica.ask([("", Install(second)), ("", Install(self.set_of(replica, 1)))])
        for opened in (replica, self.again(replica)):
            assert opened.known() == second
            assert opened.ask([(KEY, Query(1)), (KEY, Prepare(1, ballot(1)))]) == [Outdated(second)] * 2
            assert opened.ask([(KEY, Accept(3, write(ballot(1))))]) == [Behind(2)]
        assert replica.ask([(KEY, Query(2))]) == [Here(None)]

    def test_a_set_and_a_request_in_one(self) -> None:
        """The set first."""
        replica = self.new_replica()
        answers = replica.ask([(KEY, Install(self.set_of(replica, 4), Prepare(4, ballot(1))))])
        assert answers == [BallotPromised(None)]
        assert self.again(replica).known() == self.set_of(replica, 4)

    # ---- packs ----

    def test_a_write_whose_packs_are_not_there_is_not_taken(self) -> None:
        """Until they are."""
        replica, name, other = self.seated(), pack(1), pack(1, "1" * 32)
        replica.put_pack(KEY, name, b"bytes")
        wanted = write(ballot(1), packs=(name, other))
        assert replica.ask([(KEY, Accept(1, wanted))]) == [MissingPacks((other,))]
        assert replica.ask([(KEY, Query(1))]) == [Here(None)]
        replica.put_pack(KEY, other, b"")
        assert replica.ask([(KEY, Accept(1, wanted))]) == [Took()]
        opened = self.again(replica)
        assert opened.read_pack(KEY, name) == b"bytes"
        assert opened.read_pack(KEY, other) == b""
        assert opened.packs(KEY) == sorted((name, other))

    def test_packs_of_another_key_do_not_count(self) -> None:
        """Each key has its own."""
        replica, name = self.seated(), pack(1)
        replica.put_pack("another", name, b"bytes")
        assert replica.packs(KEY) == []
        assert replica.read_pack(KEY, name) is None
        assert replica.ask([(KEY, Accept(1, write(ballot(1), packs=(name,))))]) == [MissingPacks((name,))]

    def test_only_what_the_record_let_go_is_swept(self) -> None:
        """And only while the record is the one that the sweeper means."""
        replica, old, new = self.seated(), pack(1), pack(2)
        replica.put_pack(KEY, old, b"old")
        replica.put_pack(KEY, new, b"new")
        now = write(ballot(2), packs=(new,))
        replica.ask([(KEY, Accept(1, now))])
        assert replica.sweep(KEY, WriteStamp(ballot(1), 0), [old, new]) == 0
        assert replica.sweep(KEY, now.stamp, [old, new]) == 1
        assert replica.packs(KEY) == [new]
        assert replica.read_pack(KEY, new) == b"new"
        assert replica.verify() == []
