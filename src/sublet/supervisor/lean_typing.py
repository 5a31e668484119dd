"""As much of ``typing`` as the supervisor's process needs while it runs.

Annotations are strings that are never evaluated there, except those of messages (``wire.codec``): so most of its names
need no meaning.
"""

from __future__ import annotations

import builtins
import collections
import functools
import operator
import sys
import types

from sublet.supervisor.stand_in import StandIn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_OF_CLASSES = frozenset({"__module__", "__qualname__", "__annotations__", "__dict__", "__classcell__"})


class Form:
    """A word of annotations."""

    def __getitem__(self, of: object) -> Form:
        return self


class Union:
    """One of several, where Python itself makes none of them: a name such as ``LeaseId`` is no class to it."""

    def __init__(self, *parts: Any) -> None:
        each = (inner for part in parts for inner in (_args(part) if _is_union(part) else (part,)))
        self.__args__ = tuple(dict.fromkeys(types.NoneType if one is None else one for one in each))

    def __or__(self, other: object) -> Union:
        return Union(self, other)

    def __ror__(self, other: object) -> Union:
        return Union(other, self)


class NewType:
    """A name of its own for values of a class."""

    def __init__(self, name: str, supertype: Any) -> None:
        self.__name__ = name
        self.__supertype__ = supertype

    def __call__(self, value: Any) -> Any:
        return value

    def __or__(self, other: object) -> Union:
        return Union(self, other)

    def __ror__(self, other: object) -> Union:
        return Union(other, self)


class TypeVar:
    """Some class or other."""

    def __init__(self, name: str, *_: object, **__: object) -> None:
        self.__name__ = name


class Generic:
    """A base that says nothing."""

    __slots__ = ()

    def __class_getitem__(cls, of: object) -> Any:
        return cls


class Protocol(Generic):
    """What something else has to look like."""

    __slots__ = ()


class _NamedTuples(type):
    """Makes a named tuple of a class with fields and methods."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        fields = body.get("__annotations__", {})
        defaults = [body[field] for field in fields if field in body]
        made = collections.namedtuple(name, fields, defaults=defaults, module=body["__module__"])  # type: ignore[misc]
        for attribute, value in body.items():
            if attribute not in _OF_CLASSES and attribute not in fields:
                setattr(made, attribute, value)
        made.__annotations__ = fields
        return made


class _NamedTuple:
    """``class Peer(NamedTuple)``: a base that is replaced before the class is made."""

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (type.__new__(_NamedTuples, "NamedTuple", (), {}),)


def get_type_hints(of: type) -> dict[str, Any]:
    """What the annotations of a class and its bases mean."""
    found: dict[str, Any] = {}
    for base in reversed(of.__mro__):
        names = {**vars(builtins), **vars(sys.modules[base.__module__])}
        for name, said in vars(base).get("__annotations__", {}).items():
            meant = _meaning(said, names) if isinstance(said, str) else said
            found[name] = types.NoneType if meant is None else meant
    return found


def _meaning(text: str, names: dict[str, Any]) -> Any:
    """Of names, brackets, commas and bars: our annotations have nothing else, and nothing is run."""
    text = text.strip()
    if len(parts := _split(text, "|")) > 1:
        return functools.reduce(operator.or_, (_meaning(part, names) for part in parts))
    if text.endswith("]"):
        outer, _, inner = text[:-1].partition("[")
        return _meaning(outer, names)[tuple(_meaning(part, names) for part in _split(inner, ","))]
    if text in ("...", "None"):
        return ... if text == "..." else None
    first, *others = text.split(".")
    return functools.reduce(getattr, others, names[first])


def _split(text: str, sign: str) -> list[str]:
    """At this sign, where it is in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == sign and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _is_union(of: object) -> bool:
    return isinstance(of, Union | types.UnionType)


def _args(of: Any) -> tuple[Any, ...]:
    args: tuple[Any, ...] = of.__args__ if isinstance(of, Union | types.UnionType | types.GenericAlias) else ()
    return args


def _origin(of: Any) -> Any:
    if isinstance(of, types.GenericAlias):
        return of.__origin__
    return type(of) if _is_union(of) else None


def _unreachable(value: object) -> NoReturn:
    raise AssertionError(f"nobody expected {value!r} here")


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Typing(StandIn):
    """The module."""

    TYPE_CHECKING = False
    Any = Form()
    ClassVar = Form()
    Final = Form()
    Literal = Form()
    NoReturn = Form()
    TypeAlias = Form()
    _GenericAlias = Union
    """Dataclasses ask whether an annotation is one; ours are texts."""
    Generic = Generic
    NamedTuple = _NamedTuple()
    NewType = NewType
    Protocol = Protocol
    TypeVar = TypeVar
    Union = Union
    assert_never = staticmethod(_unreachable)
    get_args = staticmethod(_args)
    get_origin = staticmethod(_origin)
    get_type_hints = staticmethod(get_type_hints)
    overload = staticmethod(_as_it_is)
