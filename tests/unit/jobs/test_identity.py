"""Ids of chunks: equal work has equal ids in every process, and everything that changes the result changes the id."""

from __future__ import annotations

import enum
import functools
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from sublet import jobs
from sublet.errors import InvalidRequest, Unpicklable
from sublet.jobs import Chunk, File, JobCoordinator, MemoryOutputStore, identity
from sublet.jobs.identity import (
    ID_BYTES,
    check_stable,
    content_digest,
    function_digest,
    positioned_ids,
    valid_id,
)
from tests.unit.jobs.stage import FakePool, pool

__all__ = ["pool"]

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.unit.jobs.test_identity import samples
for name, chunk in samples().items():
    print(name, chunk.chunk_id().hex())
"""


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int
    tags: frozenset[str]


def double(x: float, by: int = 2) -> float:
    """With a default."""
    return x * by


def membership(word: str) -> bool:
    return word in {"alpha", "beta", "gamma", "delta"}


def scaled(by: float) -> object:
    def scale(x: float) -> float:
        return x * by

    return scale


def samples() -> dict[str, Chunk]:
    """Work whose ids must be the same in any process, whatever its hash seed."""
    deep: list[object] = [1]
    deep.append(deep)
    return {
        "numbers": Chunk(double, (1, 2.5, -3j, 10**40, True, None)),
        "texts": Chunk(double, ("a" * 3, b"bytes", bytearray(b"x"))),
        "sets": Chunk(membership, ({"x", "y", "z"}, frozenset({("a", 1), ("b", 2)}))),
        "closure": Chunk(scaled(3.0), (1,)),  # type: ignore[arg-type]
        "lambda": Chunk(lambda x: x + 1, (1,)),
        "partial": Chunk(functools.partial(double, by=3), (1,)),
        "array": Chunk(double, (np.arange(12.0).reshape(3, 4),)),
        "object": Chunk(double, (Point(1, frozenset({"p", "q", "r"})), Colour.RED, Path("x"), range(3))),
        "kwargs": Chunk(double, (1,), {"by": 4}),
        "cycle": Chunk(double, (deep,)),
        "builtin": Chunk(len, ([1, 2],)),
        "method": Chunk("abc".join, (["x"],)),
    }


def test_another_process_computes_the_same_ids() -> None:
    """With another hash seed: the order of sets and of dict-backed attributes does not count."""
    here = str(Path(__file__).parents[3])
    told = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, here],
            env={"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    mine = "".join(f"{name} {chunk.chunk_id().hex()}\n" for name, chunk in samples().items())
    assert told == [mine, mine]


OWN_CLASSES = """
import abc, collections, copyreg, dataclasses, enum, functools, pickle, typing
@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 0.1
    tags: tuple = dataclasses.field(default=(), metadata={"unit": 1})
class Base(abc.ABC):
    @abc.abstractmethod
    def run(self): ...
class Model(Base):
    __slots__ = ("x",)
    def run(self): return self.size()
    @property
    def area(self): return self.x * NUMBER
    @staticmethod
    def size(): return NUMBER
    @classmethod
    def make(cls): return cls()
    @functools.cached_property
    def late(self): return NUMBER
class Kind(enum.Enum):
    A = 1
class Pair(typing.NamedTuple):
    a: int
    b: int = 2
from sublet.jobs.identity import content_digest
made = [Settings(), Model, Model(), Kind.A, Pair(1)]
before = [content_digest(one) for one in made]
copyreg._slotnames(Model), copyreg._slotnames(Settings)  # as pickle leaves it at the class
assert before == [content_digest(one) for one in made]
print(*(one.hex() for one in before))
"""


def test_classes_of_the_program_itself_count_by_what_they_are_made_of() -> None:
    """Dataclasses, abstract classes, properties and slots of ``__main__``, as a notebook or a script has them."""

    def told(number: str, seed: str) -> list[str]:
        words = [sys.executable, "-c", OWN_CLASSES.replace("NUMBER", number)]
        env = {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
        found = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        return found.stdout.split()

    first, again, other = told("3", "1"), told("3", "2"), told("4", "1")
    assert first == again
    assert len(set(first)) == 5
    assert [a == b for a, b in zip(first, other, strict=True)] == [True, False, False, True, True]


def test_all_of_these_are_different_work() -> None:
    ids = [chunk.chunk_id() for chunk in samples().values()]
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {ID_BYTES}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        ((1,), [1]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1}, frozenset({1})),
        (np.zeros(4), np.zeros((2, 2))),
        (np.zeros(4), np.zeros(4, dtype=np.float32)),
        (Point(1, frozenset()), Point(2, frozenset())),
        (0.0, -0.0),
    ],
)
def test_values_that_may_give_other_results_have_other_digests(one: object, other: object) -> None:
    assert content_digest(one) != content_digest(other)
    assert positioned_ids(b"", [one], 0) != positioned_ids(b"", [other], 0)


def test_equal_values_have_equal_digests_however_they_share_objects() -> None:
    text = b"shared text".decode()
    assert content_digest([text, text]) == content_digest([text, b"shared text".decode()])


def test_code_defaults_and_closure_of_a_function_count_and_its_name_does_not() -> None:
    def twice(x: float, by: int = 2) -> float:
        return x * by

    def thrice(x: float, by: int = 3) -> float:
        return x * by

    def also_twice(x: float, by: int = 2) -> float:
        # a comment, and other lines
        return x * by

    assert function_digest(twice) == function_digest(also_twice) != function_digest(thrice)
    assert function_digest(scaled(2.0)) == function_digest(scaled(2.0)) != function_digest(scaled(3.0))


def test_the_position_is_part_of_an_id_where_it_is_given() -> None:
    work, other = function_digest(double), function_digest(membership)
    ids = {key for one in (work, other) for at in (0, 10) for key in positioned_ids(one, [7, "7", (7,), 7], at)}
    assert len(ids) == 16
    assert {len(one) for one in ids} == {ID_BYTES}
    assert positioned_ids(work, [[1, 2], 8], 3) == positioned_ids(work, [[1, 2]], 3) + positioned_ids(work, [8], 4)


def test_a_file_counts_by_its_content_and_a_path_as_text(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"same")
    second.write_bytes(b"same")
    assert Chunk(double, (File(first),)).chunk_id() == Chunk(double, (File(second),)).chunk_id()
    assert Chunk(double, (str(first),)).chunk_id() != Chunk(double, (str(second),)).chunk_id()
    before = Chunk(double, (File(first),)).chunk_id()
    first.write_bytes(b"other")
    assert Chunk(double, (File(first),)).chunk_id() != before
    with pytest.raises(InvalidRequest, match="missing cannot be read"):
        Chunk(double, (File(tmp_path / "missing"),)).chunk_id()


def test_what_has_no_content_is_named_with_the_path_to_it() -> None:
    with pytest.raises(Unpicklable, match=r"\[0\]\['lock'\] is a lock"):
        Chunk(double, ({"lock": threading.Lock()},)).chunk_id()


class Copied:
    """Each copy differs from the one it was made of."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __reduce__(self) -> tuple[object, ...]:
        return _next_copy, (self.n,)


