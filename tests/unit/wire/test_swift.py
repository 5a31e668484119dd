"""What comes by the thousand is written to the same letter and read to the same value; the codec does the rest."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.wire import codec
from sublet.wire.codec import MARK, dumps, from_wire, loads, to_wire
from sublet.wire.guests import Orders
from sublet.wire.swift import MANY
from tests.unit.wire.test_codec import GRANT, MESSAGES, values_of

JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    1.5,
    1 << 63,
    "",
    "x",
    "1.2",
    "01.2",
    "-1.2",
    "ä",
    "\ud800",
    [],
    {},
    [[]],
    {MARK: 1},
)


def swiftly(value: dict[str, Any], cls: type) -> Any:
    return codec._plan(cls).swift_reader()(value, 1)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_both_ways_agree(cls: type, data: st.DataObject) -> None:
    """Of any message: the same text, and from it an equal message, or none swiftly."""
    message = data.draw(values_of(cls))
    slow = to_wire(message)
    written = codec._plan(cls).write_marked(message)
    assert written == json.dumps(slow, separators=(",", ":"), allow_nan=False)
    value = json.loads(written)
    try:
        read = swiftly(value, cls)
    except Exception:
        assert not written.isascii() or "\\u" in written, "only what is no ASCII is left to the codec"
    else:
        assert read == message == from_wire(cls, value)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_nothing_is_taken_that_the_codec_refuses(cls: type, data: st.DataObject, seed: int) -> None:
    """However a message is bent, what is read swiftly is what the codec reads."""
    value = bent(to_wire(data.draw(values_of(cls))), random.Random(seed))
    if type(value) is not dict or value.get(MARK) != cls.__name__:
        return  # by its mark it is found
    try:
        read = swiftly(value, cls)
    except Exception:
        return
    assert read == from_wire(cls, value)


def test_what_came_often_is_read_swiftly_and_errors_keep_their_names() -> None:
    """After the first few, messages go the short way, and a wrong one is refused in the same words."""
    message = Orders(orders=(GRANT,), incarnation=1)
    data = dumps(message)
    bad = data.replace(b'"number":3', b'"number":true')
    with pytest.raises(InvalidRequest) as before:
        loads(Orders, bad)
    for _ in range(MANY + 2):
        assert dumps(message) == data
        assert loads(Orders, data) == message
    assert (Orders, "Orders") in codec._SWIFT
    with pytest.raises(InvalidRequest) as after:
        loads(Orders, bad)
    assert (after.value.message, after.value.do) == (before.value.message, before.value.do)
    older = data.replace(b',"name":""', b"")
    assert older != data
    assert loads(Orders, older) == message, "what an older side leaves out is read as ever"


def bent(value: Any, dice: random.Random) -> Any:
    """One thing in it is another, gone, or too much."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        name = dice.choice(list(value))
        match dice.randrange(6):
            case 0:
                return {key: one for key, one in value.items() if key != name}
            case 1:
                return {**value, "more": dice.choice(JUNK)}
            case _:
                return {**value, name: bent(value[name], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        return [*value[:at], bent(value[at], dice), *value[at + 1 :]]
    return dice.choice(JUNK)
