"""How long until a Python guest with numpy can begin: forked from a warm interpreter, against a fresh one.

Timed is from the wish to the moment at which its own code runs with numpy at hand, by the clock of the machine, which
both read. Ours is started under a lease by whoever holds it: a message to the supervisor, a process with its cgroup,
its durable note, its log. The peer is a process and nothing else. Ray's actor is the nearest thing that others have to
a guest; beside it the time runs until its answer is back, for ours as well.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.holding import PATIENCE_S, Holder, Lease, new_tenant
from benchmarks.ours import DISTRIBUTIONS, Office
from benchmarks.peers.ray import PUBLISHED_S, Ray
from benchmarks.peers.venv import python_with, version_in
from benchmarks.procs import wait_until

PAIRS: Final = 60
RAY_PAIRS: Final = 12
WARM: Final = "guest with numpy, from the zygote"
TENANT: Final = "`echo` in profile tenant, against local"
COLD: Final = "guest with numpy, from a fresh interpreter"
ACTOR: Final = "guest with numpy, against an actor of ray"
_SAY: Final = """
import sys
warm = "numpy" in sys.modules
import numpy, time
print("warm" if warm else "cold", time.monotonic_ns(), flush=True)
"""
_WANT: Final = {"kind": "memory", "amount": 256 << 20}
TTL_S: Final = 1800.0


def measure(bench: Bench) -> list[Figure]:
    python = python_with("numpy", bench.folder)
    bench.versions["numpy"] = version_in(python, "numpy")
    pairs = bench.either(PAIRS, 3)
    with Office(bench.folder) as office, Holder(office) as holder:
        lease = holder.take(_WANT, ttl_s=TTL_S)
        try:
            guests = _Guests(lease, python)
            figures = _against_interpreter(bench, guests, pairs)
            figures += _tenant(bench, office, lease, pairs)
            figures += _against_ray(bench, guests)
        finally:
            lease.release()
    bench.note("Ours under a lease that is held already; acquiring one is measured in acquire_release.")
    return figures


class _Guests:
    """Guests of one lease, one after the other."""

    def __init__(self, lease: Lease, python: Path) -> None:
        self._lease = lease
        self.python = str(python)
        wait_until(lambda: self._start(("numpy",)).is_warm, within_s=PATIENCE_S, what="no warm interpreter")

    def warm_ms(self) -> float:
        return self._warm().began_ms

    def answered_ms(self) -> float:
        return self._warm().answered_ms

    def cold_ms(self) -> float:
        return self._start(()).began_ms

    def _warm(self) -> _Start:
        started = self._start(("numpy",))
        if not started.is_warm:
            raise RuntimeError("a guest was to come from the zygote, and did not.")
        return started

    def _start(self, imports: tuple[str, ...]) -> _Start:
        wished_ns = time.monotonic_ns()
        guest = self._lease.start(self.python, "-c", _SAY, imports=imports)
        started = _Start(guest.first_line(), wished_ns)
        guest.gone()
        return started


class _Start:
    """What came of one."""

    def __init__(self, line: str, wished_ns: int) -> None:
        word, ns = line.split()
        self.is_warm = word == "warm"
        self.began_ms = (int(ns) - wished_ns) / 1e6
        self.answered_ms = (time.monotonic_ns() - wished_ns) / 1e6


def _against_interpreter(bench: Bench, guests: _Guests, pairs: int) -> list[Figure]:
    fresh = _fresh(guests.python)
    figures = []
    for name, ours in ((WARM, guests.warm_ms), (COLD, guests.cold_ms)):
        mine, theirs = bench.pairs(
            name, ours, fresh, pairs=pairs, show=lambda a, b: f"{a:.1f} ms, a fresh interpreter {b:.1f} ms"
        )
        figures.append(
            figure(name, "ms", mine, theirs, peer_name="python, import numpy", operations=mine, peer_operations=theirs)
        )
    return figures


def _fresh(python: str) -> Callable[[], float]:
    def once_ms() -> float:
        wished_ns = time.monotonic_ns()
        done = subprocess.run(
            [python, "-c", _SAY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True
        )
        return _Start(done.stdout, wished_ns).began_ms

    return once_ms


def _tenant(bench: Bench, office: Office, local: Lease, pairs: int) -> list[Figure]:
    """What the walls cost, on a command that every machine has. They need root to be whole."""
    if os.geteuid() != 0:
        bench.note("Profile tenant was not measured: it needs root.")
        return []
    with Holder(office, new_tenant(office, "bench")) as holder:
        lease = holder.take(_WANT, ttl_s=TTL_S)
        try:
            mine, theirs = bench.pairs(
                TENANT,
                lambda: _echo_ms(lease),
                lambda: _echo_ms(local),
                pairs=pairs,
                show=lambda a, b: f"{a:.1f} ms, local {b:.1f} ms",
            )
        finally:
            lease.release()
    added = sorted(a - b for a, b in zip(mine, theirs, strict=True))[len(mine) // 2]
    bench.note(f"Profile tenant adds {added:.1f} ms to the start of a guest (median of the pairs).")
    return [figure(TENANT, "ms", mine, theirs, peer_name="profile local", operations=mine, peer_operations=theirs)]


def _echo_ms(lease: Lease) -> float:
    began = time.perf_counter()
    guest = lease.start("/bin/echo", "here")
    guest.first_line()
    took = time.perf_counter() - began
    guest.gone()
    return took * 1e3


def _against_ray(bench: Bench, guests: _Guests) -> list[Figure]:
    found: list[Any] = []
    try:
        with Ray.running(bench.folder) as ray:
            bench.versions["ray"] = ray.version
            found += bench.pairs(
                ACTOR,
                guests.answered_ms,
                lambda: ray.actor_s() * 1e3,
                pairs=bench.either(RAY_PAIRS, 2),
                show=lambda a, b: f"{a:.1f} ms, actor {b:.1f} ms",
            )
    except RuntimeError as error:
        bench.note(f"Ray was not run ({error}). The published figure for the start of an actor: {PUBLISHED_S:g} s.")
        return []
    return [figure(ACTOR, "ms", found[0], found[1], peer_name="ray actor")]


ROW: Final = Row(
    name="guest_start",
    title="a Python guest with numpy begins ten times sooner than a fresh interpreter",
    goals=[Goal(figure=WARM, of="ratio", at_least=10)],
    measure=measure,
    limit_s=1200,
    distributions=DISTRIBUTIONS,
)
