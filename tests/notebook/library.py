"""Stands for a library: classes whose instances hold closures, a decorator, a registry. Imported on both sides."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

REGISTRY: dict[str, Any] = {}
SETTINGS = {"level": [1]}
LOGGER = logging.getLogger("tests.notebook.library")


class Value:
    """A number that remembers how to give its gradient back, by a closure over itself."""

    def __init__(self, data: float, children: tuple[Value, ...] = ()) -> None:
        self.data, self.grad = data, 0.0
        self.children = set(children)
        self._backward: Callable[[], None] = lambda: None

    def __add__(self, other: Value) -> Value:
        out = Value(self.data + other.data, (self, other))

        def backward() -> None:
            self.grad += out.grad
            other.grad += out.grad

        out._backward = backward
        return out


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Counts the calls of a function."""

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        called.calls.append(args)  # type: ignore[attr-defined]
        return function(*args)

    called.calls = []  # type: ignore[attr-defined]
    return called


class Accessor:
    """As libraries hang on frames: found by an attribute, made for its owner."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.memo: dict[str, Any] = {}


class Native:
    """Holds memory by its number, as an extension module does, and frees it at its end."""

    memory: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, numbers: Iterable[int]) -> None:
        self.handle = max(self.memory, default=0) + 1
        self.memory[self.handle] = list(numbers)

    @property
    def numbers(self) -> list[int]:
        return self.memory[self.handle]

    def __getstate__(self) -> tuple[int, ...]:
        return tuple(self.numbers)

    def __setstate__(self, state: tuple[int, ...]) -> None:
        Native.__init__(self, state)

    def __del__(self) -> None:
        del self.memory[self.handle]
