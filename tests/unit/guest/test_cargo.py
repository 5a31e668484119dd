"""Values to pieces and back."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.errors import InvalidRequest, Unpicklable
from sublet.guest.cargo import encode, fetch_buffers, load, out_of_band, place_buffers
from sublet.wire.frames import close_all
from sublet.wire.work import LARGE_BYTES, Piece, Where, WorkerMessage, pack, unpack


class Remembering:
    """A keeper for whom every buffer is new, and then known."""

    def __init__(self) -> None:
        self.found: dict[bytes, int] = {}
        self.fds: dict[int, int] = {}

    def find(self, view: memoryview) -> int:
        return self.found.get(bytes(view), 0)

    def took(self, view: memoryview, fd: int) -> int:
        number = self.found[bytes(view)] = len(self.found) + 1
        self.fds[number] = os.dup(fd)
        return number


def there_and_back(value: Any, keeper: Remembering | None = None) -> tuple[Any, list[Piece]]:
    placed = place_buffers(encode(value, "it"), keeper)
    said = unpack(pack(WorkerMessage.VALUE, pieces=placed.pieces, inline=placed.inline))
    try:
        head, buffers = fetch_buffers(said, placed.fds, lambda number: keeper.fds[number] if keeper else -1)
        return load(head, buffers), list(said.pieces)
    finally:
        close_all(placed.fds)


def test_small_values_lie_in_the_message() -> None:
    value = {"a": [1, 2.5, None], "b": np.arange(10)}
    back, pieces = there_and_back(value)
    assert back["a"] == value["a"]
    assert (back["b"] == value["b"]).all()
    assert [piece.where for piece in pieces] == [Where.INLINE]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 2 * LARGE_BYTES), min_size=1, max_size=24))
def test_arrays_of_any_number_and_size(sizes: list[int]) -> None:
    arrays = [np.full(size, index % 250, dtype=np.uint8) for index, size in enumerate(sizes)]
    back, _ = there_and_back(arrays)
    assert all((a == b).all() and a.shape == b.shape for a, b in zip(arrays, back, strict=True))


def test_what_is_writable_is_writable_and_harms_nobody() -> None:
    array = np.zeros(LARGE_BYTES)
    keeper = Remembering()
    first, _ = there_and_back(array, keeper)
    first[:] = 1
    again, pieces = there_and_back(array, keeper)
    assert [piece.where for piece in pieces] == [Where.INLINE, Where.KEPT]
    assert (again == 0).all()
    assert (array == 0).all()
    close_all(keeper.fds.values())


def test_what_is_read_only_stays_so() -> None:
    array = np.zeros(LARGE_BYTES)
    array.flags.writeable = False
    back, _ = there_and_back(array)
    assert not back.flags.writeable


def test_a_large_pickle_goes_beside_the_message() -> None:
    blob = os.urandom(2 << 20)
    back, pieces = there_and_back([blob, b"x"])
    assert back == [blob, b"x"]
    assert [piece.where for piece in pieces] == [Where.SHARED]


def test_arrays_that_are_not_in_one_piece() -> None:
    array = np.arange(1 << 20).reshape(1 << 10, 1 << 10)[::2, ::3]
    back, _ = there_and_back(array)
    assert (back == array).all()


def test_functions_and_classes_of_here_go_by_value() -> None:
    factor = 3

    class Box:
        def __init__(self, x: int) -> None:
            self.x = x

    back, _ = there_and_back((lambda x: factor * x, Box(4)))
    assert back[0](2) == 6
    assert back[1].x == 4


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Plain:
    def __init__(self, inner: object) -> None:
        self.inner = inner


def default(x: int = 3, *, lock: Any = None) -> int:
    return x


def make(kind: str, lock: Any) -> Any:
    match kind:
        case "function":
            return lambda: lock
        case "global":
            return lambda: LOCK
        case "attribute":
            return Plain([Plain(lock)])
        case "slot":
            return [Slotted({"k": lock})]
        case "key":
            return {(1, lock): 2}
        case "set":
            return {lock}
        case "generator":
            return [(n for n in range(3))]
        case _:
            return np.array([1, lock], dtype=object)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("function", "it's captured variable 'lock'"),
        ("attribute", "it.inner[0].inner"),
        ("slot", "it[0].inner['k']"),
        ("key", "a key of it[1]"),
        ("set", "an element of it"),
        ("generator", "it[0]"),
        ("array", "it"),
    ],
)
def test_the_culprit_is_named_with_the_way_to_it(kind: str, path: str) -> None:
    with pytest.raises(Unpicklable) as refused:
        encode(make(kind, threading.Lock()), "it")
    assert refused.value.path == path
    assert refused.value.do


def test_a_socket_is_called_a_socket() -> None:
    with pytest.raises(Unpicklable, match=r"^argument 2\[0\] cannot"):
        encode(((1, [threading.Lock()]), {}), "(args, kwargs)")
    with pytest.raises(Unpicklable, match=r"^argument 'deep' cannot"):
        encode(((), {"deep": threading.Lock()}), "(args, kwargs)")
    with pytest.raises(Unpicklable, match=r"^an item cannot"):
        encode(([1, threading.Lock()], None), "the items")
    with socket.socket() as sock, pytest.raises(Unpicklable, match=r"socket\.socket"):
        encode({"sock": sock}, "it")


def test_a_value_that_breaks_while_it_is_taken_apart() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(Unpicklable, match="ZeroDivisionError"):
        encode([Broken()], "it")


def test_messages_without_their_memory_are_refused() -> None:
    said = unpack(pack(WorkerMessage.VALUE, pieces=[Piece(Where.SHARED, 10)]))
    with pytest.raises(InvalidRequest):
        fetch_buffers(said, (), lambda number: -1)
    with pytest.raises(InvalidRequest):
        fetch_buffers(unpack(pack(WorkerMessage.VALUE)), (), lambda number: -1)


@pytest.mark.needs("torch")
def test_tensors_share_what_they_shared() -> None:
    import torch

    base = torch.arange(100_000, dtype=torch.bfloat16)
    back, pieces = there_and_back({"base": base, "rows": base.view(100, 1000)[3:5], "t": base.view(100, 1000).t()})
    assert torch.equal(back["rows"], base.view(100, 1000)[3:5])
    assert torch.equal(back["t"], base.view(100, 1000).t())
    back["base"][3000] = -1
    assert back["rows"][0, 0] == -1
    assert base[3000] != -1
    assert sum(piece.where is Where.SHARED for piece in pieces) == 1
    with pytest.raises(InvalidRequest, match="detach"):
        encode((torch.ones(3, requires_grad=True) * 2,), "it")


def test_large_bytes_lie_beside_the_pickle_and_what_can_be_changed_stays_one_thing() -> None:
    """Bytes by themselves or in tuples; a list that is meant twice is still one list, with its bytes within."""
    large, small = os.urandom(LARGE_BYTES), b"small"
    for value in (large, (large, small), ((large, 1), {"a": large}), ("plain", 5)):
        cargo = encode(out_of_band(value), "it")
        assert load(cargo.head, cargo.buffers) == value
    assert [len(buffer) for buffer in encode(out_of_band((large, (large, small))), "it").buffers] == [LARGE_BYTES] * 2
    assert out_of_band(small) is small
    shared = [large]
    found, again = load(encode(out_of_band((shared, shared)), "it").head)
    assert found is again
    deep: tuple[Any, ...] = ()
    for _ in range(100_000):
        deep = (deep,)
    out_of_band(deep)
    while deep:
        (deep,) = deep
