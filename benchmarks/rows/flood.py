"""How much longer another tenant waits for admission while one tenant floods the office.

The one asks for leases on many connections, as fast as answers come, and is told to slow down by its limit of requests
per minute; the other asks for a lease and gives it back, twenty times a second. Windows with and without the flood in
turn, of the same office; each request is from when it was due.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.load.flooding import Caller
from benchmarks.load.http1 import Address, Request, ask
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.procs import Child

CONNECTIONS: Final = 16
EVERY_S: Final = 0.05
WINDOW_S: Final = 12.0
ROUNDS: Final = 5
FACTOR_MAX: Final = 2.0
FACTOR: Final = "p99 of another tenant's admission under a flood, per p99 without"


def measure(bench: Bench) -> list[Figure]:
    rounds, window_s = bench.either((ROUNDS, WINDOW_S), (1, 4.0))
    quiet: list[list[float]] = []
    flooded: list[list[float]] = []
    answers: dict[str, int] = {}
    with Office(bench.folder / "office") as office:
        tokens = [_tenant(office.address, name) for name in ("calm", "flooder")]
        flooder = Child([sys.executable, "-m", "benchmarks.load.flooding"], name="flooder", pipes=True)
        try:
            said = {"address": asdict(office.address), "token": tokens[1], "connections": CONNECTIONS}
            flooder.ask(json.dumps(said))
            calm = Caller(office.address, tokens[0])
            _admissions_ms(calm, 1.0)
            for number in range(rounds):
                quiet.append(_admissions_ms(calm, window_s))
                flooder.ask(json.dumps({"flood": True}))
                time.sleep(1.0)  # it is under way
                flooded.append(_admissions_ms(calm, window_s))
                for status, count in json.loads(flooder.ask(json.dumps({"flood": False})))["counts"].items():
                    answers[status] = answers.get(status, 0) + count
                bench.say(f"round {number + 1}: p99 {_p99(quiet[-1]):.1f} ms, under a flood {_p99(flooded[-1]):.1f} ms")
        finally:
            flooder.end()
    flat = [[ms for window in windows for ms in window] for windows in (quiet, flooded)]
    bench.note(
        f"{len(flat[0]):,} admissions of the calm tenant without and {len(flat[1]):,} under a flood on {CONNECTIONS} "
        "connections, which was answered " + ", ".join(f"{count:,} × {code}" for code, count in sorted(answers.items()))
    )
    p99s = [[_p99(window) for window in windows] for windows in (quiet, flooded)]
    return [
        figure(FACTOR, "×", [b / a for a, b in zip(*p99s, strict=True)]),
        figure("admission without a flood, p99", "ms", p99s[0], operations=flat[0]),
        figure("admission under a flood, p99", "ms", p99s[1], operations=flat[1]),
    ]


def _tenant(address: Address, name: str) -> str:
    body = json.dumps({"id": name})
    answer = ask(address, Request(method="POST", path="/v1/tenants", body=body))
    token: str = json.loads(answer.body)["token"]
    return token


def _admissions_ms(caller: Caller, seconds: float) -> list[float]:
    """From when each was due to its answer. What was given back is no part of it."""
    found: list[float] = []
    begin_s = time.monotonic()
    for number in range(round(seconds / EVERY_S)):
        due_s = begin_s + number * EVERY_S
        time.sleep(max(0.0, due_s - time.monotonic()))
        status, lease = caller.lease(f"calm-{time.time_ns()}", 64 << 10)
        found.append(1e3 * (time.monotonic() - due_s))
        if not lease:
            raise RuntimeError(f"the calm tenant was answered {status}")
        caller.release(lease)
    return found


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


ROW: Final = Row(
    name="flood",
    title="admission of one tenant while another floods the office",
    goals=[Goal(figure=FACTOR, at_most=FACTOR_MAX)],
    measure=measure,
    limit_s=300,
    distributions=DISTRIBUTIONS,
)
