"""Dataclasses to JSON and back, strictly.

What a peer sends becomes one of our own frozen dataclasses or an ``InvalidRequest`` that names the field; there is no
third outcome, and nothing is guessed. Unknown fields, missing fields, a bool for a number, numbers that are not whole,
not finite or beyond 63 bits, names given twice, text that is no text: refused. A field with a default may be left out,
so that an older side is understood; and one that was added ``later`` is left out where it has its default, so that an
older side understands.

A message says what it is: ``{"is": "Grant", …}``. Inside a message the mark stands only where several classes are
possible. An epoch is text (``"1.42"``), bytes are base64, enums are their values. Text may hold single bytes as Python
holds them in file names that are no UTF-8 (``surrogateescape``); other half characters are refused.

The annotations of a class are read once, at its first use, and become a plan: nested functions that each know one type.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import operator
import types
import typing
from _thread import get_ident  # what needs no threads need not load them
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, overload

from sublet.errors import InvalidRequest
from sublet.values import Epoch
from sublet.wire.compat import LATER
from sublet.wire.validators import (
    UPGRADE,
    Decoder,
    Json,
    WrongError,
    base64,
    brief,
    read_by_kind,
    read_bytes,
    read_epoch,
    read_integer,
    read_list,
    read_mapping,
    read_member,
    read_nothing,
    read_number,
    read_text,
    read_truth,
    wrong,
)

MARK: Final = "is"
"""What names the class. It is a word of Python, so no field can be called that."""

Encoder: TypeAlias = Callable[[Any], Json]
_T = TypeVar("_T")


def to_wire(message: object) -> dict[str, Json]:
    """A message as plain JSON values."""
    return {MARK: type(message).__name__, **_plan(type(message)).encode(message)}


@overload
def from_wire(wanted: type[_T], value: Json) -> _T: ...
@overload
def from_wire(wanted: types.UnionType, value: Json) -> Any: ...
def from_wire(wanted: Any, value: Json) -> Any:
    """The message in a JSON value. ``wanted`` is a class, or a union of classes of which the mark names one."""
    try:
        return _choice(wanted)(value)
    except WrongError as error:
        raise error.to_error(_name_of(wanted, value)) from None


def dumps(message: object) -> bytes:
    """A message as bytes. Raises ``InvalidRequest`` for a float that is no number."""
    try:
        return _WRITER.encode(to_wire(message)).encode("ascii")
    except ValueError:
        raise InvalidRequest(f"a {type(message).__name__} holds a number that is not finite", do="Fix it.") from None


@overload
def loads(wanted: type[_T], data: bytes) -> _T: ...
@overload
def loads(wanted: types.UnionType, data: bytes) -> Any: ...
def loads(wanted: Any, data: bytes) -> Any:
    """The message in these bytes; see ``from_wire``."""
    try:
        value = _READER.decode(str(data, "utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, digits without end, brackets without end
        raise InvalidRequest(f"a message is not readable: {brief(error)}", do=UPGRADE) from None
    return from_wire(wanted, value)


def _name_of(wanted: Any, value: Json) -> str:
    """The class that the message says it is, so that the path begins where its sender would look."""
    name = value.get(MARK) if type(value) is dict else None
    names = [cls.__name__ for cls in typing.get_args(wanted) or (wanted,)]
    return name if type(name) is str and name in names else "the message"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is given twice")
    return made


_WRITER: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False)
_READER: Final = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_object)

# --------------------------------------------------------------------------------------------------- plans of classes


def _marked(classes: Mapping[str, type]) -> Decoder:
    names = ", ".join(classes)
    plans: dict[str, Decoder] = {}

    def decode(value: Json) -> object:
        if type(value) is not dict:
            raise wrong(value, "an object")
        name = value.get(MARK)
        plan = plans.get(name) if type(name) is str else None
        if plan is None:
            if type(name) is not str or name not in classes:
                raise _wrong_mark(value, names)
            plan = plans[name] = _plan(classes[name]).decode_marked
        return plan(value)

    return decode


def _wrong_mark(value: dict[str, Json], names: str) -> WrongError:
    if MARK not in value:
        return WrongError(f"does not say what it {MARK}, such as one of {names}")
    error = wrong(value[MARK], f"one of {names}")
    error.path = f".{MARK}"
    return error


class _Plan:
    __slots__ = ("_cls", "_encoders", "_later", "_names", "_required", "_take", "decoders")

    def __init__(self, cls: type) -> None:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls.__name__} is not a dataclass")
        hints = typing.get_type_hints(cls)
        fields = [field for field in dataclasses.fields(cls) if field.init]
        self._cls = cls
        self._names = tuple(field.name for field in fields)
        self._required = frozenset(field.name for field in fields if not _has_default(field))
        types_of = [_Type(hints[field.name], f"{cls.__name__}.{field.name}") for field in fields]
        self.decoders = {name: of.decode for name, of in zip(self._names, types_of, strict=True)}
        self._encoders = [(name, of.encode) for name, of in zip(self._names, types_of, strict=True) if of.encode]
        self._take = _taker(self._names)
        self._later = [(field.name, field.default) for field in fields if LATER in field.metadata]

    def encode(self, message: object) -> dict[str, Json]:
        made = dict(zip(self._names, self._take(message), strict=True))
        if self._later:
            return self._encode_without_defaults(made)
        for name, encode in self._encoders:
            made[name] = encode(made[name])
        return made

    def _encode_without_defaults(self, made: dict[str, Json]) -> dict[str, Json]:
        for name, default in self._later:
            if made[name] == default:
                del made[name]
        for name, encode in self._encoders:
            if name in made:
                made[name] = encode(made[name])
        return made

    def decode(self, value: Json) -> object:
        if type(value) is not dict:
            raise wrong(value, "an object")
        return self._build(value)

    def decode_marked(self, value: dict[str, Json]) -> object:
        rest = dict(value)
        del rest[MARK]
        return self._build(rest)

    def _build(self, value: dict[str, Json]) -> object:
        decoders, made = self.decoders, {}
        name = ""
        try:
            for name, one in value.items():
                made[name] = decoders[name](one)
        except WrongError as error:
            error.path = f".{name}{error.path}"
            raise
        except KeyError:
            if name in decoders:
                raise
            raise WrongError(f"has no field {brief(name)}") from None
        if len(made) < len(self._names) and not made.keys() >= self._required:
            missing = [name for name in self._names if name in self._required and name not in made]
            raise WrongError(f"lacks the field {missing[0]}")
        return self._cls(**made)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _taker(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


class _Type:
    """How a value of one annotation is written and read. ``encode`` is None where JSON takes the value as it is."""

    __slots__ = ("decode", "encode")

    def __init__(self, hint: Any, where: str) -> None:
        self.encode: Encoder | None = None
        self.decode: Decoder
        while isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint in _SINGLE:
            self.encode, self.decode = _SINGLE[hint]
        elif origin in (typing.Union, types.UnionType):
            self._union(args, where)
        elif origin is tuple and len(args) == 2 and args[1] is ...:
            item = _Type(args[0], f"{where}[]")
            self.encode, self.decode = _list_writer(item.encode), read_list(item.decode)
        elif origin is dict and _Type(args[0], where).decode is read_text:
            item = _Type(args[1], f"{where}[]")
            self.encode, self.decode = _mapping_writer(item.encode), read_mapping(item.decode)
        elif isinstance(hint, type) and issubclass(hint, enum.Enum) and issubclass(hint, str | int):
            self.encode, self.decode = operator.attrgetter("value"), read_member(hint)
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            plan = _plan(hint)
            self.encode, self.decode = plan.encode, plan.decode
        else:
            raise TypeError(f"{where}: {hint} does not travel")

    def _union(self, hints: tuple[Any, ...], where: str) -> None:
        classes = {h.__name__: h for h in hints if isinstance(h, type) and dataclasses.is_dataclass(h)}
        branches: dict[type, Decoder] = {}
        writers: dict[type, Encoder | None] = {}
        if len(classes) > 1:
            branches[dict] = _marked(classes)
            writers.update(dict.fromkeys(classes.values(), to_wire))
        for hint in hints:
            if len(classes) > 1 and hint in classes.values():
                continue
            one = _Type(hint, where)
            for kind in _json_kinds(hint):
                if kind in branches:
                    raise TypeError(f"{where}: JSON does not tell apart what {hint} is")
                branches[kind] = one.decode
            writers[_runtime_class(hint)] = one.encode
        wanted = " or ".join(_KIND_NAMES[kind] for kind in branches)
        self.decode = read_by_kind(branches, wanted)
        self.encode = _union_writer(writers)


def _list_writer(item: Encoder | None) -> Encoder:
    return list if item is None else lambda value: [item(one) for one in value]


def _mapping_writer(item: Encoder | None) -> Encoder | None:
    return None if item is None else lambda value: {key: item(one) for key, one in value.items()}


def _union_writer(writers: dict[type, Encoder | None]) -> Encoder | None:
    if not any(writers.values()):
        return None

    def encode(value: Any) -> Json:
        writer = writers[type(value)]
        return value if writer is None else writer(value)

    return encode


_NONE: Final = type(None)
_SINGLE: Final[dict[Any, tuple[Encoder | None, Decoder]]] = {
    str: (None, read_text),
    int: (None, read_integer),
    float: (None, read_number),
    bool: (None, read_truth),
    _NONE: (None, read_nothing),
    bytes: (base64, read_bytes),
    Epoch: (str, read_epoch),
}
_KIND_NAMES: Final[dict[type, str]] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    _NONE: "null",
    list: "a list",
    dict: "an object",
}


def _runtime_class(hint: Any) -> type:
    """The class that a value of this annotation has."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    found: type = typing.get_origin(hint) or hint
    return found


