"""One known bug, as a switch: what it breaks, whose it was, and what it replaces for as long as it is on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "Mutant"]

Change = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute, its name, and what makes the replacement out of the original."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug."""

    breaks: str
    known_from: str
    changes: tuple[Change, ...]
