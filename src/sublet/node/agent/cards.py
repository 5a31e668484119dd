"""Watches this machine's cards in an office: asks the supervisor which processes are guests, and reports faults.

What the supervisor says of other offices goes through here too, since of one device the ledger keeps one report, and
whose processes are on it and which office lends it are two things to say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from operator import is_
from typing import Final, Protocol

from sublet.background import Guard, end_process, start_task
from sublet.errors import SubletError
from sublet.node.agent.foreign import Own
from sublet.node.agent.health import CardWatch
from sublet.node.agent.inventory import card_of
from sublet.node.agent.nvml import Nvml, Reading
from sublet.node.agent.port import ReportSink
from sublet.values import NS_PER_S, ResourceId
from sublet.wire.cards import UNSEEN, CardUse
from sublet.wire.orders import Foreign, Inventory, Report


class AskProcesses(Protocol):
    """Asks the supervisor for every pid of ours."""

    def __call__(self, uses: tuple[CardUse, ...], *, let_go: bool) -> Awaitable[Iterable[int]]: ...


AT_MOST_S: Final = 60.0
"""How long it sleeps at most, whatever it was told."""


def has_cards(inventory: Inventory) -> bool:
    """Whether there is anything to watch."""
    return any(card_of(device) for device in inventory.devices)


class Cards:
    """Inside the office's loop. Only where there are cards."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        processes: AskProcesses,
        leased: Callable[[ResourceId], int],
        report: ReportSink,
        now_ns: Callable[[], int],
        open_driver: Callable[[], Nvml] = Nvml.open,
        sees_processes: bool | None = None,
        allowed: Callable[[], bool] = lambda: False,
        lets_go: Callable[[], bool] = lambda: False,
        die: Callable[[str], object] = end_process,
    ) -> None:
        """``processes`` asks for every pid of ours, and hands on what each has of a card; ``leased`` asks for the bytes
        under leases here, teardown included; ``allowed``, whether others on a card keep no lease from it; ``lets_go``,
        whether an operator may want to reset a card, whose driver is then closed between two looks. ``die`` ends the
        process with a line."""
        self._processes = processes
        self._lets_go = lets_go
        self._leased = leased
        self._report = report
        self._now_ns = now_ns
        self._die = die
        self._guard = Guard("cards")
        self._ours: frozenset[int] = frozenset()
        self._before: frozenset[int] = frozenset()
        self._told: tuple[Reading, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self.watch = CardWatch(
            inventory, own=self._own, open_driver=open_driver, sees_processes=sees_processes, allowed=allowed
        )

    def start(self) -> None:
        """Look from now on, every few seconds."""

        def failed(error: BaseException) -> None:
            self._die(f"the office stopped: the watch over its cards ended ({type(error).__name__}: {error})")

        self._task = start_task("cards", self._run, failed=failed)

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.watch.close()

    def heard(self, report: Report) -> None:
        """What the supervisor says, on its way to the ledger."""
        if not isinstance(report, Foreign):
            self._report(report)
            return
        for merged in self.watch.heard(report, self._now_ns()):
            self._report(merged)

    async def turn(self) -> float | None:
        """One look, as far as it has come; how many seconds until the next, or None for never."""
        await self._learn()
        now_ns = self._now_ns()
        reports, wake_ns = self.watch.tick(now_ns)
        if self._lets_go():
            self.watch.close()
        for report in reports:
            self._report(report)
        return None if wake_ns is None else max(0, wake_ns - now_ns) / NS_PER_S

    async def _run(self) -> None:
        """One look after another. A look that fails tells nothing, and is followed by the next."""
        pause_s: float | None = 0.0
        while pause_s is not None:
            await asyncio.sleep(min(pause_s, AT_MOST_S))
            try:
                pause_s = await self.turn()
            except Exception as error:  # noqa: BLE001 - an unwatched card would be lent while others use it
                pause_s = self._guard.failed(error, "the cards are looked at again")
            else:
                self._guard.passed()

    async def _learn(self) -> None:
        """Who is ours. Those of the last time count as well: a guest may have ended since the driver was asked."""
        with contextlib.suppress(SubletError):  # the supervisor is being started anew
            found = frozenset(await self._processes(self._uses(), let_go=self._lets_go()))
            self._before, self._ours = self._ours, found

    def _uses(self) -> tuple[CardUse, ...]:
        """What the last look showed of whom, each look once; where pids say nothing to us, of each card as a whole."""
        readings = tuple(health.reading for health in self.watch.health.values())
        told, self._told = self._told, readings
        if len(told) == len(readings) and all(map(is_, told, readings)):
            return ()
        if self.watch.sees_processes:
            return tuple(
                CardUse(card=reading.uuid, pid=process.pid, bytes=process.bytes)
                for reading in readings
                for process in reading.processes
                if process.bytes is not None
            )
        return tuple(CardUse(card=reading.uuid, pid=UNSEEN, bytes=reading.used) for reading in readings if reading.used)

    def _own(self, resource: ResourceId) -> Own:
        return Own(pids=self._ours | self._before, leased=self._leased(resource))
