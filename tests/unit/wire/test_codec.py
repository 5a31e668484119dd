"""The codec: what is said comes back equal; what is wrong is refused with the name of the field."""

from __future__ import annotations

import enum
import json
import os
import random
import threading
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import InvalidRequest
from sublet.lease_end import EndReason
from sublet.values import (
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    NodeId,
    ResourceId,
    TenantId,
)
from sublet.wire import guests, orders
from sublet.wire.codec import MARK, dumps, from_wire, loads, to_wire
from sublet.wire.orders import Grant, NotHeld, Order, Part, Report, TornDown
from sublet.wire.refusals import Refusal

SPOILED = int(os.environ.get("SUBLET_FRAMES", "5000"))
UNIONS = (
    *(orders.Order, orders.Report),
    *(guests.HolderCall, guests.HolderReply, guests.OfficeCall, guests.OfficeReply),
)
MESSAGES = sorted(
    {
        *(cls for union in UNIONS for cls in typing.get_args(union)),
        *(guests.GuestNews, guests.Orders, guests.Reports, orders.Inventory, Refusal),
    },
    key=lambda cls: cls.__name__,
)

GRANT = Grant(
    lease=LeaseId("l-1"),
    epoch=Epoch(1, 42),
    number=3,
    tenant=TenantId("anna"),
    parts=(
        Part(resource=ResourceId("gpu0"), kind=Kind.GPU, amount=8 << 30, millis=100, exclusivity=Exclusivity.SHARED),
        Part(resource=ResourceId("cpu"), kind=Kind.CPU, amount=2),
    ),
    deadline_ns=123_456_789_012_345,
    ttl_ns=30_000_000_000,
)

# ------------------------------------------------------------------------------------------------------- round trips

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
st.register_type_strategy(Epoch, st.builds(Epoch, st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1)))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this annotation may hold, written apart from the codec's own reading of annotations."""
    while isinstance(hint, NewType):
        hint = hint.__supertype__
    if hint is str:
        return TEXT | st.binary(max_size=4).map(lambda data: data.decode("utf-8", "surrogateescape"))
    if hint is int:
        return INTEGERS
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(TEXT, values_of(typing.get_args(hint)[1]), max_size=3)
    if args := typing.get_args(hint):
        return st.one_of([values_of(arg) for arg in args])
    if hasattr(hint, "__dataclass_fields__"):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{name: values_of(hints[name]) for name in hint.__dataclass_fields__})
    return st.from_type(hint)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_comes_back_equal(cls: Any) -> None:
    @given(values_of(cls))
    def comes_back(message: object) -> None:
        data = dumps(message)
        assert loads(cls, data) == message
        assert dumps(loads(cls, data)) == data
        assert from_wire(cls, to_wire(message)) == message

    comes_back()


@pytest.mark.parametrize("union", UNIONS)
def test_every_class_of_a_union_is_found_by_its_mark(union: Any) -> None:
    @given(values_of(union))
    def comes_back(message: object) -> None:
        found = loads(union, dumps(message))
        assert type(found) is type(message)
        assert found == message

    comes_back()


def test_a_message_reads_like_this() -> None:
    assert json.loads(dumps(GRANT)) == {
        "is": "Grant",
        "lease": "l-1",
        "epoch": "1.42",
        "number": 3,
        "tenant": "anna",
        "parts": [
            {"resource": "gpu0", "kind": "gpu", "amount": 8 << 30, "millis": 100, "exclusivity": "shared"},
            {"resource": "cpu", "kind": "cpu", "amount": 2, "millis": 0, "exclusivity": None},
        ],
        "deadline_ns": 123_456_789_012_345,
        "ttl_ns": 30_000_000_000,
        "name": "",
        "parked": False,
        "resume": None,
        "kept": False,
    }


def test_types_survive_not_only_equality() -> None:
    found = loads(Grant, dumps(GRANT))
    assert type(found.epoch) is Epoch
    assert type(found.parts) is tuple
    assert found.parts[0].kind is Kind.GPU
    assert found.parts[1].exclusivity is None


