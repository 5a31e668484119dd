"""A group of replicas: one thread each, operations that wait for a quorum, health, changes of the set.

The thread of a replica takes all requests that wait for it at once, so writers that come together share its syncs. An
operation waits for the quorum it needs, never for the slowest. What the protocol decides is in ``register``; here is
only sending, waiting and giving up.
"""

from __future__ import annotations

import functools
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from sublet.background import start_thread
from sublet.errors import CheckpointFailed, InvalidRequest
from sublet.state.replicated.arguments import checked_replicas
from sublet.state.replicated.ballot import NONCE_BYTES, OFFICE_MAX
from sublet.state.replicated.cell import Install, Installed
from sublet.state.replicated.membership import InstallRound, Listing, RunOperation, change
from sublet.state.replicated.policy import ReplicaPolicy
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.register import RegisterOperation, Result, Tenure, View
from sublet.state.replicated.replica import FailureDomain, Replica, ReplicaFaulty, ReplicaHealth, ReplicaSilent
from sublet.state.replicated.worker import ReplicaReply, ReplicaRequest, ReplicaThread
from sublet.values import Epoch, parse_duration_ns

REST_S: Final = 0.02
REST_MAX_S: Final = 0.1
"""Longer rests would not be fairer: the last winner rests least, and a loser that tries once a second meets a writer
at work every time, until its patience is over."""
ROUND_S: Final = 2.0
"""A replica that has not answered after so long is not waited for in this round."""
PACK_RATE: Final = 1 << 20
"""Bytes in a second: a replica that takes a pack more slowly than this, patience apart, is not waited for."""


class ReplicaRole:
    """What a replica is in its set."""

    VOTER: Final = "voter"
    """It has a seat."""
    SPARE: Final = "spare"
    """It has none, and may be given one."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica, as it is now."""

    identity: str
    role: str
    health: ReplicaHealth
    domain: FailureDomain | None
    """None for a voter that this program was not given."""
    generation: int
    """Of the set it knows; 0 if it knows none or did not say."""
    detail: str = ""


