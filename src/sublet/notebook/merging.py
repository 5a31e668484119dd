"""What came back is written into the objects it came from: whoever else holds one of them sees the change.

A cell on a device works on copies. The two sides keep count of which copy is whose (``spaces``), so when they come back
it is known of each object whether it *is* one of the notebook's, changed or not, or is new. One that is takes over what
its copy says, as far as its type and shape allow; where they do not, the copy takes its place, and the caller rebinds
every name that had it, and says so. What is new is never written into anything: ``a = []`` leaves alone the list that
``a`` was.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from sublet.notebook.memories import (
    Window,
    is_array,
    is_memory,
    is_tensor,
    overlapping,
    same_array,
    same_tensor,
    view_of,
    windows_of,
)

__all__ = ["ATOMS", "can_change", "merge"]

ATOMS: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)}
)
"""Values that are what they say; which object says it nobody asks."""
FUNCTION_PARTS: Final = ("__code__", "__defaults__", "__kwdefaults__")
CLASS_PARTS: Final = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__slots__"})
DEPTH_MAX: Final = 150
"""Deeper than this nothing is looked into, and what came is taken as it is."""


def merge(news: Mapping[str, Any], originals: Mapping[int, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    """What each name stands for from now on, and what each new object stands for (by its id).

    ``originals``: by the id of an object that came, the one here whose copy it is. First everything is planned, then
    everything is written: whether two arrays may take over depends on both.
    """
    refused: frozenset[int] = frozenset()
    views: dict[int, Any] = {}
    while True:
        plan = _Plan(originals, refused, views)
        for new in news.values():
            plan.choose(new)
        crossed, within = plan.overlaps()
        if crossed <= refused and within.keys() == views.keys():
            break
        refused |= crossed
        views = {key: view_of(*both) for key, both in within.items() if not crossed}
    plan.write()
    return {name: plan.stands_for(new) for name, new in news.items()}, plan.chosen


Way = Callable[[Any, Any], Any]
"""(target, new): how the target gets what came, item by item. Target and new are one where it is new here."""


class _Plan:
    """Who takes over what, and how, of values that came together."""

    def __init__(self, originals: Mapping[int, Any], refused: frozenset[int], views: Mapping[int, Any]) -> None:
        """``refused``: ids of new objects that must be taken as they are; ``views``: what stands for new arrays that
        look at the memory of others."""
        self.chosen: dict[int, Any] = {}
        """By the id of the new object: what stands for it from now on."""
        self._originals = originals
        self._here = {id(old) for old in originals.values()}
        self._refused = refused
        self._views = views
        self._taken: set[int] = set()
        """Ids of originals that stand for something already: each can stand for one object only."""
        self._writes: list[Callable[[], object]] = []
        self._windows: list[Window] = []
        self._keep: list[Any] = []
        self._depth = 0

    def choose(self, new: Any) -> Any:
        """What is to stand for an object that came."""
        if type(new) in ATOMS:
            return new
        if id(new) in self.chosen:
            return self.chosen[id(new)]
        if id(new) in self._here:  # it is one of ours, not a copy
            return new
        self._keep.append(new)
        target = self._target(new)
        self.chosen[id(new)] = target
        self._taken.add(id(target))
        if is_memory(new):
            self._windows += windows_of(target, new, is_fresh=target is new or id(new) in self._views)
        way = self._way(target, new)
        if way is not None and self._depth < DEPTH_MAX:
            self._depth += 1
            self.chosen[id(new)] = target = way(target, new)
            self._depth -= 1
            self._keep.append(target)
        return target

    def overlaps(self) -> tuple[frozenset[int], dict[int, tuple[Any, Any, Any]]]:
        """Of arrays that overlap: those that must be taken as they are, and those that are views.

        Two that came with originals must overlap there just as they do here; else, written one after the other, they
        would not say what came. One that is new and lies within one that has an original is a view of that: by its
        key, the original, the copy, and itself.
        """
        crossed: set[int] = set()
        within: dict[int, tuple[Any, Any, Any]] = {}
        for one, other in overlapping(self._windows, lambda window: window.new):
            if one.is_fresh and other.is_fresh:
                continue
            if one.is_fresh or other.is_fresh:
                whole, part = (other, one) if one.is_fresh else (one, other)
                if whole.new[0] <= part.new[0] and part.new[1] <= whole.new[1]:
                    within[part.key] = (whole.target, whole.came, part.came)
                else:
                    crossed.add(whole.key)
            elif other.old[0] - one.old[0] != other.new[0] - one.new[0]:
                crossed |= {one.key, other.key}
        for one, other in overlapping(self._windows, lambda window: window.old):
            if not (one.is_fresh or other.is_fresh) and other.old[0] - one.old[0] != other.new[0] - one.new[0]:
                crossed |= {one.key, other.key}
        return frozenset(crossed), within

    def write(self) -> None:
        """Do it."""
        for write in self._writes:
            write()

    def _target(self, new: Any) -> Any:
        """The original, if it can take over; else what came."""
        if id(new) in self._views:
            return self._views[id(new)]
        old = self._originals.get(id(new))
        if old is None or type(old) is not type(new) or id(old) in self._taken or id(new) in self._refused:
            return new
        return old if self._depth < DEPTH_MAX and _can_take_over(old, new) else new

    def _way(self, target: Any, new: Any) -> Way | None:
        way = _WAYS.get(type(new))
        if way is not None:
            return partial(way, self)
        if _is_frame(new):
            return self._frame if target is not new else None
        if isinstance(new, type):
            return self._class if new.__module__ == "__main__" else None
        if _has_only_attributes(type(new)):
            return self._object
        if is_memory(new) and target is not new and id(new) not in self._views:
            return self._array if is_array(new) else self._tensor
        return None

    # ---- containers: the target gets what stands for each item ----

    def _items(self, new: Iterable[Any]) -> Callable[[], list[Any]]:
        """What stands for each item, to be asked once everything is planned: of a tuple that is being looked through
        it is not known before."""
        items = list(new)
        for item in items:
            self.choose(item)
        return lambda: [self.stands_for(item) for item in items]

    def stands_for(self, new: Any) -> Any:
        return new if type(new) in ATOMS else self.chosen.get(id(new), new)

    def _list(self, target: Any, new: Any) -> Any:
        items = self._items(new)
        self._writes.append(lambda: target.__setitem__(slice(None), items()))
        return target

    def _deque(self, target: Any, new: Any) -> Any:
        items = self._items(new)

        def write() -> None:
            found = items()
            target.clear()
            target.extend(found)

        self._writes.append(write)
        return target

    def _dict(self, target: Any, new: Any) -> Any:
        keys, values = self._items(new), self._items(new.values())

        def write() -> None:
            found = dict(zip(keys(), values(), strict=True))
            target.clear()
            target.update(found)

        self._writes.append(write)
        return target

    def _defaultdict(self, target: Any, new: Any) -> Any:
        factory = new.default_factory
        self.choose(factory)
        self._writes.append(lambda: setattr(target, "default_factory", self.stands_for(factory)))
        return self._dict(target, new)

    def _set(self, target: Any, new: Any) -> Any:
        items = self._items(new)

        def write() -> None:
            found = items()
            target.clear()
            target.update(found)

        self._writes.append(write)
        return target

    def _bytearray(self, target: Any, new: Any) -> Any:
        if target is not new:
            self._writes.append(lambda: target.__setitem__(slice(None), new))
        return target

    def _tuple(self, target: Any, new: Any) -> Any:
        """It cannot change: it is the original if all that is in it is."""
        merged = self._items(new)()
        old = self._originals.get(id(new))
        for same in (old, new):
            if same is not None and type(same) is type(new) and _same_items(merged, same):
                return same
        made = tuple(merged)
        return made if type(new) is tuple else type(new)(*made)

    def _function(self, target: Any, new: Any) -> Any:
        for part in FUNCTION_PARTS:
            value = getattr(new, part)
            self.choose(value)
            self._writes.append(partial(self._set_part, target, part, value))
        for cell in new.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                value = cell.cell_contents
                self.choose(value)
                self._writes.append(partial(self._set_part, cell, "cell_contents", value))
        self._dict(target.__dict__, new.__dict__)
        return target

    def _set_part(self, target: Any, part: str, new: Any) -> None:
        setattr(target, part, self.stands_for(new))

    def _method(self, target: Any, new: Any) -> Any:
        return types.MethodType(self.choose(new.__func__), self.choose(new.__self__))

    def _partial(self, target: Any, new: Any) -> Any:
        named = {name: self.choose(value) for name, value in new.keywords.items()}
        attributes = {name: self.choose(value) for name, value in new.__dict__.items()}
        state = self.choose(new.func), tuple(self._items(new.args)()), named, attributes
        self._writes.append(lambda: target.__setstate__(state))
        return target

    def _class(self, target: Any, new: Any) -> Any:
        """One that was defined in the notebook: what its attributes share with others they go on sharing."""
        for name, value in list(vars(new).items()):
            if name not in CLASS_PARTS and self.choose(value) is not value:
                self._writes.append(partial(self._set_part, target, name, value))
        return target

    def _object(self, target: Any, new: Any) -> Any:
        if hasattr(new, "__dict__"):
            self._dict(target.__dict__, new.__dict__)
        for slot in _slots_of(type(new)):
            self._slot(target, new, slot)
        return target

    def _slot(self, target: Any, new: Any, slot: Any) -> None:
        try:
            value = slot.__get__(new)
        except AttributeError:
            if target is not new:
                self._writes.append(lambda: _emptied(slot, target))
            return
        self.choose(value)
        self._writes.append(lambda: slot.__set__(target, self.stands_for(value)))

    # ---- memory ----

    def _array(self, target: Any, new: Any) -> Any:
        self._writes.append(lambda: target.__setitem__(..., new))
        return target

    def _tensor(self, target: Any, new: Any) -> Any:
        grad = None if new.grad is None else self.choose(new.grad)

        def write() -> None:
            with sys.modules["torch"].no_grad():
                target.copy_(new)
            target.grad = grad

        self._writes.append(write)
        return target

    def _frame(self, target: Any, new: Any) -> Any:
        """A frame or series of pandas: its columns are the manager's, and that can be handed over whole."""
        self._writes.append(lambda: target.__dict__.update(_mgr=new._mgr))
        self._writes.append(target._reset_cacher if hasattr(target, "_reset_cacher") else lambda: None)
        return target


