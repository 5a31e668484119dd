"""Two versions of one message: what an older side can still read, and what holds us to that."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.errors import InvalidRequest
from sublet.wire import guests, orders, volumes
from sublet.wire.codec import dumps, from_wire, loads, to_wire
from sublet.wire.compat import LATER, later
from sublet.wire.refusals import Refusal

FIRST: Final = Path(__file__).parent / "golden" / "first_messages.txt"
"""Each message with its fields, as they were when they first had to be read by somebody else's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    name: str
    count: int = 1


Old = Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    name: str
    count: int = 1
    patient: bool = later(False)
    why: tuple[str, ...] = later(())


def test_an_older_side_understands_what_says_nothing_new() -> None:
    """And what it says is understood."""
    told = to_wire(New(name="x"))
    assert told == {"is": "New", "name": "x", "count": 1}
    assert from_wire(Old, {**told, "is": "Ask"}) == Old(name="x")
    assert from_wire(New, {**to_wire(Old(name="x", count=2)), "is": "New"}) == New(name="x", count=2)


def test_what_is_new_is_sent_where_it_is_meant_and_refused_in_words() -> None:
    told = dumps(New(name="x", patient=True, why=("y",)))
    assert loads(New, told) == New(name="x", patient=True, why=("y",))
    with pytest.raises(InvalidRequest, match="Ask has no field 'patient'"):
        loads(Old, told.replace(b"New", b"Ask"))


def classes(hint: Any, seen: set[type]) -> Iterator[type]:
    """The dataclasses that can stand in a message of this annotation."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in seen:
        seen.add(hint)
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from classes(inner, seen)
    for inner in typing.get_args(hint):
        yield from classes(inner, seen)


def all_messages() -> dict[str, type]:
    roots: tuple[Any, ...] = (
        *(orders.Order, orders.Report, orders.Inventory, guests.HolderCall, guests.HolderReply, guests.OfficeCall),
        *(guests.OfficeReply, guests.Orders, guests.Reports, guests.GuestNews, guests.Greeting, Refusal),
        *(volumes.VolumeCall, volumes.VolumeReply),
    )
    seen: set[type] = set()
    return {cls.__name__: cls for root in roots for cls in classes(root, seen)}


def test_a_field_that_is_added_to_a_message_is_marked() -> None:
    """If this fails, a side of before the change refuses every message of the kind: give the field a default that means
    what was always so, as ``later(default)``. The list is not to be rewritten."""
    known = dict(line.split(" ", 1) for line in FIRST.read_text().splitlines())
    messages = all_messages()
    for name, fields in known.items():
        first = set(fields.split())
        for field in dataclasses.fields(messages[name]):
            assert field.name in first or LATER in field.metadata, f"{name}.{field.name} was added without later()"
            first.discard(field.name)
        assert not first, f"{name} lacks {first}, which an older side needs"
