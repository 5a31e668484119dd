"""Orders that no agent has confirmed yet.

Kept per lease, in the three senses in which a newer order replaces an older one: what it holds (grant or extension),
what it was told (notice), and what must end (one per epoch, until every slice is verified, quarantined or lost).

An agent that never saw the grant cannot extend it. So as long as a grant is unconfirmed, an extension is sent as a
grant that says everything.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState, VolumeState
from sublet.lease_end import EndReason
from sublet.office.ledger.parking import suspend_ns
from sublet.office.ledger.records import SliceRecord, volume_key
from sublet.office.ledger.state import State
from sublet.office.ledger.step import Step, extend_order, grant_order, notify_order
from sublet.office.ledger.volumes import is_open, is_removed, ref_of, remove_order
from sublet.values import Epoch, LeaseId, NodeId
from sublet.wire import orders
from sublet.wire.orders import Order, Part

STALE_MAX = 256
"""Entries of the heap that may be stale, besides as many as are not."""
_Key = tuple[LeaseId, str]


class Unconfirmed:
    """The list, with the time of the next sending."""

    def __init__(self, state: State, resend_every_ns: int) -> None:
        self._state, self._every_ns = state, resend_every_ns
        self._orders: dict[_Key, Order] = {}
        self._due_at: dict[_Key, int] = {}
        self._due: list[tuple[int, _Key]] = []
        """Entries that ``_due_at`` does not know are stale."""

    def add(self, new: Iterable[Order], now_ns: int) -> tuple[Order, ...]:
        """Note new orders; returns them as they are to be sent now."""
        sent = []
        for order in new:
            if isinstance(order, orders.Extend):
                pending = self._orders.get((order.lease, "hold"))
                if isinstance(pending, orders.Grant) and pending.epoch == order.epoch:
                    order = grant_order(self._state.leases[order.lease], now_ns)
            key = (order.lease, _sense(order))
            if isinstance(order, orders.End):
                self._outdate((order.lease, "hold"), order.epoch)
                self._outdate((order.lease, "told"), order.epoch)
                self._state.saves.pop(order.lease, None)
            if key not in self._orders:
                self._set_due(key, now_ns)
            self._orders[key] = order
            sent.append(order)
        return tuple(sent)

    def confirm(self, report: orders.Held) -> None:
        """The agent holds the deadline, or the notice, up to this number; the one says nothing of the other."""
        key = (report.lease, "told" if report.told else "hold")
        if report.save_ns and not report.told and report.lease in self._state.leases:
            self._state.saves[report.lease] = report.save_ns
        order = self._orders.get(key)
        if order is None or isinstance(order, orders.Verify | orders.RemoveVolume):
            return
        if order.epoch == report.epoch and order.number <= report.number:
            self._strike(key)

    def torn_down(self, report: orders.TornDown) -> None:
        """The agent has done what an ``End`` asks for; with the last of its parts the order is over."""
        key = (report.lease, f"end {report.epoch}")
        order = self._orders.get(key)
        if order is not None and not self._still_needed(order):
            self._strike(key)

    def due(self, now_ns: int) -> tuple[Order, ...]:
        """What to send again now. What has become pointless is struck off."""
        again = []
        while self._due and self._due[0][0] <= now_ns:
            at_ns, key = heapq.heappop(self._due)
            if self._due_at.get(key) != at_ns:
                continue
            if not self._still_needed(self._orders[key]):
                self._strike(key)
                continue
            order = self._orders[key] = self._as_of(self._orders[key], now_ns)
            self._set_due(key, now_ns)
            again.append(order)
        return tuple(again)

    def holds(self, lease: LeaseId) -> bool:
        """Whether the agent has confirmed what was last granted or extended."""
        return (lease, "hold") not in self._orders

    def next_due_ns(self) -> int | None:
        while self._due and self._due_at.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def node_of(self, order: Order) -> NodeId | None:
        if isinstance(order, orders.Extend | orders.Notify):
            lease = self._state.leases.get(order.lease)
            return None if lease is None else lease.node
        return self._state.resources[order.parts[0].resource].node

    def rebuild(self, step: Step) -> None:
        """An agent came (back): order everything that it must know or undo."""
        for lease_id in [lease for leases in self._state.on_node.values() for lease in leases]:
            lease = self._state.leases[lease_id]
            if lease.status in LIVE_STATES:
                step.orders.append(grant_order(lease, step.now.ns))
                if lease.status is LeaseStatus.NOTICED:
                    step.orders.append(notify_order(lease))
        for volume in self._state.volumes.values():
            if volume.state is VolumeState.REMOVING:
                step.orders.append(remove_order(self._state, volume))
        for (lease_id, epoch), parts in self._in_teardown().items():
            known = self._state.leases.get(lease_id)
            end = known.end if known is not None else None
            park = end.resume if end is not None and known is not None and known.epoch == epoch else None
            step.orders.append(
                orders.End(
                    lease=lease_id,
                    epoch=epoch,
                    number=known.number if known is not None else 0,
                    parts=tuple(parts),
                    reason=end.reason if end is not None else EndReason.WITHDRAWN,
                    grace_ns=0 if park is None else suspend_ns(step.state, known, park.lease, step.policy.suspend_ns),
                    detail=end.detail if end is not None else "",
                    park=park,
                    volume=ref_of(self._state, tuple(parts), str(epoch)),
                )
            )

    def _set_due(self, key: _Key, now_ns: int) -> None:
        self._due_at[key] = now_ns + self._every_ns
        heapq.heappush(self._due, (now_ns + self._every_ns, key))

    def _strike(self, key: _Key) -> None:
        del self._orders[key], self._due_at[key]
        if len(self._due) > 2 * len(self._due_at) + STALE_MAX:
            self._due = [(at_ns, known) for known, at_ns in self._due_at.items()]
            heapq.heapify(self._due)

    def _outdate(self, key: _Key, epoch: Epoch) -> None:
        """The epoch has to end, so this needs no more saying; a newer epoch of the same lease may be there already."""
        order = self._orders.get(key)
        if order is not None and order.epoch <= epoch:
            self._strike(key)

    def _as_of(self, order: Order, now_ns: int) -> Order:
        """The order with what remains now, and under the epoch that is live now."""
        match order:
            case orders.Grant():
                return grant_order(self._state.leases[order.lease], now_ns)
            case orders.Extend():
                return extend_order(self._state.leases[order.lease], now_ns, order.lead_ns)
            case orders.Notify():
                return notify_order(self._state.leases[order.lease])
            case _:
                return order

    def _still_needed(self, order: Order) -> bool:
        match order:
            case orders.End():
                pieces = (self._state.resources[part.resource].slices.get(str(order.epoch)) for part in order.parts)
                return any(piece is not None and self._is_leaving(piece) for piece in pieces)
            case orders.Verify():
                return False  # asked for by a person, once
            case orders.RemoveVolume():
                volume = self._state.volumes.get(volume_key(order.volume.tenant, order.volume.name))
                if volume is None or volume.state is not VolumeState.REMOVING or volume.epoch != order.epoch:
                    return False
                return is_open(self._state.resources[volume.resource].slices[str(volume.epoch)])
            case _:  # a newer epoch replaced what is held, and is to be told what the old one was
                lease = self._state.leases.get(order.lease)
                return lease is not None and lease.status in LIVE_STATES

    def _is_leaving(self, piece: SliceRecord) -> bool:
        """Whether an ``End`` is open for it; of a volume that is removed another order asks."""
        return piece.state is SliceState.TEARDOWN and not (piece.volume and is_removed(self._state, piece))

    def _in_teardown(self) -> dict[tuple[LeaseId, Epoch], list[Part]]:
        found: dict[tuple[LeaseId, Epoch], list[Part]] = {}
        for resource in self._state.resources.values():
            for piece in resource.slices.values():
                if self._is_leaving(piece):
                    found.setdefault((piece.lease, piece.epoch), []).append(piece.part)
        return found


def _sense(order: Order) -> str:
    match order:
        case orders.Grant() | orders.Extend():
            return "hold"
        case orders.Notify():
            return "told"
        case orders.End():
            return f"end {order.epoch}"
        case orders.Verify():
            return f"verify {order.epoch}"
        case orders.RemoveVolume():
            return f"remove {order.epoch}"
