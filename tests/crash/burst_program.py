"""What is killed: publications of an output store in a folder, results and the coordinator's state together.

``python -m tests.crash.burst_program`` reads one order per line and carries it out in a fork that it traces, as
``pack_program`` does. What a publication holds is known from its number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sublet.jobs.identity import ChunkId
from sublet.jobs.volume_store import VolumeOutputStore
from sublet.testing.clock import HeldClock
from tests.crash.serving import serve

__all__ = ["JOB", "STORIES", "found_in", "prepare", "results_of"]

JOB: Final = "crashed"
CLOCK: Final = HeldClock()
EACH: Final = 3
"""Results of one publication."""
Note = Callable[[dict[str, object]], None]


def results_of(number: int) -> dict[ChunkId, bytes]:
    """What publication ``number`` brings: small ones, and one that lies in chunks of its own."""
    return {ChunkId(bytes([number, n]) * 8): bytes([number ^ n]) * (10 if n else 9000) for n in range(EACH)}


def publish(folder: Path, note: Note, count: int) -> None:
    """Go on from what is there by so many publications."""
    store = VolumeOutputStore(folder, clock=CLOCK)
    number = int(store.begin(JOB) or b"0")
    for _ in range(count):
        number += 1
        store.put(list(results_of(number).items()))
        store.publish(b"%d" % number)
        note({"published": number})
    store.close()


def found_in(folder: Path) -> tuple[int, dict[ChunkId, bytes]]:
    """The publication that the state names, and all results."""
    store = VolumeOutputStore(folder, clock=CLOCK)
    try:
        return int(store.begin(JOB) or b"0"), {chunk: store.get(chunk) for chunk in store.chunks()}
    finally:
        store.close()


def first(folder: Path, note: Note) -> None:
    """The first publications of a folder that is not there yet."""
    publish(folder, note, 2)


def after(folder: Path, note: Note) -> None:
    """Two more, with an old one to remove."""
    publish(folder, note, 2)


STORIES: Final[dict[str, Callable[[Path, Note], None]]] = {"first": first, "after": after}


def prepare(story: str, folder: Path) -> None:
    """The folder as the story finds it."""
    if story == "after":
        publish(folder, lambda _: None, 3)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:  # whatever is loaded at first use is loaded now
        publish(Path(folder), lambda _: None, 3)
        found_in(Path(folder))
    serve(STORIES)


if __name__ == "__main__":
    main()
