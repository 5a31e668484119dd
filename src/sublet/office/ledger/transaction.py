"""What policies may do within one command. ``step.Step`` does it; budgets, parking, reservations and volumes choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sublet.lease_end import EndReason
from sublet.office.ledger import events as ev
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LeaseRecord, Now
from sublet.office.ledger.state import State
from sublet.values import BudgetId, LeaseId, NodeId, ReservationId, Way
from sublet.wire.orders import Order, Parking, Part


class Transaction(Protocol):
    """The state, the moment, what came of the command so far, and the verbs that change state. See ``step.Step``."""

    state: State
    policy: Policy
    now: Now
    orders: list[Order]
    holds: tuple[tuple[LeaseId, int], ...]
    is_held: Callable[[LeaseId], bool]

    def emit(self, event: ev.Event) -> None: ...
    def grant(self, lease: LeaseRecord, node: NodeId, parts: Sequence[Part], *, offered: bool = False) -> None: ...
    def claim(self, lease: LeaseRecord) -> None: ...
    def end(
        self,
        lease: LeaseRecord,
        reason: EndReason,
        detail: str = "",
        *,
        grace_ns: int | None = None,
        way: Way | None = None,
        park: Parking | None = None,
    ) -> None: ...
    def notice(
        self,
        lease: LeaseRecord,
        reason: EndReason,
        notice_ns: int,
        detail: str = "",
        *,
        beneficiary: LeaseId | None = None,
        when_safe: bool = False,
        reservation: ReservationId | None = None,
        budget: BudgetId | None = None,
    ) -> None: ...
    def extend(self, lease: LeaseRecord) -> None: ...
    def cancel_notice(self, lease: LeaseRecord) -> None: ...
    def drop_promise(self, lease: LeaseRecord) -> None: ...
