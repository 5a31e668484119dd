"""Watches the processes of holders, and tells the ledger when one has ended.

Each process that leases are bound to has one pidfd in the loop, however many leases that are. Where there is no pidfd
to be had (the limit of open files), the process is looked at once a second instead.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from sublet.background import Guard
from sublet.office.api.processes import Fate, Processes
from sublet.office.driver import Driver
from sublet.office.ledger.bound import BoundLeases
from sublet.office.ledger.commands import HolderGone, HolderUnseen
from sublet.office.ledger.events import Event
from sublet.office.ledger.records import Now, ProcessRecord

LOOK_EVERY_S: Final = 1.0
"""How often a process without a pidfd is looked at."""
IDLE_MAX: Final = 64
"""Processes that are watched on although no lease is bound to them now: most ask for another one soon."""


class HolderWatch:
    """Follows the driver's facts from ``start`` on."""

    def __init__(self, driver: Driver, processes: Processes) -> None:
        self._driver = driver
        self._processes = processes
        self._bound = BoundLeases()
        self._pidfds: dict[ProcessRecord, int] = {}
        self._idle: OrderedDict[ProcessRecord, None] = OrderedDict()
        self._looked_at: set[ProcessRecord] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._guard = Guard("holder_watch")

    def start(self) -> None:
        """Look again at every process that leases are bound to; then follow what happens."""
        self._loop = asyncio.get_running_loop()
        for lease in self._driver.ledger.state.leases.values():
            self._bound.restored(lease)
        for process in list(self._bound):
            self._watch(process)
        self._driver.listen(self._note)

    def close(self) -> None:
        """Watch nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        for process in list(self._pidfds):
            self._forget(process)
        self._looked_at.clear()

    def _note(self, now: Now, events: Sequence[Event]) -> None:
        for process in self._bound.note(events):
            if self._bound.of(process):
                self._idle.pop(process, None)
                if process not in self._pidfds:  # it may have ended, with leases that wait for the end of others
                    self._watch(process)
            elif process in self._pidfds:
                self._idle[process] = None
            else:
                self._looked_at.discard(process)
        while len(self._idle) > IDLE_MAX:
            self._forget(next(iter(self._idle)))

    def _watch(self, process: ProcessRecord) -> None:
        found = self._processes.open(process)
        if isinstance(found, int):
            try:
                self._loop.add_reader(found, self._ended, process)
            except OSError:  # the user has no more watches (epoll)
                os.close(found)
                found = Fate.ALIVE
        if isinstance(found, int):
            self._looked_at.discard(process)
            self._pidfds[process] = found
        elif found is Fate.ALIVE:
            self._looked_at.add(process)
            if self._timer is None:
                self._timer = self._loop.call_later(LOOK_EVERY_S, self._look)
        else:
            self._looked_at.discard(process)
            leases = self._bound.of(process)
            is_gone = found is Fate.GONE
            self._driver.post(
                HolderGone(process=process, leases=leases) if is_gone else HolderUnseen(process=process, leases=leases)
            )

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._look) if self._looked_at else None
        for process in list(self._looked_at):
            try:
                self._watch(process)
            except Exception as error:  # noqa: BLE001 - the others are looked at, and this one a second later
                self._guard.failed(error)
            else:
                self._guard.passed()

    def _ended(self, process: ProcessRecord) -> None:
        """Its pidfd says so."""
        self._forget(process)
        if leases := self._bound.of(process):
            self._driver.post(HolderGone(process=process, leases=leases))

    def _forget(self, process: ProcessRecord) -> None:
        self._idle.pop(process, None)
        pidfd = self._pidfds.pop(process)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
