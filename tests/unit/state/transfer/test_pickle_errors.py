"""What cannot travel is named with the path to it, as one would write it."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sublet.errors import InvalidRequest, Unpicklable
from sublet.notebook.home import HomeRules
from sublet.state.checkpoints.object_groups import encode_roots
from sublet.state.transfer.codec import encode

LOCK = threading.Lock()


class Hook:
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Model:
    def __init__(self) -> None:
        self.hooks = [1, 2, Hook()]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Stateful:
    def __init__(self) -> None:
        self.a = 1

    def __getstate__(self) -> dict[str, object]:
        return {"made": threading.Lock()}


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not today")


def closure() -> Callable[[], object]:
    inner = threading.Lock()
    return lambda: inner


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "path", "what"),
    [
        (LOCK, "value", "a thread lock"),
        (Model(), "value.hooks[2].lock", "a thread lock"),
        ({"a": [1, generator()]}, "value['a'][1]", "a generator"),
        ((1, {2: LOCK}), "value[1][2]", "a thread lock"),
        (Slotted(LOCK), "value.inner", "a thread lock"),
        ({"f": closure()}, "value['f'] (variable inner)", "a thread lock"),
        ([Stateful()], "value[0].made", "a thread lock"),
        ({"x": Stubborn()}, "value['x']", "Stubborn (RuntimeError: not today)"),
        (threading.Thread(), "value", "thread"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_way_to_it_is_said(value: object, path: str, what: str) -> None:
    with pytest.raises(Unpicklable) as caught:
        encode(value)
    assert caught.value.path.startswith(path)
    assert what in caught.value.what
    assert caught.value.path in caught.value.message
    assert isinstance(caught.value, InvalidRequest)


class Refuses:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            RuntimeError("only by state_dict(). See:\nhttps://example.org"),
            " (RuntimeError: only by state_dict(). See:…)",
        ),
        (RuntimeError("word " * 100), f" (RuntimeError: {'word ' * 19}word…)"),
        (NotImplementedError("{} cannot be pickled", "Iterator"), ""),
        (RuntimeError(), " (RuntimeError: )"),
    ],
)
def test_what_an_object_says_of_itself_is_one_short_line(error: Exception, what: str) -> None:
    with pytest.raises(Unpicklable) as caught:
        encode(Refuses(error))
    assert caught.value.what == f"a {__name__}.Refuses{what}"


def test_a_method_of_a_class_that_has_objects_is_called_by_its_name() -> None:
    """The methods of such a class are pickled before its other attributes."""

    def init(self: object, seen: object = generator()) -> None: ...

    kind = type("Kind", (), {"__init__": init, "all": [], "__module__": "__main__"})
    with pytest.raises(Unpicklable) as caught:
        encode_roots({"kind": kind}, rules=HomeRules())
    assert caught.value.path == "kind.__init__ (default 0)"


def test_everything_that_cannot_travel_is_named_at_once() -> None:
    with socket.socket() as open_socket, pytest.raises(Unpicklable) as caught:
        encode({"a": LOCK, "fine": 1, "b": [open_socket], "again": LOCK})
    assert dict(caught.value.blockers) == {"value['a']": "a thread lock", "value['b'][0]": "a socket"}


def test_open_files_are_named_and_not_read() -> None:
    with open(__file__, encoding="utf-8") as file, pytest.raises(Unpicklable, match="an open file"):
        encode({"file": file})


def test_a_root_is_called_by_its_name() -> None:
    with pytest.raises(Unpicklable) as caught:
        encode_roots({"model": Model(), "step": 1})
    assert caught.value.path == "model.hooks[2].lock"


def test_nested_too_deeply_is_said_in_words() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Unpicklable, match="nested too deeply"):
        encode(deep)


def test_a_repr_that_fails_does_no_harm() -> None:
    class Key:
        def __repr__(self) -> str:
            raise ValueError

    with pytest.raises(Unpicklable):
        encode({Key(): LOCK})


def test_whoever_looks_for_what_cannot_travel_keeps_nothing_of_it() -> None:
    """A kept error would be a circle of frames with views of memory in it, which Python 3.11 cannot take apart."""
    gc.collect()
    gc.disable()
    try:
        value: dict[str, Any] = {"a": Stateful(), "g": (n for n in range(3))}
        watched = weakref.ref(value["a"])
        with pytest.raises(Unpicklable):
            encode(value)
        del value
        assert watched() is None
    finally:
        gc.enable()
