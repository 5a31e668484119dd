"""What the tests cost in processor time, by file and by test: their own and that of every process they started.

    python tools/test_cost.py tests/integration        each file in a pytest of its own; the dearest are printed first
    python tools/test_cost.py --jobs 2 --json cost.json tests

The process that runs a file's pytest is the subreaper of all that it starts, so offices, supervisors and guests which
outlive their parents count as well. Starting pytest is part of a file's figure, not of a test's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER: Final = 36
ORPHANS_S: Final = 30.0
"""How long processes that outlive pytest are waited for."""
COST_OF_TESTS: Final = "SUBLET_COST_OF_TESTS"
TICKS: Final = os.sysconf("SC_CLK_TCK")


def below(root: int) -> float:
    """Seconds of a processor that were used by all descendants of a process, those included that have ended."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            said = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(name)], used[int(name)] = int(said[1]), sum(map(int, said[11:15]))
    inside = {root}
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    ended = used[root]  # its own is next to nothing
    return (ended + sum(used[pid] for pid in inside - {root})) / TICKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = below(os.getppid())
    try:
        return (yield)
    finally:
        with open(os.environ[COST_OF_TESTS], "a") as file:
            file.write(f"{below(os.getppid()) - before:.2f} {item.nodeid}\n")


def measured(file: str, tests: str) -> dict[str, Any]:
    """Cost of one file, measured by a process that has nothing else to do."""
    words = [sys.executable, __file__, "--tests", tests, "--measure", file]
    out = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def measure(file: str, tests: str) -> dict[str, Any]:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    begun = time.monotonic()
    words = [sys.executable, "-m", "pytest", "-q", "--timeout=300", "-p", "no:cacheprovider"]
    words += ["-p", "tools.test_cost"] if tests else []
    env = os.environ | {COST_OF_TESTS: tests}
    with tempfile.TemporaryFile("w+") as out:
        tested = subprocess.Popen([*words, file], cwd=ROOT, env=env, stdout=out)
        while tested.returncode is None:  # orphans are reaped at once, as init would: some tests wait for their end
            pid, status = os.waitpid(-1, 0)
            if pid == tested.pid:
                tested.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().strip().splitlines()[-1:] or [""]
    wall_s = time.monotonic() - begun
    until = time.monotonic() + ORPHANS_S
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            break
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = round(used.ru_utime + used.ru_stime, 2)
    return {"file": file, "cpu_s": cpu_s, "wall_s": round(wall_s, 2), "status": tested.returncode, "said": said[0]}


def files_below(paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in map(Path, paths):
        found += [str(path)] if path.is_file() else sorted(map(str, path.rglob("test_*.py")))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Processor time of tests, by file.")
    parser.add_argument("paths", nargs="*", default=["tests"], help="Files or folders (default: tests).")
    parser.add_argument("--jobs", type=int, default=1, help="Number of files at a time (default: 1).")
    parser.add_argument("--json", metavar="FILE", help="Where to write one line of JSON for each file.")
    parser.add_argument("--tests", metavar="FILE", default="", help="Where to write the cost of each test.")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure, asked.tests)))
        return 0
    costs = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for cost in pool.map(lambda file: measured(file, asked.tests), files_below(asked.paths)):
            costs.append(cost)
            if asked.json:
                with open(asked.json, "a") as file:
                    file.write(json.dumps(cost) + "\n")
    for cost in sorted(costs, key=lambda cost: -cost["cpu_s"]):
        print(f"{cost['cpu_s']:>8} s of processor {cost['wall_s']:>8} s  {cost['file']}  {cost['said']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
