"""The local connection between an office and its supervisor, as a unix socket is one: in order and whole, over with
its ends.

When one end dies, what it had written up to some point is still read by the other, and then comes the end. What it had
not read is gone with it. A connection that is cut by one end is read no further there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import Disconnected, SubletError

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

_MS: Final = 1_000_000
_Message = tuple[Callable[..., None], tuple[Any, ...]]


class _Way:
    """One direction."""

    def __init__(self, world: World, target: Process, over: Callable[..., None]) -> None:
        self._world = world
        self._target = target
        self._over = over
        self._queue: deque[_Message] = deque()
        self._ended = False

    def put(self, do: Callable[..., None], *args: Any) -> None:
        """Written; it is read in its turn."""
        if not self._ended:
            self._append(do, args)

    def end(self, *said: Any) -> None:
        """The writer is gone, and ``said`` is its last word: some of what is on the way was written out, the rest was
        not."""
        if not self._ended:
            keep = int(self._world.random.random() * (len(self._queue) + 1))
            while len(self._queue) > keep:
                self._queue.pop()
            self._append(self._over, said)
            self._ended = True

    def cut(self) -> None:
        """The reader reads no more."""
        self._queue.clear()
        self._ended = True

    def _append(self, do: Callable[..., None], args: tuple[Any, ...]) -> None:
        draw = self._world.random.random
        delay_ns = int(draw() * draw() * 4 * _MS) + 1
        self._queue.append((do, args))
        self._world.push(self._world.now + delay_ns, self._target, self._arrive)

    def _arrive(self) -> None:
        """One moment for each message; which moment it was sent with does not matter, the first in line is read."""
        if self._queue:
            do, args = self._queue.popleft()
            do(*args)


class LocalLink:
    """One connection, from the office's ``connect`` to its end."""

    def __init__(
        self,
        world: World,
        office: Process,
        supervisor: Process,
        *,
        office_hears_end: Callable[[LocalLink, SubletError | None], None],
        supervisor_hears_end: Callable[[LocalLink], None],
    ) -> None:
        self._up = _Way(world, office, lambda error: office_hears_end(self, error))
        self._down = _Way(world, supervisor, lambda: supervisor_hears_end(self))

    def to_supervisor(self, do: Callable[..., None], *args: Any) -> None:
        """The office writes."""
        self._down.put(do, *args)

    def to_office(self, do: Callable[..., None], *args: Any) -> None:
        """The supervisor writes."""
        self._up.put(do, *args)

    def office_ends(self) -> None:
        """It died, or let go."""
        self._up.cut()
        self._down.end()

    def supervisor_ends(self, error: SubletError | None = None) -> None:
        """It died, or hung up with an error: another office took over."""
        self._down.cut()
        self._up.end(error)

    def break_(self) -> None:
        """Both ends live, and the connection is over: one hung up on an error of the other."""
        self._up.end(Disconnected("the connection broke"))
        self._down.end()
