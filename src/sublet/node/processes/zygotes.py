"""The supervisor's zygotes: started in the background, asked for guests, ended when outdated.

No guest waits for a zygote. ``want`` starts one; while it is not ``ready`` guests start plainly, and so they do when a
fork fails. A guest from a zygote is a ``Child`` like one from ``spawn``: it waits for ``let_run``, so that it is noted
before it runs, and tells through ``failure`` what went wrong before its program began.

The reaper of the supervisor's children reaps zygotes and guests with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from sublet.background import is_shortage
from sublet.errors import SubletError, Unsupported
from sublet.node.loop import READ, WRITE, Loop, Timer, reading
from sublet.node.processes.spawn import Child, SpawnPlan, read_failure, spawn
from sublet.node.processes.zygote_policy import ZYGOTES_MAX, ZygoteKey, ZygoteRegistry, without
from sublet.wire.codec import loads
from sublet.wire.frames import close_all
from sublet.wire.link import Link
from sublet.wire.link_events import CallRefused, Event, Happening, Over, PeerHello, Replied
from sublet.wire.sockets import receive_some, send_some
from sublet.wire.zygote import (
    Discarded,
    Fork,
    Forked,
    Ready,
    Warm,
    fingerprint,
    python_argv,
    sealed_request,
    zygote_env,
)

SEND_AGAIN_S: Final = 0.2
"""After something could not be sent for want of memory."""
READY_S: Final = 120.0
"""Imports may be slow on a cold disk; what takes longer than this hangs."""
FORK_S: Final = 10.0
"""A fork takes milliseconds; a zygote that does not answer for so long is ended, and the guest starts plainly."""
FORKS_MAX: Final = 64
"""Unanswered forks of one zygote."""
LAST_WORDS: Final = 300
"""Bytes of what a zygote that died had to say."""
_PLAIN: Final = "The guest starts without a warm interpreter."

OnForked: TypeAlias = Callable[[Child | SubletError], None]


class Zygotes:
    """All zygotes of one supervisor."""

    def __init__(
        self,
        loop: Loop,
        *,
        zygotes_max: int = ZYGOTES_MAX,
        tenant_bytes: int = 0,
        cold: frozenset[str] = frozenset(),
        enter: Callable[[ZygoteKey], None] = lambda key: None,
        on_life: Callable[[int, bool], None] = lambda pid, lives: None,
    ) -> None:
        """``tenant_bytes``: what those of single tenants may cost together; 0: all tenants share. ``cold``: packages
        that are not imported beforehand: a guest that uses one imports it then, others are spared its memory.
        ``enter`` is called in each new zygote before its interpreter: to become the user of the key, for one.
        ``on_life`` is told the pid of each zygote that was started, and of each that was ended."""
        self.on_life = on_life
        self.loop: Final = loop
        self._enter = enter
        self.shelf: Final = ZygoteRegistry(zygotes_max, tenant_bytes)
        self.cold: Final = cold
        self._running: dict[ZygoteKey, _Zygote] = {}

    def subscribe(self, on_life: Callable[[int, bool], None]) -> None:
        """Call ``on_life`` for each zygote from now on, and for those that live."""
        self.on_life = on_life
        for zygote in self._running.values():
            on_life(zygote.pid, True)

    def wish(self, warm: Warm) -> None:
        """A holder will soon want a guest of this kind."""
        self.want(ZygoteKey(warm.python or sys.executable, warm.imports, fingerprint(warm.env)))

    def for_tenant(self, key: ZygoteKey, tenant: str) -> ZygoteKey:
        """The one of this kind from which the tenant's next guest should come: its own, the one that tenants share
        while that is not ready, or the shared one for good where memory is short."""
        own = self.shelf.of_tenant(key, tenant, self.loop.now_ns())
        if own == key or self.ready(own) or not self.ready(key):
            return own
        self.want(own)
        return key

    def ready(self, key: ZygoteKey) -> bool:
        """Whether a guest can come from a zygote now. One that has gone out of date is ended, and made anew."""
        if not self.shelf.is_ready(key):
            return False
        if any(_mtime_ns(stamp.path) != stamp.mtime_ns for stamp in self.shelf.stamps(key)):
            self.shelf.drop(key)
            self._running.pop(key).end()
            self.want(key)
            return False
        return True

    def want(self, key: ZygoteKey) -> None:
        """Have one ready for next time, if that can be."""
        start, ended = self.shelf.want(key, self.loop.now_ns())
        for other in ended:
            self._running.pop(other).end()
        if start:
            try:
                self._running[key] = _Zygote(self.loop, key, self, self._enter)
            except OSError as error:
                self.shelf.died(key, error.strerror or "it could not be started", self.loop.now_ns())

    def call_when_known(self, key: ZygoteKey, then: Callable[[], None]) -> bool:
        """Have ``then`` called once the one that is being made can be used, or never will be; False if none is."""
        zygote = self._running.get(key)
        if zygote is None or self.shelf.is_ready(key):
            return False
        zygote.waiting.append(then)
        return True

    def fork(
        self, key: ZygoteKey, fork: Fork, stdio: Sequence[int], on_done: OnForked, *, groups: Sequence[int] = ()
    ) -> None:
        """Make a guest; ``on_done`` gets it, or why there is none, once. The descriptors stay the caller's.

        ``stdio`` are its descriptors 0 to 2, ``groups`` the ``cgroup.procs`` it joins, open for writing.
        """
        zygote = self._running.get(key)
        if zygote is None or not self.shelf.is_ready(key):
            on_done(Unsupported("there is no warm interpreter of this kind", do=_PLAIN))
            return
        self.shelf.used(key, self.loop.now_ns())
        zygote.fork(fork, (*stdio, *groups), on_done)

    def lines(self) -> tuple[str, ...]:
        """For status and ``doctor``."""
        return self.shelf.lines()

    def close(self) -> None:
        """End all of them. Their guests go on."""
        for zygote in self._running.values():
            zygote.end()
        self._running.clear()

    # ------------------------------------------------------------------------------------- what zygotes have to say

    def proved(self, key: ZygoteKey, ready: Ready) -> None:
        self.shelf.proved(key, ready.stamps, ready.private_bytes)

    def discarded(self, key: ZygoteKey, reason: str) -> None:
        self.shelf.discarded(key, reason, self.loop.now_ns())
        self._running.pop(key).end()

    def died(self, key: ZygoteKey, reason: str) -> None:
        self.shelf.died(key, reason, self.loop.now_ns())
        self._running.pop(key).end()


class _PendingFork:
    """One fork that is not answered yet."""

    __slots__ = ("failure", "go", "on_done", "timer")

    def __init__(self, on_done: OnForked, go: int, failure: int, timer: Timer) -> None:
        self.on_done = on_done
        self.go = go
        self.failure = failure
        self.timer = timer


class _Zygote:
    """The supervisor's end of one."""

    def __init__(self, loop: Loop, key: ZygoteKey, house: Zygotes, enter: Callable[[ZygoteKey], None]) -> None:
        self._loop = loop.guarded(lambda _: self._end("internal error in the supervisor; see its log"))
        self._key = key
        self._house = house
        self._link = Link.accepting()
        self._pending: dict[int, _PendingFork] = {}
        self.waiting: list[Callable[[], None]] = []
        """Told in a turn of their own that it is ready, or has ended."""
        self._words = os.memfd_create("zygote")
        self._is_ended = False
        try:
            self._sock, theirs = socket.socketpair()
        except OSError:
            os.close(self._words)
            raise
        try:
            with theirs:
                self._child = spawn(_plan(key, house.cold, theirs.fileno(), self._words, enter))
        except OSError:
            os.close(self._words)
            self._sock.close()
            raise
        self.pid: Final = self._child.pid
        try:
            house.on_life(self.pid, True)
        except OSError:  # without a descriptor: it would pass for a stranger, and nothing would be verified clean
            self._child.forget()
            os.close(self._words)
            self._sock.close()
            raise
        self._child.let_run()
        self._late = loop.after(READY_S, partial(self._discard, f"it was not ready within {READY_S:.0f} s"))
        self._events = READ
        loop.watch(self._sock.fileno(), READ, self._on_ready)

    def fork(self, fork: Fork, fds: Sequence[int], on_done: OnForked) -> None:
        if len(self._pending) >= FORKS_MAX:
            on_done(Unsupported("the warm interpreter has too many guests to make at once", do=_PLAIN))
            return
        made: list[int] = []
        given: list[int] = []
        try:
            made += os.pipe2(os.O_CLOEXEC)
            made += os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for fd in fds:
                given.append(_dup(fd))  # noqa: PERF401 - each is closed, if one fails
            made.append(sealed_request(fork))
        except OSError:
            close_all((*made, *given))
            raise
        go_read, go, failure, failure_write, request = made
        given[3:3] = [go_read, failure_write, request]  # after the three of its stdio
        try:
            call = self._link.call(b"", given)  # from here on those given are the link's to close
        except SubletError as error:
            close_all((go, failure, *given))
            on_done(error)
            return
        timer = self._loop.after(FORK_S, partial(self._end, f"it did not answer within {FORK_S:.0f} s"))
        self._pending[call] = _PendingFork(on_done, go, failure, timer)
        self._push()

    def end(self) -> None:
        """It is not wanted any more. What was asked of it is refused. Harmless twice."""
        if self._is_ended:
            return
        self._is_ended = True
        self._late.cancel()
        self._loop.forget(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)
        self._house.on_life(self.pid, False)
        close_all((self._child.pidfd, self._child.failure, self._words))
        self._link.drop_output()
        for call in tuple(self._pending):
            self._refuse(call, Unsupported("the warm interpreter ended", do=_PLAIN))
        self._notify_waiting()

    def _notify_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        for then in waiting:
            self._loop.soon(then)

    def _on_ready(self, events: int) -> None:
        for happening in reading(lambda: receive_some(self._sock, self._link)):
            self._on_event(happening)
            if self._is_ended:
                return
        self._push()

    def _push(self) -> None:
        drained = True
        try:
            drained = send_some(self._sock, self._link)
        except OSError as error:
            if is_shortage(error):  # what is to be sent is still there
                self._loop.after(SEND_AGAIN_S, self._push_again)
            # else the reading side finds out, and says so
        wanted = READ if drained else READ | WRITE
        if wanted != self._events:
            self._events = wanted
            self._loop.change(self._sock.fileno(), wanted)

    def _push_again(self) -> None:
        if not self._is_ended:
            self._push()

    def _on_event(self, happening: Happening) -> None:
        match happening:
            case PeerHello():
                self._link.welcome()
            case Event(body=body):
                self._on_message(body)
            case Replied(call=call, body=body):
                self._answer(call, body)
            case CallRefused(call=call, error=error):
                self._refuse(call, error)
            case Over():
                self._end(self._final_output())
            case _:
                self._end("it spoke out of turn")

    def _on_message(self, body: bytes) -> None:
        try:
            message = loads(Ready | Discarded, body)
        except SubletError as error:
            self._end(error.message)
            return
        if isinstance(message, Discarded):
            self._discard(message.reason)
        else:
            self._late.cancel()
            self._house.proved(self._key, message)
            self._notify_waiting()

    def _answer(self, call: int, body: bytes) -> None:
        pending = self._pending.get(call)
        if pending is None:
            return
        try:
            forked = loads(Forked, body)
            pidfd = _pidfd_of(forked)
        except (SubletError, OSError):
            self._refuse(call, Unsupported("the new guest was gone at once", do=_PLAIN))
            return
        del self._pending[call]
        pending.timer.cancel()
        pending.on_done(Child(forked.pid, pidfd, pending.failure, pending.go))

    def _refuse(self, call: int, error: SubletError) -> None:
        pending = self._pending.pop(call, None)
        if pending is not None:
            pending.timer.cancel()
            close_all((pending.go, pending.failure))  # a guest that waits for its word ends by that
            pending.on_done(error)

    def _discard(self, reason: str) -> None:
        self._house.discarded(self._key, reason)

    def _end(self, reason: str) -> None:
        self._house.died(self._key, reason)

    def _final_output(self) -> str:
        failed = None
        with contextlib.suppress(BlockingIOError):
            failed = read_failure(self._child.failure, self._key.python)
        if failed is not None:
            return str(failed)
        size = os.fstat(self._words).st_size
        output = os.pread(self._words, LAST_WORDS, max(0, size - LAST_WORDS)).decode("utf-8", "replace")
        return output.strip().rpartition("\n")[2] or "it ended without a word"


