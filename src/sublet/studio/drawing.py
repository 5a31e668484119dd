"""Writes the states of sessions and served programs into the docs, so that pages and code cannot differ.

``python -m sublet.studio.drawing`` rewrites the pages between their markers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sublet.lease.drawing import StateTable, exits, mermaid, with_sections
from sublet.studio.serving import PROGRAM_TABLE, ProgramEvent, ProgramState
from sublet.studio.states import SESSION_TABLE, SessionEvent, SessionState

PAGES: Final[Mapping[str, StateTable]] = {
    "docs/sessions.md": StateTable(
        name="session",
        states=SessionState,
        events=SessionEvent,
        start=SessionState.RESTING,
        arrows=tuple((state, event, then) for (state, event), then in SESSION_TABLE.items()),
    ),
    "docs/serving.md": StateTable(
        name="program",
        states=ProgramState,
        events=ProgramEvent,
        start=ProgramState.COLD,
        arrows=tuple((state, event, then) for (state, event), then in PROGRAM_TABLE.items()),
    ),
}


def page_with_drawing(page: str, machine: StateTable) -> str:
    """The page with these states drawn anew."""
    return with_sections(page, {machine.name: f"```mermaid\n{mermaid(machine)}\n```\n\n{exits(machine)}"})


def main() -> int:
    """Rewrite the pages, from the root of the checkout."""
    for name, machine in PAGES.items():
        path = Path(name)
        path.write_text(page_with_drawing(path.read_text(encoding="utf-8"), machine), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
