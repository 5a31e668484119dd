"""Named values go apart as far as what they share allows."""

from __future__ import annotations

import fractions
import pickletools
import random
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.state.checkpoints.object_groups import LARGE_BYTES, LONG, encode_roots
from sublet.state.transfer.encoded import Head
from sublet.state.transfer.loading import decode
from sublet.state.transfer.reducers import EncodingRules


def again(roots: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group in encode_roots(roots):
        value = decode(group.encoded.head, [memoryview(bytearray(view)) for view in group.encoded.views])
        assert set(value) == set(group.names)
        found |= value
    return found


def together(roots: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: group.names for group in encode_roots(roots) for name in group.names}


class Thing:
    def __init__(self, held: object) -> None:
        self.held = held


@given(st.integers(0, 2**32))
def test_whatever_is_shared_is_shared_again(seed: int) -> None:
    """Random names over random objects; compared object by object."""
    chance = random.Random(seed)
    kinds: list[Any] = [lambda: [1], lambda: {"a": []}, lambda: Thing([]), lambda: np.arange(5000)]
    things = [chance.choice(kinds)() for _ in range(8)]
    roots: dict[str, Any] = {f"plain{n}": [n, str(n)] for n in range(chance.choice((0, 300)))}
    for n in range(chance.randrange(12)):
        roots[f"root{n}"] = [chance.choice(things) for _ in range(chance.randrange(4))]
    back = again(roots)
    assert back.keys() == roots.keys()
    flat = [(one, other) for name in sorted(roots) for one, other in zip(roots[name], back[name], strict=True)]
    for one, other in flat:
        if not isinstance(one, int | str):
            assert [a is one for a, _ in flat] == [b is other for _, b in flat]


@pytest.mark.parametrize(
    "shared", [bytearray(n) for n in (0, 10, 300, 70_000, 300_000)] + [[], {}, set[int](), {1: []}]
)
@pytest.mark.parametrize("hold", [lambda it: {"it": it}, lambda it: [it], lambda it: (1, (it,)), lambda it: it])
def test_one_thing_in_two_of_many_small_roots_is_one_again(shared: Any, hold: Any) -> None:
    """Also one that the garbage collector does not look into, in a dict that it therefore does not track."""
    roots = {f"v{n}": {"n": n, "half": n * 0.5, "text": "\x96" * 9} for n in range(500)}
    assert len(encode_roots(roots)) > 3
    roots |= {"a": hold(shared), "z": hold(shared)}
    groups = together(roots)
    assert groups["a"] == groups["z"]
    assert len(set(groups.values())) > 3


def test_every_root_stands_in_one_group_and_the_order_is_that_of_names() -> None:
    roots = {f"n{n}": n for n in range(1000)}
    groups = encode_roots(roots)
    assert [name for group in groups for name in group.names] == sorted(roots)
    assert len(groups) > 3


def test_large_roots_stand_alone_and_small_ones_do_not() -> None:
    roots = {"a": np.zeros(LARGE_BYTES), "b": np.zeros(LARGE_BYTES), "c": 1, "d": [2]}
    assert together(roots) == {"a": ("a",), "b": ("b",), "c": ("c", "d"), "d": ("c", "d")}


def test_views_of_one_array_stay_together_under_whatever_name() -> None:
    base = np.zeros(LARGE_BYTES)
    roots: dict[str, Any] = {f"n{n}": n for n in range(1000)}
    roots |= {"a": base[:10], "z": base[5:], "other": np.zeros(LARGE_BYTES)}
    assert together(roots)["a"] == ("a", "z")
    assert together(roots)["other"] == ("other",)
    back = again(roots)
    back["a"][5] = 7
    assert back["z"][0] == 7


def test_a_type_that_both_use_ties_nobody_together() -> None:
    roots = {name: np.zeros(LARGE_BYTES) for name in ("a", "b")} | {"c": np.dtype("f8"), "d": "text"}
    assert together(roots)["a"] == ("a",)


def a_frame(**more: Any) -> pd.DataFrame:
    rows = LARGE_BYTES // 8
    return pd.DataFrame({"n": range(rows), "text": [f"row {n}" for n in range(rows)], **more})


def test_what_a_library_has_in_all_its_objects_ties_none_of_them_together() -> None:
    """The names that a class of pandas lists, functions of Cython that load a column, labels of columns, a dtype."""
    base = a_frame()
    dtype = np.dtype([("a", "i8"), ("b", "f8")])
    roots = {
        "base": base,
        "other": a_frame(),
        "part": base[base.n > 3],
        "copy": base.copy(),
        "column": base["text"].str.upper(),
        "kinds": a_frame(kind=pd.Categorical(["x", "y"] * (LARGE_BYTES // 16))),
        "records": np.zeros(LARGE_BYTES, dtype),
        "more records": np.ones(LARGE_BYTES, dtype),
    }
    assert together(roots) == {name: (name,) for name in roots}
    back = again(roots)
    for name, value in roots.items():
        if isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(back[name], value)
    assert back["records"].dtype == dtype


def test_what_frames_truly_share_ties_them_together() -> None:
    """Their index, what is in their ``attrs``, an array whose memory a column of Arrow's looks at."""
    base = a_frame()
    numbers = np.arange(LARGE_BYTES)
    notes: list[int] = []
    roots: dict[str, Any] = {
        "base": base,
        "index": base.index,
        "notes": notes,
        "noted": a_frame(),
        "column": pd.Series(pa.array(numbers), dtype=pd.ArrowDtype(pa.int64())),
        "numbers": numbers,
        "texts": (texts := pa.array([str(n) for n in range(LARGE_BYTES)])),
        "letters": np.frombuffer(texts.buffers()[2], "u1"),
    }
    roots["noted"].attrs["notes"] = notes
    found = together(roots)
    assert found["base"] == ("base", "index")
    assert found["noted"] == ("noted", "notes")
    assert found["column"] == ("column", "numbers")
    assert found["texts"] == ("letters", "texts")
    back = again(roots)
    back["numbers"][0] = 7
    assert back["column"][0] == 7
    back["index"].name = "line"
    assert back["base"].index.name == "line"
    back["notes"].append(3)
    assert back["noted"].attrs["notes"] == [3]


def test_names_that_a_frame_of_ones_own_class_keeps_come_with_it() -> None:
    value = Measured({"n": [1, 2]})
    value.unit = "mm"
    back = again({"a": value})["a"]
    assert (type(back), back.unit, back._metadata) == (Measured, "mm", ["unit"])
    value._metadata = ["unit", "place"]  # type: ignore[misc]  # pandas lets one
    value.place = "here"
    assert again({"a": value})["a"].place == "here"


class Measured(pd.DataFrame):  # type: ignore[misc]  # pandas is not read by mypy
    """As pandas' documentation says to make one."""

    _metadata: ClassVar = ["unit"]

    @property
    def _constructor(self) -> Any:
        return Measured


def test_a_function_of_main_stays_with_what_it_names() -> None:
    held = [1]
    add = lambda: held.append(2)  # noqa: E731
    back = again({"add": add, "held": held})
    back["add"]()
    assert back["held"] == [1, 2]


def test_no_roots_are_no_groups() -> None:
    assert encode_roots({}) == []


def test_a_number_beside_a_dict_is_as_plain_as_either() -> None:
    """The shortcut for dicts alone once took what stood beside them for dicts."""
    [group] = encode_roots({"a": {"k": 1}, "b": 2, "c": "text"})
    assert group.names == ("a", "b", "c")
    assert decode(group.encoded.head, group.encoded.views) == {"a": {"k": 1}, "b": 2, "c": "text"}


class _Remembering(EncodingRules):
    remembers = True


def test_plain_groups_say_what_they_met_when_somebody_asks() -> None:
    inner = [1, 2]
    rules = _Remembering()
    [group] = encode_roots({"a": {"k": 1}, "b": inner, "c": 3, "d": inner}, rules=rules)
    assert group.encoded.met is None
    again = group.remembering(rules)
    assert again.encoded.met is not None
    assert again.remembering(rules) is again
    assert [n for n, value in again.encoded.met.items() if value is inner] == [2]
    assert 3 not in again.encoded.met.values()
    assert again.encoded.head == group.encoded.head
    [deep] = encode_roots({"a": [[1]]}, rules=rules)
    assert deep.remembering(rules) is deep
    assert deep.encoded.met is not None


WORDS = [f"word {n}" for n in range(LONG)]


def remembered(value: object) -> int:
    """How many objects the pickle of a value numbers."""
    (group,) = encode_roots({"it": value})
    stream = bytes(Head.parse(group.encoded.head).stream)
    return sum(code.name == "MEMOIZE" for code, _, _ in pickletools.genops(stream))


@pytest.mark.parametrize(
    "value",
    [
        *(set(WORDS), frozenset(WORDS), list(WORDS), tuple(WORDS), dict.fromkeys(WORDS, 1.5), dict.fromkeys(WORDS)),
        *({*WORDS, b"word 1", -1, -2, 1 << 70, None, True, 2.0, ""}, [*WORDS, 1, True, 1.0, b"n"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_long_containers_of_texts_that_stand_in_them_once_are_pickled_without_a_table(value: Any) -> None:
    assert remembered(value) < 10
    (back,) = again({"it": value}).values()
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, list | tuple | dict):
        assert [(type(one), one) for one in back] == [(type(one), one) for one in value]


class Text(str):
    """Equal to a str, and none."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        *([*WORDS, "twice" * 9, "twice" * 9], [*WORDS, ["within"]], {*WORDS, Text("word")}, {*WORDS, ("a", "tuple")}),
        *(
            {**dict.fromkeys(WORDS, 1), "last": "text"},
            dict[Any, Any]({1: []}, **dict.fromkeys(WORDS, 1)),
            [*WORDS, bytearray(b"ab")],
        ),
    ],
)
def test_other_long_containers_are_pickled_with_it(value: Any) -> None:
    assert remembered(value) > LONG
    (back,) = again({"it": value}).values()
    assert back == value


def test_a_long_text_in_a_list_a_thousand_times_is_written_once() -> None:
    text = "x" * 10_000
    (group,) = encode_roots({"it": [*WORDS, *[text] * 1000]})
    assert group.encoded.nbytes < 1 << 20


def test_the_rule_of_a_type_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all bundles of values that are encoded together."""
    looked: list[type] = []
    rule_for = EncodingRules._rule_for

    def noted(self: EncodingRules, kind: type) -> Any:
        looked.append(kind)
        return rule_for(self, kind)

    monkeypatch.setattr(EncodingRules, "_rule_for", noted)
    roots = {f"v{n}": [fractions.Fraction(n, 7), np.arange(n + 1), (lambda m: lambda: m)(n)] for n in range(500)}
    assert len(encode_roots(roots)) > 3
    assert len(looked) == len(set(looked))
    back = again(roots)
    assert all(back[f"v{n}"][2]() == n and back[f"v{n}"][0] == fractions.Fraction(n, 7) for n in range(500))
