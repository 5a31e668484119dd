"""How an object becomes what its copy says: one way for each kind, always through what stands for each part of it.

A way is asked with the target and what came; they are one where it is new here. It names the parts of what came to the
plan (``merging``), which decides what stands for each, leaves with the plan what is to be written once everything is
decided, and answers with what stands for the whole.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from sublet.durable import rebuild
from sublet.durable.codec import ATOMS
from sublet.durable.memory import address_of
from sublet.durable.rules import OWNERS, behind, owner_of
from sublet.notebook.memories import is_settled, move_array

__all__ = [
    "ATOMS",
    "Plan",
    "Way",
    "has_attributes",
    "into_array",
    "into_attributes",
    "into_bytes",
    "into_cell",
    "into_class",
    "into_defaultdict",
    "into_deque",
    "into_dict",
    "into_exception",
    "into_frame",
    "into_function",
    "into_list",
    "into_mapping_proxy",
    "into_memoryview",
    "into_method",
    "into_module",
    "into_partial",
    "into_remembering",
    "into_set",
    "into_taken_apart",
    "into_tensor",
    "into_tuple",
    "is_frame",
    "is_looked_at",
]

FUNCTION_PARTS: Final = ("__code__", "__defaults__", "__kwdefaults__")
CLASS_PARTS: Final = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__slots__"})
EXCEPTION_PARTS: Final = ("args", "__cause__", "__context__", "__suppress_context__")


class Plan(Protocol):
    """Who takes over what."""

    def choose(self, new: Any) -> Any:
        """What is to stand for an object that came. Of a tuple that is being looked through it is not known yet."""

    def stands_for(self, new: Any) -> Any:
        """The same, once everything is chosen."""

    def original(self, new: Any) -> Any:
        """The object here whose copy it is, or None."""

    def travels(self, value: Any) -> bool:
        """Whether it came as an object, not only as somebody's memory."""

    def later(self, write: Callable[[], object]) -> None:
        """To be done when everything is chosen."""


Way = Callable[[Plan, Any, Any], Any]


# ---- containers: the target gets what stands for each item


def _items(plan: Plan, new: Iterable[Any]) -> Callable[[], list[Any]]:
    """What stands for each item, to be asked once everything is planned."""
    items = list(new)
    if ATOMS.issuperset(map(type, items)):
        return lambda: items
    for item in items:
        plan.choose(item)
    return lambda: [plan.stands_for(item) for item in items]


def into_list(plan: Plan, target: Any, new: Any) -> Any:
    items = _items(plan, list.__iter__(new))
    plan.later(lambda: list.__setitem__(target, slice(None), items()))
    return target


def into_deque(plan: Plan, target: Any, new: Any) -> Any:
    items = _items(plan, deque.__iter__(new))

    def write() -> None:
        found = items()
        deque.clear(target)
        deque.extend(target, found)

    plan.later(write)
    return target


def into_dict(plan: Plan, target: Any, new: Any) -> Any:
    kind: Any = OrderedDict if isinstance(new, OrderedDict) else dict
    keys, values = _items(plan, kind.keys(new)), _items(plan, kind.values(new))

    def write() -> None:
        found = dict(zip(keys(), values(), strict=True))
        kind.clear(target)
        if kind is dict:
            dict.update(target, found)
            return
        for key, value in found.items():
            OrderedDict.__setitem__(target, key, value)

    plan.later(write)
    return target


def into_defaultdict(plan: Plan, target: Any, new: Any) -> Any:
    factory = new.default_factory
    plan.choose(factory)
    plan.later(lambda: setattr(target, "default_factory", plan.stands_for(factory)))
    return into_dict(plan, target, new)


def into_set(plan: Plan, target: Any, new: Any) -> Any:
    items = _items(plan, set.__iter__(new))

    def write() -> None:
        found = items()
        set.clear(target)
        set.update(target, found)

    plan.later(write)
    return target


def into_bytes(plan: Plan, target: Any, new: Any) -> Any:
    """A byte array, or one of the array module."""
    if target is not new:
        plan.later(lambda: target.__setitem__(slice(None), new))
    return target


def into_tuple(plan: Plan, target: Any, new: Any) -> Any:
    """It cannot change: it is the original if all that is in it is."""
    kind, core = type(new), frozenset if isinstance(new, frozenset) else tuple
    merged = _items(plan, core.__iter__(new))()
    if kind in ATOMS:
        return new
    old = plan.original(new)
    for same in (old, new):
        if same is not None and type(same) is kind and _same_items(merged, core.__iter__(same), len(same)):
            return same
    if hasattr(kind, "n_sequence_fields"):  # a result with names, of a module written in C
        made, (_, named) = new.__reduce__()
        return made(tuple(merged), {name: plan.choose(value) for name, value in named.items()})
    found: Any = core(merged) if kind is core else core.__new__(kind, merged)
    if hasattr(new, "__dict__"):
        found.__dict__.update(new.__dict__)
    return found


