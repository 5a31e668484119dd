"""Counts a value's objects, up to the limit of a transfer or a save.

What that takes grows with the number of objects that pickle must ask a class or a rule about: instances, functions, the
variables around these. It is about 2 KiB of memory and 15 µs for each, several times what the value itself takes, so of
some size on a transfer would fill the memory of the process that holds the value.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import Any, Final

from sublet.notebook.untouchable import module_names
from sublet.state.transfer.figures import is_part_kind

OBJECTS_MAX: Final = 200_000
"""A value that a cell made and that has more stays on the device."""
TOO_MANY: Final = f"more than {OBJECTS_MAX:,} objects"
_PLAIN: Final = frozenset((list, tuple, dict, set, frozenset))
"""What pickle takes apart by itself is followed and not counted."""
_LEAVES: Final = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.FrameType)


def has_too_many(value: Any, most: int = OBJECTS_MAX) -> bool:
    """Looks at all objects that the value holds, level by level, until there are more than ``most``. What the garbage
    collector does not track, such as numbers, texts and dicts of these, holds nothing."""
    level: dict[int, Any] = {id(value): value} if gc.is_tracked(value) else {}
    modules: frozenset[int] | None = None
    seen: set[int] = set()
    count = 0
    while level:
        kinds = set(map(type, level.values()))
        left_out = tuple(kind for kind in kinds if issubclass(kind, _LEAVES) or _is_plotted(kind))
        if left_out:
            level = {key: one for key, one in level.items() if type(one) not in left_out}
        seen.update(level)
        if not kinds <= _PLAIN:
            count += sum(type(one) not in _PLAIN for one in level.values())
        if count > most:
            return True
        if types.FunctionType in kinds and modules is None:
            modules = module_names()
            seen |= modules
        held = filter(gc.is_tracked, gc.get_referents(*level.values()))
        level = {key: one for one in held if (key := id(one)) not in seen}
    return False


def _is_plotted(kind: type) -> bool:
    """Figures are pickled by their own classes, as one object."""
    return "matplotlib.figure" in sys.modules and is_part_kind(kind)
