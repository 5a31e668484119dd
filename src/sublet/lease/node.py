"""The rules of a node: the effect of each order, what it does on its own, and what it reports.

It enforces deadlines, fences, tears down step by step and looks before it says ``TornDown``; it repeats what it has to
say until it sees that it was heard. It knows no process and no device: what it decides is carried out by a
``Hardware``, real or pretended, and time is handed in. Its tables live as long as it does. A new one accepts nothing,
clears away what it finds, and the office sends the grants of its journal again.

Three reports, three acknowledgements. ``Held`` needs none: the office repeats the order. ``EndedHere`` (and also
``Resumed``) is repeated, at growing intervals, until an ``End`` for that epoch arrives. ``TornDown`` and ``Failed``
answer an ``End`` or a ``Verify`` and are given again each time that order comes.

A lease may also end by its guests being *parked* (``End.park``), and another begin by going on with them
(``Grant.resume``): see ``parking``. At no moment are they under two leases, or under none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, assert_never

from sublet.lease.expiring import Expiring
from sublet.lease.fence import FenceEntry, FenceTable, is_exclusive, same_hardware
from sublet.lease.hardware import Hardware
from sublet.lease.node_volumes import NodeVolumes
from sublet.lease.parking import ParkingLot
from sublet.lease.retransmit import Repeats
from sublet.lease.teardown import Bounds, Teardown
from sublet.lease.teardowns import Teardowns
from sublet.lease_end import EndReason
from sublet.values import (
    NS_PER_S,
    Epoch,
    Kind,
    LeaseId,
    NodeId,
    ResourceId,
    TenantId,
)
from sublet.wire.orders import (
    End,
    EndedHere,
    Extend,
    Fault,
    Grant,
    Held,
    Inventory,
    NotHeld,
    Notify,
    Order,
    Parking,
    Part,
    RemoveVolume,
    Report,
    Resumed,
    Verify,
)

UNANSWERED_KEPT_NS: Final = 3600 * NS_PER_S
"""An office that said nothing about a lease for this long does not know it: it was restored from an older backup."""


class Node:
    """Keeps every rule of one node, over hardware that obeys."""

    def __init__(
        self,
        inventory: Inventory,
        hardware: Hardware,
        *,
        report: Callable[[Report], None],
        same_clock: bool = True,
        bounds: Bounds | None = None,
    ) -> None:
        """``report`` may be called from inside any method, so it must only queue. ``same_clock`` says that the office's
        instants are this node's too (one machine, one boot): deadlines are then taken as they are; otherwise what
        remains is counted from the arrival of the order.
        """
        self.inventory = inventory
        self.fence = FenceTable()
        self.refused_orders = 0
        """Orders of an older incarnation of the office, which were not obeyed."""
        self.incarnation = 0
        """The newest incarnation of the office that it has met."""
        self._hardware = hardware
        self._capacity = {device.id: device.capacity for device in inventory.devices}
        self._report = report
        self._same_clock = same_clock
        self._tenants: dict[LeaseId, TenantId] = {}
        self._names: dict[LeaseId, str] = {}
        self._notices: dict[LeaseId, Notify] = {}
        self._waiting: dict[LeaseId, Grant] = {}
        self._expiring = Expiring()
        self._ended_here: Repeats[LeaseId] = Repeats()
        self._faulted: Repeats[ResourceId] = Repeats()
        self._teardowns = Teardowns(
            self.name, hardware, bounds if bounds is not None else Bounds(), report, self._ended_here.may_be_answered
        )
        self._parking = ParkingLot(self.name, hardware, self.fence, self._teardowns)
        self.shelf = NodeVolumes(self.name, hardware, report, self.fence, self._tenants, self._names)
        # A previous agent may have left guests, or their memory. The office need not know of them (it may be a
        # restored one), so nothing is granted on their resources before they are cleared away.
        for left in hardware.leftovers():
            self._teardowns.begin(left.lease, left.epoch, left.part, grace_until_ns=0, ordered=False)

    # ---- what is called ----

    @property
    def name(self) -> NodeId:
        """Which node this is; every report names it."""
        return self.inventory.node

    def send(self, order: Order, *, now_ns: int, incarnation: int | None = None) -> None:
        """Take an order, as ``AgentPort.send`` has it. ``tick`` says afterwards when there is more to do."""
        if incarnation is not None:
            if incarnation < self.incarnation:
                self.refused_orders += 1
                return
            if incarnation > self.incarnation:
                self.incarnation = incarnation
                self._teardowns.resend_all()
                self.shelf.forget_removals()
        self._end_expired(now_ns)  # first: nothing is extended after its deadline
        match order:
            case Grant():
                self._grant(order, now_ns)
            case Extend():
                self._extend(order, now_ns)
            case Notify():
                self._notify(order, now_ns)
            case End():
                self._end(order, now_ns)
            case Verify():
                self._verify(order, now_ns)
            case RemoveVolume():
                self.shelf.remove(order, now_ns)
            case _:
                assert_never(order)
        self._take_waiting(now_ns)

    def tick(self, now_ns: int) -> int | None:
        """Do what is due: deadlines, warnings, the next step of a teardown, reports to repeat. Returns the next instant
        at which there is something to do; None if nothing is waiting. Calling it early is harmless, late is late.
        """
        self._end_expired(now_ns)
        self._warn_who_expires(now_ns)
        self._check_devices(now_ns)
        self._teardowns.advance(self._teardowns, now_ns)
        for live, reason, detail in self._parking.empty():
            self._end_here(live, reason, detail, now_ns)
        self.shelf.advance(now_ns)
        self._take_waiting(now_ns)
        self._repeat(now_ns)
        return self._next_wake_ns(now_ns)

    def hardware_changed(self, now_ns: int, *leases: LeaseId) -> int | None:
        """The hardware has changed (guests of these leases are gone; none named: anything): what waited for that goes
        on at once, not when its next step is due. Returns what ``tick`` returns.
        """
        self._teardowns.hardware_changed(leases, now_ns)
        return self.tick(now_ns)

    def check(self, lease: LeaseId, epoch: Epoch, now_ns: int) -> FenceEntry:
        """May an effect of this (lease, epoch) happen now? To be asked by whatever is about to touch the hardware.

        Returns only for a live pair before its deadline. Otherwise raises ``StaleEpoch`` (another epoch is live),
        ``LeaseExpired``, ``LeaseRevoked`` or ``LeaseNotActive`` (over, or never known here). Between the deadline and
        the next ``tick`` the answer is already no.
        """
        return self.fence.check(lease, epoch, now_ns)

    def is_pending(self, lease: LeaseId, epoch: Epoch) -> bool:
        """Whether the pair was granted and is not live yet, because what was there before is still being cleared."""
        waiting = self._waiting.get(lease)
        return waiting is not None and waiting.epoch == epoch

    def saved(self, lease: LeaseId, save_ns: int) -> None:
        """The last save of this lease took so long: from its next extension on it is warned that much earlier."""
        self._expiring.saved(lease, save_ns)
        self._parking.saved(lease)

    def inventory_changed(self, inventory: Inventory) -> None:
        """The same node has other devices now, or more or less of one. Leases that are live stay; that one of their
        devices is gone is said by ``Hardware.fault`` before it leaves the inventory."""
        capacity = {device.id: device.capacity for device in inventory.devices}
        for resource in self._capacity.keys() - capacity.keys():
            self._faulted.stop(resource)
        self.inventory, self._capacity = inventory, capacity

    def resend_reports(self, now_ns: int) -> None:
        """An office has come that may not have heard: what is still true is said again at the next ``tick``."""
        self._ended_here.again(now_ns)
        self._faulted.again(now_ns)
        self._parking.resend_reports(now_ns)
        self.shelf.report_all(now_ns)

    def counted(self, now_ns: int) -> None:
        """It is known anew what guests have on devices: what it takes to park them is said at the next ``tick``."""
        self._parking.counted(now_ns)

    # ---- what can be seen ----

    @property
    def tenants(self) -> Mapping[LeaseId, TenantId]:
        """Whose the live leases are."""
        return MappingProxyType(self._tenants)

    @property
    def names(self) -> Mapping[LeaseId, str]:
        """What the live leases are called, as far as they have a name."""
        return MappingProxyType(self._names)

    @property
    def notices(self) -> Mapping[LeaseId, Notify]:
        """What the office has announced, and not taken back."""
        return MappingProxyType(self._notices)

    def is_expiring(self, lease: LeaseId) -> bool:
        """Whether it was warned that its deadline is near, and is not spared yet."""
        return lease in self._expiring

    def teardowns(self) -> tuple[Teardown, ...]:
        """What is being taken off the hardware, or could not be."""
        return tuple(self._teardowns)

    # ---- orders ----

    def _grant(self, order: Grant, now_ns: int) -> None:
        live, waiting = self.fence.get(order.lease), self._waiting.get(order.lease)
        came = waiting is not None and waiting.epoch == order.epoch
        if order.lease in self._ended_here or self.fence.is_over(order.lease, order.epoch, order.parts, came=came):
            self._answer(order, held=False)
        elif live is not None and live.epoch < order.epoch and not same_hardware(live.parts, order.parts):
            # An office that was restored gave the name anew, to other hardware. What runs is on the old one, and the
            # new one may be taken: neither goes on under this name.
            self._end_here(live, EndReason.OPERATOR, "the office gave its name to other hardware", now_ns)
            self._answer(order, held=False, detail="an older lease of this name is on other hardware")
        elif live is not None:
            self._admit(order, now_ns)
        elif (broken := next((p.resource for p in order.parts if p.resource in self._faulted), None)) is not None:
            self._answer(order, held=False, detail=f"{broken} reported an error")
        elif (dirty := self._teardowns.failed_in_the_way(order.parts, order.epoch)) is not None:
            self._answer(order, held=False, detail=dirty.detail)
        else:
            self._waiting[order.lease] = order
            self._evict_older(order, now_ns)

    def _evict_older(self, order: Grant, now_ns: int) -> None:
        """An older lease on an exclusive part is one that the office forgot, as after a restore: the newer grant wins,
        but gets the hardware only when the older one is verified to be off it."""
        for part in order.parts:
            if part.kind is not Kind.GPU:  # only devices are ever exclusive, and cores may have very many leases
                continue
            for lease in tuple((self.fence.on if is_exclusive(part) else self.fence.exclusive_on)(part.resource)):
                live = self.fence.get(lease)
                if live is not None and live.epoch < order.epoch:
                    self._end_here(live, EndReason.OPERATOR, "the office gave its hardware to a newer lease", now_ns)
        for live in self.shelf.older(order):
            self._end_here(live, EndReason.OPERATOR, "the office gave its volume to a newer lease", now_ns)

    def _take_waiting(self, now_ns: int) -> None:
        for order in tuple(self._waiting.values()):
            if self.fence.is_over(order.lease, order.epoch, order.parts, came=True):
                del self._waiting[order.lease]
                self._answer(order, held=False)
            elif not self._is_blocked(order):
                del self._waiting[order.lease]
                self._admit(order, now_ns)

    def _is_blocked(self, order: Grant) -> bool:
        return self.shelf.in_the_way(order, self._teardowns) or any(
            in_the_way(self.fence, self._teardowns, order.lease, part, self._capacity.get(part.resource, 0))
            for part in order.parts
        )

    def _admit(self, order: Grant, now_ns: int) -> None:
        before, deadline_ns = self.fence.get(order.lease), self._deadline_ns(order, now_ns)
        goes_on = order.resume if before is None else None
        gone = before is None and (
            self._parking.why_not_admitted(order, deadline_ns, now_ns) or self.shelf.why_not_admitted(order)
        )
        if gone:
            self._answer(order, held=False, reason=gone[0], detail=gone[1])
            return
        self.fence.admit(order.lease, order.epoch, (self.incarnation, order.number), deadline_ns, order.parts)
        self._tenants[order.lease] = order.tenant
        if order.name:
            self._names[order.lease] = order.name
        self._now_in_force(before, order, now_ns)
        if goes_on is not None:
            self._resume(goes_on, order, now_ns)
        self._answer(order, held=True)

    def _resume(self, under: Parking, order: Grant, now_ns: int) -> None:
        gone = self.fence.end(under.lease, under.epoch, (), EndReason.RELEASED)
        self._forget_lease(under.lease)
        self._hardware.resume(under, order.lease, order.epoch)
        for part in gone.parts if gone is not None else ():
            self._teardowns.begin(under.lease, under.epoch, part, grace_until_ns=now_ns, ordered=False)
        report = Resumed(node=self.name, lease=order.lease, epoch=order.epoch, under=under)
        self._ended_here.repeat(under.lease, report, now_ns, for_ns=UNANSWERED_KEPT_NS)

    def _extend(self, order: Extend, now_ns: int) -> None:
        before = self.fence.get(order.lease)
        number, deadline_ns = (self.incarnation, order.number), self._deadline_ns(order, now_ns)
        if self.fence.extend(order.lease, order.epoch, number, deadline_ns):
            self._now_in_force(before, order, now_ns)
            self._answer(order, held=True)
        elif not self._never_seen(order):
            self._answer(order, held=False)

    def _now_in_force(self, before: FenceEntry | None, order: Grant | Extend, now_ns: int) -> None:
        """Tell the hardware what the order has changed, if anything: it may be a copy, or older than another."""
        live = self.fence.get(order.lease)
        if live is None or live is before:
            return
        if before is None or (before.epoch, before.parts) != (live.epoch, live.parts):
            self._hardware.grant(live.lease, self._tenants[live.lease], live.epoch, live.parts, live.deadline_ns)
        else:
            self._hardware.extend(live.lease, live.epoch, live.deadline_ns)
        heeded_ns = order.lead_ns if isinstance(order, Extend) else 0
        if self._expiring.moved(live.lease, live.deadline_ns, order.ttl_ns, now_ns, heeded_ns=heeded_ns):
            self._hardware.cancel_warning(live.lease, live.epoch)
        if not self._expiring.is_requested(live.lease):
            self._parking.extended(live.lease)

    def _notify(self, order: Notify, now_ns: int) -> None:
        news = self.fence.notify(order.lease, order.epoch, (self.incarnation, order.number))
        if news and order.take_at_ns is not None:
            self._notices[order.lease] = order
            self._hardware.notice(order.lease, order)
            self._parking.noticed(order, now_ns)
        elif news and self._notices.pop(order.lease, None) is not None:
            self._hardware.notice(order.lease, None)
            self._parking.cancel(order.lease)
        if news is not None:
            self._answer(order, held=True)
        elif not self._never_seen(order):
            self._answer(order, held=False)

    def _never_seen(self, order: Extend | Notify) -> bool:
        """As after a restart: not refused, only not answered until the grant comes again."""
        return (
            order.lease not in self._ended_here
            and self.fence.get(order.lease) is None
            and not self.fence.is_over(order.lease, order.epoch, ())
        )

    def _end(self, order: End, now_ns: int) -> None:
        waiting = self._waiting.get(order.lease)
        if waiting is not None and waiting.epoch <= order.epoch:
            del self._waiting[order.lease]
        live, epoch = self.fence.get(order.lease), order.epoch
        if live is not None and live.epoch.incarnation < self.incarnation:
            epoch = max(epoch, live.epoch)  # a restored office ends what it knew; what was granted since is over too
        gone = self.fence.end(order.lease, epoch, order.parts, order.reason)
        self._ended_here.stop(order.lease)
        save_ns = self._expiring.save_ns(order.lease)
        self._forget_lease(order.lease)
        until_ns = self._parking.time_to_save(live, now_ns + order.grace_ns, save_ns, now_ns)
        is_new = self._begin_end(order, epoch, gone, until_ns)
        if is_new and not self._parking.park(order.lease, epoch, order.park, until_ns, now_ns):
            self._hardware.announce_end(order.lease, epoch, order.reason, until_ns, order.detail, now_ns)
        elif is_new and order.park is not None:  # what is parked has as much to save as it had before
            self._expiring.inherit(order.park.lease, save_ns, now_ns)
        self._teardowns.advance(self._teardowns.of(order.lease, order.parts), now_ns)

    def _begin_end(self, order: End, epoch: Epoch, gone: FenceEntry | None, until_ns: int) -> bool:
        """Take the lease off the parts that the office names, and off those it had here; whether anything is new."""
        lease, is_new = order.lease, False
        for part in order.parts:
            is_new |= self._teardowns.begin(lease, epoch, part, grace_until_ns=until_ns, ordered=True, end=order)
        for part in gone.parts if gone is not None else ():
            if self._teardowns.get(lease, part.resource) is None:
                is_new |= self._teardowns.begin(lease, epoch, part, grace_until_ns=until_ns, ordered=False)
        return is_new

    def _verify(self, order: Verify, now_ns: int) -> None:
        if order.vouched:
            self._teardowns.vouched(order)
            return
        for part in order.parts:
            self._teardowns.verify_again(order.lease, order.epoch, part, now_ns)
        self._teardowns.advance(self._teardowns.of(order.lease, order.parts), now_ns)

    # ---- what it does by itself ----

    def _end_expired(self, now_ns: int) -> None:
        for live in self.fence.due(now_ns):
            self._end_here(live, EndReason.EXPIRED, "its deadline came", now_ns)

    def _end_here(self, live: FenceEntry, reason: EndReason, detail: str, now_ns: int) -> None:
        """At once and without grace: nothing outlives its promise."""
        volume = self.shelf.of(live)
        self.fence.end(live.lease, live.epoch, live.parts, reason)
        self._forget_lease(live.lease)
        for part in live.parts:
            self._teardowns.begin(live.lease, live.epoch, part, grace_until_ns=now_ns, ordered=False, volume=volume)
        self._hardware.announce_end(live.lease, live.epoch, reason, now_ns, detail, now_ns)
        report = EndedHere(node=self.name, lease=live.lease, epoch=live.epoch, reason=reason, detail=detail)
        self._ended_here.repeat(live.lease, report, now_ns, for_ns=UNANSWERED_KEPT_NS)

    def _forget_lease(self, lease: LeaseId) -> None:
        if self.fence.get(lease) is None:
            self._notices.pop(lease, None)
            self._tenants.pop(lease, None)
            self._names.pop(lease, None)
            self._expiring.drop(lease)
            self._parking.cancel(lease)

    def _warn_who_expires(self, now_ns: int) -> None:
        to_park, warned = self._expiring.due(now_ns)
        for lease in to_park:
            self._parking.runs_out(lease, now_ns)
        for lease in warned:
            live = self.fence.get(lease)
            if live is not None:
                self._hardware.warn(lease, live.epoch, live.deadline_ns)
                self._parking.warned(lease)

    def _check_devices(self, now_ns: int) -> None:
        for resource in self._capacity:
            wrong = self._hardware.fault(resource)
            if wrong is None:
                self._faulted.stop(resource)
            elif resource not in self._faulted:
                self._faulted.repeat(resource, Fault(node=self.name, resource=resource, detail=wrong), now_ns)
                for lease in tuple(self.fence.on(resource)):
                    live = self.fence.get(lease)
                    if live is not None:
                        self._end_here(live, EndReason.DEVICE_LOST, f"{resource}: {wrong}", now_ns)

    def _repeat(self, now_ns: int) -> None:
        self._ended_here.drop_unanswered(now_ns)
        for report in (*self._ended_here.due(now_ns), *self._faulted.due(now_ns), *self._parking.due(now_ns)):
            self._report(report)

    def _next_wake_ns(self, now_ns: int) -> int | None:
        moments = (
            self._teardowns.next_ns(),
            self.fence.next_deadline_ns(),
            self._expiring.next_ns(),
            self._ended_here.next_ns(),
            self._faulted.next_ns(),
            self._parking.next_ns(),
            self.shelf.next_ns(),
        )
        wakes = [at_ns for at_ns in moments if at_ns is not None]
        return max(min(wakes), now_ns + 1) if wakes else None

    # ---- small helpers ----

    def _deadline_ns(self, order: Grant | Extend, now_ns: int) -> int:
        return order.deadline_ns if self._same_clock else now_ns + order.ttl_ns

    def _answer(
        self,
        order: Grant | Extend | Notify,
        *,
        held: bool,
        detail: str = "this lease is over here",
        reason: EndReason = EndReason.NODE_LOST,
    ) -> None:
        name, lease, epoch, number = self.name, order.lease, order.epoch, order.number
        if held:
            is_notice, save_ns = isinstance(order, Notify), self._expiring.save_ns(lease)
            self._report(Held(node=name, lease=lease, epoch=epoch, number=number, told=is_notice, save_ns=save_ns))
        else:
            report = NotHeld(node=name, lease=lease, epoch=epoch, number=number, detail=detail, reason=reason)
            self._report(report)


# ---- What stands in the way of a grant: what is still on its resource, or not yet verified to be off it. Pure


def in_the_way(fence: FenceTable, teardowns: Teardowns, lease: LeaseId, part: Part, capacity: int) -> bool:
    """Whether this lease has to wait before it may have this part."""
    own = teardowns.get(lease, part.resource)
    if own is not None and own.holds(part.resource):
        return True  # what it had before a restart is being cleared away
    leaving = teardowns.leaving(part.resource)
    present = fence.on(part.resource)
    if is_exclusive(part):
        return bool(leaving or present)
    if part.kind is Kind.GPU and (fence.exclusive_on(part.resource) or any(map(is_exclusive, leaving))):
        return True
    in_use = fence.in_use(part.resource) + sum(other.amount for other in leaving)
    return in_use + part.amount > capacity
