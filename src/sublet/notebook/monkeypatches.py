"""Names library attributes that the notebook has replaced (monkeypatches), which the device lacks.

``textwrap.dedent = my_function`` changes the library in the notebook's process. A transfer writes nothing into
libraries, so the library on the device keeps its own function, and the person is told before a cell runs there; and
after a cell on a device that has set one there.

Found from the text of executed cells, each read once: assignments to attributes and ``setattr`` with a constant name.
What they mean is looked up when it is asked for, so nothing but those attributes is touched.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple

MAY_ASSIGN: Final = re.compile(r"\.\s*\w+\s*(?:[^\w\s=.(]{0,3}=(?!=)|,|:)|setattr\s*\(|\bfor\b|\bwith\b|\bdel\b")
"""A cell without any of this assigns to no attribute, and is not parsed."""
MAIN: Final = "__main__"
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
OWN: Final = frozenset({"__name__", "__doc__", "__file__", "__module__", "__qualname__"})


class ReplacedAttribute(NamedTuple):
    """One attribute."""

    name: str
    """As the notebook wrote it: ``textwrap.dedent``."""
    what: str
    """What stands there now, for people."""

    def __str__(self) -> str:
        return (
            f"{self.name} was set in the notebook ({self.what}); that does not hold on the device: set it in the cell"
        )


class ReplacedAttributes:
    """Of one notebook."""

    def __init__(self, names: Mapping[str, Any], carried: Iterable[str] = ()) -> None:
        """``carried``: ``library:attribute`` of what crosses by itself."""
        self._names = names
        self._carried = frozenset(carried)
        self._read = 0
        self._assigned: set[tuple[str, ...]] = set()
        self._reported_before: dict[tuple[str, ...], object] = {}
        self._on_device: set[tuple[str, ...]] = set()
        """What cells have assigned on the present device."""
        self._reported_after: set[tuple[str, ...]] = set()
        """Of these, what was said not to hold in the notebook."""

    def begin(self) -> None:
        """There is another device."""
        self._on_device.clear()

    def news(self, cells: list[str], cell: str) -> list[ReplacedAttribute]:
        """What is to be said before ``cell`` runs on a device. ``cells``: everything executed so far, as Python."""
        if len(cells) < self._read:  # the history was cleared
            self._read = 0
        for source in cells[self._read :]:
            self._assigned |= assigned_attributes(source)
        self._read = len(cells)
        self._on_device |= assigned_attributes(cell)
        found = []
        for chain in sorted(self._assigned - self._on_device):
            value = self._replacement(chain)
            if value is not None and self._reported_before.get(chain) is not value[0]:
                self._reported_before[chain] = value[0]
                found.append(ReplacedAttribute(".".join(chain), value[1]))
        return found

    def unreported(self, cell: str) -> list[str]:
        """Attributes of libraries and of modules that ``cell`` has set on a device, where it ran: said once of each."""
        found = []
        for chain in sorted(assigned_attributes(cell)):
            library = _library_of(self._owner(chain))
            if library and chain not in self._reported_after and f"{library}:{chain[-1]}" not in self._carried:
                self._reported_after.add(chain)
                found.append(".".join(chain))
        return found

    def _owner(self, chain: tuple[str, ...]) -> Any:
        root, *path, _ = chain
        owner = self._names.get(root)
        for part in path:
            owner = _attribute(owner, part)
        return owner

    def _replacement(self, chain: tuple[str, ...]) -> tuple[object, str] | None:
        """The value under an attribute of a library, if it is the notebook's own."""
        owner, attribute = self._owner(chain), chain[-1]
        library = _library_of(owner)
        if not library or attribute in OWN or f"{library}:{attribute}" in self._carried:
            return None
        value = vars(owner).get(attribute)
        what = _of_the_notebook(value)
        return None if not what else (value, what)


def _attribute(owner: Any, name: str) -> Any:
    """Without running a property."""
    found = getattr(type(owner), name, None) if not isinstance(owner, ModuleType | type) else None
    return None if isinstance(found, property) else getattr(owner, name, None)


def _library_of(owner: Any) -> str:
    """The library that a module or class is of; empty where it is the notebook's, or neither."""
    if isinstance(owner, ModuleType):
        name = owner.__name__
    elif isinstance(owner, type):
        name = str(owner.__module__)
    else:
        return ""
    return "" if name == MAIN else name.partition(".")[0]


def _of_the_notebook(value: Any) -> str:
    """What it is, if a cell has made it."""
    inner = value
    for name in ("__func__", "fget", "func", "__wrapped__"):
        inner = inner if getattr(inner, "__module__", None) == MAIN else getattr(inner, name, inner)
    if getattr(inner, "__module__", None) == MAIN and not isinstance(inner, ModuleType):
        name = getattr(inner, "__qualname__", "") or type(inner).__name__
        return f"{name} of the notebook"
    return repr(value) if isinstance(value, PLAIN) and value is not None and len(repr(value)) <= 40 else ""


def assigned_attributes(source: str) -> frozenset[tuple[str, ...]]:
    """Chains of names to whose last a text assigns: ``a.b.c = x`` is ``("a", "b", "c")``."""
    if not MAY_ASSIGN.search(source):
        return frozenset()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(_chains(tree))


def _chains(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            chain = _chain(node)
        elif isinstance(node, ast.Call) and _is_setattr(node):
            owner = _chain(node.args[0])
            chain = (*owner, _text(node.args[1])) if owner else ()
        else:
            continue
        if len(chain) > 1:
            yield chain


def _is_setattr(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Name) or node.func.id != "setattr" or len(node.args) != 3:
        return False
    return bool(_text(node.args[1]))


def _text(node: ast.expr) -> str:
    """Of a constant; empty for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _chain(node: ast.expr) -> tuple[str, ...]:
    """Empty: it begins with something else than a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else ()
