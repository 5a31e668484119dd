"""The driver's ports: agents, the journal, and listeners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sublet.office.ledger.events import Event
from sublet.office.ledger.records import Now
from sublet.values import NodeId
from sublet.wire.orders import Inventory, Order

Listener = Callable[[Now, Sequence[Event]], None]
"""Called with each batch of facts once it is durable, in order."""


class Agent(Protocol):
    """An agent as the driver sees it (``node.agent.port`` has the whole promise). Reports come back through
    ``Driver.report``, also from inside ``send`` and ``tick``."""

    @property
    def node(self) -> NodeId:
        """Whose orders go here."""

    def inventory(self) -> Inventory:
        """What the node has."""

    def send(self, order: Order) -> None:
        """Take an order; twice, late or out of order does no harm."""

    def tick(self, now_ns: int) -> int | None:
        """Do what is due and say when to come again."""


class JournalPort(Protocol):
    """The journal as the driver sees it. Whatever raises here ends the office."""

    def commit(self, events: Sequence[Event], now: Now) -> None:
        """Durable when it returns. If it raises, nothing may be believed."""

    def beat(self, now: Now) -> None:
        """Note the instant, so that a later incarnation on another clock knows what remained."""

    def compact(self, snapshot: bytes, now: Now) -> None:
        """Keep the snapshot in place of the events before it."""