class ReplicaGroup:
    """The replicas that keep one program's records together.

    The first program that opens a group of new replicas makes them a set; after that the set is what its replicas say,
    and is changed with ``replace``, ``add`` and ``remove`` only. ``office`` names whose epochs are trusted. Folders may
    be given as such: one that cannot be opened then counts as lost, and the others work.
    """

    def __init__(
        self,
        replicas: Sequence[Replica | str | os.PathLike[str]],
        policy: ReplicaPolicy | None = None,
        *,
        office: str = "local",
        patience: float | str = "10s",
    ) -> None:
        opened = checked_replicas(replicas)
        if not 0 < len(office.encode()) <= OFFICE_MAX:
            raise InvalidRequest(
                f"{office[:80]!r} is not the name of an office", do=f"Give 1 to {OFFICE_MAX} bytes of text."
            )
        self.policy = ReplicaPolicy() if policy is None else policy
        self.office = office
        self.patience_s = parse_duration_ns(patience, "patience") / 1e9
        self.policy.check_placement(opened)
        self._workers: dict[str, ReplicaThread] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._abandoned = weakref.finalize(self, _abandon, self._workers)
        self._abandoned.atexit = False
        for replica in opened:
            self._seat(replica)
        self.view = View(self._found())

    # ---- operations ----

    def run(self, key: str, operation: RegisterOperation, supply: Mapping[str, bytes] | None = None) -> Result:
        """Carry an operation out, to its result. ``supply``: packs that it may need, besides those there are."""
        if self._closed:
            raise InvalidRequest("the group of replicas is closed", do="Open it again.")
        replies: queue.SimpleQueue[ReplicaReply] = queue.SimpleQueue()
        staged = {} if supply is None else supply

        def bring(of: str, name: str) -> bytes | None:
            data = staged.get(name)
            return data if data is not None else self.read_pack(of, name)

        deadline = time.monotonic() + self.patience_s
        rest_s = REST_S
        while True:
            self._dispatch(key, operation, replies, bring)
            result = operation.result
            if result is not None:
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                operation.give_up()
            elif operation.resting:
                time.sleep(min(left, rest_s * random.random()))
                rest_s = min(rest_s * 2, REST_MAX_S)
                operation.resume()
            else:
                self._wait_answer(operation, replies, min(left, ROUND_S))

    def _dispatch(
        self,
        key: str,
        operation: RegisterOperation,
        replies: queue.SimpleQueue[ReplicaReply],
        bring: Callable[[str, str], bytes | None],
    ) -> None:
        while sends := operation.take():
            turn, absent = operation.turn, []
            for send in sends:
                worker = self._workers.get(send.replica)
                if worker is None:
                    absent.append(send.replica)
                else:
                    worker.ask(ReplicaRequest(key, send, turn, replies, bring))
            for replica in absent:
                operation.lost(turn, replica)

    def _wait_answer(
        self, operation: RegisterOperation, replies: queue.SimpleQueue[ReplicaReply], wait_s: float
    ) -> None:
        try:
            turn, replica, answer = replies.get(timeout=wait_s)
        except queue.Empty:
            turn = operation.turn
            for replica in self.view.replicas.voters:
                operation.lost(turn, replica)
            return
        if answer is None:
            operation.lost(turn, replica)
        else:
            operation.on_answer(turn, replica, answer)

    def replicas(self) -> list[Replica]:
        """Those with a seat that this program was given."""
        voters = self.view.replicas.voters
        return [worker.replica for worker in list(self._workers.values()) if worker.identity in voters]

    def who_else_writes(self) -> str:
        """The first replica to which others than this user may write, in words; empty if none is known to be so."""
        checks = (getattr(worker.replica, "who_else_writes", str) for worker in list(self._workers.values()))
        return next(filter(None, (str(ask()) for ask in checks)), "")

    # ---- packs ----

    def put_pack(self, key: str, name: str, data: bytes) -> None:
        """Durable on a write quorum, or CheckpointFailed. All replicas write at once; the slowest is not waited for,
        and none for ever."""
        done: queue.SimpleQueue[tuple[str, CheckpointFailed | None]] = queue.SimpleQueue()
        voters = [w for w in self._workers.values() if w.identity in self.view.replicas.voters]

        def put(worker: ReplicaThread) -> None:
            try:
                worker.replica.put_pack(key, name, data)
                done.put((worker.identity, None))
            except ReplicaSilent as error:
                worker.health, worker.detail = error.health, error.message
                done.put((worker.identity, error))
            except Exception as error:  # noqa: BLE001 - a replica of any make; the caller gets an answer
                done.put((worker.identity, ReplicaFaulty(f"the replica failed: {type(error).__name__}: {error}")))

        until_s = time.monotonic() + self.patience_s + len(data) / PACK_RATE
        for worker in voters:
            try:
                _ = start_thread("replica_pack", lambda worker=worker: put(worker))  # type: ignore[misc]
            except RuntimeError as full:  # no room for another thread: this replica is not written to
                done.put((worker.identity, ReplicaFaulty(f"the replica could not be asked: {full}")))
        took, why = set[str](), ""
        for _ in voters:
            try:
                identity, error = done.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                why = why or " (the others do not answer)"
                break
            if error is None:
                took.add(identity)
            else:
                why = f" ({error.message})"
            if self.view.replicas.writable(took):
                return
        raise CheckpointFailed(
            f"a part of it is on only {len(took)} of {len(self.view.replicas.voters)} replicas{why}",
            do="See to the other replicas, then save again. What was saved before is unharmed.",
        )

    def read_pack(self, key: str, name: str) -> bytes | None:
        """From whichever replica has it whole; one that had it damaged is given it again."""
        lacking: list[ReplicaThread] = []
        for worker in list(self._workers.values()):
            try:
                data = worker.replica.read_pack(key, name)
            except ReplicaSilent as error:
                worker.health, worker.detail = error.health, error.message
                continue
            if data is not None:
                self._mend(lacking, key, name, data)
                return data
            lacking.append(worker)
        return None

    def _mend(self, lacking: list[ReplicaThread], key: str, name: str, data: bytes) -> None:
        for worker in lacking:
            try:
                if worker.identity in self.view.replicas.voters:
                    worker.replica.put_pack(key, name, data)
            except ReplicaSilent as error:
                worker.health, worker.detail = error.health, error.message

    # ---- looking ----

    def health(self) -> list[ReplicaView]:
        """Ask every replica how it is: voters first, in the order of their identities."""
        voters = self.view.replicas.voters
        found = []
        for identity in sorted({*voters, *self._workers}, key=lambda one: (one not in voters, one)):
            role = ReplicaRole.VOTER if identity in voters else ReplicaRole.SPARE
            worker = self._workers.get(identity)
            if worker is None:
                found.append(
                    ReplicaView(identity, role, ReplicaHealth.SILENT, None, 0, "this program was not given it")
                )
                continue
            generation = 0
            try:
                known = worker.replica.known()
                generation = known.generation if known is not None else 0
                worker.health, worker.detail = ReplicaHealth.HEALTHY, ""
            except ReplicaSilent as error:
                worker.health, worker.detail = error.health, error.message
            found.append(ReplicaView(identity, role, worker.health, worker.replica.domain, generation, worker.detail))
        return found

    def verify(self) -> dict[str, list[str]]:
        """Read everything on every replica: identity → what is damaged there."""
        return {worker.identity: worker.replica.verify() for worker in self._workers.values()}

    # ---- changing the set ----

    def replace(self, lost: str | Replica, new: Replica, *, epoch: Epoch) -> ReplicaSet:
        """Give the seat of one replica to another; the new one has every record before this returns."""
        gone = lost if isinstance(lost, str) else lost.identity
        staying = [w.replica for w in self._workers.values() if w.identity != gone and w.identity in self._voters()]
        self.policy.placement.check([replica.domain for replica in (*staying, new)])
        self._seat(new)
        members = {*self.view.replicas.now.members, new.identity} - {gone}
        return self._change(lambda now: self._aim(now, add=new.identity, drop=gone), len(members), epoch)

    def add(self, new: Replica, *, epoch: Epoch) -> ReplicaSet:
        """One more voter."""
        voters = [w.replica for w in self._workers.values() if w.identity in self._voters()]
        self.policy.placement.check([replica.domain for replica in (*voters, new)])
        self._seat(new)
        return self._change(lambda now: self._aim(now, add=new.identity), len(self._voters()) + 1, epoch)

    def remove(self, lost: str | Replica, *, epoch: Epoch) -> ReplicaSet:
        """One voter less."""
        gone = lost if isinstance(lost, str) else lost.identity
        return self._change(lambda now: self._aim(now, drop=gone), len(self._voters()) - 1, epoch)

    def replace_lost(self, *, epoch: Epoch) -> list[str]:
        """Give the seats of voters that are faulty, silent or absent to spare replicas; returns those that lost one."""
        done = []
        for view in self.health():
            if view.role == ReplicaRole.VOTER and view.health in (ReplicaHealth.FAULTY, ReplicaHealth.SILENT):
                spares = [w for w in self._workers.values() if w.identity not in self._voters()]
                spare = next(filter(self._is_well, spares), None)
                if spare is not None:
                    self.replace(view.identity, spare.replica, epoch=epoch)
                    done.append(view.identity)
        return done

    def _is_well(self, worker: ReplicaThread) -> bool:
        try:
            worker.replica.known()
        except ReplicaSilent:
            return False
        return True

    def _aim(self, now: Seats, *, add: str | None = None, drop: str | None = None) -> Seats:
        members = sorted({*now.members, *((add,) if add else ())} - {drop})
        return self.policy.seats(members)

    def _change(self, aim: Callable[[Seats], Seats], count: int, epoch: Epoch) -> ReplicaSet:
        if count < self.policy.min_replicas:
            raise InvalidRequest(
                f"that would leave {count} replicas, and the policy asks for {self.policy.min_replicas}",
                do="Add one first, or lower min_replicas.",
            )
        plan = change(self.view, Tenure(office=self.office, epoch=epoch, nonce=nonce), aim)
        answer: object = None
        while True:
            try:
                step = plan.send(answer)
            except StopIteration as end:
                settled: ReplicaSet = end.value
                return settled
            match step:
                case RunOperation(key=key, operation=operation):
                    answer = self.run(key, operation)
                case InstallRound(replicas=replicas):
                    install = functools.partial(_install, replicas=replicas)
                    answer = {i for i in replicas.voters if self._try(i, install) is not None}
                case Listing():
                    lists = {i: self._try(i, lambda r: r.keys()) for i in self.view.replicas.voters}
                    answer = {identity: keys for identity, keys in lists.items() if keys is not None}

    def _try(self, identity: str, do: Callable[[Replica], list[str]]) -> list[str] | None:
        worker = self._workers.get(identity)
        if worker is None:
            return None
        try:
            return do(worker.replica)
        except ReplicaSilent as error:
            worker.health, worker.detail = error.health, error.message
            return None

    def _voters(self) -> tuple[str, ...]:
        return self.view.replicas.now.members

    # ---- opening and closing ----

    def _seat(self, replica: Replica) -> None:
        with self._lock:
            if replica.identity not in self._workers:
                self._workers[replica.identity] = ReplicaThread(replica)

    def _found(self) -> ReplicaSet:
        """The set as its replicas know it, or a new one of replicas that are all new."""
        known, silent = [], []
        for worker in self._workers.values():
            try:
                known.append(worker.replica.known())
            except ReplicaSilent as error:
                worker.health, worker.detail = error.health, error.message
                silent.append(error.message)
        latest = max((one for one in known if one is not None), key=lambda one: one.generation, default=None)
        if latest is not None:
            self._check_policy(latest)
            return latest
        if silent:
            raise CheckpointFailed(
                f"no replica that answers knows a set, and {len(silent)} did not answer ({silent[0]})",
                do="Bring them back: a new set is only made when every replica says that it is new.",
            )
        first = ReplicaSet(1, self.policy.seats(sorted(self._workers)))
        for worker in self._workers.values():
            worker.replica.ask([("", Install(first))])
        return first

    def _check_policy(self, found: ReplicaSet) -> None:
        for what, wanted, actual in (
            ("read_quorum", self.policy.read_quorum, found.now.read),
            ("write_quorum", self.policy.write_quorum, found.now.write),
        ):
            if wanted is not None and wanted != actual:
                raise InvalidRequest(
                    f"the policy says {what}={wanted}, and these replicas were made a set with {actual}",
                    do=f"Say {what}={actual}, or leave it out.",
                )

    def close(self) -> None:
        """End the threads and close the replicas. Harmless twice."""
        if not self._closed:
            self._closed = True
            self._abandoned.detach()
            for worker in self._workers.values():
                worker.close(self.patience_s)
            for worker in self._workers.values():
                worker.replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _abandon(workers: dict[str, ReplicaThread]) -> None:
    """End the threads of a group that was dropped without ``close``. The replicas may be in use elsewhere."""
    for worker in workers.values():
        worker.stop_soon()


def _install(replica: Replica, replicas: ReplicaSet) -> list[str]:
    (answer,) = replica.ask([("", Install(replicas))])
    assert isinstance(answer, Installed)
    return []


def nonce() -> bytes:
    """Eight bytes of chance."""
    return os.urandom(NONCE_BYTES)
