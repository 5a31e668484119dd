"""The office's connection: receives orders and holders, sends reports.

There is one office at a time. One that comes later takes over, which is how an office that was killed and started anew
goes on with what runs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol, assert_never

from sublet.background import is_shortage
from sublet.errors import CapacityExceeded, InvalidRequest, SubletError
from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.node.connections import Connection, internal_error
from sublet.node.loop import Loop, log_internal_error
from sublet.node.supervisor.core import OrderQueue
from sublet.values import Epoch, LeaseId, NodeId
from sublet.wire.codec import MARK, dumps, from_wire, loads
from sublet.wire.frames import close_all
from sublet.wire.guests import (
    Admit,
    Configure,
    Configured,
    Done,
    EndGuest,
    Guests,
    ListGuests,
    ListProcesses,
    ListTroubles,
    OfficeCall,
    OfficeReply,
    Orders,
    Processes,
    Quit,
    Reports,
    Revoke,
    Troubles,
)
from sublet.wire.link import Link
from sublet.wire.link_events import Called, Event, Happening, Over, PeerHello
from sublet.wire.orders import Grant, NotHeld, Order


class OfficeService(Protocol):
    """What the supervisor does for an office."""

    def configure(self, link: OfficeLink, request: Configure) -> Configured: ...

    def obey(self, orders: Orders) -> None: ...

    def are_leaving(self) -> bool: ...

    def admit(self, request: Admit, fd: int) -> None: ...

    def revoke(self, request: Revoke) -> None: ...

    def list_guests(self, request: ListGuests) -> Guests: ...

    def list_processes(self, request: ListProcesses) -> Processes: ...

    def list_troubles(self) -> Troubles: ...

    def end_guest(self, request: EndGuest) -> None: ...

    def quit(self, request: Quit) -> None: ...


class OfficeLink:
    """One connection of an office."""

    def __init__(
        self, loop: Loop, sock: socket.socket, served: OfficeService, on_over: Callable[[OfficeLink], None]
    ) -> None:
        self._served = served
        self._on_over = on_over
        self._link = Link.accepting()
        self._node: NodeId | None = None
        """Whose orders come here, once the office has said it."""
        self._has_confessed = False
        self._connection = Connection(loop, sock, self._link, self._on_event)
        self._orders = OrderQueue(
            loop.guarded(lambda _: self.cut(internal_error())).soon, served.obey, served.are_leaving
        )

    def report(self, reports: Reports, at_once: bool = False) -> None:
        """Say it; whether it was heard is known by what the office does. It is said in the law's turn, so what cannot
        be said cuts the connection, and what is still true is said again when the office has come back."""
        with self._connection.guard():
            self._link.event(dumps(reports))
            self._connection.push(at_once=at_once)

    def cut(self, error: SubletError) -> None:
        """Another office took over."""
        self._connection.cut(error)

    def _on_event(self, happening: Happening) -> None:
        match happening:
            case PeerHello():
                self._link.welcome()
            case Called():
                self._called(happening)
            case Event():
                close_all(happening.fds)
                if self._node is not None:
                    self._ordered(happening.body, self._node)
            case Over():
                try:
                    self._orders.all()
                finally:
                    self._on_over(self)
            case _:
                pass

    def _ordered(self, body: bytes, node: NodeId) -> None:
        orders, unread = read_orders(body, node)
        self._orders.take(orders)
        refused = tuple(one.refusal for one in unread if one.refusal is not None)
        if refused:
            self.report(Reports(reports=refused))
        if unread and not self._has_confessed:  # they are said again and again; once is enough
            self._has_confessed = True
            log_internal_error(unread[0].why)

    def _called(self, called: Called) -> None:
        try:
            request = loads(OfficeCall, called.body)
            if self._node is None and not isinstance(request, Configure):
                raise InvalidRequest("an office has to say first who it is", do="Send Configure.")
            self._orders.all()
            try:
                answer = self._answer(request, called.fds)
            except OSError as error:
                if not isinstance(request, _REFUSABLE) or not is_shortage(error):
                    raise
                raise _short_of(error) from error
            self._link.reply(called.call, dumps(answer))
        except SubletError as error:
            self._link.refuse(called.call, error)
        finally:
            close_all(called.fds)
        self._connection.push()

    def _answer(self, request: OfficeCall, fds: tuple[int, ...]) -> OfficeReply:
        match request:
            case Configure():
                configured = self._served.configure(self, request)
                self._node = request.inventory.node
                return configured
            case Admit():
                if len(fds) != 1:
                    raise InvalidRequest(f"an admission comes with one descriptor, not {len(fds)}")
                self._served.admit(request, fds[0])
            case Revoke():
                self._served.revoke(request)
            case ListGuests():
                return self._served.list_guests(request)
            case ListProcesses():
                return self._served.list_processes(request)
            case ListTroubles():
                return self._served.list_troubles()
            case EndGuest():
                self._served.end_guest(request)
            case Quit():
                self._served.quit(request)
            case _:
                assert_never(request)
        return Done()


_REFUSABLE: Final = (Admit, ListGuests, ListProcesses, ListTroubles)
"""Questions that leave nothing half done where they fail."""


def _short_of(error: OSError) -> SubletError:
    return CapacityExceeded(
        f"the supervisor of this machine is short of a resource ({error.strerror})",
        do="Wait until some commands have ended, or start the office again (`sublet down`, `sublet up`) under higher "
        "limits (`ulimit -n`, `ulimit -u`).",
    )


# --------------------------------------------------------------------------------------------------------- newer orders
#
# Handles orders of an office that is newer than this supervisor, after an upgrade.
#
# A batch is read whole, and strictly. Where that fails for one order, to hang up would not help: the office would
# connect again and send the same, and meanwhile no other lease would be looked after. So then each order is read by
# itself.
#
# A grant that cannot be read is refused by its name, and its holder learns at once what is wrong. What concerns a lease
# that lives is left unanswered, as if it had not come: the lease goes on to its deadline, and the office knows that it
# was not heard. Nothing becomes free by that, since only what was verified does.


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
class _GrantKey:
    """What every grant has had from the beginning."""

    lease: LeaseId
    epoch: Epoch
    number: int


def _refusal(order: Any, why: InvalidRequest, node: NodeId) -> NotHeld | None:
    if not isinstance(order, dict) or order.get(MARK) != Grant.__name__:
        return None
    try:
        request = from_wire(
            _GrantKey, {MARK: _GrantKey.__name__} | {name: order.get(name) for name in ("lease", "epoch", "number")}
        )
    except InvalidRequest:
        return None
    return NotHeld(
        node=node,
        lease=request.lease,
        epoch=request.epoch,
        number=request.number,
        detail=f"the supervisor of this machine is of an older version, from before an upgrade ({why.message}); "
        "`sublet down --drain` and a new start bring one that understands",
        reason=EndReason.GUEST_FAILED,
    )
