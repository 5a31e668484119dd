"""The fence table: which (lease, epoch) may touch the hardware now. Pure; time is an argument.

A holder's belief proves nothing, so every effect carries its (lease, epoch) and is compared here. What the table knows:

- the *live* pairs with their deadlines: exactly these are accepted;
- for each lease that ended lately, the highest epoch that ended, and why: a late copy of its grant is not taken again;
- for all that ended before those, per incarnation of the office, the highest of their epochs. Epochs are one rising
  sequence, so whatever is not above it and not live is over, or comes later than thousands that were granted after it:
  it is not taken either. So the table stays small however many leases there were;
- for each exclusive resource, the highest epoch it has seen: whatever is older has been here and gone.

Orders of one lease are numbered. A newer number replaces, an older one is ignored; numbers of another incarnation of
the office come first or last as a whole. Deadlines and notices are compared apart, so that a notice which overtakes an
extension on the wire does not swallow it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sublet.errors import LeaseEnded, LeaseExpired, LeaseNotActive, LeaseRevoked, StaleEpoch
from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.values import Epoch, Exclusivity, Kind, LeaseId, ResourceId
from sublet.wire.orders import Part

ENDED_MAX: Final = 4096
"""Ended leases that are remembered by name, with the reason; 240 bytes each. Of older ones it is only known that they
are over."""

OrderNumber = tuple[int, int]
"""(incarnation of the office, number of the order)."""

_NEVER: Final = Epoch(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceEntry:
    """A pair that is accepted until its deadline."""

    lease: LeaseId
    epoch: Epoch
    number: OrderNumber
    """Of the last order that set the deadline."""
    noticed: OrderNumber
    """Of the last order that gave or took back a notice."""
    deadline_ns: int
    parts: tuple[Part, ...]


def is_exclusive(part: Part) -> bool:
    """Whether the part tolerates no other lease on its resource."""
    return part.kind is Kind.GPU and part.exclusivity is not Exclusivity.SHARED


def same_hardware(old: Sequence[Part], new: Sequence[Part]) -> bool:
    """Whether these parts are of the same resources."""
    return {part.resource for part in old} == {part.resource for part in new}


class FenceTable:
    """Accepts exactly the live pairs."""

    def __init__(self, *, ended_max: int = ENDED_MAX) -> None:
        self._live: dict[LeaseId, FenceEntry] = {}
        self._ended: dict[LeaseId, tuple[Epoch, EndReason]] = {}
        self._past: dict[int, int] = {}
        """Incarnation → the highest epoch of those that ended and are not remembered by name any more."""
        self._floor: dict[ResourceId, Epoch] = {}
        self._on: dict[ResourceId, dict[LeaseId, Part]] = {}
        self._alone: dict[ResourceId, dict[LeaseId, Part]] = {}
        self._in_use: dict[ResourceId, int] = {}
        self._deadlines: list[tuple[int, LeaseId]] = []
        self._ended_max = ended_max

    def check(self, lease: LeaseId, epoch: Epoch, now_ns: int) -> FenceEntry:
        """The live entry, or the reason why there is none."""
        live = self._live.get(lease)
        if live is None:
            ended, reason = self._ended.get(lease, (_NEVER, None))
            if epoch <= ended and reason is not None:
                raise _over(lease, reason)
            if self._is_past(epoch):
                raise LeaseNotActive(f"lease {lease} with epoch {epoch} was over long ago")
            raise LeaseNotActive(f"lease {lease} with epoch {epoch} is not known on this node")
        if epoch != live.epoch:
            raise StaleEpoch(f"epoch {epoch} of lease {lease} is not live; {live.epoch} is")
        if now_ns >= live.deadline_ns:
            raise LeaseExpired(f"lease {lease} ran out")
        return live

    def get(self, lease: LeaseId) -> FenceEntry | None:
        """The live entry of the lease, whatever its deadline."""
        return self._live.get(lease)

    def __iter__(self) -> Iterator[FenceEntry]:
        return iter(tuple(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def on(self, resource: ResourceId) -> Mapping[LeaseId, Part]:
        """The parts of the live leases on this resource."""
        return self._on.get(resource, {})

    def exclusive_on(self, resource: ResourceId) -> Mapping[LeaseId, Part]:
        """Those of them that tolerate no other. A shared device may have very many leases, and none of these."""
        return self._alone.get(resource, {})

    def in_use(self, resource: ResourceId) -> int:
        """How much of it the live leases have."""
        return self._in_use.get(resource, 0)

    def is_over(self, lease: LeaseId, epoch: Epoch, parts: Sequence[Part], *, came: bool = False) -> bool:
        """Whether a grant of this epoch comes too late: its lease ended, or its hardware has moved on.

        ``came``: the grant was here in time and has waited since, for as long as it takes what is in its way.
        """
        ended, _ = self._ended.get(lease, (_NEVER, None))
        if epoch <= ended:
            return True
        live = self._live.get(lease)
        if live is not None:
            return epoch < live.epoch
        if not came and self._is_past(epoch):
            return True
        return any(epoch <= self._floor.get(part.resource, _NEVER) for part in parts if is_exclusive(part))

    def admit(
        self, lease: LeaseId, epoch: Epoch, number: OrderNumber, deadline_ns: int, parts: tuple[Part, ...]
    ) -> None:
        """Accept this pair from now on. A newer epoch of the same lease replaces the older, which is stale at once.

        The caller has asked ``is_over`` first, and has seen to it that nothing else is on the parts.
        """
        old = self._live.get(lease)
        noticed: OrderNumber = (0, 0)
        if old is not None:
            if old.epoch == epoch and number <= old.number:
                return
            noticed = old.noticed
            self._place(old, present=False)
        new = FenceEntry(lease=lease, epoch=epoch, number=number, noticed=noticed, deadline_ns=deadline_ns, parts=parts)
        self._place(new, present=True)
        self._put(new)
        self._raise_floor(parts, epoch)

    def extend(self, lease: LeaseId, epoch: Epoch, number: OrderNumber, deadline_ns: int) -> bool:
        """Move the deadline of a live pair; False if the pair is not live. An older number moves nothing."""
        live = self._live.get(lease)
        if live is None or live.epoch != epoch:
            return False
        if number > live.number:
            self._put(
                FenceEntry(
                    lease=lease,
                    epoch=epoch,
                    number=number,
                    noticed=live.noticed,
                    deadline_ns=deadline_ns,
                    parts=live.parts,
                )
            )
        return True

    def notify(self, lease: LeaseId, epoch: Epoch, number: OrderNumber) -> bool | None:
        """Whether this notice is news for a live pair; None if the pair is not live."""
        live = self._live.get(lease)
        if live is None or live.epoch != epoch:
            return None
        if number <= live.noticed:
            return False
        self._live[lease] = replace(live, noticed=number)
        return True

    def end(self, lease: LeaseId, epoch: Epoch, parts: Sequence[Part], reason: EndReason) -> FenceEntry | None:
        """Fence the lease up to this epoch, known or not. Returns what was live and is not any more."""
        ended, _ = self._ended.get(lease, (_NEVER, None))
        if epoch > ended:
            self._ended.pop(lease, None)
            self._ended[lease] = (epoch, reason)
            if len(self._ended) > self._ended_max:
                self._forget_oldest()
        self._raise_floor(parts, epoch)
        live = self._live.get(lease)
        if live is None or live.epoch > epoch:
            return None
        del self._live[lease]
        self._place(live, present=False)
        return live

    def due(self, now_ns: int) -> list[FenceEntry]:
        """The live pairs whose deadline has come. They are refused already; the caller ends them."""
        found: dict[LeaseId, FenceEntry] = {}
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, lease = heapq.heappop(self._deadlines)
            live = self._live.get(lease)
            if live is not None and live.deadline_ns == deadline_ns:
                found[lease] = live
        return list(found.values())

    def next_deadline_ns(self) -> int | None:
        """The earliest deadline of a live pair."""
        while self._deadlines:
            deadline_ns, lease = self._deadlines[0]
            live = self._live.get(lease)
            if live is not None and live.deadline_ns == deadline_ns:
                return deadline_ns
            heapq.heappop(self._deadlines)
        return None

    def _put(self, live: FenceEntry) -> None:
        self._live[live.lease] = live
        heapq.heappush(self._deadlines, (live.deadline_ns, live.lease))
        if len(self._deadlines) > 64 + 4 * len(self._live):  # mostly deadlines that were moved since
            self._deadlines = [(entry.deadline_ns, entry.lease) for entry in self._live.values()]
            heapq.heapify(self._deadlines)

    def _place(self, live: FenceEntry, *, present: bool) -> None:
        for part in live.parts:
            for parts in (self._on, self._alone) if is_exclusive(part) else (self._on,):
                on_resource = parts.setdefault(part.resource, {})
                if present:
                    on_resource[live.lease] = part
                else:
                    on_resource.pop(live.lease, None)
            amount = part.amount if present else -part.amount
            self._in_use[part.resource] = self._in_use.get(part.resource, 0) + amount

    def _forget_oldest(self) -> None:
        epoch, _ = self._ended.pop(next(iter(self._ended)))
        self._past[epoch.incarnation] = max(epoch.n, self._past.get(epoch.incarnation, 0))

    def _is_past(self, epoch: Epoch) -> bool:
        return epoch.n <= self._past.get(epoch.incarnation, 0)

    def _raise_floor(self, parts: Sequence[Part], epoch: Epoch) -> None:
        for part in parts:
            if is_exclusive(part) and epoch > self._floor.get(part.resource, _NEVER):
                self._floor[part.resource] = epoch


_SILENT: Final = frozenset({EndReason.EXPIRED, EndReason.IDLE})
_GIVEN_BACK: Final = frozenset({EndReason.RELEASED, EndReason.WITHDRAWN, EndReason.HOLDER_GONE})


def _over(lease: LeaseId, reason: EndReason) -> LeaseEnded:
    if reason in _SILENT:
        return LeaseExpired(f"lease {lease} ran out ({reason})")
    if reason in _GIVEN_BACK:
        return LeaseNotActive(f"lease {lease} was given back ({reason})")
    return LeaseRevoked(f"lease {lease} was taken ({reason})")
