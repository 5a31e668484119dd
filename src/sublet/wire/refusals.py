"""Encodes an error for a connection: class by name, what happened, and what to do.

The class is looked up in our own tree and nowhere else, so a peer can choose among our errors but never name anything
else. What a class carries besides its words (an offer, the end of a lease) does not travel here; a caller that needs
it on the other side sends it in a message of its own.
"""

from __future__ import annotations

from typing import Final

from sublet import errors
from sublet.errors import SubletError
from sublet.lazy_dataclass import dataclass

TEXT_MAX: Final = 4096
"""Characters of each text. What is longer is cut: a person reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error in words."""

    kind: str
    """The name of its class."""
    message: str
    do: str = ""


_TREE: Final[dict[str, type[SubletError]]] = {
    name: found for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, SubletError)
}


def refusal_of(error: SubletError) -> Refusal:
    """What to send."""
    return Refusal(kind=error.kind, message=error.message[:TEXT_MAX], do=error.do[:TEXT_MAX])


def error_of(refusal: Refusal) -> SubletError:
    """What to raise. A class that this version does not know becomes the root of the tree; the words stay."""
    made = _TREE.get(refusal.kind, SubletError)
    return made(refusal.message[:TEXT_MAX], do=refusal.do[:TEXT_MAX])
