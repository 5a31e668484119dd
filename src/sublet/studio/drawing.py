"""Puts the states of a session into a page of the docs, so that page and code cannot part.

``python -m sublet.studio.drawing docs/sessions.md`` rewrites the page between its markers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sublet.lease.drawing import Machine, exits, mermaid, with_sections
from sublet.studio.states import SESSION_TABLE, SessionEvent, SessionState

MACHINE = Machine(
    name="session",
    states=SessionState,
    events=SessionEvent,
    start=SessionState.RESTING,
    arrows=tuple((state, event, then) for (state, event), then in SESSION_TABLE.items()),
)


def page_with_drawing(page: str) -> str:
    """The page with the states of a session drawn anew."""
    return with_sections(page, {"session": f"```mermaid\n{mermaid(MACHINE)}\n```\n\n{exits(MACHINE)}"})


def main(arguments: Sequence[str]) -> int:
    """Rewrite the page named; ``docs/sessions.md`` if none is."""
    path = Path(arguments[0] if arguments else "docs/sessions.md")
    path.write_text(page_with_drawing(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
