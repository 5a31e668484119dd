"""The register: open, compare-and-swap, read. Pure: fed replicas' answers, it says what to send.

An operation goes through phases. It ends in one of three ways, and never in a guess:

- ``OperationDone``: it happened, and this is the state it left (or found).
- ``OperationRefused``: it certainly did not happen and never will, and this is why.
- ``OperationUnknown``: it may have happened, or may yet.

Between the attempts of an operation it is ``resting``: the driver waits a little, by chance a different little for each
writer, and calls ``resume``. When the driver's patience is over it calls ``give_up``.

A writer's hold on a key is its ``Tenure``. Opening prepares on a quorum *before* anything is read, so what is read then
cannot be overtaken by an older lease. While nothing goes wrong, later writes of the tenure need one round only: the
quorum has promised its ballot, and it numbers its writes. After anything else than a plain success the tenure is over
and the next attempt begins with a new ballot of the same epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.ballot import Ballot, WriteStamp
from sublet.state.replicated.cell import AcceptedWrite, Answer
from sublet.state.replicated.phases import Preparing, QuorumRound, ReadRound, SendToReplica, Writing
from sublet.state.replicated.quorum import ReplicaSet
from sublet.state.replicated.state import NOTHING, RegisterState
from sublet.values import Epoch


class OutcomeReason(enum.StrEnum):
    """Why an operation was not done, or is not known to be done."""

    VERSION = "version"
    """The register holds another version than was expected."""
    FENCED = "fenced"
    """A newer epoch has opened the register."""
    FOREIGN = "foreign"
    """The register is another office's, and was not adopted."""
    NO_QUORUM = "no_quorum"
    """Too few replicas answered in time."""
    FORGOTTEN = "forgotten"
    """So many writes came after it that its writer is no longer on record."""


@dataclass(frozen=True, slots=True)
class OperationDone:
    """It happened."""

    state: RegisterState
    packs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperationRefused:
    """It did not happen, and will not."""

    why: OutcomeReason
    state: RegisterState | None = None
    """What the register holds, where that is what stood against it."""
    against: Ballot | None = None


@dataclass(frozen=True, slots=True)
class OperationUnknown:
    """It may have happened."""

    why: OutcomeReason


Result: TypeAlias = OperationDone | OperationRefused | OperationUnknown


class View:
    """The set of replicas as this program knows it; it only ever gets newer."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self.replicas = replicas

    def learn(self, newer: ReplicaSet) -> None:
        """A replica knows this set."""
        if newer.generation > self.replicas.generation:
            self.replicas = newer


class Tenure:
    """One writer's hold on one key, from one opening to the next."""

    def __init__(self, *, office: str, epoch: Epoch, nonce: Callable[[], bytes], reign: int = 1) -> None:
        self.office, self.epoch, self.nonce = office, epoch, nonce
        self.reign = reign
        self.attempt = 0
        self.ballot: Ballot | None = None
        """Ours, while a quorum holds to it; None before the opening and after anything went wrong."""
        self.generation = 0
        self.seq = 0
        self.accepted: AcceptedWrite | None = None
        self.settled = True
        """Whether ``accepted`` is known to be on a quorum."""

    @property
    def state(self) -> RegisterState:
        """What the register holds, as far as this tenure knows."""
        return RegisterState.unpack(self.accepted.value) if self.accepted is not None else NOTHING

    def next_ballot(self) -> Ballot:
        """A new ballot, unlike all before."""
        self.ballot = None
        return Ballot(self.reign, self.office, self.epoch, self.attempt, self.nonce())

    def begin(self, phase: Preparing) -> None:
        """A quorum promised."""
        self.ballot, self.seq, self.generation = phase.ballot, 0, phase.replicas.generation
        self.accepted, self.settled = phase.found, phase.is_chosen

    def close(self) -> None:
        """From here on nothing is certain; open again before the next write."""
        self.ballot = None
        self.attempt += 1

    def after(self, ballot: Ballot) -> None:
        """The next attempt goes above this one, of the same office and epoch."""
        self.ballot = None
        self.reign, self.attempt = ballot.reign, max(self.attempt, ballot.attempt) + 1


