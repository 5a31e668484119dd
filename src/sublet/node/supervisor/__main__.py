"""``python -m sublet.node.supervisor SETTINGS``: started by an office, never by hand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from dataclasses import replace

import sublet.wire.refusals  # noqa: F401 - when it is needed there may be no descriptor, or other files, to load it from
from sublet.clock import SystemClock
from sublet.errors import OfficeElsewhere, SubletError
from sublet.node.loop import Loop
from sublet.node.processes.cgroups_places import enter_child_group
from sublet.node.processes.files import raise_limit
from sublet.node.processes.memory_order import killed_last
from sublet.node.processes.zygotes import Zygotes
from sublet.node.supervisor.office_lock import OfficeLock
from sublet.wire.codec import loads
from sublet.wire.program_files import check_program
from sublet.wire.settings import SupervisorSettings
from sublet.wire.unix import short_path
from sublet.wire.zygote import COLD_VARIABLE, TENANT_WARM_VARIABLE, WARM_VARIABLE, Warm, tenant_warm_bytes

BACKLOG = 128
OFFICE_MAX = 256
"""Bytes of an office's id."""


def main(text: str) -> int:
    """Be the supervisor; the exit status. 75 if there is one already, 78 if its office is a copy of one that runs."""
    try:
        check_program()
    except SubletError as error:
        sys.stderr.write(f"{error.message}. {error.do}\n")  # one line: its office shows the last
        return os.EX_NOPERM
    settings = loads(SupervisorSettings, text.encode())
    os.makedirs(settings.runtime, mode=0o700, exist_ok=True)
    locked = os.path.join(settings.runtime, "supervisor.lock")
    if not _lock(locked):
        return os.EX_TEMPFAIL
    enter_child_group()  # before there is a second process
    killed_last()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    cold = os.environ.pop(COLD_VARIABLE, "").replace(" ", "").split(",")
    tenant_bytes = tenant_warm_bytes(os.environ.pop(TENANT_WARM_VARIABLE, "no"))
    zygotes = Zygotes(Loop(SystemClock()), tenant_bytes=tenant_bytes, cold=frozenset(cold))
    with contextlib.suppress(SubletError):  # what cannot be read was no more than a wish
        if wish := os.environ.pop(WARM_VARIABLE, ""):
            zygotes.wish(loads(Warm, wish.encode()))
    from sublet.node.supervisor.service import (  # a warm interpreter takes longer, and is on its way
        SOCKET_NAME,
        Supervisor,
    )

    if not settings.office and not (settings := replace(settings, office=_read_office())).office:
        os.unlink(locked)
        return os.EX_NOINPUT
    try:
        office_lock = OfficeLock(settings.office, settings.state)
        office_lock.take()  # before anything of the office is touched
    except SubletError as error:
        sys.stderr.write(f"{error.message}\n{error.do}\n")
        os.unlink(locked)
        return os.EX_CONFIG if isinstance(error, OfficeElsewhere) else os.EX_NOPERM
    with open(locked, "w", encoding="ascii") as file:  # who looks finds whose it is
        file.write(settings.office)
    supervisor = Supervisor(settings, zygotes, files=raise_limit(), refresh=office_lock.refresh)
    path = os.path.join(settings.runtime, SOCKET_NAME)
    listening = _listen(path)
    try:
        supervisor.serve(listening)
    finally:
        office_lock.release()  # first: the next supervisor of this folder may begin as soon as the others are gone
        for name in (path, locked):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return 0


def _read_office() -> str:
    """Whose supervisor it is: named by the program that started it, when that is known. Empty if it never will be."""
    office = os.read(0, OFFICE_MAX).decode()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return office


def _lock(path: str) -> bool:
    """Hold the lock until this process ends, so that it is the only supervisor. The previous holder removes the file,
    so the locked file may no longer be the one at this path; then it is tried again."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return True
        except BlockingIOError:
            os.close(lock)
            return False
        except FileNotFoundError:
            pass
        os.close(lock)


def _listen(path: str) -> socket.socket:
    """The process that holds the lock is the only supervisor, so a socket that exists already is stale."""
    if os.path.lexists(path):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        with short_path(path) as address:
            listening.bind(address)
    finally:
        os.umask(mask)
    listening.listen(BACKLOG)
    return listening


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
