"""The interface of an agent to its broker, and what must hold after each call.

An agent stands between the office, which decides, and the hardware, which obeys any process. It therefore keeps three
promises whatever the office does: only live (lease, epoch) pairs have effects, every lease ends at its deadline without
an order, and ``TornDown`` is said only about what was looked at. How they are kept is ``lease.node``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sublet.values import NodeId
from sublet.wire.orders import Inventory, Order, Report

ReportSink = Callable[[Report], None]
"""Where an agent leaves its reports. It may be called from inside ``send`` and ``tick``, so it must only queue."""


class AgentPort(Protocol):
    """One node's agent, as the office's driver sees it. All calls come from the driver's loop, one at a time."""

    @property
    def node(self) -> NodeId:
        """Which node this is; every report names it."""

    def inventory(self) -> Inventory:
        """What the node has to lend. The driver asks at start and hands the answer to the ledger (``NodeUp``)."""

    def send(self, order: Order, *, incarnation: int | None = None) -> None:
        """Take an order. Called after the events behind it are durable; again, until the matching report arrives.

        Never raises for what an order says, and taking one twice, late or out of order does no harm:

        - ``Grant``, ``Extend``, ``Notify`` are answered by ``Held`` with the same number once they are in force, so
          that they stand if everything else stops; by ``NotHeld`` if this (lease, epoch) is over for the agent; and
          not yet, while an older lease that the office no longer knows is being taken off the hardware. An ``Extend``
          for a lease that this agent never saw is not answered: the office will send the ``Grant`` again.
        - ``End`` fences at once. ``TornDown`` and ``Failed`` follow, per resource, when it is known.
        - ``Verify`` is answered by ``TornDown`` or, again, ``Failed``; where an operator vouched, by nothing.

        ``incarnation`` says which incarnation of the office speaks, and an older one than the agent has met is not
        obeyed. None means that office and agent are one process, where there can be no second office.
        """

    def tick(self, now_ns: int) -> int | None:
        """Do what is due: deadlines, the next step of a teardown, reports to repeat. Returns the next instant at which
        there is something to do; None if nothing is waiting. Calling it early is harmless, late is late.
        """
