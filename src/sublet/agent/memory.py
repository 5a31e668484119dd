"""An agent whose hardware is pretended and whose rules are real.

It is what an office runs until guests are real processes, and what users test with (``sublet.testing``). It enforces
deadlines by its own clock, fences, tears down step by step and looks before it says ``TornDown``; it repeats what it
has to say until it sees that it was heard. After a restart its tables are empty and nothing is accepted; the office
sends the grants of its journal again.

Three reports, three acknowledgements. ``Held`` needs none: the office repeats the order. ``EndedHere`` is repeated, at
growing intervals, until an ``End`` for that epoch arrives. ``TornDown`` and ``Failed`` answer an ``End`` or a
``Verify`` and are given again each time that order comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, assert_never

from sublet.agent.fence import FenceTable, Live, is_exclusive
from sublet.agent.machine import FaultName, Faults, Machine
from sublet.agent.port import ReportSink
from sublet.agent.repeats import Repeats
from sublet.agent.teardown import Phase, Teardown, Timings
from sublet.clock import Clock
from sublet.values import NS_PER_S, EndReason, Epoch, Kind, LeaseId, NodeId, ResourceId, TenantId
from sublet.wire.orders import (
    End,
    EndedHere,
    Extend,
    Failed,
    Fault,
    Grant,
    Held,
    Inventory,
    NotHeld,
    Notify,
    Order,
    Part,
    Report,
    TornDown,
    Verify,
)

__all__ = ["MemoryAgent"]

UNHEARD_KEPT_NS: Final = 3600 * NS_PER_S
"""An office that said nothing about a lease for this long does not know it: it was restored from an older backup."""


class MemoryAgent:
    """Keeps every rule of an agent for one node of pretended hardware (see ``AgentPort`` for the contract)."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        report: ReportSink,
        clock: Clock,
        same_clock: bool = True,
        timings: Timings | None = None,
        faults: Faults | None = None,
        machine: Machine | None = None,
    ) -> None:
        """``same_clock`` says that the office's instants are this agent's too (one machine, one boot): deadlines are
        then taken as they are; otherwise what remains is counted from the arrival of the order.
        """
        self.faults = faults if faults is not None else Faults()
        self.machine = machine if machine is not None else Machine(inventory)
        self._inventory = inventory
        self._capacity = {device.id: device.capacity for device in inventory.devices}
        self._sink = report
        self._clock = clock
        self._same_clock = same_clock
        self._timings = timings if timings is not None else Timings()
        self._forget()

    # ---- the port ----

    @property
    def node(self) -> NodeId:
        return self._inventory.node

    def inventory(self) -> Inventory:
        return self._inventory

    def send(self, order: Order, *, incarnation: int | None = None) -> None:
        now_ns = self._clock.now_ns()
        self._lose_memory_if_told()
        if incarnation is not None:
            if incarnation < self.incarnation:
                self.refused_orders += 1
                return
            if incarnation > self.incarnation:
                self._meet_office(incarnation)
        self._end_what_is_due(now_ns)  # first: nothing is extended after its deadline
        match order:
            case Grant():
                self._grant(order, now_ns)
            case Extend():
                self._extend(order, now_ns)
            case Notify():
                self._notify(order)
            case End():
                self._end(order, now_ns)
            case Verify():
                self._verify(order, now_ns)
            case _:
                assert_never(order)
        self._take_waiting(now_ns)

    def tick(self, now_ns: int) -> int | None:
        self._lose_memory_if_told()
        self._end_what_is_due(now_ns)
        self._look_at_devices(now_ns)
        self._advance(tuple(self._teardowns.values()), now_ns)
        self._take_waiting(now_ns)
        self._repeat(now_ns)
        return self._next_wake_ns(now_ns)

    def check(self, lease: LeaseId, epoch: Epoch, now_ns: int) -> None:
        self.fence.check(lease, epoch, now_ns)

    # ---- for those who pretend to be guests, and for tests ----

    def touch(self, lease: LeaseId, epoch: Epoch) -> None:
        """Do something on the lease's hardware, as a guest would: refused as ``check`` refuses, else on record."""
        now_ns = self._clock.now_ns()
        live = self.fence.check(lease, epoch, now_ns)
        self.machine.touch(lease, self._tenants[lease], epoch, live.parts, now_ns)

    def notice(self, lease: LeaseId) -> Notify | None:
        """The notice that guests of this lease see now."""
        return self._notices.get(lease)

    def teardowns(self) -> tuple[Teardown, ...]:
        """What is being taken off the hardware, or could not be."""
        return tuple(self._teardowns.values())

    def restart(self) -> None:
        """The agent dies and comes back: every table is empty, guests are gone unless they cannot be ended."""
        self.machine.agent_died(self.faults)
        self._forget()

    def _forget(self) -> None:
        self.fence = FenceTable()
        self.refused_orders = 0
        """Orders of an older incarnation of the office, which were not obeyed."""
        self.incarnation: int = 0
        """The newest incarnation of the office that it has met."""
        self._tenants: dict[LeaseId, TenantId] = {}
        self._notices: dict[LeaseId, Notify] = {}
        self._waiting: dict[LeaseId, Grant] = {}
        self._teardowns: dict[tuple[LeaseId, ResourceId], Teardown] = {}
        self._ended_here: Repeats[LeaseId] = Repeats()
        self._faulted: Repeats[ResourceId] = Repeats()
        # Whoever watched before may have left guests, or their memory. The office need not know of them (it may be a
        # restored one), so nothing is granted on their resources before they are cleared away.
        for left in self.machine.leftovers():
            self._tear_down(left.lease, left.epoch, left.part, grace_until_ns=0, asked=False)

    def _lose_memory_if_told(self) -> None:
        if self.faults.take(FaultName.AMNESIA):
            self.restart()

    # ---- orders ----

    def _grant(self, order: Grant, now_ns: int) -> None:
        live = self.fence.get(order.lease)
        if order.lease in self._ended_here or self.fence.is_over(order.lease, order.epoch, order.parts):
            self._answer(order, held=False)
        elif live is not None and live.epoch < order.epoch and not _same_hardware(live.parts, order.parts):
            # An office that was restored gave the name anew, to other hardware. What runs is on the old one, and the
            # new one may be taken: neither goes on under this name.
            self._end_here(live, EndReason.OPERATOR, "the office gave its name to other hardware", now_ns)
            self._answer(order, held=False, detail="an older lease of this name is on other hardware")
        elif live is not None:
            self._admit(order, now_ns)
        elif (broken := next((p.resource for p in order.parts if p.resource in self._faulted), None)) is not None:
            self._answer(order, held=False, detail=f"{broken} reported an error")
        elif (dirty := self._given_up(order)) is not None:
            self._answer(order, held=False, detail=dirty.detail)
        else:
            self._waiting[order.lease] = order
            self._push_out_older(order, now_ns)

    def _given_up(self, order: Grant) -> Teardown | None:
        """A failed teardown in the way of this grant. If the office was told of it, the operator has vouched for the
        resource since, and that clears whatever is not seen to be there still. If not, the end of the refused lease
        will tell it (see ``_take_over_failure``)."""
        wanted = {part.resource for part in order.parts}
        for key, down in tuple(self._teardowns.items()):
            if down.phase is Phase.FAILED and down.part.resource in wanted and down.epoch <= order.epoch:
                if not down.answered or self.machine.is_there(down.part.resource, down.lease, down.epoch):
                    return down
                self.machine.scrub(down.part.resource, down.lease)
                del self._teardowns[key]
        return None

    def _meet_office(self, incarnation: int) -> None:
        """A restored office: it may not know what its predecessor was told."""
        self.incarnation = incarnation
        for down in self._teardowns.values():
            down.asked = down.answered = False

    def _push_out_older(self, order: Grant, now_ns: int) -> None:
        """An older lease on an exclusive part is one that the office forgot, as after a restore: the newer grant wins,
        but gets the hardware only when the older one is verified to be off it."""
        for part in order.parts:
            if part.kind is not Kind.GPU:  # only devices are ever exclusive, and cores may have very many leases
                continue
            for lease, other in tuple(self.fence.on(part.resource).items()):
                live = self.fence.get(lease)
                if live is not None and live.epoch < order.epoch and (is_exclusive(part) or is_exclusive(other)):
                    self._end_here(live, EndReason.OPERATOR, "the office gave its hardware to a newer lease", now_ns)

    def _take_waiting(self, now_ns: int) -> None:
        for order in tuple(self._waiting.values()):
            if self.fence.is_over(order.lease, order.epoch, order.parts):
                del self._waiting[order.lease]
                self._answer(order, held=False)
            elif not any(self._in_the_way(order.lease, part) for part in order.parts):
                del self._waiting[order.lease]
                self._admit(order, now_ns)

    def _in_the_way(self, lease: LeaseId, part: Part) -> bool:
        """Whether somebody is still on the resource, or not yet verified to be off it."""
        own = self._teardowns.get((lease, part.resource))
        if own is not None and own.holds(part.resource):
            return True  # what it had before a restart is being cleared away
        leaving = [down.part for down in self._teardowns.values() if down.holds(part.resource)]
        there = self.fence.on(part.resource)
        if is_exclusive(part):
            return bool(leaving or there)
        if part.kind is Kind.GPU and any(is_exclusive(other) for other in (*leaving, *there.values())):
            return True
        in_use = self.fence.in_use(part.resource) + sum(other.amount for other in leaving)
        return in_use + part.amount > self._capacity.get(part.resource, 0)

    def _admit(self, order: Grant, now_ns: int) -> None:
        number = (self.incarnation, order.number)
        self.fence.admit(order.lease, order.epoch, number, self._deadline_ns(order, now_ns), order.parts)
        self._tenants[order.lease] = order.tenant
        self._answer(order, held=True)

    def _extend(self, order: Extend, now_ns: int) -> None:
        number = (self.incarnation, order.number)
        if self.fence.extend(order.lease, order.epoch, number, self._deadline_ns(order, now_ns)):
            self._answer(order, held=True)
        elif not self._never_seen(order):
            self._answer(order, held=False)

    def _notify(self, order: Notify) -> None:
        news = self.fence.notify(order.lease, order.epoch, (self.incarnation, order.number))
        if news and order.take_at_ns is not None:
            self._notices[order.lease] = order
        elif news:
            self._notices.pop(order.lease, None)
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
        self._let_go(order.lease)
        grace_until_ns = now_ns + order.grace_ns
        for part in order.parts:
            self._tear_down(order.lease, epoch, part, grace_until_ns=grace_until_ns, asked=True)
        for part in gone.parts if gone is not None else ():
            if (order.lease, part.resource) not in self._teardowns:
                self._tear_down(order.lease, epoch, part, grace_until_ns=grace_until_ns, asked=False)
        self._advance(self._of(order), now_ns)

    def _verify(self, order: Verify, now_ns: int) -> None:
        for part in order.parts:
            down = self._teardowns.get((order.lease, part.resource))
            if down is None or down.is_settled:
                epoch = order.epoch if down is None else max(order.epoch, down.epoch)
                self._teardowns.pop((order.lease, part.resource), None)
                self._tear_down(order.lease, epoch, part, grace_until_ns=now_ns, asked=True)
        self._advance(self._of(order), now_ns)

    def _of(self, order: End | Verify) -> list[Teardown]:
        found = (self._teardowns.get((order.lease, part.resource)) for part in order.parts)
        return [down for down in found if down is not None]

    def _tear_down(self, lease: LeaseId, epoch: Epoch, part: Part, *, grace_until_ns: int, asked: bool) -> None:
        down = self._teardowns.get((lease, part.resource))
        if down is None:
            down = Teardown(lease=lease, epoch=epoch, part=part, grace_until_ns=grace_until_ns, asked=asked)
            if asked:
                self._take_over_failure(down)
            self._teardowns[lease, part.resource] = down
        else:  # a restored office may ask by an older epoch; what is said of the newer one holds for it too
            down.epoch = max(down.epoch, epoch)
            down.asked = down.asked or asked
            down.answered = False

    def _take_over_failure(self, down: Teardown) -> None:
        """What an earlier lease left unclean, and this office was never told, is told with the end of this one: of an
        ``End`` alone the agent can be sure that it is repeated until the answer was heard."""
        for other in self._teardowns.values():
            unheard = other.phase is Phase.FAILED and not other.asked
            if unheard and other.lease not in self._ended_here and other.part.resource == down.part.resource:
                other.asked = other.answered = True
                down.fail(f"{other.detail} (left by lease {other.lease})", hard=other.hard)

    # ---- what it does by itself ----

    def _end_what_is_due(self, now_ns: int) -> None:
        for live in self.fence.due(now_ns):
            self._end_here(live, EndReason.EXPIRED, "its deadline came", now_ns)

    def _end_here(self, live: Live, reason: EndReason, detail: str, now_ns: int) -> None:
        """At once and without grace: nothing outlives its promise."""
        self.fence.end(live.lease, live.epoch, live.parts, reason)
        self._let_go(live.lease)
        for part in live.parts:
            self._tear_down(live.lease, live.epoch, part, grace_until_ns=now_ns, asked=False)
        report = EndedHere(node=self.node, lease=live.lease, epoch=live.epoch, reason=reason, detail=detail)
        self._ended_here.say(live.lease, report, now_ns, for_ns=UNHEARD_KEPT_NS)

    def _let_go(self, lease: LeaseId) -> None:
        if self.fence.get(lease) is None:
            self._notices.pop(lease, None)
            self._tenants.pop(lease, None)

    def _look_at_devices(self, now_ns: int) -> None:
        for resource in self._capacity:
            if not self.faults.is_on(FaultName.DEVICE_FAULT, resource):
                self._faulted.stop(resource)
            elif resource not in self._faulted:
                report = Fault(node=self.node, resource=resource, detail="the device reported an error")
                self._faulted.say(resource, report, now_ns)
                for lease in tuple(self.fence.on(resource)):
                    live = self.fence.get(lease)
                    if live is not None:
                        self._end_here(live, EndReason.DEVICE_LOST, f"{resource} reported an error", now_ns)

    def _advance(self, teardowns: Iterable[Teardown], now_ns: int) -> None:
        torn: dict[tuple[LeaseId, Epoch], list[ResourceId]] = {}
        for down in teardowns:
            down.advance(now_ns, self.machine, self.faults, self._timings)
            if down.phase is Phase.CLEAN and not down.asked:
                del self._teardowns[down.lease, down.part.resource]  # if the office asks, it looks again
                continue
            if not (down.is_settled and down.asked) or down.answered:
                continue
            down.answered = True
            resource = down.part.resource
            if down.phase is Phase.CLEAN:
                torn.setdefault((down.lease, down.epoch), []).append(resource)
                del self._teardowns[down.lease, resource]  # asked again, it looks again
            else:
                self._report(
                    Failed(
                        node=self.node,
                        lease=down.lease,
                        epoch=down.epoch,
                        resource=resource,
                        detail=down.detail,
                        hard=down.hard,
                    )
                )
        for (lease, epoch), resources in torn.items():
            self._report(TornDown(node=self.node, lease=lease, epoch=epoch, resources=tuple(resources)))

    def _repeat(self, now_ns: int) -> None:
        self._ended_here.give_up(now_ns)
        for report in (*self._ended_here.due(now_ns), *self._faulted.due(now_ns)):
            self._report(report)

    def _next_wake_ns(self, now_ns: int) -> int | None:
        wakes = [down.due_ns for down in self._teardowns.values()]
        wakes += [self.fence.next_deadline_ns(), self._ended_here.next_ns(), self._faulted.next_ns()]
        wake_ns = min((at_ns for at_ns in wakes if at_ns is not None), default=None)
        return None if wake_ns is None else max(wake_ns, now_ns + 1)

    # ---- small helpers ----

    def _deadline_ns(self, order: Grant | Extend, now_ns: int) -> int:
        return order.deadline_ns if self._same_clock else now_ns + order.ttl_ns

    def _answer(self, order: Grant | Extend | Notify, *, held: bool, detail: str = "this lease is over here") -> None:
        report: Report
        if held:
            report = Held(
                node=self.node,
                lease=order.lease,
                epoch=order.epoch,
                number=order.number,
                told=isinstance(order, Notify),
            )
        else:
            report = NotHeld(node=self.node, lease=order.lease, epoch=order.epoch, number=order.number, detail=detail)
        self._report(report)

    def _report(self, report: Report) -> None:
        if not self.faults.is_on(FaultName.LOST_REPORTS):
            self._sink(report)


def _same_hardware(old: Sequence[Part], new: Sequence[Part]) -> bool:
    return {part.resource for part in old} == {part.resource for part in new}
