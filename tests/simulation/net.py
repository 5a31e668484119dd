"""A network that loses, doubles, delays, reorders and cuts, one way or both ways.

A message belongs to the connection that carried it: if the receiver dies before it arrives, it is lost with the
connection. Nothing else is promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sublet.values import LeaseId

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

_MS: Final = 1_000_000


class Network:
    """Carries calls between processes."""

    def __init__(self, world: World) -> None:
        plan = world.scenario
        self._world = world
        self._random = world.random.random
        self.loss = plan.loss
        self.duplicates = plan.duplicates
        self.late = plan.late
        self.delay_ns = plan.delay_ns
        self.cuts: set[tuple[str, str]] = set()
        """(from, to) pairs that do not get through now."""

    def send(
        self,
        source: Process,
        target: Process,
        do: Callable[..., None],
        *args: Any,
        lease: LeaseId | None = None,
        reliable: bool = False,
    ) -> None:
        """Have ``target`` do this, perhaps. ``lease`` is whom it concerns, for the counters. ``reliable`` is a pipe
        within one machine: it delays, and it breaks with its ends, but it neither loses nor doubles."""
        if not target.alive:
            return
        world, random = self._world, self._random
        if self.cuts and (source.name, target.name) in self.cuts:
            world.coverage.met_lease("message cut", lease)
            return
        copies = 1
        if not reliable:
            draw = random()
            if draw < self.loss:
                world.coverage.met_lease("message lost", lease)
                return
            if random() < self.duplicates:
                world.coverage.met_lease("message doubled", lease)
                copies = 2
        for _ in range(copies):
            delay_ns = int(self.delay_ns * random() * random() * 4)
            if not reliable and self.late and random() < self.late:
                world.coverage.met_lease("message late", lease)
                delay_ns += int(random() * random() * 60_000 * _MS)
            world.push(world.now + delay_ns + 1, target, do, args)

    def heal(self) -> None:
        """Everything gets through from now on, once and soon."""
        self.cuts.clear()
        self.loss = self.duplicates = self.late = 0.0
        self.delay_ns = min(self.delay_ns, 50 * _MS)
