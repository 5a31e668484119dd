"""Identifies the processes at the other end of unix sockets, through the kernel, and whether they live.

A pid is reused as soon as its process is gone, so a process is known by its pid *and* its start time. The kernel hands
out a pidfd of the peer of a unix socket (``SO_PEERPIDFD``, Linux 6.5), which is never of another process. Older kernels
only say the peer's pid: then a pidfd is opened of that, and the start time is compared with the moment at which the
connection was accepted. A process that began later is another one.

Peers that the office cannot see (another PID namespace, a connection that comes through a proxy) are no processes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import logging
import os
import select
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, overload

from sublet.background import Guard
from sublet.office.access import Origin
from sublet.office.driver import Driver
from sublet.office.ledger.bound_leases import BoundLeases
from sublet.office.ledger.commands import HolderGone, HolderUnseen
from sublet.office.ledger.events import Event
from sublet.office.ledger.records import Now, ProcessRecord
from sublet.values import NS_PER_S, TenantId

SO_PEERPIDFD: Final = 77
"""As on x86 and Arm; Python has no name for it."""
_NS_PER_TICK: Final = NS_PER_S // os.sysconf("SC_CLK_TCK")
_CREDENTIALS: Final = struct.Struct("3i")
_PEER: Final = struct.Struct("iII")
TENANTS_MAX: Final = 8
"""Tenants that are remembered of one connection."""
NO_UID: Final = (1 << 32) - 1
"""What the kernel says of a socket whose other end is no process, such as one of TCP."""
_NO_START: Final = -1
"""The start time of a process that ended before it could be read. No process has it."""
_STAT_MAX: Final = 1024
_GONE_STATES: Final = frozenset(b"ZXx")
_NO_PROCESS: Final = frozenset((errno.ESRCH, errno.ENOENT))
_NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))

_log = logging.getLogger("sublet.office")


class PeerSocket(Protocol):
    """As much of a connected unix socket as is needed."""

    @overload
    def getsockopt(self, level: int, option: int, /) -> int: ...
    @overload
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


class ProcessFate(enum.Enum):
    """What is known of a process without a pidfd of it."""

    GONE = "gone"
    ALIVE = "alive"
    """It lives, and there is no pidfd for it now: look again."""
    UNSEEN = "unseen"
    """The office cannot see it, now or later."""


class ProcessEntry(NamedTuple):
    """A process in /proc."""

    start_ticks: int
    is_gone: bool


class ProcessTable:
    """The processes of this machine, as this process sees them."""

    def __init__(
        self,
        proc: str = "/proc",
        *,
        peer_pidfd: int | None = SO_PEERPIDFD,
        pidfd_open: Callable[[int], int] = os.pidfd_open,
    ) -> None:
        """``peer_pidfd`` is the number of the socket option; None: the kernel has none."""
        self._proc = proc
        self._peer_pidfd = peer_pidfd
        self._pidfd_open = pidfd_open
        self._boot_id = _text(f"{proc}/sys/kernel/random/boot_id")
        self._namespaces = " ".join(_link(f"{proc}/self/ns/{kind}") for kind in ("pid", "time"))
        self._is_exhausted_logged = False

    def of_peer(self, sock: PeerSocket, own_pid: int, accepted_ns: int) -> ProcessRecord | None:
        """The process that connected; None where it cannot be seen.

        ``own_pid`` is its pid as it knows it itself. The peer of a socket may be a proxy or a tunnel, and its life says
        nothing of the holder's; a proxy has another pid. ``accepted_ns``: when the connection was accepted, in
        CLOCK_BOOTTIME.
        """
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except (OSError, TypeError):
            return None
        pid: int = _CREDENTIALS.unpack(raw)[0]
        if pid <= 0:
            return None
        try:
            pidfd, is_of_peer = self._pidfd_of_peer(sock, pid)
        except OSError as error:
            return self._without_pidfd(error, pid, own_pid)
        try:
            stat = self.stat(pid)
            if _has_ended(pidfd):
                return self._ended(pid, own_pid)
            if stat is None:  # it lives, and /proc hides it
                return None
            if not is_of_peer and stat.start_ticks * _NS_PER_TICK > accepted_ns:
                return None  # it began after the connection: the pid was reused
            if self._own_pid(pid) != own_pid:
                return None
            return self._record(pid, stat.start_ticks)
        except OSError as error:
            return self._without_pidfd(error, pid, own_pid)
        finally:
            os.close(pidfd)

    def open(self, process: ProcessRecord) -> int | ProcessFate:
        """A pidfd of this very process, readable when it has ended."""
        if process.boot_id != self._boot_id or process.start_ticks == _NO_START:
            return ProcessFate.GONE
        if process.namespaces != self._namespaces:
            return ProcessFate.UNSEEN
        try:
            pidfd = self._pidfd_open(process.pid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                return ProcessFate.GONE
            self._log_exhausted(error)
            return self.fate_of(process)
        fate = self.fate_of(process)
        if fate is ProcessFate.ALIVE:
            return pidfd
        if self._is_hidden(process.pid, pidfd):
            fate = ProcessFate.UNSEEN
        os.close(pidfd)
        return fate

    def fate_of(self, process: ProcessRecord) -> ProcessFate:
        """Whether this very process lives. What cannot be read for want of descriptors is taken to live."""
        try:
            stat = self.stat(process.pid)
        except OSError as error:
            return ProcessFate.ALIVE if error.errno in _NO_DESCRIPTORS else ProcessFate.UNSEEN
        if stat is None or stat.is_gone or stat.start_ticks != process.start_ticks:
            return ProcessFate.GONE
        return ProcessFate.ALIVE

    def stat(self, pid: int) -> ProcessEntry | None:
        """The process that has this pid now; None if there is none."""
        try:
            fd = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            raw = os.read(fd, _STAT_MAX)
        except ProcessLookupError:  # it ended between the two
            return None
        finally:
            os.close(fd)
        # "pid (name) state ppid …": the name may hold anything, so the fields count from its last bracket.
        fields = raw[raw.rindex(b")") + 2 :].split()
        # The first thread may end and leave the others at work; such a process looks like a zombie and is none.
        is_gone = fields[0][0] in _GONE_STATES and int(fields[17]) <= 1
        return ProcessEntry(int(fields[19]), is_gone)

    def _pidfd_of_peer(self, sock: PeerSocket, pid: int) -> tuple[int, bool]:
        """A pidfd, and whether it is the peer's for certain."""
        if self._peer_pidfd is not None:
            try:
                return sock.getsockopt(socket.SOL_SOCKET, self._peer_pidfd), True
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    raise
                if error.errno == errno.ENOPROTOOPT:
                    self._peer_pidfd = None
        return self._pidfd_open(pid), False

    def _is_hidden(self, pid: int, pidfd: int) -> bool:
        """Whether a process lives that /proc does not show, as with the mount option hidepid."""
        with contextlib.suppress(OSError):
            return self.stat(pid) is None and not _has_ended(pidfd)
        return False

    def _without_pidfd(self, error: OSError, pid: int, own_pid: int) -> ProcessRecord | None:
        if error.errno in _NO_PROCESS:
            return self._ended(pid, own_pid)
        self._log_exhausted(error)
        return None

    def _log_exhausted(self, error: OSError) -> None:
        if error.errno in _NO_DESCRIPTORS and not self._is_exhausted_logged:
            self._is_exhausted_logged = True
            _log.warning(
                "processes of holders cannot be watched (%s): the leases of those that die now end later, "
                "at the latest by their time to live. Raise the limit of open files (ulimit -n).",
                os.strerror(error.errno or 0),
            )

    def _ended(self, pid: int, own_pid: int) -> ProcessRecord | None:
        """The peer has ended by now. Where it had another pid for itself, it may have been a proxy."""
        return self._record(pid, _NO_START) if pid == own_pid else None

    def _record(self, pid: int, start_ticks: int) -> ProcessRecord:
        return ProcessRecord(pid=pid, start_ticks=start_ticks, boot_id=self._boot_id, namespaces=self._namespaces)

    def _own_pid(self, pid: int) -> int:
        """The pid in the process's own PID namespace, which may be one below ours."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"{self._proc}/{pid}/status").read_bytes().splitlines():
                if line.startswith(b"NSpid:"):
                    return int(line.split()[-1])
        return 0


class PeerConnection:
    """The other end of one connection."""

    def __init__(self, processes: ProcessTable, sock: PeerSocket, accepted_ns: int, *, shared: bool = False) -> None:
        """``shared``: it came over the shared socket."""
        self._processes = processes
        self._sock = sock
        self._accepted_ns = accepted_ns
        self._found: dict[int, ProcessRecord] = {}
        self.origin: Final = _origin(sock, shared=shared)
        self.since_wall_ns: Final = time.time_ns()
        self.tenants: set[TenantId] = set()
        """Whose requests came over the connection; it is one, unless the program has several tokens."""

    def note_tenant(self, tenant: TenantId) -> None:
        """A request of this tenant came."""
        if len(self.tenants) < TENANTS_MAX:
            self.tenants.add(tenant)

    def process(self, own_pid: int) -> ProcessRecord | None:
        """The process that connected, if it is the one that has this pid for itself and can be seen."""
        found = self._found.get(own_pid)
        if found is None:
            found = self._processes.of_peer(self._sock, own_pid, self._accepted_ns)
            if found is not None:
                self._found = {own_pid: found}
        return found


def _origin(sock: PeerSocket, *, shared: bool) -> Origin:
    """Which user's process connected, as the kernel noted it then."""
    try:
        pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    except (OSError, TypeError, struct.error):  # no unix socket
        return Origin(shared=shared)
    return Origin(shared=shared, uid=uid, pid=pid) if pid >= 0 and uid != NO_UID else Origin(shared=shared)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------------- holder watch
