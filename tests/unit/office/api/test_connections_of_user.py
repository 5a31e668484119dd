"""The connections of users of the machine: how many they may have to one socket, and who of them is connected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from sublet.office.access import Origin
from sublet.office.api import processes as seen_processes
from sublet.office.api import server as http_server
from sublet.office.api.processes import ProcessTable
from sublet.office.api.server import HttpServer
from sublet.office.api.service import REFUSAL_EVERY_S
from sublet.office.policy_file import PolicyLimits
from tests.unit.office.api.bench import bench, run

STRANGER = 65534
HELLO = b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_user_has_as_many_connections_as_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_user_of", lambda _: STRANGER)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with bench() as b:
            server = HttpServer(b.app, on_limit=b.service.limit, of_user=4)
            with contextlib.ExitStack() as stack:
                answers = []
                for _ in range(5):
                    here, there = socket.socketpair()
                    stack.callback(here.close)
                    here.setblocking(False)
                    await loop.connect_accepted_socket(server._protocol, there)
                    with contextlib.suppress(ConnectionError):  # the last one is refused before it has asked
                        await loop.sock_sendall(here, HELLO)
                    answers.append(await loop.sock_recv(here, 4096))
                heads = [answer.split(b"\r\n")[0] for answer in answers]
                assert heads == [b"HTTP/1.1 200 OK"] * 4 + [b"HTTP/1.1 503 Service Unavailable"]
                error = json.loads(answers[4].partition(b"\r\n\r\n")[2])["error"]
                assert (error["kind"], error["transient"]) == ("Disconnected", True), "so that it is asked again"
                assert (
                    error["message"]
                    == f"the office has too many connections: user {STRANGER} has 4 connections open here"
                )
            await server.close()

    run(story)


def test_operators_see_who_is_connected_over_the_shared_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """User and process as the kernel says, and the tenant once a request of it was accepted; nobody else sees that."""
    monkeypatch.setattr(seen_processes, "_origin", lambda _sock, shared: Origin(shared=shared, uid=STRANGER, pid=77))

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with bench() as b:
            ana = (await b.ask("POST", "/v1/tenants", {"id": "ana"})).json["token"]
            server = HttpServer(b.app, on_limit=b.service.limit, processes=ProcessTable(), shared=True)
            own = HttpServer(b.app, on_limit=b.service.limit, processes=ProcessTable())
            with contextlib.ExitStack() as stack:
                here: list[socket.socket] = []
                for each in (server, server, own):
                    near, far = socket.socketpair()
                    stack.callback(near.close)
                    near.setblocking(False)
                    await loop.connect_accepted_socket(each._protocol, far)
                    here.append(near)
                [seen] = (await b.ask("GET", "/v1/connections")).json
                assert seen.pop("since").endswith("Z")
                assert seen == {"uid": STRANGER, "pid": 77, "tenants": [], "connections": 2}
                asked = b"GET /v1/leases HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n"
                for token, status in ((b"sublet_no", b"401"), (ana.encode(), b"200")):
                    await loop.sock_sendall(here[0], asked % token)
                    assert (await loop.sock_recv(here[0], 4096)).split()[1] == status
                [seen] = (await b.ask("GET", "/v1/connections")).json
                assert seen["tenants"] == ["ana"]
                assert (await b.ask("GET", "/v1/connections", token=ana)).status in (401, 403)
            await server.close()
            await own.close()
            for _ in range(3):
                await asyncio.sleep(0)
            assert (await b.ask("GET", "/v1/connections")).json == []

    run(story)


def test_who_is_connected_is_listed_by_user_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order they came, so that two lists can be compared."""
    came = iter(((1002, 8), (1001, 9), (1002, 7), (1001, 10)))

    def origin(_sock: object, shared: bool) -> Origin:
        uid, pid = next(came)
        return Origin(shared=shared, uid=uid, pid=pid)

    monkeypatch.setattr(seen_processes, "_origin", origin)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with bench() as b:
            server = HttpServer(b.app, on_limit=b.service.limit, processes=ProcessTable(), shared=True)
            with contextlib.ExitStack() as stack:
                for _ in range(4):
                    near, far = socket.socketpair()
                    stack.callback(near.close)
                    await loop.connect_accepted_socket(server._protocol, far)
                listed = (await b.ask("GET", "/v1/connections")).json
                assert [(one["uid"], one["pid"]) for one in listed] == [(1001, 9), (1001, 10), (1002, 7), (1002, 8)]
            await server.close()

    run(story)


def test_a_user_beyond_its_rate_hears_of_it_at_an_even_pace_on_all_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever tokens it shows; another user is answered meanwhile."""
    uids = iter((STRANGER,) * 6 + (STRANGER - 1,))
    monkeypatch.setattr(seen_processes, "_origin", lambda _sock, shared: Origin(shared=shared, uid=next(uids), pid=77))

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with bench() as b:
            b.service.set_limits(PolicyLimits(given={"user.requests_per_minute": 60}))
            server = HttpServer(b.app, on_limit=b.service.limit, processes=ProcessTable(), shared=True)
            with contextlib.ExitStack() as stack:
                here: list[socket.socket] = []
                for _ in range(7):
                    near, far = socket.socketpair()
                    stack.callback(near.close)
                    near.setblocking(False)
                    await loop.connect_accepted_socket(server._protocol, far)
                    here.append(near)

                async def ask(which: int) -> bytes:
                    await loop.sock_sendall(here[which], HELLO)
                    return await loop.sock_recv(here[which], 4096)

                while (await ask(0)).startswith(b"HTTP/1.1 200"):
                    pass
                began_s = loop.time()
                refused = [asyncio.ensure_future(ask(which)) for which in range(6)]
                assert (await ask(6)).startswith(b"HTTP/1.1 200")
                assert not any(one.done() for one in refused), "their pace is no other user's"
                for answer in await asyncio.gather(*refused):
                    head = answer.partition(b"\r\n\r\n")[0].lower()
                    assert head.startswith(b"http/1.1 409 ")
                    assert b"\r\nretry-after: 1" in head
                # The pause before the first of the six began with the refusal before it, some time before ``began_s``.
                assert loop.time() - began_s >= 5 * REFUSAL_EVERY_S
            await server.close()

    run(story)
