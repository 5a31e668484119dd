"""The program of a zygote: a warm interpreter from which guests are forked, twice.

It imports what it was asked to, proves itself (``proof``), and then waits. It never computes and never opens a device.
What a guest is to be it never reads: that comes in a file, which only the guest opens (``wire.zygote``). For each call
it makes a child that makes the guest and ends; so the guest loses its parent and becomes a child of the supervisor,
which has declared itself the one orphans come to. The answer names the guest once the child in between is gone; and
only after the answer does the supervisor let the guest go on, so the guest finds the right parent.

While no request comes, one copy is made in advance (``standby``), and the next guest is that one. When none came for
longer, it is *settled*: what may be imported later (``LATER``) is, the garbage of all imports is collected, and it
proves itself once more. So the first guest, which may be waiting, does not wait for that.

Arguments: the descriptor of its socket, then the modules to import. Started with ``wire.zygote.python_argv``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn

from sublet.errors import InvalidRequest, SubletError, Unsupported
from sublet.guest import bootstrap
from sublet.guest.after_fork import NOT_STARTED, become
from sublet.guest.ending import end_forked, keep_finalizers_back
from sublet.guest.program import Program
from sublet.guest.zygote_checks import find_fault
from sublet.wire.codec import dumps, loads
from sublet.wire.frames import close_all
from sublet.wire.link import Link
from sublet.wire.link_events import Called, Over
from sublet.wire.sockets import receive_some, send_some
from sublet.wire.zygote import FORK_FDS, LATER, OPTIONAL, Discarded, Fork, Forked, Ready, Stamp

_FAREWELL_MS: Final = 5000
_PLAIN: Final = "Start the guest without a warm interpreter."
STANDBY_AFTER_MS: Final = 20
"""Time without a request before one is made in advance: a guest that was just made is to begin first."""
SETTLE_AFTER_MS: Final = 2000
"""Time without a request before the rest is done."""
_STAMPS_MAX: Final = 64
"""Paths that are looked at before each fork; more would cost more than it tells."""


class Zygote:
    """One end of the socket to the supervisor, and what is done there."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._link = Link.connecting(b"zygote")
        self._parent = os.getppid()
        self._kept: set[int] = set()
        self._standby: Standby | None = None
        self._may_stand_by = True
        """Once for each guest: one that ended by itself is not made again and again."""
        self._began_ns = time.monotonic_ns()
        self._before: tuple[Stamp, ...] = ()
        self._modules: list[str] = []
        self._later: list[str] = []

    def warm_up(self, modules: Sequence[str]) -> bool:
        """Import, prove, and say how it went; False if no guest may come from here."""
        self._before = stamps_of(_places())
        loads(Fork, dumps(Fork()))  # how one is read is found out once, before the forks
        at = modules.index(LATER) if LATER in modules else len(modules)
        self._later = [*modules[at + 1 :]]
        return self._take_in(modules[:at])

    def _import_later_modules(self) -> None:
        """Import what could wait. The standby copy has not got it, and is made anew."""
        later, self._later = self._later, []
        if self._standby is not None:
            self._standby.close()
        self._standby, self._may_stand_by = None, True
        gc.unfreeze()
        self._take_in(later)

    def _take_in(self, modules: Sequence[str]) -> bool:
        gc.disable()  # imports make many objects and hardly any garbage: looking for it again and again takes a fifth
        fault = _import_all(modules)
        if not self._later:
            gc.collect()
        gc.freeze()  # collections in guests then leave these pages alone, and they stay shared
        gc.enable()
        keep_finalizers_back()
        fault = fault or find_fault()
        if fault is not None:
            self._link.event(dumps(Discarded(reason=fault)))
            return False
        self._modules += modules
        loaded = [sys.modules.get(name.removesuffix(OPTIONAL)) for name in self._modules]
        files = [getattr(module, "__file__", None) for module in loaded]
        stamps = (*self._before, *stamps_of([file for file in files if file]))
        took_ns = time.monotonic_ns() - self._began_ns
        version = ".".join(map(str, sys.version_info[:3]))
        ready = Ready(
            python=version,
            modules=len(sys.modules),
            took_ns=took_ns,
            private_bytes=_private_bytes(),
            stamps=stamps[:_STAMPS_MAX],
        )
        self._link.event(dumps(ready))
        return True

    def flush(self) -> None:
        """Send what is to be sent, so far as the supervisor takes it."""
        while not send_some(self._sock, self._link) or self._link.version is None:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if not poll.poll(_FAREWELL_MS) or any(
                isinstance(one, Over) for one in receive_some(self._sock, self._link)
            ):
                return

    def serve(self) -> Program | None:
        """Answer until the supervisor hangs up (None). In a guest it returns what that is to run."""
        descriptors = _open_descriptors()
        self._kept = {fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}")}  # without the listing's own
        while True:
            drained = send_some(self._sock, self._link)
            if self._link.over is not None and drained:
                return None
            poll = select.poll()
            poll.register(self._sock, select.POLLIN if drained else select.POLLIN | select.POLLOUT)
            if self._standby is not None:
                poll.register(self._standby, 0)
            is_to_come = drained and self._may_stand_by and self._standby is None
            ready = poll.poll(STANDBY_AFTER_MS if is_to_come else SETTLE_AFTER_MS if drained and self._later else None)
            if not ready:
                if not is_to_come:
                    self._import_later_modules()
                elif (program := self._stand_by()) is not None:
                    return program
            elif self._standby is not None and any(fd == self._standby.fileno() for fd, _ in ready):
                self._standby.close()
                self._standby = None
            for happening in receive_some(self._sock, self._link):
                if isinstance(happening, Called):
                    program = self._answer(happening)
                    if program is not None:
                        return program
                elif isinstance(happening, Over) and happening.by_peer:
                    return None

    def _answer(self, called: Called) -> Program | None:
        try:
            _check(called.fds)
            forked = self._hand_over(called.fds) or self._fork(called.fds)
        except SubletError as error:
            self._link.refuse(called.call, error)
        except OSError as error:
            self._link.refuse(called.call, Unsupported(f"the zygote could not fork: {error.strerror}", do=_PLAIN))
        else:
            if isinstance(forked, Program):
                return forked
            self._link.reply(called.call, dumps(forked))
        close_all(called.fds)
        return None

    def _hand_over(self, fds: tuple[int, ...]) -> Forked | None:
        """The one that waits becomes this guest; None if there is none."""
        standby, self._standby = self._standby, None
        self._may_stand_by = True
        return None if standby is None else standby.become(fds)

    def _stand_by(self) -> Program | None:
        """Make one in advance. Here it gives None; in what was made, once it is a guest that may run, its program."""
        self._may_stand_by = False
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # then the next guest is forked when it is wanted
            return None
        with contextlib.suppress(OSError, SubletError):  # then the next guest is forked when it is wanted
            pid = _fork_twice()
            if pid == 0:
                return _in_guest(lambda: self._wait_to_be_one(ours, theirs))
            self._standby = Standby(ours, Forked(pid=pid, start_ticks=_start_ticks(pid)))
        theirs.close()
        if self._standby is None:
            ours.close()
        return None

    def _wait_to_be_one(self, ours: socket.socket, theirs: socket.socket) -> Program:
        ours.close()  # or it would be closed by its number, when that is another's
        self._sock.close()
        # Redundant today: one is made when no request is under way, so nothing else is open. It stays because a request
        # that came in between would leave its descriptors in another holder's guest.
        _close_all_but({*self._kept, theirs.fileno()})
        _call_in_standby(self._modules)
        return become(await_request(theirs), self._parent)

    def _fork(self, fds: tuple[int, ...]) -> Forked | Program:
        """Here it gives who the guest is; in the guest, once it may run, what it is to run."""
        pid = _fork_twice()
        if pid == 0:
            return _in_guest(lambda: self._be_one(fds))
        return Forked(pid=pid, start_ticks=_start_ticks(pid))

    def _be_one(self, fds: tuple[int, ...]) -> Program:
        _close_all_but({*self._kept, *fds})
        self._sock.close()
        return become(fds, self._parent)

    def close(self) -> None:
        """Close the standby copy: it is not needed any more."""
        if self._standby is not None:
            self._standby.close()


