"""One lease of this program, and the messages about it besides its renewal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.client.model import LeaseChange, LeasedDevice, Notice
from sublet.lease.holder import HELD_STATES, Holder
from sublet.values import Epoch, Exclusivity, Kind, LeaseId, RequestId
from sublet.wire.http import LeaseView

if TYPE_CHECKING:
    from sublet.client.steps import HttpCall
    from sublet.wire.http import AcquireRequest, AcquisitionRequest


class LeaseEntry:
    """One lease of this program: what the office said of it last, the holder's own view, and the listeners."""

    __slots__ = (
        "__weakref__",
        "_is_end_notified",
        "activities",
        "by_hand",
        "confirmed",
        "handle",
        "holder",
        "idle_due_ns",
        "listeners",
        "notice",
        "owed",
        "quiet",
        "reported_idle",
        "returned",
        "seen_ns",
        "view",
    )

    def __init__(self, view: LeaseView, holder: Holder, owed: Owed) -> None:
        self.view = view
        self.holder = holder
        self.owed = owed
        """What is to be done to give it back."""
        self.handle: Callable[[], object] | None = None
        """A weak reference to the object in the program's hands, if there ever was one."""
        self.activities: list[object] = []
        """One token for each thing that runs under it."""
        self.confirmed = False
        """Whether the office has said that it is over."""
        self.returned = False
        """Whether the holder gave it back; the office may not know yet."""
        self.by_hand = False
        """Whether a ``RenewalManager`` renews it."""
        self.quiet = False
        """It is meant to run out when nothing runs under it any more, so that is no news."""
        self.listeners: list[Callable[[LeaseChange], None]] = []
        self.notice: Notice | None = None
        self.seen_ns = 0
        """As of which moment the office last told of it."""
        self.reported_idle = view.idle
        """What the office takes it for. One that was attached may have been idle in the hands of another."""
        self.idle_due_ns: int | None = None
        self._is_end_notified = False

    @property
    def id(self) -> LeaseId:
        return self.holder.lease

    @property
    def release_id(self) -> RequestId:
        return self.owed.release_id

    @property
    def epoch(self) -> Epoch:
        return self.holder.epoch or Epoch(0, 0)

    @property
    def over(self) -> bool:
        return self.holder.status not in HELD_STATES

    @property
    def devices(self) -> tuple[LeasedDevice, ...]:
        return tuple(
            LeasedDevice(
                id=part.resource,
                kind=Kind(part.kind),
                amount=part.amount,
                model=part.model,
                host=part.host,
                exclusivity=None if part.exclusivity is None else Exclusivity(part.exclusivity),
            )
            for part in self.view.parts
        )

    def notify(self, what: str, detail: str = "") -> None:
        """Tell every listener; the end is told once."""
        if what == "ended":
            if self._is_end_notified:
                return
            self._is_end_notified = True
        change = LeaseChange(
            what=what,
            lease=self.id,
            status=self.holder.status,
            detail=detail,
            notice=self.notice if what == "notice" else None,
            end=self.holder.end if what == "ended" else None,
        )
        for listener in tuple(self.listeners):
            listener(change)


class ActivityReport:
    """A message to the office about a lease, beside its renewal."""

    __slots__ = ("active", "busy_ns", "busy_total_ns", "held")

    def __init__(self, held: LeaseEntry, now_ns: int) -> None:
        meter = held.holder.busy_time
        self.held = held
        self.active = held.holder.busy
        self.busy_ns = meter.unsaid_ns(now_ns)
        self.busy_total_ns = meter.total_ns(now_ns)


# ----------------------------------------------------------------------------------------------------------------- owed
#
# Leases that the office has, or may have, for this program although nothing in the program holds them.


class Owed:
    """A lease, or a place in the queue, that must be given back unless it gets a handle.

    It is in ``LeaseTable.owed`` from before the request is sent until the handle is handed over, and again from the
    release until the office has confirmed it. An interrupt may come between any two bytecodes, so the fields that say
    what is left to do are plain stores: none of them takes a call, in which an interrupt could come before the store.
    """

    __slots__ = (
        "attaching",
        "busy_s",
        "done",
        "epoch",
        "held",
        "is_held",
        "lease",
        "left",
        "members",
        "release_id",
        "retry_ns",
        "sent",
        "tries",
        "under_way",
        "until_ns",
    )

    def __init__(self, release_id: RequestId) -> None:
        self.release_id = release_id
        """Of the release, the same for every thread and retry."""
        self.sent: tuple[HttpCall, AcquireRequest | AcquisitionRequest] | None = None
        """The request that may have been sent: sent again unchanged, it tells which lease it became."""
        self.members: tuple[Owed, ...] | None = None
        """The leases that a request for many became, each to be given back by itself; None before it is answered."""
        self.attaching: str | None = None
        """The holder that an attach has named, while it is not answered."""
        self.lease: LeaseId | None = None
        self.epoch: Epoch | None = None
        """Of the grant that is meant, where it is known."""
        self.held: LeaseEntry | None = None
        self.is_held: Callable[[LeaseId, Epoch | None], bool] = lambda lease, epoch: False
        """Whether this program holds a lease under an epoch by another handle."""
        self.busy_s = 0.0
        """How long it was busy without the office having been told."""
        self.left = False
        """The caller has given up: the keeper, ``close()`` or the end of the program gives it back."""
        self.done = False
        """There is nothing at the office any more."""
        self.under_way = False
        """The keeper is at it."""
        self.tries = 0
        self.retry_ns = 0
        self.until_ns: int | None = None
        """After this it has ended by its time to live."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sent, so that the office cannot have anything."""
        return self.sent is None and self.lease is None

    @property
    def is_plain(self) -> bool:
        """Whether it is a lease that this program knows to be its own, so that it is released by one message."""
        return self.lease is not None and self.attaching is None
