"""Tells that functions, classes and plain objects are unchanged without encoding them.

Most of what a cell reads are functions and classes that no cell has changed since they crossed, and to encode one takes
ten times as long as to look at it. So of every object that a value leads to it is noted what it refers to. While
each still refers to the same objects, nothing has changed: what cannot change is told by its identity, and what can is
looked at itself. Where a value leads to an object of another kind than those below, such as an array, it is encoded.

An object that was changed and changed back, or given something equal, may count as changed.
"""

from __future__ import annotations

import abc
import collections
import copyreg
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import field
from operator import is_
from typing import Any, Final, NamedTuple

from sublet.lazy_dataclass import dataclass
from sublet.notebook.groups import ContainerSnapshot, snapshot
from sublet.notebook.home import HomeRules, Reads, is_at_home, module_of, submodules_used
from sublet.state.checkpoints.object_groups import is_long
from sublet.state.transfer import codec
from sublet.state.transfer.names import MAINS, found_by_name
from sublet.state.transfer.reducers import (
    HEAP_TYPE,
    SINGLE_DISPATCH,
    attributes_of_remembering,
    behind,
    contents_of,
    has_named_objects,
    loaded,
    named_in_library,
)

OBJECTS_MAX: Final = 1_000
"""Objects of a value that are looked at. One that leads to more is encoded: it is mostly data, which C takes apart."""
SURVEY_MAX: Final = 20_000
"""Objects that are looked at at a time."""
TEXT_MAX: Final = 256 * 1024
"""Letters of a text that is held by itself to tell that a name still has it."""
Look = Callable[[Any], Sequence[Any]]
"""What an object refers to, in an order that says what each of it is. Raises if that cannot be told."""

ATOMS: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, type(...), type(NotImplemented)),
        *(types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
        *(types.MethodDescriptorType, types.ClassMethodDescriptorType, re.Pattern, uuid.UUID),
        *(dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone, decimal.Decimal, fractions.Fraction),
        *(pathlib.PurePosixPath, pathlib.PosixPath, type(vars(abc.ABC)["_abc_impl"])),
    }
)
"""Kinds of objects that cannot change and lead to nothing."""
TEXTS: Final = frozenset({str, bytes})
BY_NAME: Final = ("by name",)
"""What the other side finds by its name leads to nothing."""
AT_HOME: Final = "the notebook's own"
"""Stands for the namespace of a function."""


class _UnknownKind(Exception):
    """It cannot be told what an object refers to."""


def _of_function(value: types.FunctionType) -> Sequence[Any]:
    if found_by_name(value):
        return BY_NAME
    if value.__code__ is SINGLE_DISPATCH:
        raise _UnknownKind
    space: Any = AT_HOME if is_at_home(value) else module_of(value)
    if space is None:
        space = value.__globals__
        if types.ModuleType in set(map(type, space.values())):
            raise _UnknownKind
    return (space, *_PARTS_OF_FUNCTION(value), *(value.__closure__ or ()), *submodules_used(value))


_PARTS_OF_FUNCTION: Final = operator.attrgetter(
    *("__code__", "__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__"),
    *("__annotations__", "__dict__"),
)


def _of_class(value: type) -> Sequence[Any]:
    if found_by_name(value):
        return BY_NAME
    if type(value) not in METACLASSES and type(value).__module__ not in MAINS:
        raise _UnknownKind
    space = dict(vars(value))
    space.pop("__slotnames__", None)  # pickle keeps there what it has found out of the class
    registered = [one() for one in abc._get_dump(value)[0]] if "_abc_impl" in space else []  # type: ignore[attr-defined]
    basics = type(value), value.__name__, value.__qualname__, *value.__bases__
    return (*basics, *registered, *space, *space.values())


def _of_module(value: types.ModuleType) -> Sequence[Any]:
    if sys.modules.get(value.__name__) is not value:
        raise _UnknownKind
    return BY_NAME


def _of_dict(value: dict[Any, Any]) -> Sequence[Any]:
    return [*value, *value.values()]


