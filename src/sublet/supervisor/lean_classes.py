"""Dataclasses that cost next to nothing until they are used.

``dataclass`` writes a text and compiles it for each method of each class: half a millisecond of a processor for one
class, and an office and its supervisor load some hundred and fifty each, most of which they never make one of. Here how
a value is shown and kept from being changed is shared by all of them; what makes, compares and hashes one is its own,
and written when it is first needed. From then on it is what it always was.

Only our own classes are made like this, and of them only those that are plain; any other is left to ``dataclass``.
"""

from __future__ import annotations

import dataclasses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OURS = "sublet."
_OWN = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__")
_KNOWN = frozenset({"init", "repr", "eq", "frozen", "match_args", "kw_only", "slots", "weakref_slot"})
_NO_METHODS = {"init": False, "repr": False, "eq": False, "frozen": False}
_set = object.__setattr__
_real = dataclasses.dataclass


def install() -> None:
    """For this process, which is ours alone: classes of Sublet that are loaded from now on are lean."""
    dataclasses.dataclass = _dataclass


def _dataclass(cls: type | None = None, /, **how: Any) -> Any:
    """In the place of the decorator."""
    if cls is None:
        return lambda cls: _dataclass(cls, **how)
    return _lean(cls, how) if cls.__module__.startswith(_OURS) and _is_plain(cls, how) else _real(cls, **how)


def _is_plain(cls: type, how: dict[str, Any]) -> bool:
    said = cls.__dict__
    return (
        how.keys() <= _KNOWN
        and how.get("init", True)
        and cls.__bases__ == (object,)
        and not any(name in said for name in _OWN)
        and not any("InitVar" in str(of) for of in said.get("__annotations__", {}).values())
    )


def _lean(cls: type, how: dict[str, Any]) -> Any:
    """The real decorator finds the fields, and makes no method."""
    is_frozen, has_eq, has_repr = how.get("frozen", False), how.get("eq", True), how.get("repr", True)
    if cls.__doc__ is None:
        cls.__doc__ = f"{cls.__name__}(...)"  # or its signature is put together for it
    body = _body(cls)
    made: Any = _real(cls, **{**how, **_NO_METHODS})
    told = made.__dataclass_params__
    told.init, told.repr, told.eq, told.frozen = True, has_repr, has_eq, is_frozen
    made.__init__ = _later(made, "__init__", body, {**how, **_NO_METHODS, "init": True, "frozen": is_frozen})
    if has_repr:
        made.__repr__ = _shown
    if has_eq:
        made.__eq__ = _later(made, "__eq__", body, {**how, **_NO_METHODS, "eq": True})
        hashed = {**how, **_NO_METHODS, "eq": True, "frozen": True}
        made.__hash__ = _later(made, "__hash__", body, hashed) if is_frozen else None
    if is_frozen:
        made.__setattr__, made.__delattr__ = _keep, _give_up
        if how.get("slots", False):
            made.__getstate__, made.__setstate__ = _state, _restore
    return made


def _body(cls: type) -> dict[str, Any]:
    """What was written of it: enough to make one like it."""
    said = cls.__dict__
    fields = said.get("__annotations__", {})
    names = ("__annotations__", "__module__", "__qualname__", "__doc__", "__post_init__", *fields)
    return {name: said[name] for name in names if name in said}


def _later(cls: Any, name: str, body: dict[str, Any], how: dict[str, Any]) -> Callable[..., Any]:
    """A method that puts the real one into its place when it is called: that of a class just like this one, made by the
    real decorator."""

    def method(self: Any, *given: Any, **named: Any) -> Any:
        real = cls.__dict__[name]
        if real is method:
            real = _real(type(cls.__name__, (), body), **how).__dict__[name]
            setattr(cls, name, real)
        return real(self, *given, **named)

    method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return method


# -------------------------------------------------------------------------------- what all of them have in common


def _shown(self: Any) -> str:
    shown = (field.name for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _keep(self: Any, name: str, value: object) -> None:
    _refuse(self, name)
    _set(self, name, value)


def _give_up(self: Any, name: str) -> None:
    _refuse(self, name)
    object.__delattr__(self, name)


def _refuse(self: Any, name: str) -> None:
    """A class below that is none of these may have what it likes beside the fields."""
    if "__dataclass_fields__" in type(self).__dict__ or name in self.__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot change {name!r}: a {type(self).__name__} stays what it is")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, field.name, value)
