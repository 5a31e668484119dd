"""The demo's steps with real processes: a program that resists its end, one that is killed, a killed office.

They run as a person would run them, with ``sublet run``, under leases of the owner of this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sublet.cli.demo.office import DemoOffice
from sublet.cli.demo.report import BUSY, CheckFailed, Report
from sublet.cli.show import Json, plural
from sublet.values import LeaseId

PATIENCE_S: Final = 20.0
TTL_S: Final = 5
LEASE_ENDED: Final = 76
KILLED: Final = 128 + signal.SIGKILL

STUBBORN: Final = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
first = os.getpid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "~", "w") as file:
            file.write(f"{first} {os.getpid()} {os.environ['SUBLET_LEASE']}")
        os.rename(sys.argv[1] + "~", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""It ignores every signal that can be ignored, and has a child in another session whose parent is gone. It says itself
who it is: on a busy machine a listing takes longer than its lease lasts."""

COUNTING: Final = 'n=0; until [ -e "$0" ]; do n=$((n + 1)); echo $n; sleep 0.2; done'
"""It counts until a file appears, however long the office is away."""


class Commands:
    """Commands under leases of one office."""

    def __init__(self, report: Report, office: DemoOffice, folder: Path, stack: contextlib.ExitStack) -> None:
        self._report = report
        self._office = office
        self._folder = folder
        self._stack = stack
        self.shares: dict[LeaseId, float] = {}
        """Lease → its share of the device, for the bill."""
        self._counting: subprocess.Popen[str]
        self._counting_pid = 0
        self._enough = folder / "enough"

    def a_time_limit_that_holds(self) -> None:
        """A program that resists its end is gone at the deadline; one that is killed gives its device back."""
        report = self._report
        report.step(
            "A time limit that holds",
            f"A program gets the device for {TTL_S} s (Slurm: --time). It ignores SIGTERM and detaches a child.",
        )
        status: Json = self._office.operator.get("/v1/status")
        gpus = [device for device in status["devices"] if device["kind"] == "gpu"]
        report.check(
            len(gpus) == 1 and gpus[0]["host"] and gpus[0]["free"] == 4 << 30,
            f"An office with {gpus[0]['id']}, a host device of 4GiB, answers (pid {status['pid']}).",
            but=gpus,
        )
        self._one_that_resists()
        report.result(f"After {TTL_S} s both processes were killed; the device was free when neither was left.")
        self._one_that_is_killed()
        report.result("A second program was killed from outside; its device was checked, and is free.")

    def _one_that_resists(self) -> None:
        report, note = self._report, self._folder / "stubborn"
        report.progress("a program resists its end")
        run = self._run("--gpu", "4GiB", "--ttl", f"{TTL_S}s", "--renew", "never", code=STUBBORN, words=[str(note)])
        _until(note.exists, "the command's start")
        first, child, lease = note.read_text().split()
        self.shares[LeaseId(lease)] = 1.0
        report.check(
            _is_alive(int(first)) and _is_alive(int(child)),
            f"Both processes run (pids {first} and {child}) under lease {lease}.",
        )
        _, stderr = run.communicate(timeout=PATIENCE_S)
        report.check(
            run.returncode == LEASE_ENDED and "expired" in stderr,
            f"The command ends with status {LEASE_ENDED}: “{stderr.strip().splitlines()[-2].strip()}”.",
            but=f"status {run.returncode}: {stderr}",
        )
        report.check(
            not _is_alive(int(first)) and not _is_alive(int(child)),
            "At the deadline neither process was left.",
        )
        self._is_free("Then the device was free again.")

    def _one_that_is_killed(self) -> None:
        report = self._report
        report.progress("a program is killed")
        run = self._run("--gpu", "4GiB", "--ttl", "1m", argv=["sleep", "600"])
        guest = self._guest()
        self.shares[guest["lease"]] = 1.0
        os.kill(guest["pid"], signal.SIGKILL)
        run.communicate(timeout=PATIENCE_S)
        report.check(
            run.returncode == KILLED,
            f"After SIGKILL to pid {guest['pid']} the command ends with status {KILLED}, as in a shell.",
            but=run.returncode,
        )
        self._is_free("Its lease was released, and the device is free.")

    def one_that_goes_on(self) -> None:
        """Start a command that counts, before the office is killed."""
        argv = ["sh", "-c", COUNTING, str(self._enough)]
        self._counting = self._run("--cpu", "1", "--ttl", "1m", argv=argv)
        guest = self._guest()
        self.shares[guest["lease"]] = 0.0
        self._counting_pid = guest["pid"]

    def lines_after_restart(self) -> int:
        """After the office came back: the lines of its output."""
        report, guest = self._report, self._guest()
        report.check(
            guest["pid"] == self._counting_pid and _is_alive(guest["pid"]),
            f"The command that counts under a lease of one core still runs: pid {guest['pid']}.",
        )
        self._enough.touch()
        out, stderr = self._counting.communicate(timeout=PATIENCE_S)
        lines = out.split()
        report.check(
            self._counting.returncode == 0 and lines != [] and lines == [str(n + 1) for n in range(len(lines))],
            f"It counted to {len(lines)}, and no line of its output was lost ({plural(len(lines), 'line')}).",
            but=f"status {self._counting.returncode}: {out!r} {stderr!r}",
        )
        return len(lines)

    # ---- what the steps use ----

    def _run(
        self, *options: str, argv: list[str] | None = None, code: str = "", words: list[str] | None = None
    ) -> subprocess.Popen[str]:
        command = argv if argv is not None else [sys.executable, "-c", code, *(words or [])]
        process = subprocess.Popen(
            [sys.executable, "-m", "sublet", "run", *options, "--", *command],
            env=self._office.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.kill)
        return process

    def _guest(self) -> Json:
        found: list[Json] = []

        def is_listed() -> bool:
            listed = subprocess.run(
                [sys.executable, "-m", "sublet", "ps", "--json"],
                env=self._office.env,
                capture_output=True,
                text=True,
                check=True,
            )
            found[:] = _parsed(listed.stdout)
            return bool(found)

        _until(is_listed, "the listing of the command")
        return found[0]

    def _is_free(self, text: str) -> None:
        def is_free() -> bool:
            status: Json = self._office.operator.get("/v1/status")
            return all(device["free"] == device["capacity"] for device in status["devices"] if device["kind"] == "gpu")

        _until(is_free, "the free device")
        self._report.check(True, text)


def _parsed(text: str) -> list[Json]:
    import json

    found: list[Json] = json.loads(text)
    return found


def _is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until:
            raise CheckFailed(f"{what} did not come within {PATIENCE_S:.0f} s", do=BUSY)
        time.sleep(0.02)
