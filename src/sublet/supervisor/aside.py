"""What is nobody's any more and has yet to be removed: out of the way of whoever waits for the hardware.

A folder is put aside by giving it another name, which is one call; to remove it takes a dozen, and on a disk that is
busy each of them may wait. What is not managed before this process ends, the next supervisor finds.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from sublet.supervisor.errands import Errands
from sublet.supervisor.isolation import remove_tree
from sublet.supervisor.loop import Loop, Timer

__all__ = ["Aside"]

WAIT_S: Final = 0.05
"""After the last that came: of many ends at once, none waits for this."""
WAITING_MAX: Final = 512
"""With more than this there is no waiting for the last: where somebody ends at every moment there is none."""
FOLDERS_AT_ONCE: Final = 8
NAMES_AT_ONCE: Final = 2000
"""Names that are removed while everybody waits: some 20 ms."""


class Aside:
    """Everything that one supervisor has put aside."""

    def __init__(self, loop: Loop, errands: Errands) -> None:
        self._loop = loop.guarded(lambda _: self._again())
        self._errands = errands
        self._acts: deque[Callable[[], object]] = deque()
        self._timer: Timer | None = None

    def put(self, folder: str) -> None:
        """Out of sight at once; gone soon."""
        aside = os.path.join(os.path.dirname(folder), f"~{os.path.basename(folder)}")
        with contextlib.suppress(OSError):  # then it lies where it is, and is in the way
            os.rename(folder, aside)
            self.later(lambda: self._remove(aside))

    def later(self, act: Callable[[], object]) -> None:
        """Nobody waits for this."""
        self._acts.append(act)
        if self._timer is not None:
            if len(self._acts) > WAITING_MAX:
                return
            self._timer.cancel()
        self._timer = self._loop.after(WAIT_S, self._clear)

    def finish(self) -> None:
        """This process ends."""
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

    def _remove(self, folder: str) -> None:
        if remove_tree(folder, count_max=NAMES_AT_ONCE).is_cut_short:
            self._errands.run(lambda: str(remove_tree(folder)), lambda _: None)