def _plan(key: ZygoteKey, cold: frozenset[str], sock: int, words: int, enter: Callable[[ZygoteKey], None]) -> SpawnPlan:
    def take_stdio() -> None:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for source, number in ((null, 0), (words, 1), (words, 2)):
            os.dup2(source, number)
        os.set_inheritable(sock, True)

    def become(parent: int) -> int:
        enter(key)
        return parent

    return SpawnPlan(
        take_stdio=take_stdio,
        join=(),
        limit=lambda: None,
        enter=become,
        cwd="/",
        umask=0o077,
        argv=python_argv(
            key.python, "sublet.guest.zygote", str(sock), *without(key.imports, cold), options=key.options
        ),
        env=zygote_env({"PATH": os.defpath, **dict(key.env)}),
    )


def _pidfd_of(forked: Forked) -> int:
    """Of this very process. No other process can have its pid before it is reaped, and it is a child of ours."""
    pidfd = os.pidfd_open(forked.pid)
    try:
        with open(f"/proc/{forked.pid}/stat", "rb") as file:
            start_ticks = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        os.close(pidfd)
        raise
    if start_ticks != forked.start_ticks:
        os.close(pidfd)
        raise ProcessLookupError(f"process {forked.pid} is another one")
    return pidfd


def _dup(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _mtime_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1
