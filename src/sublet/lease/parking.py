"""Guests without a device: how a lease ends without ending its guests, and how another lease resumes them.

Four moments, each of which can be met by a restart, a copy of an order or a deadline:

1. *Notice.* The lease will be taken, or its deadline is near. It is said what its guests would need to be parked
   (``Parkable``), so that the office can set a lease of memory aside, the parking lease, before anything is taken.
2. *Suspend.* ``End`` with ``park``: the lease is fenced, its guests stand still, leave the device and count as the
   parking lease's from the moment on at which nothing of them is left there. Only then is the device torn down. If
   that does not come off in time they are told to leave, and end.
3. *Parked.* The parking lease is one like any other: it has a deadline, is renewed, runs out. With it its guests end,
   and before that they save: at its notice, which is as long before its deadline as for the lease they came from, or
   when an order ends it with a grace. For that they are set going, without a device. From there on they are leaving:
   nothing stops them again, and no lease goes on with them. If they end first, so does it.
4. *Resume.* A grant that names the parking lease *and its epoch*. Admitting it, handing over and ending the parking
   lease are one step of this table, so the guests are under one lease before it and under one after it. A grant whose
   guests are not here any more is not held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sublet.lease.fence import FenceEntry, FenceTable
from sublet.lease.hardware import Hardware
from sublet.lease.policy import lead_ns
from sublet.lease.retransmit import Repeats
from sublet.lease.teardowns import Teardowns
from sublet.lease_end import EndReason
from sublet.values import GIB, NS_PER_S, Epoch, LeaseId, NodeId
from sublet.wire.orders import Grant, Notify, Parkable, Parking, Report

LOOK_NS: Final = NS_PER_S // 5
"""Between two looks at whether the guests of a lease that has notice are saved."""
NOT_PARKED_FOR: Final = frozenset({EndReason.OPERATOR})
"""Guests of a lease that an operator ended, perhaps since its tenant lost its rights, are not kept."""
_COPIED_PER_S: Final = 2 * GIB
"""Bytes. NVIDIA tells of 64 GiB in half a minute."""


def copy_ns(amount: int) -> int:
    """How long a driver takes at most to copy so much between a card and the host."""
    return amount * NS_PER_S // _COPIED_PER_S


class ParkingLot:
    """What one node's law knows of parked guests, and of those that may be parked soon."""

    def __init__(self, node: NodeId, hardware: Hardware, fence: FenceTable, teardowns: Teardowns) -> None:
        self._node = node
        self._hardware = hardware
        self._fence = fence
        self._teardowns = teardowns
        self._parkable: Repeats[LeaseId] = Repeats()
        self._unsafe: dict[LeaseId, int] = {}
        """Leases that have notice and something left to save; when that is looked at again."""
        self._under: dict[LeaseId, bool] = {}
        """Leases under which guests are, or may soon be parked; whether any were seen there."""
        self._runs_out: set[LeaseId] = set()
        """Leases without a notice whose deadline is near, for whose guests it is asked whether they may be parked."""
        self._leaving: dict[LeaseId, int] = {}
        """Those of them whose guests were set going to save and leave, with the deadline for which that was."""

    # ---- 1: notice ----

    def noticed(self, order: Notify, now_ns: int) -> None:
        """The lease will be taken."""
        live = self._fence.get(order.lease)
        if live is not None and order.reason not in NOT_PARKED_FOR:
            self._runs_out.discard(order.lease)
            need = self._need(live)
            self._parkable.repeat(order.lease, need, now_ns)
            if not need.safe and (need.amount or need.why):
                self._unsafe[order.lease] = now_ns + LOOK_NS

    def runs_out(self, lease: LeaseId, now_ns: int) -> None:
        """Its deadline is near and was not moved: the office may have its guests parked, if its holder is idle.
        Nothing is said of a lease without guests. What is parked already saves when its time runs out."""
        live = self._fence.get(lease)
        if live is None or lease in self._under or not self._hardware.need(lease, live.epoch).outlives:
            return
        self._runs_out.add(lease)
        self._parkable.repeat(lease, self._need(live), now_ns)

    def extended(self, lease: LeaseId) -> None:
        """Its deadline was moved."""
        if lease in self._runs_out:
            self.cancel(lease)

    def cancel(self, lease: LeaseId) -> None:
        """It will not, or it was; harmless if nothing was said."""
        self._parkable.stop(lease)
        self._runs_out.discard(lease)
        self._unsafe.pop(lease, None)

    def saved(self, lease: LeaseId) -> None:
        """Its guests have saved something."""
        if lease in self._unsafe:
            self._unsafe[lease] = 0

    def resend_reports(self, now_ns: int) -> None:
        """To an office that may not have heard."""
        self._parkable.again(now_ns)

    def counted(self, now_ns: int) -> None:
        """It is known anew what guests have on devices: what they need is said once more."""
        self._parkable.resend_now(now_ns)

    def due(self, now_ns: int) -> Iterable[Report]:
        """What to say now: what is needed as of now, not as of the notice."""
        for lease in [lease for lease, look_ns in self._unsafe.items() if now_ns >= look_ns]:
            live = self._fence.get(lease)
            if live is None or self._need(live).safe:
                del self._unsafe[lease]
            else:
                self._unsafe[lease] = now_ns + LOOK_NS
            if live is not None and lease not in self._unsafe:
                self._parkable.repeat(lease, self._need(live), now_ns)
        for lease in self._parkable.about_to_say(now_ns):
            live = self._fence.get(lease)
            if live is not None:
                self._parkable.put(lease, self._need(live))
        return [
            report
            for report in self._parkable.due(now_ns)
            if isinstance(report, Parkable) and (report.amount or report.why or not report.expiring)
        ]

    def next_ns(self) -> int | None:
        """When there is something to say."""
        every = [*self._unsafe.values(), *filter(None, (self._parkable.next_ns(),))]
        return min(every, default=None)

    def _need(self, live: FenceEntry) -> Parkable:
        need = self._hardware.need(live.lease, live.epoch)
        return Parkable(
            node=self._node,
            lease=live.lease,
            epoch=live.epoch,
            amount=need.amount,
            why=need.why_not,
            expiring=live.lease in self._runs_out,
            whole=need.is_whole,
            safe=need.is_safe,
        )

    # ---- 2: suspend ----

    def park(self, lease: LeaseId, epoch: Epoch, under: Parking | None, until_ns: int, now_ns: int) -> bool:
        """Begin, if the parking lease is live here (under the epoch that was meant, or a newer one)."""
        parking = self._fence.get(under.lease) if under is not None else None
        if under is None or parking is None or parking.epoch < under.epoch or parking.deadline_ns <= now_ns:
            return False
        self._under.setdefault(under.lease, False)
        room = sum(part.amount for part in parking.parts)
        return self._hardware.park(lease, epoch, under, room, min(until_ns, parking.deadline_ns), now_ns)

    # ---- 3: parked ----

    def time_to_save(self, live: FenceEntry | None, until_ns: int, save_ns: int, now_ns: int) -> int:
        """Until when an end that comes by an order waits. What is parked had no notice in which it could have saved, so
        it has as long as its last save needs, if its lease would have lasted so long and there is any time at all."""
        if live is None or live.lease not in self._under or until_ns <= now_ns:
            return until_ns
        return max(until_ns, min(live.deadline_ns, now_ns + lead_ns(0, save_ns)))

    def warned(self, lease: LeaseId) -> None:
        """Its time runs out: the guests that are parked under it were set going to save, and leave."""
        live = self._fence.get(lease)
        if lease in self._under and live is not None:
            self._leaving.setdefault(lease, live.deadline_ns)

    def empty(self) -> list[tuple[FenceEntry, EndReason, str]]:
        """Live parking leases whose guests were seen there and are gone, and how each ends by that."""
        found = []
        for under, was_seen in tuple(self._under.items()):
            live = self._fence.get(under)
            if live is not None and self._hardware.parked(under):
                self._under[under] = True
                continue
            if live is not None and was_seen:
                found.append((live, *self._why_empty(live)))
            elif live is not None and self._teardowns.are_parking(under):
                continue
            del self._under[under]  # none came, which the office hears with the end of the other lease; or it is over
            self._leaving.pop(under, None)
        return found

    def _why_empty(self, live: FenceEntry) -> tuple[EndReason, str]:
        until_ns = self._leaving.get(live.lease)
        if until_ns is None:
            return EndReason.GUEST_FAILED, "what was parked under it is gone"
        if until_ns < live.deadline_ns:  # its time did not run out, so it does not end as if it had
            detail = "what was parked under it had been told to save and leave before it was renewed, and has left"
            return EndReason.GUEST_FAILED, detail
        return EndReason.EXPIRED, "its time ran out, and what was parked under it left before"

    # ---- 4: resume ----

    def why_not_admitted(self, order: Grant, deadline_ns: int, now_ns: int) -> tuple[EndReason, str] | None:
        """Why a grant that speaks of parked guests is not held; None if it is."""
        if order.parked and not self._hardware.parked(order.lease):
            return EndReason.NODE_LOST, "what was parked under it is gone"
        if order.resume is not None and deadline_ns <= now_ns:
            return EndReason.EXPIRED, "its time ran out before the order arrived"
        if order.resume is not None and (refused := self._why_not_resumed(order.resume, now_ns)):
            return EndReason.REFUSED, refused
        return None

    def _why_not_resumed(self, under: Parking, now_ns: int) -> str:
        live = self._fence.get(under.lease)
        if live is None or live.deadline_ns <= now_ns:
            return f"the parking lease {under.lease} is over"
        if live.epoch != under.epoch:
            return f"epoch {under.epoch} of the parking lease {under.lease} is old; {live.epoch} is live"
        if not self._hardware.parked(under.lease):
            return f"nothing is parked under {under.lease}"
        if under.lease in self._leaving:
            return f"the time of the parking lease {under.lease} runs out: what was parked there saves, and leaves"
        return ""
