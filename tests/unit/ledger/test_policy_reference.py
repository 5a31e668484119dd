"""The table in the documentation is that of the code."""

from __future__ import annotations

from pathlib import Path

from sublet.broker.policy_file import KEYS, TABLES

DOCUMENT = Path(__file__).parents[3] / "docs" / "limits.md"


def test_the_reference_of_the_policy_file_is_that_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for table in TABLES:
        part = text.partition(f"**`[{table}]`**")[2].partition("\n**`[")[0]
        rows = [
            f"| `{key.name}` | {key.shown(key.default)} | {key.shown(key.least)} | {key.says} |"
            for key in KEYS.values()
            if key.table == table
        ]
        assert [line for line in part.splitlines() if line.startswith("| `")] == rows
