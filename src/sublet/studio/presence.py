"""Connections to the studio: open pages, and the programs and browsers that asked last. In memory alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from sublet.lazy_dataclass import dataclass
from sublet.studio.people import Person, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonPresence:
    """One person, as the operators' page shows it."""

    person: Person
    pages: int
    """Open in browsers now."""
    last_request_s: float | None
    """Wall time of the last request; None: none since the studio was started."""
    label: str
    """Of the token that it showed, or that its browser was signed in with."""


class Presences:
    """Safe to use from several threads."""

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, str]] = {}

    def on_request(self, token: Token) -> None:
        """A request came with this token."""
        with self._lock:
            self._last[token.person.id] = (self._wall_s(), token.label)

    def of(self, people: Sequence[Person], pages: Counter[str]) -> list[PersonPresence]:
        """These people: those with open pages first, then by their last request. Others are forgotten."""
        with self._lock:
            known = {one.id for one in people}
            self._last = {ident: last for ident, last in self._last.items() if ident in known}
            found = []
            for one in people:
                last_request_s, label = self._last.get(one.id, (None, ""))
                found.append(
                    PersonPresence(person=one, pages=pages[one.id], last_request_s=last_request_s, label=label)
                )
        return sorted(found, key=lambda one: (not one.pages, -(one.last_request_s or 0.0), one.person.name))
