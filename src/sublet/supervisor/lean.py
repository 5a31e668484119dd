"""What the supervisor's process does without: to be imported there, before anything else of it.

``dataclasses`` loads ``inspect``, and that ``ast``, ``dis`` and ``tokenize``: more than a megabyte in a process that is
on every machine all the time, for two small functions. Here they are; whoever asks for more of that module gets the
real one.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

__all__ = ["Inspect"]

_NAME: Final = "inspect"


class Inspect(ModuleType):
    """As much of ``inspect`` as dataclasses need."""

    @staticmethod
    def get_annotations(of: type) -> dict[str, Any]:
        """Its own, not those of its bases."""
        return dict(of.__dict__.get("__annotations__", {}))  # noqa: RUF063 - this is what it is instead of

    def signature(self, of: Any) -> Any:
        """Of a class: it goes into the text of one that has none."""
        return "(...)" if isinstance(of, type) else self.__getattr__("signature")(of)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the machinery of imports asks every module
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        import inspect

        return getattr(inspect, name)


if _NAME not in sys.modules:
    sys.modules[_NAME] = Inspect(_NAME)
