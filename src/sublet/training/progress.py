"""Reads a training program's progress reports, and sums them over all its runs. Pure."""

from __future__ import annotations

from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.training.progress_events import SEPARATOR, read_line

RECORD_MAX: Final = 64 * 1024
"""Bytes after a separator without an end of line: then it was not one of ours."""


class Sieve:
    """Takes the records out of what a program says; the rest comes out as it went in."""

    def __init__(self) -> None:
        self._kept = b""
        """A record that has begun and not ended, without its separator; or nothing."""
        self._inside = False

    def feed(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """What is to be shown, and what was told."""
        shown, records = bytearray(), []
        while data or self._inside:
            if not self._inside:
                before, separator, data = data.partition(SEPARATOR)
                shown += before
                if not separator:
                    break
                self._inside, self._kept = True, b""
            self._kept, end, rest = (self._kept + data).partition(b"\n")
            if not end:
                if len(self._kept) > RECORD_MAX:
                    shown += self.rest()
                break
            data, self._inside = rest, False
            record = read_line(self._kept)
            if record is None:
                shown += SEPARATOR + self._kept + b"\n"
            else:
                records.append(record)
            self._kept = b""
        return bytes(shown), records

    def rest(self) -> bytes:
        """What was kept for the end of a record that never came."""
        kept, inside = self._kept, self._inside
        self._kept, self._inside = b"", False
        return SEPARATOR + kept if inside else b""


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """How far it is, and what it cost to be interrupted. Over the lives that one command has seen."""

    steps: int = 0
    first_step: int | None = None
    """Where the first life began."""
    saved_steps: int = -1
    """Of which it is known that they are durable; -1 if of none."""
    loss: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    saves: int = 0
    bytes_saved: int = 0
    steps_again: int = 0
    """Done, not saved, and done again."""
    lost_seconds: float = 0.0
    """Between the last step that counted and the first one after it, waiting included."""
    left: str = ""
    """That the present life has left in good order, and why."""
    is_done: bool = False
    _before: tuple[int, int, float] = (0, 0, 0.0)
    """Saves, bytes and lost seconds of earlier lives."""
    _base: tuple[int, int, float] = (0, 0, 0.0)
    """And what the present one was told of those, or of commands before this one."""

    def new_life(self) -> None:
        """A program begins anew."""
        self.left, self.is_done = "", False
        self._before, self._base = (self.saves, self.bytes_saved, self.lost_seconds), (0, 0, 0.0)

    def take(self, record: dict[str, Any]) -> None:
        """What it tells, the newest last."""
        steps = int(record["steps"])
        account = (
            int(record.get("saves", 0)),
            int(record.get("bytes_saved", 0)),
            float(record.get("lost_seconds", 0.0)),
        )
        if record.get("began"):
            self._base = account
            if self.first_step is None:
                self.first_step = steps
            self.steps_again += max(0, self.steps - steps)
        self.steps = steps
        self.saves = self._before[0] + account[0] - self._base[0]
        self.bytes_saved = self._before[1] + account[1] - self._base[1]
        self.lost_seconds = self._before[2] + account[2] - self._base[2]
        self.saved_steps = max(self.saved_steps, int(record.get("saved_steps", -1)))
        self.loss = record.get("loss", self.loss)
        self.epoch, self.epochs = record.get("epoch", self.epoch), record.get("epochs", self.epochs)
        self.left = str(record.get("left", self.left))
        self.is_done = bool(record.get("done", self.is_done))

    @property
    def steps_here(self) -> int:
        """Done under this command, those that were done again not counted twice."""
        return self.steps - (self.first_step or 0)
