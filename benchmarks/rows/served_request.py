"""The first byte of a served request, warm and after an idle end, against the same application in a plain uvicorn.

Both sides serve one and the same file: an ASGI application that answers a few bytes. Each request has a connection of
its own, from the connect to the first byte of the answer. Warm: the program has its lease. After an idle end: the lease
has ended for want of requests, and the request that is timed takes another one, starts the program under it, restores
what it saved, and is answered. A uvicorn that is up never ends, so there are two peers of that: a request to it, and
one that first has to start it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Row, figure
from benchmarks.load.http1 import Address, Request, ask, connect
from benchmarks.ours import DISTRIBUTIONS, Office, sublet_command
from benchmarks.procs import Child, free_port, wait_until

APPLICATION: Final = '''
"""Served by `sublet studio serve` and by uvicorn."""
asked = 0

async def app(scope, receive, send):
    global asked
    asked += 1
    body = str(asked).encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})

def save():
    return str(asked).encode()

def restore(state):
    global asked
    asked = int(state)
'''
PAIRS: Final = 20
IDLE_PAIRS: Final = 15
REQUESTS: Final = 100
"""A warm sample is their median."""
IDLE: Final = "2s"
"""The least that a lease may live without a request."""
REQUEST: Final = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
PATIENCE_S: Final = 60.0

WARM: Final = "first byte, warm"
AFTER: Final = "first byte after an idle end"
STARTED: Final = "first byte after an idle end, against starting uvicorn"


def measure(bench: Bench) -> list[Figure]:
    file = bench.folder / "served_application.py"
    file.write_text(APPLICATION)
    requests = bench.either(REQUESTS, 10)
    with Office(bench.folder, "--host-gpus", "1x1GiB") as office, _served(office, file) as ours, _uvicorn(file) as peer:
        _first_byte_ms(ours)  # so that it has a lease, and the interpreters are warm
        _first_byte_ms(peer)

        def many_ms(port: int) -> list[float]:
            return [_first_byte_ms(port) for _ in range(requests)]

        a, b = bench.pairs(
            WARM,
            lambda: many_ms(ours),
            lambda: many_ms(peer),
            pairs=bench.either(PAIRS, 2),
            show=lambda a, b: f"{statistics.median(a):.2f} ms, uvicorn {statistics.median(b):.2f} ms",
        )
        warm = figure(
            WARM,
            "ms",
            [statistics.median(one) for one in a],
            [statistics.median(one) for one in b],
            peer_name="uvicorn",
            operations=[one for sample in a for one in sample],
            peer_operations=[one for sample in b for one in sample],
        )

        def after_idle_ms() -> float:
            _await_idle_end(office)
            return _first_byte_ms(ours)

        def beside_ms() -> tuple[float, float]:
            return _first_byte_ms(peer), _started_ms(file)

        c, d = bench.pairs(
            AFTER,
            after_idle_ms,
            beside_ms,
            pairs=bench.either(IDLE_PAIRS, 2),
            show=lambda c, d: f"{c:.0f} ms, uvicorn {d[0]:.2f} ms, uvicorn started {d[1]:.0f} ms",
        )
    bench.note(
        f"A lease ends after {IDLE} without a request here; the next request takes another, on a host device. A warm "
        f"sample is the median of {requests} requests, one after the other, each on a connection of its own."
    )
    return [
        warm,
        figure(AFTER, "ms", c, [one for one, _ in d], peer_name="uvicorn, up"),
        figure(STARTED, "ms", c, [one for _, one in d], peer_name="uvicorn, started"),
    ]


def _first_byte_ms(port: int) -> float:
    began = time.perf_counter()
    with connect(Address(port=port), timeout_s=PATIENCE_S) as sock:
        sock.sendall(REQUEST)
        data = sock.recv(1 << 16)
        took = time.perf_counter() - began
        while more := sock.recv(1 << 16):
            data += more
    if not data.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a request was not answered: {data[:300]!r}")
    return took * 1e3


def _await_idle_end(office: Office) -> None:
    """Without a request, until the lease has ended; that it was for want of requests is looked at."""

    def leases() -> Sequence[Any]:
        found: list[Any] = json.loads(ask(office.address, Request(method="GET", path="/v1/leases?all=1", body="")).body)
        return [one for one in found if one["wants"][0]["kind"] == "gpu"]

    wait_until(lambda: all(one["end"] for one in leases()), within_s=PATIENCE_S, what="the lease did not end")
    reason = max(leases(), key=lambda one: str(one["asked_at"]))["end"]["reason"]
    if reason != "idle":
        raise RuntimeError(f"the lease was to end idle, and ended {reason}.")


@contextmanager
def _served(office: Office, file: Path) -> Iterator[int]:
    port = free_port()
    words = ["studio", "serve", str(file), "--vram", "256MiB", "--idle", IDLE, "--wait", "60s"]
    child = Child([*sublet_command(), *words, "--listen", f"127.0.0.1:{port}"], name="serve", env=office.env)
    with _up(child, port):
        yield port


@contextmanager
def _uvicorn(file: Path) -> Iterator[int]:
    port = free_port()
    with _up(Child(_uvicorn_command(file, port), name="uvicorn", folder=file.parent), port):
        yield port


def _uvicorn_command(file: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "uvicorn", f"{file.stem}:app", "--port", str(port), "--log-level", "warning"]


@contextmanager
def _up(child: Child, port: int) -> Iterator[None]:
    try:
        wait_until(
            lambda: _listens(child, port), within_s=PATIENCE_S, what=f"{child.name} did not listen", every_s=0.002
        )
        yield
    finally:
        child.end()


def _listens(child: Child, port: int) -> bool:
    try:
        connect(Address(port=port)).close()
    except OSError:
        if not child.alive:
            raise RuntimeError(f"{child.name} ended: {child.complaint()}") from None
        return False
    return True


def _started_ms(file: Path) -> float:
    """From the start of a uvicorn to the first byte of its first answer."""
    began = time.perf_counter()
    with _uvicorn(file) as port:
        _first_byte_ms(port)
        return (time.perf_counter() - began) * 1e3


ROW: Final = Row(
    name="served_request",
    title="the first byte of a served request, warm and after an idle end, against the same in a plain uvicorn",
    goals=[],
    measure=measure,
    limit_s=600,
    distributions=DISTRIBUTIONS,
)