def _of_attributes(value: Any) -> Sequence[Any]:
    return type(value), value.__dict__


def _of_alias(value: Any) -> Sequence[Any]:
    return [getattr(value, name, None) for name in ("__origin__", "__args__", "__supertype__")]


def _of_remembering(value: Any) -> Sequence[Any]:
    attributes = attributes_of_remembering(value)
    return (value.__wrapped__, *attributes, *attributes.values())


def _of_builtin(value: types.BuiltinMethodType) -> Sequence[Any]:
    return () if isinstance(value.__self__, types.ModuleType) else (value.__self__,)


CHANGING: Final[Mapping[type, Look]] = {
    types.FunctionType: _of_function,
    types.CellType: contents_of,
    types.ModuleType: _of_module,
    dict: _of_dict,
    list: list,
    set: list,
    collections.OrderedDict: lambda value: (value.__dict__, *value, *value.values()),
    collections.defaultdict: lambda value: (value.default_factory, *value, *value.values()),
    collections.Counter: lambda value: (value.__dict__, *value, *value.values()),
    collections.deque: lambda value: (value.maxlen, *value),
    collections._tuplegetter: lambda value: (value.__doc__,),  # type: ignore[attr-defined]
    types.SimpleNamespace: _of_attributes,
    property: operator.attrgetter("fget", "fset", "fdel", "__doc__"),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    functools.partial: operator.attrgetter("func", "args", "keywords", "__dict__"),
    functools.cached_property: operator.attrgetter("func", "attrname", "__doc__"),
    functools._lru_cache_wrapper: _of_remembering,
    dataclasses.Field: operator.attrgetter(*dataclasses.Field.__slots__),
    dataclasses._DataclassParams: operator.attrgetter(*dataclasses._DataclassParams.__slots__),  # type: ignore[attr-defined]
}
"""Kinds of objects that can change."""
SETTLED: Final[Mapping[type, Look]] = {
    tuple: tuple,
    frozenset: tuple,
    slice: operator.attrgetter("start", "stop", "step"),
    types.MethodType: operator.attrgetter("__func__", "__self__"),
    types.BuiltinMethodType: _of_builtin,
    types.MappingProxyType: lambda value: (behind(value),),
    types.GenericAlias: operator.attrgetter("__origin__", "__args__"),
    types.UnionType: lambda value: value.__args__,
    typing.TypeVar: operator.attrgetter("__bound__", "__constraints__"),
}
"""Kinds of objects that cannot change, and what they lead to."""
METACLASSES: Final = frozenset({type, abc.ABCMeta, enum.EnumMeta})
_WORD_BYTES: Final = tuple.__itemsize__
_MISSING: Final = object()
"""What an attribute has that is not set."""


class _Kind(NamedTuple):
    """How objects of one class are looked at."""

    look: Look | None
    """None: they lead to nothing."""
    is_settled: bool = False


_KNOWN: Final[Mapping[type, _Kind]] = {
    **{kind: _Kind(None) for kind in ATOMS},
    **{kind: _Kind(look) for kind, look in CHANGING.items()},
    **{kind: _Kind(look, is_settled=True) for kind, look in SETTLED.items()},
}


def _kind_of(kind: type, rules: HomeRules) -> _Kind:
    """Raises ``_UnknownKind`` for a class whose objects may have something that is not seen here."""
    if kind in _KNOWN:
        return _KNOWN[kind]
    if issubclass(kind, type):
        return _Kind(_of_class)
    if kind.__module__ == "typing" and kind is not typing.ForwardRef:
        return _Kind(_of_alias, is_settled=True)
    numpy = loaded("numpy")
    if numpy is not None and issubclass(kind, numpy.number | numpy.bool_):
        return _Kind(None)
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):  # collections.namedtuple
        return _Kind(lambda value: (type(value), *value))
    look = _of_attributes if issubclass(kind, enum.Enum) else _plain_look(kind, rules)
    if not has_named_objects(kind):
        return _Kind(look)
    return _Kind(lambda value: BY_NAME if named_in_library(value) else look(value))