_WAYS: Final[dict[type, Callable[[_Plan, Any, Any], Any]]] = {
    list: _Plan._list,
    deque: _Plan._deque,
    dict: _Plan._dict,
    OrderedDict: _Plan._dict,
    defaultdict: _Plan._defaultdict,
    set: _Plan._set,
    bytearray: _Plan._bytearray,
    tuple: _Plan._tuple,
    types.FunctionType: _Plan._function,
    types.MethodType: _Plan._method,
    partial: _Plan._partial,
}


def _can_take_over(old: Any, new: Any) -> bool:
    """Of two of one type, whether the first can become what the second is."""
    match old:
        case deque():
            return bool(old.maxlen == new.maxlen)
        case bytearray():
            return len(old) == len(new) or not _is_looked_at(old)
        case types.FunctionType():
            same = old.__code__ == new.__code__ and old.__globals__ is new.__globals__
            return same and not old.__closure__ and not new.__closure__
        case tuple() | types.MethodType():
            return False
        case _:
            pass
    if type(old) in _WAYS:
        return True
    if is_array(old):
        return same_array(old, new)
    if is_tensor(old):
        return same_tensor(old, new)
    return _is_frame(old) or _has_only_attributes(type(old))


def _same_items(items: list[Any], tuple_: Any) -> bool:
    """Atoms are compared as what they say, anything else as what it is."""
    if len(items) != len(tuple_):
        return False
    return all(
        one is other or (type(one) in ATOMS and type(one) is type(other) and repr(one) == repr(other))
        for one, other in zip(items, tuple_, strict=True)
    )


