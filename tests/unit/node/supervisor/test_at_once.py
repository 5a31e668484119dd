"""That a lease is held is said as soon as it is; all else at the end of the turn, in as few messages as can be."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sublet.clock import SystemClock
from sublet.lease_end import EndReason
from sublet.node.connections import Connection
from sublet.node.loop import Loop
from sublet.node.supervisor.core import SupervisorCore
from sublet.values import Epoch, LeaseId, NodeId, TenantId
from sublet.wire.guests import Orders, Reports
from sublet.wire.link import Link
from sublet.wire.link_events import Event, PeerHello
from sublet.wire.orders import End, Extend, Grant, Held, Order
from sublet.wire.sockets import receive_some
from tests.left_open import nothing_left_open

LEASE, EPOCH = LeaseId("l-1"), Epoch(1, 1)
GRANT = Grant(lease=LEASE, epoch=EPOCH, number=1, tenant=TenantId("t"), parts=(), deadline_ns=1, ttl_ns=1)
EXTEND = Extend(lease=LEASE, epoch=EPOCH, number=2, deadline_ns=2, ttl_ns=1)
END = End(lease=LEASE, epoch=EPOCH, number=3, parts=(), reason=EndReason.RELEASED, grace_ns=0)
HELD = Held(node=NodeId("n"), lease=LEASE, epoch=EPOCH, number=1)


@pytest.mark.parametrize(
    ("orders", "done"),
    [
        ((GRANT,), ["GRANT", "said at once: 1", "step", "said: 1"]),
        ((GRANT, EXTEND), ["GRANT", "EXTEND", "said at once: 2", "step", "said: 1"]),
        # Where something is ended, that it has begun and that it is over are said together.
        ((END,), ["END", "step", "said: 2"]),
        ((END, GRANT), ["END", "GRANT", "step", "said: 3"]),
    ],
)
def test_what_somebody_waits_for_is_said_before_the_rest_of_the_turn(orders: tuple[Any, ...], done: list[str]) -> None:
    told: list[str] = []

    class Law:
        """Reports one thing for each order, and one in each turn."""

        def send(self, order: Order, **_: object) -> None:
            told.append(type(order).__name__.upper())
            core.report(HELD)

        def tick(self, now_ns: int) -> None:
            told.append("step")
            core.report(HELD)

    class Office:
        def report(self, reports: Reports, at_once: bool = False) -> None:
            told.append(f"said{' at once' if at_once else ''}: {len(reports.reports)}")

    core: SupervisorCore[Any] = SupervisorCore(make_law=lambda _: Law(), arm=lambda _: None, now_ns=0)
    core.law, core.office = Law(), cast("Any", Office())
    core.obey(Orders(orders=orders, incarnation=1), 0)
    assert told == done


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(SystemClock())
    yield found
    found.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_at_once_is_before_the_turn_ends_and_once(loop: Loop, at_once: bool) -> None:
    with nothing_left_open():
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        link, heard = Link.adopted(PeerHello(1, 1, b"")), Link.connecting()
        connection = Connection(loop, ours, link, lambda happening: None)
        link.welcome()
        connection.push()
        loop.turn(0)
        receive_some(theirs, heard)
        link.event(b"held")
        connection.push(at_once=at_once)
        now = receive_some(theirs, heard)
        loop.turn(0)
        later = receive_some(theirs, heard)
        assert (now, later) == (([Event(0, b"held", ())], []) if at_once else ([], [Event(0, b"held", ())]))
        connection.cut()
        theirs.close()
