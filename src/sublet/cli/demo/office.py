"""The demo's own office: a process in a temporary folder that can be killed without leaving anything behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from sublet.cli.call import CommandOffice
from sublet.client.address import find_address
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from sublet.errors import Disconnected, SubletError
from sublet.wire.zygote import COLD_VARIABLE

START_S: Final = 30.0
STOP_S: Final = 10.0


class DemoOffice:
    """`sublet up --foreground` with a state folder of its own. Nothing of the user's is read or written."""

    def __init__(self, folder: Path, host_gpus: str) -> None:
        self.home = folder / "home"
        self._words = ["up", "--foreground", "--host-gpus", host_gpus]
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SUBLET_") or name == COLD_VARIABLE  # no state: what this machine is not to import
        }
        self.env |= {"SUBLET_HOME": str(self.home), "XDG_STATE_HOME": str(folder / "state")}
        self._log = folder / "office.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.operator = CommandOffice(find_address(None, None, str(self.home), {}))
        """The owner of the machine: over the owner-only socket, without a token."""

    @property
    def url(self) -> str:
        """An explicit address, so that no client starts an office of its own here."""
        return f"unix://{socket_path(self.home)}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(SubletError):  # its leases end, and with them whatever still runs
                self.operator.post("/v1/down", {"how": "now"})
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(runtime_dir(self.home.resolve()), ignore_errors=True)

    def start(self) -> None:
        """Return when it answers."""
        with open(self._log, "ab") as log:
            self._process = self._spawn(log)
        until = time.monotonic() + START_S
        while not answers(socket_path(self.home)):
            if self._process.poll() is not None or time.monotonic() > until:
                lines = self._log.read_text(errors="replace").strip().splitlines()
                raise Disconnected(
                    "the office of the demo did not start" + (f": {lines[-1]}" if lines else ""),
                    do="See `sublet doctor`.",
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sublet", *self._words]
        # A session of its own: Ctrl-C is for the demo, which then ends its office in order.
        return subprocess.Popen(
            command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
