"""Each of the twenty-two findings has its tests, and each file here says which finding it is about."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PROOF = (HERE.parents[1] / "docs" / "proof.md").read_text()


def test_the_table_in_the_docs_names_all_findings_and_all_files() -> None:
    rows = re.findall(r"^\| (\d+|later|all) \| [^|]+ \| ((?:`test_\w+`(?:, )?)+) \|$", PROOF, flags=re.MULTILINE)
    assert [place for place, _ in rows] == [*map(str, range(1, 23)), "later", "all"]
    named = {name for _, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert named == {path.stem for path in HERE.glob("test_*.py")} - {"test_findings"}
