"""The plans of ``codec`` for messages that come by the thousand, as one function for each class.

An office and its supervisor tell each other of every lease, and walking through a plan field by field would cost as
much as deciding. So a class that was written or read ``MANY`` times gets a function made for it, from the same
annotations. A process that says little never makes one.

What is written is the same to the letter. What is read is taken only if it is a message as we write it: every field is
there, text is ASCII, numbers fit. Anything else raises here, and ``codec`` reads it again, slowly, to the same value or
to an error with its name.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

from sublet.values import Epoch
from sublet.wire.strict import INTEGER_MAX, Json, wrong

__all__ = ["MANY", "Reader", "reader", "writer"]

MANY: Final = 32
"""Messages of a class after which it is worth a function."""

Reader: TypeAlias = Callable[[dict[str, Json], int], Any]
"""``(object, how many names it has beside the fields) -> message``."""
_Scope: TypeAlias = dict[str, Any]
"""What the source of a function may name."""

_dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":"), check_circular=False).encode


class Shape(Protocol):
    """What ``codec`` knows of one annotation."""

    encode: Callable[[Any], Json] | None
    decode: Callable[[Json], Any]
    of: Any
    item: Any
    optional: Any
    classes: dict[str, type]


class Plan(Protocol):
    """What ``codec`` knows of one class."""

    def write(self, message: object) -> str: ...

    def write_marked(self, message: object) -> str: ...

    def swift_reader(self) -> Reader: ...


Plans: TypeAlias = Callable[[type], Plan]


def writer(fields: Mapping[str, Any], plan: Plans) -> Callable[[Any], str]:
    """``message -> JSON text``, without the mark."""
    scope: _Scope = {"text": json.encoder.encode_basestring_ascii, "truth": {True: "true", False: "false"}}
    written = [(name, *_formatted(shape, f"m.{name}", scope, plan)) for name, shape in fields.items()]
    form = "{" + ",".join(f'"{name}":{form}' for name, form, _ in written) + "}"
    values = "".join(f"{value}, " for _, _, value in written)
    made: Callable[[Any], str] = _made(f"lambda m: {form!r} % ({values})", scope)
    return made


def reader(cls: type, fields: Mapping[str, Any], plan: Plans) -> Reader:
    """The function that reads a class."""
    scope: _Scope = {"cls": cls, "most": INTEGER_MAX, "least": -INTEGER_MAX - 1, "no": _no, "count": len(fields)}
    values = ", ".join(f"{name}={_read(shape, f'd[{name!r}]', scope, plan)}" for name, shape in fields.items())
    made: Reader = _made(f"lambda d, more: cls({values}) if len(d) == count + more else no(d)", scope)
    return made


def _formatted(shape: Shape, value: str, scope: _Scope, plan: Plans) -> tuple[str, str]:
    """How ``%`` formats a value, and the source of what is formatted."""
    if shape.of is int:
        return "%d", value
    if shape.of is Epoch:
        return '"%s"', f"str({value})"
    return "%s", _written(shape, value, scope, plan)


def _written(shape: Shape, value: str, scope: _Scope, plan: Plans) -> str:
    """The source of a value's JSON."""
    of, name = shape.of, f"w{len(scope)}"
    if of is str:
        return f"text({value})"
    if of is bool:
        return f"truth[{value}]"
    if shape.optional is not None:
        form, other = _formatted(shape.optional, value, scope, plan)
        return f"('null' if {value} is None else {form!r} % ({other},))"
    if shape.item is not None:
        form, one = _formatted(shape.item, "one", scope, plan)
        return f"'[' + ','.join([{form!r} % ({one},) for one in {value}]) + ']'"
    if shape.classes:
        scope[name] = {cls: plan(cls).write_marked for cls in shape.classes.values()}
        return f"{name}[type({value})]({value})"
    if isinstance(of, type) and issubclass(of, enum.Enum):
        scope[name] = {member: _dumps(member.value) for member in of}
        return f"{name}[{value}]"
    is_message = isinstance(of, type) and dataclasses.is_dataclass(of)
    scope[name] = plan(of).write if is_message else _slowly(shape.encode)
    return f"{name}({value})"


def _slowly(encode: Callable[[Any], Json] | None) -> Callable[[Any], str]:
    return _dumps if encode is None else lambda one: _dumps(encode(one))


def _read(shape: Shape, value: str, scope: _Scope, plan: Plans) -> str:
    """The source of a value, or of what raises for anything unusual."""
    of, name = shape.of, f"r{len(scope)}"
    if of is str:
        return f"(v if type(v := {value}) is str and v.isascii() else no(v))"
    if of is int:
        return f"(v if type(v := {value}) is int and least <= v <= most else no(v))"
    if shape.item is not None:
        scope[name] = None  # the name is taken before the parts take theirs
        one = _read(shape.item, "one", scope, plan)
        scope[name] = _made(f"lambda many: tuple([{one} for one in many]) if type(many) is list else no(many)", scope)
    elif shape.classes:
        readers = {cls.__name__: plan(cls).swift_reader() for cls in shape.classes.values()}
        scope[name] = lambda one: readers[one["is"]](one, 1)
    elif isinstance(of, type) and dataclasses.is_dataclass(of):
        swiftly = plan(of).swift_reader()
        scope[name] = lambda one: swiftly(one, 0) if type(one) is dict else _no(one)
    else:
        scope[name] = shape.decode
    return f"{name}({value})"


def _made(source: str, scope: _Scope) -> Any:
    """The function of this source. There is nothing in it but names of fields of our own classes."""
    return eval(compile(source, "<swift>", "eval"), scope)  # noqa: S307


def _no(value: Json) -> Any:
    raise wrong(value, "as we write it")
