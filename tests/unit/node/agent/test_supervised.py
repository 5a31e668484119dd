"""The office's side of its connection to the supervisor, when that hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from sublet import background
from sublet.errors import Disconnected, SubletError, Unauthorized, Unsupported
from sublet.lease_end import EndReason
from sublet.node.agent import supervised
from sublet.node.agent.core import ORDERS_MAX, SILENT_NS
from sublet.node.agent.supervised import SupervisedAgent
from sublet.values import NS_PER_S, Epoch, LeaseId, NodeId, TenantId
from sublet.wire.caps import LeaseCaps
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import (
    Admit,
    Configure,
    Configured,
    Done,
    Front,
    ListProcesses,
    OfficeCall,
    Orders,
    Profile,
    Quit,
    Reports,
    Revoke,
)
from sublet.wire.link import LINK_OUT_MAX, Link
from sublet.wire.link_events import Called, Event, PeerHello
from sublet.wire.orders import End, Held, Inventory, Order, RemoveVolume, Report, VolumeRef
from sublet.wire.sockets import receive_some, send_some
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION

PATIENCE_S = 120.0
HELLO = PeerHello(WIRE_OLDEST, WIRE_VERSION, b"")


class Supervisors:
    """Each connection is welcomed by a pretended supervisor, which hangs up when it is told to."""

    def __init__(self) -> None:
        self.count = 0
        self.asked: list[OfficeCall] = []
        self.configured: list[Configure] = []
        self.heard: list[Report] = []
        """What the office was told."""
        self.report: Callable[[Report], None] = lambda _: None
        self.ordered: list[tuple[Order, ...]] = []
        """By message."""
        self.is_mute = False
        """Whether it leaves questions unanswered."""
        self.is_new = True
        self.generations: dict[TenantId, int] = {}
        self.may_configure = asyncio.Event()
        """Until then the next one does not say who it is."""
        self.may_configure.set()
        self.may_order = asyncio.Event()
        """Until then the office has not ordered again what lives."""
        self.may_order.set()
        self.is_reading = True
        """Whether it takes what is sent to it."""
        self.hang_up: Callable[[SubletError | None], None] = lambda _: None
        self.later: list[asyncio.Future[None]] = []
        self.answer: Callable[[], None] = lambda: None
        """What it left unanswered, and everything after it."""

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        link = Link.accepting()
        loop = asyncio.get_running_loop()
        unanswered: list[int] = []

        def configured(call: int) -> None:
            self.count += 1
            link.reply(call, dumps(Configured(pid=1, version="", started_ns=0, live=(), guests=0, is_new=self.is_new)))
            send_some(theirs, link)

        async def configure_later(call: int) -> None:
            await self.may_configure.wait()
            configured(call)

        def readable() -> None:
            if not self.is_reading:
                return
            for happening in receive_some(theirs, link):
                match happening:
                    case PeerHello():
                        link.welcome()
                    case Called(call=call, body=body) if (wrong := unreadable(body)) is not None:
                        link.refuse(call, wrong)
                    case Called(call=call, body=body) if isinstance(asked := loads(OfficeCall, body), Configure):
                        self.configured.append(asked)
                        if self.may_configure.is_set():
                            configured(call)
                        else:
                            self.later.append(asyncio.ensure_future(configure_later(call)))
                    case Called(call=call, body=body):
                        asked = loads(OfficeCall, body)
                        self.asked.append(asked)
                        if self.is_mute:
                            unanswered.append(call)
                        else:
                            link.reply(call, dumps(Done()))
                    case Event(body=body):
                        self.ordered.append(loads(Orders, body).orders)
                    case _:
                        pass
            send_some(theirs, link)
            if link.over is not None:
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

        def report(one: Report) -> None:
            link.event(dumps(Reports(reports=(one,))))
            send_some(theirs, link)

        loop.add_reader(theirs.fileno(), readable)

        def answer() -> None:
            self.is_mute = False
            for call in unanswered:
                link.reply(call, dumps(Done()))
            send_some(theirs, link)

        self.hang_up, self.report, self.answer = hang_up, report, answer
        return ours


def unreadable(body: bytes) -> SubletError | None:
    try:
        loads(OfficeCall, body)
    except SubletError as error:
        return error
    return None


def played(play: Callable[[SupervisedAgent, Supervisors, asyncio.Event], Awaitable[None]]) -> None:
    async def whole() -> None:
        supervisors, came = Supervisors(), asyncio.Event()

        async def new_supervisor() -> None:
            """The office orders again what lives."""
            came.set()
            await supervisors.may_order.wait()

        agent = SupervisedAgent(
            Inventory(node=NodeId("n"), domain="d", devices=()),
            office="o",
            incarnation=lambda: 1,
            connect=supervisors.connect,
            report=supervisors.heard.append,
            on_new_supervisor=new_supervisor,
            generations=lambda: supervisors.generations,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: supervisors.hang_up(None))
            await agent.start()
            await play(agent, supervisors, came)
        await agent.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    "error",
    [None, Disconnected("it left too much unread"), SubletError("internal error in the supervisor")],
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


def test_one_of_a_version_too_far_away_is_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlived an upgrade. It is left alone, and no other is started beside it."""
    far = WIRE_VERSION + 5
    accepting = partial(Link.accepting, oldest=far, newest=far)
    monkeypatch.setattr(Link, "accepting", accepting)
    with pytest.raises(Unsupported, match=f"pid {os.getpid()}.*another version.*speaks the versions") as refused:
        played(lambda *_: asyncio.sleep(0))
    assert f"kill -9 {os.getpid()}" in refused.value.do


