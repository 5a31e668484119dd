"""Sends what a function prints and logs to the holder, and to the guest's log.

While a call runs, ``sys.stdout`` and ``sys.stderr`` send to the caller, in the order of the writes; outside of
calls, for what forks say, and for what is written below Python (by C code, by programs that are started), there is the
log alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TextIO

from sublet.wire.log_records import dump_log_record

LETTERS_MAX: Final = 64 * 1024
"""In one message; at most four bytes each."""

Send = Callable[[int, bytes], None]


class Speech:
    """What was said and not yet sent. Every thread may speak."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[tuple[int, str]] = []
        self._letters = 0
        self._send: Send | None = None

    def to(self, send: Send | None) -> None:
        """Send it there from now on; what waits is sent to the reader of the rest."""
        self.flush()
        with self._lock:
            self._send = send

    def add(self, stream: int, text: str) -> None:
        """Said on this stream (1 or 2). A line that is complete is sent at once."""
        with self._lock:
            if self._send is None:
                return
            if self._waiting and self._waiting[-1][0] == stream:
                self._waiting[-1] = (stream, self._waiting[-1][1] + text)
            else:
                self._waiting.append((stream, text))
            self._letters += len(text)
            if "\n" in text or "\r" in text or self._letters > LETTERS_MAX:
                self.flush()

    def flush(self) -> None:
        """Send what waits."""
        with self._lock:
            waiting, self._waiting, self._letters = self._waiting, [], 0
            for stream, text in waiting:
                for start in range(0, len(text), LETTERS_MAX):
                    if self._send is not None:
                        self._send(stream, text[start : start + LETTERS_MAX].encode("utf-8", "replace"))

    def forget(self) -> None:
        """In a fork: the connection is the worker's, and so is what waits. Another thread may have had the lock."""
        self._lock = threading.RLock()
        self._waiting, self._letters, self._send = [], 0, None


class WorkerStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a worker: to the holder, and to the log."""

    def __init__(self, number: int, log: TextIO, speech: Speech) -> None:
        self._number = number
        self._log = log
        self._speech = speech
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with contextlib.suppress(OSError, ValueError):  # a full disk must not fail the function
            self._log.write(text)
        self._speech.add(self._number, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:  # type: ignore[override]
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._log.flush()
        self._speech.flush()

    def fileno(self) -> int:
        """The log's: what is written there the log has, and the holder does not hear it."""
        return self._log.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def close(self) -> None:
        """Stays open: it is not the function's to close."""


class _Bytes(io.RawIOBase):
    """``sys.stdout.buffer``."""

    def __init__(self, stream: WorkerStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            self._stream.write(bytes(view).decode("utf-8", "replace"))
            return view.nbytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """As its stream."""


class SpokenRecords(logging.Handler):
    """Log records, to the holder's loggers of the same names; and as a line to the guest's log."""

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self._log = log
        self.send: Callable[[bytes], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """As ``logging.handlers.QueueHandler`` prepares them: the message is put together here."""
        try:
            text = record.getMessage()
            if record.exc_info:
                record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            with contextlib.suppress(OSError, ValueError):
                self._log.write(f"{record.levelname}:{record.name}:{text}\n{record.exc_text or ''}")
            if self.send is not None:
                self.send(dump_log_record({**record.__dict__, "msg": text}))
        except Exception:  # noqa: BLE001 - as every handler: a record that cannot be told must not fail the function
            self.handleError(record)


def take_over(speech: Speech) -> tuple[WorkerStream, WorkerStream, SpokenRecords]:
    """From now on what this process says goes this way."""
    out, err = WorkerStream(1, sys.stdout, speech), WorkerStream(2, sys.stderr, speech)
    records = SpokenRecords(err._log)
    sys.stdout, sys.stderr = out, err
    logging.getLogger().addHandler(records)

    def in_child() -> None:
        speech.forget()
        records.send = None

    os.register_at_fork(after_in_child=in_child)
    return out, err, records
