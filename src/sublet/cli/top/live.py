"""The terminal of the live view: reads keys, writes changed cells, and restores the terminal at the end.

The main thread does nothing but this. It waits for a key, a signal, news, or the next second, whichever is first.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Final

from sublet.cli.exit_status import DONE, INTERRUPTED
from sublet.cli.show import colour_on
from sublet.cli.terminal import Terminal, size_of
from sublet.cli.top.paint import Painting, changes, painting, simple
from sublet.cli.top.reading import OfficeReader
from sublet.cli.top.screen import Screen, ScreenView, keys, screen, view_after_key
from sublet.cli.top.snapshot import OfficeSnapshot
from sublet.cli.top.watch import SnapshotWatch

ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""A screen of our own, no cursor, and no line that goes on in the next."""
LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_WAKING: Final = (*_ENDS, signal.SIGWINCH, signal.SIGCONT)


def run_live(reader: OfficeReader, known: OfficeSnapshot) -> int:
    """Show it until the user quits; the exit status."""
    with _woken() as (ours, theirs):
        watch = SnapshotWatch(reader, known, lambda: _poke(theirs))
        live = LiveScreen(watch, ours)
        watch.start()
        try:
            with contextlib.suppress(OSError):  # the terminal went away
                return live.run()
            return DONE
        finally:
            watch.stop()


class LiveScreen:
    """Draws on stdout, listens on stdin; what wakes it besides, signals included, comes through a pipe."""

    def __init__(self, watch: SnapshotWatch, wakes: int) -> None:
        self._watch = watch
        self._wakes = wakes
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._encoding = sys.stdout.encoding or "ascii"
        self._colour = colour_on(sys.stdout)
        self._look = ScreenView()
        self._made: Screen | None = None
        self._shown: Painting | None = None
        self._size = (0, 0)
        self._rest = b""

    def run(self) -> int:
        """Until it is over; the terminal is then as it was."""
        with contextlib.ExitStack() as undo:
            self._enter(undo)
            while True:
                self._draw()
                for name in self._read_keys():
                    if name == "quit":
                        return DONE
                    if name == "interrupt":
                        return INTERRUPTED
                    if name.startswith("signal"):
                        return 128 + int(name.removeprefix("signal "))
                    if name == "suspend":
                        undo.close()
                        os.kill(0, signal.SIGTSTP)  # from here on we are stopped
                        self._enter(undo)
                    elif name == "redraw":
                        self._shown = None
                    elif self._made is not None:
                        self._look = view_after_key(self._made, name)
                        self._make()

    def _enter(self, undo: contextlib.ExitStack) -> None:
        undo.enter_context(Terminal(self._in))
        undo.callback(self._restore_terminal)
        self._write(ENTER)
        self._shown = None

    def _restore_terminal(self) -> None:
        with contextlib.suppress(OSError):
            self._write(LEAVE)

    def _draw(self) -> None:
        size = size_of(self._out)
        if size != self._size:
            self._size, self._shown = size, None
        made = self._make()
        now = painting(made.lines, colour=self._colour)
        output = changes(self._shown, now)
        self._shown = now
        if output:
            self._write(output)

    def _make(self) -> Screen:
        rows, columns = self._size
        self._made = screen(self._watch.known, self._look, columns, rows, time.monotonic())
        self._look = self._made.look
        return self._made

    def _read_keys(self) -> list[str]:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        now_s = time.monotonic()
        ready = dict(poll.poll((math.floor(now_s) + 1 - now_s) * 1000))
        found: list[str] = []
        if self._wakes in ready:
            found += _signals(os.read(self._wakes, 4096))
        if self._in in ready:
            data = os.read(self._in, 4096)
            if not data:
                raise OSError("the terminal is gone")
            names, self._rest = keys(self._rest + data)
            found += names
        return found

    def _write(self, text: str) -> None:
        raw = simple(text, self._encoding).encode(self._encoding, "replace")
        while raw:
            raw = raw[os.write(self._out, raw) :]


def _signals(data: bytes) -> Iterator[str]:
    """Signals come as their numbers; anything else only wakes."""
    for number in data:
        if number in _ENDS:
            yield "interrupt" if number == signal.SIGINT else f"signal {number}"
        elif number == signal.SIGCONT:
            yield "redraw"


@contextlib.contextmanager
def _woken() -> Iterator[tuple[int, int]]:
    """A pipe that signals and threads write to, while the block runs; then all is as before."""
    ours, theirs = os.pipe()
    for end in (ours, theirs):
        os.set_blocking(end, False)
    before = {number: signal.signal(number, lambda *_: None) for number in _WAKING}
    known = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        yield ours, theirs
    finally:
        signal.set_wakeup_fd(known)
        for number, handler in before.items():
            signal.signal(number, handler)


def _poke(theirs: int) -> None:
    with contextlib.suppress(BlockingIOError):  # it is awake as it is
        os.write(theirs, b"\0")
