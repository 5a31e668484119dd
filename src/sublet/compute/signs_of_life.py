"""Decides whether a worker is responsive. While it is not, its calls do not renew the lease.

A call in flight is use of the lease, however long it takes. But a worker that was stopped (SIGSTOP) or frozen never
answers, and a lease must not be kept for ever by that. A sign of life is either of two: a mark on the board, which the
worker's listening thread makes once a second, whatever function runs; or time on a processor, for that thread cannot
run while C code holds the interpreter. Where both stand still for ``STILL_S``, the calls of this worker stop to count,
and the lease ends by its time to live as one that is not used. With the next sign they count again.

No thread waits for this: the one that listens for answers looks here when it has heard nothing for a while.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sublet.client.lease import Lease

LOOK_EVERY_S: Final = 5.0
ASK_AFTER_S: Final = 10.0
"""Without a mark for so long, the supervisor is asked about the processor."""
STILL_S: Final = 30.0
CPU_MIN_NS: Final = 1_000_000
"""Less than this is what the kernel counts for being looked at."""

_log = logging.getLogger("sublet.client")


class _Use:
    """One thing under way in the worker."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_over = False
        self._counted = contextlib.ExitStack()
        """Closing it twice is harmless, so no lock is needed: the end of a use may come in a finaliser."""

    def count(self) -> None:
        counted = self._counted
        counted.enter_context(self.lease.activity())
        if self.is_over:
            counted.close()

    def pause(self) -> None:
        counted, self._counted = self._counted, contextlib.ExitStack()
        counted.close()


class SignsOfLife:
    """Of one worker."""

    def __init__(self, mark: Callable[[], int], cpu_ns: Callable[[], int | None], who: str = "the worker") -> None:
        """``mark`` is how often the worker has made its mark; ``cpu_ns`` its time on processors, None where that is not
        known."""
        self._mark = mark
        self._cpu_ns = cpu_ns
        self._who = who
        self._uses: set[_Use] = set()
        self._is_still = False
        self._seen = (mark(), 0)
        self._seen_s = self._looked_s = self._asked_s = time.monotonic()

    @contextlib.contextmanager
    def use(self, lease: Lease) -> Iterator[None]:
        """Something is under way there: it counts as use of the lease while the worker lives."""
        use = _Use(lease)
        if not self._is_still:
            use.count()
        self._uses.add(use)
        if self._is_still:  # since we looked
            use.pause()
        try:
            yield
        finally:
            use.is_over = True
            self._uses.discard(use)
            use.pause()

    def now_under(self, lease: Lease) -> None:
        """The worker was parked, and goes on under this lease with what was under way."""
        self._is_still = False
        self._seen_s = time.monotonic()
        for use in list(self._uses):
            use.pause()
            use.lease = lease
            if not use.is_over:
                use.count()

    def look(self) -> None:
        """Nothing was heard for a while. One thread at a time."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S or not self._uses:
            return
        self._looked_s = now_s
        mark, cpu_ns = self._mark(), self._seen[1]
        if mark == self._seen[0]:
            if now_s - self._seen_s < ASK_AFTER_S or now_s - self._asked_s < ASK_AFTER_S:
                return
            self._asked_s = now_s
            found = self._cpu_ns()
            if found is None:  # what is not known takes nothing away
                return
            cpu_ns = found
        if mark != self._seen[0] or cpu_ns > self._seen[1] + CPU_MIN_NS:
            self._seen = (mark, max(cpu_ns, self._seen[1]))
            self._alive(now_s)
        elif not self._is_still and now_s - self._seen_s >= STILL_S:
            self._still()

    def _alive(self, now_s: float) -> None:
        self._seen_s = now_s
        if self._is_still:
            self._is_still = False
            _log.warning("%s gives signs of life again; its calls keep the lease", self._who)
            for use in list(self._uses):
                use.count()

    def _still(self) -> None:
        self._is_still = True
        _log.warning(
            "%s has given no sign of life for %.0f s (was it stopped?); its calls do not keep the lease meanwhile",
            self._who,
            STILL_S,
        )
        for use in list(self._uses):
            use.pause()
