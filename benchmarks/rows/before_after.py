"""What the isolation of tenants costs: guests, teardown, cells and saves at a commit before it against now.

Both sides are whole: an office of each commit with its own supervisor, a program of each as its owner and one as a
tenant, in environments that differ in the package alone. They are asked in turn, so what else the machine does falls on
both. ``SUBLET_BENCH_BEFORE`` names another commit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS
from benchmarks.peers.before import Side, environment

BEFORE: Final = "696765d"
"""The last commit before the attack whose findings changed how guests are walled in."""
PAIRS: Final = {"start": 40, "teardown": 40, "cell": 40, "save": 25}
NAMES: Final = {
    "start": "a guest's start, `echo`",
    "teardown": "teardown of a lease with a guest",
    "cell": "a warm empty cell",
    "save": "a checkpoint of 16 MiB",
}
PROFILES: Final = {"local": 1 / 1.05, "tenant": 1 / 1.15}
"""How much slower each may be."""
_TENANT: Final = """
import sys, sublet
fabric = sublet.connect(home=sys.argv[1])
print(fabric.request("POST", "/v1/tenants", {"id": "bench"}, shape=dict)["token"])
"""


def measure(bench: Bench) -> list[Figure]:
    commit = os.environ.get("SUBLET_BENCH_BEFORE", BEFORE)
    bench.versions["before"] = commit
    pythons = {side: environment(bench.folder / f"{side}-env", commit if side == "before" else "") for side in _SIDES}
    figures = []
    with contextlib.ExitStack() as stack:
        sides = {side: _users(stack, pythons[side], bench.folder / side) for side in _SIDES}
        for profile in PROFILES:
            now, before = sides["now"].get(profile), sides["before"].get(profile)
            if now is None or before is None:
                bench.note("Profile tenant was not measured: it needs root.")
                continue
            for what, pairs in PAIRS.items():
                name = f"{NAMES[what]}, {profile}"
                mine, theirs = bench.pairs(
                    name,
                    partial(now.ms, what),
                    partial(before.ms, what),
                    pairs=bench.either(pairs, 2),
                    show=lambda a, b: f"{a:.1f} ms, before {b:.1f} ms",
                )
                figures.append(
                    figure(name, "ms", mine, theirs, peer_name=commit, operations=mine, peer_operations=theirs)
                )
    return figures


_SIDES: Final = ("now", "before")


def _users(stack: contextlib.ExitStack, python: Path, home: Path) -> dict[str, Side]:
    """The owner, and a tenant where the machine can wall one in. The office ends with them."""
    env = {**os.environ, "SUBLET_HOME": str(home), "XDG_STATE_HOME": str(home.parent / "state")}
    for name in ("SUBLET_URL", "SUBLET_TOKEN", "PYTHONPATH"):
        env.pop(name, None)
    stack.callback(
        subprocess.run,
        [str(python), "-m", "sublet", "down", "--now"],
        env=env,
        capture_output=True,
        timeout=60,
        check=False,
    )
    done = subprocess.run(
        [str(python), "-c", _TENANT, str(home)], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the office of {home.name} did not start: {done.stderr[-2000:].strip()}")
    tokens = {"local": "", **({"tenant": done.stdout.strip()} if os.geteuid() == 0 else {})}
    found = {}
    for profile, token in tokens.items():
        found[profile] = side = Side(python, home, token)
        stack.callback(side.end)
    return found


ROW: Final = Row(
    name="before_after",
    title=f"guests, teardown, cells and saves are not slower than before tenants were walled in ({BEFORE})",
    goals=[
        Goal(figure=f"{name}, {profile}", of="ratio", at_least=least)
        for profile, least in PROFILES.items()
        for name in NAMES.values()
    ],
    measure=measure,
    limit_s=900,
    distributions=DISTRIBUTIONS,
)
