"""Asks guests that are to leave their cards to free what their frameworks cache.

A guest that serves is sent a connection for that purpose and hangs it up when it is done. It is waited for a short
while, and no answer is no obstacle: what is not given back is copied along.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable
from typing import Final

from sublet.errors import SubletError
from sublet.node.loop import Loop
from sublet.node.processes.guest import Guest
from sublet.wire.guests import Service, Visit

WAIT_S: Final = 2.0
"""How long they may take, all together; a part of the notice if that is short."""
HANG_UP: Final = select.EPOLLRDHUP


class Caches:
    """Of one supervisor."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def free(self, guests: Iterable[Guest], within_s: float, then: Callable[[], None]) -> None:
        """Ask them; ``then`` is called once all have answered or the time is over, and not before this returns."""
        waiting: dict[int, socket.socket] = {}
        is_over = False

        def over() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                for fd in tuple(waiting):
                    drop(fd)
                then()

        def drop(fd: int) -> None:
            self._loop.forget(fd)
            waiting.pop(fd).close()

        def answered(fd: int) -> None:
            drop(fd)
            if not waiting:
                timer.cancel()
                over()

        for guest in guests:
            ours = _ask(guest)
            if ours is not None:
                fd = ours.fileno()
                waiting[fd] = ours
                self._loop.watch(fd, HANG_UP, lambda _, fd=fd: answered(fd))  # type: ignore[misc]
        timer = self._loop.after(min(WAIT_S, within_s) if waiting else 0.0, over)


def _ask(guest: Guest) -> socket.socket | None:
    """Our end of the connection it is to hang up; None where it takes none."""
    if guest.visits is None or not guest.main_runs:
        return None
    ours, theirs = socket.socketpair()
    visit = Visit(service=Service.CACHES, tenant=guest.tenant, lease=guest.lease, epoch=guest.epoch, operations=())
    try:
        guest.visits.hand(visit, theirs)
    except SubletError:
        ours.close()
        return None
    finally:
        theirs.close()
    return ours
