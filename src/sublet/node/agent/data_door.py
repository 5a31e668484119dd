"""The data door: holders connect, authenticate once, and are passed to the supervisor.

A capability token opens what it says for its (lease, epoch); an access token, or being the owner on the owner's own
socket, opens what the tenant may see, and starts nothing. Whether the lease still lives is not asked here: the
supervisor asks at every call. From the handing over on the connection does not need the office any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from sublet.background import Guard, accept_connections, end_process, is_shortage, start_task
from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, SubletError, Unauthorized
from sublet.lease.token import TokenClaims, TokenOperation
from sublet.values import TenantId
from sublet.wire.codec import loads
from sublet.wire.frames import HELLO_MAX
from sublet.wire.guests import Front, Greeting, Profile
from sublet.wire.link import Link
from sublet.wire.link_events import Over, PeerHello
from sublet.wire.peer_limits import PeerLimits, PeerRefused
from sublet.wire.sockets import PeerProcess, peer_of

_log = logging.getLogger("sublet.node.agent")

GREETING_S: Final = 5.0
"""How long a new connection may take to authenticate."""
GREETING_NOW_MAX: Final = 256
"""Connections that are being handed over."""
GREETING_OF_USER_MAX: Final = 64
"""The same of one user of the machine, other than the owner and root."""
GREETING_RESERVED: Final = 64
"""This many of them are for the owner and root alone."""
LOCAL_TENANT: Final = TenantId("local")
SEEN: Final = (TokenOperation.LOGS, TokenOperation.RUN)
"""What a tenant may do with guests of its own without a lease's token: read, signal, stop. Not start."""


class Visitor(NamedTuple):
    """Whom an access token names."""

    tenant: TenantId
    operator: bool
    generation: int
    """Of the tenant's rights."""


class Rights(Protocol):
    """Decides which identity a process at the other end of a connection has: the office does."""

    def claims(self, capability: str, peer: PeerProcess, *, as_tenant: bool) -> TokenClaims:
        """What a capability token says, if the office said it, it is valid now, the tenant's rights are still those
        that it had then, and this process may show it; else ``Unauthorized``. ``as_tenant``: a process of the owner's
        means to be the tenant whose token it shows."""

    def visitor(self, access: str, peer: PeerProcess, *, as_tenant: bool) -> Visitor:
        """Whose access token this is; with none, whom the socket's rule says that this process is. Else
        ``Unauthorized``."""


class _Supervisor(Protocol):
    async def admit(self, front: Front, hello: PeerHello, fd: int) -> None: ...