def _next_copy(n: int) -> Copied:
    return Copied(n + 1)


def test_a_function_whose_id_another_process_could_not_compute_is_refused() -> None:
    function: Any = double
    check_stable(scaled(2.0), "the function")
    with pytest.raises(InvalidRequest, match="another process could not compute the same id for the function"):
        check_stable(functools.partial(function, Copied()), "the function")


def test_a_function_that_another_process_cannot_have_is_refused_with_the_path_to_what_cannot_travel() -> None:
    held = {"locks": [1, threading.Lock()]}
    with pytest.raises(Unpicklable, match=r"captured variable 'held'\['locks'\]\[1\] cannot travel"):
        check_stable(lambda x: (x, held), "the function")


class Fresh:
    """Pickled with a buffer of its own each time, of which it is unknown what it holds."""

    def __init__(self, changes: bool) -> None:
        self.changes, self.times = changes, 0

    def __call__(self, x: int) -> int:
        return x

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        self.times += self.changes
        return Fresh, (self.changes,), {"data": pickle.PickleBuffer(bytearray(b"%d" % self.times) * 100_000)}


def test_buffers_that_are_not_the_same_memory_are_compared_by_what_they_hold() -> None:
    """Also where one lies as soon as the one before it was freed."""
    check_stable(Fresh(changes=False), "the function")
    with pytest.raises(InvalidRequest, match="another process could not compute the same id"):
        check_stable(Fresh(changes=True), "the function")


def test_a_named_burst_hashes_a_large_array_of_its_function_once(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    class Counting:
        def __init__(self, *data: bytes) -> None:
            self._of = blake3(*data)

        def update(self, data: bytes | memoryview) -> None:
            hashed.append(memoryview(data).nbytes)
            self._of.update(data)

        def digest(self, *length: int) -> bytes:
            return self._of.digest(*length)

    monkeypatch.setattr(identity, "blake3", Counting)
    table = np.zeros(1 << 20)
    function = functools.partial(_row, table)
    assert list(jobs.map(function, range(9), name="rows", store=MemoryOutputStore(), make_pool=pool.make)) == [0.0] * 9
    assert table.nbytes <= sum(hashed) < 1.1 * table.nbytes
    hashed.clear()
    chunks = [Chunk(function, (n,)) for n in range(9)]
    JobCoordinator(name="rows", make_pool=FakePool().make).run(chunks, MemoryOutputStore(), None, len)
    assert table.nbytes <= sum(hashed) < 1.1 * table.nbytes


def _row(table: Any, n: int) -> float:
    return float(table[n])


@pytest.mark.parametrize("found", ["text", b"short", b"x" * 65, None, 7])
def test_an_id_of_the_wrong_shape_is_refused(found: object) -> None:
    with pytest.raises(InvalidRequest, match=r"chunk_id\(\) returned"):
        valid_id(found)


def test_a_chunk_goes_to_bytes_and_back() -> None:
    chunk = Chunk(scaled(2.5), (4,), cores=3)  # type: ignore[arg-type]
    again = Chunk.from_bytes(chunk.to_bytes())
    assert again.run() == 10.0
    assert again.chunk_id() == chunk.chunk_id()
    assert again.needs.cores == 3


def test_ids_stay_what_they_were() -> None:
    """A store that an earlier version filled is found again; who changes these raises the version within them."""
    items = [None, True, False, 7, -1, 2.5, 1j, "text", b"bytes", bytearray(b"array"), ..., (1, "two"), [b"x"]]
    told = " ".join(key.hex()[:8] for key in positioned_ids(b"work", items, 5))
    assert told == (
        "8eb52848 cbc48d37 08318e07 3705f141 c19d9f5f 572a24c7 0d760351 148b6b95 638a4b53 6b80dcd0 b1d087ae 02cfeb73 "
        "71b36d7a"
    )
    assert content_digest(items).hex().startswith("e3b0ffdf1b508277")
