"""Shows one line on a terminal while a request waits in the queue; elsewhere nothing."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from sublet.client.model import Place


class QueueLine:
    """Shows the place and wipes it away when the waiting is over."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._width = 0

    @property
    def wanted(self) -> bool:
        """Whether a person looks: a log file or a notebook's cell would only collect the lines."""
        return self._stream is not None and self._stream.isatty()

    def show(self, place: Place) -> None:
        """Write it over the line before."""
        text = f"sublet: queued, {place}"
        text = text if len(text) < 100 else text[:96] + "..."
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def clear(self) -> None:
        """Leave the terminal as it was."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that went away is no reason to lose a lease
            self._stream.write(text)
            self._stream.flush()