def _has_only_attributes(kind: type) -> bool:
    """Whether attributes and slots are all there is to an instance: a class written in Python, without a base that has
    contents of its own. However it is pickled, what came is whole, so its attributes can be handed over."""
    if issubclass(kind, type | types.ModuleType):
        return False
    return all(base.__flags__ & (1 << 9) or base is object for base in kind.__mro__)


def _slots_of(kind: type) -> list[Any]:
    """The descriptors of its slots."""
    return [
        found for base in kind.__mro__ for found in vars(base).values() if isinstance(found, types.MemberDescriptorType)
    ]


def _emptied(slot: Any, target: Any) -> None:
    with contextlib.suppress(AttributeError):
        slot.__delete__(target)


def _is_looked_at(memory: bytearray) -> bool:
    """Whether somebody has a view of it; then it keeps its size."""
    try:
        memory.append(0)
    except BufferError:
        return True
    del memory[-1]
    return False


def can_change(value: Any) -> bool:
    """Whether somebody who holds it could see it become another."""
    kind = type(value)
    if kind in (tuple, types.FunctionType, types.MethodType, partial):
        return False
    return kind in _WAYS or is_memory(value) or _is_frame(value) or _has_only_attributes(kind)


def _is_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and type(value) in (pandas.DataFrame, pandas.Series)