class RegisterOperation:
    """What the driver sees."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.result: Result | None = None
        self.resting = False
        self.turn = 0
        """Counts phases: an answer is told with the turn in which it was asked for, and a late one is dropped."""
        self._phase: QuorumRound | None = None

    def take(self) -> list[SendToReplica]:
        """What to send now."""
        if self._phase is None or not self._phase.out:
            return []
        out, self._phase.out = self._phase.out, []
        return out

    def on_answer(self, turn: int, replica: str, answer: Answer) -> None:
        """A replica answered."""
        if turn == self.turn and self._phase is not None:
            self._phase.on_answer(replica, answer)
            self._check_phase()

    def lost(self, turn: int, replica: str) -> None:
        """No answer will come from it."""
        if turn == self.turn and self._phase is not None:
            self._phase.lost(replica)
            self._check_phase()

    def resume(self) -> None:
        """The rest is over."""
        self.resting = False
        self._start()

    def give_up(self, why: OutcomeReason = OutcomeReason.NO_QUORUM) -> None:
        """Patience is over."""
        raise NotImplementedError

    def _enter(self, phase: QuorumRound) -> None:
        self._phase = phase
        self.turn += 1
        self._check_phase()

    def _go_idle(self) -> None:
        self._phase, self.resting = None, True
        self.turn += 1

    def _end(self, result: Result) -> None:
        self._phase, self.result, self.resting = None, result, False
        self.turn += 1

    def _check_phase(self) -> None:
        phase = self._phase
        if phase is None or not phase.over:
            return
        if phase.newer is not None:
            self.view.learn(phase.newer)
        self._finished(phase)

    def _start(self) -> None:
        raise NotImplementedError

    def _finished(self, phase: QuorumRound) -> None:
        raise NotImplementedError


class _Writer(RegisterOperation):
    """Opens where it must; what comes after is the subclass's."""

    def __init__(self, view: View, tenure: Tenure, *, adopt: bool = False) -> None:
        super().__init__(view)
        self.tenure = tenure
        self._adopt = adopt
        self._exposed = False
        """Whether our own write was let out and its fate is not known."""
        self._writing_own = False
        self._hurried = False
        self._start()

    def give_up(self, why: OutcomeReason = OutcomeReason.NO_QUORUM) -> None:
        if self.result is None:
            self.tenure.close()
            out = self._exposed or (self._writing_own and isinstance(self._phase, Writing))
            self._end(OperationUnknown(why) if out else OperationRefused(why))

    def _start(self) -> None:
        tenure = self.tenure
        if tenure.ballot is not None and tenure.generation != self.view.replicas.generation:
            tenure.close()
        if tenure.ballot is None:
            self._enter(Preparing(self.view.replicas, tenure.next_ballot()))
        else:
            self._advance()

    def _advance(self) -> None:
        raise NotImplementedError

    def _write_again(self) -> None:
        """Write again, in our own name, what was found: from then on nothing older can come up."""
        found = self.tenure.accepted
        if found is None:
            self._write(NOTHING.pack(), (), own=False)
        else:
            self._write(found.value, found.packs, own=False)

    def _write(self, value: bytes, packs: tuple[str, ...], *, own: bool) -> None:
        assert self.tenure.ballot is not None
        if self.tenure.generation != self.view.replicas.generation:
            # The set has changed since the quorum promised: what it told may not be all that the new one knows.
            self._start()
            return
        self._writing_own = own
        self._enter(
            Writing(self.view.replicas, AcceptedWrite(WriteStamp(self.tenure.ballot, self.tenure.seq), value, packs))
        )

    def _finished(self, phase: QuorumRound) -> None:
        if isinstance(phase, Preparing) and phase.has_quorum:
            self.tenure.begin(phase)
            self._advance()
            return
        if isinstance(phase, Writing):
            if phase.done:
                self._written(phase)
                return
            self._exposed = self._exposed or (self._writing_own and not phase.nowhere)
        self._failed(phase)

    def _written(self, phase: Writing) -> None:
        tenure = self.tenure
        tenure.seq += 1
        tenure.accepted, tenure.settled = phase.write, True
        if self._writing_own:
            self._end(OperationDone(tenure.state, phase.write.packs))
        else:
            self._advance()

    def _failed(self, phase: QuorumRound) -> None:
        tenure = self.tenure
        tenure.close()
        if phase.foreign is not None:
            self._met_foreign(phase.foreign)
        elif phase.promised is not None:
            self._beaten(phase.promised)
        else:
            self._go_idle()

    def _met_foreign(self, by: Ballot) -> None:
        if not self._adopt:
            self._not_done(OutcomeReason.FOREIGN, by)
            return
        self.tenure.reign = by.reign + 1
        self._go_idle()

    def _beaten(self, by: Ballot) -> None:
        tenure = self.tenure
        if by.office != tenure.office:
            self._met_foreign(by)
        elif by.epoch > tenure.epoch:
            self._not_done(OutcomeReason.FENCED, by)
        else:
            # An epoch below ours in a higher reign, or ours with more attempts: we may go above it. A writer with a
            # write to look for does not rest first, or so many others may write meanwhile that it is forgotten whose it
            # was.
            tenure.after(by)
            if self._exposed and not self._hurried:
                self._hurried = True
                self._start()
            else:
                self._go_idle()

    def _not_done(self, why: OutcomeReason, against: Ballot | None = None) -> None:
        if self._exposed:
            self._on_conflict(why, against)
        else:
            self._end(OperationRefused(why, against=against))

    def _on_conflict(self, why: OutcomeReason, against: Ballot | None) -> None:
        """We may write no more, and our own write was let out."""
        self._end(OperationUnknown(why))


