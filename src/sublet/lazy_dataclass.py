"""Dataclasses that cost little to define: ``__init__`` is compiled when the first object of a class is made.

The standard decorator writes, compiles and runs source text for up to six methods of every class. That was half of the
time in which a supervisor loads its modules and a third of an office's, and most of those classes are messages of which
a process never makes one. Here comparison, ``hash`` and ``repr`` are closures, and ``__init__`` is compiled later.

Fields, defaults, ``__post_init__``, slots, pickling and errors are as the standard decorator has them. It has no
``InitVar``, and no other options than those below. Until its first object, ``inspect.signature`` of a class names no
parameters, so classes that users call are standard ones.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass  # a type checker sees the standard one
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False, eq=True):
        """As ``dataclasses.dataclass``."""

        def decorated(plain):
            plain.__doc__ = plain.__doc__ or plain.__name__  # the standard one would work out a signature for it
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(plain)
            _add_methods(made, frozen=frozen, slots=slots, eq=eq)
            return made

        return decorated if cls is None else decorated(cls)


def _add_methods(cls: Any, *, frozen: bool, slots: bool, eq: bool) -> None:
    """Those that the class does not define itself."""
    methods: dict[str, Callable[..., Any] | None] = {"__init__": _compiled_later(cls, frozen), "__repr__": _repr}
    if eq:
        values = _values([one.name for one in dataclasses.fields(cls) if one.compare])
        methods |= {"__eq__": _equal(values), "__hash__": _hash(values) if frozen else None}
    if frozen:
        methods |= _frozen(cls)
    if frozen and slots:
        methods |= {"__getstate__": _state, "__setstate__": _set_state}
    own = set(vars(cls))
    if cls.__hash__ is None and "__eq__" in own:
        own.discard("__hash__")  # written by Python, since the class defines how it is compared
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)


def _compiled_later(cls: Any, frozen: bool) -> Callable[..., None]:
    def init_at_first(self: Any, *arguments: Any, **named: Any) -> None:
        # Two threads that meet here both compile it: no lock is waited for, which a fork could leave taken.
        init = cls.__init__ = _compiled(cls, frozen)
        init(self, *arguments, **named)

    return init_at_first


def _compiled(cls: Any, frozen: bool) -> Callable[..., None]:
    """The ``__init__`` of this class."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_left_out": dataclasses.MISSING}
    positional: list[str] = []
    named: list[str] = []
    lines = []
    for one in dataclasses.fields(cls):
        name, value, default = one.name, one.name, ""
        if one.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"] = one.default_factory
            default = "=_left_out"
            value = f"_make_{name}() if {name} is _left_out else {name}" if one.init else f"_make_{name}()"
        elif one.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = one.default
            default = f"=_default_{name}"
            value = name if one.init else f"_default_{name}"
        elif not one.init:
            continue  # it is for ``__post_init__`` to set
        if not one.init and getattr(cls, name, None) is one.default:
            continue  # an attribute of the class is enough
        if one.init:
            (named if one.kw_only else positional).append(f"{name}{default}")
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *named] if named else [])])
    exec(f"def __init__({parameters}):\n    " + "\n    ".join(lines or ["pass"]), known)  # noqa: S102 - of names of fields
    init: Callable[..., None] = known["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"  # as the error says it where arguments do not fit
    init.__module__ = cls.__module__
    return init


def _values(names: Sequence[str]) -> Callable[[Any], Any]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda one: tuple(getattr(one, name) for name in names)


def _equal(values: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def equal(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


def _hash(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    return lambda self: hash(values(self))


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)
    return f"{type(self).__qualname__}({shown})"


def _frozen(cls: Any) -> dict[str, Callable[..., None]]:
    """A subclass may have attributes of its own, which are no fields."""
    names = frozenset(one.name for one in dataclasses.fields(cls))

    def set_attribute(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete_attribute(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": set_attribute, "__delattr__": delete_attribute}


def _state(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
