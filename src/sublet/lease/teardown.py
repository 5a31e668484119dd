"""The teardown of one lease on one resource: notify, kill, verify, scrub, and only then ``TornDown``.

A step at a time, so that each can be slow, fail or be met by a restart. Killing is tried to a bound, and so is looking;
no time-out leads to clean, only to failed. What failed for lateness is looked at again, and may come clean; a fault of
the device or of the scrub may not.
"""

from __future__ import annotations

import enum
from dataclasses import field

from sublet.lazy_dataclass import dataclass
from sublet.lease.hardware import Clean, Hardware, NotYet, Unclean
from sublet.values import NS_PER_S, Epoch, LeaseId, ResourceId
from sublet.wire.orders import Metered, Parking, Part, Saved, VolumeRef

SCRUBBING = "scrubbing"
"""The step within ``TeardownPhase.VERIFYING`` whose time is told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long it is tried before the resource is given up (and quarantined by the office)."""

    retry_ns: int = 1 * NS_PER_S
    """Between one attempt and the next, unless the hardware says when."""
    attempts: int = 5
    """To kill. Looking goes on for as long as these attempts take together."""
    late_ns: int = 10 * NS_PER_S
    """Between two looks at what was given up because it took too long, and for nothing else."""

    @property
    def patience_ns(self) -> int:
        """How long it is looked whether what is left goes by itself."""
        return self.attempts * self.retry_ns


