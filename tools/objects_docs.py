"""Write the kinds of objects into docs/notebook-objects.md, from the table that the tests run:
`.venv/bin/python -m tools.objects_docs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.notebook.kinds.table import SECTIONS

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "notebook-objects.md"
MARK: Final = (
    "<!-- From here on made by tools/objects_docs.py from the table that the tests run; a test compares. -->\n"
)


def document(before: str) -> str:
    """The document as it should be: what people wrote, up to the mark, and the table after it."""
    head, mark, _ = before.partition(MARK)
    if not mark:
        raise SystemExit(f"{DOCUMENT} has lost its mark; put this line where the table begins:\n{MARK}")
    return head + MARK + "".join(_sections())


def _sections() -> Iterator[str]:
    for title, kinds in SECTIONS.items():
        yield f"\n### {title}\n\n| | |\n|---|---|\n"
        for kind in kinds:
            note = f" ({kind.note})" if kind.note else ""
            yield f"| {kind.name} | {kind.verdict}{note} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
