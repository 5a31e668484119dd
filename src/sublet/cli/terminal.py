"""Connects the caller's terminal to a guest, and restores it in every case."""

from __future__ import annotations

import contextlib
import os
import termios
from types import TracebackType
from typing import Any, Final, Self

_IFLAG, _OFLAG, _CFLAG, _LFLAG, _CC = 0, 1, 2, 3, 6
_SIZE: Final = (24, 80)


def size_of(fd: int) -> tuple[int, int]:
    """Rows and columns; the usual ones where the terminal does not say."""
    try:
        found = os.get_terminal_size(fd)
    except OSError:
        return _SIZE
    return found.lines or _SIZE[0], found.columns or _SIZE[1]


class Terminal:
    """Within the block every key goes through as it is: the guest's own terminal makes lines and signals of them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._found: list[Any] | None = None

    def __enter__(self) -> Self:
        self._found = termios.tcgetattr(self._fd)
        raw: list[Any] = [*self._found[:_CC], list(self._found[_CC])]
        raw[_IFLAG] &= ~(
            termios.IGNBRK | termios.BRKINT | termios.PARMRK | termios.ISTRIP | termios.INLCR | termios.IGNCR
        )
        raw[_IFLAG] &= ~(termios.ICRNL | termios.IXON)
        raw[_OFLAG] &= ~termios.OPOST
        raw[_LFLAG] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
        raw[_CFLAG] = raw[_CFLAG] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        raw[_CC][termios.VMIN], raw[_CC][termios.VTIME] = 1, 0
        self._set(raw)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._found is not None:
            self._set(self._found)
            self._found = None

    def _set(self, modes: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # it went away, and there is nothing to give back
            termios.tcsetattr(self._fd, termios.TCSADRAIN, modes)
