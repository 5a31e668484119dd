"""One terminal line that counts up while the command waits.

Where there is no terminal nothing is repainted: what changes is said once, as a line of its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

from sublet.background import start_thread
from sublet.cli.show import visible

_EVERY_S: Final = 0.25
_WIPE: Final = "\r\x1b[2K"


class LiveLine:
    """Paints ``text(seconds since it was set)`` four times a second, until the block is left."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._text: Callable[[float], str] | None = None
        self._since = time.monotonic()
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.live:
            self._thread = start_thread("live_line", self._keep_painting)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join()
            with self._lock:
                self._write(_WIPE)

    def set(self, text: Callable[[float], str]) -> None:
        """From now on show this; where nothing is live, say it once."""
        with self._lock:
            self._text, self._since = text, time.monotonic()
            if not self.live:
                self._write(visible(text(0.0)) + "\n")
        self._paint()

    def beside(self, write: Callable[[], object]) -> None:
        """Let others write, above the live line. What they write ends with a line."""
        with self._lock:
            if self.live:
                self._write(_WIPE)
            write()
        self._paint()

    def print_above(self, line: str) -> None:
        """A line that stays, above the live one."""
        with self._lock:
            self._write((_WIPE if self.live else "") + line + "\n")
        self._paint()

    def _keep_painting(self) -> None:
        while not self._left.wait(_EVERY_S):
            self._paint()

    def _paint(self) -> None:
        with self._lock:
            if self.live and self._text is not None:
                # Cut to the width: a line that wraps could not be wiped.
                width = os.get_terminal_size(self._stream.fileno()).columns or 80
                self._write(_WIPE + visible(self._text(time.monotonic() - self._since))[: width - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