def test_one_that_does_not_know_what_it_is_told_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "dumps", lambda asked: dumps(asked)[:-1] + b',"news":1}')
    with pytest.raises(Unsupported, match="another version of Sublet: Configure has no field 'news'"):
        played(lambda *_: asyncio.sleep(0))


def test_a_burst_of_orders_arrives_whole_in_order_and_in_messages_of_a_bounded_size() -> None:
    """After an outage thousands come at once, and a message has a greatest size."""
    count = 3 * ORDERS_MAX + 7
    ordered = [
        RemoveVolume(
            lease=LeaseId(f"l-{n}"),
            epoch=Epoch(1, n),
            number=n,
            volume=VolumeRef(tenant=TenantId("ann"), name="v"),
            parts=(),
        )
        for n in range(count)
    ]

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        for order in ordered:
            agent.send(order)
        agent.tick(0)
        async with asyncio.timeout(PATIENCE_S):
            while sum(len(batch) for batch in supervisors.ordered) < count:  # noqa: ASYNC110 - over a socket
                await asyncio.sleep(0.001)
        assert [order for batch in supervisors.ordered for order in batch] == ordered
        assert max(len(batch) for batch in supervisors.ordered) <= ORDERS_MAX

    played(play)


def test_an_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_mute = True
        async with asyncio.timeout(PATIENCE_S):
            with monkeypatch.context() as patch:
                patch.setattr(supervised, "ASK_S", 0.05)
                with pytest.raises(Disconnected, match="has not answered"):
                    await agent.ask(ListProcesses())
        supervisors.is_mute = False
        async with asyncio.timeout(PATIENCE_S):
            assert await agent.ask(ListProcesses()) == Done()

    played(play)


