"""What is killed: saves into a folder of checkpoints, and their collection.

``python -m tests.crash.pack_program`` reads one order per line and carries it out in a fork
that it traces, as ``journal_program`` does. Everything is deterministic, so what any checkpoint must hold is known from
its number alone.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.writer import PACKS_MAX
from sublet.testing.clock import HeldClock
from tests.crash.serving import serve

KEEP: Final = 3
CLOCK: Final = HeldClock()
Note = Callable[[dict[str, object]], None]


def state_at(number: int) -> dict[str, Any]:
    """What checkpoint ``number`` holds: a little always changes, some at times, and much never."""
    return {
        "number": number,
        "now_and_then": half(number // 3, 60_000) + half(-1, 60_000),
        "never": half(-2, 140_000) + half(-3, 140_000),
        "zeros": bytes(60_000),
    }


@functools.cache
def half(seed: int, size: int) -> bytes:
    """Of an object that is a new one each time, and cost nothing to draw."""
    return random.Random(seed).randbytes(size)


def save(folder: Path, note: Note, count: int) -> None:
    """Go on from the newest checkpoint by so many."""
    store = FolderStore(folder)
    durable = Durable(state_at(store.newest()), store, keep=KEEP, clock=CLOCK)
    for _ in range(count):
        number = store.newest() + 1
        durable.value = state_at(number)
        durable.checkpoint()
        note({"saved": number})
    durable.close()


def first(folder: Path, note: Note) -> None:
    """The first checkpoints of a folder that is not there yet."""
    save(folder, note, 2)


def after(folder: Path, note: Note) -> None:
    """Some more, with old ones to remove and something that a crash left to sweep away."""
    save(folder, note, 2)


def many(folder: Path, note: Note) -> None:
    """The save by which there would be too many packs, so that some are emptied into the new one."""
    save(folder, note, 2)


STORIES: Final[dict[str, Callable[[Path, Note], None]]] = {"first": first, "after": after, "many": many}


def prepare(story: str, folder: Path) -> None:
    """The folder as the story finds it."""
    if story == "first":
        return
    save(folder, lambda _: None, 4 if story == "after" else PACKS_MAX + 2)
    left = folder / "staging" / "left"
    left.mkdir()
    (left / "pack.part").write_bytes(b"half of a pack")
    (folder / "packs" / ("0" * 40 + ".pack")).write_bytes(b"a pack that nobody came to name")


def main() -> None:
    warm_up()
    serve(STORIES)


def warm_up() -> None:
    """Whatever is loaded at first use is loaded now."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), lambda _: None, KEEP + 1)


if __name__ == "__main__":
    main()