class TeardownPhase(enum.StrEnum):
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
    ordered: bool = False
    """Whether the office asked; until it does, the outcome is not reported."""
    answered: bool = False
    """Whether the outcome was told since the office last asked."""
    park: Parking | None = None
    """Where its guests were to go on living."""
    volume: VolumeRef | None = None
    """What of it may be kept."""
    phase: TeardownPhase = TeardownPhase.TOLD
    due_ns: int | None = None
    """When the next step is due, at the latest; None before the first step and after the last."""
    attempts: int = 0
    look_until_ns: int | None = None
    detail: str = ""
    hard: bool = False
    is_late: bool = False
    """It failed because something took longer than it was waited for, and for nothing else."""
    metered: Metered | None = None
    """What was done there under the lease, once it is clean."""
    saved: Saved | None = None
    steps: dict[str, int] = field(default_factory=dict)
    """How long each phase that is over took."""
    since_ns: int | None = None
    """When the present phase began."""

    @property
    def is_settled(self) -> bool:
        """Whether there is an outcome."""
        return self.phase in (TeardownPhase.CLEAN, TeardownPhase.FAILED)

    def holds(self, resource: ResourceId) -> bool:
        """Whether the resource may not be given to others yet."""
        return self.part.resource == resource and self.phase is not TeardownPhase.CLEAN

    def advance(self, now_ns: int, hardware: Hardware, bounds: Bounds) -> None:
        """Take every step that is due."""
        if self.since_ns is None:
            self.since_ns = now_ns
        if self.is_late and self.due_ns is not None and self.due_ns <= now_ns:
            self._verify_late(now_ns, hardware, bounds)
        while not self.is_settled and (self.due_ns is None or self.due_ns <= now_ns):
            match self.phase:
                case TeardownPhase.TOLD:
                    self._wait(now_ns, hardware)
                case TeardownPhase.KILLING:
                    self._kill(now_ns, hardware, bounds)
                case _:
                    self._verify(now_ns, hardware, bounds)

    def hardware_changed(self, now_ns: int, hardware: Hardware) -> None:
        """The hardware has changed. What was waited for may have come; if it has not, no attempt is used up. What was
        only late is looked at again."""
        if self.is_late and not self._is_there(hardware):
            self.is_late, self.look_until_ns = False, None
            self._enter(TeardownPhase.VERIFYING, now_ns, None)
        elif not self.is_settled and not self._is_there(hardware):
            self.due_ns = now_ns

    def fail(self, detail: str, *, hard: bool) -> None:
        """It cannot be had clean."""
        self.detail, self.hard = detail, hard
        self._enter(TeardownPhase.FAILED, None, self.since_ns)

    def _is_too_late(self, what: str, now_ns: int, bounds: Bounds) -> None:
        self.fail(what, hard=False)
        self.is_late, self.due_ns = True, now_ns + bounds.late_ns

    def _wait(self, now_ns: int, hardware: Hardware) -> None:
        if not self._is_there(hardware):
            self._enter(TeardownPhase.VERIFYING, now_ns, now_ns)
        elif now_ns >= self.grace_until_ns:
            self._enter(TeardownPhase.KILLING, now_ns, now_ns)
        else:
            self.due_ns = self.grace_until_ns

    def _kill(self, now_ns: int, hardware: Hardware, bounds: Bounds) -> None:
        again_ns: int | None = None
        if self._is_there(hardware) and self.attempts < bounds.attempts:
            self.attempts += 1
            again_ns = hardware.kill(self.part.resource, self.lease, self.epoch, now_ns)
        if not self._is_there(hardware):
            self._enter(TeardownPhase.VERIFYING, now_ns, now_ns)
        elif again_ns is None and self.attempts >= bounds.attempts:
            why = hardware.why_alive(self.part.resource, self.lease, self.epoch)
            because = f": {why}" if why else ""
            self._is_too_late(f"the guest could not be ended in {self.attempts} attempts{because}", now_ns, bounds)
        else:
            self.due_ns = max(now_ns + 1, again_ns if again_ns is not None else now_ns + bounds.retry_ns)

    def _verify(self, now_ns: int, hardware: Hardware, bounds: Bounds) -> None:
        if self._is_there(hardware):
            self._enter(TeardownPhase.KILLING, now_ns, now_ns)
            return
        if self.look_until_ns is None:
            self.look_until_ns = now_ns + bounds.patience_ns
        match hardware.verify(self.part.resource, self.lease, self.epoch, now_ns):
            case Clean() as clean:
                self._is_clean(clean, now_ns)
            case Unclean(detail=detail, hard=hard):
                self.fail(detail, hard=hard)
            case NotYet(is_working=True, again_ns=again_ns):
                self.look_until_ns = None  # it counts from the first answer
                self.due_ns = again_ns if again_ns is not None else now_ns + bounds.retry_ns
            case NotYet(what=what) if now_ns >= self.look_until_ns:
                self._is_too_late(what, now_ns, bounds)
            case NotYet(again_ns=again_ns):
                next_ns = again_ns if again_ns is not None else now_ns + bounds.retry_ns
                self.due_ns = max(now_ns + 1, min(next_ns, self.look_until_ns))

    def _verify_late(self, now_ns: int, hardware: Hardware, bounds: Bounds) -> None:
        """It stays failed meanwhile: an operator may vouch for it at any time."""
        self.due_ns = now_ns + bounds.late_ns
        if self._is_there(hardware):
            return
        match hardware.verify(self.part.resource, self.lease, self.epoch, now_ns):
            case Clean() as clean:
                self.is_late = False
                self._is_clean(clean, now_ns)
            case Unclean(detail=detail, hard=hard):
                self.is_late = self.answered = False
                self.fail(detail, hard=hard)
            case NotYet(is_working=True, again_ns=again_ns) if again_ns is not None:
                self.due_ns = again_ns
            case NotYet():
                pass

    def _is_clean(self, clean: Clean, now_ns: int) -> None:
        self._enter(TeardownPhase.CLEAN, None, now_ns)
        self.metered, self.saved = clean.metered, clean.saved
        if clean.scrub_ns:
            self.steps[TeardownPhase.VERIFYING] = max(0, self.steps.get(TeardownPhase.VERIFYING, 0) - clean.scrub_ns)
            self.steps[SCRUBBING] = clean.scrub_ns

    def _is_there(self, hardware: Hardware) -> bool:
        return hardware.is_there(self.part.resource, self.lease, self.epoch)

    def _enter(self, phase: TeardownPhase, due_ns: int | None, now_ns: int | None) -> None:
        if now_ns is not None and self.since_ns is not None:
            self.steps[self.phase] = self.steps.get(self.phase, 0) + now_ns - self.since_ns
        self.phase, self.due_ns, self.since_ns = phase, due_ns, now_ns
