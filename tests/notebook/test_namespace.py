"""What is asked of a whole namespace at once is what a loop over it would find."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sublet.notebook.namespace import (
    FEW,
    BoundNames,
    Growth,
    NamesDecoder,
    NamesEncoder,
    Shared,
    results,
    visible,
    visible_among,
)


class Thing:
    """Can be held weakly."""


def values(chance: random.Random) -> list[Any]:
    return [[], {}, 1, "one", Thing(), Thing(), (1, 2), None, chance.random()]


@given(st.integers(0, 2**32))
def test_what_is_bound_anew_is_what_a_loop_finds(seed: int) -> None:
    """Names are bound, removed and bound again, by cells and by who says so."""
    chance = random.Random(seed)
    names: dict[str, Any] = {f"n{n}": chance.choice(values(chance)) for n in range(chance.randrange(12))}
    bound, known = BoundNames(names), dict(names)
    for _ in range(12):
        moved = []
        for _ in range(chance.randrange(4)):
            name = f"n{chance.randrange(15)}"
            if chance.random() < 0.3:
                names.pop(name, None)
            else:
                names[name] = chance.choice([*names.values(), *values(chance)])
            moved.append(name)
        if chance.random() < 0.3:
            bound.noted(names, moved)
            known = {name: names[name] for name in names if name in moved or name in known} | {
                name: value for name, value in known.items() if name not in moved
            }
            continue
        found = bound.rebound(names)
        assert found == [name for name in names if name not in known or known[name] is not names[name]]
        for name, value in known.items():
            if name in names and name not in found:
                assert bound[name]() is value
        bound.noted(names, found)
        known = dict(names)


def test_what_can_be_held_weakly_is_let_go_of_with_its_name() -> None:
    names: dict[str, Any] = {"a": Thing(), "b": []}
    bound = BoundNames(names)
    seen = weakref.ref(names["a"])
    names["a"] = None
    gc.collect()
    assert seen() is None
    assert bound.rebound(names) == ["a"]
    assert bound["a"]() is not names["a"]
    assert set(bound) == {"a", "b"}


def test_a_namespace_may_hold_what_compares_itself_with_nothing() -> None:
    class Odd:
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared")

    names = {"a": Odd(), "b": Odd()}
    bound = BoundNames(names)
    assert bound.rebound(names) == []
    names["a"] = Odd()
    assert bound.rebound(names) == ["a"]


@given(st.integers(0, 2**32))
def test_what_is_gone_is_what_a_loop_finds(seed: int) -> None:
    chance = random.Random(seed)
    names: dict[str, Any] = {}
    shared, other = Shared(), set[str]()
    for _ in range(20):
        some = [f"n{chance.randrange(10)}" for _ in range(chance.randrange(4))]
        match chance.randrange(4):
            case 0:
                names |= dict.fromkeys(some)
            case 1:
                for name in some:
                    names.pop(name, None)
            case 2:
                shared.add(some)
                other |= set(some)
            case _:
                gone = shared.deleted(names)
                assert gone == tuple(sorted(other - names.keys()))
                if chance.random() < 0.5:
                    shared.remove(gone)
                    other -= set(gone)
        assert shared.has_any(some) == (not other.isdisjoint(some))
        assert shared.has_all(some) == other.issuperset(some)
    shared.clear()
    assert shared.deleted(names) == ()


@given(st.integers(0, 2**32))
def test_what_is_gone_and_asked_for_is_told_and_the_rest_in_time(seed: int) -> None:
    """Nothing is told that is there. What is asked for is told; all else is with the next look at everything."""
    chance = random.Random(seed)
    names: dict[str, Any] = {}
    shared, other = Shared(), set[str]()
    for _ in range(20):
        some = [f"n{chance.randrange(10)}" for _ in range(chance.randrange(4))]
        match chance.randrange(5):
            case 0 | 1:
                names |= dict.fromkeys(some)
            case 2:
                for name in some:
                    names.pop(name, None)
            case 3:
                shared.add(some)
                other |= set(some)
            case _:
                gone, every = set(shared.deleted_among(names, some)), other - names.keys()
                assert gone <= every
                assert gone >= every.intersection(some)
                if chance.random() < 0.3:
                    shared.remove(gone)
                    other -= gone
    assert shared.deleted(names) == tuple(sorted(other - names.keys()))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=8), st.integers(0, 6))
def test_a_namespace_that_lost_a_name_is_told_from_one_that_grew(steps: list[tuple[bool, int]], size: int) -> None:
    names: dict[str, Any] = dict.fromkeys(f"n{n}" for n in range(size))
    growth = Growth()
    growth.is_all_since(names)
    before, last = set(names), next(reversed(names), None)
    removed = set()
    for removes, n in steps:
        if not removes:
            names[f"n{n}"] = None
        elif f"n{n}" in names:
            del names[f"n{n}"]
            removed.add(f"n{n}")
    is_all = growth.is_all_since(names)
    assert is_all or not before or not before.isdisjoint(removed)
    if is_all and last not in removed:
        assert before <= names.keys()


def test_a_namespace_of_many_names_is_looked_at_from_its_end() -> None:
    class Counting(dict[str, Any]):
        looked = 0

        def __reversed__(self) -> Any:
            for name in reversed(list(self)):
                self.looked += 1
                yield name

    names = Counting(dict.fromkeys(f"n{n}" for n in range(1000)))
    shared = Shared()
    shared.add(names)
    assert shared.deleted_among(names, ()) == ()
    names.looked = 0
    names |= {"a": 1, "b": 2}
    assert shared.deleted_among(names, ()) == ()
    assert names.looked == 3
    del names["n500"]
    assert shared.deleted_among(names, ()) == ("n500",)
    assert shared.deleted_among(names, ()) == ("n500",)
    names["n500"] = 1
    assert shared.deleted_among(names, ()) == ()


@given(st.integers(0, 2**32))
def test_what_is_told_is_heard(seed: int) -> None:
    """Also when the listener is another one, or did not hear what was said last."""
    chance = random.Random(seed)
    told, heard, listener = NamesEncoder(), NamesDecoder(), Thing()
    names = frozenset(f"n{n}" for n in range(3 * FEW))
    for _ in range(12):
        match chance.randrange(6):
            case 0:
                names = frozenset(f"n{n}" for n in range(chance.randrange(3 * FEW)))
            case 1:
                names = names | {"more"} if chance.random() < 0.5 else names - {"more", "n0"}
            case 2:
                heard, listener = NamesDecoder(), Thing()
            case 3:
                told.encode(names, listener)
                told.forget()
            case _:
                pass
        said = told.encode(names, listener)
        assert heard.decode(said) == names


def test_the_same_names_are_not_said_again() -> None:
    told, listener = NamesEncoder(), Thing()
    names = frozenset(f"n{n}" for n in range(10_000))
    assert told.encode(names, listener).names == names
    assert not told.encode(names, listener).names
    assert told.encode(frozenset({"a"}), listener).names == {"a"}
    assert told.encode(names | {"a"}, listener).names == {"a"}


def test_the_shells_own_names_are_not_the_notebooks() -> None:
    names = dict.fromkeys(["a", "_a", "A", "In", "_", "_12", "_i3", "__name__", "__mine", "open", "Ünder", "_ii"], 1)
    assert visible(names) == {"a", "_a", "A", "__mine", "Ünder"}
    assert visible_among(names, [*names, "b"]) == visible(names)
    assert results(names, [*names, "_13"]) == {"In", "_", "_12", "_i3", "_ii"}


def test_what_vs_code_binds_for_itself_is_not_the_notebooks() -> None:
    """It travels if a cell names it, and not with everything: one of them is a method of the kernel."""
    own = ["__vsc_ipynb_file__", "__vscode_original_input", "_VSCode_defaultMatplotlib_Params", "__VSCODE_compute_hash"]
    names = dict.fromkeys([*own, "_vscale", "vscode", "_VS", "__vs"], 1)
    assert visible(names) == {"_vscale", "vscode", "_VS", "__vs"} == visible_among(names, names)
    assert results(names, [*names, "__vscode_gone"]) == set(own)
