"""Finding the supervisor of an office, or starting one: a process of its own session, and in a scope of its own where
systemd gives one, that outlives who started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from typing import Final

from sublet.agent.scope import KEPT, scope_prefix
from sublet.errors import SubletError
from sublet.wire.codec import dumps
from sublet.wire.guests import SupervisorSettings

__all__ = ["FindOrStart", "command", "package_folder"]

SOCKET_NAME: Final = "supervisor.sock"
PATIENCE_S: Final = 15.0
"""How long a new one may take to answer: it may first have to end what its predecessor left."""
LOOK_S: Final = 0.005
OTHER_S: Final = 0.1
"""Between two attempts while another one has the lock and does not answer."""
LOG_NAME: Final = "supervisor.log"
_CODE: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from sublet.supervisor.__main__ import main; sys.exit(main(sys.argv[2]))"
)


class FindOrStart:
    """A ``Connect`` for the agent."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._path = os.path.join(settings.runtime, SOCKET_NAME)
        self._started: _Process | None = None
        self._scope = scope_prefix(os.environ)

    async def __call__(self) -> socket.socket:
        found = _connected(self._path)
        if found is not None:
            return found
        started = self._start()
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while (found := _connected(self._path)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise self._failed("did not answer in time")
            status = started.poll()
            if status == os.EX_TEMPFAIL:  # there is another one, which is about to listen, or to end
                await asyncio.sleep(OTHER_S)
                started = self._start()
            elif status is not None and self._scope:  # perhaps it was never begun: nobody gives us a scope
                self._scope = []
                started = self._start()
            elif status is not None:
                raise self._failed(f"ended with status {status}")
            await asyncio.sleep(LOOK_S)
        return found

    def _start(self) -> _Process:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._started = _Process([*self._scope, *command(self._settings)], log)
        finally:
            os.close(log)
        return self._started

    @property
    def _log(self) -> str:
        return os.path.join(self._settings.state, LOG_NAME)

    def _failed(self, what: str) -> SubletError:
        return SubletError(f"the supervisor {what}", do=f"Its last words are in {self._log}.")


class _Process:
    """A process in a session of its own, which is meant to outlive this one. ``subprocess`` would warn of that."""

    def __init__(self, argv: list[str], log: int) -> None:
        self._status: int | None = None
        self._pid = os.posix_spawn(
            argv[0],
            argv,
            {name: value for name, value in os.environ.items() if name in _KEPT},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
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


_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TZ", *KEPT)


def command(settings: SupervisorSettings) -> list[str]:
    """Without ``site``: it needs nothing that is installed, and is half the size for it."""
    return [sys.executable, "-I", "-S", "-c", _CODE, settings.package, dumps(settings).decode()]


def package_folder() -> str:
    """Where the package lies, for a process that does not have it on its path."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _connected(path: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with contextlib.suppress(OSError):
        sock.connect(path)
        sock.setblocking(False)
        return sock
    sock.close()
    return None
