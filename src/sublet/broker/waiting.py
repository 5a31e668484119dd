"""Commands on their way, and the answers that must not be seen before an agent holds what they promise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from sublet.broker.commands import Command
from sublet.errors import SubletError
from sublet.values import LeaseId

__all__ = ["Holds", "Waiting"]


class Waiting:
    """One command, and who wants to know what it came to: a future, or a function that is told (``then``)."""

    __slots__ = ("_future", "_then", "command", "lease", "number", "render", "timer", "value")

    def __init__(
        self,
        command: Command,
        future: Any = None,
        render: Callable[[Any, Any], Any] | None = None,
        then: Callable[[Any, SubletError | None], None] | None = None,
    ) -> None:
        self.command = command
        self.render = render
        self.lease = LeaseId("")
        """With ``number``: the order that an agent must hold before the answer is given."""
        self.number = 0
        self.value: Any = None
        """The answer, made at the moment of the decision."""
        self.timer: _Timer | None = None
        self._future = future
        self._then = then

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits."""
        return self._then is not None or (self._future is not None and not self._future.done())

    def future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """Done once the answer is given."""
        if self._future is None:
            self._future = loop.create_future()
        found: asyncio.Future[Any] = self._future
        return found

    def answer(self) -> None:
        """Give what was made ready."""
        then, self._then = self._then, None
        if then is not None:
            then(self.value, None)
        if self._future is not None and not self._future.done():
            self._future.set_result(self.value)

    def fail(self, error: SubletError) -> None:
        """Give an error instead."""
        then, self._then = self._then, None
        if then is not None:
            then(None, error)
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # read once, so that a caller who went away leaves no complaint behind


class Holds:
    """Which answers wait for which lease's agent."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[Waiting]] = {}

    def add(self, waiting: Waiting) -> None:
        self._by_lease.setdefault(waiting.lease, []).append(waiting)

    def take(self, lease: LeaseId, number: int) -> list[Waiting]:
        """Those that waited for an order up to this number; they wait no more."""
        waiters = self._by_lease.get(lease)
        if waiters is None:
            return []
        taken = [waiting for waiting in waiters if waiting.number <= number]
        for waiting in taken:
            self.drop(waiting)
        return taken

    def drop(self, waiting: Waiting) -> None:
        """It waits no more."""
        if waiting.timer is not None:
            waiting.timer.cancel()
        waiters = self._by_lease[waiting.lease]
        waiters.remove(waiting)
        if not waiters:
            del self._by_lease[waiting.lease]

    def waiting(self, lease: LeaseId) -> list[Waiting]:
        """What is still waited for."""
        return [waiting for waiting in self._by_lease.get(lease, ()) if waiting.wanted]


class _Timer(Protocol):
    def cancel(self) -> None: ...
