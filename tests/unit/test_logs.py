"""Logs as sentences and as JSON lines; no secret stands in either."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from sublet.logs import JsonLines, Sentences, fields, without_secrets
from sublet.studio.people import INVITE_PREFIX, TOKEN_PREFIX

SECRET = "A-z_09" * 7 + "x"


def record(text: str, *args: object, error: BaseException | None = None, **said: object) -> logging.LogRecord:
    made = logging.LogRecord("sublet.studio", logging.WARNING, "file.py", 1, text, args, None)
    made.created = 1_700_000_000.25
    if error is not None:
        try:
            raise error
        except type(error):
            made.exc_info = sys.exc_info()
    for name, value in fields(**said).items():
        setattr(made, name, value)
    return made


def test_a_json_line_has_what_a_machine_asks_for() -> None:
    """On one line, whatever its sentence holds; what was left out is not there."""
    line = JsonLines("studio").format(record("a %s\nb", "\x1b[2J", event="request", status=200, person=None))
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    assert found == {
        "at": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "part": "studio",
        "logger": "sublet.studio",
        "message": "a \x1b[2J\nb",
        "event": "request",
        "status": 200,
    }


def test_an_error_is_part_of_its_line() -> None:
    line = JsonLines("office").format(record("it failed", error=ValueError("why")))
    assert "ValueError: why" in json.loads(line)["error"]
    assert "\n" not in line
    said = Sentences().format(record("it %s", "\x1b[2Jfailed\n", error=ValueError("why")))
    assert said.splitlines()[0] == "it ·[2Jfailed·"
    assert said.splitlines()[-1] == "ValueError: why"


@pytest.mark.parametrize("prefix", ["sublet_", TOKEN_PREFIX, INVITE_PREFIX])
def test_what_looks_like_a_secret_is_taken_out_wherever_it_stands(prefix: str) -> None:
    secret = prefix + SECRET
    one = record("of %s", secret, error=ValueError(f"of '{secret}'"), path=f"/x?t={secret}&u=1")
    for form in (JsonLines("studio"), Sentences()):
        text = form.format(one)
        assert SECRET not in text
        assert f"{prefix}…" in text.encode().decode("unicode_escape") or f"{prefix}…" in text
    assert without_secrets("sublet_studio_answer_seconds_bucket") == "sublet_studio_answer_seconds_bucket"
