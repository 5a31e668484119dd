"""Reports a training program's progress to `sublet train`.

One line on stderr, begun with the record separator (as in JSON text sequences), so that it can be told from what the
program itself says and left out of it. Each line says everything, so none is needed that got lost.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

VARIABLE: Final = "SUBLET_TRAIN"
"""In the environment of a program whose progress is read."""
SEPARATOR: Final = b"\x1e"
LINE_MAX: Final = 4000
"""Bytes: what a pipe takes in one piece, so that lines of several threads do not mix."""
EVERY_S: Final = 0.5
_STDERR: Final = 2


@dataclass(slots=True, kw_only=True)
class Account:
    """What training has come to, over all the lives of the program; saved with the state."""

    steps: int = 0
    saves: int = 0
    """Of which it is known that they are durable."""
    bytes_saved: int = 0
    """What went to the disk."""
    save_seconds: float = 0.0
    """For which training stood still."""
    resumed: int = 0
    """How often it went on from a checkpoint."""
    lost_seconds: float = 0.0
    """Between the last step that was saved and the first one after it, all in all; waiting for hardware included."""


class ProgressWriter:
    """Sends progress events where a reader is; otherwise costs nothing."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.listens = bool(environ.get(VARIABLE))
        self._next_s = 0.0

    def is_due(self) -> bool:
        """Whether it is time for the next line: figures for people, a few times a second."""
        return self.listens and time.monotonic() >= self._next_s

    def write(self, account: Account, **more: Any) -> None:
        """One line, now."""
        if not self.listens:
            return
        self._next_s = 0.0 if "began" in more else time.monotonic() + EVERY_S  # the first step is told at once
        line = SEPARATOR + json.dumps({**asdict(account), **more}, default=str).encode() + b"\n"
        if len(line) > LINE_MAX:
            line = SEPARATOR + json.dumps(asdict(account)).encode() + b"\n"
        try:
            os.write(_STDERR, line)
        except OSError:  # the reader is gone; training goes on
            self.listens = False


def read_line(line: bytes) -> dict[str, Any] | None:
    """What was told, from a line without its separator; None for what is nothing of ours."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("steps"), int) else None
