"""The thread of one replica: it takes all requests that wait for it at once, so that they share a write and a sync."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from sublet.replicated.cell import Answer
from sublet.replicated.phases import Send
from sublet.replicated.replica import Replica, ReplicaHealth, ReplicaSilent

__all__ = ["Errand", "Told", "Worker"]

BATCH_MAX: Final = 64
WAITING_MAX: Final = 512
"""Requests that may wait for one replica; one that is so far behind counts as silent."""

Told: TypeAlias = tuple[int, str, Answer | None]


@dataclass(slots=True)
class Errand:
    """Something to be asked of one replica, and where the answer goes."""

    key: str
    send: Send
    turn: int
    told: queue.SimpleQueue[Told]
    supply: Callable[[str, str], bytes | None]


class Worker:
    """The thread of one replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.identity = replica.identity
        self.health, self.detail = ReplicaHealth.UNKNOWN, ""
        self.errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"replica-{self.identity[:8]}", daemon=True)
        self._thread.start()

    def ask(self, errand: Errand) -> None:
        """Have it asked; the answer comes in the errand's queue."""
        if self.errands.qsize() > WAITING_MAX:
            errand.told.put((errand.turn, self.identity, None))
        else:
            self.errands.put(errand)

    def close(self, patience_s: float) -> None:
        """Let it finish what waits."""
        self.errands.put(None)
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            first = self.errands.get()
            if first is None:
                return
            batch, last = [first], False
            while len(batch) < BATCH_MAX:
                try:
                    more = self.errands.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    last = True
                    break
                batch.append(more)
            self._carry_out(batch)
            if last:
                return

    def _carry_out(self, batch: list[Errand]) -> None:
        said: Sequence[Answer | None]
        try:
            for errand in batch:
                self._bring(errand)
            said = self.replica.ask([(errand.key, errand.send.request) for errand in batch])
            self.health, self.detail = ReplicaHealth.HEALTHY, ""
        except ReplicaSilent as error:
            self.health, self.detail = error.health, error.message
            said = [None] * len(batch)
        for errand, answer in zip(batch, said, strict=True):
            errand.told.put((errand.turn, self.identity, answer))

    def _bring(self, errand: Errand) -> None:
        for name in errand.send.packs:
            data = errand.supply(errand.key, name)
            if data is not None:
                self.replica.put_pack(errand.key, name, data)
