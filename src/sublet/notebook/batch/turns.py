"""Orders notebooks that came through the queue: the oldest first, and a bounded number at once.

A place is a lock on a small file, so it is free again when its holder is gone, however that went.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Final

from sublet.errors import SubletError
from sublet.notebook.batch.jobs import Job, all_jobs
from sublet.notebook.batch.law import JobState

AT_ONCE: Final = 4
"""Notebooks of one user on one machine that run at the same time: each is a kernel with its variables in memory."""


class Turn:
    """One job's place among them."""

    def __init__(self, job: Job) -> None:
        self.ahead = 0
        """Jobs that wait and were here before."""
        self._job = job
        self._fd = -1

    def come(self) -> bool:
        """Whether it is our turn. From then on the place is held."""
        places = [self._job.folder.parent / f"turn-{number}" for number in range(AT_ONCE)]
        have = {place.read_text() for place in places if place.exists()}
        older = [job for job in all_jobs() if int(job.id) < int(self._job.id) and job.id not in have]
        self.ahead = sum(map(_waits, older))
        if self.ahead:
            return False
        for place in places:
            fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, self._job.id.encode(), 0)
            self._fd = fd
            return True
        return False

    def over(self) -> None:
        """End this turn, so that another job has one. Harmless twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.ftruncate(fd, 0)
            os.close(fd)


def _waits(job: Job) -> bool:
    """It has a runner, and that has not begun: a job without a runner delays no other."""
    with contextlib.suppress(SubletError):
        return job.record().state in (JobState.QUEUED, JobState.INTERRUPTED) and job.runner > 0
    return False
