"""A service's log: sentences for people, or one JSON object per line.

No secret belongs into a log, and none is written on purpose. What looks like one of ours is taken out here all the
same: an error may quote what it was given.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

FIELDS: Final = "sublet_fields"
"""The attribute of a record that has what is apart from its sentence."""
_SECRET: Final = re.compile(r"(sublet_(?:studio_|invite_)?)[A-Za-z0-9_-]{40,}")
"""Access tokens, tokens of the studio and invites. Names of metrics are shorter."""


class LogFormat(enum.StrEnum):
    """How a log is written."""

    TEXT = "text"
    """A sentence for each line."""
    JSON = "json"
    """A JSON object for each line."""


def log_to_stderr(part: str, form: LogFormat, *, info: tuple[str, ...] = ()) -> None:
    """Write the log of this process to stderr. ``part`` is what it is, office or studio; of the loggers in ``info``
    everything is written, of others warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(part) if form is LogFormat.JSON else Sentences())
    logging.getLogger().addHandler(handler)
    for name in info:
        logging.getLogger(name).setLevel(logging.INFO)


def fields(**facts: object) -> Mapping[str, object]:
    """For ``extra`` of a logging call: what is apart from the sentence, for machines. None is left out."""
    return {FIELDS: {name: value for name, value in facts.items() if value is not None}}


def without_secrets(text: str) -> str:
    """The same, and of each of our secrets only which kind it is."""
    return _SECRET.sub(r"\1…", text)


class Sentences(logging.Formatter):
    """The sentence alone, on a line of its own; nothing in it moves the cursor. Errors have their trace below."""

    def format(self, record: logging.LogRecord) -> str:
        sentence = "".join(c if c.isprintable() else "·" for c in record.getMessage())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return without_secrets(sentence + trace)


class JsonLines(logging.Formatter):
    """``at``, ``level``, ``part``, ``logger``, ``message``, perhaps ``error``, and what the record has besides."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        line |= getattr(record, FIELDS, {})
        return without_secrets(json.dumps(line, default=str))
