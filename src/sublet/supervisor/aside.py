"""What is nobody's any more and has yet to be removed: out of the way of whoever waits for the hardware.

A folder is put aside by giving it another name, which is one call; to remove it takes a dozen, and on a disk that is
busy each of them may wait. What is not managed before this process ends, the next supervisor finds.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from sublet.supervisor.errands import Errands
from sublet.supervisor.group import Group
from sublet.supervisor.isolation import remove_tree
from sublet.supervisor.isolation.cleaning import Left
from sublet.supervisor.loop import Loop, Timer

__all__ = ["Aside"]

WAIT_S: Final = 0.05
"""After the last that came: of many ends at once, none waits for this."""
WAITING_MAX: Final = 512
"""With more than this there is no waiting for the last: where somebody ends at every moment there is none."""
FOLDERS_AT_ONCE: Final = 8
GROUP_AGAIN_S: Final = 0.1
GROUP_AGAIN_MAX_S: Final = 60.0
FOLDER_AGAIN_S: Final = 1.0
FOLDER_AGAIN_MAX_S: Final = 300.0
NAMES_AT_ONCE: Final = 2000
"""Names that are removed while everybody waits: some 20 ms."""


class Aside:
    """Everything that one supervisor has put aside."""

    def __init__(self, loop: Loop, errands: Errands) -> None:
        self._loop = loop.guarded(lambda _: self._again())
        self._errands = errands
        self._groups: dict[str, Group] = {}
        """By name, those that are on their way out."""
        self._acts: deque[Callable[[], object]] = deque()
        self._timer: Timer | None = None

    def put(self, folder: str) -> None:
        """Out of sight at once; gone soon."""
        aside = os.path.join(os.path.dirname(folder), f"~{os.path.basename(folder)}")
        with contextlib.suppress(OSError):  # then it lies where it is, and is in the way
            os.rename(folder, aside)
            self.later(lambda: self._remove(aside))

    def leave(self, group: Group | None, *first: Callable[[], object]) -> None:
        """Nobody is in this group, as was seen, so it is nothing but a name, and goes soon. ``first`` is done while it
        is still there; where there is no group only that."""
        if group is not None:
            self._groups[group.name] = group
        self.later(lambda: self._leave(group, first))

    def make_way(self, group: Group | None) -> None:
        """This one is about to be made: if there is another of its name on its way out, that goes now, or stays."""
        if group is not None and group.name in self._groups:
            self.finish()
            self._groups.pop(group.name, None)

    def later(self, act: Callable[[], object]) -> None:
        """Nobody waits for this."""
        self._acts.append(act)
        if self._timer is not None:
            if len(self._acts) > WAITING_MAX:
                return
            self._timer.cancel()
        self._timer = self._loop.after(WAIT_S, self._clear)

    def finish(self) -> None:
        """All of it, now: this process ends."""
        while self._acts:
            with contextlib.suppress(OSError):
                self._acts.popleft()()

    def _clear(self) -> None:
        self._timer = None
        for _ in range(min(FOLDERS_AT_ONCE, len(self._acts))):
            self._acts.popleft()()
        self._again()

    def _again(self) -> None:
        if self._acts and self._timer is None:
            self._timer = self._loop.after(0, self._clear)

    def _leave(self, group: Group | None, first: Iterable[Callable[[], object]]) -> None:
        try:
            for act in first:
                act()
        finally:
            if group is not None:
                self._remove_group(group, GROUP_AGAIN_S)

    def _remove_group(self, group: Group, wait_s: float) -> None:
        """Our guests are gone, so whoever is in it now was put there by somebody else. What is in a guest's is ended,
        as it always was."""
        if self._groups.get(group.name) is not group:
            return
        with contextlib.suppress(OSError):  # descriptors may be short just now
            if not group.remove():
                del self._groups[group.name]
                return
            if group.guest is not None:
                group.kill()
        self._loop.after(wait_s, lambda: self._remove_group(group, min(2 * wait_s, GROUP_AGAIN_MAX_S)))

    def _remove(self, folder: str, wait_s: float = FOLDER_AGAIN_S) -> None:
        """Until it is gone: while descriptors or processes are short it cannot be."""

        def again() -> None:
            self._loop.after(wait_s, lambda: self._remove(folder, min(2 * wait_s, FOLDER_AGAIN_MAX_S)))

        def removed(said: str | None) -> None:
            if said != "":
                again()

        try:
            left = remove_tree(folder, count_max=NAMES_AT_ONCE)
        except OSError:
            again()
            return
        if left.is_cut_short:
            self._errands.run(lambda: _said(remove_tree(folder)), removed)
        elif not left.is_clean:
            again()


def _said(left: Left) -> str:
    return "" if left.is_clean else str(left)
