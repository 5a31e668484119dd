"""Processes and their clocks.

True time is the simulator's; no process sees it. A clock runs at its own rate from its own zero, and a reboot starts
it anew in another domain. A process that is paused does nothing, and then does everything late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.simulation.world import World

_PPM: Final = 1_000_000
_WALL_NS: Final = 1_750_000_000 * 1_000_000_000


class MachineClock:
    """The clock of one machine (a ``sublet.clock.Clock``), shared by the processes on it."""

    __slots__ = ("_boots", "_name", "_start_local_ns", "_start_true_ns", "_wall_off_ns", "_world", "rate_ppm")

    def __init__(self, world: World, name: str, *, rate_ppm: int = _PPM, start_ns: int = 0) -> None:
        self._world = world
        self._name = name
        self._boots = 1
        self._start_true_ns = world.now
        self._start_local_ns = start_ns
        self._wall_off_ns = 0
        self.rate_ppm = rate_ppm
        """Local nanoseconds in a million true ones."""

    @property
    def domain(self) -> str:
        return f"{self._name}/{self._boots}"

    def now_ns(self) -> int:
        return self._start_local_ns + (self._world.now - self._start_true_ns) * self.rate_ppm // _PPM

    def wall_ns(self) -> int:
        return _WALL_NS + self._world.now + self._wall_off_ns

    def true_ns(self, local_ns: int) -> int:
        """The true time at which this clock shows at least ``local_ns``."""
        return self._start_true_ns - (-(local_ns - self._start_local_ns) * _PPM // self.rate_ppm)

    def jump_wall(self, ns: int) -> None:
        """The wall clock is set."""
        self._wall_off_ns += ns

    def reboot(self) -> None:
        """A new domain, from nearly zero."""
        self._boots += 1
        self._start_true_ns = self._world.now
        self._start_local_ns = 1_000_000_000


class Process:
    """Something that runs, is paused, crashes and starts again. Whatever it had planned dies with it."""

    def __init__(self, world: World, name: str, clock: MachineClock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.alive = False
        self.boot = 0
        self.paused_until = 0
        """A true time; what comes before it waits."""
        self.backlog: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []

    def begin(self) -> None:
        """Run (again)."""
        self.alive = True
        self.boot += 1
        self.paused_until = 0
        self.backlog.clear()

    def pause(self, until_true_ns: int) -> None:
        """Stand still until then; what comes meanwhile is done afterwards, in order."""
        if until_true_ns > self.paused_until:
            self.paused_until = until_true_ns
            self.world.push(until_true_ns, None, self.resume)

    def resume(self) -> None:
        """Go on, unless another pause lasts longer."""
        if self.world.now >= self.paused_until:
            backlog, self.backlog = self.backlog, []
            for boot, do, args in backlog:
                if boot == self.boot:
                    self.world.push(self.world.now, self, do, args)

    def crash(self) -> None:
        """Stop at once."""
        self.alive = False
        self.boot += 1

    def after(self, local_ns: int, do: Callable[..., None], *args: Any) -> None:
        """Do this when so much time has passed on the own clock, if still alive then."""
        world = self.world
        if local_ns > 0:
            world.push(world.now + local_ns * _PPM // self.clock.rate_ppm, self, do, args)
        else:
            world.push(world.now, self, do, args)

    def at(self, local_ns: int, do: Callable[..., None], *args: Any) -> None:
        """Do this when the own clock shows ``local_ns``."""
        self.world.push(max(self.world.now, self.clock.true_ns(local_ns)), self, do, args)
