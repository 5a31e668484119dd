"""Reads as much of packs and manifests as publication needs, with the standard library only.

The layout is that of docs/format.md; ``state.checkpoints.format`` reads and writes all of it,
and compares content hashes. Here only lengths and checksums (crc32) are compared, and no byte is loaded as anything
but a number, a name or a text.
"""

from __future__ import annotations

import struct
from binascii import crc32
from typing import Final

from sublet.errors import CheckpointDamaged
from sublet.lazy_dataclass import dataclass
from sublet.values import Epoch, LeaseId

VERSION: Final = 1
MANIFEST_MAX: Final = 64 << 20

PACK_HEADER: Final = struct.pack("<8sHHI48s", b"SUBLPACK", VERSION, 0, 0, b"")
HEADER_BYTES: Final = len(PACK_HEADER)
PACK_ENTRY_BYTES: Final = struct.calcsize("<32sQIIIB3x")
TRAILER: Final = struct.Struct("<8sHHIQ32sI")
TRAILER_MAGIC: Final = b"SUBLPEND"

MANIFEST: Final = struct.Struct("<8sHHIQQQQQqIIQQHHH2x")
MANIFEST_MAGIC: Final = b"SUBLMANI"
PACK_REF: Final = struct.Struct("<20sQI")
LEAF_REF: Final = struct.Struct("<32sII")
TAIL: Final = struct.Struct("<I32s")

_DIGITS: Final = 16
_MANIFEST_SUFFIX: Final = ".manifest"
_PACK_SUFFIX: Final = ".pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a manifest says, as far as its publisher has to know."""

    number: int
    parent: int
    lease: LeaseId
    epoch: Epoch
    packs: dict[str, tuple[int, int]]
    """File name → size and entries."""
    wall_ns: int = 0
    note: str = ""


def manifest_name(number: int) -> str:
    return f"{number:0{_DIGITS}d}{_MANIFEST_SUFFIX}"


def number_of(name: str) -> int:
    """The number of the checkpoint whose manifest is called so; 0 for any other name."""
    digits = name.removesuffix(_MANIFEST_SUFFIX)
    is_one = len(digits) == _DIGITS and len(name) == _DIGITS + len(_MANIFEST_SUFFIX)
    return int(digits) if is_one and digits.isascii() and digits.isdigit() else 0


def pack_name(raw: bytes) -> str:
    """The file of the pack with this name."""
    return raw.hex() + _PACK_SUFFIX


def read_manifest(data: bytes) -> Contents:
    """Raises ``CheckpointDamaged`` for what is cut off, changed, or no manifest."""
    if len(data) < MANIFEST.size + TAIL.size or data[:8] != MANIFEST_MAGIC:
        raise damaged("a manifest is truncated or malformed")
    end = len(data) - TAIL.size
    if crc32(memoryview(data)[:end]) != TAIL.unpack_from(data, end)[0]:
        raise damaged("a manifest has another checksum than it says")
    _, version, zero, fixed, total, number, parent, incarnation, n, wall_ns, packs_n, leaves_n, _, _, *texts = (
        MANIFEST.unpack_from(data)
    )
    if version != VERSION or zero or fixed != MANIFEST.size:
        raise damaged(f"a manifest is of version {version}, and this Sublet reads version {VERSION}")
    at_leaves = fixed + packs_n * PACK_REF.size
    at_texts = at_leaves + leaves_n * LEAF_REF.size
    if total != len(data) or at_texts + sum(texts) != end:
        raise damaged("a manifest's size is not what it says")
    try:
        lease = data[at_texts : at_texts + texts[0]].decode()
        note = data[end - texts[-1] : end].decode()
    except UnicodeDecodeError:
        raise damaged("a manifest has a text that is not UTF-8") from None
    refs = PACK_REF.iter_unpack(data[fixed:at_leaves])
    return Contents(
        number=number,
        parent=parent,
        lease=LeaseId(lease),
        epoch=Epoch(incarnation, n),
        packs={pack_name(name): (size, entries) for name, size, entries in refs},
        wall_ns=wall_ns,
        note=note,
    )


def entries_of_pack(header: bytes, trailer: bytes, size: int) -> int:
    """How many chunks a pack has that begins and ends so: whether it is one, and all of it is there."""
    if header != PACK_HEADER:
        raise damaged("a pack does not begin as a pack does")
    if len(trailer) != TRAILER.size:
        raise damaged("a pack is cut off")
    magic, version, zero, count, offset, _, check = TRAILER.unpack(trailer)
    if magic != TRAILER_MAGIC or crc32(trailer[:-4]) != check:
        raise damaged("a pack does not end as a pack does")
    if version != VERSION or zero:
        raise damaged(f"a pack is of version {version}, and this Sublet reads version {VERSION}")
    if offset < HEADER_BYTES or offset + count * PACK_ENTRY_BYTES + TRAILER.size != size:
        raise damaged("a pack's size is not what its trailer says")
    return int(count)


def damaged(what: str) -> CheckpointDamaged:
    return CheckpointDamaged(what, do="Restore an earlier checkpoint; `verify` names every file that is not whole.")
