"""Finds the supervisor of an office or starts one: a process in a session (and systemd scope) of its own, which
outlives its starter."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from sublet.errors import OfficeElsewhere, SubletError
from sublet.node.agent.limits import memory_bytes
from sublet.node.agent.scope import KEPT, scope_prefix
from sublet.wire import unix
from sublet.wire.codec import dumps
from sublet.wire.settings import UIDS_VARIABLE, SupervisorSettings
from sublet.wire.zygote import (
    COLD_VARIABLE,
    TENANT_MEMORY_PARTS,
    TENANT_WARM_VARIABLE,
    WARM_VARIABLE,
    tenant_warm_bytes,
)

SOCKET_NAME: Final = "supervisor.sock"
PATIENCE_S: Final = 15.0
"""How long a new one may take to answer: it may first have to end what its predecessor left."""
LOOK_S: Final = 0.005
OTHER_S: Final = 0.1
"""Between two attempts while another one has the lock and does not answer."""
LOG_NAME: Final = "supervisor.log"
LOG_TAIL_BYTES: Final = 4096
"""Of its last words are looked at."""
_CODE: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from sublet.node.supervisor.__main__ import main; sys.exit(main(sys.argv[2]))"
)


class FindOrStart:
    """A ``Connect`` for the agent."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._path = os.path.join(settings.runtime, SOCKET_NAME)
        self._started: _Process | None = None
        self._log_start = 0
        """Where in the log the words of the last one begin."""
        self._begun: _Process | None = None
        """Started, and not asked for yet."""
        self._telling = -1
        """Where it waits to be told whose it is."""
        self._scope = scope_prefix(os.environ)
        tenant_warm = os.environ.get(TENANT_WARM_VARIABLE, "") or f"{memory_bytes() // TENANT_MEMORY_PARTS}B"
        tenant_warm_bytes(tenant_warm)  # refused here, where the user reads the error
        self._env = {TENANT_WARM_VARIABLE: tenant_warm}

    def begin(self) -> None:
        """If none answers, start one already, while it is found out whose it is (``whose``)."""
        found = _connected(self._path)
        if found is not None:
            found.close()
            return
        owner_pipe, self._telling = os.pipe()
        try:
            self._begun = self._start(owner_pipe)
        finally:
            os.close(owner_pipe)

    def whose(self, office: str) -> None:
        """Now it is known; to be said before the first call, which finds what was begun."""
        self._settings = replace(self._settings, office=office)
        if self._begun is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended, as the call will see
                os.write(self._telling, office.encode())
        self._hang_up()

    def abandon(self) -> None:
        """There was no call: what was begun for it ends. Harmless otherwise."""
        self._hang_up()
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.kill()

    def _hang_up(self) -> None:
        if self._telling >= 0:
            os.close(self._telling)
            self._telling = -1

    async def __call__(self) -> socket.socket:
        import asyncio  # what is begun comes up while this is loaded

        begun, self._begun = self._begun, None
        found = _connected(self._path)
        if found is not None:
            return found
        started = begun or self._start()
        until_s = time.monotonic() + PATIENCE_S
        while (found := _connected(self._path)) is None:
            if time.monotonic() > until_s:
                raise self._failed("did not answer in time")
            status = started.poll()
            if status == os.EX_TEMPFAIL:  # there is another one, which is about to listen, or to end
                await asyncio.sleep(OTHER_S)
                started = self._start()
            elif status == os.EX_CONFIG:
                where, do = _last_lines(self._log, self._log_start, 2)
                raise OfficeElsewhere(where, do=do)
            elif status is not None and self._scope:  # perhaps it was never begun: no scope to be had
                self._scope = []
                started = self._start()
            elif status is not None:
                raise self._failed(f"ended with status {status}")
            await asyncio.sleep(LOOK_S)
        return found

    def _start(self, stdin: int = -1) -> _Process:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._log_start = os.fstat(log).st_size
            started = self._started = _Process([*self._scope, *command(self._settings)], log, stdin, self._env)
        finally:
            os.close(log)
        os.environ.pop(WARM_VARIABLE, None)  # it was for the first one
        return started

    @property
    def _log(self) -> str:
        return os.path.join(self._settings.state, LOG_NAME)

    def _failed(self, what: str) -> SubletError:
        (word,) = _last_lines(self._log, self._log_start, 1)  # of an exception that is the line that names it
        return SubletError(
            f"the supervisor {what}" + (f": {word}" if word else ""), do=f"All that it said is in {self._log}."
        )


class _Process:
    """A process in a session of its own, which is meant to outlive this one. ``subprocess`` would warn of that."""

    def __init__(self, argv: list[str], log: int, stdin: int, env: Mapping[str, str]) -> None:
        """``stdin``: what it has as its standard input, if anything; ``env``: what it has beside what is kept."""
        self._status: int | None = None
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        self._pid = os.posix_spawn(
            argv[0],
            argv,
            {**supervisor_environment(), **env},
            file_actions=[
                null if stdin < 0 else (os.POSIX_SPAWN_DUP2, stdin, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
        )

    def poll(self) -> int | None:
        """Its exit status, as a shell says it, once it has ended."""
        if self._status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        """Kill it: no caller has used it yet."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


_LIBRARIES: Final = ("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_MPS_PIPE_DIRECTORY")
"""By which this process finds the driver's libraries: what cleans, watches and suspends has to find the same."""
_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TZ", COLD_VARIABLE, UIDS_VARIABLE, WARM_VARIABLE, *_LIBRARIES, *KEPT)


def supervisor_environment() -> dict[str, str]:
    """What the supervisor has of this process's environment."""
    return {name: value for name, value in os.environ.items() if name in _KEPT}


def command(settings: SupervisorSettings) -> list[str]:
    """Without ``site``: it needs nothing that is installed, and is half the size for it."""
    return [sys.executable, "-I", "-S", "-c", _CODE, settings.package, dumps(settings).decode()]


def package_folder() -> str:
    """Where the package lies, for a process that does not have it on its path."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _last_lines(log: str, start: int, number: int) -> list[str]:
    """What it said last, which is why it ended. Empty lines where it said less."""
    found: list[str] = []
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
        found = [line.strip() for line in lines if line.strip()][-number:]
    return [""] * (number - len(found)) + found


def _connected(path: str) -> socket.socket | None:
    try:
        sock = unix.connect(path, timeout_s=None)
    except OSError:
        return None
    sock.setblocking(False)
    return sock
