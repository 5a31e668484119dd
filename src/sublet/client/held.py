"""One lease of this program, and the messages about it besides its renewal."""

from __future__ import annotations

from collections.abc import Callable

from sublet.client.model import LeaseChange, LeasedDevice, Notice
from sublet.client.owed import Owed
from sublet.lease.holder import HELD_STATES, Holder
from sublet.values import Epoch, Exclusivity, Kind, LeaseId, RequestId
from sublet.wire.http import LeaseView


class Held:
    """One lease of this program: what the office said of it last, the holder's own view, and who listens."""

    __slots__ = (
        "__weakref__",
        "_told_over",
        "activities",
        "by_hand",
        "confirmed",
        "handle",
        "heard_ns",
        "holder",
        "idle_due_ns",
        "listeners",
        "notice",
        "owed",
        "quiet",
        "returned",
        "said_idle",
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
        self.heard_ns = 0
        """As of which moment the office last told of it."""
        self.said_idle = view.idle
        """What the office takes it for. One that was attached may have been idle in the hands of another."""
        self.idle_due_ns: int | None = None
        self._told_over = False

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

    def tell(self, what: str, detail: str = "") -> None:
        """Tell every listener; the end is told once."""
        if what == "ended":
            if self._told_over:
                return
            self._told_over = True
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


class Word:
    """What is to be said to the office about a lease, beside its renewal."""

    __slots__ = ("active", "busy_ns", "busy_total_ns", "held")

    def __init__(self, held: Held, now_ns: int) -> None:
        meter = held.holder.busy_time
        self.held = held
        self.active = held.holder.busy
        self.busy_ns = meter.unsaid_ns(now_ns)
        self.busy_total_ns = meter.total_ns(now_ns)