def test_what_has_a_default_may_be_left_out() -> None:
    value = {"is": "NotHeld", "node": "n", "lease": "l", "epoch": "1.1", "number": 1}
    assert from_wire(Report, value) == NotHeld(
        node=NodeId("n"), lease=LeaseId("l"), epoch=Epoch(1, 1), number=1, detail=""
    )
    assert from_wire(orders.Inventory, {"is": "Inventory", "node": "n", "domain": "d"}).labels == {}


def test_a_file_name_that_is_no_text_passes() -> None:
    spec = guests.GuestSpec(argv=("cat", b"\xff.txt".decode("utf-8", "surrogateescape")))
    assert loads(guests.Start, dumps(guests.Start(spec=spec))).spec == spec


# -------------------------------------------------------------------------------------------------- what is refused


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda value: {key: one for key, one in value.items() if key != name}


def with_(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: {**value, **fields}


def with_part(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda value: {**value, "parts": [value["parts"][0], {**value["parts"][1], **fields}]}


WRONG: tuple[tuple[Callable[[dict[str, Any]], Any], str], ...] = (
    (without("lease"), r"Grant lacks the field lease\."),
    (without("is"), r"does not say what it is"),
    (with_(nonsense=1), r"Grant has no field 'nonsense'"),
    (with_(**{"x" * 1000: 1}), r"Grant has no field 'x{57,58}…"),
    (with_(lease=3), r"Grant\.lease is 3, not text"),
    (with_(lease=None), r"Grant\.lease is null, not text"),
    (with_(lease="\ud800"), r"Grant\.lease has half a character"),
    (with_(number="3"), r"Grant\.number is '3', not a whole number"),
    (with_(number=True), r"Grant\.number is true, not a whole number"),
    (with_(number=3.0), r"Grant\.number is 3\.0, not a whole number"),
    (with_(number=1 << 63), r"Grant\.number is a number of more than 63 bits"),
    (with_(number=-(1 << 63) - 1), r"Grant\.number is a number of more than 63 bits"),
    (with_(number=10**4000), r"Grant\.number is a number of more than 63 bits"),
    (with_(epoch="1"), r"Grant\.epoch is '1', not an epoch"),
    (with_(epoch="1.042"), r"Grant\.epoch is '1\.042', not an epoch without zeros"),
    (with_(epoch="١.٢"), r"Grant\.epoch is .*, not an epoch"),
    (with_(epoch=[1, 42]), r"Grant\.epoch is a list, not an epoch"),
    (with_(epoch=1.42), r"Grant\.epoch is 1\.42, not an epoch"),
    (with_(parts={}), r"Grant\.parts is an object, not a list"),
    (with_(parts="ab"), r"Grant\.parts is 'ab', not a list"),
    (with_(parts=[[]]), r"Grant\.parts\[0\] is a list, not an object"),
    (with_part(kind="tpu"), r"Grant\.parts\[1\]\.kind is 'tpu', not one of gpu, cpu, memory, block"),
    (with_part(kind=["gpu"]), r"Grant\.parts\[1\]\.kind is a list, not one of"),
    (with_part(kind={"gpu": 1}), r"Grant\.parts\[1\]\.kind is an object, not one of"),
    (with_part(amount=False), r"Grant\.parts\[1\]\.amount is false"),
    (with_part(exclusivity=1), r"Grant\.parts\[1\]\.exclusivity is 1, not text or null"),
    (with_part(more=1), r"Grant\.parts\[1\] has no field 'more'"),
    (with_part(**{MARK: "Part"}), r"Grant\.parts\[1\] has no field 'is'"),
    (with_(**{MARK: "Start"}), r"the message\.is is 'Start', not one of Grant, Extend"),
    (with_(**{MARK: ["Grant"]}), r"the message\.is is a list, not one of"),
    (with_(**{MARK: None}), r"the message\.is is null, not one of"),
    (lambda value: [value], r"the message is a list, not an object"),
    (lambda value: None, r"the message is null, not an object"),
    (lambda value: "Grant", r"the message is 'Grant', not an object"),
)


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_value_is_refused_with_its_place(change: Callable[[dict[str, Any]], Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        from_wire(Order, change(to_wire(GRANT)))
    assert len(str(caught.value)) < 400
    assert "sublet doctor" in caught.value.do


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"nul",
        b'{"is":"Quit","now":true} ',
        b'{"is":"Quit","now":true}x',
        b'{"is":"Quit","is":"Quit","now":true}',
        b'{"is":"Quit","now":true,"now":true}',
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b'{"is":"Quit","now":' + b"9" * 5000 + b"}",
        b'{"is":"Quit","now":NaN}',
        b'{"is":"Quit","now":1e999}',
        '{"is":"Quit","now":true}'.encode("utf-16"),
        b'\xef\xbb\xbf{"is":"Quit","now":true}',
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_json_or_not_one_message_is_refused(data: bytes) -> None:
    if data.endswith(b" "):
        assert loads(guests.Quit, data) == guests.Quit(now=True)  # blanks around it are JSON's own freedom
        return
    with pytest.raises(InvalidRequest):
        loads(guests.OfficeCall, data)


# ---------------------------------------------------------------------------------- annotations beyond those in use


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    data: bytes = b""
    share: float = 0.0
    level: Level = Level.LOW
    either: Inner | Other | None = None
    maybe: Inner | None = None
    scalar: int | str | None = None
    many: tuple[Inner | Other, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    flag: bool = False
    when: Epoch | None = None
    nested: tuple[tuple[int, ...], ...] = ()


@given(values_of(Everything))
def test_every_annotation_that_can_travel_does(message: Everything) -> None:
    found = loads(Everything, dumps(message))
    assert found == message
    assert repr(found) == repr(message)  # also the types within


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": "eA="}, r"Everything\.data is not base64"),
        ({"data": "eB=="}, r"Everything\.data is not base64 in its canonical form"),
        ({"data": "e A=="}, r"Everything\.data is not base64"),
        ({"data": "é"}, r"Everything\.data is not base64"),
        ({"data": 1}, r"Everything\.data is 1, not base64"),
        ({"share": float("nan")}, r"Everything\.share is nan, not a finite"),
        ({"share": float("inf")}, r"Everything\.share is inf, not a finite"),
        ({"share": True}, r"Everything\.share is true, not a finite"),
        ({"share": "1"}, r"Everything\.share is '1', not a finite"),
        ({"level": 3}, r"Everything\.level is 3, not one of 1, 2"),
        ({"level": True}, r"Everything\.level is true, not one of 1, 2"),
        ({"level": 1.0}, r"Everything\.level is 1\.0, not one of 1, 2"),
        ({"either": {"at": 1}}, r"Everything\.either does not say what it is"),
        ({"either": {"is": "Part"}}, r"Everything\.either\.is is 'Part', not one of Inner, Other"),
        ({"either": []}, r"Everything\.either is a list, not an object or null"),
        ({"maybe": {"is": "Inner"}}, r"Everything\.maybe has no field 'is'"),
        ({"many": [{"is": "Inner"}, {"is": "Inner", "at": ""}]}, r"Everything\.many\[1\]\.at is '', not"),
        ({"named": {"a": {"at": []}}}, r"Everything\.named\['a'\]\.at is a list"),
        ({"named": []}, r"Everything\.named is a list, not an object"),
        ({"named": {"\ud800": {}}}, r"Everything\.named.* has half a character"),
        ({"flag": 1}, r"Everything\.flag is 1, not true or false"),
        ({"scalar": 1.5}, r"Everything\.scalar is 1\.5, not"),
        ({"scalar": False}, r"Everything\.scalar is false, not"),
        ({"nested": [[1], [2, "x"]]}, r"Everything\.nested\[1\]\[1\] is 'x'"),
    ],
)
def test_other_wrong_values_are_refused_with_their_place(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        from_wire(Everything, {MARK: "Everything", **fields})


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_not_even_written(share: float) -> None:
    with pytest.raises(InvalidRequest, match="not finite"):
        dumps(Everything(share=share))


def test_what_cannot_travel_is_the_programmers_error_and_is_said_at_once() -> None:
    @dataclass(frozen=True)
    class Open:
        what: Any

    @dataclass(frozen=True)
    class Ambiguous:
        what: str | bytes

    for cls, words in ((Open, "does not travel"), (Ambiguous, "tell apart"), (int, "not a dataclass")):
        with pytest.raises(TypeError, match=words):
            from_wire(cls, {MARK: cls.__name__})


def test_a_message_that_contains_itself_is_refused_since_its_depth_would_have_no_bound() -> None:
    with pytest.raises(TypeError, match="contains itself"):
        from_wire(Endless, {MARK: "Endless"})


@dataclass(frozen=True)
class Endless:
    more: Endless | None = None


def test_threads_that_meet_a_class_for_the_first_time_at_one_moment_all_write_it() -> None:
    both = threading.Barrier(2, timeout=30)

    def meet() -> type:
        """Evaluated when the annotations are read: each thread is in the middle of that when the other one is."""
        both.wait()
        return int

    cls = make_dataclass("Met", [("number", "meet()")], frozen=True, namespace={"meet": meet})
    with ThreadPoolExecutor(2) as pool:
        written = list(pool.map(to_wire, [cls(1), cls(2)]))
    assert written == [{MARK: "Met", "number": 1}, {MARK: "Met", "number": 2}]


# -------------------------------------------------------------------------------------------------------------- fuzz

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 63, 10**30, 0.5, float("inf"), "", "x", "\ud800", "1.42", "gpu"),
    *([], {}, [[]], {"is": "Grant"}, [None], {"": None}),
)


def spoiled(chance: random.Random, value: Any) -> Any:
    """The value with one thing in it replaced, left out or added."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        made = dict(value)
        name = chance.choice(list(made))
        match chance.randrange(4):
            case 0:
                del made[name]
            case 1:
                made[chance.choice(("x", "is", "lease", name + "_"))] = chance.choice(JUNK)
            case _:
                made[name] = spoiled(chance, made[name])
        return made
    if isinstance(value, list) and value and chance.random() < 0.8:
        copy = list(value)
        copy[chance.randrange(len(copy))] = spoiled(chance, chance.choice(copy))
        return copy
    return chance.choice(JUNK)


def test_whatever_comes_is_a_message_or_the_declared_error() -> None:
    """Messages with mistakes in them, as values and as bytes."""
    chance = random.Random(42)
    torn = TornDown(node=NodeId("n"), lease=LeaseId("l"), epoch=Epoch(1, 2), resources=(ResourceId("a"),))
    ended = orders.EndedHere(node=NodeId("n"), lease=LeaseId("l"), epoch=Epoch(1, 2), reason=EndReason.IDLE)
    whole = guests.Start(spec=guests.GuestSpec(argv=("a", "b"), env={"A": "b"}, imports=("c",)))
    batch = guests.Orders(orders=(GRANT,), incarnation=1)
    said: tuple[tuple[Any, Any], ...] = (
        (Order, GRANT),
        (Report, torn),
        (Report, ended),
        (guests.HolderCall, whole),
        (guests.Orders, batch),
    )
    outcomes, longest = {"message": 0, "refused": 0}, 0
    for turn in range(SPOILED):
        union, message = said[turn % len(said)]
        value = spoiled(chance, to_wire(message))
        try:
            if chance.random() < 0.5:
                found = from_wire(union, value)
            else:
                data = bytearray(json.dumps(value).encode())
                if chance.random() < 0.5:
                    data[chance.randrange(len(data))] = chance.randrange(256)
                found = loads(union, bytes(data))
            dumps(found)
            outcomes["message"] += 1
        except InvalidRequest as error:
            outcomes["refused"] += 1
            longest = max(longest, len(str(error)))
    assert min(outcomes.values()) > SPOILED // 40, outcomes
    assert longest < 500
