"""All kinds, in the order of the page."""

from __future__ import annotations

from typing import Final

from tests.notebook.kinds.classes import CLASSES
from tests.notebook.kinds.kind import Kind
from tests.notebook.kinds.memory import ARRAYS, FRAMES, TENSORS
from tests.notebook.kinds.plain import CONTAINERS, ITERATORS, VALUES
from tests.notebook.kinds.programs import FUNCTIONS, RELATIONS
from tests.notebook.kinds.resources import LIBRARIES, RESOURCES

__all__ = ["KINDS", "SECTIONS"]

SECTIONS: Final[dict[str, list[Kind]]] = {
    "Values": VALUES,
    "Containers": CONTAINERS,
    "Relations": RELATIONS,
    "Functions": FUNCTIONS,
    "Classes and their instances": CLASSES,
    "Iterators": ITERATORS,
    "Arrays": ARRAYS,
    "Frames and tables": FRAMES,
    "Tensors and models": TENSORS,
    "Of other libraries": LIBRARIES,
    "What belongs to a process": RESOURCES,
}
KINDS: Final = [kind for kinds in SECTIONS.values() for kind in kinds]
