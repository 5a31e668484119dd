"""Runs the whole suite beside a load, again and again, until it has passed ten times in a row.

    python tools/under_load.py             ten green runs beside 8 busy processes; about half an hour each on two cores
    python tools/under_load.py --report    what is known, without running anything

The result is kept in tools/under_load.json, after each run: a run goes into it whole or not at all, so the command goes
on where it was interrupted. A red run starts the count anew, and so does any change of the source, the tests or what
they need. Each run has a hash seed of its own. The load ends with this program, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "tools" / "under_load.json"
GREEN: Final = 10
LOAD: Final = 8
LONGEST_S: Final = 3 * 3600
"""A run that takes longer hangs, and is red; the load beside it ends then as well."""
NO_PART: Final = ("tests/mutants", "tools/under_load.json", "benchmarks/results", "CHANGELOG.md")
"""Results, and what no test reads. Whatever else is in the checkout may change what a run of the suite says."""
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\n]+?)*(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
UNSTEADY: Final = re.compile(r"^unsteady: (.+) failed among the others", re.MULTILINE)
LAST_LINE: Final = re.compile(r"^=* ?(.*(?:passed|failed|error).* in [0-9.]+s.*?) ?=*$", re.MULTILINE)


def state_of_the_source() -> str:
    """A hash of all that a run of the suite depends on, committed or not."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    those = ("--", ".", *(f":(exclude){path}" for path in NO_PART))
    added = git("ls-files", "--others", "--exclude-standard", *those).splitlines()
    told = [git("ls-files", "-s", *those), git("diff", "HEAD", *those), *added]
    told += [hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in added if (ROOT / name).is_file()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


BUSY: Final = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 9)  # it ends when its parent does
end = time.monotonic() + float(sys.argv[2])
while os.getppid() == int(sys.argv[1]) and time.monotonic() < end:
    sum(range(10_000))
"""


@contextlib.contextmanager
def load(processes: int, seconds: float) -> Iterator[None]:
    """So many processes that want a core for themselves, for so long at most."""
    command = [sys.executable, "-c", BUSY, str(os.getpid()), str(seconds)]
    busy = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(processes)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def run_once(command: Sequence[str], *, processes: int, seed: int, longest_s: float = LONGEST_S) -> dict[str, Any]:
    """What came of one run beside the load."""
    found: dict[str, Any] = {"commit": commit(), "source": state_of_the_source(), "load": processes, "hash_seed": seed}
    found["began"] = datetime.now(UTC).isoformat(timespec="seconds")
    began, lines = time.monotonic(), []
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    with load(processes, longest_s):
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        too_long = threading.Timer(longest_s, os.killpg, (program.pid, signal.SIGKILL))
        too_long.start()
        try:
            with program.stdout as said:  # type: ignore[union-attr]  # it was asked for
                for line in said:
                    sys.stdout.write(line)
                    lines.append(line)
            code = program.wait()
        except BaseException:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            raise
        finally:
            too_long.cancel()
            too_long.join()
        found["load_average"] = [round(one, 1) for one in os.getloadavg()]
    output = "".join(lines)
    if state_of_the_source() != found["source"]:
        found["source"] = "changed during the run"
    found["seconds"] = round(time.monotonic() - began)
    found["exit_status"] = code
    found["failed"] = sorted(set(FAILED.findall(output)))
    found["unsteady"] = sorted(set(UNSTEADY.findall(output)))
    found["summary"] = ends[-1] if (ends := LAST_LINE.findall(output)) else "no summary"
    found["green"] = code == 0 and not found["failed"] and not found["unsteady"]
    return found


def in_a_row(runs: Sequence[dict[str, Any]], source: str, processes: int) -> int:
    """The green runs at the end, of this source and beside as great a load."""
    count = 0
    for one in reversed(runs):
        if not one["green"] or one["source"] != source or one["load"] < processes:
            break
        count += 1
    return count


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs the suite beside a load until it has passed so often in a row.")
    parser.add_argument("--green", type=int, default=GREEN, help="green runs in a row (default: %(default)s)")
    parser.add_argument("--load", type=int, default=LOAD, help="busy processes beside it (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=0, help="at most so many now (default: until it is done)")
    parser.add_argument("--go-on", action="store_true", help="run on after a red run; the count starts anew")
    parser.add_argument("--report", action="store_true", help="what is known; run nothing")
    parser.add_argument("--result", type=Path, default=RESULT, help="where the result is kept")
    parser.add_argument("command", nargs="*", help="what to run (default: make test)")
    chosen = parser.parse_args(arguments)
    command = chosen.command or ["make", "test"]

    runs: list[dict[str, Any]] = json.loads(chosen.result.read_text())["runs"] if chosen.result.exists() else []
    with open(chosen.result.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = 0
        while not chosen.report and not (chosen.runs and now == chosen.runs):
            if in_a_row(runs, state_of_the_source(), chosen.load) >= chosen.green:
                break
            now += 1
            one = run_once(command, processes=chosen.load, seed=len(runs) + 1)
            runs.append(one)
            _save(chosen.result, runs, chosen.load)
            print(
                f"== run {len(runs)}: {'green' if one['green'] else 'RED'} after {one['seconds']} s. {one['summary']}"
            )
            if not one["green"] and not chosen.go_on:
                break
    count = in_a_row(runs, state_of_the_source(), chosen.load)
    print(f"{count} of {chosen.green} green runs in a row, {len(runs)} in all; see {chosen.result}")
    for one in runs:
        for name in (*one["failed"], *one["unsteady"]):
            print(f"failed on {one['began']} at {one['commit']}: {name}")
    return 0 if count >= chosen.green else 1


def _save(path: Path, runs: list[dict[str, Any]], processes: int) -> None:
    count = in_a_row(runs, runs[-1]["source"], processes)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"green_in_a_row": count, "runs": runs}, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
