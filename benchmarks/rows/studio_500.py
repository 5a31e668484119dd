"""A course arrives at the studio: 500 people within ten minutes, on four host devices, each with an open page.

Each has a tenant, signs in, keeps the page open (its stream of changes), and starts a session at a moment of its own.
For the first half of the time a program of the owner has all devices, so that a queue of some hundreds builds up; then
they are free, and the queue runs off. What is granted is left to a notebook that never comes, so the next in the queue
gets it, and every page changes again.

*Admission* is the time from a person's request to the moment at which the office has it, by the office's record. A
*change* is shown when the stream of that person's page has it: the session after its request, a lease after
its grant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.load.http1 import Request, ask
from benchmarks.ours import DISTRIBUTIONS, Office, sublet_command
from benchmarks.procs import Child, cpu_seconds, free_port, memory_of, tree, wait_until
from benchmarks.stats import percentile

PEOPLE: Final = 500
WITHIN_S: Final = 600.0
DEVICES: Final = "4x16GiB"
AFTER_S: Final = 30.0
"""The pages are watched for so long after the last has arrived."""
SEED: Final = 500
WINDOW_S: Final = 10.0
"""Of processor time and memory."""
EVENT_BYTES_MAX: Final = 1 << 20
UPDATE: Final = '[studio]\nupdate = "1s"\n'
"""The settings of the studio."""

ADMISSION: Final = "admission, p99"
SHOWN: Final = "a started session on its page, p99"
GRANT_SHOWN: Final = "a grant on its page, p99"
CPU: Final = "processor of studio and office"
MEMORY: Final = "memory of studio and office, the most"


@dataclass
class Person:
    """One of them: who, and what was seen. Times are of the wall clock, in seconds."""

    number: int
    token: str
    cookie: str
    sent_s: float = 0.0
    session: str = ""
    answered_s: float = 0.0
    shown_s: float = 0.0
    granted_shown_s: float = 0.0
    events: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """What came of a course that arrived. Times in milliseconds."""

    admission: list[float]
    shown: list[float]
    grants: list[float]
    """From a grant until the page has it."""
    loads: list[tuple[float, float]]
    """Processor in per cent of a core, and memory in MB, by window."""
    wrong: list[str]
    events: int


def arrivals(bench: Bench, people: int, within_s: float, after_s: float, settings: str = UPDATE) -> Arrivals:
    """So many people arrive at a studio of their own. ``settings``: its studio.toml."""
    folder = bench.folder / f"{people}"
    folder.mkdir()
    with Office(folder, "--host-gpus", DEVICES) as office, running_studio(office, settings) as (studio, port):
        bench.say(f"{people} people are added")
        course = _add_people(office, people)
        watch = [*tree(office.pid), studio.pid]
        loads: list[tuple[float, float]] = []
        bench.say(f"they arrive within {within_s:.0f} s")
        asyncio.run(_arrive(bench, office, port, course, within_s, after_s, watch, loads))
        leases = _leases(office)
    return Arrivals(
        admission=[(leases[one.session][0] - one.sent_s) * 1e3 for one in course if one.session in leases],
        shown=[(one.shown_s - one.sent_s) * 1e3 for one in course if one.shown_s],
        grants=[
            (one.granted_shown_s - leases[one.session][1]) * 1e3
            for one in course
            if one.granted_shown_s and leases.get(one.session, (0, 0))[1]
        ],
        loads=loads,
        wrong=[one for person in course for one in person.wrong],
        events=sum(one.events for one in course),
    )


def measure(bench: Bench) -> list[Figure]:
    people, within_s = bench.either(PEOPLE, 40), bench.either(WITHIN_S, 12.0)
    came = arrivals(bench, people, within_s, bench.either(AFTER_S, 6.0))
    if len(came.wrong) > people // 100:
        raise RuntimeError(f"{len(came.wrong)} requests failed; the first: {came.wrong[0]}")
    if min(len(came.admission), len(came.shown)) < 0.9 * people:
        raise RuntimeError(
            f"of {people} sessions {len(came.admission)} are known to the office and {len(came.shown)} were shown."
        )
    bench.note(
        f"{people} people, a tenant each, {within_s:.0f} s, {DEVICES} host devices, {came.events:,} events on the "
        f"pages; {len(came.wrong)} requests failed. Pages are told of a change within `studio.update`, set to its "
        "least, 1 s. Processor and memory are those of office, supervisor and studio, in windows of "
        f"{WINDOW_S:.0f} s; MB are 10⁶ bytes, shared pages counted by part. Clients ran on the same machine."
    )
    grants = came.grants
    return [
        figure(ADMISSION, "ms", [percentile(came.admission, 99)], operations=came.admission),
        figure("admission, median", "ms", [statistics.median(came.admission)]),
        figure(SHOWN, "ms", [percentile(came.shown, 99)], operations=came.shown),
        figure("a started session on its page, median", "ms", [statistics.median(came.shown)]),
        *([figure(GRANT_SHOWN, "ms", [percentile(grants, 99)], operations=grants)] if grants else []),
        figure(CPU, "% of a core", [cpu for cpu, _ in came.loads]),
        figure(MEMORY, "MB", [max(memory for _, memory in came.loads)]),
    ]


@contextmanager
def running_studio(office: Office, settings: str = UPDATE) -> Iterator[tuple[Child, int]]:
    """`sublet studio` beside the office, and its port."""
    port = free_port()
    home = Path(office.env["SUBLET_HOME"])
    (home / "studio.toml").write_text(settings)
    command = [*sublet_command(), "studio", "--no-start", "--listen", f"127.0.0.1:{port}"]
    child = Child(command, name="studio", env=office.env)

    def is_ready() -> bool:
        try:
            return asyncio.run(_get(port, "/readyz"))[0] == 200
        except OSError:
            if not child.alive:
                raise RuntimeError(f"the studio ended: {child.complaint()}") from None
            return False

    try:
        wait_until(is_ready, within_s=30, what="the studio was not ready")
        yield child, port
    finally:
        child.end()


def _add_people(office: Office, count: int) -> list[Person]:
    from sublet.studio.people import People

    people = People(Path(office.env["SUBLET_HOME"]) / "studio", wall_ns=time.time_ns, random=secrets.token_bytes)
    made = []
    for number in range(count):
        name = f"student-{number}"
        body = json.dumps({"id": name})
        answer = ask(office.address, Request(method="POST", path="/v1/tenants", body=body))
        if answer.status != 201:
            raise RuntimeError(f"a tenant was refused: {answer.body!r}")
        people.add(name, name)
        token = people.new_token(name)
        made.append(Person(number, token, people.sign_in(token)))
    return made


async def _arrive(
    bench: Bench,
    office: Office,
    port: int,
    course: list[Person],
    within_s: float,
    after_s: float,
    watch: list[int],
    loads: list[tuple[float, float]],
) -> None:
    chance = random.Random(SEED)
    moments = sorted(chance.uniform(0, within_s) for _ in course)
    began_s = time.monotonic()
    holding = asyncio.create_task(asyncio.to_thread(_hold_all, office, within_s / 2))
    await asyncio.sleep(1.0)
    pages: list[asyncio.Task[None]] = []
    asked: list[asyncio.Task[None]] = []
    measuring = asyncio.create_task(_measure(bench, watch, loads, course))
    try:
        for person, moment in zip(course, moments, strict=True):
            await asyncio.sleep(max(0.0, began_s + moment - time.monotonic()))
            pages.append(asyncio.create_task(_page(port, person)))
            asked.append(asyncio.create_task(_start(port, person)))
        await asyncio.gather(*asked)
        await holding
        await asyncio.sleep(after_s)
    finally:
        measuring.cancel()
        for page in pages:
            page.cancel()
        await asyncio.gather(measuring, *pages, return_exceptions=True)


def _hold_all(office: Office, for_s: float) -> None:
    """The owner's program, at work on all devices."""
    import sublet

    with (
        sublet.connect(home=office.env["SUBLET_HOME"], start=False) as fabric,
        fabric.gpu(min_vram="16GiB", count=4, ttl="10m") as lease,
        lease.activity(),
    ):
        time.sleep(for_s)


