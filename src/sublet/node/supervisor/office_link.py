"""The office's connection: receives orders and holders, sends reports.

There is one office at a time. One that comes later takes over, which is how an office that was killed and started anew
goes on with what runs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol, assert_never

from sublet.errors import InvalidRequest, SubletError
from sublet.node.connections import Connection, mistake
from sublet.node.loop import Loop, confess
from sublet.node.supervisor.newer_orders import read_orders
from sublet.node.supervisor.obeying import Obeying
from sublet.values import NodeId
from sublet.wire.codec import dumps, loads
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
from sublet.wire.happenings import Called, Event, Happening, Hello, Over
from sublet.wire.link import Link


class Served(Protocol):
    """What the supervisor does for an office."""

    def configure(self, link: OfficeLink, asked: Configure) -> Configured: ...

    def obey(self, orders: Orders) -> None: ...

    def are_leaving(self) -> bool: ...

    def admit(self, asked: Admit, fd: int) -> None: ...

    def revoke(self, asked: Revoke) -> None: ...

    def list_guests(self, asked: ListGuests) -> Guests: ...

    def list_processes(self, asked: ListProcesses) -> Processes: ...

    def list_troubles(self) -> Troubles: ...

    def end_guest(self, asked: EndGuest) -> None: ...

    def quit(self, asked: Quit) -> None: ...


class OfficeLink:
    """One connection of an office."""

    def __init__(self, loop: Loop, sock: socket.socket, served: Served, on_over: Callable[[OfficeLink], None]) -> None:
        self._served = served
        self._on_over = on_over
        self._link = Link.accepting()
        self._node: NodeId | None = None
        """Whose orders come here, once the office has said it."""
        self._has_confessed = False
        self._connection = Connection(loop, sock, self._link, self._heard)
        self._obeying = Obeying(loop.guarded(lambda _: self.cut(mistake())), served.obey, served.are_leaving)

    def report(self, reports: Reports, at_once: bool = False) -> None:
        """Say it; whether it was heard is known by what the office does. It is said in the law's turn, so what cannot
        be said cuts the connection, and what is still true is said again when the office has come back."""
        with self._connection.guard():
            self._link.event(dumps(reports))
            self._connection.push(at_once=at_once)

    def cut(self, error: SubletError) -> None:
        """Another office took over."""
        self._connection.cut(error)

    def _heard(self, happening: Happening) -> None:
        match happening:
            case Hello():
                self._link.welcome()
            case Called():
                self._called(happening)
            case Event():
                close_all(happening.fds)
                if self._node is not None:
                    self._ordered(happening.body, self._node)
            case Over():
                try:
                    self._obeying.all()
                finally:
                    self._on_over(self)
            case _:
                pass

    def _ordered(self, body: bytes, node: NodeId) -> None:
        orders, unread = read_orders(body, node)
        self._obeying.take(orders)
        refused = tuple(one.refusal for one in unread if one.refusal is not None)
        if refused:
            self.report(Reports(reports=refused))
        if unread and not self._has_confessed:  # they are said again and again; once is enough
            self._has_confessed = True
            confess(unread[0].why)

    def _called(self, called: Called) -> None:
        try:
            asked = loads(OfficeCall, called.body)
            if self._node is None and not isinstance(asked, Configure):
                raise InvalidRequest("an office has to say first who it is", do="Send Configure.")
            self._obeying.all()
            self._link.reply(called.call, dumps(self._answer(asked, called.fds)))
        except SubletError as error:
            self._link.refuse(called.call, error)
        finally:
            close_all(called.fds)
        self._connection.push()

    def _answer(self, asked: OfficeCall, fds: tuple[int, ...]) -> OfficeReply:
        match asked:
            case Configure():
                configured = self._served.configure(self, asked)
                self._node = asked.inventory.node
                return configured
            case Admit():
                if len(fds) != 1:
                    raise InvalidRequest(f"an admission comes with one descriptor, not {len(fds)}")
                self._served.admit(asked, fds[0])
            case Revoke():
                self._served.revoke(asked)
            case ListGuests():
                return self._served.list_guests(asked)
            case ListProcesses():
                return self._served.list_processes(asked)
            case ListTroubles():
                return self._served.list_troubles()
            case EndGuest():
                self._served.end_guest(asked)
            case Quit():
                self._served.quit(asked)
            case _:
                assert_never(asked)
        return Done()
