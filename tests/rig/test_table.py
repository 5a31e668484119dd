"""Each of the thirty faults that were found by reading names tests of it, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
ROW = re.compile(r"^\| (\d+) \| [^|]+ \| [^|]+ \| ((?:`test_\w+::test_\w+`(?:, )?)+) \|$", re.MULTILINE)


def test_the_table_in_the_docs_names_all_faults_and_tests_that_exist() -> None:
    rows = ROW.findall((DOCS / "proof.md").read_text())
    assert [number for number, _ in rows] == [str(number) for number in range(1, 31)]
    written = {path: path.read_text() for folder in ("rig", "unit") for path in (TESTS / folder).rglob("test_*.py")}
    for number, names in rows:
        for module, name in re.findall(r"`(\w+)::(\w+)`", names):
            found = [path for path, text in written.items() if path.stem == module and f"\ndef {name}(" in text]
            assert found, f"fault {number}: there is no {name} in a {module}.py"
