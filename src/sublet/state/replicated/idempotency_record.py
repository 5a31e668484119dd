"""The rules of reservations: the claimant of a key, and its outcome. Pure; time is an argument.

A key is claimed for a fingerprint, under an epoch, by a claimant (a store object, which draws a name for itself).
Another takes it over only under a higher epoch *and* when the claimant's lease has ended or its reservation has run
out. Time decides only that politeness: what keeps a late claimant from completing is the claim itself, which is no
longer his.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from sublet.errors import IdempotencyConflict, InvalidRequest, StaleEpoch
from sublet.state.replicated.ballot import Garbled
from sublet.values import Epoch

OUTCOME_MAX: Final = 2048


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key."""

    fingerprint: str
    claimant: str
    """The claimant that reserved it, by a random name."""
    owner: str
    """Its lease, for people and for ``lease_ended``."""
    epoch: Epoch
    until_ns: int
    """Wall time at which the reservation runs out."""
    step: int | None = None
    outcome: str | None = None
    """What came of it; None while it is not completed."""


@dataclass(frozen=True, slots=True)
class New:
    """It is yours: do it, then complete it."""

    key: str
    took_over: bool = False
    """Whether it was begun before. What was done is found in the record of the effect, not here."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Another program is at it."""

    owner: str
    until_ns: int


@dataclass(frozen=True, slots=True)
class Completed:
    """It is done."""

    outcome: str
    expired: bool = False
    """So long ago that only this is remembered: its step lies below what was collected."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The key is in use for something else."""

    fingerprint: str
    """Of what it is in use for."""


Reservation: TypeAlias = New | Pending | Completed | Conflict


@dataclass(frozen=True, slots=True)
class Book:
    """All keys of one shard. Methods return the book after, and what to say."""

    records: Mapping[str, KeyRecord] = field(default_factory=dict)
    floors: Mapping[str, int] = field(default_factory=dict)
    """Prefix of keys → the step below which everything is done and forgotten."""

    def reserve(self, key: str, claim: KeyRecord, *, now_ns: int, ended: bool = False) -> tuple[Book, Reservation]:
        """``ended``: whether the lease of the key's owner is known to have ended."""
        if claim.step is not None and claim.step < self._floor(key):
            return self, Completed("", expired=True)
        record = self.records.get(key)
        if record is None:
            return self._with(key, claim), New(key)
        if record.fingerprint != claim.fingerprint:
            return self, Conflict(record.fingerprint)
        if record.outcome is not None:
            return self, Completed(record.outcome)
        if record.claimant == claim.claimant and record.epoch <= claim.epoch:
            return self._with(key, claim), New(key)
        if claim.epoch < record.epoch:
            raise StaleEpoch(f"{key} is reserved under epoch {record.epoch}, and {claim.epoch} is older")
        if claim.epoch > record.epoch and (ended or now_ns >= record.until_ns):
            return self._with(key, claim), New(key, took_over=True)
        return self, Pending(record.owner, record.until_ns)

    def complete(self, key: str, claimant: str, epoch: Epoch, fingerprint: str, outcome: str) -> Book:
        """Only by its owner. A second time with the same outcome changes nothing."""
        if len(outcome.encode()) > OUTCOME_MAX:
            raise InvalidRequest(
                f"an outcome of {len(outcome.encode())} bytes is too large", do=f"Keep it to {OUTCOME_MAX} bytes."
            )
        record = self.records.get(key)
        if record is None:
            raise InvalidRequest(f"{key} was not reserved", do="Reserve it before doing it.")
        if record.fingerprint != fingerprint:
            raise IdempotencyConflict(
                f"{key} is in use for another fingerprint", do="Take another key for something else."
            )
        if record.claimant != claimant or record.epoch != epoch:
            raise StaleEpoch(
                f"{key} was taken over under epoch {record.epoch}", do="Leave it: its new owner completes it."
            )
        if record.outcome is not None:
            if record.outcome != outcome:
                raise IdempotencyConflict(f"{key} was completed with another outcome", do="Leave it: it is done.")
            return self
        return self._with(key, replace(record, outcome=outcome))

    def release(self, key: str, claimant: str) -> Book:
        """Give a reservation back that was not used."""
        entry = self.records.get(key)
        if entry is None or entry.claimant != claimant or entry.outcome is not None:
            return self
        return Book({k: record for k, record in self.records.items() if k != key}, self.floors)

    def expire(self, prefix: str, below: int, now_ns: int) -> Book:
        """Forget what is completed below a step, and what ran out there. The floor stays, so nothing comes back."""
        kept = {
            key: record
            for key, record in self.records.items()
            if not key.startswith(prefix)
            or record.step is None
            or record.step >= below
            or (record.outcome is None and now_ns < record.until_ns)
        }
        floor = max(below, self.floors.get(prefix, below))
        return Book(kept, {**self.floors, prefix: floor})

    def pack(self) -> bytes:
        """JSON with sorted keys."""
        shape = {"floors": dict(self.floors), "records": {key: _shape(record) for key, record in self.records.items()}}
        return json.dumps(shape, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, body: bytes) -> Book:
        """From the body of a state; anything else is Garbled."""
        if not body:
            return cls()
        try:
            shape = json.loads(body)
            records = {str(key): _record(record) for key, record in shape["records"].items()}
            return cls(records, {str(prefix): int(step) for prefix, step in shape["floors"].items()})
        except (ValueError, TypeError, KeyError, AttributeError, InvalidRequest) as error:
            raise Garbled(f"this is not a book of reservations ({error})") from error

    def _floor(self, key: str) -> int:
        return max((step for prefix, step in self.floors.items() if key.startswith(prefix)), default=-(1 << 62))

    def _with(self, key: str, record: KeyRecord) -> Book:
        return Book({**self.records, key: record}, self.floors)


def _shape(record: KeyRecord) -> list[object]:
    return [
        *(record.fingerprint, record.claimant, record.owner, str(record.epoch), record.until_ns),
        *(record.step, record.outcome),
    ]


def _record(shape: list[Any]) -> KeyRecord:
    fingerprint, claimant, owner, epoch, until_ns, step, outcome = shape
    return KeyRecord(
        str(fingerprint),
        str(claimant),
        str(owner),
        Epoch.parse(epoch),
        int(until_ns),
        None if step is None else int(step),
        None if outcome is None else str(outcome),
    )
