"""A whole broker without files, sockets or waiting: the real ledger, driver, service and application, an agent with
pretended hardware, a clock that is held, and a journal that remembers and can be told to fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from biscuit_auth import KeyPair

from sublet.office.access import AccessList
from sublet.office.api.app import App
from sublet.office.api.service import ApiService, OfficeIdentity
from sublet.office.api.signing import Signer
from sublet.office.driver import Driver
from sublet.office.journal.audit import AuditRecord
from sublet.office.ledger.commands import OpenOffice
from sublet.office.ledger.events import Event
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Now
from sublet.testing import HeldClock
from sublet.testing.memory import MemoryAgent
from sublet.values import GIB, Epoch, Kind, NodeId, ResourceId
from sublet.wire.http import AuditReport
from sublet.wire.orders import Device, Inventory

T = TypeVar("T")


class RememberedJournal:
    """Keeps what it is given, in memory, and fails when it is told to."""

    def __init__(self) -> None:
        self.batches: list[tuple[Event, ...]] = []
        self.beats: list[int] = []
        self.snapshots: list[bytes] = []
        self.broken = False

    def commit(self, events: Sequence[Event], now: Now) -> None:
        if self.broken:
            raise OSError("no space left on device")
        self.batches.append(tuple(events))

    def beat(self, now: Now) -> None:
        if self.broken:
            raise OSError("no space left on device")
        self.beats.append(now.ns)

    def compact(self, snapshot: bytes, now: Now) -> None:
        self.snapshots.append(snapshot)

    def head(self) -> str:
        return "00"

    def records(self, after: int = 0) -> Iterator[AuditRecord]:
        return iter(())

    def latest(self, most: int, naming: str = "") -> list[AuditRecord]:
        return []

    def verify(self) -> AuditReport:
        return AuditReport(ok=True, records=0, head="00")

    def backup(self, path: Path) -> int:
        return 0


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Bench:
    """The parts, within reach of a test."""

    clock: HeldClock
    journal: RememberedJournal
    driver: Driver
    agent: MemoryAgent
    service: ApiService
    app: App
    deaths: list[str]
    stops: list[bool] = field(default_factory=list)

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        raw: Sequence[bytes] | None = None,
    ) -> Answer:
        """One request. ``raw`` gives the pieces of the body as they are."""
        pieces = [b"" if body is None else json.dumps(body).encode()] if raw is None else list(raw)
        return await exchange(self.app, method, path, pieces, token=token, headers=headers)

    async def acquire(self, caller: str | None = None, **fields: object) -> Any:
        """A lease, by default of one whole device; the answer's document."""
        body: dict[str, object] = {"request_id": f"r{self.service.requests}", "wants": [{"kind": "gpu", "amount": GIB}]}
        return (await self.ask("POST", "/v1/leases", {**body, **fields}, token=caller)).json

    async def volume(self, caller: str | None, name: str, *, size: int = GIB, live: bool = False) -> Any:
        """A volume with something in it; the lease that made it."""
        lease = (await self.acquire(caller, request_id=f"{caller}{name}", wants=_block(size), name=name))["lease"]
        self.agent.touch(lease["id"], Epoch(*lease["epoch"]))
        if not live:
            await self.ask("POST", f"/v1/leases/{lease['id']}/release", {}, token=caller)
            await self.pass_time("1s")
        return lease

    async def tenant(self, name: str, **fields: object) -> str:
        """A new tenant; its access token."""
        answer = await self.ask("POST", "/v1/tenants", {"id": name, **fields})
        assert answer.status == 201, answer.body
        token: str = answer.json["token"]
        return token

    async def pass_time(self, duration: float | str) -> None:
        """The clock moves, and the driver looks at it as its timer would."""
        self.clock.advance(duration)
        self.driver._beat()
        await turns()
        self.driver._flush()
        await turns()


def _block(size: int) -> list[dict[str, object]]:
    return [{"kind": "block", "amount": size}]


