"""Functions and classes of a notebook live in its namespace, and on the other side in the other side's.

cloudpickle would take along a copy of every global that a function reads. Then two functions that share a counter would
each have one of their own, and what a cell rebinds no function would see. Here a function goes without its globals and
finds, where it arrives, the namespace there; which names it will look for is noted, so that they can be sent before.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from sublet.durable import rebuild
from sublet.durable.rules import GpuRule, Rules
from sublet.notebook.reading import names_of

__all__ = ["HomeRules"]

_GLOBALS = 1
"""Where cloudpickle puts the globals among the arguments that make a function."""


class HomeRules(Rules):
    """The rules for values of one notebook."""

    remembers = True

    def __init__(
        self,
        *,
        gpu: GpuRule = "refuse",
        compact: frozenset[int] = frozenset(),
        needs: set[str] | None = None,
        opaque: set[str] | None = None,
    ) -> None:
        super().__init__(gpu=gpu, compact=compact)
        self.needs: set[str] = set() if needs is None else needs
        """Global names that functions among the values read."""
        self.opaque: set[str] = set() if opaque is None else opaque
        """Functions that may read any."""

    def anew(self, compact: frozenset[int] = frozenset()) -> HomeRules:
        """For another part of the same values: what is noted is noted together."""
        return type(self)(gpu=self.gpu, compact=compact, needs=self.needs, opaque=self.opaque)

    def _function(self, value: types.FunctionType) -> Any:
        reduced = super()._function(value)
        if reduced is NotImplemented or value.__globals__ is not vars(sys.modules["__main__"]):
            return reduced
        names, is_opaque = names_of(value.__code__)
        self.needs |= names
        if is_opaque:
            self.opaque.add(value.__qualname__)
        make, arguments, (attributes, slots), *rest = reduced
        arguments = (*arguments[:_GLOBALS], _HOME, *arguments[_GLOBALS + 1 :])
        return make, arguments, (attributes, {**slots, "__globals__": {}}), *rest


class _Home:
    """Stands for the namespace, and is it where it arrives."""

    def __reduce__(self) -> Any:
        return rebuild.home, ()


_HOME = _Home()
