"""Stops whole guests for a while, and continues them.

A guest with a control group of the second version is frozen: it does not notice, nothing of it can fork on, and it can
still be killed. Where there is none, and for what has left its group, each process is stopped; that is done again until
a scan finds all of them stopped, since a process that runs may fork meanwhile and a stopped one cannot. A process that
was stopped before, by another process, is not resumed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from sublet.node.processes.guest import Guest
from sublet.node.processes.procs import Identity, Stat
from sublet.node.processes.tree import Trees, stands_still
from sublet.values import GuestId


class Standstill:
    """Of all guests of one supervisor."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._frozen: set[GuestId] = set()
        self._stopped: dict[GuestId, dict[Identity, None]] = {}

    def is_still(self, guests: Iterable[Guest]) -> bool:
        """Bring them to a stand, and see whether they do. To be called again until they do."""
        guests = list(guests)
        for guest in guests:
            self._freeze(guest)
        look = self._trees.look([guest.tree for guest in guests])
        still = True
        for guest in guests:
            group, frozen = guest.tree.group, guest.id in self._frozen
            inside = set(group.pids()) if group is not None and frozen else set()
            still &= not frozen or (group is not None and group.is_frozen())
            for stat in look.of(guest.tree):
                if stat.pid not in inside:
                    still &= self._stop(guest.id, stat)
        return still

    def go(self, guest: Guest) -> None:
        """On as before; harmless where it does not stand still."""
        if guest.id in self._frozen and guest.tree.group is not None:
            guest.tree.group.thaw()
        for identity in self._stopped.get(guest.id, ()):
            self._trees.procs.send(identity, signal.SIGCONT)
        self.forget(guest.id)

    def forget(self, guest: GuestId) -> None:
        """It is gone."""
        self._frozen.discard(guest)
        self._stopped.pop(guest, None)

    def _freeze(self, guest: Guest) -> None:
        group = guest.tree.group
        if guest.id not in self._frozen and group is not None and group.can_freeze and group.freeze():
            self._frozen.add(guest.id)

    def _stop(self, guest: GuestId, stat: Stat) -> bool:
        """Whether it stands still; if it does not, it is told to. Who sleeps in the kernel stands when he wakes, but
        only if the signal waits for him."""
        stopped = self._stopped.setdefault(guest, {})
        if stat.is_stopped or (stands_still(stat) and stat.identity in stopped):
            return True
        stopped[stat.identity] = None
        self._trees.procs.send(stat.identity, signal.SIGSTOP)
        return False