def test_a_supervisor_that_stands_still_is_noticed_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_troubles", {})

    def failing() -> list[str]:
        return [one.name for one in background.troubles() if one.failing]

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        async def second(number: int) -> None:
            agent.tick(number * NS_PER_S)
            await asyncio.sleep(0.01)

        for n in range(5):
            await second(n)
        assert supervisors.asked
        assert (agent.silent_s(4 * NS_PER_S), failing()) == (0, [])
        supervisors.is_mute = True
        for n in range(5, 30):
            await second(n)
        assert agent.silent_s(29 * NS_PER_S) > SILENT_NS / NS_PER_S
        assert failing() == ["supervisor_turns"]
        assert len([one for one in caplog.messages if "stands still" in one]) == 1, "it is said once"
        supervisors.answer()
        async with asyncio.timeout(PATIENCE_S):
            while failing():  # noqa: ASYNC110 - over a socket
                await asyncio.sleep(0.001)
        assert agent.silent_s(29 * NS_PER_S) == 0
        supervisors.is_mute = True
        for n in range(30, 50):
            await second(n)
        assert failing() == ["supervisor_turns"]
        supervisors.hang_up(None)
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
        assert failing() == [], "another supervisor has taken its place"

    played(play)


def test_who_lost_rights_is_cut_off_until_that_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "CUT_AGAIN_S", 0.05)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_mute = True
        monkeypatch.setattr(supervised, "ASK_S", 0.05)
        agent.cut_off(TenantId("ann"), 1)
        async with asyncio.timeout(PATIENCE_S):
            while len(supervisors.asked) < 2:  # noqa: ASYNC110 - whoever counts is no task of ours
                await asyncio.sleep(0.01)
        supervisors.is_mute = False
        monkeypatch.setattr(supervised, "ASK_S", PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while agent._cutting:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.01)
        assert set(supervisors.asked) == {Revoke(tenant=TenantId("ann"), generation=1)}

    played(play)


def test_who_lost_rights_while_the_office_was_away_is_cut_off_when_it_is_back() -> None:
    """An office may end between the rotation of a token and the cut: the supervisor goes on with the connections."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_new, supervisors.generations = False, {TenantId("ann"): 3}
        supervisors.hang_up(None)
        await until(lambda: Revoke(tenant=TenantId("ann"), generation=3) in supervisors.asked)

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
            agent.cut_off(TenantId("ann"), 1)
            agent.tick(0)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Unauthorized):
                    await tasks["ann"]
                await tasks["bob"]

    played(play)


@pytest.mark.parametrize("error", [Disconnected("away"), OSError(24, "Too many open files"), MemoryError()], ids=repr)
def test_who_lost_rights_is_cut_off_in_the_end(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(supervised, "CUT_AGAIN_S", 0.001)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        ask, left = agent.ask, [3]

        async def fails(asked: OfficeCall, fds: tuple[int, ...] = ()) -> object:
            if left[0]:
                left[0] -= 1
                raise error
            return await ask(asked, fds)

        monkeypatch.setattr(agent, "ask", fails)
        agent.cut_off(TenantId("ana"), 1)
        async with asyncio.timeout(PATIENCE_S):
            while Revoke(tenant=TenantId("ana"), generation=1) not in supervisors.asked:  # noqa: ASYNC110 - it is no event
                await asyncio.sleep(0.002)

    played(play)


def end(n: int) -> End:
    return End(lease=LeaseId(f"l{n}"), epoch=Epoch(1, n), number=n, parts=(), reason=EndReason.RELEASED, grace_ns=0)


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - the other side is no task of ours
            await asyncio.sleep(0.001)


def test_what_was_reported_before_the_office_listens_is_heard_then_once_and_in_order() -> None:
    """An office that takes over hears of ends while it still reads its journal."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        reports = [Held(node=NodeId("n"), lease=LeaseId("l"), epoch=Epoch(1, 1), number=n) for n in range(3)]
        for report in reports[:2]:
            supervisors.report(report)
        await agent.ask(ListProcesses())
        assert supervisors.heard == [], "it knows no node yet"
        agent.listen()
        assert supervisors.heard == reports[:2]
        supervisors.report(reports[2])
        await until(lambda: supervisors.heard == reports)

    played(play)


