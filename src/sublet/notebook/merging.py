"""What came back is written into the objects that were there: whoever else holds one of them sees the change.

A cell on a device works on copies. When they come back the notebook still has the originals, under other names, in
lists, in callbacks. So an original takes over what its copy says as far as its type and shape allow; where they do not,
the copy takes its place, and the caller rebinds every name that had the original, and says so.

The graph of what came back decides: an object that stands in it twice is one object afterwards as well.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

__all__ = ["merge"]

ATOMS: Final = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented)}
)
"""Values that are what they say."""
SAME_IF_EQUAL: Final = frozenset({int, str, bytes})
"""Of these one is as good as another that is equal. Of ``float`` it is not: 0.0 equals -0.0."""
FUNCTION_PARTS: Final = ("__code__", "__defaults__", "__kwdefaults__")
DEPTH_MAX: Final = 150
"""Deeper than this nothing is looked into, and the new object is taken as it is."""


def merge(olds: Mapping[str, Any], news: Mapping[str, Any]) -> dict[str, Any]:
    """What each name stands for from now on: its original, where that could take over; else what came. A name that is
    not in ``olds`` had nothing.

    First everything is planned, then everything is written: whether two arrays may take over depends on both.
    """
    refused: frozenset[int] = frozenset()
    while True:
        plan = _Plan(refused)
        found = {name: plan.choose(olds.get(name), new) for name, new in news.items()}
        crossed = plan.crossed()
        if not crossed:
            break
        refused |= crossed
    plan.write()
    return found


class _Window(NamedTuple):
    """The memory of an array that is to take over, and of the one that came."""

    old: tuple[int, int]
    new: tuple[int, int]
    key: int

    def old_span(self) -> tuple[int, int]:
        return self.old

    def new_span(self) -> tuple[int, int]:
        return self.new


class _Plan:
    """Who takes over what, and how, of values that came together."""

    def __init__(self, refused: frozenset[int]) -> None:
        """``refused``: ids of new objects that must be taken as they are."""
        self._refused = refused
        self._chosen: dict[int, Any] = {}
        """By the id of the new object: what stands for it from now on."""
        self._taken: set[int] = set()
        """Ids of originals that stand for something already: each can stand for one object only."""
        self._writes: list[Callable[[], object]] = []
        self._windows: list[_Window] = []
        self._keep: list[Any] = []
        self._depth = 0

    def choose(self, old: Any, new: Any) -> Any:
        """What is to stand for the new object."""
        if type(new) in ATOMS:
            return old if type(new) in SAME_IF_EQUAL and type(old) is type(new) and old == new else new
        if id(new) in self._chosen:
            return self._chosen[id(new)]
        self._keep += (old, new)
        way = self._way(old, new)
        if way is None:
            self._chosen[id(new)] = new
            self._note_memory(new, new)
            return new
        self._taken.add(id(old))
        self._chosen[id(new)] = old
        self._note_memory(old, new)
        self._depth += 1
        self._chosen[id(new)] = result = way(old, new)
        self._depth -= 1
        return result

    def crossed(self) -> frozenset[int]:
        """Arrays that overlap in what came and not in the same way in the originals, or the other way round: written
        one after the other they would not say what came, so all of them are taken as they are."""
        found: set[int] = set()
        for side in (_Window.old_span, _Window.new_span):
            line = sorted(self._windows, key=side)
            for n, one in enumerate(line):
                for other in line[n + 1 :]:
                    if side(other)[0] >= side(one)[1]:
                        break
                    if other.old[0] - one.old[0] != other.new[0] - one.new[0]:
                        found |= {one.key, other.key}
        return frozenset(found) - self._refused

    def write(self) -> None:
        """Do it."""
        for write in self._writes:
            write()

    def _note_memory(self, old: Any, new: Any) -> None:
        spans = _span_of(old), _span_of(new)
        if spans[0] is not None and spans[1] is not None:
            self._windows.append(_Window(spans[0], spans[1], id(new)))

    def _way(self, old: Any, new: Any) -> Callable[[Any, Any], Any] | None:
        """How this kind of original takes over; None if it cannot."""
        kind = type(new)
        if old is new or type(old) is not kind or id(old) in self._taken or id(new) in self._refused:
            return None
        if self._depth >= DEPTH_MAX:
            return None
        if kind in _WAYS:
            return partial(_WAYS[kind], self)
        if _is_array(new):
            return self._array if _same_array(old, new) else None
        if _is_tensor(new):
            return self._tensor if _same_tensor(old, new) else None
        return self._object if _is_plain(kind) else None

    # ---- containers: the original keeps its identity and gets the new contents, merged one by one ----

    def _items(self, old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
        before = list(old)
        return [self.choose(before[n] if n < len(before) else None, item) for n, item in enumerate(new)]

    def _list(self, old: Any, new: Any) -> Any:
        merged = self._items(old, new)
        self._writes.append(lambda: old.__setitem__(slice(None), merged))
        return old

    def _deque(self, old: Any, new: Any) -> Any:
        if old.maxlen != new.maxlen:
            return new
        merged = self._items(old, new)
        self._writes += (old.clear, lambda: old.extend(merged))
        return old

    def _dict(self, old: Any, new: Any) -> Any:
        merged = {key: self.choose(old.get(key), value) for key, value in new.items()}
        self._writes += (old.clear, lambda: old.update(merged))
        return old

    def _defaultdict(self, old: Any, new: Any) -> Any:
        self._writes.append(lambda: setattr(old, "default_factory", new.default_factory))
        return self._dict(old, new)

    def _set(self, old: Any, new: Any) -> Any:
        kept = {item: item for item in old}
        merged = [kept.get(item, item) for item in new]
        self._writes += (old.clear, lambda: old.update(merged))
        return old

    def _bytearray(self, old: Any, new: Any) -> Any:
        if len(old) != len(new) and _is_looked_at(old):
            return new
        self._writes.append(lambda: old.__setitem__(slice(None), new))
        return old

    def _tuple(self, old: Any, new: Any) -> Any:
        """It cannot change; but it stays the same one if all that is in it does."""
        merged = self._items(old, new)
        if len(old) == len(new) and all(one is other for one, other in zip(merged, old, strict=True)):
            return old
        if all(one is other for one, other in zip(merged, new, strict=True)):
            return new
        made = tuple(merged)
        return made if type(new) is tuple else type(new)(*made)

    def _function(self, old: Any, new: Any) -> Any:
        """The same one, where its text is what it was; else it was defined anew."""
        same = old.__code__ == new.__code__ and old.__globals__ is new.__globals__
        if not same or old.__closure__ or new.__closure__:
            return new
        for part in FUNCTION_PARTS:
            self._writes.append(partial(setattr, old, part, getattr(new, part)))
        self._dict(old.__dict__, new.__dict__)
        return old

    def _object(self, old: Any, new: Any) -> Any:
        """An ordinary instance: its attributes are a dict."""
        self._dict(old.__dict__, new.__dict__)
        return old

    # ---- memory ----

    def _array(self, old: Any, new: Any) -> Any:
        self._writes.append(lambda: old.__setitem__(..., new))
        return old

    def _tensor(self, old: Any, new: Any) -> Any:
        grad = None if new.grad is None else self.choose(old.grad, new.grad)

        def write() -> None:
            with sys.modules["torch"].no_grad():
                old.copy_(new)
            old.grad = grad

        self._writes.append(write)
        return old


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
}


def _is_plain(kind: type) -> bool:
    """Whether ``__dict__`` is all there is to an instance: a class written in Python, pickled in the usual way, that
    has neither slots nor a base with contents of its own."""
    if kind.__dictoffset__ == 0 or issubclass(kind, type | BaseException | types.ModuleType):
        return False
    plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__"))
    own = ("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__setattr__", "__delattr__")
    bare = all(getattr(kind, name, None) is getattr(object, name, None) for name in own)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    contents = any(base.__flags__ & (1 << 9) == 0 and base is not object for base in kind.__mro__)
    return plain and bare and not slots and not contents


def _is_looked_at(memory: bytearray) -> bool:
    """Whether somebody has a view of it; then it keeps its size."""
    try:
        memory.append(0)
    except BufferError:
        return True
    del memory[-1]
    return False


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _span_of(value: Any) -> tuple[int, int] | None:
    """From the first byte of its memory to behind the last; None if it has none of its own."""
    if _is_array(value) and value.size:
        low, high = sys.modules["numpy"].lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    if _is_tensor(value) and value.device.type == "cpu" and value.layout is sys.modules["torch"].strided:
        reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        return (value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size()) if value.numel() else None
    return None


def _same_array(old: Any, new: Any) -> bool:
    alike = old.dtype == new.dtype and old.shape == new.shape and old.strides == new.strides
    # What shows some memory twice (broadcast_to) cannot take over from what does not.
    twice = any(step == 0 and n > 1 for step, n in zip(old.strides, old.shape, strict=True))
    return bool(alike and old.flags.writeable and not twice)


def _same_tensor(old: Any, new: Any) -> bool:
    return bool(
        old.dtype == new.dtype
        and old.shape == new.shape
        and old.layout == new.layout
        and old.stride() == new.stride()
        and old.device == new.device
        and old.is_leaf
        and old.requires_grad == new.requires_grad
    )
