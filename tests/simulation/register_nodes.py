"""Pretended replicas and the network before them. What a replica answers is the product's own rule."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sublet.state.replicated import cell as law
from sublet.state.replicated.cell import EMPTY, Answer, Install, Installed, ReplicaCell, Request
from sublet.state.replicated.quorum import ReplicaSet


class Moments:
    """What happens when: a queue, and the present time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._count = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Do it then."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, do, args))

    def run_until(self, end: float) -> None:
        """Let time pass. What is later than the end stays in the queue."""
        while self._queue and self._queue[0][0] <= end:
            self.now, _, do, args = heapq.heappop(self._queue)
            self.steps += 1
            do(*args)
        self.now = end


class Node:
    """One replica: an identity, cells, the set it knows."""

    def __init__(self, name: str, nonce: Callable[[], bytes]) -> None:
        self.name, self._nonce = name, nonce
        self.identity = nonce().hex()
        self.cells: dict[str, ReplicaCell] = {}
        self.known: ReplicaSet | None = None
        self.sets: dict[int, ReplicaSet] = {}
        """Every set that it ever knew, by generation."""
        self.up = True
        self.slow = 1.0

    def ask(self, key: str, request: Request) -> Answer:
        """Carry the product's rule out. Everything is durable before the answer."""
        if isinstance(request, Install):
            if self.known is None or request.replicas.generation > self.known.generation:
                self.known = self.sets[request.replicas.generation] = request.replicas
            if request.then is None:
                return Installed()
            request = request.then
        before = self.cells.get(key, EMPTY)
        after, said = law.answer(before, self.known, request)
        if after is not before:
            self.cells[key] = after
        return said

    def forget(self) -> None:
        """The disk was swapped for an empty one. It comes up with another identity."""
        self.cells, self.known, self.identity = {}, None, self._nonce().hex()

    def crash(self) -> None:
        """It is gone until it restarts. Everything it answered is on its disk."""
        self.up = False


@dataclass(slots=True)
class Net:
    """Loses, doubles, delays and cuts."""

    moments: Moments
    random: random.Random
    nodes: dict[str, Node]
    where: dict[str, str] = field(default_factory=dict)
    """Identity → the name of the node that had it when it was seated."""
    loss: float = 0.0
    duplicates: float = 0.0
    late: float = 0.0
    delay: float = 0.005
    cuts: set[tuple[str, str]] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    def send(self, source: str, identity: str, key: str, request: Request, then: Callable[[Answer], None]) -> None:
        """Bring a question to a replica and perhaps its answer back."""
        name = self.where.get(identity)
        if name is None:
            return
        for _ in range(2 if self.random.random() < self.duplicates else 1):
            if self._gets_through(source, name):
                self.moments.after(self._time(name), self._arrive, source, name, identity, key, request, then)

    def _arrive(
        self, source: str, name: str, identity: str, key: str, request: Request, then: Callable[[Answer], None]
    ) -> None:
        node = self.nodes[name]
        if not node.up or node.identity != identity:
            self.seen["asked in vain"] += 1
            return
        said = node.ask(key, request)
        self.seen[type(said).__name__] += 1
        if self._gets_through(name, source):
            self.moments.after(self._time(name), then, said)

    def _gets_through(self, source: str, target: str) -> bool:
        if (source, target) in self.cuts:
            self.seen["cut"] += 1
            return False
        if self.random.random() < self.loss:
            self.seen["lost"] += 1
            return False
        return True

    def _time(self, name: str) -> float:
        draw = self.random.random()
        if self.random.random() < self.late:
            return 0.2 + draw * 3
        return (0.2 + draw) * self.delay * self.nodes[name].slow
