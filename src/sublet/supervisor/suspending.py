"""The one long-lived program that has the driver suspend and resume processes (``devices.suspend``), seen from here.

It is started when it is first needed, and again if it ended. A question is a line, and so is its answer; questions wait
for each other, since the driver does one at a time anyway. Whoever asked when the program ended is told that it failed.
Nothing here waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sublet.supervisor.loop import READ, Loop
from sublet.wire.zygote import python_argv

__all__ = ["Suspending"]

PROGRAM: Final = "sublet.devices.suspend"
LINE_MAX: Final = 1 << 20
PIECE: Final = 64 * 1024
_STDIN, _STDOUT = 0, 1

Told = Callable[[Mapping[str, Any]], None]
"""Told the answer: it has ``failed`` in it, with why, where it came to nothing."""


class Suspending:
    """Of one supervisor."""

    def __init__(self, loop: Loop, on_life: Callable[[int, bool], None], argv: Sequence[str] | None = None) -> None:
        """``on_life`` is told the pid of the program when it was made, and when it has ended."""
        self._loop = loop
        self._on_life = on_life
        self._argv = tuple(argv) if argv is not None else python_argv(sys.executable, PROGRAM)
        self._pid = self._to = self._from = -1
        self._is_ready = False
        self._heard = b""
        self._asked: deque[tuple[dict[str, object], Told]] = deque()
        self._is_asking = False

    def suspend(self, pids: Sequence[int], timeout_ms: int, told: Told) -> None:
        """Take these off their cards, all or none."""
        self._ask({"do": "suspend", "pids": list(pids), "timeout_ms": timeout_ms}, told)

    def resume(self, pids: Sequence[int], pairs: Sequence[tuple[str, str]], told: Told) -> None:
        """Put them back. ``pairs``: which card, by UUID, has become which. All are named if one is another now."""
        moved = any(old != new for old, new in pairs)
        bare = [[_bare(old), _bare(new)] for old, new in pairs] if moved else []
        self._ask({"do": "resume", "pids": list(pids), "pairs": bare}, told)

    def close(self) -> None:
        """End it. Whoever still waits is not told."""
        self._asked.clear()
        self._over()

    # ---- within ----

    def _ask(self, question: dict[str, object], told: Told) -> None:
        self._asked.append((question, told))
        if self._pid < 0:
            try:
                self._start()
            except OSError as error:
                why = f"its helper could not be started ({error.strerror})"
                self._loop.soon(lambda: self._fail(why))
                return
        self._next()

    def _next(self) -> None:
        if not self._asked or self._is_asking or not self._is_ready:
            return
        self._is_asking = True
        try:
            os.write(self._to, json.dumps(self._asked[0][0]).encode() + b"\n")  # a line fits into the pipe
        except OSError:
            self._loop.soon(self._ended)

    def _start(self) -> None:
        ours_in, theirs_out = os.pipe2(os.O_CLOEXEC)
        theirs_in, ours_out = os.pipe2(os.O_CLOEXEC)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, theirs_in, _STDIN), (os.POSIX_SPAWN_DUP2, theirs_out, _STDOUT)]
            self._pid = os.posix_spawn(
                self._argv[0],
                self._argv,
                dict(os.environ),
                file_actions=actions,
                setsigdef=[signal.SIGCHLD],
                setsid=True,
            )
        except OSError:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._from, self._to = ours_in, ours_out
        self._loop.watch(self._from, READ, self._hear)
        os.set_blocking(self._from, False)
        try:
            self._on_life(self._pid, True)
        except OSError:  # without a descriptor: it would pass for a stranger, and nothing would be verified clean
            self._over()
            raise

    def _hear(self, events: int) -> None:
        try:
            piece = os.read(self._from, PIECE)
        except BlockingIOError:
            return
        if not piece or len(self._heard) > LINE_MAX:
            self._ended()
            return
        self._heard += piece
        while b"\n" in self._heard:
            line, _, self._heard = self._heard.partition(b"\n")
            self._said(line)

    def _said(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = {"failed": "its helper said what cannot be read"}
        if not self._is_ready:
            if "ready" in said:
                self._is_ready = True
            else:
                self._fail(str(said.get("failed", "its helper does not answer")))
        elif self._asked:
            _, told = self._asked.popleft()
            self._is_asking = False
            told(said)
        self._next()

    def _ended(self) -> None:
        self._over()
        self._fail("its helper ended")

    def _fail(self, why: str) -> None:
        asked, self._asked = list(self._asked), deque()
        self._is_asking = False
        for _, told in asked:
            told({"failed": why})

    def _over(self) -> None:
        if self._pid < 0:
            return
        self._loop.forget(self._from)
        os.close(self._from)
        os.close(self._to)
        with contextlib.suppress(ProcessLookupError):  # a child that was not waited for keeps its number
            os.kill(self._pid, signal.SIGKILL)
        self._on_life(self._pid, False)
        self._pid = self._to = self._from = -1
        self._is_ready, self._heard = False, b""


def _bare(uuid: str) -> str:
    """``GPU-00010203-…`` as 32 digits."""
    return uuid.rpartition("GPU-")[2].replace("-", "")
