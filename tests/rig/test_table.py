"""Each of the thirty faults that were found by reading names tests of it, and these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

from sublet.values import MIB
from tests.rig.personalities import GUESSED, PERSONALITIES, Line

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
ROW = re.compile(r"^\| (\d+) \| [^|]+ \| [^|]+ \| ((?:`test_\w+::test_\w+`(?:, )?)+) \|$", re.MULTILINE)

BAD = re.compile(r"^\| (\D[^|]+) \| [^|]+ \| ((?:`test_\w+::test_\w+`(?:, )?)+) \|$", re.MULTILINE)
"""Of bad input: in the place of a number, what is given."""


def test_the_table_in_the_docs_names_all_faults_and_tests_that_exist() -> None:
    rows = ROW.findall((DOCS / "proof.md").read_text())
    assert [number for number, _ in rows] == [str(number) for number in range(1, 31)]
    assert len(BAD.findall((DOCS / "proof.md").read_text())) == 9
    rows += [(what, tests) for what, tests in BAD.findall((DOCS / "proof.md").read_text())]
    written = {path: path.read_text() for folder in ("rig", "unit") for path in (TESTS / folder).rglob("test_*.py")}
    for number, names in rows:
        for module, name in re.findall(r"`(\w+)::(\w+)`", names):
            found = [path for path, text in written.items() if path.stem == module and f"\ndef {name}(" in text]
            assert found, f"{number}: there is no {name} in a {module}.py"


GUESS = re.compile(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def test_what_is_guessed_is_listed_beside_what_is_supported() -> None:
    """So that the first real card is compared with these lines first."""
    found: dict[str, set[str]] = {}
    for personality in PERSONALITIES:
        for _, lines in personality.all_lines:
            for line in lines:
                if GUESSED in line.source:
                    found.setdefault(line.field, set()).add(shown(line))
    text = (DOCS / "gpus.md").read_text().partition("### What of it is guessed")[2].partition("\n\n##")[0]
    assert {name: set(values.split(", ")) for name, values in GUESS.findall(text)} == found


def shown(line: Line) -> str:
    if line.field in ("context", "idle", "reserved", "Xorg", "gnome-shell"):
        return f"{line.value // MIB}MiB"
    return line.value.decode() if isinstance(line.value, bytes) else str(line.value)
