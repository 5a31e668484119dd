"""Each of the twenty-two findings has a test file of its own, and each file here says which finding it is about."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PROOF = (HERE.parents[1] / "docs" / "proof.md").read_text()


def test_the_table_in_the_docs_names_all_findings_and_all_files() -> None:
    rows = re.findall(r"^\| (\d+|later|all) \| [^|]+ \| ((?:`test_\w+`(?:, )?)+) \|$", PROOF, flags=re.MULTILINE)
    assert [place for place, _ in rows] == [*map(str, range(1, 23)), "later", "all"]
    files = [re.findall(r"`(\w+)`", names) for _, names in rows]
    shared = [first for first, *_ in files if sum(first in names for names in files) > 1]
    assert shared == [], "the file that is named first is about this finding alone"
    named = {name for names in files for name in names}
    assert named == {path.stem for path in HERE.glob("test_*.py")} - {"test_findings"}
