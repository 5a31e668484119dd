"""The reference of the command line is made from the commands, and says what they say now."""

from __future__ import annotations

from sublet.cli.table import COMMANDS
from tools.cli_docs import DOCUMENT, document


def test_the_reference_is_what_the_commands_say() -> None:
    """If this fails: `.venv/bin/python tools/cli_docs.py`, and look at what changed."""
    before = DOCUMENT.read_text(encoding="utf-8")
    assert document(before) == before
    for path in COMMANDS:
        assert f"`sublet {path}" in before
