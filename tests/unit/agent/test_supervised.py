"""The office's side of its connection to the supervisor, when that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from sublet.agent.supervised import SupervisedAgent
from sublet.errors import Disconnected, SubletError, Unauthorized
from sublet.values import NodeId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import Configure, Configured, OfficeCall
from sublet.wire.happenings import Called, Hello
from sublet.wire.link import Link
from sublet.wire.orders import Inventory
from sublet.wire.sockets import receive_some, send_some

PATIENCE_S = 20.0


class Supervisors:
    """Each connection is welcomed by a pretended supervisor, which hangs up when it is told to."""

    def __init__(self) -> None:
        self.count = 0
        self.hang_up: Callable[[SubletError | None], None] = lambda _: None

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        link = Link.accepting()
        loop = asyncio.get_running_loop()

        def readable() -> None:
            for happening in receive_some(theirs, link):
                match happening:
                    case Hello():
                        link.welcome()
                    case Called(call=call, body=body) if isinstance(loads(OfficeCall, body), Configure):
                        self.count += 1
                        link.reply(call, dumps(Configured(pid=1, version="", started_ns=0, live=(), guests=0)))
                    case _:
                        pass
            if link.over is None:
                send_some(theirs, link)
            else:
                close()

        def close() -> None:
            if theirs.fileno() >= 0:
                loop.remove_reader(theirs.fileno())
                theirs.close()

        def hang_up(error: SubletError | None) -> None:
            if theirs.fileno() >= 0:
                link.end(error)
                send_some(theirs, link)
                close()

        loop.add_reader(theirs.fileno(), readable)
        self.hang_up = hang_up
        return ours


def played(play: Callable[[SupervisedAgent, Supervisors, asyncio.Event], Awaitable[None]]) -> None:
    async def whole() -> None:
        supervisors, came = Supervisors(), asyncio.Event()
        agent = SupervisedAgent(
            Inventory(node=NodeId("n"), domain="d", devices=()),
            office="o",
            incarnation=lambda: 1,
            connect=supervisors.connect,
            report=lambda _: None,
            on_new_supervisor=came.set,
        )
        await agent.start()
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: supervisors.hang_up(None))
            await play(agent, supervisors, came)
        await agent.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    "error", [None, Disconnected("it left too much unread"), SubletError("the supervisor made a mistake")]
)
def test_it_is_joined_again_whatever_it_hung_up_for(error: SubletError | None) -> None:
    """Without a supervisor nothing would ever be granted again."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.hang_up(error)
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
        assert supervisors.count == 2

    played(play)


def test_but_not_if_another_office_took_over() -> None:
    """Both would go on to push each other out."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.hang_up(Unauthorized("another office of the same home took over"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await came.wait()
        assert supervisors.count == 1

    played(play)