async def _measure(bench: Bench, watch: list[int], loads: list[tuple[float, float]], course: list[Person]) -> None:
    while True:
        before, began_s = sum(map(cpu_seconds, watch)), time.monotonic()
        await asyncio.sleep(bench.either(WINDOW_S, 3.0))
        cpu = (sum(map(cpu_seconds, watch)) - before) / (time.monotonic() - began_s) * 100
        loads.append((cpu, sum(memory_of(pid).share for pid in watch) / 1e6))
        bench.say(
            f"{sum(1 for one in course if one.sent_s)} have arrived: {cpu:.0f} % of a core, {loads[-1][1]:.0f} MB, "
            f"{sum(one.events for one in course):,} events"
        )


async def _start(port: int, person: Person) -> None:
    body = json.dumps({"name": "lab-1", "vram": 8 << 30, "ttl": 600}).encode()
    person.sent_s = time.time()
    try:
        status, raw = await _get(
            port, "/v1/sessions", method="POST", body=body, head=f"authorization: Bearer {person.token}\r\n"
        )
    except OSError as error:
        person.wrong.append(f"start: {error}")
        return
    person.answered_s = time.time()
    if status != 200:
        person.wrong.append(f"start: {status} {raw[:200]!r}")
        return
    person.session = json.loads(raw)["id"]


async def _page(port: int, person: Person) -> None:
    """The stream of the person's page: when it shows the session, and its lease."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=EVENT_BYTES_MAX)
    try:
        head = f"GET /live HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncookie: sublet_studio={person.cookie}\r\n\r\n"
        writer.write(head.encode())
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            person.events += 1
            if not person.shown_s and b"lab-1" in line:
                person.shown_s = time.time()
            if not person.granted_shown_s and re.search(rb"state active|last lease", line):
                person.granted_shown_s = time.time()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _get(port: int, path: str, *, method: str = "GET", body: bytes = b"", head: str = "") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        first = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n{head}"
        writer.write(f"{first}content-length: {len(body)}\r\n\r\n".encode() + body)
        raw = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    answer, _, content = raw.partition(b"\r\n\r\n")
    return int(answer.split()[1]), content


def _leases(office: Office) -> dict[str, tuple[float, float]]:
    """By session, when its first request came to the office and when its first lease was granted; 0: never."""
    from sublet.wire.http_views import SESSION_LABEL

    answer = ask(office.address, Request(method="GET", path="/v1/leases?all=1", body=""))
    found: dict[str, tuple[float, float]] = {}
    for lease in sorted(json.loads(answer.body), key=lambda one: str(one["asked_at"])):
        session = lease["labels"].get(SESSION_LABEL)
        if session:
            found.setdefault(session, (_moment(lease["asked_at"]), _moment(lease["granted_at"])))
    return found


def _moment(text: Any) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


ROW: Final = Row(
    name="studio_500",
    title="500 sessions arrive at the studio within 10 minutes, with an open page each",
    goals=[
        Goal(figure=ADMISSION, at_most=100),
        Goal(figure=SHOWN, at_most=1000),
        Goal(figure=GRANT_SHOWN, at_most=1000),
        Goal(figure=CPU, at_most=100),
        Goal(figure=MEMORY, at_most=300),
    ],
    measure=measure,
    limit_s=900,
    distributions=DISTRIBUTIONS,
)