def main(arguments: list[str]) -> None:
    """The program of a zygote, and then of every guest that is forked from it."""
    fd, *modules = arguments
    _close_all_but({int(fd)})  # whatever the supervisor was started with is not for guests
    with socket.socket(fileno=int(fd)) as sock:
        sock.set_inheritable(False)
        zygote = Zygote(sock)
        if not zygote.warm_up(modules):
            zygote.flush()
            raise SystemExit(1)
        program = zygote.serve()
    if program is None:
        zygote.close()
        raise SystemExit(0)
    sys.orig_argv[:] = [sys.executable, *program.argv]
    _prefer_own_sublet()
    bootstrap.run(program, end_forked)


def stamps_of(paths: Iterable[str]) -> tuple[Stamp, ...]:
    """When these were changed last."""
    return tuple(Stamp(path=path, mtime_ns=_mtime_ns(path)) for path in dict.fromkeys(paths))


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def _places() -> list[str]:
    """Where an upgrade of the interpreter or of a package shows: pip changes the folder that holds the packages."""
    return [os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg"), *filter(None, sys.path)]


def _import_all(modules: Iterable[str]) -> str | None:
    for requested in modules:
        name = requested.removesuffix(OPTIONAL)
        try:
            if name == requested or _is_importable(name):
                importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - whatever a module does at its import, it is told and that is all
            return f"{name} could not be imported: {type(error).__name__}: {error}"
    return None


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is what it would be in
        return False


def _check(fds: tuple[int, ...]) -> None:
    """Whether a guest could come of these. What they hold is not looked at: that is the guest's to read."""
    if len(fds) < FORK_FDS:
        raise InvalidRequest(f"a fork came with {len(fds)} descriptors, and {FORK_FDS} are needed", do=_PLAIN)


def _private_bytes() -> int:
    """Memory of this process that no file backs; 0 where the kernel does not tell. Copies that wait share it."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))
    except OSError:
        return 0


def _fork_twice() -> int:
    """The child's pid; 0 in the child."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        _make_guest(write)
        return 0
    os.close(write)
    reply = os.read(read, 32)
    os.close(read)
    os.waitpid(middle, 0)  # once it is reaped, its child has its new parent
    if not reply:
        raise Unsupported("the second fork failed", do=_PLAIN)
    return int(reply)


def _in_guest(begin: Callable[[], Program]) -> Program:
    """What is raised here must not come to where the zygote would answer it: this is a copy of it."""
    try:
        return begin()
    except BaseException:  # noqa: BLE001 - who waits for it sees that it ended
        os._exit(NOT_STARTED)


def _make_guest(write: int) -> None:
    """In the child in between: fork, say who the guest is, end. Returns in the guest only."""
    guest = -1
    try:
        guest = os.fork()
        if guest > 0:
            os.write(write, str(guest).encode())
    finally:
        if guest != 0:
            os._exit(0)


def _open_descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _close_all_but(kept: set[int]) -> None:
    """What came for other guests in the same moment is not this one's."""
    close_all(_open_descriptors() - kept - {0, 1, 2})


def _start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _prefer_own_sublet() -> None:
    """If this interpreter has a Sublet of its own, that is the one its programs import, whatever version it is."""
    loaded = sys.modules["sublet"].__path__[0]
    found = importlib.machinery.PathFinder.find_spec("sublet", sys.path)
    own = (found.submodule_search_locations or [loaded])[0] if found is not None else loaded
    if os.path.realpath(own) != os.path.realpath(loaded):
        for name in [name for name in sys.modules if name == "sublet" or name.startswith("sublet.")]:
            del sys.modules[name]


# ----------------------------------- A guest in advance: forked, twice, from a warm interpreter before one is asked for
# Two forks of an interpreter that has numpy or torch loaded are most of the time a guest takes to begin, and nothing in
# them depends on what the guest is to be. So a zygote that has nothing to do makes one copy of itself that waits: at
# most one, and never while it is asked for guests. It has no lease, no group and no user of its own, it stays in the
# zygote's session (so it is counted as the zygote's, and scans do not take it for a guest), and computes nothing. When
# a guest is wanted the zygote hands it the descriptors of the call, the request among them, which it reads itself; and
# it becomes that guest exactly as a fresh fork would.
#
# It ends with its zygote: the only other end of its socket is there. What it costs is the memory that it does not
# share: page tables and what the forks touched, 1.5 MB with numpy and 2.5 MB with torch loaded.

#
# Meanwhile it calls ``in_standby`` of each module that was asked for and has such a function: that may look at what its
# guests will look at first, and change nothing. What a guest looks at it writes to (it counts references), so the page
# is copied then, and the program waits for that.

IN_STANDBY: Final = "in_standby"
_WANTED: Final = b"!"
"""The message that its descriptors come with."""
FDS_MAX: Final = 64


class Standby:
    """The zygote's end of one that waits."""

    def __init__(self, sock: socket.socket, forked: Forked) -> None:
        self._sock = sock
        self._forked = forked

    def fileno(self) -> int:
        """For ``poll``: it hangs up if it ended."""
        return self._sock.fileno()

    def become(self, fds: tuple[int, ...]) -> Forked | None:
        """Let it be this guest; None where it cannot, and then it is not there any more, or was not asked."""
        try:
            socket.send_fds(self._sock, [_WANTED], fds, socket.MSG_DONTWAIT)
        except OSError:
            return None
        finally:
            self.close()
        return self._forked

    def close(self) -> None:
        """It is not wanted any more, or has what it needs: it ends, if it was not asked to be a guest."""
        self._sock.close()


def _call_in_standby(modules: Iterable[str]) -> None:
    for name in modules:
        found = getattr(sys.modules.get(name.removesuffix(OPTIONAL)), IN_STANDBY, None)
        if found is not None:
            with contextlib.suppress(Exception):  # the guest does without
                found()


def await_request(sock: socket.socket) -> tuple[int, ...]:
    """In the one that waits: the descriptors of what it is to be. Does not return if it is not wanted."""
    request, fds = b"", list[int]()
    with contextlib.suppress(OSError):
        request, fds, _, _ = socket.recv_fds(sock, len(_WANTED), FDS_MAX, socket.MSG_CMSG_CLOEXEC)
    if not request:
        _leave()
    sock.close()
    return tuple(fds)


def _leave() -> NoReturn:
    """Not as Python ends: nothing here is ours to put away."""
    os._exit(0)
