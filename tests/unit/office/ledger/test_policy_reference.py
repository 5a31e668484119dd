"""The table in the documentation is that of the code."""

from __future__ import annotations

from pathlib import Path

from sublet.office.policy_file import KEYS, NAMED, NAMED_KEYS, TABLES, PolicyUnit

DOCUMENT = Path(__file__).parents[4] / "docs" / "limits.md"


def test_the_reference_of_tables_with_a_name_is_that_of_the_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for table in NAMED:
        part = text.partition(f"**`[{table}.NAME]`**")[2].partition("\n**`[")[0]
        rows = []
        for key in (key for key in NAMED_KEYS.values() if key.table == table):
            least = "" if key.unit in (PolicyUnit.TEXT, PolicyUnit.NAMES) else key.shown(key.least)
            rows.append(f"| `{key.name}` | {key.shown(key.default)} | {least} | {key.says} |")
        assert [line for line in part.splitlines() if line.startswith("| `")] == rows


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
