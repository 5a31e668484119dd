"""A picture of a namespace: the values, and which names and attributes lead to the same object or memory."""

from __future__ import annotations

import collections
import copy
import datetime as dt
import decimal
import fractions
import functools
import io
import itertools
import pathlib
import random
import re
import types
import weakref
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

VALUES: Final = (dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, pathlib.PurePath)
ATOMS: Final = (
    *(int, float, complex, bool, str, bytes),
    *(type(None), type(...), type(NotImplemented), range, slice),
    *(*VALUES, dt.datetime, pathlib.PurePosixPath, pathlib.PosixPath),
)
HIDDEN: Final = re.compile(
    r"__(dict|weakref|module|doc|annotations|abstractmethods|builtins|firstlineno|static_attributes|slotnames)__"
    r"|_abc_\w+|cache_parameters"
)
BUILTIN: Final = types.BuiltinFunctionType | types.WrapperDescriptorType | types.MethodDescriptorType
ITERATORS: Final = ("iterator", "zip", "map", "enumerate", "filter", "count", "cycle", "chain", "islice", "reversed")


class Picture:
    """Draws values. What was met before is drawn as its number."""

    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._arrays: list[Any] = []
        self._storages: dict[int, int] = {}

    def of_names(self, names: Iterable[str]) -> dict[str, Any]:
        found = {name: self.draw(self._space[name]) for name in names if name in self._space}
        return {**found, "shared memory": self._shared_memory()}

    def draw(self, value: Any) -> Any:
        if type(value) in ATOMS:
            return type(value).__name__, repr(value)
        if isinstance(value, np.generic):
            return "scalar", str(value.dtype), repr(value.tolist())
        if type(value) in (tuple, frozenset) and not value:
            return type(value).__name__
        if isinstance(value, types.ModuleType | types.CodeType):
            return type(value).__name__
        self._kept.append(value)
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        if isinstance(value, type) and value.__module__ != "__main__":
            return "library", value.__qualname__
        self._numbers[id(value)] = len(self._numbers)
        return self._class(value) if isinstance(value, type) else self._parts(value)

    def _parts(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__.startswith(("pandas", "torch", "numpy")):
            return self._of_library(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        match value:
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return "method", self.draw(value.__func__), self.draw(value.__self__)
            case types.CellType():
                return "cell", [self.draw(one) for one in _contents(value)]
            case property():
                return "property", [self.draw(one) for one in (value.fget, value.fset, value.fdel)]
            case staticmethod() | classmethod():
                return kind.__name__, self.draw(value.__func__)
            case functools.cached_property():
                return "cached property", self.draw(value.func), value.attrname
            case functools.partial():
                return "partial", *map(self.draw, _unfolded(value)), self._items(value.keywords)
            case weakref.ReferenceType():
                return "weak", self.draw(value())
            case random.Random():
                return "random", hash(value.getstate()), self._attributes(value)
            case types.GeneratorType():
                return "generator", value.__name__
            case _:
                pass
        if isinstance(value, BUILTIN):
            of = getattr(value, "__self__", None)
            return "builtin", value.__name__, None if isinstance(of, types.ModuleType) else self.draw(of)
        if kind.__name__.endswith(ITERATORS):
            return "iterator", self._rest(value)
        return self.draw(kind), self._content(value), self._attributes(value)

    def _content(self, value: Any) -> Any:
        match value:
            case dict():
                factory = [self.draw(value.default_factory)] if isinstance(value, collections.defaultdict) else []
                return "dict", self._items(value), *factory
            case list() | tuple():
                return [self.draw(one) for one in value]
            case collections.deque():
                return value.maxlen, [self.draw(one) for one in value]
            case set() | frozenset():
                return "set", [self.draw(one) for one in sorted(value, key=_place)]
            case int() | float() | str() | bytes():
                return "atom", repr(value)
            case dt.date() | dt.time() | dt.timedelta() | decimal.Decimal() | fractions.Fraction() | pathlib.PurePath():
                return "value", repr(value)
            case io.StringIO() | io.BytesIO():
                return "file in memory", value.tell(), value.getvalue()
            case bytearray() | memoryview():
                return bytes(value)
            case types.MappingProxyType():
                return "proxy", self._items(value)
            case BaseException():
                chain = [self.draw(one) for one in (value.__cause__, value.__context__)]
                return "error", self.draw(value.args), chain, value.__suppress_context__
            case _:
                return None

    def _rest(self, value: Any) -> Any:
        try:
            return [self.draw(one) for one in itertools.islice(copy.copy(value), 5)]
        except Exception as error:
            return type(error).__name__

    def _items(self, held: Any) -> Any:
        return [(self.draw(key), self.draw(one)) for key, one in held.items() if not HIDDEN.fullmatch(str(key))]

    def _attributes(self, value: Any) -> Any:
        held = getattr(value, "__dict__", None)
        found = self._items(held) if type(held) is dict else []
        for kind in type(value).__mro__:
            for name, slot in vars(kind).items() if kind.__module__ == "__main__" else ():
                if isinstance(slot, types.MemberDescriptorType):
                    found.append((name, [self.draw(one) for one in _held_in(slot, value)]))
        return found

    def _function(self, value: types.FunctionType) -> Any:
        if value.__module__ != "__main__":
            return "function", value.__module__, value.__name__
        code = value.__code__
        said = value.__qualname__, value.__globals__ is self._space, code.co_code
        constants = [repr(one) for one in code.co_consts if type(one) in ATOMS]
        parts = [self.draw(one) for one in (*(value.__defaults__ or ()), *(value.__closure__ or ()))]
        return "function", said, constants, parts, self._items(value.__kwdefaults__ or {}), self._items(vars(value))

    def _class(self, value: type) -> Any:
        descriptors = types.MemberDescriptorType | types.GetSetDescriptorType
        own = {name: one for name, one in vars(value).items() if not isinstance(one, descriptors)}
        bases = [self.draw(one) for one in (*value.__bases__, type(value))]
        return "class", value.__qualname__, bases, sorted(self._items(own), key=lambda item: str(item[0]))

    # ---- of libraries

    def _of_library(self, value: Any) -> Any:
        kind = type(value).__module__
        if kind.startswith("numpy.random"):
            return self._generator(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if kind.startswith("pandas"):
            return self._pandas(value)
        found = self._torch(value) if kind.startswith("torch") else None
        return (
            (self.draw(type(value)), self._content(value), sorted(self._attributes(value))) if found is None else found
        )

    def _generator(self, value: Any) -> Any:
        if hasattr(value, "bit_generator"):
            return "generator", self.draw(value.bit_generator)
        return type(value).__name__, repr(value.get_state(legacy=False) if hasattr(value, "get_state") else value.state)

    def _array(self, value: Any) -> Any:
        self._arrays.append(value)
        plain = value.view(np.ndarray)
        inside = [self.draw(one) for one in plain.ravel().tolist()] if value.dtype.hasobject else repr(plain.tolist())
        strides = [step for step, size in zip(value.strides, value.shape, strict=True) if size > 1 and value.size]
        said = str(value.dtype), value.shape, strides, value.flags.writeable
        return self.draw(type(value)), said, inside, [] if type(value) is np.ndarray else self._attributes(value)

    def _shared_memory(self) -> Any:
        """Pairs of arrays that overlap, and how far from each other they begin."""
        starts = [one.__array_interface__["data"][0] for one in self._arrays]
        return [
            (m, n, starts[m] - starts[n])
            for m, n in itertools.combinations(range(len(starts)), 2)
            if np.may_share_memory(self._arrays[m], self._arrays[n])
        ]

    def _pandas(self, value: Any) -> Any:
        import pandas as pd

        kind, own = type(value).__name__, self._items({k: v for k, v in _vars(value).items() if not k.startswith("_")})
        if isinstance(value, pd.Index):
            return kind, repr(value)
        if isinstance(value, pd.Series | pd.DataFrame):
            columns = [value] if isinstance(value, pd.Series) else [value.iloc[:, n] for n in range(value.shape[1])]
            inside = [[self.draw(one) for one in column.tolist()] for column in columns]
            kinds = [(str(one.dtype), getattr(one.dtype, "categories", None), one.name) for one in columns]
            return kind, repr(value.index), repr(kinds), inside, self.draw(value.attrs), own
        if hasattr(value, "obj"):
            return kind, self.draw(value.obj), own
        return kind, re.sub("0x[0-9a-f]+", "", repr(value))

    def _torch(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Generator):
            return "generator", value.initial_seed(), value.get_state().tolist()
        if isinstance(value, torch.dtype | torch.device | torch.Size):
            return repr(value)
        if not isinstance(value, torch.Tensor):
            return None
        if value.layout is not torch.strided:
            return type(value).__name__, repr(value)
        memory = value.untyped_storage().data_ptr()
        number = self._storages.setdefault(memory, len(self._storages)) if value.numel() else None
        said = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset(), repr(value.tolist())
        grad = self.draw(value.grad) if value.is_leaf else None
        return type(value).__name__, number, said, value.requires_grad, value.is_leaf, grad, self._items(vars(value))


def _vars(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _held_in(slot: Any, value: Any) -> list[Any]:
    try:
        return [slot.__get__(value)]
    except AttributeError:
        return []


def _unfolded(value: functools.partial[Any]) -> tuple[Any, list[Any]]:
    """Python puts a partial of a partial into one, unless the inner has attributes, or was asked for them."""
    function: Any = value.func
    arguments = value.args
    while isinstance(function, functools.partial) and not function.keywords and not vars(function):
        function, arguments = function.func, function.args + arguments
    return function, list(arguments)


def _place(value: Any) -> str:
    """In a set, whose order depends on addresses."""
    said = re.sub(" at 0x[0-9a-f]+", "", repr(value))
    return f"{type(value).__name__} {getattr(value, 'n', None)} {said}"
