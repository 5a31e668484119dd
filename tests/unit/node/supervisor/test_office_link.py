"""A supervisor that outlived an upgrade, and an office that says what it cannot read."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sublet.clock import SystemClock
from sublet.errors import InvalidRequest, SubletError
from sublet.lease_end import EndReason
from sublet.node.loop import Loop
from sublet.node.supervisor.office_link import OfficeLink, read_orders
from sublet.values import Epoch, LeaseId, NodeId, TenantId
from sublet.wire.codec import dumps, loads, to_wire
from sublet.wire.guests import Admit, Configure, Configured, Front, Orders, Profile, Reports
from sublet.wire.link import Link
from sublet.wire.link_events import CallRefused, Event, Happening, Over, Replied
from sublet.wire.orders import End, Extend, Grant, Inventory, NotHeld, Order
from sublet.wire.sockets import receive_some, send_some

NODE = NodeId("n")
CONFIGURE = Configure(office="o", inventory=Inventory(node=NODE, domain="d"))
NEW = {"colour": "blue"}


def grant(number: int) -> Grant:
    return Grant(
        lease=LeaseId(f"l-{number}"),
        epoch=Epoch(1, number),
        number=number,
        tenant=TenantId("t"),
        parts=(),
        deadline_ns=1,
        ttl_ns=1,
    )


def extend(number: int) -> Extend:
    return Extend(lease=LeaseId(f"l-{number}"), epoch=Epoch(1, number), number=number, deadline_ns=1, ttl_ns=1)


def end(number: int) -> End:
    reason = EndReason.RELEASED
    return End(lease=LeaseId(f"l-{number}"), epoch=Epoch(1, number), number=number, parts=(), reason=reason, grace_ns=0)


def newer(order: Order) -> dict[str, Any]:
    """The same, as a version says it that has one more field."""
    return {**to_wire(order), **NEW}


def batch(told: Sequence[Any], **more: object) -> bytes:
    """As an office sends them; those that are messages of ours as ours."""
    orders = [order if isinstance(order, dict | int) else to_wire(order) for order in told]
    return json.dumps({"is": "Orders", "orders": orders, "incarnation": 3} | more).encode()


def test_what_can_be_read_is_read_as_ever() -> None:
    orders = Orders(orders=(grant(1), extend(2)), incarnation=3)
    assert read_orders(dumps(orders), NODE) == (orders, ())


def test_a_grant_that_cannot_be_read_is_refused_by_name_and_the_rest_is_obeyed() -> None:
    read, unread = read_orders(batch([end(1), newer(grant(2)), extend(3)]), NODE)
    assert read == Orders(orders=(end(1), extend(3)), incarnation=3)
    (one,) = unread
    assert "Grant has no field 'colour'" in str(one.why)
    assert isinstance(one.refusal, NotHeld)
    assert (one.refusal.node, one.refusal.lease, one.refusal.epoch) == (NODE, "l-2", Epoch(1, 2))
    assert one.refusal.number == 2
    assert "older version" in one.refusal.detail
    assert "Grant has no field 'colour'" in one.refusal.detail


@pytest.mark.parametrize(
    "order",
    [
        newer(extend(2)),
        newer(end(2)),
        {**newer(grant(2)), "epoch": "soon"},
        {"is": "Repaint", "lease": "l-2"},
        {"lease": "l-2"},
        5,
    ],
    ids=["an extension", "an end", "no epoch", "an order of another kind", "no kind", "no order"],
)
def test_what_cannot_be_refused_by_name_is_as_if_it_had_not_come(order: Any) -> None:
    read, unread = read_orders(batch([grant(1), order]), NODE)
    assert read.orders == (grant(1),)
    assert [one.refusal for one in unread] == [None]


@pytest.mark.parametrize(
    "body",
    [b"{", b"5", b'{"is":"Orders"}', batch([grant(1)], incarnation="x"), batch([], orders=5), b"[" * 100_000],
    ids=["half", "a number", "no orders", "no incarnation", "orders that are none", "brackets"],
)
def test_what_is_no_batch_at_all_is_an_error(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_orders(body, NODE)


class Served:
    """A supervisor that obeys, and no more."""

    def __init__(self) -> None:
        self.obeyed: list[Order] = []

    def configure(self, link: OfficeLink, asked: Configure) -> Configured:
        return Configured(pid=1, version="", started_ns=0, live=(), guests=0)

    def obey(self, orders: Orders) -> None:
        self.obeyed += orders.orders

    def are_leaving(self) -> bool:
        return False

    def never(self, *given: object) -> Any:
        raise AssertionError("it was not asked for that")

    admit = revoke = list_guests = list_processes = list_troubles = end_guest = quit = never


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(SystemClock())
    yield found
    found.close()


def test_the_connection_stays_and_the_log_says_it_once(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    served, overs = Served(), list[OfficeLink]()
    OfficeLink(loop, theirs, served, overs.append)
    ours.setblocking(False)
    link, heard = Link.connecting(), list[Happening]()

    def turns() -> None:
        for _ in range(4):
            send_some(ours, link)
            loop.turn(0)
            heard.extend(receive_some(ours, link))

    with ours:
        link.call(dumps(CONFIGURE))
        turns()
        for _ in range(2):
            link.event(batch([newer(grant(1)), newer(extend(5)), extend(2)]))
            turns()
        assert served.obeyed == [extend(2), extend(2)]
        reports = [loads(Reports, one.body).reports for one in heard if isinstance(one, Event)]
        refused = [[report.lease for report in batch if isinstance(report, NotHeld)] for batch in reports]
        assert refused == [["l-1"], ["l-1"]]
        assert not overs
        assert not [one for one in heard if isinstance(one, Over)]
        assert capsys.readouterr().err.count("has no field 'colour'") == 1
        link.end(SubletError("enough"))
        turns()
    assert len(overs) == 1


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_supervisor_that_cannot_let_a_holder_in_says_what_it_is_short_of(loop: Loop, error: int) -> None:
    """The office, and with it all other holders, stay connected. The next holder may be let in."""
    ours, theirs = socket.socketpair()
    served, overs, failing = Served(), list[OfficeLink](), [error]

    def admit(asked: Admit, fd: int) -> None:
        if failing:
            raise OSError(failing[0], os.strerror(failing.pop()))

    served.admit = admit  # type: ignore[assignment]
    OfficeLink(loop, theirs, served, overs.append)
    ours.setblocking(False)
    link, heard = Link.connecting(), list[Happening]()
    front = Front(tenant=TenantId("t"), operator=False, profile=Profile.LOCAL)
    with ours:
        link.call(dumps(CONFIGURE))
        for _ in range(2):
            link.call(dumps(Admit(front=front, oldest=1, newest=1)), (os.open(os.devnull, os.O_RDONLY),))
        for _ in range(8):
            send_some(ours, link)
            loop.turn(0)
            heard.extend(receive_some(ours, link))
        (refused,) = [one for one in heard if isinstance(one, CallRefused)]
        assert os.strerror(error) in str(refused.error)
        assert "ulimit -n" in (refused.error.do or "")
        assert len([one for one in heard if isinstance(one, Replied)]) == 2
        assert not overs
        link.end(SubletError("enough"))
        send_some(ours, link)
        loop.turn(0)
