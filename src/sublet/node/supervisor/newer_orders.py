"""Handles orders of an office that is newer than this supervisor, after an upgrade.

A batch is read whole, and strictly. Where that fails for one order, to hang up would not help: the office would connect
again and send the same, and meanwhile no other lease would be looked after. So then each order is read by itself.

A grant that cannot be read is refused by its name, and its holder learns at once what is wrong. What concerns a lease
that lives is left unanswered, as if it had not come: the lease goes on to its deadline, and the office knows that it
was not heard. Nothing becomes free by that, since only what was verified does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from sublet.errors import InvalidRequest
from sublet.values import EndReason, Epoch, LeaseId, NodeId
from sublet.wire.codec import MARK, from_wire, loads
from sublet.wire.guests import Orders
from sublet.wire.orders import Grant, NotHeld, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """An order that this version cannot read."""

    why: InvalidRequest
    refusal: NotHeld | None
    """What is said to it, if it can be refused."""


def read_orders(body: bytes, node: NodeId) -> tuple[Orders, tuple[Unread, ...]]:
    """What ``node`` can obey of a batch, and what not. Raises ``InvalidRequest`` for what is no batch at all."""
    try:
        return loads(Orders, body), ()
    except InvalidRequest as error:
        try:
            batch: dict[str, Any] = json.loads(body)
            each = list(batch["orders"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise error from None
    orders: list[Order] = []
    unread: list[Unread] = []
    for one in each:
        try:
            orders.append(from_wire(Order, one))
        except InvalidRequest as why:
            unread.append(Unread(why=why, refusal=_refusal(one, why, node)))
    return replace(from_wire(Orders, {**batch, "orders": []}), orders=tuple(orders)), tuple(unread)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What every grant has had from the beginning."""

    lease: LeaseId
    epoch: Epoch
    number: int


def _refusal(order: Any, why: InvalidRequest, node: NodeId) -> NotHeld | None:
    if not isinstance(order, dict) or order.get(MARK) != Grant.__name__:
        return None
    try:
        asked = from_wire(
            _Asked, {MARK: _Asked.__name__} | {name: order.get(name) for name in ("lease", "epoch", "number")}
        )
    except InvalidRequest:
        return None
    return NotHeld(
        node=node,
        lease=asked.lease,
        epoch=asked.epoch,
        number=asked.number,
        detail=f"the supervisor of this machine is of an older version, from before an upgrade ({why.message}); "
        "`sublet down --drain` and a new start bring one that understands",
        reason=EndReason.GUEST_FAILED,
    )
