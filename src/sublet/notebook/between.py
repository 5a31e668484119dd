"""Forwards messages of the guest's kernel between cells, such as callbacks of a moved widget.

While a cell runs the line belongs to it. Afterwards it is watched by the event loop of the notebook's own kernel, on
the thread that runs cells, so there is never more than one who reads it. Where there is no such loop, in a terminal,
there are no widgets either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sublet.errors import SubletError
from sublet.notebook.kernel_line import KernelLine, Message

READABLE: Final = 1
"""As tornado's loops say it."""


class Between:
    """Watches the line of one guest's kernel while no cell uses it."""

    def __init__(self, shell: Any, show: Callable[[str, Message], None]) -> None:
        self._shell = shell
        self._show = show
        self._line: KernelLine | None = None
        self._watched = -1

    def watch(self, line: KernelLine) -> None:
        """A cell is done with it."""
        self.leave()
        loop = getattr(getattr(self._shell, "kernel", None), "io_loop", None)
        number = line.fileno()
        if loop is None or number < 0:
            return
        self._line, self._watched = line, number
        loop.add_handler(number, self._heard, READABLE)
        self.spoken()

    def spoken(self) -> None:
        """A message was sent to the kernel. What it answered at once was read with that, and causes no wake-up."""
        if self._line is not None and self._line.has_kept:
            self._shell.kernel.io_loop.add_callback(self._heard)

    def leave(self) -> None:
        """A cell begins, or the line is closed: before its number can come to mean another."""
        if self._line is not None:
            self._shell.kernel.io_loop.remove_handler(self._watched)
            self._line, self._watched = None, -1

    def _heard(self, *_: object) -> None:
        line = self._line
        if line is None:
            return
        try:
            found = line.wait(0)
        except SubletError:  # it is gone; the next cell finds out why
            self.leave()
            return
        for channel, message in found:
            if message["header"]["msg_type"] != "input_request":  # no cell runs that could answer it
                self._show(channel, message)
