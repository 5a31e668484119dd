"""Makes an object equal to its copy: one way per kind of object.

A way is asked with the target and what came; they are one where it is new here. It names the parts of what came to the
plan (``merging``), which decides what stands for each, gives the plan the operations (``operations``) that are to be
applied once everything is decided, and answers with what stands for the whole.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from sublet.durable import rebuild
from sublet.durable.rebuild import ClassState, attributes_of_member, gone_from
from sublet.notebook.memories import gradient_of, is_settled
from sublet.notebook.operations import (
    ArrayMemory,
    AttributeWrite,
    BufferContents,
    ClassParts,
    DequeContents,
    DictContents,
    DictEntries,
    DrawsOn,
    ImagePixels,
    ListContents,
    ObjectArray,
    Operation,
    PartialState,
    SetContents,
    SlotEmptied,
    TensorMemory,
    is_same_dict,
)
from sublet.notebook.untouchable import is_class_dict, is_own_namespace
from sublet.state.transfer.codec import ATOMS
from sublet.state.transfer.memory import address_of
from sublet.state.transfer.reducers import (
    HEAP_TYPE,
    OWNERS,
    attributes_of_frame,
    attributes_of_remembering,
    behind,
    loaded,
    owner_of,
)

__all__ = [
    "ATOMS",
    "UpdatePlan",
    "Way",
    "has_attributes",
    "into_array",
    "into_attributes",
    "into_bytes",
    "into_cell",
    "into_class",
    "into_class_function",
    "into_defaultdict",
    "into_deque",
    "into_dict",
    "into_exception",
    "into_exception_group",
    "into_exception_in_c",
    "into_frame",
    "into_function",
    "into_list",
    "into_mapping_proxy",
    "into_memoryview",
    "into_method",
    "into_module",
    "into_ordered_dict",
    "into_partial",
    "into_property",
    "into_set",
    "into_tensor",
    "into_tuple",
    "into_weak_reference",
    "is_frame",
    "is_indexer",
    "is_looked_at",
    "slots_of",
    "update_by_reduce",
    "update_lru_cache",
]

_FUNCTION_PARTS: Final = tuple(
    vars(types.FunctionType)[name] for name in ("__code__", "__defaults__", "__kwdefaults__")
)
_ANNOTATIONS: Final = vars(types.FunctionType)["__annotations__"]
_FUNCTION_NAMES: Final = tuple(
    vars(types.FunctionType)[name] for name in ("__name__", "__qualname__", "__module__", "__doc__")
)
_CELL_CONTENTS: Final = vars(types.CellType)["cell_contents"]
_DEFAULT_FACTORY: Final = vars(defaultdict)["default_factory"]
CLASS_PARTS: Final = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__slots__"})
_EXCEPTION_PARTS: Final = tuple(
    vars(BaseException)[name] for name in ("args", "__cause__", "__context__", "__suppress_context__")
)


class UpdatePlan(Protocol):
    """What stands for each object that came, and the writes that follow from it."""

    def choose(self, new: Any) -> Any:
        """What is to stand for an object that came. Of a tuple that is being looked through it is not known yet."""

    def original(self, new: Any) -> Any:
        """The object here whose copy it is, or None."""

    def travels(self, value: Any) -> bool:
        """Whether it came as an object, not only as memory of another one."""

    def claim(self, new: Any, target: Any) -> None:
        """The target stands for this part of an object that came, and for nothing else."""

    def class_state(self, kind: type) -> ClassState | None:
        """What came for a class that was here before; None: the class is new here."""

    def write(self, operation: Operation, *, is_fresh: bool) -> None:
        """To be applied with all others once everything is chosen. ``is_fresh``: its target is what came, not one that
        was here; then it is written to only where something else stands for a part of it. What came may hold objects
        of this very process that were found by name, such as a logger and its handlers: of these no part does."""


Way = Callable[[UpdatePlan, Any, Any], Any]


# ---- containers: the target gets what stands for each item


def into_list(plan: UpdatePlan, target: Any, new: Any) -> Any:
    plan.write(ListContents(target, _chosen(plan, list.__iter__(new))), is_fresh=target is new)
    return target


def into_deque(plan: UpdatePlan, target: Any, new: Any) -> Any:
    plan.write(DequeContents(target, _chosen(plan, deque.__iter__(new))), is_fresh=target is new)
    return target


def into_dict(plan: UpdatePlan, target: Any, new: Any) -> Any:
    kind: Any = OrderedDict if isinstance(new, OrderedDict) else dict
    keys, values = _chosen(plan, kind.keys(new)), _chosen(plan, kind.values(new))
    plan.write(DictContents(target, keys, values), is_fresh=target is new)
    return target


def into_ordered_dict(plan: UpdatePlan, target: Any, new: Any) -> Any:
    into_dict(plan, target, new)
    return into_attributes(plan, target, new) if type(new) is OrderedDict else target


def into_defaultdict(plan: UpdatePlan, target: Any, new: Any) -> Any:
    factory = new.default_factory
    plan.choose(factory)
    plan.write(AttributeWrite(target, _DEFAULT_FACTORY, factory), is_fresh=target is new)
    return into_dict(plan, target, new)


def into_set(plan: UpdatePlan, target: Any, new: Any) -> Any:
    plan.write(SetContents(target, _chosen(plan, set.__iter__(new))), is_fresh=target is new)
    return target


def into_bytes(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """A byte array, or one of the array module."""
    if target is not new:
        plan.write(BufferContents(target, new), is_fresh=target is new)
    return target


def into_tuple(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """It cannot change: it is the original if all that is in it is."""
    kind, core = type(new), frozenset if isinstance(new, frozenset) else tuple
    merged = [plan.choose(item) for item in core.__iter__(new)]
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


def _chosen(plan: UpdatePlan, new: Iterable[Any]) -> list[Any]:
    """The items, each known to the plan."""
    items = list(new)
    if not ATOMS.issuperset(map(type, items)):
        for item in items:
            plan.choose(item)
    return items


def _same_items(items: list[Any], others: Iterable[Any], count: int) -> bool:
    """Atoms are compared as what they say, anything else as what it is."""
    if len(items) != count:
        return False
    return all(
        one is other or (type(one) in ATOMS and type(one) is type(other) and repr(one) == repr(other))
        for one, other in zip(items, others, strict=True)
    )


# ---- what a program is made of


def into_function(plan: UpdatePlan, target: Any, new: Any) -> Any:
    cells = tuple(plan.choose(cell) for cell in new.__closure__ or ())
    if target is new and any(cell is not own for cell, own in zip(cells, new.__closure__ or (), strict=True)):
        target = functools.update_wrapper(
            types.FunctionType(new.__code__, new.__globals__, new.__name__, None, cells), new
        )
        del target.__wrapped__
    for descriptor in _FUNCTION_PARTS:
        value = descriptor.__get__(new)
        plan.choose(value)
        plan.write(AttributeWrite(target, descriptor, value), is_fresh=target is new)
    if new.__annotations__ or (target is not new and target.__annotations__):
        plan.choose(new.__annotations__)
        plan.write(AttributeWrite(target, _ANNOTATIONS, new.__annotations__), is_fresh=target is new)
    for descriptor in _FUNCTION_NAMES if target is not new else ():
        value = descriptor.__get__(new)
        if value != descriptor.__get__(target):
            plan.write(AttributeWrite(target, descriptor, value), is_fresh=False)
    if is_own_namespace(new):
        names = {name: value for name, value in new.__globals__.items() if name != "__builtins__"}
        for value in names.values():
            plan.choose(value)
        plan.write(DictEntries(target.__globals__, names), is_fresh=target is new)
    return into_attributes(plan, target, new)


def into_cell(plan: UpdatePlan, target: Any, new: Any) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        value = new.cell_contents
        plan.choose(value)
        plan.write(AttributeWrite(target, _CELL_CONTENTS, value), is_fresh=target is new)
    return target


def into_method(plan: UpdatePlan, target: Any, new: Any) -> Any:
    function, of, old = plan.choose(new.__func__), plan.choose(new.__self__), plan.original(new)
    if type(old) is type(new) and old.__func__ is function and old.__self__ is of:
        return old
    return types.MethodType(function, of)


def into_class_function(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """A class method or a static method: of what stands for its function."""
    function, old = plan.choose(new.__func__), plan.original(new)
    for same in (old, new):
        if type(same) is type(new) and same.__func__ is function:
            return same
    return type(new)(function)


def into_property(plan: UpdatePlan, target: Any, new: Any) -> Any:
    get, set_, delete = (plan.choose(one) for one in (new.fget, new.fset, new.fdel))
    old = plan.original(new)
    for same in (old, new):
        if (
            type(same) is property
            and same.__doc__ == new.__doc__
            and (same.fget, same.fset, same.fdel) == (get, set_, delete)
        ):
            return same
    return property(get, set_, delete, new.__doc__)


def into_partial(plan: UpdatePlan, target: Any, new: Any) -> Any:
    state = new.func, new.args, dict(new.keywords), dict(new.__dict__)
    _chosen(plan, (new.func, *new.args, *new.keywords.values(), *new.__dict__.values()))
    plan.write(PartialState(target, state), is_fresh=target is new)
    return target


def update_lru_cache(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """What ``functools.lru_cache`` made. What it remembers stays; where its function is what it was, so is it."""
    old, function = plan.original(new), plan.choose(new.__wrapped__)
    same = type(old) is type(new) and old.__wrapped__ is function and old.cache_parameters() == new.cache_parameters()
    found = old if same else new
    attributes = attributes_of_remembering(new)
    _chosen(plan, attributes.values())
    gone = attributes_of_remembering(found).keys() - attributes.keys()
    came = {"__wrapped__": new.__wrapped__, **attributes}
    plan.write(DictEntries(found.__dict__, came, gone, of=found), is_fresh=found is new)
    return found


def into_module(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """One that was made by hand, and is not among Python's modules. What Python itself keeps in it is left alone."""
    came = {name: value for name, value in vars(new).items() if name != "__builtins__"}
    _chosen(plan, came.values())
    plan.write(
        DictEntries(vars(target), came, vars(target).keys() - came.keys() - {"__builtins__"}), is_fresh=target is new
    )
    return target


