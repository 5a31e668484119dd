"""Known ways to get a replicated register wrong, put into the real parts while a seed runs.

Z23 is of the project's list of other systems' bugs; the others are the steps of the protocol, each left out once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

from sublet.errors import CheckpointFailed
from sublet.state.replicated import cell as law
from sublet.state.replicated import membership, quorum
from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import (
    Accept,
    AcceptedWrite,
    BallotPromised,
    Here,
    Outdated,
    Prepare,
    Query,
    ReplicaCell,
    Took,
)
from sublet.state.replicated.phases import Preparing, ReadRound, Writing
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.register import (
    CarryOperation,
    CasOperation,
    OpenOperation,
    OperationDone,
    OperationRefused,
    OperationUnknown,
    OutcomeReason,
    RegisterOperation,
    Tenure,
    View,
)
from sublet.state.replicated.register import _Writer as Writer
from sublet.state.replicated.state import RegisterState
from tests.simulation.mutant import Change, in_force
from tests.simulation.register_nodes import Node
from tests.simulation.register_world import RegisterWorld


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    breaks: str
    changes: tuple[Change, ...]


def switched_on(name: str | None) -> AbstractContextManager[None]:
    """The mutant of this name is in force; None changes nothing."""
    return in_force(MUTANTS[name].changes if name is not None else ())


def _quorums_that_miss(_original: Any) -> Any:
    return lambda self: self.random.choice(((2, 1, 1), (3, 1, 2), (4, 1, 3)))


def _anything_goes(_original: Any) -> Any:
    return lambda *_: None


def _open_without_prepare(_original: Any) -> Any:
    """It looks, promises nothing, and writes."""

    def answer(
        cell: ReplicaCell, known: ReplicaSet | None, request: Prepare | Accept | Query, missing: tuple[str, ...] = ()
    ) -> tuple[ReplicaCell, law.Answer]:
        if isinstance(request, Prepare):
            _, said = _REAL(cell, known, request, missing)
            return cell, said
        return _REAL(cell, known, request, missing)

    return answer


_REAL: Final = law.answer


def _takes_anything(_original: Any) -> Any:
    """Accept whatever is newer than what was taken, whatever was promised."""

    def answer(
        cell: ReplicaCell, known: ReplicaSet | None, request: Prepare | Accept | Query, missing: tuple[str, ...] = ()
    ) -> tuple[ReplicaCell, law.Answer]:
        if isinstance(request, Accept) and cell.accepted is not None:
            _, said = _REAL(ReplicaCell(None, cell.accepted), known, request, missing)
            if isinstance(said, Took):
                return ReplicaCell(cell.promised, request.accepted), said
        return _REAL(cell, known, request, missing)

    return answer


def _any_generation(_original: Any) -> Any:
    def answer(
        cell: ReplicaCell, known: ReplicaSet | None, request: Prepare | Accept | Query, missing: tuple[str, ...] = ()
    ) -> tuple[ReplicaCell, law.Answer]:
        after, said = _REAL(cell, known, request, missing)
        if isinstance(said, Outdated) and known is not None:
            return _REAL(cell, known, replace(request, generation=known.generation), missing)
        return after, said

    return answer


def _read_without_repair(_original: Any) -> Any:
    return property(lambda self: self.polled)


def _repair_in_own_name(_original: Any) -> Any:
    """The reader stamps what it passes on with a number of its own."""

    def deliver(self: ReadRound, replica: str) -> None:
        if self.target is None:
            return
        stamp = self.target.stamp
        newer = AcceptedWrite(stamp._replace(seq=stamp.seq + 1), self.target.value, self.target.packs)
        if replica not in self.pending:
            self._ask(replica, Accept(self.replicas.generation, newer))

    return deliver


def _promise_forgotten(original: Any) -> Any:
    def crash(self: Node) -> None:
        original(self)
        self.cells = {key: ReplicaCell(None, cell.accepted) for key, cell in self.cells.items()}

    return crash


def _write_forgotten(original: Any) -> Any:
    def crash(self: Node) -> None:
        original(self)
        self.cells = {key: ReplicaCell(cell.promised, None) for key, cell in self.cells.items()}

    return crash


def _empty_one_votes(_original: Any) -> Any:
    def forget(self: Node) -> None:
        self.cells = {}

    return forget


def _straight_to_the_new_seats(_original: Any) -> Any:
    def towards(self: ReplicaSet, seats: Seats) -> ReplicaSet:
        return ReplicaSet(self.generation + 1, seats)

    return towards


def _carries_under_the_new_seats(_original: Any) -> Any:
    def finish(view: View, tenure: Tenure, new: ReplicaSet, tries: int) -> Generator[Any, Any, ReplicaSet]:
        yield from membership._spread(new, tries)
        for key in (yield from membership._keys(new, tries)):
            yield membership.RunOperation(key, CarryOperation(view, tenure.nonce))
        return new

    return finish


def _carries_nothing(_original: Any) -> Any:
    def start(self: CarryOperation) -> None:
        self._end(OperationDone(RegisterState(0, (), b"")))

    return start


def _lists_at_one(_original: Any) -> Any:
    def keys(joint: ReplicaSet, tries: int) -> Generator[Any, Any, list[str]]:
        for _ in range(tries):
            answer = yield membership.Listing()
            if answer:
                return sorted(answer[min(answer)])
        raise CheckpointFailed("nobody answered")

    return keys


def _goes_on_after_doubt(original: Any) -> Any:
    """The same ballot, the same number, after a write whose fate is not known."""

    def failed(self: Writer, phase: Any) -> None:
        if isinstance(phase, Writing) and phase.promised is None and phase.foreign is None:
            self._end(OperationUnknown(OutcomeReason.NO_QUORUM))
        else:
            original(self, phase)

    return failed


def _counts_in_vain(_original: Any) -> Any:
    """All writes of a ballot have the same number, so a replica cannot tell them apart."""

    def written(self: Writer, phase: Writing) -> None:
        self.tenure.accepted, self.tenure.settled = phase.write, True
        if self._writing_own:
            self._end(OperationDone(self.tenure.state))
        else:
            self._advance()

    return written


def _doubt_is_no(original: Any) -> Any:
    def end(self: RegisterOperation, result: Any) -> None:
        original(self, OperationRefused(OutcomeReason.NO_QUORUM) if isinstance(result, OperationUnknown) else result)

    return end


def _doubt_is_yes(original: Any) -> Any:
    def end(self: RegisterOperation, result: Any) -> None:
        if isinstance(result, OperationUnknown) and isinstance(self, CasOperation):
            result = OperationDone(RegisterState(self.expected + 1, (self.write,), b""))
        original(self, result)

    return end


def _one_nonce(_original: Any) -> Any:
    def next_ballot(self: Tenure) -> Any:
        self.ballot = None
        return Ballot(self.reign, self.office, self.epoch, self.attempt, bytes(8))

    return next_ballot


def _refuses_from_memory(_original: Any) -> Any:
    """A tenure says from what it remembers that the version is another."""

    def go_on(self: CasOperation) -> None:
        state = self.tenure.state
        if state.version == self.expected:
            self._write(state.then(self.write, self.body).pack(), self.packs, own=True)
        else:
            self._end(OperationRefused(OutcomeReason.VERSION, state))

    return go_on


def _opens_without_settling(_original: Any) -> Any:
    def go_on(self: OpenOperation) -> None:
        self._end(OperationDone(self.tenure.state))

    return go_on


def _own_write_not_looked_for(original: Any) -> Any:
    def go_on(self: CasOperation) -> None:
        self._exposed = False
        original(self)

    return go_on


def _late_answers_count(original: Any) -> Any:
    def heard(self: RegisterOperation, turn: int, replica: str, said: Any) -> None:
        phase = self._phase
        fits = (
            (isinstance(phase, Preparing) and isinstance(said, BallotPromised))
            or (isinstance(phase, Writing) and isinstance(said, Took))
            or (isinstance(phase, ReadRound) and isinstance(said, Here))
        )
        original(self, self.turn if fits else turn, replica, said)

    return heard


def _one_is_enough(_original: Any) -> Any:
    return lambda self, took: any(member in took for member in self.members)


def _any_office(_original: Any) -> Any:
    """Two offices' epochs are compared as if they were one's."""

    def refusal(cell: ReplicaCell, ballot: Any) -> Any:
        if cell.promised is None or (ballot.epoch, ballot.attempt) >= (cell.promised.epoch, cell.promised.attempt):
            return None
        return law.BallotRefused(cell.promised, cell.accepted.stamp if cell.accepted is not None else None)

    return refusal


def _epoch_last(_original: Any) -> Any:
    """An older lease may go above a newer one by trying more often."""

    def beaten(self: Writer, by: Any) -> None:
        self.tenure.epoch = max(self.tenure.epoch, by.epoch)
        self.tenure.after(by)
        self._go_idle()

    return beaten


def _promise_of_an_old_set(_original: Any) -> Any:
    """Found by seed 361: a set was learnt between the promise and the write."""

    def write(self: Writer, value: bytes, packs: tuple[str, ...], *, own: bool) -> None:
        assert self.tenure.ballot is not None
        self._writing_own = own
        stamp = WriteStamp(self.tenure.ballot, self.tenure.seq)
        self._enter(Writing(self.view.replicas, AcceptedWrite(stamp, value, packs)))

    return write


def _acknowledged_at_once(_original: Any) -> Any:
    return property(lambda self: bool(self.took))


MUTANTS: Final[dict[str, Mutant]] = {
    "Z23": Mutant(
        "R + W = N: a read quorum misses the last write",
        ((RegisterWorld, "_quorums", _quorums_that_miss), (quorum, "check_quorums", _anything_goes)),
    ),
    "R1": Mutant("opening looks and promises nothing", ((law, "answer", _open_without_prepare),)),
    "R2": Mutant("a promise is not kept", ((law, "answer", _takes_anything),)),
    "R3": Mutant("a read tells what is on too few replicas", ((ReadRound, "done", _read_without_repair),)),
    "R4": Mutant("a reader repairs under a stamp of its own", ((ReadRound, "_deliver", _repair_in_own_name),)),
    "R5": Mutant("promises are kept in memory only", ((Node, "crash", _promise_forgotten),)),
    "R6": Mutant("writes are kept in memory only", ((Node, "crash", _write_forgotten),)),
    "R7": Mutant("an empty replica votes", ((Node, "forget", _empty_one_votes),)),
    "R8": Mutant(
        "no joint set between two sets",
        (
            (ReplicaSet, "towards", _straight_to_the_new_seats),
            (membership, "_finish", _carries_under_the_new_seats),
        ),
    ),
    "R9": Mutant("nothing is carried over to new seats", ((CarryOperation, "_start", _carries_nothing),)),
    "R10": Mutant("the keys are listed at one replica", ((membership, "_keys", _lists_at_one),)),
    "R11": Mutant("replicas answer any generation", ((law, "answer", _any_generation),)),
    "R12": Mutant("a tenure goes on after a write in doubt", ((Writer, "_failed", _goes_on_after_doubt),)),
    "R13": Mutant("writes of a ballot are not numbered", ((Writer, "_written", _counts_in_vain),)),
    "R14": Mutant("unknown is told as refused", ((RegisterOperation, "_end", _doubt_is_no),)),
    "R15": Mutant("unknown is told as done", ((RegisterOperation, "_end", _doubt_is_yes),)),
    "R16": Mutant("two writers of one lease share a ballot", ((Tenure, "next_ballot", _one_nonce),)),
    "R17": Mutant("a version is refused from memory", ((CasOperation, "_advance", _refuses_from_memory),)),
    "R18": Mutant("opening does not settle what it found", ((OpenOperation, "_advance", _opens_without_settling),)),
    "R19": Mutant("a write in doubt is not looked for", ((CasOperation, "_advance", _own_write_not_looked_for),)),
    "R20": Mutant("an answer to an earlier round counts", ((RegisterOperation, "on_answer", _late_answers_count),)),
    "R21": Mutant("one replica is a write quorum", ((Seats, "writable", _one_is_enough),)),
    "R22": Mutant("another office's epochs are compared with ours", ((law, "_refusal", _any_office),)),
    "R23": Mutant("who is fenced takes the newer epoch for its own", ((Writer, "_beaten", _epoch_last),)),
    "R24": Mutant("a write is acknowledged by the first replica", ((Writing, "done", _acknowledged_at_once),)),
    "R25": Mutant(
        "what an old set promised carries a write to a new one", ((Writer, "_write", _promise_of_an_old_set),)
    ),
}