class OpenOperation(_Writer):
    """Claim the register, and tell what it holds. Every older epoch is refused from here on.

    ``adopt`` takes a register over from another office: an act of a person who knows that the other office is gone.
    """

    def __init__(self, view: View, tenure: Tenure, *, adopt: bool = False) -> None:
        if tenure.ballot is not None:
            tenure.close()
        super().__init__(view, tenure, adopt=adopt)

    def _advance(self) -> None:
        # Always, even if a quorum seems to have it: a write of an older epoch that one silent replica took would else
        # come up after we told what there is.
        accepted = self.tenure.accepted
        if accepted is not None and accepted.stamp.ballot == self.tenure.ballot:
            self._end(OperationDone(self.tenure.state, accepted.packs))
        else:
            self._write_again()


class CasOperation(_Writer):
    """Write, if the register holds the expected version.

    ``write`` names this write for ever. An operation that lost sight of its own write opens again and looks for it, and
    only where too few replicas answer does it end as unknown.
    """

    def __init__(
        self, view: View, tenure: Tenure, *, expected: int, write: bytes, body: bytes, packs: tuple[str, ...] = ()
    ) -> None:
        self.expected, self.write, self.body, self.packs = expected, write, body, packs
        self._sent: WriteStamp | None = None
        self._verdict: tuple[OutcomeReason, Ballot | None] = OutcomeReason.NO_QUORUM, None
        self._remembered = tenure.ballot
        """A ballot that was won before this operation: what it knows may be out of date."""
        super().__init__(view, tenure)

    def _advance(self) -> None:
        state = self.tenure.state
        if state.version != self.expected and self.tenure.ballot == self._remembered:
            self.tenure.close()
            self._start()
            return
        mine = state.wrote(self.write, self.expected + 1) if self._exposed else False
        if state.version != self.expected and not self.tenure.settled:
            self._write_again()
        elif mine:
            assert self.tenure.accepted is not None
            self._end(OperationDone(state, self.tenure.accepted.packs))
        elif state.version == self.expected:
            self._write(state.then(self.write, self.body).pack(), self.packs, own=True)
        elif mine is None and state.version > self.expected:
            self._end(OperationUnknown(OutcomeReason.FORGOTTEN))
        else:
            self._end(OperationRefused(OutcomeReason.VERSION, state))

    def _write(self, value: bytes, packs: tuple[str, ...], *, own: bool) -> None:
        super()._write(value, packs, own=own)
        if own and isinstance(self._phase, Writing):
            self._sent = self._phase.write.stamp

    def _on_conflict(self, why: OutcomeReason, against: Ballot | None) -> None:
        # The writer that fenced us has settled the register, or will. Once a later write is on a quorum, ours is either
        # in its past, and that can be read, or it can never come up any more.
        self._verdict = why, against
        self._enter(ReadRound(self.view.replicas))

    def _finished(self, phase: QuorumRound) -> None:
        if not isinstance(phase, ReadRound):
            super()._finished(phase)
            return
        why, against = self._verdict
        found = phase.target
        if not phase.done or found is None or self._sent is None or found.stamp < self._sent:
            self._end(OperationUnknown(why))
            return
        state = RegisterState.unpack(found.value)
        mine = state.wrote(self.write, self.expected + 1)
        if mine:
            self._end(OperationDone(state, found.packs))
        elif mine is None and state.version > self.expected:
            self._end(OperationUnknown(OutcomeReason.FORGOTTEN))
        elif found.stamp == self._sent:
            self._end(OperationUnknown(why))
        else:
            self._end(OperationRefused(why, against=against))


