"""What must hold of guests that are taken off their device and live on (P1 to P4).

A part of the onlooker (``watch``). It compares what is on the hardware with what the agent's fence lets through, and
what holders were told with what they get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.errors import InvalidRequest, NotFound, SubletError
from sublet.lease.fence import FenceEntry
from sublet.lease.states import LIVE_STATES
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Outcome
from sublet.values import Epoch, LeaseId, Way
from sublet.wire.orders import End, Order, Parking, Resumed

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from tests.simulation.node import NodeProcess
    from tests.simulation.world import World


class ParkedRules:
    """One world's."""

    def __init__(self, fail: Callable[[str, str], None], world: World) -> None:
        self._fail = fail
        self._world = world
        self._holding: dict[LeaseId, Epoch] = {}
        """Parking leases of which the office durably said that they hold guests."""
        self._told: set[LeaseId] = set()
        self._lay: dict[str, frozenset[LeaseId]] = {}
        """By node: under which leases guests lay parked when it was looked last."""
        self._went_on: dict[LeaseId, LeaseId] = {}
        """Parking lease → who went on with what was there."""

    # ---- the office ----

    def told(self, parked: Parking) -> None:
        """A holder hears where its guests are."""
        self._told.add(parked.lease)

    def decided(self, state: State, command: cmd.Command, outcome: Outcome) -> None:
        """The ledger has handled a command."""
        seen = self._world.coverage.seen
        for event in outcome.events:
            match event:
                case ev.Parked():
                    seen["parked"] += 1
                    self._holding[event.lease] = state.leases[event.lease].epoch or Epoch(0, 0)
                case ev.Resumed():
                    seen["resumed"] += 1
                case ev.Ending() if event.end.way is Way.NOT_SAVED:
                    seen["not saved"] += 1
                case ev.ParkingDenied():
                    seen["parking denied"] += 1
                case ev.Ended() | ev.Ending():
                    self._holding.pop(event.lease, None)
                case _:
                    pass
        if isinstance(command, cmd.Acquire) and command.resume is not None:
            self._asked(state, command, outcome)

    def _asked(self, state: State, command: cmd.Acquire, outcome: Outcome) -> None:
        """P2: no old epoch is let in. P3: what is there is found by a holder that was told of it."""
        assert command.resume is not None
        under = state.leases.get(command.resume)
        new = state.leases.get(command.lease)
        asked = command.resume_epoch
        is_in = new is not None and any(isinstance(event, ev.Queued) for event in outcome.events)
        if is_in and under is not None and under.epoch is not None and asked is not None and asked < under.epoch:
            self._fail("P2", f"{command.lease} may go on with {under.id} by epoch {asked}; {under.epoch} is live")
        refused = isinstance(outcome.answer, InvalidRequest | NotFound)
        if under is not None and under.tenant != command.tenant:
            return  # it is not the holder that was told of it
        there = under is not None and under.status in LIVE_STATES
        if refused and command.resume in self._holding and (there or under is None):
            taken = under is not None and under.parks is not None and under.parks.resumed_by is not None
            if not taken:
                self._fail("P3", f"{command.resume} holds guests, and its holder was told: {_said(outcome.answer)}")

    def recovered(self, state: State) -> None:
        """The journal was folded. What held guests still does, or has ended since."""
        for lease_id in tuple(self._holding):
            lease = state.leases.get(lease_id)
            if lease is None or (lease.status in LIVE_STATES and (lease.parks is None or not lease.parks.holds)):
                if not self._is_durable(lease_id):  # it was decided, and the office died before it told of it
                    self._holding.pop(lease_id)
                    continue
                self._fail("P3", f"{lease_id} held parked guests, and after a restart the office does not know it")

    def _is_durable(self, under: LeaseId) -> bool:
        told = self._world.office.disk.told()
        return any(isinstance(event, ev.Parked) and event.lease == under for _, events in told for event in events)

    def restored(self) -> None:
        """What happened since the backup is not known to the office."""
        self._holding.clear()

    # ---- the hardware ----

    def look(self, node: NodeProcess) -> None:
        """P1, after each step of an agent."""
        agent = node.agent
        self._lay[node.name] = frozenset(node.machine.all_parked())
        for under, guests in node.machine.all_parked().items():
            leaving = {down.lease for down in agent.teardowns()}
            if agent.fence.get(under) is None and under not in leaving:
                self._fail("P1", f"{node.name}: what is parked under {under} has no lease, and nobody ends it")
            for guest in guests:
                live = agent.fence.get(guest.lease)
                if live is not None and live.epoch == guest.epoch:
                    self._fail("P1", f"{node.name}: {guest.lease} is live, and its guest is parked under {under}")

            if agent.is_expiring(under) and under not in node.machine.set_going:
                self._fail("P4", f"{node.name}: {under} runs out, and what is parked there stands still")

    def ordered(self, node: NodeProcess, order: Order, before: FenceEntry | None) -> None:
        """P4, of an order that was obeyed. ``before``: what the agent had of its lease."""
        if not isinstance(order, End) or before is None or node.agent.fence.get(order.lease) is not None:
            return
        had_time = order.grace_ns > 0 and node.clock.now_ns() < before.deadline_ns
        if had_time and order.lease in self._lay.get(node.name, ()) and order.lease not in node.machine.set_going:
            self._fail("P4", f"{node.name}: {order.lease} ended with a grace, and what was parked there could not save")

    def acted(self, node: NodeProcess, lease: LeaseId, epoch: Epoch) -> None:
        """P1: an effect was let through."""
        for under, guests in node.machine.all_parked().items():
            if any(guest.lease == lease and guest.epoch == epoch for guest in guests):
                self._fail("P1", f"{node.name}: {lease} acted by epoch {epoch} while it was parked under {under}")
            if under == lease:
                self._fail("P1", f"{node.name}: the parked guests of {under} acted")

    def resumed(self, node: NodeProcess, report: Resumed) -> None:
        """P2: one lease goes on, and the parking lease is over."""
        under = report.under.lease
        first = self._went_on.setdefault(under, report.lease)
        if first != report.lease:
            self._fail("P2", f"{under} was handed on twice, to {first} and to {report.lease}")
        if node.agent.fence.get(under) is not None or node.machine.parked(under):
            self._fail("P2", f"{node.name}: what was parked under {under} is there and under {report.lease}")


def _said(answer: object) -> str:
    return str(answer) if isinstance(answer, SubletError) else type(answer).__name__
