"""The data door: who is let in, as whom, and that nobody who says nothing, too much or nonsense keeps it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sublet import background
from sublet.background import SHORTAGES
from sublet.errors import CapacityExceeded, Disconnected, InvalidRequest, SubletError, Unauthorized
from sublet.lease.token import TokenClaims, TokenOperation
from sublet.node.agent import data_door
from sublet.node.agent.data_door import Door, Visitor
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.codec import dumps
from sublet.wire.frames import FrameKind, encode
from sublet.wire.guests import Front, Greeting, Profile
from sublet.wire.link import Link
from sublet.wire.link_events import Over, PeerHello
from sublet.wire.sockets import PeerProcess, receive_some, send_some
from tests.shortages import fail_accepts


class Rights:
    """An office on paper."""

    def claims(self, capability: str, peer: PeerProcess, *, as_tenant: bool) -> TokenClaims:
        if capability != "good":
            raise Unauthorized("this token is not ours")
        return TokenClaims(
            tenant=TenantId("ana"),
            lease=LeaseId("l"),
            epoch=Epoch(1, 2),
            operations=frozenset({TokenOperation.RUN}),
            expires=1 << 40,
            key_id="k",
            office="o",
            generation=5,
            actor=(TenantId("studio"), 7),
        )

    def visitor(self, access: str, peer: PeerProcess, *, as_tenant: bool) -> Visitor:
        if access not in ("", "ana"):
            raise Unauthorized("this token is not ours")
        return Visitor(TenantId(access or "local"), not access, 3)


class Supervisor:
    """Takes what it is handed, and keeps a copy of the descriptor, as a real one does."""

    def __init__(self) -> None:
        self.fronts: list[Front] = []
        self.away = False

    async def admit(self, front: Front, hello: PeerHello, fd: int) -> None:
        if self.away:
            raise Disconnected("the supervisor of this machine is being started")
        self.fronts.append(front)
        link = Link.adopted(hello)
        link.welcome()
        with socket.socket(fileno=os.dup(fd)) as mine:
            send_some(mine, link)


class Bench:
    def __init__(self, path: Path) -> None:
        self.path, self.supervisor = path, Supervisor()
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        self.ended: list[str] = []
        self.limits: list[str] = []
        self.door = Door(listening, Rights(), self.supervisor, die=self.ended.append, on_limit=self.limits.append)

    async def says(self, *pieces: bytes) -> SubletError | None:
        """Connect and say this; the error one is turned away with, None if one is let in (and has been cut since)."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, str(self.path))
            link = Link.connecting()
            link.drop_output()
            for piece in pieces:
                await loop.sock_sendall(sock, piece)
                await asyncio.sleep(0.01)
            while link.over is None:
                if not await asyncio.wait_for(self._readable(sock), 20):
                    break
                for one in receive_some(sock, link):
                    if isinstance(one, Over):
                        return one.error
        return None

    async def _readable(self, sock: socket.socket) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def came() -> None:
            if not future.done():
                future.set_result(True)

        asyncio.get_running_loop().add_reader(sock.fileno(), came)
        try:
            return await future
        finally:
            asyncio.get_running_loop().remove_reader(sock.fileno())


@asynccontextmanager
async def bench(place: Path) -> AsyncIterator[Bench]:
    made = Bench(place / "data.sock")
    made.door.open()
    try:
        yield made
    finally:
        made.door.close()


def run(place: Path, story: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        async with bench(place) as made:
            await story(made)

    asyncio.run(told())


def hello(greeting: Greeting | bytes) -> bytes:
    link = Link.connecting(greeting if isinstance(greeting, bytes) else dumps(greeting))
    return b"".join(data for data, _ in link.take_output())


def test_a_capability_opens_what_it_says(tmp_path: Path) -> None:
    async def story(b: Bench) -> None:
        assert await b.says(hello(Greeting(capability="good"))) is None
        assert b.supervisor.fronts == [
            Front(
                tenant=TenantId("ana"),
                operator=False,
                profile=Profile.TENANT,
                lease=LeaseId("l"),
                epoch=Epoch(1, 2),
                operations=("run",),
                generation=5,
                actor="studio",
                actor_generation=7,
            )
        ], "by the generations the connection is cut when rights change"

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("greeting", "tenant", "operator", "profile"),
    [
        (Greeting(access="ana"), "ana", False, Profile.TENANT),
        (Greeting(), "local", True, Profile.LOCAL),
        (b"", "local", True, Profile.LOCAL),
    ],
)
def test_without_a_lease_one_sees_and_starts_nothing(
    tmp_path: Path, greeting: Greeting | bytes, tenant: str, operator: bool, profile: Profile
) -> None:
    async def story(b: Bench) -> None:
        assert await b.says(hello(greeting)) is None
        [front] = b.supervisor.fronts
        assert (front.tenant, front.operator, front.profile, front.lease) == (tenant, operator, profile, None)
        assert front.generation == 3, "by it the connection is cut when the rights change"

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ([hello(Greeting(capability="bad"))], Unauthorized),
        ([hello(Greeting(access="bad"))], Unauthorized),
        ([hello(Greeting(capability="good", access="ana"))], Unauthorized),
        ([hello(b"no greeting")], InvalidRequest),
        ([b"GET / HTTP/1.1\r\n\r\n" + bytes(64)], InvalidRequest),
        ([bytes(range(256))], InvalidRequest),
        ([hello(Greeting()) + encode(FrameKind.PING, 0, b"", version=1)], InvalidRequest),
        ([hello(Greeting())[:-1], hello(Greeting())[-1:] + b"\1"], InvalidRequest),
    ],
)
def test_who_is_not_welcome_is_told_why(tmp_path: Path, said: list[bytes], error: type[SubletError]) -> None:
    async def story(b: Bench) -> None:
        assert isinstance(await b.says(*said), error)
        assert b.supervisor.fronts == []
        assert await b.says(hello(Greeting(capability="good"))) is None, "others are let in"

    run(tmp_path, story)