def _same_items(items: list[Any], others: Iterable[Any], count: int) -> bool:
    """Atoms are compared as what they say, anything else as what it is."""
    if len(items) != count:
        return False
    return all(
        one is other or (type(one) in ATOMS and type(one) is type(other) and repr(one) == repr(other))
        for one, other in zip(items, others, strict=True)
    )


# ---- what a program is made of


def into_function(plan: Plan, target: Any, new: Any) -> Any:
    cells = tuple(plan.choose(cell) for cell in new.__closure__ or ())
    if target is new and any(cell is not own for cell, own in zip(cells, new.__closure__ or (), strict=True)):
        target = functools.update_wrapper(
            types.FunctionType(new.__code__, new.__globals__, new.__name__, None, cells), new
        )
        del target.__wrapped__
    for part in FUNCTION_PARTS:
        value = getattr(new, part)
        plan.choose(value)
        plan.later(functools.partial(_set_part, plan, target, part, value))
    return into_attributes(plan, target, new)


def into_cell(plan: Plan, target: Any, new: Any) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        value = new.cell_contents
        plan.choose(value)
        plan.later(functools.partial(_set_part, plan, target, "cell_contents", value))
    return target


def _set_part(plan: Plan, target: Any, part: str, new: Any) -> None:
    value = plan.stands_for(new)
    if getattr(target, part, None) is not value:
        setattr(target, part, value)


def into_method(plan: Plan, target: Any, new: Any) -> Any:
    function, of, old = plan.choose(new.__func__), plan.choose(new.__self__), plan.original(new)
    if type(old) is type(new) and old.__func__ is function and old.__self__ is of:
        return old
    return types.MethodType(function, of)


def into_partial(plan: Plan, target: Any, new: Any) -> Any:
    named = {name: plan.choose(value) for name, value in new.keywords.items()}
    attributes = {name: plan.choose(value) for name, value in new.__dict__.items()}
    state = plan.choose(new.func), tuple(_items(plan, new.args)()), named, attributes
    plan.later(lambda: target.__setstate__(state))
    return target


def into_remembering(plan: Plan, target: Any, new: Any) -> Any:
    """What ``functools.lru_cache`` made. What it remembers stays; where its function is what it was, so is it."""
    old, function = plan.original(new), plan.choose(new.__wrapped__)
    same = type(old) is type(new) and old.__wrapped__ is function and old.cache_parameters() == new.cache_parameters()
    found = old if same else new
    plan.later(functools.partial(_set_part, plan, found, "__wrapped__", new.__wrapped__))
    return found


def into_module(plan: Plan, target: Any, new: Any) -> Any:
    """One that was made by hand. What Python itself keeps in it is everybody's."""
    came = {name: value for name, value in vars(new).items() if name != "__builtins__"}
    for value in came.values():
        plan.choose(value)

    def write() -> None:
        for name in vars(target).keys() - came.keys() - {"__builtins__"}:
            del vars(target)[name]
        vars(target).update({name: plan.stands_for(value) for name, value in came.items()})

    plan.later(write)
    return target


def into_class(plan: Plan, target: Any, new: Any) -> Any:
    """One that was defined in the notebook: what its attributes share with others they go on sharing."""
    for name, value in list(vars(new).items()):
        if name not in CLASS_PARTS:
            plan.choose(value)
            plan.later(functools.partial(_set_class_part, plan, target, name, value))
    return target


def _set_class_part(plan: Plan, target: Any, name: str, new: Any) -> None:
    value = plan.stands_for(new)
    if vars(target).get(name) is not value:
        setattr(target, name, value)


def into_attributes(plan: Plan, target: Any, new: Any) -> Any:
    if hasattr(new, "__dict__"):
        into_dict(plan, target.__dict__, new.__dict__)
    for slot in _slots_of(type(new)):
        _slot(plan, target, new, slot)
    return target


def has_attributes(kind: type) -> bool:
    return bool(kind.__dictoffset__) or bool(_slots_of(kind))


def _slots_of(kind: type) -> list[Any]:
    """The descriptors of its slots."""
    return [
        found
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for found in vars(base).values()
        if isinstance(found, types.MemberDescriptorType)
    ]


def _slot(plan: Plan, target: Any, new: Any, slot: Any) -> None:
    try:
        value = slot.__get__(new)
    except AttributeError:
        if target is not new:
            plan.later(functools.partial(_emptied, slot, target))
        return
    plan.choose(value)
    plan.later(lambda: slot.__set__(target, plan.stands_for(value)))


