"""What the supervisor's process does without: to be imported there, before anything else of it.

It is on every machine all the time, so it is to be small, and most of what it would have in memory are libraries of
which it needs little:

- ``dataclasses`` loads ``inspect``, and that ``ast``, ``dis`` and ``tokenize``: more than a megabyte, for two small
  functions. And it compiles a text for each method of each class, of which there are some hundred and fifty; here that
  is done for what is used (``lean_classes``).
- ``typing`` is half a megabyte, to be read by people and checkers (``lean_typing``).
- ``socket`` is as much: names for numbers, and ``selectors`` (``lean_socket``).

Where a real one is loaded already, nothing is put into its place.
"""

from __future__ import annotations

import sys

from sublet.supervisor.lean_socket import Sockets
from sublet.supervisor.lean_typing import Typing
from sublet.supervisor.stand_in import StandIn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Inspect(StandIn):
    """As much of ``inspect`` as dataclasses need."""

    @staticmethod
    def get_annotations(of: type) -> dict[str, Any]:
        """Its own, not those of its bases."""
        return dict(of.__dict__.get("__annotations__", {}))  # noqa: RUF063 - this is what it is instead of

    def signature(self, of: Any) -> Any:
        """Of a class: it goes into the text of one that has none."""
        return "(...)" if isinstance(of, type) else self.real().signature(of)


if "dataclasses" not in sys.modules:
    for stand_in in (Inspect("inspect"), StandIn("copy"), Typing("typing"), Sockets("socket")):
        stand_in.take_place()
    from sublet.supervisor import lean_classes

    lean_classes.install()
