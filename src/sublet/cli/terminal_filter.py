"""Removes control sequences from other users' output before it reaches a terminal."""

from __future__ import annotations

import re
from typing import Final


class TerminalFilter:
    """Another user's output on one's own terminal: text and colours go through, and nothing else that a terminal obeys.

    Sequences can move the cursor over what was written, set the window's title, fill the clipboard, or have the
    terminal type an answer. A byte of such a sequence becomes a dot; what was cut in two is put together first.
    """

    _OBEYED: Final = re.compile(
        rb"(\x1b\[[0-9;:]{0,32}m)"  # a colour
        rb"|\x1b|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]"
    )
    _CUT: Final = re.compile(rb"(\x1b(\[[0-9;:]{0,32})?|\xc2)\Z")
    DOT: Final = "·".encode()

    def __init__(self) -> None:
        self._cut = b""

    def passed(self, data: bytes) -> bytes:
        """What may be written now."""
        data = self._cut + data
        cut = self._CUT.search(data)
        self._cut = data[cut.start() :] if cut is not None else b""
        return self._OBEYED.sub(lambda found: found[1] or self.DOT, data[: len(data) - len(self._cut)])
