"""Puts the states of a session into a page of the docs, so that page and code cannot part.

``python -m sublet.studio.drawing docs/sessions.md`` rewrites the page between its markers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sublet.errors import InvalidRequest
from sublet.lease.drawing import Machine, exits, mermaid
from sublet.studio.states import SESSION_TABLE, SessionEvent, SessionState

MACHINE = Machine(
    name="session",
    states=SessionState,
    events=SessionEvent,
    start=SessionState.RESTING,
    arrows=tuple((state, event, then) for (state, event), then in SESSION_TABLE.items()),
)
BEGIN, END = "<!-- drawn: session -->", "<!-- end: session -->"


def page_with_drawing(page: str) -> str:
    """The page with everything between its markers made anew."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise InvalidRequest(
            "the page has no place for the drawing", do=f"Put {BEGIN} and {END} there, once, in lines."
        )
    before, rest = page.split(BEGIN)
    drawn = f"```mermaid\n{mermaid(MACHINE)}\n```\n\n{exits(MACHINE)}"
    return f"{before}{BEGIN}\n\n{drawn}\n\n{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str]) -> int:
    """Rewrite the page named; ``docs/sessions.md`` if none is."""
    path = Path(arguments[0] if arguments else "docs/sessions.md")
    path.write_text(page_with_drawing(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
