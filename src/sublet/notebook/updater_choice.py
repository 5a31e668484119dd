"""Chooses how a returned object is written (``writing``), and whether an existing one can take its contents."""

from __future__ import annotations

import array
import datetime as dt
import decimal
import functools
import logging
import struct
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from sublet.durable import rebuild
from sublet.errors import SubletError
from sublet.notebook import updaters
from sublet.notebook.memories import is_array, is_given_memory, is_memory, is_tensor, same_array, same_tensor
from sublet.notebook.operations import StateWrite
from sublet.notebook.untouchable import is_own_namespace
from sublet.notebook.updaters import UpdatePlan, Way, is_frame, is_looked_at
from sublet.state.checkpoints.object_groups import is_identity_free
from sublet.state.transfer.codec import encode
from sublet.state.transfer.figures import figure_of, is_part_kind
from sublet.state.transfer.reducers import OWNERS, EncodingRules, has_plain_state, owner_of

APART: Final = frozenset({"builtins", "itertools", "functools", "operator", "collections", "_collections", "array"})
"""Modules of Python whose types, where they have no way of their own, are taken apart and made anew."""
POINTER: Final = struct.calcsize("P")
MANAGED_DICT, MANAGED_WEAKREFS = 1 << 4, 1 << 3
"""Flags of classes whose instances have these before the object, not in it (``Py_TPFLAGS_...``)."""
CLASS: Final[Any] = vars(object)["__class__"]
"""The descriptor through which an object has its class."""


def updater_for(new: Any) -> Way | None:
    """How something like this is gone through; None: it is taken as it is."""
    kind = type(new)
    found = _WAYS.get(kind)
    if found is not None:
        return found
    if is_frame(new):
        return updaters.into_frame
    if isinstance(new, logging.Logger):
        return None  # each process has its own, by its name
    if is_part_kind(kind) and figure_of(new) is not None:
        return None  # figures are put together in their own objects
    if isinstance(new, type):
        return updaters.into_class if new.__module__ == "__main__" else None
    if isinstance(new, types.ModuleType):
        return updaters.into_module if sys.modules.get(new.__name__) is not new else None
    if is_memory(new):
        return updaters.into_array if is_array(new) else updaters.into_tensor
    if updaters.is_image(new):
        return updaters.into_image
    if updaters.is_image_draw(new):
        return updaters.into_image_draw
    if isinstance(new, BaseExceptionGroup):
        return updaters.into_exception_group
    core = builtin_base(kind)
    if core is not None:
        return functools.partial(_as_core, _WAYS.get(core))
    if _by_state(kind) is not None:
        return _stated
    if isinstance(new, BaseException):
        return updaters.into_exception_in_c
    if kind.__module__ in APART or updaters.is_indexer(new):
        return updaters.update_by_reduce
    return updaters.into_attributes if updaters.has_attributes(kind) else None


def ordinary_way(kind: type) -> Way | None:
    """The way of all instances of a class, where it depends on nothing but the class, each of them ``can_wait``, and
    each can take over what another one holds. None: each is to be looked at."""
    if kind in _ALIKE:
        return _WAYS[kind]
    if issubclass(kind, type | types.ModuleType | logging.Logger) or is_part_kind(kind) or kind in _WAYS:
        return None
    if _frees_at_its_end(kind) or any(str(one.__module__).startswith("PIL.") for one in kind.__mro__):
        return None
    core = builtin_base(kind)
    if core is object and _by_state(kind) is None and kind.__module__ not in APART and updaters.has_attributes(kind):
        return functools.partial(updaters.into_attributes, slots=updaters.slots_of(kind))
    return None


def can_become(old: Any, kind: type) -> bool:
    """Whether an object of attributes only can be given the class of its copy, whose class was changed: ``o.__class__ =
    Other``, as PyTorch's lazy layers do."""
    if type(old) is kind:
        return True
    for one in (type(old), kind):
        if ordinary_way(one) is None or updaters.slots_of(one) or hasattr(one, "__del__"):
            return False
    try:
        CLASS.__set__(object.__new__(type(old)), kind)
    except TypeError:  # their instances are laid out differently
        return False
    return True


