"""Arrays that live on the device in memory the notebook lends: exchanged, read where they lie, and nobody sees it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.notebook import lending, lodging
from sublet.notebook.lending import PoolOwner
from sublet.notebook.lodging import Lodged
from sublet.state.transfer import changes
from sublet.state.transfer.memory import PAGE, address_of, memory_at
from tests.examples import examples
from tests.notebook.crossing import Sides

LENGTH = 3 * (1 << 17) + 5
"""Numbers of 8 bytes: more than 3 MiB, and no whole page at the end."""
NBYTES = 8 * LENGTH
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
"""Whether this process has threads just now, of a library or of the test runner, is not looked at here."""


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lending, "LODGED_MIN", 1 << 20)
        yield


@pytest.fixture
def sides() -> Sides:
    return Sides(PoolOwner())


def lent(sides: Sides) -> list[int]:
    assert sides.lender is not None
    return sorted(number for number, file in sides.lender._files.items() if file.is_lent)


def files(sides: Sides) -> list[int]:
    assert sides.lender is not None
    return sorted(sides.lender._files)


def test_what_changes_here_crosses_in_two_files_by_turns(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    array, view, start = sides.there["a"], sides.there["a"][7:9], address_of(sides.there["a"].data)
    seen = []
    for n in range(5):
        sides.here["a"] += 1.0
        sides.go("a")
        assert sides.there["a"] is array
        assert address_of(array.data) == start
        assert np.array_equal(array, sides.here["a"])
        assert view.tolist() == [n + 1.0, n + 1.0]
        seen.append(lent(sides))
        sides.back("a")
        assert sides.came == 0
    assert seen == [[2], [1], [2], [1], [2]]


def test_nothing_is_hashed_and_what_nobody_wrote_to_is_not_read(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "chunk_hash", lambda data: pytest.fail("it was hashed"))
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.back("a")
    sides.here["a"] += 1.0
    sides.go("a")
    sides.there["a"] += 1.0
    for _ in range(4):
        sides.back("a")
        sides.go("a")
        assert sides.sent == 0
    if sides.lodger._homes[0].watch.look == 0:
        pytest.skip("this kernel does not tell which pages were written to")
    found = sides.spaces[1].outgoing(["a"])
    assert found.parcels == []
    assert np.array_equal(sides.here["a"], sides.there["a"])


def test_what_changes_there_is_written_into_the_array_that_is_here(sides: Sides) -> None:
    mine = sides.here["a"] = np.zeros(LENGTH)
    other = mine[5:9]
    for n in range(4):
        sides.go("a")
        sides.there["a"] += 2.0
        sides.back("a")
        assert sides.came > NBYTES
        assert sides.here["a"] is mine
        assert other.tolist() == [2.0 * n + 2.0] * 4
        sides.there["a"][0] = 50.0 + n  # not before it is said
        assert mine[0] == 2.0 * n + 2.0
        sides.back("a")
        assert mine[0] == 50.0 + n
        mine[0] = 2.0 * n + 2.0
    assert files(sides) in ([1], [1, 2])


class Exact:
    """Knows what was written to, and nothing else: the kernel now and then counts a page that it moved."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, bytes]] = {}

    def usable(self) -> bool:
        return True

    def written_since(self, address: int, length: int, since: int) -> tuple[int, list[tuple[int, int]] | None]:
        now, number = bytes(memory_at(address, length)), len(self._seen) + 1
        self._seen[number] = address, now
        at, then = self._seen.get(since, (0, b""))
        if at != address or len(then) != length:
            return number, None
        other = [n for n in range(0, length, PAGE) if now[n : n + PAGE] != then[n : n + PAGE]]
        return number, [(address + n, min(address + n + PAGE, address + length)) for n in other]

    shared_written_since = written_since


