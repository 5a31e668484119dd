"""What the supervisor's process does without: to be imported there, before anything else of it.

It is on every machine all the time, so it is to be small, and most of what it would have in memory are libraries of
which it needs little:

- ``dataclasses`` loads ``inspect``, and that ``ast``, ``dis`` and ``tokenize``: more than a megabyte, for two small
  functions. And it writes a text and compiles it for each method of each class, of which there are some hundred and
  fifty. How a value is shown, compared, hashed and kept from being changed is the same for all of them, so here they
  share these methods; only what makes one is its own.
- ``typing`` is half a megabyte, to be read by people and checkers (``lean_typing``).
- ``socket`` is as much: names for numbers, and ``selectors`` (``lean_socket``).

Where a real one is loaded already, nothing is put into its place.
"""

from __future__ import annotations

import operator
import sys

from sublet.supervisor.lean_socket import Sockets
from sublet.supervisor.lean_typing import Typing
from sublet.supervisor.stand_in import StandIn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Inspect", "share_methods"]

_SHARED = ("__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__")


class Inspect(StandIn):
    """As much of ``inspect`` as dataclasses need."""

    @staticmethod
    def get_annotations(of: type) -> dict[str, Any]:
        """Its own, not those of its bases."""
        return dict(of.__dict__.get("__annotations__", {}))  # noqa: RUF063 - this is what it is instead of

    def signature(self, of: Any) -> Any:
        """Of a class: it goes into the text of one that has none."""
        return "(...)" if isinstance(of, type) else self.real().signature(of)


def share_methods(dataclass: Callable[..., Any]) -> Callable[..., Any]:
    """The same decorator, for classes that differ in nothing but their names and fields."""

    def lean(cls: type | None = None, /, **how: Any) -> Any:
        if cls is None:
            return lambda cls: lean(cls, **how)
        if how.get("order") or how.get("unsafe_hash") or any(name in cls.__dict__ for name in _SHARED):
            return dataclass(cls, **how)
        made = dataclass(cls, **{**how, "repr": False, "eq": False})
        is_frozen = how.get("frozen", False)
        if how.get("repr", True):
            made.__repr__ = _shown
        if how.get("eq", True):
            made.__eq__ = _is_equal
            made.__hash__ = _hash if is_frozen else None
        if is_frozen:
            made.__setattr__, made.__delattr__ = _keep, _keep
        return made

    return lean


_takers: dict[type, Callable[[Any], Any]] = {}


def _taker(of: type) -> Callable[[Any], Any]:
    """What is compared of a value of this class; found out when the first one is."""
    found = _takers.get(of)
    if found is None:
        names = [field.name for field in dataclasses.fields(of) if field.compare]
        found = _takers[of] = operator.attrgetter(*names) if names else lambda _: ()
    return found


def _is_equal(self: Any, other: object) -> Any:
    cls = self.__class__
    if other.__class__ is not cls:
        return NotImplemented
    take = _taker(cls)
    return take(self) == take(other)


def _hash(self: Any) -> int:
    return hash(_taker(self.__class__)(self))


def _shown(self: Any) -> str:
    shown = (field.name for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _keep(self: Any, name: str, *value: object) -> None:
    """To set a value, or to delete one."""
    raise dataclasses.FrozenInstanceError(f"cannot change {name!r}: a {type(self).__name__} stays what it is")


if "dataclasses" not in sys.modules:
    for stand_in in (Inspect("inspect"), StandIn("copy"), Typing("typing"), Sockets("socket")):
        stand_in.take_place()
    import dataclasses

    dataclasses.dataclass = share_methods(dataclasses.dataclass)
else:
    import dataclasses
