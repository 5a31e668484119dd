"""Leases that are threads of the test: they execute batches as a worker does, and end when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.compute.outcomes import CallResults
from sublet.errors import LeaseRevoked, SubletError, WorkerLost
from sublet.jobs import running
from sublet.jobs.chunks import Needs
from sublet.jobs.running import Pool


class FakeFuture(Future[Any]):
    """Of a batch: its rest can be withheld, and it says how many items were begun."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.is_withheld = False
        self.items_begun = 0
        self.results: list[Any] = []

    def withhold(self) -> bool:
        with self.lock:
            self.is_withheld = True
        return True

    def begun(self) -> int | None:
        return None if self.done() else self.items_begun

    def made(self) -> list[Any]:
        with self.lock:
            return list(self.results)

    def begin_item(self) -> bool:
        """On the worker: whether the next one is wanted."""
        with self.lock:
            self.items_begun += not self.is_withheld
            return not self.is_withheld


@dataclass(eq=False)
class FakeLease:
    """One lease; its worker is a thread."""

    id: str
    needs: Needs
    end: Any = None
    ends: list[Callable[[Any], object]] = field(default_factory=list)
    queue: list[tuple[Any, Sequence[tuple[Any, ...]], FakeFuture]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    lose_at: int | None = None
    """The worker dies when it has executed so many more chunks."""
    lose_after: Any = None
    """The worker dies at this item, when it has executed it and before its result is there."""
    lost_as: SubletError | None = None
    executing: FakeFuture = field(default_factory=FakeFuture)
    """Of the batch that its worker has begun last."""
    is_over: bool = False

    def on_end(self, callback: Callable[[Any], object]) -> None:
        self.ends.append(callback)

    def on_notice(self, callback: Callable[[Any], object]) -> None:
        """The test gives none."""

    def begin(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, task: Any, items: Sequence[tuple[Any, ...]], future: FakeFuture) -> None:
        with self.changed:
            if self.end is None:
                self.queue.append((task, items, future))
                self.changed.notify()
                return
        future.set_exception(not_begun())

    def close(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify()

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.queue and not self.is_over:
                    self.changed.wait()
                if self.is_over:
                    return
                task, items, future = self.queue.pop(0)
            self.executing, results, is_lost = future, future.results, False
            for item in items:
                if (is_lost := self.lose_at is not None and self.lose_at <= 0) or not future.begin_item():
                    break
                result = task(item)
                if is_lost := self.lose_after is not None and item == self.lose_after:
                    break
                with future.lock:
                    results.append(result)
                if self.lose_at is not None:
                    self.lose_at -= 1
            if not is_lost:
                future.set_result(CallResults(results, None, 1000 * len(items)))
                continue
            self._die(results, future)

    def _die(self, results: list[Any], future: Future[Any]) -> None:
        """With this batch: what it had made is there; the next batch had not begun."""
        error = self.lost_as or WorkerLost("killed")
        self.lose_at = None
        future.set_result(CallResults(results, error, 1000 * max(1, len(results))))
        if not isinstance(error, WorkerLost):
            with self.changed:  # what comes from now on is refused at once
                self.is_over = True
                self.end = SimpleNamespace(reason="revoked")
            for _, _, other in self.queue:
                other.set_exception(not_begun())
            for callback in self.ends:
                callback(self.end)


def not_begun() -> LeaseRevoked:
    error = LeaseRevoked("taken")
    error.begun = False
    return error


class FakePool:
    """As many leases as the test gives."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self.leases: list[FakeLease] = []
        self.held: dict[Needs, list[FakeLease]] = {}
        self.made = 0
        self.is_closed = False
        self.wanted: dict[Needs, int] = {}
        self.on_made: Callable[[FakeLease], object] = lambda lease: None
        self._on_lease: Any = None

    def make(self, on_lease: Any, on_refusal: Any) -> Pool:
        self._on_lease = on_lease
        return self

    def want(self, needs: Needs, count: int) -> None:
        self.wanted[needs] = count
        while len(self.held.get(needs, ())) < min(count, self.most):
            self.made += 1
            lease = FakeLease(f"lease-{self.made}", needs)
            self.leases.append(lease)
            self.held.setdefault(needs, []).append(lease)
            self.on_made(lease)
            lease.begin()
            self._on_lease(needs, lease)

    def remove(self, needs: Needs, lease: Any) -> None:
        self.held[needs] = [lease for lease in self.held[needs] if not lease.is_over]

    def give_back(self, leases: Sequence[tuple[Needs, Any]]) -> None:
        for needs, lease in leases:
            self.held[needs].remove(lease)
            lease.close()

    def close(self) -> None:
        self.is_closed = True
        for lease in self.leases:
            lease.close()
        self.held.clear()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    """A pool of two leases."""

    def submit(lease: FakeLease, options: object, task: Any, items: Sequence[tuple[Any, ...]]) -> FakeFuture:
        future = FakeFuture()
        lease.put(task, items, future)
        return future

    monkeypatch.setattr(running, "submit_many", submit)
    monkeypatch.setattr(running, "prepare_worker", lambda lease, options: None)
    return FakePool()
