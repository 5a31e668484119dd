"""An office of its own, and a notebook's shell in a process of its own (``shell_program``)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.integration.office_stage import OfficeStage, office_stage

__all__ = ["PATIENCE_S", "Shell", "shell_on", "stage_on"]

PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


class Shell:
    """The process."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        self._errors = (folder / "shell.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.notebook.shell_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=folder,
            env={**env, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        assert self.answer()["pid"] == self.process.pid

    def ask(self, source: str, *, step: str = "", waits: bool = False, how: str = "") -> None:
        """Run a cell; whoever wants to know how it went asks for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"run": source, "step": step, "waits": waits, "how": how}) + "\n")
        self.process.stdin.flush()

    def answer(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], patience_s)
        assert ready, "no answer"
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("the shell is gone")
        found: dict[str, Any] = json.loads(line)
        return found

    def has_answered(self) -> bool:
        """Whether there is an answer: ``answer`` would not wait."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def run(self, source: str, *, step: str = "", waits: bool = False, how: str = "") -> dict[str, Any]:
        self.ask(source, step=step, waits=waits, how=how)
        return self.answer()

    def value(self, expression: str) -> Any:
        """Of the notebook's own names."""
        answer = self.run(f"import json as _json\nprint(_json.dumps({expression}))")
        assert not answer["error"], answer
        return json.loads(answer["out"])

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._errors.close()


@contextlib.contextmanager
def stage_on(place: Path, devices: str = "1x2GiB") -> Iterator[OfficeStage]:
    """An office. What it keeps for notebooks goes with it."""
    try:
        with office_stage(place, devices) as stage:
            yield stage
    finally:
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for at in [one for one in mounted if one.startswith(f"{place}/")]:
            subprocess.run(["umount", "--lazy", at], check=False)


@contextlib.contextmanager
def shell_on(stage: OfficeStage, folder: Path, **more: str) -> Iterator[Shell]:
    """A shell beside it."""
    folder.mkdir(exist_ok=True)
    shell = Shell({**os.environ, **stage.office.env(), "SUBLET_HOME": str(stage.office.home), **more}, folder)
    try:
        yield shell
    finally:
        shell.close()


def wait_for(path: Path) -> None:
    """A cell says how far it is by making a file."""
    until_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until_s, f"{path.name} never came"
        time.sleep(0.005)