def test_silence_is_shown_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether nothing is said at all, or never all of it."""
    monkeypatch.setattr(data_door, "GREETING_S", 0.1)

    async def story(b: Bench) -> None:
        await b.says()
        await b.says(hello(Greeting(capability="good"))[:-1])
        assert b.supervisor.fronts == []

    run(tmp_path, story)


def test_a_supervisor_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    async def story(b: Bench) -> None:
        b.supervisor.away = True
        assert isinstance(await b.says(hello(Greeting(capability="good"))), Disconnected)

    run(tmp_path, story)


def test_too_many_who_say_nothing_do_not_keep_others_out_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_door, "GREETING_NOW_MAX", 3)
    monkeypatch.setattr(data_door, "GREETING_S", 0.3)

    async def story(b: Bench) -> None:
        silent = [asyncio.ensure_future(b.says()) for _ in range(5)]
        await asyncio.gather(*silent)
        assert b.limits
        monkeypatch.setattr(data_door, "GREETING_S", 60.0)
        assert await b.says(hello(Greeting(capability="good"))) is None

    run(tmp_path, story)


def test_those_that_were_handed_over_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those that were turned away: else the door would close for good after some hundreds."""
    monkeypatch.setattr(data_door, "GREETING_NOW_MAX", 2)
    monkeypatch.setattr(data_door, "GREETING_RESERVED", 0)

    async def story(b: Bench) -> None:
        for _ in range(3):
            assert await b.says(hello(Greeting(capability="good"))) is None
            assert isinstance(await b.says(hello(Greeting(capability="bad"))), Unauthorized)
        assert b.limits == []

    run(tmp_path, story)


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, os.strerror(number)) for number in sorted(SHORTAGES)),
        OSError(errno.ECONNABORTED, "gone"),
        MemoryError(),
    ],
    ids=repr,
)
def test_a_connection_that_cannot_be_accepted_waits_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.001,))

    async def story() -> None:
        left = fail_accepts(monkeypatch, error)
        async with bench(tmp_path) as b:
            assert await b.says(hello(Greeting(capability="good"))) is None
            assert not left[0]
            assert b.ended == []

    asyncio.run(story())


def test_a_door_without_descriptors_opens_again_when_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is real: it is lowered so far that the kernel refuses the door a descriptor."""
    monkeypatch.setattr(background, "_troubles", {})

    async def story(b: Bench) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (sock.fileno() + 1, hard))  # all below are taken
            try:
                held = _all_below(sock.fileno())
                await loop.sock_connect(sock, str(b.path))
                await loop.sock_sendall(sock, hello(Greeting(capability="good")))
                async with asyncio.timeout(60):
                    while _shortages() < 2:  # noqa: ASYNC110 - what is waited for is no event
                        await asyncio.sleep(0.002)
                assert b.supervisor.fronts == []
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for fd in held:
                    os.close(fd)
            async with asyncio.timeout(20):
                while not b.supervisor.fronts:  # noqa: ASYNC110 - what is waited for is no event
                    await asyncio.sleep(0.01)
        assert await b.says(hello(Greeting(capability="good"))) is None
        assert not any(one.failing for one in background.troubles() if one.name == "data_door")
        assert b.ended == []

    run(tmp_path, story)


def _shortages() -> int:
    """How often the door was refused a descriptor."""
    return sum(one.shortages for one in background.troubles() if one.name == "data_door")


def _all_below(fd: int) -> list[int]:
    """Take every descriptor that the limit still allows."""
    held: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(fd))
    return held


def test_who_comes_when_there_is_no_descriptor_to_hand_over_is_told_so(tmp_path: Path) -> None:
    async def story(b: Bench) -> None:
        admit = b.supervisor.admit

        async def short(front: Front, hello: PeerHello, fd: int) -> None:
            b.supervisor.admit = admit  # type: ignore[method-assign]
            raise OSError(errno.EMFILE, "Too many open files")

        b.supervisor.admit = short  # type: ignore[method-assign]
        assert isinstance(await b.says(hello(Greeting(capability="good"))), CapacityExceeded)
        assert await b.says(hello(Greeting(capability="good"))) is None

    run(tmp_path, story)


def test_a_door_that_ends_ends_the_office_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async def broken(listening: socket.socket) -> Any:
            raise KeyError("a mistake")

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", broken)
        async with bench(tmp_path) as b:
            async with asyncio.timeout(20):
                while not b.ended:  # noqa: ASYNC110 - what is waited for is no event
                    await asyncio.sleep(0.002)
            assert b.ended == ["the office stopped: its data door ended (KeyError: 'a mistake')"]

    asyncio.run(story())
