"""Deferred removal of folders and control groups, so that no request for the hardware waits for it.

A folder is put aside by giving it another name, which is one call; to remove it takes a dozen, and on a disk that is
busy each of them may wait. What is not removed before this process ends, the next supervisor finds.

What guests handed to programs of their tenant (files in memory, ``wire.sealed_memory``) outlives them there, and stays
charged to all guests of the office together. Our programs copy it (``take_over``); what others keep is counted, and a
tenant of whom too much is kept gets no guest under another lease until it is less. So a tenant takes from the others at
most what it could use under leases that live.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from sublet.background import is_shortage
from sublet.errors import QuotaExceeded
from sublet.node.forked_jobs import ForkedJobs
from sublet.node.loop import Loop, Timer, log_internal_error
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.lease_limits import OWNER
from sublet.node.sandbox import remove_tree
from sublet.node.sandbox.cleaning import Left
from sublet.values import MIB, TenantId, format_size

WAIT_S: Final = 0.05
"""After the last that came: of many ends at once, none waits for this."""
WAITING_MAX: Final = 512
"""With more than this the timer is not restarted: where guests end all the time, there is no last one."""
FOLDERS_AT_ONCE: Final = 8
AGAIN_S: Final = 0.1
AGAIN_MAX_S: Final = 60.0
"""What could not be done is tried again after so long: twice as long each time, up to the second of them."""
NAMES_AT_ONCE: Final = 2000
"""Names that are removed in the loop, which blocks it for some 20 ms; a forked job removes the rest."""
HELD_MAX: Final = 256 * MIB
"""Memory of a tenant's ended leases that its programs may keep when it starts a guest under another one."""
HELD_GROUPS_MAX: Final = 256
"""Ended leases of a tenant of which they may keep any."""
HELD_LOOK_S: Final = 3.0
"""The kernel sums up what a control group has every two seconds; what is little shows only then."""


class Trash:
    """Everything that one supervisor has put aside."""

    def __init__(self, loop: Loop, forked_jobs: ForkedJobs) -> None:
        self._loop = loop.guarded(lambda _: self._again())
        self._forked_jobs = forked_jobs
        self._groups: dict[str, ControlGroup] = {}
        """By name, those that are on their way out."""
        self._acts: deque[Callable[[], object]] = deque()
        self._timer: Timer | None = None

    def put(self, folder: str) -> None:
        """Out of sight at once; gone soon."""
        aside = os.path.join(os.path.dirname(folder), f"~{os.path.basename(folder)}")
        with contextlib.suppress(OSError):  # then it lies where it is, and is in the way
            os.rename(folder, aside)
            self.later(lambda: self._remove(aside))

    def leave(self, group: ControlGroup | None, *first: Callable[[], object]) -> None:
        """No process is in this group, as was seen, so only its name is left, and is removed soon. ``first`` is done
        while the group is still there; without a group, only ``first`` is done."""
        if group is not None:
            self._groups[group.name] = group
        todo = deque(first)
        self.later(lambda: self._leave(group, todo))

    def make_way(self, group: ControlGroup | None) -> None:
        """This one is about to be made: if there is another of its name on its way out, that goes now, or stays."""
        if group is not None and group.name in self._groups:
            self.finish()
            self._groups.pop(group.name, None)

    def later(self, act: Callable[[], object]) -> None:
        """Do this later; no caller waits for it. It is tried again while it raises ``OSError`` or ``MemoryError``."""
        self._acts.append(act)
        if self._timer is not None:
            if len(self._acts) > WAITING_MAX:
                return
            self._timer.cancel()
        self._timer = self._loop.after(WAIT_S, self._clear)

    def finish(self) -> None:
        """All of it, now: this process ends."""
        while self._acts:
            with contextlib.suppress(OSError, MemoryError):
                self._acts.popleft()()

    def _clear(self) -> None:
        self._timer = None
        for _ in range(min(FOLDERS_AT_ONCE, len(self._acts))):
            self._try(self._acts.popleft(), AGAIN_S)
        self._again()

    def _try(self, act: Callable[[], object], wait_s: float) -> None:
        """A shortage, of memory too, passes, so the act is tried again. It is on no other list."""
        try:
            act()
        except (OSError, MemoryError):
            self._loop.after(wait_s, lambda: self._try(act, min(2 * wait_s, AGAIN_MAX_S)))

    def _again(self) -> None:
        if self._acts and self._timer is None:
            self._timer = self._loop.after(0, self._clear)

    def _leave(self, group: ControlGroup | None, first: deque[Callable[[], object]]) -> None:
        while first:
            try:
                first[0]()
            except Exception as error:
                if is_shortage(error):
                    raise
                log_internal_error(error)
            first.popleft()
        if group is not None:
            self._remove_group(group)

    def _remove_group(self, group: ControlGroup) -> None:
        """Our guests are gone, so another program has put any process that is in it now there. Processes in a guest's
        group are killed, as ever."""
        if self._groups.get(group.name) is not group:
            return
        if left := group.remove():
            if group.is_guests:
                group.kill()
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), left[0])
        del self._groups[group.name]

    def _remove(self, folder: str) -> None:
        """Until it is gone: while descriptors or processes are short it cannot be."""
        left = remove_tree(folder, count_max=NAMES_AT_ONCE)
        if left.is_cut_short:
            self._forked_jobs.run(
                lambda: _leftover_text(remove_tree(folder)), lambda leftover: self._removed(folder, leftover)
            )
        elif not left.is_clean:
            raise OSError(errno.EBUSY, str(left), folder)

    def _removed(self, folder: str, leftover: str | None) -> None:
        if leftover != "":
            self._loop.after(AGAIN_MAX_S, lambda: self._try(lambda: self._remove(folder), AGAIN_S))


