"""How many checkpoints of a notebook to keep: fewer where a new one needs their room.

The last good one is never let go of before the new one is whole: a write may be torn at any byte. So what is saved last
and what is to be saved must fit beside each other. Where they do not, nothing is let go of in vain, nothing is written,
and it is said how large a volume would do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sublet.errors import CheckpointFailed
from sublet.values import MIB, format_size

SPARE: Final = 64 << 10
"""Room that a save leaves: to go back to the checkpoint before it (``Shelf.settle``) takes a manifest."""


class Kept(Protocol):
    """Where checkpoints are, as far as their room goes."""

    @property
    def room(self) -> int: ...
    @property
    def size(self) -> int:
        """Of all of it; 0 where it was not said."""

    def numbers(self) -> Sequence[int]: ...
    def freed_by(self, keep: int) -> int: ...
    def let_go(self, keep: int) -> None: ...


def how_many(needed: int, room: int, freed: Callable[[int], int], *, most: int, least: int) -> int:
    """As many as may be kept, so that there is room for so much; 0 if there is none even where the fewest are kept."""
    for keep in range(most, least - 1, -1):
        if needed <= room + freed(keep):
            return keep
    return 0


def make_room(kept: Kept, needed: int, *, most: int, good: int) -> int:
    """See that there is room for so much; how many checkpoints went for it. ``good``: the number of the last good one,
    which stays, as does what is newer. Raises ``CheckpointFailed``; nothing was let go of then."""
    if needed + SPARE <= kept.room:
        return 0
    numbers = kept.numbers()
    least = max(1, sum(number >= good for number in numbers))
    keep = how_many(needed + SPARE, kept.room, kept.freed_by, most=max(most, least), least=least)
    if not keep:
        raise _too_small(kept, needed, least)
    kept.let_go(keep)
    return max(0, len(numbers) - keep)


def _too_small(kept: Kept, needed: int, least: int) -> CheckpointFailed:
    room = kept.room + kept.freed_by(least)
    beside = "" if not kept.numbers() else " beside what was saved last, which stays until the new one is whole"
    said = f"the checkpoint needs up to {format_size(needed)}{beside}, and there is room for {format_size(room)}"
    if not kept.size:
        return CheckpointFailed(said, do="Make room on that disk, then save again; what was saved last is whole.")
    twice = needed if beside else 2 * needed  # the next one must fit beside this one
    more = kept.size - room + twice + SPARE + twice // 16  # a larger file system is more about itself
    size = -(-more // (16 * MIB)) * 16 * MIB
    return CheckpointFailed(
        f"{said}: the volume has {format_size(kept.size)}, and it takes {format_size(size)}",
        do=f"Bring it to the notebook (%gpu fetch NAME), then save in a larger one: %gpu name X {format_size(size)}. "
        "What was saved last is whole.",
    )
