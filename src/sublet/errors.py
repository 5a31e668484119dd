"""The tree of errors: a caller decides by class, a person by message.

Every error says what happened (its message) and what to do now (``do``). ``transient`` tells whether the same call may
succeed later without any change; ``scope`` tells whether the *lease* or the *work* is to blame.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from sublet.invocation import typeable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sublet.lease_end import LeaseEnd

Scope = Literal["lease", "work", "request", "office"]


class SubletError(Exception):
    """Something in Sublet did not go as asked."""

    transient: bool = False
    scope: ClassVar[Scope] = "request"
    default_do: ClassVar[str] = ""

    def __init__(self, message: str, *, do: str | None = None, reason: str | None = None) -> None:
        """In both texts a command stands in backticks (`` `sublet lease ls` ``); what shows them to a person passes
        them through ``invocation.typeable``, as ``str`` of the error does."""
        super().__init__(message)
        self.message = message
        self.do = self.default_do if do is None else do
        self.reason = reason
        """Why, as a word that stays the same while messages are rephrased: of a refused renewal one of
        ``RenewalRefusal``, of a refused request the code of the refusal. None where the class says it all."""

    def __str__(self) -> str:
        end = "" if self.message.endswith((".", "?", "!")) else "."
        return typeable(f"{self.message}{end} {self.do}".rstrip() if self.do else self.message)

    @property
    def kind(self) -> str:
        """The name it travels under between office and client."""
        return type(self).__name__


class RenewalRefusal(enum.StrEnum):
    """Why a renewal was refused; newer offices may know more words.

    Of the first four the lease is not over: it runs to its deadline and then ends for that reason, unless a later
    renewal is granted. Of the others it is over for this holder, or was never held.
    """

    IDLE = "idle"
    """Nothing runs under it, and it is renewed only while something does."""
    QUOTA = "quota"
    """The tenant's device time of the rolling window is used up."""
    BUDGET = "budget"
    """A budget is used up that would pay for it."""
    FAIR_SHARE = "fair_share"
    """It was held for as long as one may hold while others wait."""
    ENDED = "ended"
    """It is over; ``end`` says how."""
    NOT_ACTIVE = "not_active"
    """It still waits, or was not claimed."""
    STALE_EPOCH = "stale_epoch"
    """Another holder has it, under a newer epoch."""
    UNKNOWN = "unknown"
    """There is no such lease, or it is not yours, or it ended so long ago that the office forgot it."""
    NOT_HELD = "not_held"
    """It ended on its machine before the answer."""


class LeaseEnded(SubletError):
    """The lease is over, and ``end`` says why."""

    transient = True
    scope = "lease"
    default_do = "Acquire a new lease and go on from the last checkpoint."
    begun = True
    """False where nothing of the work was begun: as it is, it can be given to another lease."""

    def __init__(
        self, message: str, *, end: LeaseEnd | None = None, do: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message, do=do, reason=RenewalRefusal.ENDED if reason is None and end is not None else reason)
        self.end = end


class LeaseExpired(LeaseEnded):
    """Its time ran out before it was renewed."""


class LeaseRevoked(LeaseEnded):
    """It was taken: preempted, drained, fair share, quota, or by the operator."""


class LeaseNotActive(LeaseEnded):
    """The call needs an active lease, and this one is not (yet, or any more)."""


class GpuSessionEnded(LeaseEnded):
    """The GPU session went with its lease."""


class Quarantined(SubletError):
    """The resource did not come clean after its last lease, so it is not lent."""

    scope = "office"
    default_do = "See `sublet fence ls` for the reason; `sublet fence clear` verifies it again."


class StaleEpoch(SubletError):
    """The effect carried an epoch that is not live: a newer holder has, or had, the resource."""

    scope = "lease"
    default_do = "Attach to the lease or acquire a new one; the old epoch can never write again."


class CapacityExceeded(SubletError):
    """GPU unavailable: there is not enough free now. ``offer`` and ``estimate`` say what would be possible."""

    transient = True
    default_do = "Wait longer, take the offer if there is one, or ask for less."

    def __init__(
        self,
        message: str,
        *,
        offer: object = None,
        estimate: float | None = None,
        do: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, do=do, reason=reason)
        self.offer = offer
        self.estimate = estimate
        """Seconds until it may fit, where that can be told."""


class QuotaExceeded(SubletError):
    """The tenant's own limit refuses it, however much is free."""

    default_do = "Release something, wait for the window to roll on, or ask the operator for a larger quota."


class Disconnected(SubletError):
    """The office did not answer. Whether the request took effect is not known; the same request id finds out."""

    transient = True
    scope = "office"
    default_do = "Check with `sublet status`; running leases go on to their deadlines."

    def __init__(self, message: str, *, do: str | None = None, sent: bool = True) -> None:
        super().__init__(message, do=do)
        self.sent = sent
        """False where the request certainly did not reach the office, and so had no effect."""


class OfficeElsewhere(Disconnected):
    """The office of this state folder runs already, in another folder: this one is a copy of it."""

    transient = False
    OPENING: ClassVar[str] = "the office of this state folder runs already, in"
    """How it begins, by which a client knows it in the log of an office that could not be started."""

    def __init__(self, where: str, *, do: str | None = None, sent: bool = False) -> None:
        """``where``: the folder, and what is known of the process."""
        super().__init__(f"{self.OPENING} {where.removeprefix(self.OPENING).strip()}", do=do, sent=sent)


class Unsupported(SubletError):
    """This machine, device or version cannot do that."""


