"""The office's disk: what was synced stays, what was not may be there, or not, after a crash.

A batch is stored as the bytes that the real events encode to, with the moment it was decided, under a checksum. A
torn batch fails it and is dropped whole, as the real journal's transaction would be. The incarnation is kept apart,
because it must survive a restore.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from sublet.office.ledger.events import Event
from sublet.office.ledger.fold import apply
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Now
from sublet.office.ledger.state import State


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    now: tuple[int, int]
    events: list[Event]


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_Batch)


@dataclass(frozen=True, slots=True)
class Backup:
    """A copy of the journal as of some moment."""

    base: bytes | None
    batches: tuple[bytes, ...]
    history: tuple[bytes, ...]
    last_ns: int


@dataclass(slots=True)
class Disk:
    """One office's journal."""

    policy: Policy
    base: bytes | None = None
    """A snapshot that stands for everything before the batches."""
    batches: list[bytes] = field(default_factory=list)
    history: list[bytes] = field(default_factory=list)
    """All batches since the first: the books, for an auditor."""
    unsynced: bytes | None = None
    last_ns: int = 0
    """The last instant the journal knows, of the clock that wrote it."""
    _unsynced_ns: int = 0
    incarnation: int = 1
    restored: bool = False
    """It came out of a backup and was not opened since."""

    def append(self, now: Now, events: list[Event]) -> None:
        """Written, not yet synced."""
        body = _encode(_Batch((now.ns, now.wall_ns), events))
        self.unsynced = zlib.crc32(body).to_bytes(4, "big") + body
        self._unsynced_ns = now.ns

    def synced(self) -> None:
        """The sync came back: it is durable."""
        if self.unsynced is not None:
            self._keep(self.unsynced)
            self.unsynced = None

    def _keep(self, batch: bytes) -> None:
        self.batches.append(batch)
        self.history.append(batch)
        self.last_ns = self._unsynced_ns

    def told(self) -> Iterator[tuple[Now, list[Event]]]:
        """Every durable batch since the first, whatever was compacted since."""
        for data in self.history:
            batch = _open(data)
            assert batch is not None
            yield Now(*batch.now), batch.events

    def crash(self, draw: float) -> None:
        """Power is gone in the middle of a write: lost, torn or kept, by the draw."""
        left, self.unsynced = self.unsynced, None
        if left is None or draw < 0.4:
            return
        if draw < 0.7:
            left = left[: 1 + int(len(left) * draw)]
        if _open(left) is not None:
            self._keep(left)

    def compact(self, snapshot: bytes) -> None:
        """The snapshot takes the place of the batches."""
        self.base, self.batches = snapshot, []

    def recover(self) -> State:
        """The fold of what is there."""
        return fold(self.policy, self.base, self.batches)

    def backup(self) -> Backup:
        """A copy, as ``sublet backup`` makes one."""
        return Backup(self.base, tuple(self.batches), tuple(self.history), self.last_ns)

    def restore(self, backup: Backup) -> None:
        """Put the copy in place; a new incarnation begins."""
        self.base, self.batches, self.unsynced = backup.base, list(backup.batches), None
        self.history = list(backup.history)
        self.last_ns = backup.last_ns
        self.incarnation += 1
        self.restored = True

    def copy(self) -> Disk:
        """A second disk with the same content, for an office that lives on after it was replaced."""
        return Disk(
            self.policy,
            self.base,
            list(self.batches),
            list(self.history),
            last_ns=self.last_ns,
            incarnation=self.incarnation,
        )


def fold(policy: Policy, base: bytes | None, batches: list[bytes]) -> State:
    """The state that these bytes come to."""
    if base is None:
        state = State.fresh(policy)
    else:
        state = State.restore(base)
    for data in batches:
        batch = _open(data)
        assert batch is not None, "a synced batch cannot be read"
        now = Now(*batch.now)
        for event in batch.events:
            apply(state, event, now)
    return state


def _open(data: bytes) -> _Batch | None:
    body = data[4:]
    if len(data) < 5 or zlib.crc32(body).to_bytes(4, "big") != data[:4]:
        return None
    return _decoder.decode(body)
