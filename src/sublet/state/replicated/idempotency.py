"""Idempotency keys on a quorum: a key is reserved, the work is done, the key is completed.

What no store can close is the window between the effect and its completion: a program that dies there leaves a key
pending whose effect exists. So an effect that matters carries its key with it (``effect=`` when a checkpoint is saved),
and the program that takes the key over looks there first.

Keys are spread over a few registers by their hash. The lease's epoch guards each key, not the register: leases of
several jobs use one store at the same time, and none of them fences the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

from blake3 import blake3

from sublet.errors import CheckpointFailed, InvalidRequest, SubletError
from sublet.state.replicated.arguments import checked_epoch
from sublet.state.replicated.ballot import Garbled
from sublet.state.replicated.cell import KEY_MAX, VALUE_MAX
from sublet.state.replicated.checkpoint import as_group
from sublet.state.replicated.group import ReplicaGroup, nonce
from sublet.state.replicated.idempotency_record import Book, KeyRecord, Reservation
from sublet.state.replicated.policy import ReplicaPolicy
from sublet.state.replicated.register import (
    CasOperation,
    OpenOperation,
    OperationDone,
    OperationRefused,
    OperationUnknown,
    OutcomeReason,
    Tenure,
)
from sublet.state.replicated.replica import Replica
from sublet.state.replicated.results import NOT_SAVED, UNKNOWN, raise_for
from sublet.values import Epoch, parse_duration_ns

SHARDS: Final = 16
KEY_BYTES: Final = 256
TRIES: Final = 20
NO_EPOCH: Final = Epoch(0, 0)

_T = TypeVar("_T")


class ReplicatedIdempotencyStore:
    """Reservations by key. ``owner`` names the lease under which this program works.

    ``lease_ended(owner, epoch)`` may tell whether another owner's lease has ended; without it, only the end of his
    reservation counts.
    """

    def __init__(
        self,
        name: str,
        *,
        replicas: ReplicaGroup | Sequence[Replica | str | os.PathLike[str]],
        epoch: Epoch | None = None,
        owner: str = "",
        policy: ReplicaPolicy | None = None,
        office: str = "local",
        lease_ended: Callable[[str, Epoch], bool] | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if not name or len(name.encode()) > KEY_MAX - 6 or not name.isprintable():
            raise InvalidRequest(f"{name[:60]!r} cannot be the name of a store", do="Use short printable text.")
        self.name, self.epoch, self.owner = name, epoch, owner
        self.group = as_group(replicas, policy, office)
        self._made_group = self.group is not replicas
        self.claimant = nonce().hex()
        """Our name in our reservations. Two stores of one program are two claimants."""
        self._ended = lease_ended
        self._wall_ns = wall_ns
        self._tenures: dict[int, Tenure] = {}

    def close(self) -> None:
        """Close the replicas that were opened here; a group that was given is its maker's to close. Harmless twice."""
        if self._made_group:
            self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(
        self,
        key: str,
        fingerprint: str,
        ttl: float | str = "5m",
        epoch: Epoch | None = None,
        *,
        step: int | None = None,
    ) -> Reservation:
        """Claim a key: ``New``, ``Pending``, ``Completed`` or ``Conflict``. Nothing is waited for."""
        self._check(key, fingerprint)
        ttl_ns = parse_duration_ns(ttl, "ttl")
        wanted = self._epoch(epoch)

        def change(book: Book) -> tuple[Book, Reservation]:
            now_ns = self._wall_ns()
            claim = KeyRecord(fingerprint, self.claimant, self.owner, wanted, now_ns + ttl_ns, step)
            record = book.records.get(key)
            ended = record is not None and self._ended is not None and self._ended(record.owner, record.epoch)
            return book.reserve(key, claim, now_ns=now_ns, ended=ended)

        return self._change(self._shard(key), change)

    def complete(self, key: str, fingerprint: str, outcome: str = "", epoch: Epoch | None = None) -> None:
        """Say that it is done. ``StaleEpoch`` if another program has taken it over in the meantime."""
        self._check(key, fingerprint)
        wanted = self._epoch(epoch)

        def change(book: Book) -> tuple[Book, None]:
            return book.complete(key, self.claimant, wanted, fingerprint, outcome), None

        self._change(self._shard(key), change)

    def release(self, key: str) -> None:
        """Give a reservation back whose work was not begun."""
        self._change(self._shard(key), lambda book: (book.release(key, self.claimant), None))

    def peek(self, key: str) -> KeyRecord | None:
        """What is known of a key, without claiming it."""
        return self._change(self._shard(key), lambda book: (book, book.records.get(key)))

    def expire(self, *, below: int, prefix: str = "") -> None:
        """Forget what is completed below this step, for keys that begin so.

        Call it with the step of a checkpoint that is saved: whatever is below that is done for good, and a late
        request for it is answered ``Completed(expired=True)``.
        """
        for shard in range(SHARDS):
            self._change(shard, lambda book: (book.expire(prefix, below, self._wall_ns()), None))

    # ---- inside ----

    def _change(self, shard: int, change: Callable[[Book], tuple[Book, _T]]) -> _T:
        """Compare and swap until it holds. An answer that changes nothing is read from a quorum all the same."""
        key = f"i/{self.name}/{shard:02x}"
        fresh = False
        for _ in range(TRIES):
            tenure = self._tenures.get(shard)
            if tenure is None or tenure.ballot is None:
                tenure = self._opened(shard, key)
                fresh = True
            state = tenure.state
            book = self._book(state.body)
            try:
                after, answer = change(book)
            except SubletError:
                if fresh:
                    raise
                tenure.close()  # what is remembered may be out of date, and a refusal is an answer as well
                continue
            if after is book or after == book:
                if fresh:
                    return answer
                tenure.close()
                continue
            body = after.pack()
            if len(body) > VALUE_MAX - 1024:
                raise CheckpointFailed(
                    f"the idempotency store {self.name!r} is full",
                    do="Call expire(below=...) with the step of a saved checkpoint, or use several stores.",
                    reason=NOT_SAVED,
                )
            operation = CasOperation(self.group.view, tenure, expected=state.version, write=nonce(), body=body)
            result = self.group.run(key, operation)
            match result:
                case OperationDone():
                    return answer
                case OperationRefused(why=OutcomeReason.VERSION):
                    fresh = True  # the tenure has what was found just now; one that is over is opened anew
                case OperationRefused() | OperationUnknown():
                    raise_for(result, self._what())
        raise CheckpointFailed(
            f"others keep writing {self._what()}", do="Try again, or use several stores.", reason=NOT_SAVED
        )

    def _opened(self, shard: int, key: str) -> Tenure:
        tenure = self._tenures.get(shard)
        if tenure is None:
            tenure = Tenure(office=self.group.office, epoch=NO_EPOCH, nonce=nonce)
            self._tenures[shard] = tenure
        result = self.group.run(key, OpenOperation(self.group.view, tenure))
        if not isinstance(result, OperationDone):
            raise_for(result, self._what())
        return tenure

    def adopt(self) -> None:
        """Take the store over from another office that is gone for good."""
        for shard in range(SHARDS):
            tenure = Tenure(office=self.group.office, epoch=NO_EPOCH, nonce=nonce)
            key = f"i/{self.name}/{shard:02x}"
            result = self.group.run(key, OpenOperation(self.group.view, tenure, adopt=True))
            if not isinstance(result, OperationDone):
                raise_for(result, self._what())
            self._tenures[shard] = tenure

    def _book(self, body: bytes) -> Book:
        try:
            return Book.unpack(body)
        except Garbled as error:
            raise CheckpointFailed(f"{self._what()} holds something else ({error})", reason=UNKNOWN) from error

    def _epoch(self, epoch: Epoch | None) -> Epoch:
        return checked_epoch(epoch if epoch is not None else self.epoch, "a reservation")

    def _check(self, key: str, fingerprint: str) -> None:
        for what, text in (("key", key), ("fingerprint", fingerprint)):
            if not text or len(text.encode()) > KEY_BYTES:
                raise InvalidRequest(f"the {what} {text[:40]!r} cannot be used", do=f"Use 1 to {KEY_BYTES} bytes.")

    def _shard(self, key: str) -> int:
        return blake3(key.encode()).digest()[0] % SHARDS

    def _what(self) -> str:
        return f"the idempotency store {self.name!r}"
