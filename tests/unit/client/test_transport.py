"""Both transports against a server that says exactly what it is told, on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import pytest

from sublet.client import aio_driver, driver
from sublet.client import aio_transport as aio_transport_module
from sublet.client import transport as transport_module
from sublet.client.address import Address
from sublet.client.aio_transport import AioTransport
from sublet.client.fabric import Fabric
from sublet.client.steps import HttpCall, HttpReply, Pause, Program, Revive, ask
from sublet.client.transport import IDLE_MAX, Transport
from sublet.errors import Disconnected
from sublet.values import NS_PER_S
from tests.unit.client.script import HeldClock

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CALL = HttpCall(method="POST", path="/x", body=b"{}", timeout_s=60.0)
LONG = HttpCall(method="POST", path="/x", body=b" " * (4 << 20) + b"{}", timeout_s=60.0)
"""More than a connection takes before anybody reads it: whoever sends it has to wait for the server."""


class Server:
    """Answers each request with the next text; None closes the connection instead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: list[bytes | None] = []
        self.requests: list[bytes] = []
        self.connections = 0
        self.on_first_bytes: Callable[[], None] = lambda: None
        """Called when the first bytes of a request were read, and no others."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._serving: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._serving.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._serving[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        raw = b""
        try:
            while piece := connection.recv(65536):
                if not raw:
                    self.on_first_bytes()
                raw += piece
                if raw.endswith(b"{}") and b"\r\n\r\n" in raw:
                    self.requests.append(raw)
                    raw = b""
                    answer = self.answers.pop(0)
                    if answer is None:
                        break
                    connection.sendall(answer)
        except OSError:
            pass
        connection.close()

    def hang_up(self) -> None:
        """Close the connections that are open, as an office does that ends."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.hang_up()
        for thread in self._serving:
            thread.join()


class Exchange(Protocol):
    def __call__(self, *calls: HttpCall) -> list[HttpReply]: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path / "s")
    yield found
    found.close()


def blocking(path: Path) -> Exchange:
    def exchange(*calls: HttpCall) -> list[HttpReply]:
        transport = Transport(_address(path), HeldClock(), wire=1)
        try:
            return [transport.exchange(call) for call in calls]
        finally:
            transport.close()

    return exchange


def awaited(path: Path) -> Exchange:
    def exchange(*calls: HttpCall) -> list[HttpReply]:
        async def main() -> list[HttpReply]:
            transport = AioTransport(_address(path), HeldClock(), wire=1)
            try:
                return [await transport.exchange(call) for call in calls]
            finally:
                await transport.close()

        return asyncio.run(main(), debug=True)

    return exchange


def _address(path: Path) -> Address:
    return Address(url=f"unix://{path}", socket=path, token="sublet_x")


@pytest.fixture(params=[blocking, awaited])
def exchange(request: pytest.FixtureRequest, server: Server) -> Exchange:
    make: Callable[[Path], Exchange] = request.param
    return make(server.path)


def test_one_connection_carries_several_requests(server: Server, exchange: Exchange) -> None:
    server.answers = [OK, OK, OK]
    assert [(reply.status, reply.body) for reply in exchange(CALL, CALL, CALL)] == [(200, b"hi")] * 3
    assert server.connections == 1
    assert b"authorization: Bearer sublet_x\r\n" in server.requests[0]
    assert b"sublet-wire: 1\r\n" in server.requests[0]


def test_a_connection_that_is_to_close_is_not_used_again(server: Server, exchange: Exchange) -> None:
    server.answers = [OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), OK]
    exchange(CALL, CALL)
    assert server.connections == 2


def test_a_kept_connection_that_the_office_closed_is_not_used_again(server: Server) -> None:
    """An office was started anew between two calls. The second one must not come back as perhaps done."""
    server.answers = [OK] * 4
    transport = Transport(_address(server.path), HeldClock(), wire=1)
    transport.exchange(CALL)
    server.hang_up()
    assert transport.exchange(CALL).status == 200
    transport.close()

    async def main() -> int:
        transport = AioTransport(_address(server.path), HeldClock(), wire=1)
        await transport.exchange(CALL)
        server.hang_up()
        assert await transport._idle[0][0].read() == b"", "it has noticed the end"
        status = (await transport.exchange(CALL)).status
        await transport.close()
        return status

    assert asyncio.run(main()) == 200
    assert server.connections == 4


def test_a_transport_that_was_closed_keeps_no_connection(server: Server) -> None:
    """A call of another thread may still be under way when a fabric is closed."""
    transport = Transport(_address(server.path), HeldClock(), wire=1)
    server.answers = [OK, OK]
    flight = transport.launch(CALL)
    transport.close()
    while not flight.complete:
        flight.read()
    assert transport.exchange(CALL).status == 200
    assert transport._idle == []


def test_only_so_many_connections_are_kept(server: Server) -> None:
    """A burst of threads opens many at once; afterwards the office has no more to hold than the limit."""
    server.answers = [OK] * (IDLE_MAX + 3)
    transport = Transport(_address(server.path), HeldClock(), wire=1)
    flights = [transport.launch(CALL) for _ in range(IDLE_MAX + 3)]
    for flight in flights:
        while not flight.complete:
            flight.read()
    assert len(transport._idle) == IDLE_MAX
    transport.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of newer interpreters, beside the server's threads
