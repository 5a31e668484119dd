"""One known bug, as a switch: what it breaks, whose it was, and what it replaces for as long as it is on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

Change = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute, its name, and what makes the replacement out of the original."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    breaks: str
    known_from: str
    changes: tuple[Change, ...]


@contextmanager
def in_force(changes: Iterable[Change]) -> Iterator[None]:
    """What they replace is replaced, and afterwards is what it was."""
    with ExitStack() as stack:
        for owner, attribute, make in changes:
            original = vars(owner)[attribute]
            setattr(owner, attribute, make(original))
            stack.callback(setattr, owner, attribute, original)
        yield
