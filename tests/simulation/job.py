"""One lease's worth of work in the pretended world."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sublet.office.ledger.records import Want
from sublet.values import Epoch, LeaseId, RenewMode, RequestId

if TYPE_CHECKING:
    from tests.simulation.world import World

_S: Final = 1_000_000_000


class Job:
    """One lease's worth of work: what is asked for, and how it will go."""

    __slots__ = (
        *("attach", "busy_ns", "claimed_late", "ending", "idle_ns", "mode", "node"),
        *("name", "request", "resume", "resume_epoch", "rounds", "wants"),
    )

    def __init__(self, world: World, request: RequestId) -> None:
        plan, draw = world.scenario, world.random
        self.request = request
        self.resume: LeaseId | None = None
        """What it goes on with."""
        self.resume_epoch: Epoch | None = None
        self.wants: tuple[Want, ...] = plan.wants(world)
        self.mode = draw.choice((RenewMode.WHILE_BUSY, RenewMode.WHILE_BUSY, RenewMode.ALWAYS, RenewMode.NEVER))
        self.rounds = 1 + int(draw.random() * 6)
        """How many times it is busy before it is done."""
        self.busy_ns = int((0.5 + draw.random() * 12) * _S)
        self.idle_ns = int(draw.random() * draw.random() * 20 * _S)
        self.ending = draw.random()
        """Below 0.7 it is released; else the program just stops caring."""
        self.attach = draw.random() < 0.1
        self.claimed_late = draw.random() < 0.1
        """It may be too slow for its claim window."""
        self.node = ""
        self.name: str | None = None
        """Of the volume it goes on with, or makes."""
        found = plan.volume(request)
        if found is not None:
            self.name, self.wants = found
