"""One folder or segment of a lease: how far it has come, and its size where that is only counted.

A folder whose size is not enforced is measured a little at a time, repeatedly. What is counted may change meanwhile,
and its writer may be hostile: no link is followed, and of very many names only the first are counted. So this reveals
mistakes; it enforces nothing, and does not claim to.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator
from typing import Final

from sublet.node.storage.stores_work import Made, StoreNote
from sublet.values import ResourceId, format_size


class StoreState(enum.Enum):
    """How far a store has come."""

    MAKING = "making"
    THERE = "there"
    REFUSED = "refused"
    """It could not be made, and nothing of it is there."""
    LEAVING = "leaving"
    GONE = "gone"


class StoredFolder:
    """One folder, or one segment."""

    def __init__(self, folder: str, note: StoreNote, state: StoreState) -> None:
        self.folder = folder
        self.note = note
        self.state = state
        self.is_left = state is StoreState.LEAVING
        """Whether a predecessor made it."""
        self.made = Made()
        self.is_made = False
        self.segment = -1
        """Where no file system in memory is wanted, or to be had: a file of fixed size that lives as long as this
        descriptor."""
        self.why = ""
        """What keeps it from being put away."""
        self.tries = 0
        self.again_ns = 0
        self.has_job = False
        """Whether a forked job is out for it."""
        self.at_work = 0
        """How much is just being published in it, collected, or copied from it: it is not put away meanwhile."""
        self.waiting: list[Callable[[], None]] = []
        self.counts: dict[int, FolderCount] = {}
        """By part, where the size is only counted."""

    @property
    def is_named(self) -> bool:
        return bool(self.note.name)

    def covers(self, resource: ResourceId) -> bool:
        """Whether it lies on this resource; where its note is lost that is not known, and it counts as on each."""
        return not self.note.parts or any(part.resource == resource for part in self.note.parts)


NAMES_MAX: Final = 200_000
"""So many names are counted in one folder of a lease."""
_SECTOR: Final = 512


def count(folder: str) -> Iterator[int]:
    """The bytes on disk of one name after the other, below the folder. Of a file with several names, each counts."""
    waiting = [folder]
    for _ in range(NAMES_MAX):
        if not waiting:
            return
        try:
            entries = os.scandir(waiting.pop())
        except OSError:  # it is gone, or may not be read, or is too deep down
            yield 0
            continue
        with entries:
            for entry in entries:
                try:
                    used = entry.stat(follow_symlinks=False).st_blocks * _SECTOR
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                except OSError:
                    used = 0
                yield used


class FolderCount:
    """Of one folder, and what there is to say of it."""

    def __init__(self, folder: str, size: int) -> None:
        self.used = 0
        """At the end of the last round."""
        self._folder = folder
        self._size = size
        self._round = count(folder)
        self._so_far = 0
        self._names = 0
        self._is_over = False

    def step(self, names: int) -> str:
        """Go on by so many names. A line for the guests if a round has shown that it is too full, as news."""
        for _ in range(names):
            used = next(self._round, None)
            if used is None or self._names >= NAMES_MAX:
                return self._end_round()
            self._so_far += used
            self._names += 1
        return ""

    def _end_round(self) -> str:
        self.used, self._so_far, self._names, self._round = self._so_far, 0, 0, count(self._folder)
        was_over, self._is_over = self._is_over, self.used > self._size
        if was_over or not self._is_over:
            return ""
        return (
            f"{self._folder} holds {format_size(self.used)}, and {format_size(self._size)} are leased; "
            f"nothing stops it on this machine, so make room"
        )
