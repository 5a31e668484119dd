"""Work that a call defers until its answer is sent, so that the caller does not wait for it.

It is done on the main thread before anything else that came for it. What it raises is dropped; code that leaves work
behind must make sure that nothing is wrong without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

Job = Callable[[], object]


def afterwards(job: Job) -> None:
    """From within a call, on the main thread. Where no call is being answered it is done at once."""
    if _left:
        _left[-1].append(job)
    else:
        job()


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """A call is made and answered within."""
    _left.append([])
    try:
        yield
    finally:
        for job in _left.pop():
            with contextlib.suppress(Exception):
                job()


_left: Final[list[list[Job]]] = []