def test_a_fork_opens_a_connection_of_its_own_and_its_parents_goes_on(server: Server) -> None:
    """Two programs on one connection would read each other's answers."""
    server.answers = [OK] * 3
    fabric = Fabric(_address(server.path), HeldClock(), start=False)
    fabric._transport.exchange(CALL)
    child = os.fork()
    if not child:
        status = 0
        try:
            status = fabric._transport.exchange(CALL).status
        finally:
            os._exit(status == 200)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert server.connections == 2
    assert fabric._transport.exchange(CALL).status == 200
    assert server.connections == 2
    fabric.close()


def test_connections_of_a_loop_that_runs_no_more_are_not_used_in_another(server: Server) -> None:
    """So it is after a fork, too: the loop of the parent does not run there."""
    server.answers = [OK] * 2
    transport = AioTransport(_address(server.path), HeldClock(), wire=1)
    loops = [asyncio.new_event_loop() for _ in range(2)]

    async def close(idle: list[Any]) -> None:
        for _, writer in idle:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    idle: list[Any] = []
    try:
        for loop in loops:
            assert loop.run_until_complete(transport.exchange(CALL)).status == 200
            idle.append(list(transport._idle))
        assert server.connections == 2
    finally:
        for loop, pipes in zip(loops, idle, strict=True):
            loop.run_until_complete(close(pipes))
            loop.close()


