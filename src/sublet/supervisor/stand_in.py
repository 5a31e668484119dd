"""A module in the place of a larger one, of which this process needs a few names.

An importer that asks for more gets the real one, in whole, and so does every importer from then on.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class StandIn(ModuleType):
    """It lies in ``sys.modules`` under the name of the other."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the machinery of imports asks every module
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        """The module that it stands for."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)

    def take_place(self) -> None:
        """From now on, unless the real one is there already."""
        sys.modules.setdefault(self.__name__, self)
