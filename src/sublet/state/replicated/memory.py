"""A replica in memory that keeps every rule, and refuses or fails on demand. For tests of programs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from sublet.state.replicated.ballot import WriteStamp
from sublet.state.replicated.cell import EMPTY, Accept, Answer, Install, Installed, ReplicaCell, Request, answer
from sublet.state.replicated.quorum import ReplicaSet
from sublet.state.replicated.replica import FailureDomain, ReplicaFaulty, ReplicaFull, ReplicaSilent


class MemoryReplica:
    """As long as this object lives. What goes wrong is set by its attributes."""

    def __init__(self, *, domain: FailureDomain | None = None) -> None:
        self.identity = os.urandom(16).hex()
        self.domain = domain if domain is not None else FailureDomain()
        self.silent = False
        """Answers nothing, and does nothing."""
        self.deaf = False
        """Does everything, and answers nothing."""
        self.full = False
        """Has no room for anything new."""
        self.faulty = False
        """Is damaged."""
        self.asked = 0
        """Requests so far."""
        self._cells: dict[str, ReplicaCell] = {}
        self._packs: dict[tuple[str, str], bytes] = {}
        self._known: ReplicaSet | None = None
        self._lock = threading.RLock()

    def forget(self) -> None:
        """As a swapped disk: everything is gone, and its identity is another."""
        with self._lock:
            self.identity = os.urandom(16).hex()
            self._cells, self._packs, self._known = {}, {}, None

    def lose_pack(self, name: str) -> None:
        """One pack is damaged."""
        with self._lock:
            self._packs = {place: data for place, data in self._packs.items() if place[1] != name}

    def ask(self, requests: Sequence[tuple[str, Request]]) -> list[Answer]:
        """Carry these out."""
        with self._lock:
            self._check()
            self.asked += len(requests)
            replies = [self._one(key, request) for key, request in requests]
            self._answer()
            return replies

    def _one(self, key: str, request: Request) -> Answer:
        if isinstance(request, Install):
            if self._known is None or request.replicas.generation > self._known.generation:
                self._known = request.replicas
            if request.then is None:
                return Installed()
            request = request.then
        before = self._cells.get(key, EMPTY)
        packs = request.accepted.packs if isinstance(request, Accept) else ()
        missing = tuple(name for name in packs if (key, name) not in self._packs)
        after, reply = answer(before, self._known, request, missing)
        if after is not before:
            if self.full:
                raise ReplicaFull("this replica was told to be full")
            self._cells[key] = after
        return reply

    def known(self) -> ReplicaSet | None:
        """The latest set that was installed."""
        with self._lock:
            self._check()
            self._answer()
            return self._known

    def keys(self) -> list[str]:
        """Every key of which there is a record."""
        with self._lock:
            self._check()
            self._answer()
            return sorted(self._cells)

    def put_pack(self, key: str, name: str, data: bytes) -> None:
        """Keep these bytes."""
        with self._lock:
            self._check()
            if self.full:
                raise ReplicaFull("this replica was told to be full")
            self._packs[key, name] = bytes(data)
            self._answer()

    def read_pack(self, key: str, name: str) -> bytes | None:
        """The bytes."""
        with self._lock:
            self._check()
            self._answer()
            return self._packs.get((key, name))

    def packs(self, key: str) -> list[str]:
        """The names there are."""
        with self._lock:
            self._check()
            self._answer()
            return sorted(name for place, name in self._packs if place == key)

    def sweep(self, key: str, stamp: WriteStamp, names: Sequence[str]) -> int:
        """Remove these packs if the last write that was taken is this one and does not name them."""
        with self._lock:
            self._check()
            accepted = self._cells.get(key, EMPTY).accepted
            if accepted is None or accepted.stamp != stamp:
                return 0
            gone = [name for name in names if name not in accepted.packs and (key, name) in self._packs]
            for name in gone:
                del self._packs[key, name]
            self._answer()
            return len(gone)

    def verify(self) -> list[str]:
        """What is missing."""
        with self._lock:
            named = [(k, p) for k, cell in self._cells.items() if cell.accepted for p in cell.accepted.packs]
            return [f"{key}: the pack {pack} is missing" for key, pack in named if (key, pack) not in self._packs]

    def close(self) -> None:
        """Nothing to do."""

    def __repr__(self) -> str:
        return f"<MemoryReplica {self.identity[:8]}>"

    def _check(self) -> None:
        if self.faulty:
            raise ReplicaFaulty("this replica was told to be faulty")
        if self.silent:
            raise ReplicaSilent("this replica was told to be silent")

    def _answer(self) -> None:
        if self.deaf:
            raise ReplicaSilent("this replica was told not to answer")