class HeldMemory:
    """The control groups of ended leases of tenants, each of which stays while memory of its guests is kept."""

    def __init__(self, loop: Loop, aside: Trash) -> None:
        self._loop = loop.guarded(lambda _: self._later())
        self._aside = aside
        self._held: dict[str, tuple[TenantId, ControlGroup]] = {}
        """By the name of the group."""
        self._timer: Timer | None = None

    def leave(self, tenant: TenantId, group: ControlGroup) -> None:
        """No process is in this group any more: it is removed soon, or once none of its memory is kept."""
        if tenant == OWNER:
            self._aside.leave(group)
        else:
            self._held[group.name] = tenant, group
            self._later()

    def check(self, tenant: TenantId) -> None:
        """Raises where this tenant's programs keep too much."""
        found = [held for one, group in self._held.values() if one == tenant and (held := group.shared_bytes())]
        if sum(found) > HELD_MAX or len(found) > HELD_GROUPS_MAX:
            raise QuotaExceeded(
                f"programs of tenant {tenant} keep {format_size(sum(found))} of memory of ended leases ({len(found)})",
                do="Let go of results of ended leases, or copy them; or end the programs that have them.",
            )

    def make_way(self, group: ControlGroup | None) -> None:
        """This one is about to be made: if there is another of its name here it is the same one, and lives again."""
        if group is not None:
            self._held.pop(group.name, None)

    def finish(self) -> None:
        """This process ends, and counts no more."""
        for _, group in self._held.values():
            self._aside.leave(group)
        self._held.clear()

    def _later(self) -> None:
        if self._timer is None and self._held:
            self._timer = self._loop.after(HELD_LOOK_S, self._retry)

    def _retry(self) -> None:
        self._timer = None
        for name, (_, group) in list(self._held.items()):
            if not group.shared_bytes():
                del self._held[name]
                self._aside.leave(group)
        self._later()


def _leftover_text(left: Left) -> str:
    return "" if left.is_clean else str(left)
