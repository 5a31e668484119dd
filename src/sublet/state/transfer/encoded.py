"""An encoded value: a head, and the buffers that it refers to.

The head is small and is bytes. The buffers are memory of the value itself, not copied: numpy arrays, tensors' storages,
long ``bytes``. The head holds the pickle of everything else and says where in the buffers each piece of memory lies,
so that views which shared memory share it again. Its layout is written down in docs/format.md; reading it here checks
every number, since what arrives may be damaged, and loads nothing.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass

MAGIC: Final = b"SBLH"
VERSION: Final = 1
NO_BUFFER: Final = 0xFFFF_FFFF
"""The buffer of a window without bytes."""
_FIXED: Final = struct.Struct("<4sHHIII")
_WINDOW: Final = struct.Struct("<IQQ")
_SPLICE: Final = struct.Struct("<QI")
_BUFFER: Final = struct.Struct("<QBB6x")
_BARE: Final = _FIXED.pack(MAGIC, VERSION, 0, 0, 0, 0)


class BufferKind(enum.IntEnum):
    """Where a buffer's memory comes from, for people; nothing depends on it."""

    OTHER = 0
    BYTES = 1
    BYTEARRAY = 2
    NUMPY = 3
    TORCH = 4
    ARROW = 5
    SMALL = 6
    """Many small pieces of memory, copied into one."""


class BufferWindow(NamedTuple):
    """A piece of a buffer that one object looks at."""

    buffer: int
    offset: int
    length: int


class Splice(NamedTuple):
    """Here a whole buffer stood in the pickle: a long ``bytes`` that was not copied into the head."""

    position: int
    """Byte of the pickle, as it is in the head, before which it belongs."""
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBuffer:
    """Memory of the encoded value, as it is now: writes to the value are writes to it."""

    view: memoryview
    """Flat bytes. As long as it is held, a ``bytearray`` cannot change its size; so let go of it soon."""
    address: int
    kind: BufferKind
    writable: bool
    """Whether the program could write to it; it comes back in the same way."""
    owner: object = None
    """Keeps the memory where the view itself does not."""

    @property
    def length(self) -> int:
        return self.view.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """One value, or several together."""

    head: bytes
    buffers: tuple[EncodedBuffer, ...]
    met: Mapping[int, Any] | None = None
    """Every object that the head names, by its number there, if the rules asked for it (``EncodingRules.remembers``).
    ``loading.decode`` gives what stands for each of them the same number."""

    @property
    def nbytes(self) -> int:
        """Everything there is to save or to send."""
        return len(self.head) + sum(buffer.length for buffer in self.buffers)

    @property
    def views(self) -> tuple[memoryview, ...]:
        return tuple(buffer.view for buffer in self.buffers)


class BufferShape(NamedTuple):
    length: int
    kind: int
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The head, taken apart."""

    windows: Sequence[BufferWindow]
    splices: Sequence[Splice]
    buffers: Sequence[BufferShape]
    stream: memoryview | bytes
    """The pickle, without what the splices stand for."""

    def dump(self) -> bytes:
        parts = [_FIXED.pack(MAGIC, VERSION, 0, len(self.windows), len(self.splices), len(self.buffers))]
        parts += [_WINDOW.pack(*window) for window in self.windows]
        parts += [_SPLICE.pack(*splice) for splice in self.splices]
        parts += [_BUFFER.pack(*shape) for shape in self.buffers]
        parts.append(bytes(self.stream))
        return b"".join(parts)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Head:
        """Raises ``InvalidRequest`` for anything that ``dump`` would not have written."""
        view = memoryview(data)
        if view.nbytes < _FIXED.size:
            raise _no_head("it is too short")
        magic, version, zero, windows_n, splices_n, buffers_n = _FIXED.unpack_from(view)
        if magic != MAGIC or zero:
            raise _no_head("it begins with something else")
        if version != VERSION:
            raise _no_head(f"it is of version {version}, and this Sublet reads version {VERSION}")
        at_splices = _FIXED.size + windows_n * _WINDOW.size
        at_buffers = at_splices + splices_n * _SPLICE.size
        at_stream = at_buffers + buffers_n * _BUFFER.size
        if at_stream > view.nbytes:
            raise _no_head("its tables are cut off")
        head = cls(
            windows=[BufferWindow(*one) for one in _WINDOW.iter_unpack(view[_FIXED.size : at_splices])],
            splices=[Splice(*one) for one in _SPLICE.iter_unpack(view[at_splices:at_buffers])],
            buffers=[
                BufferShape(length, kind, bool(flag))
                for length, kind, flag in _BUFFER.iter_unpack(view[at_buffers:at_stream])
            ],
            stream=view[at_stream:],
        )
        head._check()
        return head

    def _check(self) -> None:
        for window in self.windows:
            if window.buffer == NO_BUFFER:
                inside = window.offset == window.length == 0
            else:
                inside = (
                    window.buffer < len(self.buffers)
                    and window.offset + window.length <= self.buffers[window.buffer].length
                )
            if not inside:
                raise _no_head("a window lies outside its buffer")
        last = 0
        for splice in self.splices:
            if not last <= splice.position <= len(self.stream) or splice.buffer >= len(self.buffers):
                raise _no_head("a splice lies outside the pickle")
            last = splice.position


def bare_head(stream: Iterable[bytes | bytearray]) -> bytes:
    """The head of a value that has no memory beside its pickle, which comes in parts."""
    return b"".join((_BARE, *stream))


def _no_head(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"this is not the head of an encoded value: {why}", do="It is damaged, or was made by another program."
    )