@pytest.mark.parametrize("answer", [None, OK[:-1], b"SMTP ready\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_half_an_answer_is_not_known(server: Server, exchange: Exchange, answer: bytes | None) -> None:
    """The request was sent, so it may have had its effect. The connection is there already: to make one takes time as
    well, and if that is up before, nothing was sent."""
    server.answers = [OK, answer]
    with pytest.raises(Disconnected) as caught:
        exchange(CALL, HttpCall(method="POST", path="/x", body=b"{}", timeout_s=0.2))
    assert caught.value.sent
    assert server.connections == 1


@pytest.mark.parametrize("way", ["exchange", "launch", "asyncio"])
def test_a_connection_that_breaks_while_a_request_is_sent_leaves_it_unknown(way: str, server: Server) -> None:
    """The office may have read enough: a release without a body is one that can be understood before its end."""
    server.on_first_bytes = server.hang_up
    ways: dict[str, Callable[[HttpCall], object]] = {
        "exchange": blocking(server.path),
        "launch": Transport(_address(server.path), HeldClock(), wire=1).launch,
        "asyncio": awaited(server.path),
    }
    with pytest.raises(Disconnected) as caught:
        ways[way](LONG)
    assert caught.value.sent


def test_an_answer_that_is_too_long_is_not_taken(
    server: Server, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever answers there, it must not fill the memory of the program."""
    for module in (transport_module, aio_transport_module):
        monkeypatch.setattr(module, "BODY_BYTES_MAX", 1)
    server.answers = [OK]
    with pytest.raises(Disconnected, match="too long"):
        exchange(CALL)


def test_nobody_there_is_known_to_have_had_no_effect(tmp_path: Path) -> None:
    for make in (blocking, awaited):
        with pytest.raises(Disconnected, match="nothing runs behind its socket") as caught:
            make(tmp_path / "nobody")(CALL)
        assert not caught.value.sent


# ---- from when an answer counts


def by_exchange(path: Path, clock: HeldClock) -> list[int]:
    transport = Transport(_address(path), clock, wire=1)
    sent = [transport.exchange(call).sent_ns for call in (LONG, LONG)]
    transport.close()
    return sent


def by_flight(path: Path, clock: HeldClock) -> list[int]:
    transport, sent = Transport(_address(path), clock, wire=1), []
    for _ in range(2):
        flight = transport.launch(LONG)
        sent.append(flight.sent_ns)
        while not flight.complete:
            flight.read()
    transport.close()
    return sent


def by_asyncio(path: Path, clock: HeldClock) -> list[int]:
    async def main() -> list[int]:
        transport = AioTransport(_address(path), clock, wire=1)
        sent = [(await transport.exchange(LONG)).sent_ns for _ in range(2)]
        await transport.close()
        return sent

    return asyncio.run(main())


@pytest.mark.parametrize("way", [by_exchange, by_flight, by_asyncio])
def test_an_answer_counts_from_before_the_first_byte_was_sent(
    way: Callable[[Path, HeldClock], list[int]], server: Server
) -> None:
    """Ten seconds pass while the request is being sent. The office may have begun to count at any moment of them, so
    the holder counts from before the first; also on a connection that was kept."""
    clock = HeldClock()
    server.on_first_bytes = lambda: clock.go(10)
    server.answers = [OK, OK]
    began_ns = clock.now_ns()
    assert way(server.path, clock) == [began_ns, began_ns + 10 * NS_PER_S]
    assert clock.now_ns() == began_ns + 20 * NS_PER_S
    assert server.connections == 1


def test_a_flight_is_read_as_it_comes_and_its_connection_is_kept(server: Server) -> None:
    transport = Transport(_address(server.path), HeldClock(), wire=1)
    server.answers = [OK, OK]
    flight = transport.launch(CALL)
    body = b""
    while not flight.complete:
        assert flight.fileno() > 0
        body += flight.read()
    assert body == b"hi"
    transport.exchange(CALL)
    assert server.connections == 1
    transport.close()


def test_a_flight_that_is_over_leaves_its_connection_to_the_next(server: Server) -> None:
    """To read or to close it again, as one does after a refusal, is harmless: it is no longer its own."""
    transport = Transport(_address(server.path), HeldClock(), wire=1)
    server.answers = [OK, OK, OK]
    flight = transport.launch(CALL)
    while not flight.complete:
        flight.read()
    flight.read()
    flight.close()
    first = transport.launch(CALL)
    second = transport.launch(CALL)
    assert first.fileno() != second.fileno()
    for other in (first, second):
        while not other.complete:
            other.read()
    assert server.connections == 2
    transport.close()


# ---- the drivers


def story(told: list[str]) -> Program[str]:
    """A program that meets everything a driver can bring it."""
    reply = yield from ask(CALL)
    told.append(f"got {reply.status}")
    yield Pause(1.5)
    yield Revive()
    try:
        yield from ask(CALL)
    except Disconnected as error:
        told.append(error.message)
    try:
        yield from ask(CALL)
    except KeyboardInterrupt:
        told.append("interrupted")
        yield from ask(CALL)  # putting things right takes a request
    return "done"


def test_both_drivers_carry_out_the_same_steps() -> None:
    """What a step raises is thrown into the program, an interrupt too, and what it then asks is still done."""

    def outcomes() -> list[HttpReply | BaseException]:
        return [HttpReply(200, b"", 0), Disconnected("silence"), KeyboardInterrupt(), HttpReply(200, b"", 0)]

    def take(left: list[HttpReply | BaseException]) -> HttpReply:
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    said: list[list[str]] = []
    left, told, waits = outcomes(), list[str](), list[object]()
    done = driver.run_program(story(told), lambda _: take(left), lambda: waits.append("revive"), waits.append)
    assert (done, left, waits) == ("done", [], [1.5, "revive"])
    said.append(told)

    left, told, waits = outcomes(), [], []

    async def exchange(_: HttpCall) -> HttpReply:
        return take(left)

    async def revive() -> None:
        waits.append("revive")

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def main() -> str:
        return await aio_driver.run_program(story(told), exchange, revive, sleep)

    assert (asyncio.run(main()), left, waits) == ("done", [], [1.5, "revive"])
    said.append(told)
    assert said[0] == said[1] == ["got 200", "silence", "interrupted"]


def test_an_interrupt_between_any_two_steps_reaches_the_program() -> None:
    """It comes at each line of the driver in turn. What was granted is given back; or the program is over, and has
    handed it out."""
    for at in itertools.count():
        office: list[str] = []
        lines = 0

        def granted(call: HttpCall, office: list[str] = office) -> HttpReply:
            office.append(call.path)
            return HttpReply(200, b"", 0)

        def holds(office: list[str] = office) -> Program[str]:
            try:
                yield from ask(CALL)
                yield Pause(0.0)
            except GeneratorExit:  # nobody would carry out another step
                raise
            except BaseException:
                if office:
                    office.clear()
                raise
            office.append("returned")
            return "a lease"

        def trace(frame: FrameType, event: str, _: object, at: int = at) -> Any:
            nonlocal lines
            if frame.f_code is not driver.run_program.__code__:
                return None
            if event == "line":
                lines += 1
                if lines == at + 1:
                    raise KeyboardInterrupt
            return trace

        before, done = sys.gettrace(), ""
        sys.settrace(trace)
        try:
            done = driver.run_program(holds(), granted, lambda: None, lambda _: None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert bool(done) == ("returned" in office) or lines > at
        assert done or office[-1:] in ([], ["returned"]), f"what was granted is lost (line {at})"
        if lines <= at:
            assert at > 6
            return


@pytest.mark.parametrize("ends", [True, False], ids=["ends by it", "goes on"])
def test_what_the_callers_of_an_interrupted_program_had_is_gone_with_them(ends: bool) -> None:
    """At once, and not when garbage is collected: a lease among it is given back when its object goes."""

    class Lease:
        pass

    seen: list[weakref.ref[Lease]] = []

    def program() -> Program[str]:
        try:
            yield from ask(CALL)
        except KeyboardInterrupt:
            if ends:
                raise
        return "done"

    def interrupted(_: HttpCall) -> HttpReply:
        raise KeyboardInterrupt

    def caller() -> None:
        lease = Lease()
        seen.append(weakref.ref(lease))
        driver.run_program(program(), interrupted, lambda: None, lambda _: None)

    gc.disable()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            caller()
        assert seen[0]() is None
    finally:
        gc.enable()
