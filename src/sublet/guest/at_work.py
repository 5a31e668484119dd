"""Publishes whether this guest executes a call, where its supervisor can read it at any time.

A lock on one byte of the lease's tally is held from before a call looks at the page until its answer is made. A guest
that is to be parked is brought to a stand first and asked afterwards: if the lock is free, what comes later will
look at a page that says "parked", so the guest may be let go. If it is held, the guest stays frozen, in the middle of
the call.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from sublet.wire.usage_counters import TALLY_VARIABLE, TallyFile


class AtWork:
    """A context manager; as often and by as many threads at once as one likes."""

    def __init__(self, tally: TallyFile | None) -> None:
        """Without a tally (a lease that has no devices) there is nothing to say."""
        self._tally = tally
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        if self._tally is None:
            return
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._tally.at_work(begins=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tally is None:
            return
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._tally.at_work(begins=False)


def at_work() -> AtWork:
    """This process's."""
    with _first:
        if not _found:
            path = os.environ.get(TALLY_VARIABLE, "")
            _found.append(AtWork(TallyFile.open(path) if path else None))
    return _found[0]


_found: list[AtWork] = []
_first = threading.Lock()