def _json_kinds(hint: Any) -> tuple[type, ...]:
    """What ``json`` makes of values of this annotation."""
    cls = _runtime_class(hint)
    if cls is tuple:
        return (list,)
    if cls in (bytes, Epoch) or issubclass(cls, str):
        return (str,)
    if cls is float:
        return (int, float)
    if cls in (bool, _NONE, dict):
        return (cls,)
    return (int,) if issubclass(cls, int) else (dict,)


_PLANS: Final[dict[type, _Plan]] = {}
_MAKING: Final[set[tuple[int, type]]] = set()
"""Which thread is making the plan of which class. Two that meet a class for the first time at one moment both make it;
no lock is waited for, since the child of a fork could find it taken for good."""
_CHOICES: Final[dict[Any, Decoder]] = {}


def _plan(cls: type) -> _Plan:
    found = _PLANS.get(cls)
    if found is None:
        making = (get_ident(), cls)
        if making in _MAKING:
            raise TypeError(f"{cls.__name__} contains itself; a message has a bounded depth")
        _MAKING.add(making)
        try:
            found = _PLANS[cls] = _Plan(cls)
        finally:
            _MAKING.remove(making)
    return found


def _choice(wanted: Any) -> Decoder:
    found = _CHOICES.get(wanted)
    if found is None:
        classes = typing.get_args(wanted) or (wanted,)
        found = _CHOICES[wanted] = _marked({cls.__name__: cls for cls in classes})
    return found
