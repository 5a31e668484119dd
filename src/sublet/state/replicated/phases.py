"""One round of requests to the replicas, as a value that is fed their answers.

A phase says what to send (``out``) and is told what came of it: ``on_answer`` for an answer, ``lost`` for a replica
from which none will come. It knows no network and no clock. When it has come to an end, ``over`` is true and its fields
say how.
"""

from __future__ import annotations

from typing import Final

from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import (
    Accept,
    AcceptedWrite,
    Answer,
    BallotPromised,
    BallotRefused,
    Behind,
    ForeignRegister,
    Here,
    Install,
    MissingPacks,
    Outdated,
    Prepare,
    Query,
    Request,
    Took,
)
from sublet.state.replicated.quorum import ReplicaSet

REPEATS_MAX: Final = 3
"""How often a replica is sent the same again because it lacked a set or a pack."""


@dataclass(frozen=True, slots=True)
class SendToReplica:
    """Ask this replica this; before that, see to it that these packs are there."""

    replica: str
    request: Request
    packs: tuple[str, ...] = ()


class QuorumRound:
    """What all rounds share: the replicas that have still to answer, and the two answers that concern the asker
    itself."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas
        self.out: list[SendToReplica] = []
        self.pending: set[str] = set()
        self.newer: ReplicaSet | None = None
        """The set of replicas that a replica knows and we do not."""
        self.promised: Ballot | None = None
        """The highest ballot that stood against us."""
        self.foreign: Ballot | None = None
        self._requests: dict[str, Prepare | Accept | Query] = {}
        self._repeats: dict[str, int] = {}

    @property
    def over(self) -> bool:
        """Whether it came to an end."""
        raise NotImplementedError

    def on_answer(self, replica: str, answer: Answer) -> None:
        """A replica answered."""
        if replica not in self.pending:
            return
        match answer:
            case Behind():
                self._again(replica, Install(self.replicas, self._requests[replica]))
            case MissingPacks(packs=packs):
                self._again(replica, self._requests[replica], packs)
            case Outdated(replicas=newer):
                self.pending.discard(replica)
                if self.newer is None or newer.generation > self.newer.generation:
                    self.newer = newer
                # A replica that looks at the set after its put may say this of what it took, so that is a doubt.
                self._silent(replica)
            case BallotRefused(promised=ballot, taken=taken):
                self.pending.discard(replica)
                self.promised = ballot if self.promised is None else max(self.promised, ballot)
                self._refused(replica, taken)
            case ForeignRegister(promised=ballot, taken=taken):
                self.pending.discard(replica)
                self.foreign = ballot if self.foreign is None else max(self.foreign, ballot)
                self._refused(replica, taken)
            case _:
                self.pending.discard(replica)
                self._answered(replica, answer)

    def lost(self, replica: str) -> None:
        """No answer will come from it. Whether it did what it was asked is not known."""
        if replica in self.pending:
            self.pending.discard(replica)
            self._silent(replica)

    def _ask(self, replica: str, request: Prepare | Accept | Query) -> None:
        self._requests[replica] = request
        self.pending.add(replica)
        self.out.append(SendToReplica(replica, request))

    def _again(self, replica: str, request: Request, packs: tuple[str, ...] = ()) -> None:
        self._repeats[replica] = self._repeats.get(replica, 0) + 1
        if self._repeats[replica] > REPEATS_MAX:
            self.lost(replica)
        else:
            self.out.append(SendToReplica(replica, request, packs))

    def _answered(self, replica: str, answer: Answer) -> None:
        raise NotImplementedError

    def _refused(self, replica: str, taken: WriteStamp | None) -> None:
        """It will not do what it was asked, now or later."""

    def _silent(self, replica: str) -> None:
        """It may have done it."""


class Preparing(QuorumRound):
    """Claim a ballot, and learn what was taken before it."""

    def __init__(self, replicas: ReplicaSet, ballot: Ballot) -> None:
        super().__init__(replicas)
        self.ballot = ballot
        self.promises: dict[str, AcceptedWrite | None] = {}
        for replica in replicas.voters:
            self._ask(replica, Prepare(replicas.generation, ballot))

    @property
    def has_quorum(self) -> bool:
        """Whether a quorum promised."""
        return self.replicas.readable(self.promises)

    @property
    def over(self) -> bool:
        # A promise to a newer epoch anywhere means that our lease is over, however many would still promise us.
        fenced = self.promised is not None and self.promised[:3] > self.ballot[:3]
        return self.has_quorum or fenced or not self.replicas.readable({*self.promises, *self.pending})

    @property
    def found(self) -> AcceptedWrite | None:
        """The latest write that the quorum knows."""
        return _latest(self.promises)

    @property
    def is_chosen(self) -> bool:
        """Whether that write is on a quorum already, as far as was heard."""
        return self.replicas.writable(_holders(self.promises, self.found)) if self.found is not None else True

    def _answered(self, replica: str, answer: Answer) -> None:
        assert isinstance(answer, BallotPromised)
        self.promises[replica] = answer.accepted


class Writing(QuorumRound):
    """Have a write taken."""

    def __init__(self, replicas: ReplicaSet, write: AcceptedWrite) -> None:
        super().__init__(replicas)
        self.write = write
        self.took: set[str] = set()
        self.doubtful = False
        """Whether a replica may have taken it without our knowing."""
        for replica in replicas.voters:
            self._ask(replica, Accept(replicas.generation, write))

    @property
    def done(self) -> bool:
        """Whether a quorum took it."""
        return self.replicas.writable(self.took)

    @property
    def over(self) -> bool:
        if self.done:
            return True
        hopeless = not self.replicas.writable(self.took | self.pending)
        # Where no replica took it so far, the last ones are waited for: if they refuse as well, it never happened.
        return hopeless and (bool(self.took) or self.doubtful or not self.pending)

    @property
    def nowhere(self) -> bool:
        """Whether certainly no replica took it."""
        return not self.took and not self.doubtful and not self.pending

    def _answered(self, replica: str, answer: Answer) -> None:
        assert isinstance(answer, Took)
        self.took.add(replica)

    def _refused(self, replica: str, taken: WriteStamp | None) -> None:
        # Messages may come twice: the one that was refused may have followed one that was taken. What is taken only
        # ever rises, so a replica that stands below this write never had it.
        self.doubtful = self.doubtful or (taken is not None and taken > self.write.stamp)

    def _silent(self, replica: str) -> None:
        self.doubtful = True


class ReadRound(QuorumRound):
    """Find the latest write, and see it on a quorum before telling of it.

    Where it is on fewer replicas than a quorum, it is passed on exactly as it was taken: the same stamp, the same
    value. That is a message of its writer which comes late, and can do no harm that such a message could not do.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        super().__init__(replicas)
        self.answers: dict[str, AcceptedWrite | None] = {}
        self.highest: Ballot | None = None
        """The highest promise that was heard of."""
        self.target: AcceptedWrite | None = None
        self.holders: set[str] = set()
        self.overtaken = False
        for replica in replicas.voters:
            self._ask(replica, Query(replicas.generation))

    @property
    def polled(self) -> bool:
        """Whether enough were heard to know the latest write."""
        return self.replicas.readable(self.answers)

    @property
    def done(self) -> bool:
        """Whether the latest write is on a quorum (or there is none)."""
        return self.polled and (self.target is None or self.replicas.writable(self.holders))

    @property
    def over(self) -> bool:
        if self.done or self.overtaken:
            return True
        if not self.polled:
            return not self.replicas.readable({*self.answers, *self.pending})
        return not self.replicas.writable(self.holders | self.pending)

    def _answered(self, replica: str, answer: Answer) -> None:
        if isinstance(answer, Took):
            self.holders.add(replica)
            return
        assert isinstance(answer, Here)
        self.answers[replica] = answer.accepted
        if answer.promised is not None:
            self.highest = answer.promised if self.highest is None else max(self.highest, answer.promised)
        if not self.polled:
            return
        latest = _latest(self.answers)
        if self.target is None:
            self.target = latest
            for other in self.answers:
                self._deliver(other)
        elif latest is not None and latest.stamp > self.target.stamp:
            self.overtaken = True
        else:
            self._deliver(replica)

    def _deliver(self, replica: str) -> None:
        if self.target is None:
            return
        has = self.answers[replica]
        if has is not None and has.stamp == self.target.stamp:
            self.holders.add(replica)
        elif replica not in self.pending:
            self._ask(replica, Accept(self.replicas.generation, self.target))


def _latest(answers: dict[str, AcceptedWrite | None]) -> AcceptedWrite | None:
    found = [accepted for accepted in answers.values() if accepted is not None]
    return max(found, key=_stamp) if found else None


def _holders(answers: dict[str, AcceptedWrite | None], of: AcceptedWrite | None) -> set[str]:
    return {r for r, has in answers.items() if of is not None and has is not None and has.stamp == of.stamp}


def _stamp(accepted: AcceptedWrite) -> WriteStamp:
    return accepted.stamp
