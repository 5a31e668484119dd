"""The writes of one transfer, as data: checked together before the first is made, undone together on failure.

An operation never calls a method that a class overrides: contents are written through the built-in type's own functions
and descriptors, so no ``__setattr__`` or ``__setitem__`` of the program runs. Only ``__hash__`` and ``__eq__`` of keys
do, as in any dict.
"""

from __future__ import annotations

import array
import contextlib
import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Final, Protocol

from sublet.durable import rebuild
from sublet.errors import Unpicklable
from sublet.notebook.memories import gradient_of, is_given_memory, move_array, same_values
from sublet.notebook.untouchable import Untouchable
from sublet.state.transfer.codec import ATOMS
from sublet.state.transfer.figures import Assembly

StandsFor = Callable[[Any], Any]
OBJECTS, KEYED, MEMORY, GRADED = PHASES = range(4)
"""Phases. Attributes come before dicts and sets, whose keys may be hashed by them; memory comes last: it is checked
before and cannot fail, and so needs no copy for undoing. Of tensors, those with a gradient come after their gradients,
which must be of their type and shape by then; they are undone after them as well."""
MISSING: Final = object()
FEW: Final = 100
_VALUES: Final = frozenset({bool, int, float, complex, str, bytes})
_PARTIAL: Final[Any] = functools.partial


class _Write:
    """What all operations have."""

    __slots__ = ("is_fresh",)
    is_fresh: bool
    target: Any

    @property
    def written(self) -> Any:
        """The object that is another now, as far as that is known; None: it was so already."""
        return self.target