async def turns(count: int = 20) -> None:
    """Let the loop run what is ready, a few times over. No time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


class HeldLoop:
    """The clock of the running loop, which moves when the story says so: a busy machine lets no timer run out."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time()
        loop.time = lambda: self._now_s  # type: ignore[method-assign]

    async def passes(self, seconds: float) -> None:
        """So much time, after all that is ready by now; timers that are due are carried out."""
        await turns()
        self._now_s += seconds
        await turns()

    def let_go(self) -> None:
        """It runs again."""
        del asyncio.get_running_loop().time


async def exchange(
    app: Callable[[Any, Any, Any], Awaitable[None]],
    method: str,
    path: str,
    pieces: list[bytes],
    *,
    token: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    gone: asyncio.Event | None = None,
    on_body: Callable[[bytes], None] | None = None,
    held: asyncio.Event | None = None,
) -> Answer:
    """Speak ASGI with the application. ``gone`` closes the connection from the caller's side; the last piece of the
    body is ``held`` back."""
    raw_path, _, query = path.encode().partition(b"?")
    sent = list(headers)
    if token is not None:
        sent.append((b"authorization", b"Bearer " + token.encode()))
    waiting = list(pieces)
    left = asyncio.Event() if gone is None else gone
    head: dict[str, Any] = {}
    body: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if waiting:
            piece = waiting.pop(0)
            if held is not None and not waiting:
                await held.wait()
            return {"type": "http.request", "body": piece, "more_body": bool(waiting)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            body.append(message["body"])
            if on_body is not None:
                on_body(message["body"])

    scope = {
        "type": "http",
        "method": method,
        "path": raw_path.decode("ascii", "replace"),
        "raw_path": raw_path,
        "query_string": query,
        "headers": sent,
    }
    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in head["headers"]}
    return Answer(head["status"], found, b"".join(body))


def inventory(gpus: int = 2) -> Inventory:
    """Host devices of 4 GiB, four cores, 8 GiB of memory, 10 GiB of disk."""
    node = NodeId("n1")
    devices = [
        Device(id=ResourceId(f"n1/gpu{i}"), kind=Kind.GPU, capacity=4 * GIB, model="m", host=True) for i in range(gpus)
    ]
    devices.append(Device(id=ResourceId("n1/cpu"), kind=Kind.CPU, capacity=4))
    devices.append(Device(id=ResourceId("n1/memory"), kind=Kind.MEMORY, capacity=8 * GIB))
    devices.append(Device(id=ResourceId("n1/block"), kind=Kind.BLOCK, capacity=10 * GIB))
    return Inventory(node=node, domain="d1", devices=tuple(devices))


@contextlib.asynccontextmanager
async def bench(*, gpus: int = 2, local_rule: bool = True, policy: Policy | None = None) -> AsyncIterator[Bench]:
    """An office that is open."""
    clock, journal = HeldClock(), RememberedJournal()
    deaths: list[str] = []
    stops: list[bool] = []
    driver = Driver(ledger=Ledger(policy or Policy()), journal=journal, clock=clock, die=deaths.append)
    agent = MemoryAgent(inventory(gpus), report=driver.report, clock=clock)
    service = ApiService(
        driver=driver,
        identity=OfficeIdentity(
            pid=1, version="0", home=Path("/h"), embedded=False, started_ns=clock.now_ns(), started_wall_ns=0
        ),
        access=AccessList(local_rule=local_rule),
        signer=Signer(KeyPair().private_key, "office"),
        archive=journal,
        stop=lambda: stops.append(True),
    )
    await driver.start(OpenOffice(incarnation=1, clock_domain=clock.domain), [agent])
    found = Bench(clock, journal, driver, agent, service, App(service), deaths, stops)
    try:
        yield found
    finally:
        service.close()
        driver.stop()


def run(story: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a story to its end; one that hangs fails instead of holding up everybody."""

    async def bounded() -> T:
        async with asyncio.timeout(200):
            return await story()

    return asyncio.run(bounded())