#
# Watches the processes of holders, and tells the ledger when one has ended.
#
# Each process that leases are bound to has one pidfd in the loop, however many leases that are. Where there is no pidfd
# to be had (the limit of open files), the process is looked at once a second instead.


LOOK_EVERY_S: Final = 1.0
"""How often a process without a pidfd is looked at."""
IDLE_MAX: Final = 64
"""Processes that are watched on although no lease is bound to them now: most ask for another one soon."""


class HolderWatch:
    """Follows the driver's facts from ``start`` on."""

    def __init__(self, driver: Driver, processes: ProcessTable) -> None:
        self._driver = driver
        self._processes = processes
        self._bound = BoundLeases()
        self._pidfds: dict[ProcessRecord, int] = {}
        self._idle: OrderedDict[ProcessRecord, None] = OrderedDict()
        self._looked_at: set[ProcessRecord] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._guard = Guard("holder_watch")

    def start(self) -> None:
        """Look again at every process that leases are bound to; then follow what happens."""
        self._loop = asyncio.get_running_loop()
        for lease in self._driver.ledger.state.leases.values():
            self._bound.restored(lease)
        for process in list(self._bound):
            self._watch(process)
        self._driver.listen(self._note)

    def close(self) -> None:
        """Watch nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        for process in list(self._pidfds):
            self._forget(process)
        self._looked_at.clear()

    def _note(self, now: Now, events: Sequence[Event]) -> None:
        for process in self._bound.note(events):
            if self._bound.of(process):
                self._idle.pop(process, None)
                if process not in self._pidfds:  # it may have ended, with leases that wait for the end of others
                    self._watch(process)
            elif process in self._pidfds:
                self._idle[process] = None
            else:
                self._looked_at.discard(process)
        while len(self._idle) > IDLE_MAX:
            self._forget(next(iter(self._idle)))

    def _watch(self, process: ProcessRecord) -> None:
        found = self._processes.open(process)
        if isinstance(found, int):
            try:
                self._loop.add_reader(found, self._ended, process)
            except OSError:  # the user has no more watches (epoll)
                os.close(found)
                found = ProcessFate.ALIVE
        if isinstance(found, int):
            self._looked_at.discard(process)
            self._pidfds[process] = found
        elif found is ProcessFate.ALIVE:
            self._looked_at.add(process)
            if self._timer is None:
                self._timer = self._loop.call_later(LOOK_EVERY_S, self._check_holders)
        else:
            self._looked_at.discard(process)
            leases = self._bound.of(process)
            is_gone = found is ProcessFate.GONE
            self._driver.post(
                HolderGone(process=process, leases=leases) if is_gone else HolderUnseen(process=process, leases=leases)
            )

    def _check_holders(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._check_holders) if self._looked_at else None
        for process in list(self._looked_at):
            try:
                self._watch(process)
            except Exception as error:  # noqa: BLE001 - the others are looked at, and this one a second later
                self._guard.failed(error)
            else:
                self._guard.passed()

    def _ended(self, process: ProcessRecord) -> None:
        """Its pidfd says so."""
        self._forget(process)
        if leases := self._bound.of(process):
            self._driver.post(HolderGone(process=process, leases=leases))

    def _forget(self, process: ProcessRecord) -> None:
        self._idle.pop(process, None)
        pidfd = self._pidfds.pop(process)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