class Operation(Protocol):
    """One write."""

    target: Any
    phase: int
    is_fresh: bool
    """The target is not one that was here before, and its parts are those that are given."""

    def resolve(self, stands_for: StandsFor) -> bool:
        """Everything is planned: look up what stands for each value. False: each stands for itself."""

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` if it cannot be applied. Changes nothing."""

    def apply(self) -> None:
        """Write, and keep what was there."""

    def undo(self) -> None:
        """Write that back."""

    @property
    def written(self) -> Any:
        """Once it is applied: the object that is another now. None: it was so already."""


def apply(planned: Sequence[Operation], untouchable: Untouchable, stands_for: StandsFor) -> set[int]:
    """Check all operations, then make them all. An error leaves every object as it was (``Unpicklable``). Answers with
    the ids of objects that were here and are others now."""
    operations = [one for one in planned if one.resolve(stands_for) or not one.is_fresh]
    for one in operations:
        if untouchable.has(one.target):
            raise _refused(one, "it belongs to Python, to a library or to the shell")
        try:
            one.check()
        except (TypeError, ValueError) as error:
            raise _refused(one, str(error)) from error
    done: list[Operation] = []
    for phase in PHASES:
        for one in reversed(operations):  # parts were planned after what holds them, and are written before it
            if one.phase != phase:
                continue
            done.append(one)
            try:
                one.apply()
            except BaseException as error:
                done.sort(key=lambda one: one.phase != GRADED)  # so they are undone last
                for made in reversed(done):
                    made.undo()
                if not isinstance(error, Exception):
                    raise
                raise _refused(one, f"{type(error).__name__}: {error}") from error
    return {id(found) for one in done if not one.is_fresh and (found := one.written) is not None}


def _refused(one: Operation, why: str) -> Unpicklable:
    kind = type(one.target)
    what = f"{'an' if kind.__name__[:1].lower() in 'aeiou' else 'a'} {kind.__name__}"
    return Unpicklable(f"{what} could not take the new contents: {why}", what=f"{what} that cannot change ({why})")


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether nothing is to be written: each is the same object, or, where few have to be compared, an equal number or
    text."""
    if len(one) != len(other):
        return False
    if len(one) > FEW:
        return all(map(is_, one, other))
    return all(map(_same_value, one, other))


def _same_value(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _VALUES and repr(one) == repr(other))


def is_same_dict(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts of atoms say the same in the same order."""
    return _same(list(one), list(other)) and _same(list(one.values()), list(other.values()))


def _parts_of(state: tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]) -> list[Any]:
    function, arguments, named, attributes = state
    return [function, *arguments, *named.values(), *attributes.values()]


def _hashable(keys: Iterable[Any]) -> None:
    for kind in set(map(type, keys)):
        if kind.__hash__ is None:
            raise TypeError(f"a {kind.__qualname__} cannot be a key")


def _resolved(items: list[Any], stands_for: StandsFor) -> list[Any]:
    return items if ATOMS.issuperset(map(type, items)) else list(map(stands_for, items))


class FigureContents(_Write):
    """All figures of a transfer, which their own classes put together."""

    phase = KEYED
    __slots__ = ("target",)

    def __init__(self, target: Assembly) -> None:
        self.target = target

    def resolve(self, stands_for: StandsFor) -> bool:
        for beside in self.target.beside:
            beside[:] = map(stands_for, beside)
        return True

    def check(self) -> None:
        """Nothing is known before they are loaded."""

    def apply(self) -> None:
        self.target.finish()

    def undo(self) -> None:
        self.target.undo()


class _Items(_Write):
    """All items of a container."""

    phase = OBJECTS
    __slots__ = ("_before", "items", "target")

    def __init__(self, target: Any, items: list[Any]) -> None:
        self.target, self.items = target, items
        self._before: Collection[Any] | None = None

    def resolve(self, stands_for: StandsFor) -> bool:
        came, self.items = self.items, _resolved(self.items, stands_for)
        return not _same(came, self.items)

    @property
    def written(self) -> Any:
        return None if self._before is None else self.target

    def undo(self) -> None:
        if self._before is not None:
            self._write(self._before)

    def _write(self, items: Collection[Any]) -> None:
        raise NotImplementedError


class ListContents(_Items):
    """All items of a list."""

    __slots__ = ()

    def check(self) -> None:
        list.__len__(self.target)

    def apply(self) -> None:
        current = list.copy(self.target)
        if not _same(current, self.items):
            self._before = current
            self._write(self.items)

    def _write(self, items: Collection[Any]) -> None:
        list.__setitem__(self.target, slice(None), items)


class DequeContents(_Items):
    """All items of a deque."""

    __slots__ = ()

    def check(self) -> None:
        deque.__len__(self.target)

    def apply(self) -> None:
        before = list(deque.__iter__(self.target))
        if not _same(before, self.items):
            self._before = before
            self._write(self.items)

    def _write(self, items: Collection[Any]) -> None:
        deque.clear(self.target)
        deque.extend(self.target, items)


class DictContents(_Write):
    """All items of a dict, in their order."""

    __slots__ = ("_before", "_core", "_of", "keys", "phase", "target", "values")

    def __init__(self, target: Any, keys: list[Any], values: list[Any], *, of: Any = None) -> None:
        """``of``: the object whose attributes they are; then its keys are names, so nothing has to be hashed by
        contents."""
        self.target, self.keys, self.values, self._of = target, keys, values, of
        self.phase = KEYED if of is None else OBJECTS
        self._core: Any = OrderedDict if isinstance(target, OrderedDict) else dict
        self._before: dict[Any, Any] | None = None

    def resolve(self, stands_for: StandsFor) -> bool:
        came = self.keys, self.values
        self.keys, self.values = (_resolved(items, stands_for) for items in came)
        return not (_same(came[0], self.keys) and _same(came[1], self.values))

    def check(self) -> None:
        dict.__len__(self.target)
        _hashable(self.keys)

    def apply(self) -> None:
        keys, values = list(self._core.keys(self.target)), list(self._core.values(self.target))
        if _same(keys, self.keys) and _same(values, self.values):
            return
        found = dict(zip(self.keys, self.values, strict=True))  # hashes keys, which may fail: nothing is written yet
        self._before = dict.copy(self.target) if self._core is dict else dict(zip(keys, values, strict=True))
        if self._core is dict and _same(keys, list(found)):
            dict.update(self.target, found)  # as it stands, so that instances of a class go on sharing their keys
            return
        self._write(found)

    @property
    def written(self) -> Any:
        return None if self._before is None else self.target if self._of is None else self._of

    def undo(self) -> None:
        if self._before is not None:
            self._write(self._before)

    def _write(self, found: dict[Any, Any]) -> None:
        self._core.clear(self.target)
        if self._core is dict:
            dict.update(self.target, found)
            return
        for key, value in found.items():
            OrderedDict.__setitem__(self.target, key, value)


class DictEntries(_Write):
    """Some entries of a dict whose keys are names; the others are left alone."""

    phase = OBJECTS
    __slots__ = ("_before", "_of", "_removed", "entries", "target")

    def __init__(self, target: Any, entries: Mapping[str, Any], removed: Iterable[str] = (), *, of: Any = None) -> None:
        """``of``: the object whose attributes they are."""
        self.target, self.entries, self._removed, self._of = target, dict(entries), list(removed), of
        self._before: dict[str, Any] | None = None

    def resolve(self, stands_for: StandsFor) -> bool:
        came = self.entries
        self.entries = {name: stands_for(value) for name, value in came.items()}
        return not _same(list(came.values()), list(self.entries.values()))

    def check(self) -> None:
        dict.__len__(self.target)

    def apply(self) -> None:
        self._before = dict.copy(self.target)
        for name in self._removed:
            dict.pop(self.target, name, None)
        for name, value in self.entries.items():
            if not _same_value(self._before.get(name, MISSING), value):
                dict.__setitem__(self.target, name, value)

    @property
    def written(self) -> Any:
        before = self._before
        if before is None or (dict.keys(self.target) == before.keys() and is_same_dict(self.target, before)):
            return None
        return self.target if self._of is None else self._of

    def undo(self) -> None:
        if self._before is not None:
            dict.clear(self.target)
            dict.update(self.target, self._before)


class SetContents(_Items):
    """All elements of a set."""

    phase = KEYED
    __slots__ = ()

    def check(self) -> None:
        set.__len__(self.target)
        _hashable(self.items)

    def apply(self) -> None:
        if _same(list(set.__iter__(self.target)), self.items):
            return
        found = set(self.items)
        self._before = set(set.copy(self.target))
        self._write(found)

    def _write(self, items: Collection[Any]) -> None:
        set.clear(self.target)
        set.update(self.target, items)


class BufferContents(_Write):
    """All bytes of a byte array, of one of the array module, or of a memoryview."""

    phase = OBJECTS
    __slots__ = ("_before", "target", "value")

    def __init__(self, target: Any, value: Any) -> None:
        self.target, self.value = target, value
        self._before: Any = None

    def resolve(self, stands_for: StandsFor) -> bool:
        return False

    def check(self) -> None:
        view = self.target if isinstance(self.target, memoryview) else None
        if view is not None and (view.readonly or view.nbytes != self.value.nbytes):
            raise ValueError("its memory is read-only or has another size")

    def apply(self) -> None:
        if isinstance(self.target, memoryview):
            self._before = bytes(self.target)
            self.target.cast("B")[:] = self.value.cast("B")
            return
        self._before = self.target[:]
        self._core().__setitem__(self.target, slice(None), self.value)

    def undo(self) -> None:
        if self._before is None:
            return
        if isinstance(self.target, memoryview):
            self.target.cast("B")[:] = self._before
            return
        self._core().__setitem__(self.target, slice(None), self._before)

    def _core(self) -> Any:
        return bytearray if isinstance(self.target, bytearray) else array.array


class AttributeWrite(_Write):
    """One attribute that a descriptor of the type holds: of a function, a cell, an exception, a slot."""

    phase = OBJECTS
    __slots__ = ("_before", "_descriptor", "_is_done", "target", "value")

    def __init__(self, target: Any, descriptor: Any, value: Any) -> None:
        self.target, self._descriptor, self.value = target, descriptor, value
        self._before: Any = MISSING
        self._is_done = False

    def resolve(self, stands_for: StandsFor) -> bool:
        came, self.value = self.value, stands_for(self.value)
        return self.value is not came

    def check(self) -> None:
        of = self._descriptor.__objclass__
        if not isinstance(self.target, of):
            raise TypeError(f"it is no {of.__qualname__}")

    def apply(self) -> None:
        with contextlib.suppress(AttributeError, ValueError):  # it has none
            self._before = self._descriptor.__get__(self.target)
        if self._before is not self.value:
            self._is_done = True
            self._descriptor.__set__(self.target, self.value)

    @property
    def written(self) -> Any:
        return self.target if self._is_done else None

    def undo(self) -> None:
        if not self._is_done:
            return
        with contextlib.suppress(AttributeError):
            if self._before is MISSING:
                self._descriptor.__delete__(self.target)
            else:
                self._descriptor.__set__(self.target, self._before)


class SlotEmptied(_Write):
    """A slot that has no value any more."""

    phase = OBJECTS
    __slots__ = ("_before", "_slot", "target")

    def __init__(self, target: Any, slot: Any) -> None:
        self.target, self._slot = target, slot
        self._before: Any = MISSING

    def resolve(self, stands_for: StandsFor) -> bool:
        return False

    def check(self) -> None:
        if not isinstance(self.target, self._slot.__objclass__):
            raise TypeError("it has no such slot")

    def apply(self) -> None:
        with contextlib.suppress(AttributeError):
            self._before = self._slot.__get__(self.target)
            self._slot.__delete__(self.target)

    def undo(self) -> None:
        if self._before is not MISSING:
            self._slot.__set__(self.target, self._before)


_BASES: Final[Any] = vars(type)["__bases__"]


class ClassParts(_Write):
    """Attributes of a class of the notebook. Its metaclass is not asked."""

    phase = OBJECTS
    __slots__ = ("_bases", "_bases_before", "_before", "_removed", "parts", "subclasses", "target")

    def __init__(
        self,
        target: type,
        parts: Mapping[str, Any],
        removed: Iterable[str],
        subclasses: Iterable[type],
        bases: tuple[type, ...],
    ) -> None:
        """``subclasses``: those that an abstract class knows by registration."""
        self.target, self.parts, self._removed = target, dict(parts), list(removed)
        self.subclasses = list(subclasses)
        self._bases, self._bases_before = bases, target.__bases__
        self._before: dict[str, Any] = {}

    def resolve(self, stands_for: StandsFor) -> bool:
        came = self.parts
        self.parts = {name: stands_for(value) for name, value in came.items()}
        return not _same(list(came.values()), list(self.parts.values()))

    def check(self) -> None:
        if self.target.__module__ != "__main__":
            raise TypeError("it is no class of the notebook")

    def apply(self) -> None:
        if self._bases != self._bases_before:
            _BASES.__set__(self.target, self._bases)
        for name in self._removed:
            if name in vars(self.target):
                self._before[name] = vars(self.target)[name]
                type.__delattr__(self.target, name)
        for name, value in self.parts.items():
            before = vars(self.target).get(name, MISSING)
            if not _same_value(before, value):
                self._before[name] = before
                type.__setattr__(self.target, name, value)
        if sys.version_info >= (3, 13) and "__firstlineno__" in self.parts:  # another attribute's change deletes it
            type.__setattr__(self.target, "__firstlineno__", self.parts["__firstlineno__"])
        for one in self.subclasses:
            self.target.register(one)

    @property
    def written(self) -> Any:
        return self.target if self._before or self.subclasses or self._bases != self._bases_before else None

    def undo(self) -> None:
        if self._bases != self._bases_before:
            _BASES.__set__(self.target, self._bases_before)
        for name, value in self._before.items():
            if value is not MISSING:
                type.__setattr__(self.target, name, value)
            elif name in vars(self.target):
                type.__delattr__(self.target, name)


class PartialState(_Write):
    """Function and arguments of a ``functools.partial``."""

    phase = OBJECTS
    __slots__ = ("_before", "state", "target")

    def __init__(self, target: Any, state: tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]) -> None:
        self.target, self.state = target, state
        self._before: Any = None

    def resolve(self, stands_for: StandsFor) -> bool:
        came = function, arguments, named, attributes = self.state
        self.state = (
            stands_for(function),
            tuple(map(stands_for, arguments)),
            {name: stands_for(value) for name, value in named.items()},
            {name: stands_for(value) for name, value in attributes.items()},
        )
        return not _same(_parts_of(came), _parts_of(self.state))

    def check(self) -> None:
        if not callable(self.state[0]):
            raise TypeError("what it calls is no function")

    def apply(self) -> None:
        self._before = _PARTIAL.__reduce__(self.target)[2]
        _PARTIAL.__setstate__(self.target, self.state)

    def undo(self) -> None:
        if self._before is not None:
            _PARTIAL.__setstate__(self.target, self._before)


class StateWrite(_Write):
    """All of an object that is written in C and says what its state is."""

    phase = OBJECTS
    __slots__ = ("_before", "_get", "_set", "state", "target")

    def __init__(self, target: Any, get: Callable[[Any], Any], set_: Callable[[Any, Any], Any], state: Any) -> None:
        self.target, self._get, self._set, self.state = target, get, set_, state
        self._before: Any = MISSING

    def resolve(self, stands_for: StandsFor) -> bool:
        return False

    def check(self) -> None:
        return

    def apply(self) -> None:
        self._before = self._get(self.target)
        self._set(self.target, self.state)

    def undo(self) -> None:
        if self._before is not MISSING:
            self._set(self.target, self._before)


class ObjectArray(_Write):
    """All elements of an array of objects."""

    phase = OBJECTS
    __slots__ = ("_before", "_of", "items", "target")

    def __init__(self, of: Any, items: list[Any]) -> None:
        self.target, self.items, self._of = of.view(sys.modules["numpy"].ndarray), items, of
        self._before: Any = None

    def resolve(self, stands_for: StandsFor) -> bool:
        came, self.items = self.items, _resolved(self.items, stands_for)
        return not _same(came, self.items)

    def check(self) -> None:
        if self.target.size != len(self.items):
            raise ValueError("it has another number of elements")

    def apply(self) -> None:
        current = self.target.reshape(-1).tolist()
        if _same(current, self.items):
            return
        if not self.target.flags.writeable:
            raise ValueError("it is read-only")
        self._before = current
        self._write(self.items)

    @property
    def written(self) -> Any:
        return None if self._before is None else self._of

    def undo(self) -> None:
        if self._before is not None:
            self._write(self._before)

    def _write(self, items: list[Any]) -> None:
        line = sys.modules["numpy"].empty(len(items), object)
        for n, item in enumerate(items):
            line[n] = item
        self.target[...] = line.reshape(self.target.shape)


class ArrayMemory(_Write):
    """All numbers of an array, and whether it can be written."""

    phase = MEMORY
    __slots__ = ("new", "target")

    def __init__(self, target: Any, new: Any) -> None:
        self.target, self.new = target, new

    def resolve(self, stands_for: StandsFor) -> bool:
        return False

    def check(self) -> None:
        if not self.target.flags.writeable:
            raise ValueError("it is read-only")
        if self.target.dtype != self.new.dtype or self.target.shape != self.new.shape:
            raise ValueError("it has another type or shape")

    def apply(self) -> None:
        move_array(self.target, self.new)
        if not self.new.flags.writeable:
            self.target.flags.writeable = False

    def undo(self) -> None:
        return  # it comes last, and what can be wrong with it was looked for


class ImagePixels(_Write):
    """All pixels of an image of Pillow, in the memory that what draws on it looks at."""

    phase = MEMORY
    __slots__ = ("_new", "target")

    def __init__(self, target: Any, new: Any) -> None:
        """The memory of each, of one mode and size."""
        self.target, self._new = target, new

    def resolve(self, stands_for: StandsFor) -> bool:
        return True

    def check(self) -> None:
        return

    def apply(self) -> None:
        self.target.paste(self._new, (0, 0, *self._new.size))

    def undo(self) -> None:
        return  # it comes last, and cannot fail


class DrawsOn(_Write):
    """The image that something draws on, which may have memory of its own here."""

    phase = MEMORY
    __slots__ = ("_image", "target")

    def __init__(self, target: Any, image: Any) -> None:
        self.target, self._image = target, image

    def resolve(self, stands_for: StandsFor) -> bool:
        came, self._image = self._image, stands_for(self._image)
        return self._image is not came

    def check(self) -> None:
        return

    def apply(self) -> None:
        target, image = self.target, self._image
        blends = image.mode != target.mode
        target.im, target.draw = image.im, sys.modules["PIL.Image"].core.draw(image.im, int(blends))

    def undo(self) -> None:
        return  # its attributes are written back as a whole


class TensorMemory(_Write):
    """All numbers of a tensor, its gradient and its hooks."""

    __slots__ = ("_data", "_grad", "_hooks", "_requires_grad", "grad", "hooks", "new", "phase", "target")

    def __init__(self, target: Any, new: Any, grad: Any, hooks: tuple[Any, ...]) -> None:
        self.target, self.new, self.grad, self.hooks = target, new, grad, hooks
        self.phase = MEMORY if grad is None and gradient_of(target) is None else GRADED
        self._grad: Any = MISSING
        self._hooks = tuple((held, dict(held)) if held else None for held in rebuild.hooks_of(target))
        self._requires_grad = target.requires_grad
        self._data = target.data if is_given_memory(target, new) else None
        """What it had, if it is given other memory."""

    def resolve(self, stands_for: StandsFor) -> bool:
        came, self.grad = self.grad, stands_for(self.grad)
        hooks, self.hooks = self.hooks, tuple(map(stands_for, self.hooks))
        return self.grad is not came or any(one is not other for one, other in zip(hooks, self.hooks, strict=True))

    def check(self) -> None:
        torch = sys.modules["torch"]
        if self._data is None and self.target.dim() and self.target.layout is torch.strided:
            with self._writing():
                try:  # of no elements: says whether tensors like these can be copied
                    # ``data`` has a version counter of its own. With that of ``detach()`` this would count as a change,
                    # and ``backward()`` refuses a graph whose tensors were changed.
                    self.target.data.narrow(0, 0, 0).copy_(self.new.data.narrow(0, 0, 0))
                except (RuntimeError, NotImplementedError) as error:
                    raise ValueError(str(error)) from error

    def apply(self) -> None:
        if self._data is not None:
            self._grad = self.target.grad
            self._give(self.new.data, self.new.requires_grad)
        elif not same_values(self.target, self.new):  # a write would spoil the graphs that have used it
            with self._writing():
                self.target.copy_(self.new)
        if self.target.is_leaf:
            self.target.requires_grad_(self.new.requires_grad)
        if not self.target.is_leaf and self.new.retains_grad:
            self.target.retain_grad()
        self._grad = gradient_of(self.target) if self._data is None else self._grad
        if self._grad is not self.grad or self._data is not None:
            self.target.grad = self.grad
        self._give_hooks(self.hooks)

    def _give(self, data: Any, requires_grad: bool) -> None:
        """Other memory, without a gradient: that has the shape of the numbers which it had."""
        self.target.grad = None
        self.target.requires_grad_(False)
        self.target.data = data
        self.target.requires_grad_(requires_grad)

    def _give_hooks(self, hooks: tuple[Any, ...]) -> None:
        """Where all were removed the dict stays, which their handles know."""
        for name, new in zip(rebuild.HOOKS, hooks, strict=False):
            old = getattr(self.target, name, None)
            if new is not None and new is not old:
                setattr(self.target, name, new)
            elif new is None and old:
                old.clear()

    def _writing(self) -> Any:
        """A tensor that was made in inference mode is written to in that mode only."""
        torch = sys.modules["torch"]
        return torch.inference_mode() if self.target.is_inference() else torch.no_grad()

    def undo(self) -> None:
        if self._data is not None and self._grad is not MISSING:
            self._give(self._data, self._requires_grad)
        elif self.target.is_leaf:
            self.target.requires_grad_(self._requires_grad)
        if self._grad is not MISSING:
            self.target.grad = self._grad
            for before in self._hooks:
                if before is not None:
                    held, hooks = before
                    held.clear()
                    held.update(hooks)
            self._give_hooks(tuple(None if before is None else before[0] for before in self._hooks))
