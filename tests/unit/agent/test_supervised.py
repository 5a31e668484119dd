"""The office's side of its connection to the supervisor, when that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from sublet.agent import supervised
from sublet.agent.supervised import SupervisedAgent
from sublet.errors import Disconnected, SubletError, Unauthorized
from sublet.values import NodeId, TenantId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import Configure, Configured, Done, Front, ListProcesses, OfficeCall, Profile, Revoke
from sublet.wire.happenings import Called, Hello
from sublet.wire.link import Link
from sublet.wire.orders import Inventory
from sublet.wire.sockets import receive_some, send_some
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION

PATIENCE_S = 20.0
HELLO = Hello(WIRE_OLDEST, WIRE_VERSION, b"")


class Supervisors:
    """Each connection is welcomed by a pretended supervisor, which hangs up when it is told to."""

    def __init__(self) -> None:
        self.count = 0
        self.asked: list[OfficeCall] = []
        self.is_mute = False
        """Whether it leaves questions unanswered."""
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
                    case Called(call=call, body=body):
                        asked = loads(OfficeCall, body)
                        self.asked.append(asked)
                        if not self.is_mute:
                            link.reply(call, dumps(Done()))
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


def test_an_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "ASK_S", 0.05)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_mute = True
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(Disconnected, match="has not answered"):
                await agent.ask(ListProcesses())
        supervisors.is_mute = False
        async with asyncio.timeout(PATIENCE_S):
            assert await agent.ask(ListProcesses()) == Done()

    played(play)


def test_who_lost_rights_is_cut_off_until_that_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "ASK_S", 0.05)
    monkeypatch.setattr(supervised, "CUT_AGAIN_S", 0.05)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_mute = True
        agent.cut_off(TenantId("ann"))
        async with asyncio.timeout(PATIENCE_S):
            while len(supervisors.asked) < 2:  # noqa: ASYNC110 - whoever counts is no task of ours
                await asyncio.sleep(0.01)
        supervisors.is_mute = False
        async with asyncio.timeout(PATIENCE_S):
            while agent._cutting:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.01)
        assert set(supervisors.asked) == {Revoke(tenant=TenantId("ann"))}

    played(play)


def test_who_was_checked_before_is_not_let_in_afterwards() -> None:
    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            tasks = {
                name: asyncio.ensure_future(
                    agent.admit(
                        Front(tenant=TenantId(name), operator=False, profile=Profile.TENANT), HELLO, ours.fileno()
                    )
                )
                for name in ("ann", "bob")
            }
            await asyncio.sleep(0)  # both wait for the supervisor to be told of the leases
            agent.cut_off(TenantId("ann"))
            agent.tick(0)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Unauthorized):
                    await tasks["ann"]
                await tasks["bob"]

    played(play)