class InvalidRequest(SubletError):
    """The request contradicts itself or is outside what can be asked; nothing was changed."""

    parts: tuple[str, ...] = ()
    """Which keys of a policy file contradict one another, where it is that: paths such as ``group/course/floor``."""

    def about(self, *parts: str) -> Self:
        """The same, with the keys it is about."""
        self.parts = parts
        return self


class NotFound(InvalidRequest):
    """There is no such thing, or it is not yours; the two look the same on purpose."""


class Unauthorized(SubletError):
    """The token is absent, unknown or does not allow this."""

    default_do = "Set SUBLET_TOKEN to a token printed by `sublet tenant add`."


class CheckpointFailed(SubletError):
    """The state was not saved. Nothing that was saved before is harmed."""

    scope = "work"


class CheckpointDamaged(SubletError):
    """What is on disk is not what was saved there. Nothing of it was handed out."""

    scope = "work"


class Unpicklable(InvalidRequest):
    """A value holds something that cannot be saved or sent, named with the path to it."""

    default_do = "Leave it out (__getstate__), or make it anew where it is used."

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        what: str = "",
        blockers: Sequence[tuple[str, str]] = (),
        do: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, do=do, reason=reason)
        self.path = path
        """How one would write the way to it: ``value.hooks[2].lock``."""
        self.what = what
        """What it is, in plain words: a thread lock."""
        self.blockers = tuple(blockers) or ((path, what),)
        """Everything that was found, as (path, what)."""


class VersionConflict(SubletError):
    """Another writer saved a newer version; the comparison failed and nothing was written."""

    scope = "work"


class IdempotencyConflict(SubletError):
    """The same request id came with another content."""

    default_do = "Use a new request id for a new request."


class StepPending(SubletError):
    """Another program has reserved this step and has not completed it."""

    transient = True
    scope = "work"
    default_do = "Ask again when its lease has ended, or leave the step to it."

    def __init__(self, message: str, *, owner: str = "", until_ns: int = 0, do: str | None = None) -> None:
        super().__init__(message, do=do)
        self.owner = owner
        """The lease under which it was reserved, as its program named it."""
        self.until_ns = until_ns
        """Wall time at which the reservation runs out."""


class GpuError(SubletError):
    """A device call failed."""

    scope = "work"

    def __init__(self, message: str, *, call: str = "", do: str | None = None) -> None:
        super().__init__(message, do=do)
        self.call = call


class OutOfMemory(SubletError):
    """An allocation beyond the lease was refused; nothing changed."""

    scope = "work"


class CallTimeout(SubletError, TimeoutError):
    """A call of a function took longer than it was given. The function was interrupted."""

    scope = "work"
    default_do = "Give it more time (timeout= of its options), or less to do."


class RemoteError(SubletError):
    """The function raised what cannot come over as itself: ``type_name`` says which exception, ``traceback`` where."""

    scope = "work"

    def __init__(self, message: str, *, type_name: str = "", traceback: str = "", do: str | None = None) -> None:
        super().__init__(message, do=do)
        self.type_name = type_name
        self.traceback = traceback


class WorkerLost(SubletError):
    """The process that executed the call is gone. The lease lives, and the next call gets a fresh process."""

    scope = "work"

    def __init__(self, message: str, *, exit_code: int | None = None, do: str | None = None) -> None:
        super().__init__(message, do=do)
        self.exit_code = exit_code
        """128 + n if signal n ended it; None if unknown."""


class JobFailed(SubletError):
    """A job of chunks did not come to its end. What is stored stays; the same call runs only what is missing."""

    scope = "work"
    default_do = "Fix what failed and run the same job again: finished chunks are not run again."

    def __init__(self, message: str, *, failures: Sequence[object] = (), do: str | None = None) -> None:
        super().__init__(message, do=do)
        self.failures = tuple(failures)
        """The chunks that have no result, each with its reason."""


class WasmError(SubletError):
    """A WASM tasklet failed, and fails again in the same way: it has the same input and the same limits."""

    scope = "work"

    def __init__(self, message: str, *, function: str = "", do: str | None = None) -> None:
        super().__init__(message, do=do)
        self.module = ""
        """The module's content, as 32 hexadecimal digits."""
        self.function = function
        """Of the module: where it failed, or what is wrong."""
        self.fuel = 0
        """How much it had used."""


class OutOfFuel(WasmError):
    """A WASM tasklet used up its fuel."""


class WasmTrap(WasmError):
    """A WASM tasklet failed by itself: a trap, or a status that says so."""


class WasmMemoryLimit(WasmError):
    """A WASM tasklet needs more memory than it may have."""


class WasmOutputTooLarge(WasmError):
    """The output of a WASM tasklet is larger than it may be."""


class WasmEntryMissing(WasmError):
    """A WASM module does not have a function that its convention needs."""


class WasmImportForbidden(WasmError):
    """A WASM module imports what tasklets do not have."""


class WasmInvalidModule(WasmError):
    """What was given as a WASM module is none that can be run."""


class JournalError(SubletError):
    """A journal, the office's or that of sessions, cannot be used as it is; it was not changed."""

    scope = "office"
    IN_USE: ClassVar[str] = "another office (pid "
    """How the error begins by which an office says that another has its journal open; a client knows it in the log."""


class JournalFailed(JournalError):
    """A write to the journal failed. Whether it is on disk is not known, so the office ends and nothing is answered."""

    default_do = "Free space on the disk or repair it, then start the office again: it goes on from what is on disk."


class LeaseInterrupt(BaseException):
    """How the end of a lease arrives inside a guest: `except Exception` cannot swallow it by accident."""

    def __init__(self, end: LeaseEnd) -> None:
        super().__init__(f"the lease ended: {end.reason}")
        self.end = end
