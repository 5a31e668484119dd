"""Tracks a namespace between cells: its owner's names, new ones, and removed ones.

There may be 10,000 names, and a cell that reads one of them waits for every look. So what must be asked of all of them
is asked without a loop, and of most only whether they are what they were. Names keep their order while none is removed,
so a namespace that begins with the names it had has lost none of them.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from operator import is_not
from typing import Any, Final, NamedTuple

HIDDEN: Final = frozenset(
    {"In", "Out", "get_ipython", "exit", "quit", "open", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh"}
)
"""What the shell keeps in the namespace for itself."""
RESULTS: Final = frozenset({"In", "Out", "_", "__", "___", "_i", "_ii", "_iii"})
RESULT: Final = re.compile(r"_i?\d+")
OF_VSCODE: Final = re.compile(r"_{1,2}vsc(ode)?_", re.IGNORECASE)
"""So begins what VS Code binds for itself before the first cell: where the notebook lies, the kernel's ``input``."""
CONSTANTS: Final = frozenset(
    {types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type}
    | {type(None), bool, int, float, complex, str, bytes}
)
TEXT_MAX: Final = 1000
FEW: Final = 64
"""Names that are said whole, whatever was said before."""


def visible(names: Mapping[str, object]) -> set[str]:
    """The names that are the notebook's own."""
    own = set(names)
    own -= HIDDEN
    own.difference_update([name for name in own if "_" <= name < "`" and _is_the_shells(name)])
    return own


def visible_among(names: Mapping[str, object], few: Iterable[str]) -> set[str]:
    """Of these those that are there and the notebook's own."""
    return {name for name in few if name in names and name not in HIDDEN and not _is_the_shells(name)}


def results(names: Mapping[str, object], few: Iterable[str]) -> set[str]:
    """Of these those under which the shell keeps what cells gave and were, and VS Code what it needs: they travel if
    they are named."""
    return {
        name for name in few if name in names and (name in RESULTS or RESULT.fullmatch(name) or OF_VSCODE.match(name))
    }


def _is_the_shells(name: str) -> bool:
    """``_12``, ``_i12``: what cells were and gave; ``__name__`` and such: the module's; or VS Code's."""
    if name[:1] != "_":
        return False
    is_the_modules = name.startswith("__") and name.endswith("__")
    return is_the_modules or name[1:].removeprefix("i").isdigit() or OF_VSCODE.match(name) is not None


