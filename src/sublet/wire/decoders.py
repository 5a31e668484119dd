"""Decodes JSON into messages, from any thread; nothing else in Sublet makes a typed decoder of msgspec.

msgspec 0.22 describes a struct to itself when the first decoder for it is made, and keeps that description with the
class from the moment it begins. A second thread that makes a decoder meanwhile takes the unfinished description, and
the process dies of SIGSEGV. A program's own thread and the one that renews its leases did so at the end of a notebook.
Here one decoder is made at a time. A decoder itself may be used by several threads at once.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_made: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}
_making = threading.Lock()


def decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    """The one for this type. It is made once and kept."""
    found = _made.get(shape)
    if found is None:
        with _making:
            found = _made.setdefault(shape, msgspec.json.Decoder(shape))
    return found


def decode_as(data: bytes | bytearray | memoryview | str, shape: type[T]) -> T:
    """The JSON as a value of this type; raises `msgspec.DecodeError` if it is none."""
    value: T = decoder(shape).decode(data)
    return value


def convert_to(value: object, shape: type[T]) -> T:
    """Builtin values (of a form, say) as a value of this type; raises `msgspec.ValidationError` if they do not fit."""
    decoder(shape)  # describes the type to msgspec under the lock
    return msgspec.convert(value, shape)


def _after_fork() -> None:
    """A thread that held the lock is not in the child."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
