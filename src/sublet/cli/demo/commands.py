"""The acts with real processes: one that will not leave, one that is killed, one that an office's death does not touch.

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

from sublet.cli.demo.child import DemoOffice
from sublet.cli.demo.stage import BUSY, ClaimFailed, Stage
from sublet.cli.show import Json, plural
from sublet.values import LeaseId

__all__ = ["Commands"]

PATIENCE_S: Final = 20.0
TTL_S: Final = 3
LEASE_ENDED: Final = 76
KILLED: Final = 128 + signal.SIGKILL
_LATE_S: Final = 0.5
"""Between a deadline and our own look at the processes lie a few processes that each have to be woken."""

STUBBORN: Final = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "~", "w") as file:
            file.write(f"{os.getpid()} {os.getppid()}")
        os.rename(sys.argv[1] + "~", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(600)
"""
"""It hears no signal that can be ignored, and has a child that nobody is the parent of any more."""

COUNTING: Final = 'n=0; until [ -e "$0" ]; do n=$((n + 1)); echo $n; sleep 0.2; done'
"""It goes on until it is told by a file, however long the office is away."""


class Commands:
    """The stage, the office, and where notes may be left."""

    def __init__(self, stage: Stage, office: DemoOffice, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stage = stage
        self._office = office
        self._folder = folder
        self._stack = stack
        self.shares: dict[LeaseId, float] = {}
        """Lease → how much of the device it had, for the bill."""
        self._counting: subprocess.Popen[str]
        self._counting_pid = 0
        self._enough = folder / "enough"

    def one_that_will_not_leave(self) -> None:
        """Ignores every signal, forks twice, and is gone at the deadline all the same."""
        stage, note = self._stage, self._folder / "stubborn"
        stage.act("A command that will not leave")
        stage.tell(
            f"It runs on the device for {TTL_S} s, under a lease that nobody renews. It ignores SIGTERM, and has a "
            "child in another session that it is no longer the parent of."
        )
        run = self._run("--gpu", "4GiB", "--ttl", f"{TTL_S}s", "--renew", "never", code=STUBBORN, words=[str(note)])
        _until(note.exists, "the command is at work")
        child = int(note.read_text().split()[0])
        guest = self._guest()
        self.shares[guest["lease"]] = 1.0
        stage.claim(
            _is_alive(guest["pid"]) and _is_alive(child),
            f"Both are at work (pids {guest['pid']} and {child}), and the office knows what runs under lease "
            f"{guest['lease']}.",
        )
        deadline = time.monotonic() + self._lease(guest["lease"])["remaining"]
        _, said = run.communicate(timeout=PATIENCE_S)
        late = time.monotonic() - deadline
        stage.claim(
            run.returncode == LEASE_ENDED and "expired" in said,
            f"`sublet run` ends with status {LEASE_ENDED} and says why: “{said.strip().splitlines()[-2].strip()}”.",
            but=f"status {run.returncode}: {said}",
        )
        stage.claim(
            not _is_alive(guest["pid"]) and not _is_alive(child) and late < _LATE_S,
            "At the deadline both were gone: the supervisor looked, and found nothing left of either.",
            but=f"{late:.2f} s late",
        )
        self._is_free("and only then was the device free again.")

    def one_that_is_killed(self) -> None:
        """SIGKILL from outside: nobody can say goodbye, and the device comes back verified."""
        stage = self._stage
        stage.act("A command is killed")
        run = self._run("--gpu", "4GiB", "--ttl", "1m", argv=["sleep", "600"])
        guest = self._guest()
        self.shares[guest["lease"]] = 1.0
        os.kill(guest["pid"], signal.SIGKILL)
        run.communicate(timeout=PATIENCE_S)
        stage.claim(
            run.returncode == KILLED,
            f"SIGKILL to pid {guest['pid']}: `sublet run` ends with {KILLED}, as a shell would say it.",
            but=run.returncode,
        )
        self._is_free("The lease was given back, the device was looked at, and is free.")

    def one_that_goes_on(self) -> None:
        """Start a command that counts, before the office is killed."""
        argv = ["sh", "-c", COUNTING, str(self._enough)]
        self._counting = self._run("--cpu", "1", "--ttl", "1m", argv=argv)
        guest = self._guest()
        self.shares[guest["lease"]] = 0.0
        self._counting_pid = guest["pid"]

    def it_went_on(self) -> None:
        """After the office came back."""
        stage, guest = self._stage, self._guest()
        stage.claim(
            guest["pid"] == self._counting_pid and _is_alive(guest["pid"]),
            f"A command that was counting under a lease of one core has not noticed: still pid {guest['pid']}.",
        )
        self._enough.touch()
        out, said = self._counting.communicate(timeout=PATIENCE_S)
        lines = out.split()
        stage.claim(
            self._counting.returncode == 0 and lines != [] and lines == [str(n + 1) for n in range(len(lines))],
            f"It counted to {len(lines)}, and not a line of its output was lost ({plural(len(lines), 'line')}).",
            but=f"status {self._counting.returncode}: {out!r} {said!r}",
        )

    # ---- what the acts use ----

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
        """The one that runs."""
        found: list[Json] = []

        def is_there() -> bool:
            listed = subprocess.run(
                [sys.executable, "-m", "sublet", "ps", "--json"],
                env=self._office.env,
                capture_output=True,
                text=True,
                check=True,
            )
            found[:] = _parsed(listed.stdout)
            return bool(found)

        _until(is_there, "the command is listed")
        return found[0]

    def _lease(self, lease: str) -> Json:
        found: Json = self._office.operator.get(f"/v1/leases/{lease}")["lease"]
        return found

    def _is_free(self, text: str) -> None:
        def is_free() -> bool:
            status: Json = self._office.operator.get("/v1/status")
            return all(device["free"] == device["capacity"] for device in status["devices"] if device["kind"] == "gpu")

        _until(is_free, "the device is free")
        self._stage.claim(True, text[0].upper() + text[1:])


def _parsed(text: str) -> list[Json]:
    import json

    found: list[Json] = json.loads(text)
    return found


def _is_alive(pid: int) -> bool:
    """A process that only waits to be asked for its exit is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until:
            raise ClaimFailed(f"nothing came of “{what}” within {PATIENCE_S:.0f} s", do=BUSY)
        time.sleep(0.02)
