"""Both sides of a notebook in one process, with what crosses between them put into shared memory as for two."""

from __future__ import annotations

from typing import Any

from sublet.guest.cargo import encode, fetch_buffers, load, place_buffers
from sublet.notebook.lending import PoolOwner
from sublet.notebook.lodging import PoolUser
from sublet.notebook.namespace_sync import GUEST, NOTEBOOK, Outgoing, Space, Taken
from sublet.wire.frames import close_all
from sublet.wire.work import WorkerMessage, pack, unpack


class Sides:
    """Both of them."""

    def __init__(self, lender: PoolOwner | None = None) -> None:
        self.here: dict[str, Any] = {}
        self.there: dict[str, Any] = {}
        self.lender = lender
        self.spaces = Space(self.here, NOTEBOOK, lender=lender), Space(self.there, GUEST)
        self.sent = self.came = 0
        self.taken = Taken(changed=(), rebound=(), nbytes=0)

    @property
    def lodger(self) -> PoolUser:
        found = self.spaces[1]._lodging
        assert isinstance(found, PoolUser)
        return found

    def go(self, *names: str) -> None:
        """As before a cell."""
        space = self.spaces[0]
        found = space.outgoing(names, must=True, late=True)
        late, found.late = found.late, []
        self._take(found)
        found.late = late
        more = space.parcels_of(space.changed_late(found))
        self._take(more)
        self.sent = found.nbytes + more.nbytes

    def _take(self, found: Outgoing) -> None:
        space, other = self.spaces
        for one in found.lent:
            other.keep([crossed(one)])
        found.lent.clear()
        came: Outgoing = crossed(found)
        other.on_pool_message(came.word)
        taken = other.take(came.parcels, came.gone)
        space.sent(found)
        space.on_freed(taken.freed)

    def fails(self, *names: str) -> None:
        """As before a cell that was never told of."""
        found = self.spaces[0].outgoing(names, must=True)
        self.spaces[0].invalidate(found.names)

    def lose_the_answer(self) -> None:
        """``a`` goes and arrives, and here nobody knows."""
        space, other = self.spaces
        found = space.outgoing(["a"], must=True)
        other.keep([crossed(one) for one in found.lent])
        found.lent.clear()
        other.take(crossed(found).parcels)
        space.invalidate(found.names)

    def back(self, *names: str, new: tuple[str, ...] = ()) -> None:
        """As after it."""
        other, space = self.spaces
        found = space.outgoing(names, lost_of=names, new=new)
        space.sent(found)
        other.trim_pool()
        came: Outgoing = crossed(found)
        self.taken = other.take(came.parcels, came.gone)
        other.on_freed(came.freed)
        self.came = sum(one.nbytes for one in came.parcels if one.names not in self.taken.idle)


def crossed(found: Any) -> Any:
    placed = place_buffers(encode(found, "it"))
    try:
        said = unpack(pack(WorkerMessage.VALUE, pieces=placed.pieces, inline=placed.inline))
        return load(*fetch_buffers(said, placed.fds, lambda number: -1))
    finally:
        close_all(placed.fds)
