"""Reads JSON values strictly: each function accepts one type.

These are what the plans of ``codec`` are put together from. A value that does not fit raises ``WrongError``; each level
on its way out puts its own name before the path, so nothing is spent on paths while all goes well.
"""

from __future__ import annotations

import binascii
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from sublet.errors import InvalidRequest
from sublet.values import Epoch

INTEGER_MAX: Final = (1 << 63) - 1
"""Amounts and instants fit into this with room to spare; what does not is a mistake or an attack."""
EPOCH_DIGITS: Final = 18
"""Of each of its two numbers."""
SHOWN_MAX: Final = 60
"""Characters of a wrong value that its error repeats."""
UPGRADE: Final = "Both sides must be of versions next to each other: see `sublet doctor`."

Json: TypeAlias = Any
"""What ``json`` takes and gives."""
Decoder: TypeAlias = Callable[[Json], Any]


class WrongError(Exception):
    """A value that does not fit. Each level on the way out puts its name before the path."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path = ""

    def to_error(self, root: str) -> InvalidRequest:
        return InvalidRequest(f"{root}{self.path} {self.what}", do=UPGRADE)


def wrong(value: Json, wanted: str) -> WrongError:
    return WrongError(f"is {brief(value)}, not {wanted}")


def brief(value: object) -> str:
    """A value in short; of what is large only the kind, since showing it would cost as much as reading it."""
    match value:
        case dict() | list():
            return "an object" if isinstance(value, dict) else "a list"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            text = ascii(value[:SHOWN_MAX])
        case int():
            text = str(value) if abs(value) <= INTEGER_MAX else "a number of more than 63 bits"
        case _:
            text = str(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def read_text(value: Json) -> str:
    if type(value) is not str:
        raise wrong(value, "text")
    if not value.isascii():
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise WrongError("has half a character in it") from None
    return value


def read_integer(value: Json) -> int:
    if type(value) is not int:
        raise wrong(value, "a whole number")
    if not -INTEGER_MAX - 1 <= value <= INTEGER_MAX:
        raise wrong(value, "one that fits")
    return value


def read_number(value: Json) -> float:
    if type(value) is int:
        return float(read_integer(value))
    if type(value) is not float or not math.isfinite(value):
        raise wrong(value, "a finite number")
    return value


def read_truth(value: Json) -> bool:
    if type(value) is not bool:
        raise wrong(value, "true or false")
    return value


def read_nothing(value: Json) -> None:
    if value is not None:
        raise wrong(value, "null")


def read_bytes(value: Json) -> bytes:
    if type(value) is not str:
        raise wrong(value, "base64")
    try:
        data = binascii.a2b_base64(value.encode("ascii"), strict_mode=True)
    except ValueError:  # also binascii.Error and UnicodeEncodeError
        raise WrongError("is not base64") from None
    if base64(data) != value:  # bits left over in the last sign: two texts for the same bytes
        raise WrongError("is not base64 in its canonical form")
    return data


def base64(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def read_epoch(value: Json) -> Epoch:
    if type(value) is not str or not value.isascii():
        raise wrong(value, "an epoch")
    incarnation, _, n = value.partition(".")
    if not (incarnation.isdigit() and n.isdigit() and len(incarnation) <= EPOCH_DIGITS and len(n) <= EPOCH_DIGITS):
        raise wrong(value, "an epoch")
    epoch = Epoch(int(incarnation), int(n))
    if str(epoch) != value:
        raise wrong(value, "an epoch without zeros in front")
    return epoch


def read_member(cls: type[enum.Enum]) -> Decoder:
    members = {member.value: member for member in cls}
    kind = int if issubclass(cls, int) else str
    names = ", ".join(str(name) for name in members)

    def decode(value: Json) -> enum.Enum:
        if type(value) is not kind or value not in members:
            raise wrong(value, f"one of {names}")
        return members[value]

    return decode


def read_list(item: Decoder) -> Decoder:
    def decode(value: Json) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong(value, "a list")
        made: list[Any] = []
        try:
            for one in value:
                made.append(item(one))  # noqa: PERF401  its length tells which one was wrong
        except WrongError as error:
            error.path = f"[{len(made)}]{error.path}"
            raise
        return tuple(made)

    return decode


def read_mapping(item: Decoder) -> Decoder:
    def decode(value: Json) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong(value, "an object")
        made = {}
        for key, one in value.items():
            try:
                made[read_text(key)] = item(one)
            except WrongError as error:
                error.path = f"[{brief(key)}]{error.path}"
                raise
        return made

    return decode


def read_by_kind(branches: Mapping[type, Decoder], wanted: str) -> Decoder:
    """One of several types that JSON itself tells apart."""

    def decode(value: Json) -> Any:
        branch = branches.get(type(value))
        if branch is None:
            raise wrong(value, wanted)
        return branch(value)

    return decode