def _emptied(slot: Any, target: Any) -> None:
    with contextlib.suppress(AttributeError):
        slot.__delete__(target)


def into_exception(plan: Plan, target: Any, new: Any) -> Any:
    """Its traceback stays where it was raised."""
    for part in EXCEPTION_PARTS:
        value = getattr(new, part)
        plan.choose(value)
        plan.later(functools.partial(_set_part, plan, target, part, value))
    return target


def into_mapping_proxy(plan: Plan, target: Any, new: Any) -> Any:
    held = behind(new)
    found, old = plan.choose(held), plan.original(new)
    if old is not None and behind(old) is found:
        return old
    return new if found is held else types.MappingProxyType(found)


def into_memoryview(plan: Plan, target: Any, new: Any) -> Any:
    """One that has an original is a window on what that looks at; a new one on a byte array is one on what that is."""
    if target is not new:
        if not target.readonly:
            plan.later(lambda: target.cast("B").__setitem__(slice(None), new.cast("B")))
        return target
    held = new.obj
    if not plan.travels(held) or plan.choose(held) is held:
        return new
    at = address_of(new) - address_of(memoryview(held))
    return rebuild.memory_view_on(plan.choose(held), at, new.nbytes, new.format, new.shape)


def into_taken_apart(plan: Plan, target: Any, new: Any) -> Any:
    """Of a type that has no way: its parts are those that pickle sees. Where one of them is ours it is made anew."""
    with contextlib.suppress(Exception):  # whatever it is, it came as it is
        reduced = new.__reduce_ex__(4)
        if isinstance(reduced, tuple):
            make, args, state, *_ = (*reduced, None)
            parts = _items(plan, args)()
            old = plan.original(new)
            if type(old) is type(new) and state is None and _same_items(parts, old.__reduce_ex__(4)[1], len(args)):
                return old
            if not _same_items(parts, args, len(args)):
                found = make(*parts)
                if state is not None:
                    found.__setstate__(plan.choose(state))
                return found
    return new


# ---- memory


def into_array(plan: Plan, target: Any, new: Any) -> Any:
    if type(new) is sys.modules["numpy"].memmap:
        return target  # both look at one file
    held = owner_of(new)
    if target is new and type(held) in OWNERS and plan.travels(held) and plan.choose(held) is not held:
        at = new.__array_interface__["data"][0] - address_of(memoryview(held))
        return rebuild.array_on(plan.choose(held), new.dtype, new.shape, new.strides, at)
    if new.dtype.hasobject:
        _objects(plan, target, new)
    elif target is not new and not is_settled(target):
        plan.later(lambda: move_array(target, new))
    return into_attributes(plan, target, new) if type(new) is not sys.modules["numpy"].ndarray else target


def _plain(value: Any) -> Any:
    return value.view(sys.modules["numpy"].ndarray)


def _objects(plan: Plan, target: Any, new: Any) -> None:
    """Of an array of objects: each is what stands for it."""
    if new.dtype.names:
        for name in new.dtype.names:
            field, into = _plain(new)[name], _plain(target)[name]
            if field.dtype.hasobject:
                _objects(plan, into, field)
            elif target is not new:
                plan.later(functools.partial(into.__setitem__, ..., field))
        return
    shape = new.shape
    items = _items(plan, _plain(new).reshape(-1).tolist())

    def write() -> None:
        found = items()
        line = sys.modules["numpy"].empty(len(found), object)
        for n, item in enumerate(found):
            line[n] = item
        _plain(target)[...] = line.reshape(shape)

    plan.later(write)


def into_tensor(plan: Plan, target: Any, new: Any) -> Any:
    if target is new:
        return target
    grad = None if new.grad is None else plan.choose(new.grad)

    def write() -> None:
        with sys.modules["torch"].no_grad():
            target.copy_(new)
        target.grad = grad

    plan.later(write)
    return target


def into_frame(plan: Plan, target: Any, new: Any) -> Any:
    """A frame or series of pandas: its columns are the manager's, and that can be handed over whole."""
    for block in new._mgr.blocks:
        if isinstance(block.values, sys.modules["numpy"].ndarray) and block.values.dtype.hasobject:
            _objects(plan, block.values, block.values)
    if target is not new:
        named = {name: value for name, value in new.__dict__.items() if name in ("_mgr", "_name", "_attrs", "_flags")}
        plan.later(lambda: target.__dict__.update(named))
        plan.later(target._reset_cacher if hasattr(target, "_reset_cacher") else lambda: None)
    return target


def is_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and type(value) in (pandas.DataFrame, pandas.Series)


def is_looked_at(memory: Any) -> bool:
    """Whether somebody has a view of it; then it keeps its size."""
    try:
        memory.append(0)
    except BufferError:
        return True
    del memory[-1]
    return False
