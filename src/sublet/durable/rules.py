"""How objects are taken apart that plain pickle cannot take apart, or only by copying their memory.

Asked for every object that is not a number, text or plain container, so that one function of ``__main__`` among a
million plain objects costs what one function costs. Libraries are looked up among those that the program has loaded;
none is imported. What each rule makes is put together again by ``rebuild``.
"""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, ClassVar, Final, Literal

from sublet.durable import rebuild
from sublet.durable.memory import memory_at

__all__ = ["GpuRule", "Refused", "Rules", "found_by_name"]

GpuRule = Literal["copy", "refuse"]
Rule = Callable[[Any], Any]

MAINS: Final = frozenset(("__main__", "__mp_main__"))
"""Modules that another process does not have under that name: what they define travels by value."""
BY_CLOUDPICKLE: Final[tuple[type, ...]] = (
    *(types.ModuleType, types.CodeType, types.CellType, types.MethodType, types.MappingProxyType),
    *(classmethod, staticmethod, property, weakref.WeakSet),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
"""Parts of functions and classes that pickle has no form for and cloudpickle has."""

UNNAMED: Final = frozenset(kind for kind in vars(types).values() if isinstance(kind, type)) - {
    *(type(None), type(...), type(NotImplemented))
}
"""Types of the interpreter that stand in no module under their own name; cloudpickle knows where."""
HEAP_TYPE: Final = 1 << 9
"""The flag of classes that were made while the program ran."""


class Refused(TypeError):
    """A rule says that this object cannot travel; the text says what it is."""


class Rules:
    """The rules of one encoding, with what it has to remember."""

    remembers: ClassVar[bool] = False
    """Whether what was encoded is to say which objects it met (``Encoded.met``)."""

    def __init__(self, *, gpu: GpuRule = "copy", compact: frozenset[int] = frozenset()) -> None:
        self.gpu = gpu
        self.compact = compact
        """Arrays (by id) that see so little of their memory that only that little is copied."""
        self.sparse: dict[int, tuple[int, int]] = {}
        """Address of a window that an array sees with gaps → the array's id, and the bytes that it sees."""
        self.private: set[int] = set()
        """Ids of buffers that share with nobody, even where their addresses overlap."""
        self.keep: list[object] = []
        """What was made for this encoding and must live as long."""
        self._rules: dict[type, Rule | None] = {}
        self._storages: dict[int, Any] = {}
        self._blocks: set[int] = set()
        self._helper: Any = None

    def anew(self, compact: frozenset[int] = frozenset()) -> Rules:
        """The same rules for another encoding."""
        return type(self)(gpu=self.gpu, compact=compact)

    def reduce(self, value: Any) -> Any:
        """What ``reducer_override`` answers."""
        kind = type(value)
        try:
            rule = self._rules[kind]
        except KeyError:
            rule = self._rules[kind] = self._rule_for(kind)
        return NotImplemented if rule is None else rule(value)

    def _rule_for(self, kind: type) -> Rule | None:
        if issubclass(kind, type):
            return self._class
        if kind is types.FunctionType:
            return self._function
        if kind is memoryview:
            return self._memoryview
        if issubclass(kind, BY_CLOUDPICKLE) or kind.__module__ == "typing":
            return self._by_table(kind)
        if (numpy := sys.modules.get("numpy")) is not None and (kind is numpy.ndarray or kind is numpy.memmap):
            return self._array
        if (torch := sys.modules.get("torch")) is not None:
            if kind is torch.storage.TypedStorage:
                return self._typed_storage
            if kind is torch.UntypedStorage:
                return self._storage
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                return self._tensor
        if (internals := sys.modules.get("pandas._libs.internals")) is not None and issubclass(kind, internals.Block):
            return self._pandas_block
        return None

    # ---- functions and classes ----

    def _class(self, value: type) -> Any:
        if found_by_name(value) or (not value.__flags__ & HEAP_TYPE and value not in UNNAMED):
            return NotImplemented  # what is defined in C, pickle finds or refuses
        return self._cloudpickle().reducer_override(value)

    def _function(self, value: types.FunctionType) -> Any:
        return NotImplemented if found_by_name(value) else self._cloudpickle().reducer_override(value)

    def _by_table(self, kind: type) -> Rule | None:
        table = type(self._cloudpickle()).dispatch_table
        found: Rule | None = table.get(kind)
        return found

    def _cloudpickle(self) -> Any:
        """cloudpickle's own pickler, asked how it would take one object apart. It never sees the rest."""
        if self._helper is None:
            cloudpickle = importlib.import_module("cloudpickle")
            self._helper = cloudpickle.Pickler(_Nowhere(), protocol=5)
        return self._helper

    # ---- memory ----

    def _memoryview(self, value: memoryview) -> Any:
        if not value.contiguous or not value.c_contiguous or value.format is None:
            raise Refused("a memoryview with gaps")
        return rebuild.memory_view, (PickleBuffer(value), value.format, value.shape)

    def _array(self, value: Any) -> Any:
        """Every array is a window on memory, so that arrays which overlap still do after loading."""
        dtype = value.dtype
        if dtype.hasobject or not value.size or not dtype.itemsize:
            return NotImplemented
        flags = value.flags
        if flags.c_contiguous:
            flat, strides, offset = value.reshape(-1).view("u1"), None, 0
        elif flags.f_contiguous:
            flat, strides, offset = value.T.reshape(-1).view("u1"), value.strides, 0
        elif id(value) in self.compact:
            copy = value.copy()
            return rebuild.array, (PickleBuffer(copy.reshape(-1).view("u1")), dtype, value.shape, None, 0)
        else:
            flat, offset = self._span(value)
            strides = value.strides
        return rebuild.array, (PickleBuffer(flat), dtype, value.shape, strides, offset)

    def _span(self, value: Any) -> tuple[memoryview, int]:
        """All memory between an array's first and last byte, and where in it the array's own first element lies."""
        steps = [(n - 1) * step for n, step in zip(value.shape, value.strides, strict=True)]
        below = -sum(step for step in steps if step < 0)
        length = below + sum(step for step in steps if step > 0) + value.itemsize
        address = value.__array_interface__["data"][0] - below
        if value.nbytes * 2 <= length:
            self.sparse[address] = (id(value), value.nbytes)
        view = memory_at(address, length)
        self.keep.append(value)
        return (view if value.flags.writeable else view.toreadonly()), below

    # ---- PyTorch ----

    def _tensor(self, value: Any) -> Any:
        """As PyTorch does it, and with the gradient, which it leaves behind."""
        reduced = value.__reduce_ex__(5)
        if len(reduced) != 2 or not value.is_leaf or value.grad is None:
            return reduced
        return (*reduced, value.grad, None, None, rebuild.set_grad)

    def _typed_storage(self, value: Any) -> Any:
        return rebuild.torch_typed_storage, (value._untyped_storage, value.dtype)

    def _storage(self, value: Any) -> Any:
        first = self._storages.setdefault(value._cdata, value)
        if first is not value:
            return rebuild.itself, (first,)
        device = str(value.device)
        if value.device.type != "cpu":
            if self.gpu == "refuse":
                raise Refused(f"memory on {device}")
            value = value.cpu()
            self.keep.append(value)
        length = value.nbytes()
        view = memory_at(value.data_ptr(), length) if length else memoryview(b"")
        return rebuild.torch_storage, (PickleBuffer(view), device)

    # ---- pandas ----

    def _pandas_block(self, value: Any) -> Any:
        """The values of a frame, apart from every other frame's.

        pandas lets frames share memory until one of them is written to, and remembers it in the process. A pickle
        forgets, so frames that were put together again on shared memory would change each other.
        """
        maker, (values, *rest) = value.__reduce__()
        numpy = sys.modules["numpy"]
        seen = id(values) in self._blocks
        self._blocks.add(id(values))
        if type(values) is not numpy.ndarray:
            return maker, (values.copy() if seen else values, *rest)
        own = values.copy() if values.dtype.hasobject and seen else values.view()
        self.keep.append(own)
        reduced = self._array(own)
        if reduced is NotImplemented:
            return maker, (own, *rest)
        buffer = reduced[1][0]
        self.private.add(id(buffer))
        self.keep.append(buffer)
        return maker, (_Made(reduced), *rest)


class _Made:
    """Stands for an object that was taken apart already."""

    __slots__ = ("_reduced",)

    def __init__(self, reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def found_by_name(value: Any) -> bool:
    """Whether another process finds this very function or class under its module and name."""
    name = getattr(value, "__module__", None)
    if name is None or name in MAINS or _registered_by_value(name):
        return False
    found: Any = sys.modules.get(name)
    try:
        for part in value.__qualname__.split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return found is value


def _registered_by_value(module: str) -> bool:
    """The program has asked cloudpickle to send this module's functions by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle is not None and module in cloudpickle.list_registry_pickle_by_value()
