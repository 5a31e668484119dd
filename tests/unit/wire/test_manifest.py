"""What a publisher reads of manifests and packs: the same as everybody else, or nothing."""

from __future__ import annotations

import struct
from binascii import crc32
from pathlib import Path
from typing import Final

import pytest

from sublet.errors import CheckpointDamaged
from sublet.state.checkpoints.format import CheckpointManifest, LeafRef, PackRef, parse_trailer
from sublet.values import Epoch, LeaseId
from sublet.wire.manifest import HEADER_BYTES, TAIL, TRAILER, entries_of_pack, pack_name, read_manifest

GOLDEN: Final = Path(__file__).parents[1] / "state" / "checkpoints" / "golden"
MANIFESTS: Final = sorted(GOLDEN.rglob("*.manifest"))
PACKS_OF: Final = sorted(GOLDEN.rglob("*.pack"))

MADE: Final = CheckpointManifest(
    number=3,
    parent=2,
    lease=LeaseId("l-ü"),
    epoch=Epoch(2, 40),
    schema="mine/1",
    wall_ns=-5,
    packs=[PackRef(bytes(range(20)), 1 << 40, 7), PackRef(bytes(20), 124, 1)],
    leaves=[LeafRef(bytes(32), 9, 2)],
    roots=2,
    state_bytes=1 << 41,
    note="a note",
)


def test_it_reads_what_the_format_writes() -> None:
    found = read_manifest(MADE.dump())
    assert (found.number, found.parent, found.lease, found.epoch) == (3, 2, "l-ü", Epoch(2, 40))
    assert found.packs == {pack_name(ref.name): (ref.size, ref.entries) for ref in MADE.packs}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_it_reads_the_golden_manifests_as_the_format_does(path: Path) -> None:
    data = path.read_bytes()
    full, found = CheckpointManifest.parse(data), read_manifest(data)
    assert (found.number, found.parent, found.lease, found.epoch) == (full.number, full.parent, full.lease, full.epoch)
    assert list(found.packs.values()) == [(ref.size, ref.entries) for ref in full.packs]


@pytest.mark.parametrize("path", PACKS_OF, ids=lambda path: path.name)
def test_it_counts_the_golden_packs_as_the_format_does(path: Path) -> None:
    data = path.read_bytes()
    ends = data[:HEADER_BYTES], data[-TRAILER.size :], len(data)
    assert entries_of_pack(*ends) == parse_trailer(*ends)[1] // 56
    for at in (*range(HEADER_BYTES), *range(len(data) - TRAILER.size, len(data))):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(CheckpointDamaged):
            entries_of_pack(bytes(changed[:HEADER_BYTES]), bytes(changed[-TRAILER.size :]), len(changed))
    with pytest.raises(CheckpointDamaged):
        entries_of_pack(data[:HEADER_BYTES], data[-TRAILER.size :], len(data) + 1)
    with pytest.raises(CheckpointDamaged):
        entries_of_pack(data[:HEADER_BYTES], data[-TRAILER.size + 1 :], len(data))


def test_there_are_golden_files() -> None:
    assert MANIFESTS
    assert PACKS_OF


def test_every_changed_bit_and_every_missing_byte_is_found() -> None:
    data = MADE.dump()
    blake = len(data) - 32  # which only who has that function compares
    for at in range(blake):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(CheckpointDamaged):
                read_manifest(bytes(changed))
    for length in range(len(data)):
        with pytest.raises(CheckpointDamaged):
            read_manifest(data[:length])
    with pytest.raises(CheckpointDamaged):
        read_manifest(data + b"\0")


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (8, "<H", 2),
        (10, "<H", 1),
        (12, "<I", 95),
        (16, "<Q", 0),
        (64, "<I", 1 << 31),
        (68, "<I", 0xFFFFFFFF),
        (88, "<H", 0xFFFF),
    ],
)
def test_numbers_that_contradict_each_other_are_damage_though_the_checksum_is_right(
    at: int, form: str, value: int
) -> None:
    """Somebody hostile can compute a checksum."""
    body = bytearray(MADE.dump()[: -TAIL.size])
    struct.pack_into(form, body, at, value)
    with pytest.raises(CheckpointDamaged):
        read_manifest(bytes(body) + TAIL.pack(crc32(bytes(body)), bytes(32)))


def test_a_lease_that_is_no_text_is_damage() -> None:
    body = MADE.dump()[: -TAIL.size].replace("l-ü".encode(), b"l-\xff\xff")
    with pytest.raises(CheckpointDamaged, match="a text that is not UTF-8"):
        read_manifest(body + TAIL.pack(crc32(body), bytes(32)))
