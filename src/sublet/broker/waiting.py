"""Commands on their way, and the answers that must not be seen before an agent holds what they promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from sublet.broker.commands import Command
from sublet.errors import SubletError
from sublet.values import LeaseId

__all__ = ["Holds", "Waiting"]


class Waiting:
    """One command, and who wants to know what it came to (``future``; None: nobody)."""

    __slots__ = ("_future", "command", "lease", "number", "render", "timer", "value")

    def __init__(self, command: Command, future: Any = None, render: Callable[[Any, Any], Any] | None = None) -> None:
        self.command = command
        self.render = render
        self.lease = LeaseId("")
        """With ``number``: the order that an agent must hold before the answer is given."""
        self.number = 0
        self.value: Any = None
        """The answer, made at the moment of the decision."""
        self.timer: _Timer | None = None
        self._future = future

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits."""
        return self._future is not None and not self._future.done()

    @property
    def future(self) -> Any:
        return self._future

    def answer(self) -> None:
        """Give what was made ready."""
        if self.wanted:
            self._future.set_result(self.value)

    def fail(self, error: SubletError) -> None:
        """Give an error instead."""
        if self.wanted:
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

    def futures(self, lease: LeaseId) -> Iterator[Any]:
        """What is still waited for."""
        return (waiting.future for waiting in self._by_lease.get(lease, ()) if waiting.wanted)


class _Timer(Protocol):
    def cancel(self) -> None: ...