def test_a_successor_is_told_of_what_lives_and_not_of_what_was_ordered_before_it_came() -> None:
    """The office sends the grants of its journal again: an older order beside them would be one too many."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        assert not came.is_set(), "the first one is no successor"
        supervisors.hang_up(None)
        await until(lambda: agent._link is None)
        agent.send(end(1))
        agent.tick(0)
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
        agent.send(end(2))
        agent.tick(0)
        await until(lambda: supervisors.ordered)
        assert [order.epoch.n for orders in supervisors.ordered for order in orders] == [2]

    played(play)


def admission(stack: contextlib.ExitStack, agent: SupervisedAgent, tenant: str = "ann") -> asyncio.Future[None]:
    """A holder comes."""
    ours, theirs = socket.socketpair()
    stack.enter_context(ours)
    stack.enter_context(theirs)
    front = Front(tenant=TenantId(tenant), operator=False, profile=Profile.TENANT)
    return asyncio.ensure_future(agent.admit(front, HELLO, ours.fileno()))


def admitted(supervisors: Supervisors) -> list[str]:
    return [asked.front.tenant for asked in supervisors.asked if isinstance(asked, Admit)]


@pytest.mark.parametrize("comes", ["while it says who it is", "before the office has ordered again what lives"])
def test_a_holder_that_comes_to_a_successor_waits_until_that_knows_the_leases(comes: str) -> None:
    """It would be told that its lease is not known, and give it up. Turns of the office that have to do with something
    else change nothing about that."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        agent.tick(0)
        blocked = supervisors.may_configure if comes.startswith("while") else supervisors.may_order
        blocked.clear()
        supervisors.hang_up(None)
        async with asyncio.timeout(PATIENCE_S):
            if blocked is supervisors.may_order:
                await came.wait()
            else:
                await until(lambda: supervisors.later)
        with contextlib.ExitStack() as stack:
            coming = admission(stack, agent)
            for _ in range(5):
                agent.tick(0)
                await asyncio.sleep(0.002)
            assert not coming.done()
            assert not admitted(supervisors)
            agent.send(end(7))  # stands for a grant
            blocked.set()
            async with asyncio.timeout(PATIENCE_S):
                await coming
        assert admitted(supervisors) == ["ann"]

    played(play)


def test_a_holder_that_would_come_too_early_is_sent_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told is worth another try, unlike the denial of its lease."""
    monkeypatch.setattr(supervised, "INFORMED_S", 0.02)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        agent.tick(0)
        supervisors.may_order.clear()
        supervisors.hang_up(None)
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
            with contextlib.ExitStack() as stack:
                with pytest.raises(Disconnected, match="being started") as away:
                    await admission(stack, agent)
                assert away.value.transient
                supervisors.may_order.set()
                await until(agent._is_informed.is_set)
                await admission(stack, agent, "bob")
        assert admitted(supervisors) == ["bob"]

    played(play)


def test_a_holder_that_comes_just_after_the_supervisor_has_ended_waits_for_the_next() -> None:
    """Another one is there in a moment: a holder is sent away only if that takes too long."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        agent.tick(0)
        await until(agent._is_informed.is_set)
        supervisors.hang_up(None)
        await until(lambda: agent._link is None)
        with contextlib.ExitStack() as stack:
            async with asyncio.timeout(PATIENCE_S):
                await admission(stack, agent)
        assert admitted(supervisors) == ["ann"]

    played(play)


def test_new_caps_reach_the_supervisor_and_holders_that_come_meanwhile_wait() -> None:
    caps = LeaseCaps(cores=77)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        agent.tick(0)
        await until(agent._is_informed.is_set)
        with contextlib.ExitStack() as stack:
            async with asyncio.timeout(PATIENCE_S):
                setting = asyncio.ensure_future(agent.set_caps(caps))
                await until(lambda: agent._link is None)
                await asyncio.gather(setting, admission(stack, agent))
        assert [asked.caps == caps for asked in supervisors.configured] == [False, True]
        assert admitted(supervisors) == ["ann"]

    played(play)


