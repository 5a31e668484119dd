"""Which part of a value cannot go to another process, and the way to it, in words."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

DEPTH_MAX: Final = 24
CHILDREN_MAX: Final = 10_000
"""Of one value; a list that long is searched no further."""


def find_culprit(value: object, path: str, travels: Callable[[object], bool]) -> tuple[str, object]:
    """The innermost part that does not travel; the value itself where each of its parts does."""
    seen: set[int] = set()
    for _ in range(DEPTH_MAX):
        seen.add(id(value))
        for inner, (child_path, child) in enumerate(_parts(value, path)):
            if inner >= CHILDREN_MAX:
                break
            if id(child) not in seen and not travels(child):
                path, value = child_path, child
                break
        else:
            break
    return path, value


def _parts(value: Any, path: str) -> Iterator[tuple[str, object]]:
    match value:
        case Mapping():
            for key, item in list(value.items()):
                yield f"a key of {path}", key
                yield f"{path}[{_short(key)}]", item
        case list() | tuple():
            for index, item in enumerate(value):
                yield f"{path}[{index}]", item
        case set() | frozenset():
            for item in value:
                yield f"an element of {path}", item
        case types.FunctionType():
            yield from _of_function(value, path)
        case types.MethodType():
            yield f"{path}.__self__", value.__self__
            yield f"{path}.__func__", value.__func__
        case functools.partial():
            yield f"{path}.func", value.func
            yield from _parts(value.args, f"{path}.args")
            yield from _parts(value.keywords, f"{path}.keywords")
        case type():
            for name, item in list(vars(value).items()):
                yield f"{path}.{name}", item
        case _:
            yield from _of_object(value, path)


def _of_function(value: types.FunctionType, path: str) -> Iterator[tuple[str, object]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
        try:
            yield f"{path}'s captured variable {name!r}", cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in sorted(_names_used(value.__code__)):
        if name in value.__globals__:
            yield f"{path}'s global {name!r}", value.__globals__[name]
    for name, item in (value.__kwdefaults__ or {}).items():
        yield f"the default of {path}'s {name!r}", item
    for item in value.__defaults__ or ():
        yield f"a default of {path}", item
    for name, item in value.__dict__.items():
        yield f"{path}.{name}", item


def _names_used(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_used(constant)
    return found


def _of_object(value: Any, path: str) -> Iterator[tuple[str, object]]:
    state = getattr(value, "__dict__", None)
    if isinstance(state, dict):
        for name, item in list(state.items()):
            yield f"{path}.{name}", item
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else f"{text[:37]}..."
