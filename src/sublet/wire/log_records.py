"""Log records of a guest's functions, as plain fields, for the loggers of the program that called them.

A guest is on the other side of its walls, so nothing of what it sends is loaded as an object: a record is one JSON
object of texts, numbers and lists or mappings of those. What has another type is told in words. The
reader takes the fields that every record has, with the types that they must have, and of the others those that are no
part of ``logging.LogRecord`` itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

RECORD_MAX: Final = 256 * 1024
"""Bytes of one record. Of a longer one the extra fields are left out and its text is cut."""
FIELDS_MAX: Final = 256
_WORDS_MAX: Final = 4096
"""Characters of what is told in words."""
_TEXT_MAX: Final = 2048
"""Characters that are left of each text of a record that is too long."""
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "name": (str,),
    "msg": (str,),
    "levelname": (str,),
    "levelno": (int,),
    "pathname": (str,),
    "filename": (str,),
    "module": (str,),
    "lineno": (int,),
    "funcName": (str, type(None)),
    "created": (int, float),
    "msecs": (int, float),
    "relativeCreated": (int, float),
    "thread": (int, type(None)),
    "threadName": (str, type(None)),
    "process": (int, type(None)),
    "processName": (str, type(None)),
    "taskName": (str, type(None)),
    "exc_text": (str, type(None)),
    "stack_info": (str, type(None)),
}
"""What every record has, and of which types."""
_NEEDED: Final = ("name", "msg", "levelname", "levelno", "created")
_LEFT_OUT: Final = frozenset(("args", "exc_info"))
"""They are objects. The text of both is in the record."""


def dump_log_record(facts: Mapping[str, Any]) -> bytes:
    """The attributes of a record whose ``msg`` is its text already."""
    fields = {key: item for key, item in facts.items() if key not in _LEFT_OUT}
    try:
        data = json.dumps(fields, default=_in_words, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):  # keys that are no texts; circles
        data = json.dumps({key: _plain(item) for key, item in fields.items()}, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    if len(data) > RECORD_MAX or len(fields) > FIELDS_MAX:
        short = {key: _cut(item) for key, item in fields.items() if key in _TYPES}
        data = json.dumps(short, default=_in_words, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return data


def load_log_record(data: bytes) -> dict[str, Any]:
    """What ``logging.makeLogRecord`` takes. Raises ``ValueError`` for what is no record."""
    if len(data) > RECORD_MAX:
        raise ValueError("a log record is too long")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("a log record cannot be read") from error
    if not isinstance(found, dict) or len(found) > FIELDS_MAX or not all(name in found for name in _NEEDED):
        raise ValueError("that is no log record")
    record: dict[str, Any] = {"args": None, "exc_info": None}
    for name, value in found.items():
        types = _TYPES.get(name)
        if types is not None:
            if not isinstance(value, types) or isinstance(value, bool):
                raise ValueError(f"the field {name[:40]} of a log record is wrong")
            record[name] = value
        elif name not in _LEFT_OUT and not hasattr(logging.LogRecord, name):
            record[name] = value
    return record


def _in_words(item: object) -> str:
    try:
        return repr(item)[:_WORDS_MAX]
    except Exception as error:  # noqa: BLE001 - a class of the user's; the record goes without it
        return f"<{type(item).__name__} that has no text: {type(error).__name__}>"


def _plain(item: object) -> object:
    return item if isinstance(item, str | int | float | None) else _in_words(item)


def _cut(item: object) -> object:
    return item[:_TEXT_MAX] if isinstance(item, str) else item
