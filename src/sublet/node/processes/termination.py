"""Ends guests: notifies them, and kills many at once with one scan of the process table.

Nothing here waits. The looks (``guests``) find whether a guest is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Final

from sublet.lease_end import EndReason
from sublet.node.loop import Loop, Timer, log_internal_error
from sublet.node.priority import Priority
from sublet.node.processes.guest import GuestProcess
from sublet.node.processes.scan_schedule import UNSEEN_S
from sublet.node.processes.tree import ProcessSnapshot, Trees
from sublet.values import NS_PER_S, GuestId

KILL_AGAIN_NS: Final = NS_PER_S // 2
"""Between two attempts to end one guest alone (the end of a lease has its own rhythm)."""
ENDED_ALONE_GRACE_NS: Final = 5 * NS_PER_S


class Terminations:
    """Of all guests of one supervisor."""

    def __init__(
        self,
        loop: Loop,
        trees: Trees,
        priority: Priority,
        *,
        killed: Callable[[], None],
        safely: Callable[[GuestProcess, Callable[[], object]], None],
    ) -> None:
        """``killed`` is called after each round of signals; ``safely`` makes a call for one guest, and a failure ends
        that guest only."""
        self._loop = loop
        self._trees = trees
        self._priority = priority
        self._killed = killed
        self._safely = safely
        self._forced: dict[GuestId, Timer] = {}
        """Those that are ended alone, and when that is forced."""
        self._to_tell: list[GuestProcess] = []
        self._to_kill: list[GuestProcess] = []
        self._lines: dict[GuestId, list[str]] = {}
        """Lines that are still to be written to guests that are told to end."""
        self._will_act = False

    def terminate(self, guests: Iterable[GuestProcess], line: str, reason: EndReason | None) -> None:
        """A line on stderr and SIGTERM, for whole trees."""
        for guest in guests:
            self._safely(guest, guest.stdio.stop_blocking)
            self._lines.setdefault(guest.id, []).append(line)
            if reason is not None:
                guest.ends(reason)
            self._to_tell.append(guest)
            self._act_soon()

    def kill(self, guests: Iterable[GuestProcess], reason: EndReason) -> None:
        """Their end, now."""
        chosen = [guest for guest in guests if not guest.is_gone]
        for guest in chosen:
            guest.ends(reason)
            guest.kills += 1
        if chosen:
            self._to_kill += chosen
            self._act_soon()

    def alone(self, guest: GuestProcess, grace_ns: int) -> None:
        """End one guest under a lease that goes on."""
        if guest.is_gone:
            return
        if grace_ns < 0:
            grace_ns = guest.spec.grace_ns or ENDED_ALONE_GRACE_NS
        if grace_ns:
            self.terminate([guest], "this command is being stopped", EndReason.OPERATOR)
        self._force_at(guest, self._loop.now_ns() + grace_ns)

    def kill_until_gone(self, guest: GuestProcess) -> None:
        """From now on it is killed again and again, until it is gone."""
        self._force_at(guest, self._loop.now_ns() + KILL_AGAIN_NS)

    def is_gone(self, guest: GuestProcess) -> None:
        """Nothing has to be forced any more."""
        if (forced := self._forced.pop(guest.id, None)) is not None:
            forced.cancel()

    def beat(self) -> None:
        """Called at intervals: if no guest was told or killed since, this process gives up its raised priority."""
        self._priority.beat()

    def _act_soon(self) -> None:
        self._priority.first()
        if not self._will_act:
            self._will_act = True
            self._loop.soon(self._act)

    def _act(self) -> None:
        self._will_act = False
        to_tell, self._to_tell = self._to_tell, []
        killed, self._to_kill = self._to_kill, []
        try:
            self._reach(to_tell, killed)
        except OSError:
            self._to_tell, self._to_kill = to_tell + self._to_tell, killed + self._to_kill
            self._loop.after(UNSEEN_S, self._act_soon)
        except Exception as error:  # noqa: BLE001 - whichever of them it was, the others are reached all the same
            log_internal_error(error)
            for guest in to_tell:
                self._safely(guest, lambda guest=guest: self._reach([guest], []))  # type: ignore[misc]
            for guest in killed:
                self._safely(guest, lambda guest=guest: self._kill_alone(guest))  # type: ignore[misc]

    def _reach(self, to_tell: list[GuestProcess], killed: list[GuestProcess]) -> None:
        boxed = [guest for guest in to_tell if guest.tree.is_boxed]
        for guest in boxed:
            self._safely(guest, lambda guest=guest: self._ask_to_leave(guest))  # type: ignore[misc]
        if len(boxed) < len(to_tell):
            look = self._trees.scan()
            for guest in (one for one in to_tell if one not in boxed):
                self._safely(guest, lambda guest=guest: self._ask_to_leave(guest, look))  # type: ignore[misc]
        if killed:
            self._trees.kill(guest.tree for guest in killed)
        for guest in to_tell:  # to disk, so it comes second; of what they answer nothing has been read yet
            for line in self._lines.pop(guest.id, ()):
                self._safely(guest, lambda guest=guest, line=line: guest.stdio.write_notice(line))  # type: ignore[misc]
        if killed:
            self._killed()

    def _ask_to_leave(self, guest: GuestProcess, look: ProcessSnapshot | None = None) -> None:
        if look is None:
            reached = self._trees.signal_boxed(guest.tree, signal.SIGTERM)
        else:
            reached = self._trees.signal_seen(guest.tree, signal.SIGTERM, look)
        if not reached and not guest.main_runs:  # it ended by itself: no process of it is left that needs the line
            self._lines.pop(guest.id, None)

    def _kill_alone(self, guest: GuestProcess) -> None:
        try:
            self._reach([], [guest])
        finally:  # its first process at least, whatever cannot be found of the others
            self._trees.procs.send(guest.tree.root, signal.SIGKILL)

    def _force_at(self, guest: GuestProcess, at_ns: int) -> None:
        """However often it is asked for, one timer; the soonest counts."""
        before = self._forced.get(guest.id)
        if before is None or at_ns < before.at_ns:
            if before is not None:
                before.cancel()
            self._forced[guest.id] = self._loop.at(at_ns, lambda: self._force(guest))

    def _force(self, guest: GuestProcess) -> None:
        self._forced.pop(guest.id, None)
        if not guest.is_gone:
            self.kill_until_gone(guest)
            self.kill([guest], EndReason.OPERATOR)