def _plain_look(kind: type, rules: HomeRules) -> Look:
    """Of objects that have nothing but attributes, and that pickle takes apart by itself."""
    own = ("__reduce_ex__", "__reduce__", "__getstate__")
    if (
        any(getattr(kind, name, None) is not getattr(object, name, None) for name in own)
        or any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
        or kind in copyreg.dispatch_table
        or rules.has_rule_for(kind)
    ):
        raise _UnknownKind
    slots = _slots_of(kind)
    words = len(slots) + (kind.__weakrefoffset__ > 0) + (kind.__dictoffset__ > 0)
    if kind.__itemsize__ or kind.__basicsize__ != object.__basicsize__ + words * _WORD_BYTES:
        raise _UnknownKind  # a part of them is in C
    if not slots and kind.__dictoffset__:
        return _of_attributes
    names = (*slots, "__dict__") if kind.__dictoffset__ else slots
    return lambda value: (type(value), *(getattr(value, name, _MISSING) for name in names))


def _slots_of(kind: type) -> tuple[str, ...]:
    """As pickle finds them, which keeps them in the class: one of a library is not written to here."""
    had = "__slotnames__" in vars(kind)
    names: list[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    if not had and "__slotnames__" in vars(kind):
        del kind.__slotnames__  # type: ignore[attr-defined]
    return tuple(names)


@dataclass(slots=True)
class GraphPart:
    """What some names lead to."""

    held: dict[int, Any] = field(default_factory=dict)
    """The objects that can change, by id."""
    reads: Reads = field(default_factory=Reads)


class _Node(NamedTuple):
    """An object, and what it referred to."""

    value: Any
    look: Look
    parts: Sequence[Any]
    """Empty where there is a snapshot."""
    taken: ContainerSnapshot | None = None
    """Of a long container of numbers and texts."""

    def is_same(self) -> bool:
        """Whether it refers to the very same ones."""
        if self.taken is not None:
            return self.taken.is_of(self.value)
        now, before = self.look(self.value), self.parts
        return now is before or (len(now) == len(before) and all(map(is_, now, before)))


def _is_same(node: _Node) -> bool:
    try:
        return node.is_same()
    except Exception:  # noqa: BLE001 - a thread changes it meanwhile, or something of it is gone
        return False


class Graph:
    """The values of names that share objects, as they were."""

    def __init__(self, values: dict[str, Any], nodes: dict[int, _Node]) -> None:
        self.values = values
        self.nodes = nodes
        """Of all objects that can change, by id."""
        self._parts: dict[frozenset[str], GraphPart] = {}

    def is_same(self) -> bool:
        """Whether each of the objects refers to the very same ones."""
        return all(map(_is_same, self.nodes.values()))

    def changed(self, name: str) -> set[int]:
        """Ids of the objects that this name led to and that do not refer to the very same ones any more, or whose
        attributes do not: the dict of these does not cross as an object of its own."""
        nodes = self._followed(frozenset((name,)))[0]
        found = {key for key, node in nodes.items() if not _is_same(node)}
        return found | {key for key, node in nodes.items() if id(getattr(node.value, "__dict__", None)) in found}

    def part(self, names: frozenset[str]) -> GraphPart:
        """What these of its names lead to."""
        if names not in self._parts:
            self._parts[names] = self._part(names)
        return self._parts[names]

    @functools.cached_property
    def reached(self) -> Set[int]:
        """Ids of all objects that the values lead to."""
        return self._followed(frozenset(self.values))[1]

    def _part(self, names: frozenset[str]) -> GraphPart:
        nodes = self.nodes if len(names) == len(self.values) else self._followed(names)[0]
        found = GraphPart()
        for value, _, parts, _ in nodes.values():
            if parts is BY_NAME:
                continue
            found.held[id(value)] = value
            if type(value) is types.FunctionType and parts[0] is AT_HOME:
                found.reads.note_function(value)
            elif isinstance(value, type):
                found.reads.note_class(value)
        return found

    def _followed(self, names: frozenset[str]) -> tuple[dict[int, _Node], set[int]]:
        found: dict[int, _Node] = {}
        seen: set[int] = set()
        waiting: list[Sequence[Any]] = [[self.values[name] for name in names]]
        while waiting:
            level = waiting.pop()
            new = [] if ATOMS.issuperset(map(type, level)) else [one for one in level if id(one) not in seen]
            seen.update(map(id, level))
            for value in new:
                if id(value) in self.nodes:
                    node = found[id(value)] = self.nodes[id(value)]
                    waiting.append(node.parts)
                elif type(value) in SETTLED:
                    waiting.append(SETTLED[type(value)](value))
                elif type(value).__module__ == "typing":
                    waiting.append(_of_alias(value))
        return found, seen


def joined(graphs: Iterable[Graph]) -> Graph:
    """All of these as one."""
    different = {id(one): one for one in graphs}
    if len(different) == 1:
        return next(iter(different.values()))
    values: dict[str, Any] = {}
    nodes: dict[int, _Node] = {}
    for one in different.values():
        values |= one.values
        nodes |= one.nodes
    return Graph(values, nodes)


class _Survey:
    """One look at the values of many names."""

    def __init__(self) -> None:
        self._kinds: dict[type, _Kind | None] = {}
        self._rules = HomeRules()
        self._owner: dict[int, str] = {}
        """Of each object the name that led to it first."""
        self._left = SURVEY_MAX

    def walk(self, name: str, value: Any) -> tuple[dict[int, _Node], set[str]]:
        """What the value leads to that no name before did, and the names that led to the rest."""
        nodes: dict[int, _Node] = {}
        owners: set[str] = set()
        seen: set[int] = set()
        waiting: list[Sequence[Any]] = [(value,)]
        while waiting:
            level = waiting.pop()
            if ATOMS.issuperset(map(type, level)):
                continue
            for one in level:
                key = id(one)
                if type(one) in ATOMS or key in nodes or key in seen:
                    continue
                if key in self._owner:
                    owners.add(self._owner[key])
                    continue
                look, is_settled = self._kind_of(type(one))
                if look is None or (look is _of_class and not one.__flags__ & HEAP_TYPE):
                    continue
                if is_long(one) and is_flat(one):
                    if is_settled:
                        seen.add(key)
                    else:
                        nodes[key] = _Node(one, look, (), snapshot(one))
                    continue
                parts = look(one)
                if is_settled:
                    seen.add(key)
                else:
                    nodes[key] = _Node(one, look, parts)
                    if len(nodes) > min(OBJECTS_MAX, self._left):
                        raise _UnknownKind
                if parts is not BY_NAME:
                    waiting.append(parts)
        self._left -= len(nodes)
        self._owner |= dict.fromkeys((key for key, node in nodes.items() if node.parts is not BY_NAME), name)
        return nodes, owners

    def _kind_of(self, kind: type) -> _Kind:
        if kind not in self._kinds:
            self._kinds[kind] = None
            self._kinds[kind] = _kind_of(kind, self._rules)
        found = self._kinds[kind]
        if found is None:
            raise _UnknownKind
        return found


def is_flat(container: Any) -> bool:
    """Whether a plain container holds nothing but numbers and texts, so that it is one object, however long it is."""
    items = container.values() if type(container) is dict else ()
    return codec.ATOMS.issuperset(map(type, container)) and codec.ATOMS.issuperset(map(type, items))


def graphs_of(values: Mapping[str, Any]) -> dict[str, Graph]:
    """Of those names whose values can be told to be unchanged the graph of each. Names that share objects have one."""
    survey = _Survey()
    found: dict[str, Graph] = {}
    for name, value in values.items():
        if type(value) in TEXTS and len(value) > TEXT_MAX:
            continue
        try:
            nodes, owners = survey.walk(name, value)
        except Exception:  # noqa: BLE001 - of an unknown kind, or one of its own methods fails
            continue
        graph = Graph({name: value}, nodes)
        if owners:
            graph = joined([graph, *(found[owner] for owner in owners)])
        found |= dict.fromkeys(graph.values, graph)
    return found
