"""Fields that were added to messages later, and how an older side ignores them.

Office and supervisor, holder and guest need not be of one version: a supervisor outlives the office that started it,
and a notebook may have run for weeks. What reads a message is strict, so a field that it does not know is refused.
Therefore a field that is added to a message has a default that means what was always so, and is marked with ``later``:
it is sent only where it says something else, which is where a program wants what an older side cannot do. The
sender then expects a refusal, and does without or reports it.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Final, TypeVar

LATER: Final = "later"
"""The key of the mark in the field's metadata."""

_T = TypeVar("_T")


def later(default: _T) -> _T:
    """``name: type = later(default)``: a field that was added to a message that had been sent before."""
    made: Any = field(default=default, metadata={LATER: True})
    return made  # type: ignore[no-any-return]  # as ``dataclasses.field`` says of itself
