"""Chooses the next waiting job: tenants take turns; within a tenant the earliest deadline is first.

There is a fixed number of slots. The first half is for any tenant, the second half only for tenants that have nothing
running. So however much one tenant asks for, and however long each of its jobs takes, a slot is free for another; and
while other tenants wait with nothing running, none gets a second slot. Pure.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Job = TypeVar("Job", bound=Hashable)

AWAITED: Final = 0
"""In place of a deadline: a caller waits for just this job."""
NO_DEADLINE: Final = 1 << 63
"""Nanoseconds; later than any deadline."""


class _Tenant(Generic[Job]):
    __slots__ = ("running", "turn", "waiting")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        """When it was started last, or came; the lowest is next."""
        self.running = 0
        self.waiting: list[tuple[int, int, Job]] = []
        """A heap of (deadline, number, job)."""


class FairSlots(Generic[Job]):
    """The jobs of one queue. Each is named by itself, and is added once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._numbers = itertools.count()
        self._tenants: dict[str, _Tenant[Job]] = {}
        self._tenant_of: dict[Job, str] = {}
        self._running: set[Job] = set()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._tenant_of) - len(self._running)

    def add(self, job: Job, tenant: str, deadline_ns: int = NO_DEADLINE) -> None:
        """Let it wait for its turn."""
        number = next(self._numbers)
        found = self._tenants.setdefault(tenant, _Tenant(number))
        heapq.heappush(found.waiting, (deadline_ns, number, job))
        self._tenant_of[job] = tenant

    def take(self) -> Job | None:
        """The job that is to be started now, which occupies a slot until ``over``; None if none may be."""
        if len(self._running) >= self._slots:
            return None
        first_half = len(self._running) < max(1, self._slots // 2)
        able = [one for one in self._tenants.values() if one.waiting and (first_half or not one.running)]
        if not able:
            return None
        tenant = min(able, key=lambda one: (one.running, one.turn))
        _, _, job = heapq.heappop(tenant.waiting)
        tenant.running += 1
        tenant.turn = next(self._numbers)
        self._running.add(job)
        return job

    def over(self, job: Job) -> None:
        """It has ended: its slot is free. Harmless for one that is not running."""
        if job in self._running:
            self._running.discard(job)
            tenant = self._tenant_of.pop(job)
            self._tenants[tenant].running -= 1
            self._forget_idle(tenant)

    def drop(self, job: Job) -> bool:
        """Let it wait no longer. False if it does not wait."""
        if job in self._running or job not in self._tenant_of:
            return False
        tenant = self._tenant_of.pop(job)
        found = self._tenants[tenant]
        found.waiting = [one for one in found.waiting if one[2] != job]
        heapq.heapify(found.waiting)
        self._forget_idle(tenant)
        return True

    def clear(self) -> None:
        """Nothing waits any more; what runs goes on."""
        for job in [job for job in self._tenant_of if job not in self._running]:
            self.drop(job)

    def _forget_idle(self, tenant: str) -> None:
        found = self._tenants[tenant]
        if not found.running and not found.waiting:
            del self._tenants[tenant]