def test_what_a_thread_writes_between_cells_is_not_written_over(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side: what did not change on the other is not sent there, whatever lies there by now."""
    pages = Exact()
    monkeypatch.setattr(lodging, "process_pages", lambda: pages)
    monkeypatch.setattr(lending, "process_pages", lambda: pages)
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.back("a")
    for n in range(4):
        sides.there["a"][n] = 10.0 + n
        sides.go("a")
        assert sides.there["a"][n] == 10.0 + n
        sides.back("a")
        assert sides.here["a"][n] == 10.0 + n
        sides.go("a")
        sides.here["a"][100 + n] = 20.0 + n
        sides.back("a")
        assert sides.here["a"][100 + n] == 20.0 + n
        sides.go("a")
        assert sides.there["a"][100 + n] == 20.0 + n
        sides.back("a")
        if n == 1:
            sides.here["a"] += 1.0
            sides.go("a")
            sides.back("a")
        if n == 2:
            sides.go("a")
            sides.there["a"] += 1.0
            sides.back("a")


def test_memory_of_which_the_kernel_tells_is_looked_at_when_all_else_is_sent(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, looks = Exact(), list[int]()
    look = pages.written_since

    def counted(address: int, length: int, since: int) -> tuple[int, list[tuple[int, int]] | None]:
        looks.append(since)
        return look(address, length, since)

    pages.written_since = pages.shared_written_since = counted  # type: ignore[method-assign]
    monkeypatch.setattr(lodging, "process_pages", lambda: pages)
    monkeypatch.setattr(lending, "process_pages", lambda: pages)
    space, a = sides.spaces[0], np.zeros(LENGTH)
    sides.here |= {"a": a, "small": [1]}
    sides.go("a", "small")
    assert not space.outgoing(["a"]).late  # nobody will ask
    looks.clear()
    sides.here["small"].append(2)
    found = space.outgoing(["a", "small"], late=True)
    assert [one.names for one in found.parcels] == [("small",)]
    assert [one.names for one in found.late] == [("a",)]
    assert looks == []
    a[7] = 1.0  # after everything else was made up, and before it is looked at
    changed = space.changed_late(found)
    assert len(looks) == 1
    assert [group.names for group, _ in changed] == [("a",)]
    assert found.late == []
    space.sent(found)
    space.invalidate(["a"])  # it did not arrive
    sides.go("a", "small")
    assert sides.there["a"][7] == 1.0
    a[8] = 2.0
    sides.go("a")
    assert sides.there["a"][8] == 2.0
    sides.go("a")
    assert sides.sent == 0


def test_memory_that_is_looked_at_as_something_else_is_not_put_off(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.here["a"] = sides.here["a"].view(np.int64)
    assert not sides.spaces[0].outgoing(["a"], late=True).late
    sides.spaces[0].invalidate(["a"])
    sides.go("a")
    assert sides.there["a"].dtype == np.int64


def test_an_array_that_was_written_to_and_has_not_changed_is_no_news(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.here["a"] += 1.0
    sides.go("a")
    sides.there["a"] += 0.0
    sides.back("a")
    assert (sides.came, sides.taken.changed, sides.taken.nbytes) == (0, (), 0)
    sides.here["a"] += 0.0
    sides.go("a")
    assert sides.sent == 0
    sides.back("a")
    assert (sides.came, sides.taken.changed, sides.taken.nbytes) == (0, (), 0)


@pytest.mark.parametrize("how", ["another of the same", "a copy", "its twin"])
def test_a_name_that_was_bound_anew_there_is_so_here(sides: Sides, how: str) -> None:
    sides.here |= {"a": np.zeros(LENGTH), "b": np.ones(LENGTH)}
    old = sides.here["a"]
    sides.go("a", "b")
    match how:
        case "another of the same":
            sides.there["a"] = np.zeros(LENGTH)
        case "a copy":
            sides.there["a"] = sides.there["a"].copy()
        case _:
            sides.there["a"], sides.there["b"] = sides.there["b"], sides.there["a"]
    sides.back("a", "b", new=("a", "b") if how == "its twin" else ("a",))
    sides.there["a"][0] = 7.0
    sides.back("a", "b")
    assert sides.here["a"] is not old
    assert sides.here["a"][0] == 7.0
    assert old[0] == 0.0


def test_names_that_change_arrays_here_change_them_there(sides: Sides) -> None:
    sides.here |= {"a": np.zeros(LENGTH), "b": np.ones(LENGTH)}
    sides.go("a", "b")
    sides.here["a"], sides.here["b"] = sides.here["b"], sides.here["a"]
    sides.go("a", "b")
    assert (sides.there["a"][0], sides.there["b"][0]) == (1.0, 0.0)


def test_an_array_that_somebody_there_holds_is_not_what_comes_anew(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    held = sides.there["a"]
    sides.here["a"] = np.ones(LENGTH)
    sides.go("a")
    assert (held[0], sides.there["a"][0]) == (0.0, 1.0)
    assert lent(sides) == [1, 2]
    for n in range(3):
        sides.here["a"] = np.full(LENGTH, 2.0 + n)
        sides.go("a")
        assert held[0] == 0.0
    del held
    gc.collect()
    sides.go("a")
    sides.back("a")
    assert len(lent(sides)) == 1


def test_a_view_here_of_what_lies_there_is_a_copy(sides: Sides) -> None:
    """It comes new, beside one that is known: it must not go on looking at the other side's memory."""
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    array = sides.there["a"]
    array += 1.0
    sides.there |= {"c": array.view(), "a": 5}
    sides.back("a", "c", new=("a", "c"))
    assert (sides.here["a"], sides.here["c"][0]) == (5, 1.0)
    mine = sides.here["c"]
    array += 1.0
    assert mine[0] == 1.0
    sides.back("c")
    assert sides.here["c"][0] == 2.0
    sides.here["c"][0] = 9.0
    assert array[0] == 2.0


def test_two_that_share_memory_share_it_on_both_sides(sides: Sides) -> None:
    whole = np.zeros(LENGTH)
    sides.here |= {"a": whole, "b": whole[:], "c": whole[10:]}
    sides.go("a", "b", "c")
    for n in range(3):
        sides.here["b"][11] = 2.0 + n
        sides.go("a", "b", "c")
        assert [float(sides.there[name][at]) for name, at in (("a", 11), ("b", 11), ("c", 1))] == [2.0 + n] * 3
        sides.there["c"][2] = 5.0 + n
        sides.back("a", "b", "c")
        assert (whole[12], sides.here["b"][12], sides.here["c"][2]) == (5.0 + n,) * 3


def test_what_was_never_told_of_is_sent_again_in_memory_that_nobody_knows(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    for n in range(3):
        sides.here["a"] += 1.0
        sides.fails("a")
        assert sides.there["a"][0] == n
        sides.go("a")
        assert sides.sent > NBYTES
        assert np.array_equal(sides.here["a"], sides.there["a"])
        sides.back("a")
        assert sides.came == 0
    assert len(files(sides)) <= 2


def test_an_array_that_lives_elsewhere_by_now_crosses_as_any_other(sides: Sides) -> None:
    """Its memory was given up, because nobody knew whether a message had come; it cannot move from there."""
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.here["a"] += 1.0
    sides.lose_the_answer()
    array = sides.there["a"]
    for n in range(3):
        sides.here["a"] += 1.0
        sides.go("a")
        sides.back("a")
        sides.go("a")
        sides.go("a")
        assert (sides.sent, sides.came) == (0, 0)
        assert sides.there["a"] is array
        array[2] = n
        sides.back("a")
        assert np.array_equal(sides.here["a"], array)


def test_what_came_and_was_not_answered_is_sent_again(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.here["a"] += 1.0
    sides.lose_the_answer()
    sides.here["a"] += 1.0
    sides.go("a")
    assert np.array_equal(sides.here["a"], sides.there["a"])
    sides.there["a"] += 1.0
    sides.back("a")
    assert np.array_equal(sides.here["a"], sides.there["a"])
    assert sides.here["a"][0] == 3.0


@FORKS
def test_a_forked_child_has_arrays_of_its_own(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    sides.here["a"] += 1.0
    sides.go("a")
    array = sides.there["a"]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        array += 5.0
        os.write(write, b"%d" % array[0])
        os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 10) == b"6"
    os.close(read)
    assert array[0] == 1.0
    sides.back("a")
    assert sides.came == 0  # what lies in the file still is what both have
    array[3] = 8.0
    sides.back("a")
    assert sides.here["a"][3] == 8.0
    for n in range(3):
        sides.here["a"] += 1.0
        sides.go("a")
        assert np.array_equal(sides.here["a"], array)
        assert sides.there["a"] is array
        array[4] = n
        sides.back("a")
        assert sides.here["a"][4] == n


def test_free_memory_is_let_go_of_when_it_is_too_much_or_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(PoolOwner(spare_max=NBYTES + 1))
    assert sides.lender is not None
    for name in "abc":
        sides.here[name] = np.zeros(LENGTH)
    sides.go("a", "b", "c")
    for name in "abc":
        sides.here[name] += 1.0
    sides.go("a", "b", "c")
    assert [len(one.area) for one in sides.lender._files.values() if not one.is_lent] == [NBYTES]
    sides.go("a")
    assert len(sides.lodger._homes) == 4
    monkeypatch.setattr(lending, "SPARE_FOR_S", -1.0)
    sides.back("a")
    assert all(one.is_lent for one in sides.lender._files.values())
    sides.spaces[0].forget()
    assert files(sides) == []


def test_memory_that_is_not_lent_is_refused(sides: Sides) -> None:
    assert sides.lender is not None
    for number in (1, 77):
        with pytest.raises(InvalidRequest):
            sides.lender.view(Lodged(number, NBYTES))
    with pytest.raises(InvalidRequest):
        sides.lodger.view(Lodged(3, NBYTES))
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    with pytest.raises(InvalidRequest, match="not free"):
        sides.lodger.view(Lodged(1, NBYTES))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["here", "there"]),
        st.sampled_from(["set", "fill", "new", "swap"]),
        st.sampled_from("ab"),
        st.integers(0, LENGTH - 1),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def _do(names: dict[str, Any], what: str, name: str, at: int, value: int) -> set[str]:
    """The names that were bound anew."""
    if what == "set":
        names[name][at] = value
    elif what == "fill":
        names[name].fill(value)
    elif what == "new":
        names[name] = np.full(LENGTH, value, names[name].dtype)
        return {name}
    else:
        names["a"], names["b"] = names["b"], names["a"]
        return {"a", "b"}
    return set()


def test_after_every_cell_both_have_the_same_and_so_does_one_namespace_alone() -> None:
    met: set[object] = set()

    @settings(max_examples=examples(15, 2_000), deadline=None)
    @given(cells=st.lists(st.tuples(STEPS, st.booleans()), min_size=1, max_size=6))
    def holds(cells: list[Any]) -> None:
        met.update(fails for _, fails in cells)
        met.update((where, what) for steps, _ in cells for where, what, *_ in steps)
        _both_have_what_one_has(cells)

    holds()
    acts = {(where, what) for where in ("here", "there") for what in ("set", "fill", "new", "swap")}
    assert met == acts | {True, False}


def _both_have_what_one_has(cells: list[Any]) -> None:
    sides = Sides(PoolOwner())
    sides.here |= {"a": np.zeros(LENGTH), "b": np.ones(LENGTH)}
    alone = {name: array.copy() for name, array in sides.here.items()}
    kept = [(sides.here["a"], alone["a"]), (sides.here["b"], alone["b"])]
    for steps, fails in cells:
        for where, *step in steps:
            if where == "here":
                _do(sides.here, *step)
                _do(alone, *step)
        kept += [(sides.here[name], alone[name]) for name in "ab"]
        if fails:
            sides.fails("a", "b")
        sides.go("a", "b")
        assert all(np.array_equal(sides.there[name], alone[name]) for name in "ab")
        bound: set[str] = set()
        for where, *step in steps:
            if where == "there":
                bound |= _do(sides.there, *step)
                _do(alone, *step)
        sides.back("a", "b", new=tuple(sorted(bound)))
        assert all(np.array_equal(sides.here[name], alone[name]) for name in "ab")
        assert all(np.array_equal(mine, plain) for mine, plain in kept)
    sides.go("a", "b")
    sides.go("a", "b")
    assert sides.sent == 0


def test_many_arrays(sides: Sides) -> None:
    names = [f"a{n}" for n in range(20)]
    for name in names:
        sides.here[name] = np.zeros(1 << 17)
    for n in range(3):
        sides.go(*names)
        assert all(sides.there[name][0] == n for name in names)
        sides.back(*names)
        sides.go(*names)
        assert (sides.sent, sides.came) == (0, 0)
        for name in names:
            sides.here[name] += 1.0


@pytest.mark.parametrize("at", ["comparing the first", "comparing the second", "filling the second"])
def test_what_was_found_out_before_an_interrupt_is_found_out_again(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    sides.here |= {"a": np.zeros(LENGTH), "b": np.zeros(LENGTH)}
    sides.go("a", "b")
    for n in range(3):  # so that there are files to be filled again, and pages are watched
        sides.here["a"][0] = sides.here["b"][0] = n
        sides.go("a", "b")
        sides.back("a", "b")
    sides.here["a"][1], sides.here["b"][1] = 1.0, 2.0
    what = "copy_bytes" if at == "filling the second" else "is_same"
    usual, left = getattr(lending, what), 1 if at == "comparing the first" else 2

    def interrupted(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return usual(*args)

    with monkeypatch.context() as patch:
        patch.setattr(lending, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            sides.go("a", "b")
    assert (sides.there["a"][1], sides.there["b"][1]) == (0.0, 0.0)
    sides.go("a", "b")
    assert (sides.there["a"][1], sides.there["b"][1]) == (1.0, 2.0)
    sides.back("a", "b")
    assert sides.came == 0


@FORKS
def test_files_that_a_forked_child_may_look_at_are_never_filled_again(sides: Sides) -> None:
    sides.here["a"] = np.zeros(LENGTH)
    sides.go("a")
    array = sides.there["a"]
    told, tell = os.pipe()
    answer, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(told, 1)
        os.write(say, b"%d" % array.sum())
        os._exit(0)
    try:
        for _ in range(4):
            sides.here["a"] += 1.0
            sides.go("a")
            sides.back("a")
        assert array[0] == 4.0
        assert 1 not in files(sides)
    finally:
        os.write(tell, b".")
        assert os.read(answer, 20) == b"0"
        assert os.waitpid(pid, 0)[1] == 0
        for fd in (told, tell, answer, say):
            os.close(fd)