def into_class(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """One that was defined in the notebook: what its attributes share with others they go on sharing."""
    state = plan.class_state(new)
    parts = {
        name: value
        for name, value in (vars(new) if state is None else state.attributes).items()
        if name not in CLASS_PARTS and not name.startswith("_abc_")
    }
    if state is not None and state.attributes.get("__doc__") != new.__doc__:
        parts["__doc__"] = state.attributes.get("__doc__")
    bases = (None if state is None else state.bases) or new.__bases__
    _chosen(plan, (*parts.values(), *bases, type(new)))
    removed = () if state is None or isinstance(new, enum.EnumMeta) else gone_from(new, state)
    subclasses = () if state is None else state.subclasses
    plan.write(ClassParts(target, parts, removed, subclasses, bases), is_fresh=state is None)
    for name, held in () if state is None else state.members.items():
        member = target._member_map_[name]
        _chosen(plan, held.values())
        gone = attributes_of_member(member).keys() - held.keys()
        plan.write(DictEntries(vars(member), held, gone, of=member), is_fresh=False)
    return target


def into_attributes(plan: UpdatePlan, target: Any, new: Any, slots: list[Any] | None = None) -> Any:
    """``slots``: those of its class, where they are known."""
    held = getattr(new, "__dict__", None)
    if held is not None:
        is_fresh, values, own = target is new, list(held.values()), held if target is new else target.__dict__
        plan.claim(held, own)
        is_plain = ATOMS.issuperset(map(type, values))
        if not is_plain:
            values = _chosen(plan, values)
        if not is_plain or not (is_fresh or is_same_dict(own, held)):
            plan.write(DictContents(own, list(held), values, of=target), is_fresh=is_fresh)
    for slot in slots_of(type(new)) if slots is None else slots:
        _slot(plan, target, new, slot)
    return target


def has_attributes(kind: type) -> bool:
    return bool(kind.__dictoffset__) or bool(slots_of(kind))


def slots_of(kind: type) -> list[Any]:
    """The descriptors of its slots."""
    return [
        found
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for found in vars(base).values()
        if isinstance(found, types.MemberDescriptorType)
    ]


def _slot(plan: UpdatePlan, target: Any, new: Any, slot: Any) -> None:
    try:
        value = slot.__get__(new)
    except AttributeError:
        if target is not new:
            plan.write(SlotEmptied(target, slot), is_fresh=target is new)
        return
    plan.choose(value)
    plan.write(AttributeWrite(target, slot, value), is_fresh=target is new)


def into_exception(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """Its traceback stays where it was raised."""
    for descriptor in _EXCEPTION_PARTS:
        value = descriptor.__get__(new)
        plan.choose(value)
        plan.write(AttributeWrite(target, descriptor, value), is_fresh=target is new)
    return target


def into_exception_in_c(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """One that has more than ``BaseException``, such as the ``value`` of ``StopIteration``."""
    for base in type(new).__mro__[: -len(BaseException.__mro__)]:
        for part in () if base.__flags__ & HEAP_TYPE else vars(base).values():
            if isinstance(part, types.MemberDescriptorType):
                _slot(plan, target, new, part)
    return into_attributes(plan, into_exception(plan, target, new), new)


def into_exception_group(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """It keeps its exceptions in C, and cannot be given others."""
    inner, old = [plan.choose(one) for one in new.exceptions], plan.original(new)
    for same in (old, new):
        if type(same) is type(new) and same.message == new.message and _same_items(inner, same.exceptions, len(inner)):
            target = same
            break
    else:
        target = BaseExceptionGroup.__new__(type(new), new.message, inner)
    return into_attributes(plan, into_exception(plan, target, new), new)


def into_mapping_proxy(plan: UpdatePlan, target: Any, new: Any) -> Any:
    held = behind(new)
    if is_class_dict(held):
        return new
    found, old = plan.choose(held), plan.original(new)
    if old is not None and behind(old) is found:
        return old
    return new if found is held else types.MappingProxyType(found)


def into_memoryview(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """One that has an original is a window on what that looks at; a new one on a byte array is one on what that is."""
    if target is not new:
        if not target.readonly:
            plan.write(BufferContents(target, new), is_fresh=target is new)
        return target
    held = new.obj
    if not plan.travels(held) or plan.choose(held) is held:
        return new
    at = address_of(new) - address_of(memoryview(held))
    return rebuild.memory_view_on(plan.choose(held), at, new.nbytes, new.format, new.shape)


def into_weak_reference(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """To what stands for its object. The object came as well: it is restored before a weak reference to it."""
    referent = new()
    is_known = type(new) in (weakref.ReferenceType, rebuild.HeldReference)
    if referent is None or not is_known or new.__callback__ is not None:
        return new
    found = plan.choose(referent)
    return new if found is referent else weakref.ref(found)


def update_by_reduce(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """Of a type that has no way: its parts are those that pickle sees. Where one of them is ours it is made anew."""
    with contextlib.suppress(Exception):  # whatever it is, it came as it is
        reduced = new.__reduce_ex__(4)
        if isinstance(reduced, tuple):
            make, args, state, *_ = (*reduced, None)
            parts = [plan.choose(part) for part in args]
            old = plan.original(new)
            if type(old) is type(new) and state is None and _same_items(parts, old.__reduce_ex__(4)[1], len(args)):
                return old
            merged = plan.choose(state)
            if not _same_items(parts, args, len(args)) or (type(state) is tuple and merged is not state):
                found = make(*parts)
                if state is not None:
                    found.__setstate__(merged)
                return found
    return new


# ---- memory


def into_array(plan: UpdatePlan, target: Any, new: Any) -> Any:
    if type(new) is sys.modules["numpy"].memmap:
        return target  # both look at one file
    held = owner_of(new)
    if target is new and type(held) in OWNERS and plan.travels(held) and plan.choose(held) is not held:
        at = new.__array_interface__["data"][0] - address_of(memoryview(held))
        return rebuild.array_on(plan.choose(held), new.dtype, new.shape, new.strides, at)
    if new.dtype.hasobject:
        _objects(plan, target, new)
    elif target is not new and not is_settled(target):
        plan.write(ArrayMemory(target, new), is_fresh=target is new)
    return into_attributes(plan, target, new) if type(new) is not sys.modules["numpy"].ndarray else target


def _plain(value: Any) -> Any:
    return value.view(sys.modules["numpy"].ndarray)


def _objects(plan: UpdatePlan, target: Any, new: Any) -> None:
    """Of an array of objects: each is what stands for it."""
    if new.dtype.names:
        for name in new.dtype.names:
            field, into = _plain(new)[name], _plain(target)[name]
            if field.dtype.hasobject:
                _objects(plan, into, field)
            elif target is not new:
                plan.write(ArrayMemory(into, field), is_fresh=target is new)
        return
    plan.write(ObjectArray(target, _chosen(plan, _plain(new).reshape(-1).tolist())), is_fresh=target is new)


def into_tensor(plan: UpdatePlan, target: Any, new: Any) -> Any:
    hooks = rebuild.hooks_of(new)
    for held in hooks:
        if held is not None:
            plan.choose(held)
    if target is not new:
        grad = gradient_of(new)
        if grad is not None:
            plan.choose(grad)
        plan.write(TensorMemory(target, new, grad, hooks), is_fresh=False)
    return into_attributes(plan, target, new)


def into_image(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """An image of Pillow. Where it can keep its memory it does: what draws on it need not have come."""
    if target is not new and _is_same_canvas(target, new):
        plan.claim(new._im, target._im)
        plan.write(ImagePixels(target._im, new._im), is_fresh=False)
    return into_attributes(plan, target, new)


def _is_same_canvas(old: Any, new: Any) -> bool:
    one, other = old._im, new._im
    if type(one) is not type(other) or one is None or old.readonly or not hasattr(one, "paste"):
        return False
    return bool(one.mode == other.mode and one.size == other.size and not one.mode.startswith("P"))


def into_image_draw(plan: UpdatePlan, target: Any, new: Any) -> Any:
    plan.choose(new._image)
    plan.write(DrawsOn(target, new._image), is_fresh=target is new)
    return into_attributes(plan, target, new)


def is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_image_draw(value: Any) -> bool:
    drawing = sys.modules.get("PIL.ImageDraw")
    return drawing is not None and type(value) is drawing.ImageDraw


def into_frame(plan: UpdatePlan, target: Any, new: Any) -> Any:
    """A frame or series of pandas: its columns are the manager's, and that can be handed over whole."""
    for block in new._mgr.blocks:
        if isinstance(block.values, sys.modules["numpy"].ndarray) and block.values.dtype.hasobject:
            _objects(plan, block.values, block.values)
    attributes = attributes_of_frame(new)
    _chosen(plan, attributes.values())
    plan.choose(new.__dict__.get("_attrs"))
    if target is new:
        plan.write(DictEntries(target.__dict__, attributes), is_fresh=True)
        return target
    parts = {name: value for name, value in new.__dict__.items() if name in ("_mgr", "_name", "_attrs", "_flags")}
    gone = attributes_of_frame(target).keys() - attributes.keys()
    plan.write(DictEntries(target.__dict__, {**parts, **attributes}, ("_item_cache", *gone), of=target), is_fresh=False)
    return target


def is_frame(value: Any) -> bool:
    pandas = loaded("pandas")
    return pandas is not None and type(value) in (pandas.DataFrame, pandas.Series)


def is_indexer(value: Any) -> bool:
    """``frame.loc`` and its like, which hold their frame in C."""
    indexing = sys.modules.get("pandas._libs.indexing")
    return indexing is not None and isinstance(value, getattr(indexing, "NDFrameIndexerBase", ()))


def is_looked_at(memory: Any) -> bool:
    """Whether a view of it exists; then it keeps its size."""
    try:
        memory.append(0)
    except BufferError:
        return True
    del memory[-1]
    return False