def test_an_office_that_ends_asks_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the connections that it could not have cut either: the next office repeats that."""
    monkeypatch.setattr(supervised, "CUT_AGAIN_S", 0.001)

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_mute = True
        agent.cut_off(TenantId("ann"), 1)
        await until(lambda: supervisors.asked)
        (cutting,) = agent._cutting
        closing = asyncio.ensure_future(agent.close())
        await until(lambda: any(isinstance(asked, Quit) for asked in supervisors.asked))
        with pytest.raises(asyncio.CancelledError):
            await cutting
        supervisors.answer()
        await closing

    played(play)


def test_an_office_that_ends_waits_until_the_supervisor_has_heard_so() -> None:
    """Else it would hang up on its own words, and `sublet down --now` return while guests run on."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_mute = True
        closing = asyncio.ensure_future(agent.close(now=True))
        await until(lambda: bool(supervisors.asked))
        for _ in range(10):
            await asyncio.sleep(0)
        assert supervisors.asked == [Quit(now=True)]
        assert not closing.done()
        supervisors.answer()
        await closing

    played(play)


def test_the_grants_that_live_go_out_before_a_holder_is_let_in() -> None:
    """On one connection, in this order: then the supervisor knows the lease when the holder names it."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.may_order.clear()
        supervisors.hang_up(None)
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
            with contextlib.ExitStack() as stack:
                coming = admission(stack, agent)
                await asyncio.sleep(0)
                agent.send(end(3))
                supervisors.may_order.set()
                await coming
        assert [order.epoch.n for orders in supervisors.ordered for order in orders] == [3]

    played(play)


def test_orders_go_out_no_faster_than_they_are_taken() -> None:
    """More than a connection keeps for a peer that does not read would end it, and all guests with the supervisor."""
    count = 20_000

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_reading = False
        for n in range(count):
            agent.send(end(n))
        agent.tick(0)
        assert agent._link is not None
        assert agent._link.waiting < LINK_OUT_MAX // 4
        await asyncio.sleep(0)
        supervisors.is_reading = True
        await until(lambda: sum(len(batch) for batch in supervisors.ordered) == count)
        assert [order.epoch.n for batch in supervisors.ordered for order in batch] == list(range(count))
        assert supervisors.count == 1, "it is the same connection"
        assert not came.is_set()

    played(play)


def test_an_order_that_is_repeated_to_a_supervisor_that_stands_still_waits_once() -> None:
    """The office repeats what is not confirmed every two seconds; the newest is what counts."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.is_reading = False
        sent = [end(n) for n in range(5_000)]
        for _ in range(20):
            for order in sent:
                agent.send(order)
            agent.tick(0)
        supervisors.is_reading = True
        await until(lambda: not agent._core._out)
        await agent.ask(ListProcesses())  # is read behind all orders
        came_in = sum(len(batch) for batch in supervisors.ordered)
        assert came_in < 3 * len(sent), "all of what was said, and little of it twice"
        assert {order.epoch.n for batch in supervisors.ordered for order in batch} == set(range(len(sent)))

    played(play)


def test_what_is_ordered_while_a_supervisor_says_who_it_is_does_not_pile_up_on_the_connection() -> None:
    """Before its welcome nothing is taken, however much there is; then it is told of what lives."""

    async def play(agent: SupervisedAgent, supervisors: Supervisors, came: asyncio.Event) -> None:
        supervisors.may_configure.clear()
        supervisors.hang_up(None)
        await until(lambda: supervisors.later)
        for n in range(20_000):
            agent.send(end(n))
        agent._push()  # as the loop does when the socket takes more
        agent.tick(0)
        assert agent._link is not None
        assert agent._link.waiting == 0
        assert agent._link.over is None
        supervisors.may_configure.set()
        async with asyncio.timeout(PATIENCE_S):
            await came.wait()
        assert supervisors.count == 2
        assert not supervisors.ordered

    played(play)
