"""Writes to a descriptor with a slow reader without blocking.

The descriptor is shared with other programs, so it is not made non-blocking. Instead it is polled, and no more is
written at once than a pipe or terminal that polls writable has room for.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable
from typing import Final

_AT_ONCE: Final = 4096
"""A pipe that polls writable has a page free."""
_FILE_AT_ONCE: Final = 1 << 20
_CLOSED: Final = (errno.EPIPE, errno.EIO, errno.EBADF)


class Outlet:
    """What waits to be written to one descriptor, in order."""

    def __init__(self, fd: int, *, on_broken: Callable[[], None] = lambda: None) -> None:
        self.fd = fd
        self.is_broken = False
        """The reader is gone: what is given is dropped."""
        self.why = ""
        """Why something is lost that was meant to be kept, if so."""
        self._on_broken = on_broken
        self._waiting: deque[tuple[memoryview, Callable[[], None]]] = deque()
        try:
            self.is_plain = stat.S_ISREG(os.fstat(fd).st_mode)
            """A file: always writable, and in large pieces."""
        except OSError:  # it was closed before we began
            self.is_broken = self.is_plain = True

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def give(self, data: bytes | memoryview, done: Callable[[], None] = lambda: None) -> None:
        """Write it when its turn comes; ``done`` is called once it is written, or dropped."""
        self._waiting.append((memoryview(data), done))
        if self.is_plain or self.is_broken:
            self.ready()

    def ready(self) -> None:
        """It polls writable."""
        while self._waiting:
            data, done = self._waiting[0]
            if not self.is_broken and data:
                try:
                    written = os.write(self.fd, data[: _FILE_AT_ONCE if self.is_plain else _AT_ONCE])
                except BlockingIOError:
                    return
                except OSError as error:  # the reader has gone, the terminal hung up, the disk is full
                    if error.errno not in _CLOSED:
                        self.why = error.strerror or str(error)
                    self.broken()
                    continue
                data = data[written:]
            if data and not self.is_broken:
                self._waiting[0] = (data, done)
                if not self.is_plain:
                    return
            else:
                self._waiting.popleft()
                done()

    def broken(self) -> None:
        """Drop what still waits."""
        if not self.is_broken:
            self.is_broken = True
            self._on_broken()