def can_wait(new: Any) -> bool:
    """Whether what stands for it is known before its parts are looked at. Its parts may then be looked at later, so
    that no chain of objects is too long. Of objects that cannot change, or may have to be made anew, it is not."""
    kind = type(new)
    core = kind if kind in _WAYS else builtin_base(kind)
    if core is not None:
        return core not in _AT_ONCE
    return isinstance(new, type | types.ModuleType) or _by_state(kind) is not None


def can_take_over(plan: UpdatePlan, old: Any, new: Any) -> bool:
    """Of two of one type, whether the first can become what the second is."""
    kind = type(old)
    core = kind if kind in _WAYS else builtin_base(kind)
    if core is None and _by_state(kind) is not None:
        return True
    if _frees_at_its_end(kind):
        return False
    if isinstance(old, types.ModuleType):
        return sys.modules.get(old.__name__) is not old
    if is_part_kind(kind) and figure_of(new) is not None:
        return False
    if core is None:
        return (
            (is_array(old) and same_array(old, new) and _of_one_owner(plan, old, new))
            or (is_tensor(old) and (is_given_memory(old, new) or same_tensor(old, new)))
            or is_frame(old)
        )
    if core is array.array:
        return bool(old.typecode == new.typecode and (len(old) == len(new) or not is_looked_at(old)))
    if core is memoryview:
        alike = old.shape == new.shape and old.format == new.format and old.c_contiguous
        return bool(alike and (not old.readonly or old == new)) and _of_one_owner(plan, old, new)
    if core is deque:
        return bool(old.maxlen == new.maxlen)
    if core is bytearray:
        return len(old) == len(new) or not is_looked_at(old)
    if core is types.FunctionType:
        cells, theirs = old.__closure__ or (), new.__closure__ or ()
        one_namespace = old.__globals__ is new.__globals__ or (is_own_namespace(old) and is_own_namespace(new))
        same = old.__code__ == new.__code__ and one_namespace and len(cells) == len(theirs)
        return same and all(plan.original(one) is cell for one, cell in zip(theirs, cells, strict=True))
    if core in IMMUTABLE:
        return kind is not core and bool(core.__eq__(old, new) is True)  # type: ignore[call-arg]  # not the subclass's
    return core not in MADE_ANEW


def _frees_at_its_end(kind: type) -> bool:
    """Whether instances of a library's class may hold memory that Python knows nothing of, as LightGBM's models do:
    they say themselves how they are pickled, and free something in ``__del__``. Attributes of the copy, written into
    the original, would be freed with the copy."""
    return kind.__module__ != "__main__" and hasattr(kind, "__del__") and not has_plain_state(kind)


def _of_one_owner(plan: UpdatePlan, old: Any, new: Any) -> bool:
    """Where a byte array came whose memory the new one looks at: whether the old one looks at that which was here."""
    owner = owner_of(new)
    return type(owner) not in OWNERS or not plan.travels(owner) or plan.original(owner) is owner_of(old)


def is_as_it_was(old: Any, new: Any, rules: EncodingRules) -> bool:
    """Of two that no code here can look into: whether pickle says the same of both. ``rules``: of the same plan."""
    if type(old) is not type(new) or is_identity_free(new) or type(new) in _WAYS:
        return False
    if is_memory(new) or is_frame(new) or _by_state(type(new)) is not None:
        return False
    if builtin_base(type(new)) is not None and not _frees_at_its_end(type(new)):
        return False
    try:
        one, other = encode(old, rules=rules.anew()), encode(new, rules=rules.anew())
    except SubletError:
        return False
    return one.head == other.head and all(a == b for a, b in zip(one.views, other.views, strict=True))


def can_change(value: Any) -> bool:
    """Whether a holder of it could see it change."""
    kind = type(value)
    if kind in _WAYS:
        return kind not in MADE_ANEW or kind is functools._lru_cache_wrapper  # whose attributes can
    if isinstance(value, type | types.ModuleType):
        return getattr(value, "__module__", "__main__") == "__main__"
    if _by_state(kind) is not None:
        return True
    return is_memory(value) or is_frame(value) or builtin_base(kind) not in (None, *MADE_ANEW)


def builtin_base(kind: type) -> type | None:
    """The type of Python's that an instance has the contents of, beside attributes and slots: ``object`` where these
    are all there is. None where there are others: a class written in C has them, and may look like one in Python, but
    its instances are larger."""
    known = _cores.get(id(kind))
    if known is None or known[0]() is not kind:
        known = _cores[id(kind)] = weakref.ref(kind), _found_core(kind)
    return known[1]


