"""How one lease is taken off one resource: told, killed, looked at, scrubbed, and only then ``TornDown``.

A step at a time, so that each can be slow, fail or be met by a restart. Killing is tried to a bound; no time-out leads
to clean, only to failed. What failed for lateness may come clean later (``Verify``); a fault of the device or of the
scrub may not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sublet.agent.machine import FaultName, Faults, Machine
from sublet.values import NS_PER_S, Epoch, LeaseId, ResourceId
from sublet.wire.orders import Part

__all__ = ["Phase", "Teardown", "Timings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long the steps of pretended hardware take."""

    leave_ns: int = 0
    """From being told to having left, for a guest that listens."""
    kill_ns: int = 0
    kill_slow_ns: int = 20 * NS_PER_S
    """The same under ``slow_teardown``."""
    retry_ns: int = 1 * NS_PER_S
    """Between one attempt to kill and the next."""
    attempts: int = 5
    """Attempts to kill before the resource is given up (and quarantined by the office)."""
    verify_ns: int = 0
    """Looking and scrubbing."""


class Phase(enum.StrEnum):
    """Where the teardown is."""

    TOLD = "told"
    """The guest knows, and has its grace to save and leave."""
    KILLING = "killing"
    VERIFYING = "verifying"
    CLEAN = "clean"
    """Nothing is left: it was looked at."""
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Teardown:
    """One lease, up to one epoch, on one resource."""

    lease: LeaseId
    epoch: Epoch
    part: Part
    grace_until_ns: int
    asked: bool = False
    """Whether the office asked; until it does, nobody is told the outcome."""
    answered: bool = False
    """Whether the outcome was told since the office last asked."""
    phase: Phase = Phase.TOLD
    due_ns: int | None = None
    """When the current step is over; None before the first step and after the last."""
    attempts: int = 0
    detail: str = ""
    hard: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether there is an outcome."""
        return self.phase in (Phase.CLEAN, Phase.FAILED)

    def holds(self, resource: ResourceId) -> bool:
        """Whether nobody else may have the resource yet."""
        return self.part.resource == resource and self.phase is not Phase.CLEAN

    def advance(self, now_ns: int, machine: Machine, faults: Faults, timings: Timings) -> None:
        """Take every step that is due."""
        while not self.is_settled and (self.due_ns is None or self.due_ns <= now_ns):
            match self.phase:
                case Phase.TOLD:
                    self._tell_or_wait(now_ns, machine, faults, timings)
                case Phase.KILLING:
                    self._kill(now_ns, machine, faults, timings)
                case _:
                    self._verify(now_ns, machine, faults, timings)

    def _tell_or_wait(self, now_ns: int, machine: Machine, faults: Faults, timings: Timings) -> None:
        if not machine.is_there(self.part.resource, self.lease, self.epoch):
            self._go(Phase.VERIFYING, now_ns + timings.verify_ns)
        elif now_ns >= self.grace_until_ns:
            self._go(Phase.KILLING, now_ns + self._kill_takes_ns(faults, timings))
        elif self._listens(faults) and self.due_ns is not None:
            machine.leave(self.part.resource, self.lease)
            self._go(Phase.VERIFYING, now_ns + timings.verify_ns)
        elif self._listens(faults):
            self.due_ns = min(self.grace_until_ns, now_ns + timings.leave_ns)
        else:
            self.due_ns = self.grace_until_ns

    def _kill(self, now_ns: int, machine: Machine, faults: Faults, timings: Timings) -> None:
        if not faults.is_on(FaultName.STUCK_TEARDOWN, self.part.resource):
            if machine.is_there(self.part.resource, self.lease, self.epoch):
                machine.leave(self.part.resource, self.lease)
            self._go(Phase.VERIFYING, now_ns + timings.verify_ns)
            return
        self.attempts += 1
        if self.attempts >= timings.attempts:
            self.fail(f"the guest could not be ended in {self.attempts} attempts", hard=False)
        else:
            self.due_ns = now_ns + timings.retry_ns

    def _verify(self, now_ns: int, machine: Machine, faults: Faults, timings: Timings) -> None:
        resource = self.part.resource
        if machine.is_there(resource, self.lease, self.epoch):
            self._go(Phase.KILLING, now_ns + self._kill_takes_ns(faults, timings))
        elif faults.is_on(FaultName.DEVICE_FAULT, resource):
            self.fail("the device reported an error", hard=True)
        elif machine.is_dirty(resource, self.lease) and faults.is_on(FaultName.SCRUB_FAILURE, resource):
            self.fail("device memory could not be cleared", hard=True)
        else:
            machine.scrub(resource, self.lease)
            self._go(Phase.CLEAN, None)

    def _listens(self, faults: Faults) -> bool:
        resource = self.part.resource
        return not (faults.is_on(FaultName.DEAF_GUEST, resource) or faults.is_on(FaultName.STUCK_TEARDOWN, resource))

    def _kill_takes_ns(self, faults: Faults, timings: Timings) -> int:
        slow = faults.is_on(FaultName.SLOW_TEARDOWN, self.part.resource)
        return timings.kill_slow_ns if slow else timings.kill_ns

    def fail(self, detail: str, *, hard: bool) -> None:
        """It cannot be had clean."""
        self.detail, self.hard = detail, hard
        self._go(Phase.FAILED, None)

    def _go(self, phase: Phase, due_ns: int | None) -> None:
        self.phase, self.due_ns = phase, due_ns
