"""Log records travel as plain fields: what a guest sends is never loaded as an object, and never shadows a method."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from typing import Any

import pytest

from sublet.wire.log_records import FIELDS_MAX, RECORD_MAX, dump_log_record, load_log_record


def record(**extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            **logging.LogRecord("theirs", logging.WARNING, "/a/b.py", 7, "it is %s", ("so",), None).__dict__,
            "msg": "it is so",
            **extra,
        }
    )


def there_and_back(**extra: Any) -> logging.LogRecord:
    return logging.makeLogRecord(load_log_record(dump_log_record(record(**extra).__dict__)))


def test_a_record_arrives_as_it_was() -> None:
    made, found = (
        record(job=3, parts=[1, {"a": None}], half="\udcff"),
        there_and_back(job=3, parts=[1, {"a": None}], half="\udcff"),
    )
    assert found.getMessage() == "it is so"
    for name in ("name", "levelno", "levelname", "pathname", "lineno", "process", "thread", "job", "parts", "half"):
        assert getattr(found, name) == getattr(made, name), name
    assert logging.Formatter("%(levelname)s %(job)s %(message)s").format(found) == "WARNING 3 it is so"


class Unspeakable:
    def __repr__(self) -> str:
        raise OSError("no")


def test_what_is_no_plain_value_is_told_in_words() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert there_and_back(what=object).__dict__["what"] == "<class 'object'>"
    assert "Unspeakable" in there_and_back(what=Unspeakable()).__dict__["what"]
    assert there_and_back(what=circle).__dict__["what"] == "[[...]]"
    assert there_and_back(what={(1, 2): 3}).__dict__["what"] == "{(1, 2): 3}"


def test_a_record_that_is_too_long_loses_its_extras_and_keeps_the_beginning_of_its_text() -> None:
    for extra in ({"msg": "x" * 10 * RECORD_MAX}, {"mine": "\x01" * RECORD_MAX}, {f"f{n}": n for n in range(999)}):
        data = dump_log_record(record(**extra).__dict__)
        assert len(data) <= RECORD_MAX
        found = load_log_record(data)
        assert found["msg"][:2] in ("xx", "it")
        assert not {"mine", "f1"} & found.keys()


class Trap:
    """What a hostile guest sends where the program unpickles."""

    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.sprung = True",)


GOOD = json.loads(dump_log_record(record().__dict__))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Trap()),
        pickle.dumps(GOOD),
        b"",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**GOOD, "levelno": "7"}).encode(),
        json.dumps({**GOOD, "levelno": True}).encode(),
        json.dumps({**GOOD, "msg": ["%s"]}).encode(),
        json.dumps({**GOOD, "created": None}).encode(),
        json.dumps({key: value for key, value in GOOD.items() if key != "name"}).encode(),
        json.dumps({**GOOD, **{f"f{n}": 0 for n in range(FIELDS_MAX)}}).encode(),
        json.dumps({**GOOD, "more": "x" * RECORD_MAX}).encode(),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        load_log_record(data)
    assert not hasattr(sys, "sprung")


def test_no_field_replaces_what_a_record_can_do() -> None:
    """Neither its methods, nor arguments that would be put into its text, nor an exception that would be printed."""
    hostile = {**GOOD, "getMessage": "x", "__class__": "x", "__dict__": {}, "args": ["%s"], "exc_info": [1, 2, 3]}
    found = logging.makeLogRecord(load_log_record(json.dumps(hostile).encode()))
    assert found.getMessage() == "it is so"
    assert type(found) is logging.LogRecord
    assert found.exc_info is None
    logging.Formatter().format(found)