class BoundNames(Mapping[str, Callable[[], object]]):
    """What each name has; held weakly where that can be, so that memory on the device is freed when a cell lets go.

    It is kept from one look to the next, and a caller that binds or removes names that are not to count as bound anew
    says which.
    """

    def __init__(self, names: Mapping[str, object]) -> None:
        self._held: dict[str, Any] = {}
        self._weak: set[str] = set()
        """Names of which a reference is held."""
        self._take_snapshot(names)

    def noted(self, names: Mapping[str, object], some: Iterable[str]) -> None:
        """Of these it is from here on what they have now."""
        for name in some:
            if name in names:
                self._hold(name, names[name])
            else:
                self._held.pop(name, None)
                self._weak.discard(name)

    def rebound(self, names: Mapping[str, object]) -> list[str]:
        """Names that have something else now, or are new; in their order."""
        if list(names)[: len(self._held)] == list(self._held):
            other = list(compress(names, map(is_not, names.values(), self._held.values())))
            other += list(names)[len(self._held) :]
        else:  # some are gone
            names, held = dict(names), self._held
            other = [name for name, value in names.items() if name not in held or held[name] is not value]
            self._held = {name: held[name] for name in names if name in held}
        return [name for name in other if not self._has(name, names[name])]

    def _take_snapshot(self, names: Mapping[str, object]) -> None:
        self._held = dict(names)
        kinds = list(map(type, self._held.values()))
        can = {kind for kind in set(kinds) if kind.__weakrefoffset__}
        for name in list(compress(self._held, map(can.__contains__, kinds))):
            self._hold(name, self._held[name])

    def _has(self, name: str, value: object) -> bool:
        if name not in self._held:
            return False
        held = self._held[name]
        return (_alive(held) if name in self._weak else held) is value

    def _hold(self, name: str, value: object) -> None:
        self._weak.discard(name)
        self._held[name] = value
        if type(value).__weakrefoffset__:
            try:
                self._held[name] = weakref.ref(value)
                self._weak.add(name)
            except TypeError:  # it has no room for it all the same: it was made so
                pass

    def __getitem__(self, name: str) -> Callable[[], object]:
        held = self._held[name]
        return (lambda: _alive(held)) if name in self._weak else (lambda: held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _alive(held: weakref.ref[Any]) -> object:
    """What is held weakly, or an object that no name can have: a name may have None by now."""
    value = held()
    return _GONE if value is None else value


_GONE: Final = object()


class Shared:
    """Names that the other side has as well."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._seen: list[str] = []
        """The namespace when all of it was last looked at for names that are gone."""
        self._gone: set[str] = set()
        """What was found, and is not taken back yet."""
        self._new: set[str] = set()
        """Names that came since."""
        self._growth = Growth()
        self._lacking: set[str] = set()
        """As ``_gone``, of looks that went by the growth alone."""
        self._came: set[str] = set()
        """As ``_new``, of those."""

    def has_any(self, names: Iterable[str]) -> bool:
        return not self._names.isdisjoint(names)

    def has_all(self, names: Iterable[str]) -> bool:
        return self._names.issuperset(names)

    def add(self, names: Iterable[str]) -> None:
        before = len(self._names)
        self._names.update(names)
        if len(self._names) != before or self._gone:
            self._new.update(names)
            self._came.update(names)

    def remove(self, names: Iterable[str]) -> None:
        for kept in (self._names, self._gone, self._new, self._lacking, self._came):
            kept.difference_update(names)

    def clear(self) -> None:
        for kept in (self._names, self._gone, self._new, self._lacking, self._came):
            kept.clear()

    def deleted(self, names: Mapping[str, object]) -> tuple[str, ...]:
        """Those that are not here any more."""
        present = list(names)
        more = present[len(self._seen) :]
        del present[len(self._seen) :]
        if present == self._seen:
            doubtful = self._gone | self._new
            self._gone = {name for name in doubtful if name not in names}
            self._seen += more
        else:
            self._gone = self._names.difference(names)
            self._seen = list(names)
        self._new.clear()
        return tuple(sorted(self._gone))

    def deleted_among(self, names: dict[str, Any], some: Iterable[str]) -> tuple[str, ...]:
        """Those of ``some`` that are not here any more; and all others that are not, unless other changes
        hid that (``Growth``): then they are reported later. It takes no time that grows with the names."""
        if self._growth.is_all_since(names):
            doubtful = self._lacking | self._came
            doubtful.update(name for name in some if name in self._names)
            self._lacking = {name for name in doubtful if name not in names}
        else:
            self._lacking = self._names.difference(names)
        self._came.clear()
        return tuple(sorted(self._lacking))


class Growth:
    """Whether a namespace only grew since the last look, told from its size and its end.

    New names stand behind all others. So where the name that was the last is found with as many behind it as there are
    more, none was removed; but for one thing: if that name itself was removed and bound again, others that went may
    have been made up for by others that came before it.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: str | None = None

    def is_all_since(self, names: dict[str, Any]) -> bool:
        count, last, more = len(names), self._last, 0
        try:
            for name in reversed(names):
                if more == 0:
                    self._last = name
                if name == last or more > count - self._count:
                    break
                more += 1
        except RuntimeError:  # another thread binds names meanwhile
            self._last = None
            return False
        before, self._count = self._count, count
        return last is not None and count - more == before


class Steady:
    """Names that stand for the very object that crossed under them last, if it is one that hardly changes: a module, a
    function, a class, a number, a short text. Of these the other side has no old value."""

    def __init__(self) -> None:
        self._crossed: dict[str, object] = {}

    def crossed(self, some: Iterable[str], names: Mapping[str, object]) -> None:
        """Both sides have these now."""
        for name in some:
            value = names.get(name, _GONE)
            if type(value) in CONSTANTS and not (type(value) in (str, bytes) and len(value) > TEXT_MAX):  # type: ignore[arg-type]
                self._crossed[name] = value
            else:
                self._crossed.pop(name, None)

    def current(self, names: Mapping[str, object]) -> frozenset[str]:
        """Those that still do."""
        return frozenset(name for name, value in self._crossed.items() if names.get(name, _GONE) is value)

    def forget(self) -> None:
        """The other side may have bound any of them otherwise."""
        self._crossed.clear()


class EncodedNames(NamedTuple):
    """A set of names, whole or as a difference to the set before."""

    names: frozenset[str]
    is_difference: bool = False
    """To what was told whole before."""


class NamesEncoder:
    """Encodes sets of names for one listener, as a difference to the set before where that is shorter."""

    def __init__(self) -> None:
        self._last: frozenset[str] | None = None
        self._listener: weakref.ref[Any] | None = None

    def encode(self, names: frozenset[str], listener: object) -> EncodedNames:
        """Encode them for this listener. Call ``forget`` if they did not arrive."""
        if len(names) < FEW:
            return EncodedNames(names)
        if self._listener is None or self._listener() is not listener:
            self._last, self._listener = None, weakref.ref(listener)
        last, self._last = self._last, names
        if last is None:
            return EncodedNames(names)
        other = frozenset() if last == names else last ^ names
        return EncodedNames(other, is_difference=True) if len(other) < len(names) // 2 else EncodedNames(names)

    def forget(self) -> None:
        """It is unknown whether it arrived."""
        self._last = None


class NamesDecoder:
    """Decodes what a ``NamesEncoder`` has sent."""

    def __init__(self) -> None:
        self._last: frozenset[str] = frozenset()

    def decode(self, encoded: EncodedNames) -> frozenset[str]:
        """The names that are meant."""
        names = encoded.names
        if encoded.is_difference:
            names = self._last ^ names if names else self._last
        if len(names) >= FEW:
            self._last = names
        return names