class Door:
    """Accepts on one listening socket."""

    def __init__(
        self,
        listening: socket.socket,
        rights: Rights,
        supervisor: _Supervisor,
        *,
        die: Callable[[str], object] = end_process,
        on_limit: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``die`` ends the process with a line: without this door holders pay for devices that they cannot use.
        ``on_limit`` is told the name of a limit that was hit."""
        listening.setblocking(False)
        self._listening = listening
        self._rights = rights
        self._supervisor = supervisor
        self._die = die
        self._shortage = Guard("data_door_connections")
        self._greeting: set[asyncio.Task[None]] = set()
        self._limits: PeerLimits[socket.socket] = PeerLimits(
            most=GREETING_NOW_MAX,
            per_user=GREETING_OF_USER_MAX,
            reserved=GREETING_RESERVED,
            owners=frozenset((0, os.geteuid())),
        )
        self._accepting: asyncio.Task[None] | None = None
        self._on_limit = on_limit

    def open(self) -> None:
        """From now on."""

        def failed(error: BaseException) -> None:
            self._die(f"the office stopped: its data door ended ({type(error).__name__}: {error})")

        self._accepting = start_task("data_door", self._accept, failed=failed)

    def close(self) -> None:
        """No more; those that were handed over are not ours."""
        for task in (self._accepting, *self._greeting):
            if task is not None:
                task.cancel()
        self._listening.close()

    async def _accept(self) -> None:
        await accept_connections("data_door", self._listening, self._start_connection)

    def _start_connection(self, sock: socket.socket) -> None:
        task = start_task("data_door_connections", lambda: self._receive(sock))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)
        task.add_done_callback(lambda _: self._limits.disconnected(sock))
        task.add_done_callback(lambda _: sock.close())  # also if it is cancelled before it begins

    async def _receive(self, sock: socket.socket) -> None:
        link = Link.accepting()
        try:
            self._admit(sock)
            hello = await asyncio.wait_for(_handshake(sock, link), GREETING_S)
            self._limits.handshake_done(sock)
            await self._supervisor.admit(self._front(hello, peer_of(sock)), hello, sock.fileno())
        except SubletError as error:
            link.end(error)
            await _flush(sock, link)
        except (OSError, MemoryError) as error:
            if is_shortage(error):
                self._shortage.failed(error, "connections are refused until there is more")
                link.end(CapacityExceeded(f"the office is short of a resource ({error})", do="Try again in a moment."))
                await _flush(sock, link)
            # else the client has gone, or never sent a greeting
        except Exception:  # noqa: BLE001 - a visitor must not be able to close the door for others
            _log.exception("a connection could not be handed over")
        else:
            self._shortage.passed()

    def _admit(self, sock: socket.socket) -> None:
        """Count this connection among those that are being handed over, or refuse it."""
        admitted = self._limits.admit(sock, peer_of(sock).uid)
        if isinstance(admitted, PeerRefused):
            self._on_limit("greetings" if admitted.limit == "connections" else "greetings_of_user")
            raise CapacityExceeded(
                f"too many connections are just being made: {admitted.message}", do="Try again in a moment."
            )
        if admitted.closed is not None:
            self._on_limit("silent_greetings")
            with contextlib.suppress(OSError):  # it has hung up by itself
                admitted.closed.shutdown(socket.SHUT_RDWR)

    def _front(self, hello: PeerHello, peer: PeerProcess) -> Front:
        greeting = loads(Greeting, hello.body) if hello.body else Greeting()
        if greeting.capability and greeting.access:
            raise Unauthorized("there are two tokens", do="Show one.")
        if not greeting.capability:
            visitor = self._rights.visitor(greeting.access, peer, as_tenant=greeting.as_tenant)
            operations = tuple(operation.value for operation in SEEN)
            return Front(
                tenant=visitor.tenant,
                operator=visitor.operator,
                profile=_profile(visitor.tenant),
                operations=operations,
                generation=visitor.generation,
            )
        claims = self._rights.claims(greeting.capability, peer, as_tenant=greeting.as_tenant)
        actor, actor_generation = claims.actor or ("", 0)
        return Front(
            tenant=claims.tenant,
            operator=False,
            profile=_profile(claims.tenant),
            lease=claims.lease,
            epoch=claims.epoch,
            operations=tuple(sorted(operation.value for operation in claims.operations)),
            generation=claims.generation,
            actor=actor,
            actor_generation=actor_generation,
        )


def _profile(tenant: TenantId) -> Profile:
    return Profile.LOCAL if tenant == LOCAL_TENANT else Profile.TENANT


async def _handshake(sock: socket.socket, link: Link) -> PeerHello:
    """The greeting. A client waits for the answer before it sends more, so nothing that is for the supervisor can be
    lost here; one that does not wait is turned away."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(sock, HELLO_MAX)
        happened = link.receive(data) if data else link.receive_end()
        match happened:
            case [PeerHello() as hello] if link.is_between:
                return hello
            case [PeerHello(), *_]:
                raise InvalidRequest("more came before the greeting was answered", do="Wait for the answer.")
            case [Over(error=error), *_]:
                raise error or Disconnected("it hung up before it identified itself")
            case _:
                pass


async def _flush(sock: socket.socket, link: Link) -> None:
    for data, _ in link.take_output():
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, data), GREETING_S)
        except (OSError, TimeoutError):
            return
