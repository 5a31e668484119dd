"""Changes the set of replicas, one seat at a time, while writers write.

The set is itself a record on the replicas, under a key of its own, so two who change it at once come to one result. A
change is a plan: a generator that yields what is to be done next and is sent what came of it. A program that finds a
change half done (its author died) carries it to its end before making another.

1. Agree on the joint set, under the old one. 2. Make it known to a joint quorum: from then on no writer gets a quorum
under the old generation. 3. List the keys; all that was ever acknowledged is in the list. 4. Carry each record, with
its promises, to a joint quorum. 5. Agree on the new seats alone, and make them known.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final, TypeAlias

from sublet.errors import CheckpointFailed, InvalidRequest, StaleEpoch
from sublet.lazy_dataclass import dataclass
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.register import (
    CarryOperation,
    CasOperation,
    OpenOperation,
    OperationDone,
    OperationRefused,
    OutcomeReason,
    RegisterOperation,
    Tenure,
    View,
)

SET_KEY: Final = ".set"
"""Where the set itself is kept. No name of a user begins with a dot."""


@dataclass(frozen=True, slots=True)
class RunOperation:
    """Carry this operation out on this key; send its result."""

    key: str
    operation: RegisterOperation


@dataclass(frozen=True, slots=True)
class InstallRound:
    """Install this set wherever possible; send the identities of those who have it."""

    replicas: ReplicaSet


@dataclass(frozen=True, slots=True)
class Listing:
    """Ask every replica for its keys; send those that answered, with theirs."""


Step: TypeAlias = RunOperation | InstallRound | Listing
Change: TypeAlias = Generator[Step, object, ReplicaSet]


def change(view: View, tenure: Tenure, aim: Callable[[Seats], Seats], *, tries: int = 8) -> Change:
    """From what the seats are to what ``aim`` makes of them. It returns the set that holds then."""
    found = yield from _chosen(view, tenure)
    if found.before is not None:
        found = yield from _finish(view, tenure, found, tries)
    seats = aim(found.now)
    if seats == found.now:
        return found
    joint = yield from _agree(view, tenure, found, found.towards(seats))
    settled = yield from _finish(view, tenure, joint, tries)
    if settled.now != seats:
        raise CheckpointFailed("another program changed the replicas at the same time", do="Look, and try again.")
    return settled


def _chosen(view: View, tenure: Tenure) -> Generator[Step, object, ReplicaSet]:
    result = yield RunOperation(SET_KEY, OpenOperation(view, tenure))
    _check(result)
    assert isinstance(result, OperationDone)
    if result.state.body:
        view.learn(ReplicaSet.unpack(result.state.body))
    return view.replicas


def _agree(view: View, tenure: Tenure, found: ReplicaSet, wanted: ReplicaSet) -> Generator[Step, object, ReplicaSet]:
    """Make the record say this. What is found there instead is the answer of a faster writer."""
    expected = tenure.state.version
    write = tenure.nonce()
    result = yield RunOperation(SET_KEY, CasOperation(view, tenure, expected=expected, write=write, body=wanted.pack()))
    if (
        isinstance(result, OperationRefused)
        and result.why is OutcomeReason.VERSION
        and result.state is not None
        and result.state.body
    ):
        other = ReplicaSet.unpack(result.state.body)
        if other.generation > found.generation:
            view.learn(other)
            return other
    _check(result)
    view.learn(wanted)
    return wanted


def _finish(view: View, tenure: Tenure, joint: ReplicaSet, tries: int) -> Generator[Step, object, ReplicaSet]:
    if joint.before is None:
        return joint
    yield from _spread(joint, tries)
    for key in (yield from _keys(joint, tries)):
        result = yield RunOperation(key, CarryOperation(view, tenure.nonce))
        _check(result)
    # The carrying gave the record of the set a ballot of its own, which this opens above; the version is the same.
    result = yield RunOperation(SET_KEY, OpenOperation(view, tenure))
    _check(result)
    assert isinstance(result, OperationDone)
    now = ReplicaSet.unpack(result.state.body)
    settled = (
        now if now.generation > joint.generation else (yield from _agree(view, tenure, joint, joint.after_carry_over()))
    )
    yield from _spread(settled, tries)
    return settled


def _spread(replicas: ReplicaSet, tries: int) -> Generator[Step, object, None]:
    knows: set[str] = set()
    for _ in range(tries):
        answer = yield InstallRound(replicas)
        assert isinstance(answer, set)
        knows |= answer
        if replicas.writable(knows) and replicas.readable(knows):
            return
    raise CheckpointFailed(
        f"only {len(knows)} of {len(replicas.voters)} replicas could be informed of the change",
        do="Bring more of them back, then ask for the same change again: it goes on where it stopped.",
    )


def _keys(joint: ReplicaSet, tries: int) -> Generator[Step, object, list[str]]:
    keys_by_replica: dict[str, set[str]] = {}
    for _ in range(tries):
        answer = yield Listing()
        assert isinstance(answer, dict)
        keys_by_replica |= answer
        if joint.readable(keys_by_replica):
            return sorted(set().union(*keys_by_replica.values()))
    raise CheckpointFailed(
        "too few replicas could list what they keep",
        do="Bring more of them back, then ask for the same change again: it goes on where it stopped.",
    )


def _check(result: object) -> None:
    match result:
        case OperationDone():
            return
        case OperationRefused(why=OutcomeReason.FENCED, against=ballot):
            raise StaleEpoch(f"a writer with a newer epoch changes the replicas ({ballot})")
        case OperationRefused(why=OutcomeReason.FOREIGN, against=ballot):
            office = ballot.office if ballot is not None else "another office"
            raise InvalidRequest(
                f"these replicas are those of the office {office!r}", do="Adopt them first, if that office is gone."
            )
        case _:
            raise CheckpointFailed(
                "too few replicas answered while the set was being changed",
                do="Bring more of them back, then ask for the same change again: it goes on where it stopped.",
            )
