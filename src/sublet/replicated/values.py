"""Python values as the bytes of a save: what the codec makes of them (docs/format.md), one part after the other.

    offset  size  field
    0       4     magic "SBLV"
    4       2     version, 1
    6       2     zero
    8       4     number of parts: the head, then its buffers
    12      4     crc32 of these 16 bytes (this field as zero) and the lengths
    16      8×n   length of each part
    …             the parts, each at the next multiple of 4096

Parts begin on pages, so that a head which grew by a few bytes does not move what follows it, and the packs that hold it
need not be sent again.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

from sublet.durable.codec import encode
from sublet.durable.loading import decode
from sublet.errors import CheckpointDamaged, InvalidRequest

MAGIC: Final = b"SBLV"
VERSION: Final = 1
PAGE: Final = 4096
_FIXED: Final = struct.Struct("<4sHHII")


def dump_value(value: object) -> bytes:
    """A copy of the value as it is now. Raises ``Unpicklable``, with the path to what cannot be saved."""
    encoded = encode(value)
    parts = [memoryview(encoded.head), *encoded.views]
    lengths = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
    places = _places([part.nbytes for part in parts])
    data = bytearray(places[-1])
    check = zlib.crc32(_FIXED.pack(MAGIC, VERSION, 0, len(parts), 0) + lengths)
    data[: _FIXED.size] = _FIXED.pack(MAGIC, VERSION, 0, len(parts), check)
    data[_FIXED.size : _FIXED.size + len(lengths)] = lengths
    for place, part in zip(places, parts, strict=False):
        data[place : place + part.nbytes] = part.cast("B") if part.nbytes else b""
    return bytes(data)


def load_value(data: bytes) -> Any:
    """The value again, its arrays on memory of their own. Runs code of the program that saved it."""
    view = memoryview(data)
    if data[:4] != MAGIC:
        raise InvalidRequest("this was saved as bytes, not as a value", do="Take `.data`.")
    lengths = _lengths(view)
    places = _places(lengths)
    if places[-1] != len(data):
        raise CheckpointDamaged(f"a saved value of {places[-1]} bytes came with {len(data)}")
    head, *buffers = (view[place : place + length] for place, length in zip(places, lengths, strict=False))
    return decode(bytes(head), buffers)


def _lengths(view: memoryview) -> list[int]:
    try:
        magic, version, zero, count, check = _FIXED.unpack_from(view)
        lengths = struct.unpack_from(f"<{count}Q", view, _FIXED.size) if count <= len(view) // 8 else ()
    except struct.error:
        raise CheckpointDamaged("a saved value is cut off") from None
    if version != VERSION and not zero:
        raise CheckpointDamaged(
            f"a saved value is of version {version}, and this program knows {VERSION}", do="Use a newer Sublet."
        )
    front = _FIXED.pack(magic, version, zero, count, 0) + bytes(view[_FIXED.size : _FIXED.size + 8 * count])
    if zero or not lengths or check != zlib.crc32(front):
        raise CheckpointDamaged("a saved value does not begin as one")
    return list(lengths)


def _places(lengths: list[int]) -> list[int]:
    found = [_up(_FIXED.size + 8 * len(lengths))]
    for length in lengths:
        found.append(_up(found[-1] + length))
    return found


def _up(at: int) -> int:
    return -(-at // PAGE) * PAGE
