"""Commands in flight, and answers that must wait until an agent holds what they promise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sublet.errors import Disconnected, LeaseNotActive, RenewalRefusal, SubletError
from sublet.office.ledger.commands import Command
from sublet.values import LeaseId
from sublet.wire.orders import Held, NotHeld


class Waiting:
    """One command, and who wants to know what it came to: a future, or a function that is told (``then``)."""

    __slots__ = (
        "_decided",
        "_future",
        "_render",
        "_then",
        "_value",
        "_without",
        "awaits",
        "command",
        "unheld",
        "until_s",
    )

    def __init__(
        self,
        command: Command,
        future: Any = None,
        render: Callable[[Any, Any], Any] | None = None,
        then: Callable[[Any, SubletError | None], None] | None = None,
        without: Callable[[Any, Mapping[LeaseId, SubletError]], Any] | None = None,
    ) -> None:
        """``without`` makes of the answer what is left of it where agents did not take the orders of some of the leases
        that it speaks of. With None it is all or nothing."""
        self.command = command
        self.awaits: dict[LeaseId, int] = {}
        """The orders that agents must hold before the answer is given, by their leases."""
        self.unheld: dict[LeaseId, SubletError] = {}
        """Leases whose agent did not take the order, or said nothing in time."""
        self.until_s: float | None = None
        """How long it waits for agents, by the clock of the loop; None: it does not."""
        self._future = future
        self._then = then
        self._render = render
        self._without = without
        self._decided: tuple[Any, Any] | None = None
        """What it came to, and when, until it has its outer form."""
        self._value: Any = None

    @property
    def wanted(self) -> bool:
        """Whether a caller still waits."""
        return self._then is not None or (self._future is not None and not self._future.done())

    def future(self, make: Callable[[], Any]) -> Any:
        """Done once the answer is given; made if there is none yet."""
        if self._future is None:
            self._future = make()
        return self._future

    def decided(self, answer: Any, now: Any, *, more: bool) -> None:
        """This is what it came to. ``more``: something else is decided before ``make`` is called, and may change what
        the answer speaks of."""
        self._decided = (answer, now)
        if more:
            self.make()

    def make(self) -> None:
        """Give the answer its outer form, if it has none yet."""
        if self._decided is not None:
            (answer, now), self._decided = self._decided, None
            self._value = answer if self._render is None else self._render(answer, now)

    def conclude(self) -> None:
        """Every agent that was waited for has spoken, or has had its time."""
        self.make()
        if self.unheld and self._without is None:
            self.fail(next(iter(self.unheld.values())))
            return
        if self.unheld and self._without is not None:
            self._value = self._without(self._value, self.unheld)
        self.answer()

    def answer(self) -> None:
        """Give it."""
        self.make()
        then, self._then = self._then, None
        if then is not None:
            then(self._value, None)
        if self._future is not None and not self._future.done():
            self._future.set_result(self._value)

    def fail(self, error: SubletError) -> None:
        """Give an error instead."""
        then, self._then = self._then, None
        if then is not None:
            then(None, error)
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # read once, so that a caller who went away leaves no complaint behind


class Holds:
    """Which answers wait for which lease's agent, and until when."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[Waiting]] = {}
        self._in_order: deque[Waiting] = deque()
        """As they came, which is the order in which their patience ends. Those that wait no more leave at the front."""

    def add(self, waiting: Waiting, holds: Iterable[tuple[LeaseId, int]], until_s: float) -> None:
        """``holds``: leases, and the numbers of the orders that their agents must hold. ``until_s`` is never earlier
        than that of the one before."""
        waiting.awaits = dict(holds)
        waiting.until_s = until_s
        for lease in waiting.awaits:
            self._by_lease.setdefault(lease, []).append(waiting)
        self.next_s()
        self._in_order.append(waiting)

    def held(self, report: Held) -> list[Waiting]:
        """Those that waited for this confirmation, and now for nothing more. That of a notice confirms no deadline,
        though its number is higher."""
        return [] if report.told else self._take(report.lease, report.number, None)

    def not_held(self, report: NotHeld) -> list[Waiting]:
        """Those whose order was not taken, and that wait for nothing more."""
        return self._take(report.lease, report.number, not_held(report.lease))

    def _take(self, lease: LeaseId, number: int, unheld: SubletError | None) -> list[Waiting]:
        waiters = self._by_lease.get(lease)
        if waiters is None:
            return []
        over = []
        for waiting in [one for one in waiters if one.awaits[lease] <= number]:
            self._drop(waiting, lease, unheld)
            if not waiting.awaits:
                waiting.until_s = None
                over.append(waiting)
        return over

    def late(self, now_s: float, after_s: float) -> list[Waiting]:
        """Those whose patience is over, ``after_s`` seconds after they began to wait; they wait no more."""
        found = []
        while (until_s := self.next_s()) is not None and until_s <= now_s:
            waiting = self._in_order[0]
            for lease in list(waiting.awaits):
                self._drop(waiting, lease, not_confirmed(lease, after_s))
            waiting.until_s = None
            found.append(waiting)
        return found

    def next_s(self) -> float | None:
        """When the patience of the first one ends."""
        while self._in_order and self._in_order[0].until_s is None:
            self._in_order.popleft()
        return self._in_order[0].until_s if self._in_order else None

    def waiting(self, lease: LeaseId) -> list[Waiting]:
        """What is still waited for."""
        return [waiting for waiting in self._by_lease.get(lease, ()) if waiting.wanted]

    def _drop(self, waiting: Waiting, lease: LeaseId, unheld: SubletError | None) -> None:
        del waiting.awaits[lease]
        if unheld is not None:
            waiting.unheld[lease] = unheld
        waiters = self._by_lease[lease]
        waiters.remove(waiting)
        if not waiters:
            del self._by_lease[lease]


def not_confirmed(lease: LeaseId, after_s: float) -> Disconnected:
    """What is answered when the agent stayed silent."""
    return Disconnected(
        f"the machine of lease {lease} did not confirm within {after_s:g} s; whether it took effect is not known",
        do="Ask again with the same request id, or look with `sublet lease show`.",
    )


def not_held(lease: LeaseId) -> LeaseNotActive:
    """What is answered when the agent did not take the order."""
    return LeaseNotActive(f"lease {lease} ended on its machine before the answer", reason=RenewalRefusal.NOT_HELD)


def too_many(most: int) -> Disconnected:
    """What is answered when too many are waiting for their turn."""
    return Disconnected(f"the office has {most} requests before this one", do="Try again in a moment, less often.")