class CarryOperation(_Writer):
    """Bring a record to a new quorum, with every promise that was made for it.

    The ballot is of the epoch that was promised last, so the holder of that lease may go on with a further attempt, and
    the holder of an older one stays fenced. What is found is written anew even where a quorum seems to have it.
    """

    def __init__(self, view: View, nonce: Callable[[], bytes]) -> None:
        self._polled = False
        self._carried = False
        super().__init__(view, Tenure(office="", epoch=Epoch(0, 0), nonce=nonce))

    def _start(self) -> None:
        if self._polled:
            super()._start()
        else:
            self._enter(ReadRound(self.view.replicas))

    def on_answer(self, turn: int, replica: str, answer: Answer) -> None:
        super().on_answer(turn, replica, answer)
        if isinstance(self._phase, ReadRound) and self._phase.polled:
            self._on_read(self._phase)

    def _on_read(self, phase: ReadRound) -> None:
        if phase.highest is None:
            self._end(OperationDone(NOTHING))
            return
        self._polled = True
        self._beaten(phase.highest)

    def _beaten(self, by: Ballot) -> None:
        self.tenure.office, self.tenure.epoch = by.office, by.epoch
        self.tenure.reign, self.tenure.attempt = by.reign, by.attempt + 1
        self._go_idle()

    def _met_foreign(self, by: Ballot) -> None:
        self._beaten(by)

    def _finished(self, phase: QuorumRound) -> None:
        if not isinstance(phase, ReadRound):
            super()._finished(phase)
        elif phase.polled:
            self._on_read(phase)
        else:
            self._go_idle()

    def _advance(self) -> None:
        if self.tenure.accepted is None or self._carried:
            self._end(OperationDone(self.tenure.state))
        else:
            self._carried = True
            self._write_again()

    def _failed(self, phase: QuorumRound) -> None:
        self._carried = False
        super()._failed(phase)


class ReadOperation(RegisterOperation):
    """Tell what the register holds, promising nothing and claiming nothing."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._start()

    def _start(self) -> None:
        self._enter(ReadRound(self.view.replicas))

    def give_up(self, why: OutcomeReason = OutcomeReason.NO_QUORUM) -> None:
        if self.result is None:
            self._end(OperationRefused(why))

    def _finished(self, phase: QuorumRound) -> None:
        assert isinstance(phase, ReadRound)
        if not phase.done:
            self._go_idle()
            return
        found = phase.target
        self._end(
            OperationDone(RegisterState.unpack(found.value), found.packs)
            if found is not None
            else OperationDone(NOTHING)
        )