def _found_core(kind: type) -> type | None:
    if issubclass(kind, type | types.ModuleType):
        return None
    core = next(one for one in kind.__mro__ if one in _CORES)
    below = kind.__mro__[: kind.__mro__.index(core)]
    slots = sum(
        isinstance(part, types.MemberDescriptorType)
        for one in below
        if "__slots__" in vars(one)
        for part in vars(one).values()
    )
    own_dict = bool(kind.__dictoffset__) and not core.__dictoffset__ and not kind.__flags__ & MANAGED_DICT
    own_weak = bool(kind.__weakrefoffset__) and not core.__weakrefoffset__ and not kind.__flags__ & MANAGED_WEAKREFS
    room = POINTER * (slots + own_dict + own_weak)
    return core if kind.__basicsize__ - core.__basicsize__ <= room else None


def _as_core(contents: Way | None, plan: UpdatePlan, target: Any, new: Any) -> Any:
    """An instance of a class written in Python: contents, where it has a base with such, and attributes."""
    found = target if contents is None else contents(plan, target, new)
    return updaters.into_attributes(plan, found, new)


def _by_state(kind: type) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """How one of these says what its state is, and how it takes one: written in C, and all of it is in there."""
    for one in kind.__mro__:
        found = _STATED.get(f"{one.__module__}.{one.__qualname__}")
        if found is not None:
            return found
    return None


def _stated(plan: UpdatePlan, target: Any, new: Any) -> Any:
    found = _by_state(type(new))
    if target is not new and found is not None:
        get, set_ = found
        plan.write(StateWrite(target, get, set_, get(new)), is_fresh=target is new)
    return updaters.into_attributes(plan, target, new) if type(new).__module__ == "__main__" else target


_WAYS: Final[dict[type, Way]] = {
    list: updaters.into_list,
    deque: updaters.into_deque,
    dict: updaters.into_dict,
    OrderedDict: updaters.into_ordered_dict,
    defaultdict: updaters.into_defaultdict,
    set: updaters.into_set,
    bytearray: updaters.into_bytes,
    array.array: updaters.into_bytes,
    tuple: updaters.into_tuple,
    frozenset: updaters.into_tuple,
    BaseException: updaters.into_exception,
    types.FunctionType: updaters.into_function,
    types.CellType: updaters.into_cell,
    types.MethodType: updaters.into_method,
    classmethod: updaters.into_class_function,
    staticmethod: updaters.into_class_function,
    property: updaters.into_property,
    types.MappingProxyType: updaters.into_mapping_proxy,
    memoryview: updaters.into_memoryview,
    functools.partial: updaters.into_partial,
    functools._lru_cache_wrapper: updaters.update_lru_cache,
    weakref.ReferenceType: updaters.into_weak_reference,
    rebuild.HeldReference: updaters.into_weak_reference,
}
_STATED: Final[dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]] = {
    "random.Random": (lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    # without the last part, the attributes: what stands in them may have an original here
    "_io.StringIO": (lambda one: (*one.__getstate__()[:3], None), lambda one, state: one.__setstate__(state)),
    "_io.BytesIO": (lambda one: (*one.__getstate__()[:2], None), lambda one, state: one.__setstate__(state)),
    "numpy.random._generator.Generator": (
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    "numpy.random.mtrand.RandomState": (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    "torch._C.Generator": (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
}
MADE_ANEW: Final[frozenset[type]] = frozenset(
    {
        *(tuple, frozenset, types.MethodType, types.MappingProxyType),
        *(classmethod, staticmethod, property, functools._lru_cache_wrapper),
        *(weakref.ReferenceType, rebuild.HeldReference),
    }
)
"""What stands for one of these is the original, or is made."""
_ALIKE: Final = frozenset({list, dict, OrderedDict, defaultdict, set, types.CellType})
_AT_ONCE: Final = MADE_ANEW | {types.FunctionType, memoryview}
IMMUTABLE: Final[frozenset[type]] = frozenset(
    {int, float, complex, str, bytes, decimal.Decimal, dt.date, dt.datetime, dt.time, dt.timedelta}
)
_CORES: Final[frozenset[type]] = frozenset({object, *IMMUTABLE, *_WAYS})
_cores: Final[dict[int, tuple[weakref.ref[type], type | None]]] = {}
"""What was found, by the id of the class: some classes cannot be hashed."""
