"""Functions that one ``def`` made over and over cost little each, and stay apart where they differ."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from sublet.state.transfer import codec
from sublet.state.transfer.codec import encode
from sublet.state.transfer.loading import decode
from sublet.state.transfer.reducers import EncodingRules

SOURCE = """
import os, os.path, sys
def made(n):
    count = 0
    def f():
        nonlocal count
        count += 1
        return n, count
    def g():
        return count
    return f, g
def plain(module=sys):
    return lambda: module.path
"""


@pytest.fixture
def main() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, names)  # noqa: S102
    return names


def again(value: Any) -> Any:
    encoded = encode(value)
    return decode(encoded.head, encoded.views)


def test_each_keeps_its_own_variables(main: dict[str, Any]) -> None:
    pairs = again([main["made"](n) for n in range(3)])
    assert [f() for f, _ in pairs] == [(0, 1), (1, 1), (2, 1)]
    assert pairs[1][0]() == (1, 2)
    assert [g() for _, g in pairs] == [1, 2, 1]


def test_what_one_has_of_its_own_the_others_do_not(main: dict[str, Any]) -> None:
    functions = [main["made"](n)[0] for n in range(6)]
    functions[1].note = "mine"
    functions[2].__annotations__["return"] = "tuple"
    functions[3].__name__ = "other"
    functions[4].__doc__ = "a text"
    functions[5].__kwdefaults__ = {"x": 1}
    for order in (functions, functions[::-1]):
        came = again(order) if order is functions else again(order)[::-1]
        assert [vars(one) for one in came] == [{}, {"note": "mine"}, {}, {}, {}, {}]
        assert [one.__annotations__ for one in came] == [{}, {}, {"return": "tuple"}, {}, {}, {}]
        assert [one.__name__ for one in came] == ["f", "f", "f", "other", "f", "f"]
        assert [one.__doc__ for one in came] == [None, None, None, None, "a text", None]
        assert [one.__kwdefaults__ for one in came] == [None] * 5 + [{"x": 1}]
        came[0].__annotations__["x"] = int
        came[0].y = 1
        assert not came[1].__annotations__
        assert not hasattr(came[3], "y")


def test_a_module_around_one_of_them(main: dict[str, Any]) -> None:
    made = [main["plain"](module) for module in (main["sys"], main["os"])]
    assert made[0]() == again(made)[0]()
    assert again(made[::-1])[1]() == made[0]()


def calls(monkeypatch: pytest.MonkeyPatch, value: object) -> int:
    """How often cloudpickle takes something apart for it."""
    counted = 0
    reduce = cloudpickle.Pickler.reducer_override

    def reducer(self: Any, one: Any) -> Any:
        nonlocal counted
        counted += 1
        return reduce(self, one)

    with monkeypatch.context() as patched:
        patched.setattr(cloudpickle.Pickler, "reducer_override", reducer)
        encode(value)
    return counted


def test_a_thousand_of_them_are_taken_apart_once(main: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = [main["made"](n) for n in range(2)], [main["made"](n) for n in range(1000)]
    assert calls(monkeypatch, many) == calls(monkeypatch, few) > 0


def test_each_costs_a_few_bytes(main: dict[str, Any]) -> None:
    """The names of its parts are in the head once."""
    one, many = ([main["made"](n) for n in range(count)] for count in (1, 1001))
    assert (encode(many).nbytes - encode(one).nbytes) / 2000 < 60
    assert encode(many).nbytes == codec.encode(again(many)).nbytes


def test_the_rules_of_another_encoding_know_nothing_of_this_one(main: dict[str, Any]) -> None:
    rules = EncodingRules()
    codec.Encoding(rules).dump(main["made"](1))
    assert not rules.anew()._alike
