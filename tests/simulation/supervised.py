"""What must hold of an office and its supervisor, whichever of the two is away.

A part of the onlooker (``watch``), with an account of its own: what was ordered, what was said to be held, and what lay
on the hardware when a supervisor died.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sublet.lease.fence import is_exclusive
from sublet.values import Epoch, LeaseId, ResourceId
from sublet.wire.orders import Extend, Grant, Held, Order
from tests.simulation.node import OUTLIVES_NS

if TYPE_CHECKING:
    from sublet.lease.fence import FenceEntry
    from sublet.testing.machine import Resident
    from tests.simulation.node import NodeProcess

_S: Final = 1_000_000_000


class SupervisedRules:
    """One machine's."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        self._until_ns: dict[LeaseId, int] = {}
        """The latest deadline that was ever ordered."""
        self._held: dict[LeaseId, tuple[Epoch, int]] = {}
        """What was last said to be held, and until when."""
        self._unlooked: set[tuple[ResourceId, LeaseId, Epoch]] = set()
        """What a dead supervisor left, and its successor has not seen to be gone."""

    def ordered(self, order: Order) -> None:
        """An order arrives."""
        if isinstance(order, Grant | Extend):
            self._until_ns[order.lease] = max(order.deadline_ns, self._until_ns.get(order.lease, 0))

    def held(self, node: NodeProcess, report: Held) -> None:
        """The supervisor says that an order is in force. What its predecessor left must be gone from there by now."""
        live = node.agent.fence.get(report.lease)
        if live is None or live.epoch != report.epoch:
            return
        if not report.told:
            self._held[report.lease] = (live.epoch, live.deadline_ns)
        self.moved(node)
        for left in node.machine.leftovers() if self._unlooked else ():
            if (left.part.resource, left.lease, left.epoch) in self._unlooked:
                self._fail_if_in_the_way(left, live)

    def moved(self, node: NodeProcess) -> None:
        """The supervisor did what was due: what is gone by now was seen to."""
        if self._unlooked:
            there = node.machine.leftovers()
            self._unlooked &= {(left.part.resource, left.lease, left.epoch) for left in there}

    def _fail_if_in_the_way(self, left: Resident, live: FenceEntry) -> None:
        for part in live.parts:
            alone = left.lease == live.lease or is_exclusive(left.part) or is_exclusive(part)
            if left.part.resource == part.resource and alone:
                who = f"{left.lease}, which a dead supervisor left there"
                self._fail("L4", f"{part.resource} was given to {live.lease} before anybody had cleared away {who}")

    def promised(self, lease: LeaseId, epoch: Epoch, deadline_ns: int) -> None:
        """An answer goes out that promises this deadline."""
        held_epoch, held_ns = self._held.get(lease, (Epoch(0, 0), 0))
        if held_epoch < epoch or held_ns < deadline_ns:  # a newer epoch: a process attached in the same moment
            short_s = (deadline_ns - held_ns) / _S
            self._fail("L6", f"{lease} was promised {short_s:.1f} s more than any supervisor had said to hold")

    def died(self, node: NodeProcess, *, reboot: bool) -> None:
        """Its guests are dead with it, or cannot be ended; what they had in memory lies there."""
        if reboot:  # of the hardware as well, and all instants are others
            self._unlooked.clear()
            self._held.clear()
            self._until_ns.clear()
            return
        self._unlooked |= {(left.part.resource, left.lease, left.epoch) for left in node.machine.leftovers()}

    def look(self, node: NodeProcess) -> None:
        """No guest outlives its deadline, whether or not an office is there."""
        if node.world.now - node.paused_until <= OUTLIVES_NS:
            return
        now_ns = node.clock.now_ns()
        for device in node.machine.inventory.devices:
            for guest in node.machine.residents(device.id):
                over_ns = now_ns - self._until_ns.get(guest.lease, now_ns)
                if over_ns > OUTLIVES_NS and not node.may_be_late(device.id, guest.lease):
                    self._fail(
                        "L5", f"a guest of {guest.lease} is on {device.id} {over_ns / _S:.1f} s after its deadline"
                    )
