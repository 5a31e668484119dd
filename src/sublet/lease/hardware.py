"""The port through which a node's rules act on hardware: notify, end, check presence.

``Node`` decides, whatever implements this obeys and looks. Real hardware is process trees, groups, folders and devices;
pretended hardware keeps an account of which guests would be where. Both are asked the same questions in the same
order, so that what is proved of the one holds for the other.

No method may raise for what it meets, and none may wait: what takes time is begun, and seen to be over by ``is_there``
and ``verify``. Each may be called again with the same arguments, and twice is once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.values import Epoch, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Metered, Notify, Parking, Part, Saved, StoredVolume, VolumeRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """It was looked at, and scrubbed, and nothing is left."""

    metered: Metered | None = None
    """What was done there under the lease, where that is known."""
    scrub_ns: int = 0
    """How much of the time it took was for scrubbing."""
    saved: Saved | None = None
    """The last checkpoint that was published under the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """Something is still there, and may go by itself."""

    what: str
    """What is still there, for people: it is what they read if it never goes."""
    again_ns: int | None = None
    """When to look again; None: after the usual pause."""
    is_working: bool = False
    """Whether the look itself is under way, which ends by itself: the teardown does not give up meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclean:
    """It cannot be had clean."""

    detail: str
    hard: bool = False
    """A fault of the device or of the scrub: looking again does not mend it, only an operator may."""


Verdict = Clean | NotYet | Unclean


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What it would take to park the guests of a lease. Neither means that it has none."""

    amount: int = 0
    """Bytes of memory."""
    why_not: str = ""
    """Why it is not possible, in words."""
    is_whole: bool = True
    """Whether parking keeps all that they have."""
    outlives: bool = True
    """Whether they are to outlive the time of their lease. Workers live as long as it lasts, and no longer."""
    is_safe: bool = False
    """Whether all of them say that they have nothing left to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What an earlier keeper of this node left on a resource: a guest, or what it had in memory."""

    lease: LeaseId
    epoch: Epoch
    part: Part


class Hardware(Protocol):
    """One node's hardware, as the law sees it."""

    # ---- while a lease lives ----

    def grant(
        self, lease: LeaseId, tenant: TenantId, epoch: Epoch, parts: tuple[Part, ...], deadline_ns: int, /
    ) -> None:
        """This pair is live from now on. If an older epoch of the lease was live until now, its guests go on under
        this one; those of an epoch that was ended before do not.
        """

    def extend(self, lease: LeaseId, epoch: Epoch, deadline_ns: int, /) -> None:
        """The deadline of a live pair has moved."""

    def notice(self, lease: LeaseId, notice: Notify | None, /) -> None:
        """The office announces that the lease will be taken; None: what it announced does not hold any more."""

    def warn(self, lease: LeaseId, epoch: Epoch, deadline_ns: int, /) -> None:
        """The deadline is near and was not moved: guests save and leave now (a line, SIGTERM). The pair is still live,
        and what has not left by the deadline is killed then. Guests that are parked under it are set going for that,
        without a device; nothing stops them again.
        """

    def cancel_warning(self, lease: LeaseId, epoch: Epoch, /) -> None:
        """The deadline was moved after a warning, which does not hold any more: guests that have not met it go on, and
        those that leave do. There may be another."""

    # ---- parking ----

    def need(self, lease: LeaseId, epoch: Epoch, /) -> Need:
        """What its guests would need to be parked, as of now."""

    def park(self, lease: LeaseId, epoch: Epoch, under: Parking, room: int, until_ns: int, now_ns: int, /) -> bool:
        """The lease is over up to this epoch, and its guests are to live on under another, which has so many bytes and
        is live. From this moment on they do nothing. They count as the other's, and no longer as there, once nothing of
        them is on any resource of the lease and before they do anything again. What is not parked by ``until_ns``, or
        when the other lease is over, is told to leave like any other guest. False: none can be, and none was told.
        Guests that leave because they were warned are none that can be.
        """

    def parked(self, under: LeaseId, /) -> bool:
        """Whether guests are parked under this lease."""

    def resume(self, under: Parking, lease: LeaseId, epoch: Epoch, /) -> None:
        """This pair was just granted, and what is parked goes on under it, with its devices; the parking lease is over.
        From here on its guests are this lease's."""

    # ---- when it is over ----

    def announce_end(
        self, lease: LeaseId, epoch: Epoch, reason: EndReason, kill_at_ns: int, detail: str, now_ns: int, /
    ) -> None:
        """The lease is over up to this epoch: nothing of it starts any more, its connections are cut, and its guests
        are told to leave, once; those that are parked are set going to. With ``kill_at_ns`` now or earlier there is no
        time to: ``kill`` follows at once.
        """

    def kill(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int, /) -> int | None:
        """End every guest of the lease, up to this epoch, that uses the resource. Whether it worked is seen by
        ``is_there``. Returns when to look for that at the latest; None: after the usual pause.
        """

    def is_there(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, /) -> bool:
        """Whether a guest of the lease, up to this epoch, uses the resource."""

    def why_alive(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, /) -> str:
        """What keeps those who are there although their end was forced, in words; empty if that is not known."""

    def verify(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int, /) -> Verdict:
        """No guest is there any more: is anything else left, and can it be scrubbed?"""

    def forget(self, resource: ResourceId, lease: LeaseId, /) -> None:
        """An operator vouched for the resource: whatever this lease left on it is not counted any more."""

    # ---- volumes ----

    def volumes(self) -> Iterable[StoredVolume] | None:
        """What is kept on the disk and no lease has now; None if that cannot be told at the moment."""

    def volume_epoch(self, volume: VolumeRef, /) -> Epoch | None:
        """By which epoch this volume was held last, or is held now; None if nothing of it is on the disk. Of a volume
        whose lease was just seen clean this says whether it is kept: there is one as long as there is anything in it.
        """

    def remove_volume(self, volume: VolumeRef, epoch: Epoch, now_ns: int, /) -> None:
        """Remove what is kept of it, if it was held last by this epoch or an older one and no lease has it now. That
        it is gone is seen by ``volume_epoch``; each call may be an attempt."""

    # ---- at any time ----

    def leftovers(self) -> Iterable[Leftover]:
        """What is there although nothing was granted yet: asked once, before the first order."""

    def fault(self, resource: ResourceId, /) -> str | None:
        """What the device itself reports as wrong (Xid, ECC, vanished), in words; None if nothing is."""
