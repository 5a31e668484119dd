"""The bytes on disk: as written down, read for ever, and never believed when they are damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sublet.errors import CheckpointDamaged, SubletError
from sublet.state.checkpoints.format import (
    TRAILER_BYTES,
    CheckpointManifest,
    LeafRef,
    PackEntry,
    PackRef,
    dump_index,
    dump_trailer,
    parse_index,
    parse_trailer,
)
from sublet.state.checkpoints.records import Blob, EncodedGroup, dump_leaf, parse_leaf
from sublet.state.checkpoints.store import FolderStore, verify
from sublet.state.checkpoints.writer import Author, Saver
from sublet.values import Epoch, LeaseId

GOLDEN = Path(__file__).parent / "golden"
ROOTS: dict[str, Any] = {
    "name": "sublet",
    "numbers": list(range(10)),
    "noise": bytes(range(256)) * 6,
    "zeros": bytes(6000),
}
AUTHOR = Author(lease=LeaseId("lease-1"), epoch=Epoch(1, 7))


def save(folder: Path, roots: dict[str, Any] = ROOTS, *, author: Author = AUTHOR) -> FolderStore:
    store = FolderStore(folder, author=author)
    staged = Saver().save(
        roots,
        staging=store.stage(),
        base=store.base(),
        author=author,
        wall_ns=1_700_000_000_000_000_000,
        schema="golden",
        note="✓",
    )
    store.publish(staged)
    return store


def test_what_version_1_wrote_is_read_for_ever(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "golden")
    store = FolderStore(tmp_path / "golden")
    assert verify(store.folder).ok
    with store.open() as checkpoint:
        assert checkpoint.load_all() == ROOTS
        manifest = checkpoint.manifest
    assert (manifest.number, manifest.parent, manifest.lease, manifest.epoch) == (1, 0, "lease-1", Epoch(1, 7))
    assert (manifest.schema, manifest.note, manifest.roots) == ("golden", "✓", 4)


def test_what_is_written_today_is_what_version_1_wrote() -> None:
    """Byte for byte, but for what zstd makes of a chunk, which is its own affair."""
    path = next((GOLDEN / "checkpoints").iterdir())
    data = path.read_bytes()
    assert CheckpointManifest.parse(data).dump() == data
    (pack,) = (GOLDEN / "packs").iterdir()
    whole = pack.read_bytes()
    offset, length, index_hash = parse_trailer(whole[:64], whole[-TRAILER_BYTES:], len(whole))
    index = whole[offset : offset + length]
    entries = parse_index(index, index_hash, offset)
    assert dump_index(entries) == index
    assert dump_trailer(index, offset) == whole[-TRAILER_BYTES:]


TEXT = st.text(max_size=20)
HASH = st.binary(min_size=32, max_size=32)
NAME = st.binary(min_size=20, max_size=20)


@given(
    st.builds(
        CheckpointManifest,
        number=st.integers(1, 2**63),
        parent=st.integers(0, 2**63),
        lease=TEXT.map(LeaseId),
        epoch=st.builds(Epoch, st.integers(0, 2**60), st.integers(0, 2**60)),
        schema=TEXT,
        wall_ns=st.integers(0, 2**62),
        packs=st.lists(
            st.builds(PackRef, st.binary(min_size=20, max_size=20), st.integers(0, 2**60), st.integers(0, 9))
        ),
        leaves=st.lists(st.builds(LeafRef, HASH, st.integers(0, 2**31), st.integers(0, 9))),
        roots=st.integers(0, 99),
        state_bytes=st.integers(0, 2**60),
        note=TEXT,
    )
)
def test_manifests_come_back(manifest: CheckpointManifest) -> None:
    assert CheckpointManifest.parse(manifest.dump()) == manifest


BLOB = st.binary(max_size=9).map(lambda data: Blob(length=len(data), inline=data, kind=3, writable=len(data) > 3))
CHUNKED = st.integers(1, 5000).flatmap(
    lambda length: st.builds(
        lambda hashes: Blob(length=length, chunk_bytes=1000, hashes=hashes),
        st.binary(min_size=-(-length // 1000) * 32, max_size=-(-length // 1000) * 32),
    )
)


def records_of(blob: st.SearchStrategy[Blob]) -> st.SearchStrategy[list[EncodedGroup]]:
    names = st.lists(st.text(max_size=5), min_size=1, max_size=3)
    return st.lists(st.builds(EncodedGroup, names=names, blobs=st.lists(blob, min_size=1, max_size=3)), max_size=4)


@given(records_of(BLOB | CHUNKED))
def test_leaves_come_back(records: list[EncodedGroup]) -> None:
    assert parse_leaf(dump_leaf(records)) == records


@given(records_of(BLOB), st.data())
def test_a_leaf_of_somebody_elses_making_raises_nothing_unexpected(records: list[EncodedGroup], data: Any) -> None:
    leaf = bytearray(dump_leaf(records))
    leaf[data.draw(st.integers(0, len(leaf) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(leaf)))
    for one in (bytes(leaf), bytes(leaf[:cut])):
        with contextlib.suppress(CheckpointDamaged):
            parse_leaf(one)


def test_an_index_that_overlaps_or_leaves_gaps_is_refused() -> None:
    good = [PackEntry(bytes(32), 64, 10, 10, 0, 0), PackEntry(bytes(32), 74, 5, 99, 1, 1)]
    for wrong in ([good[0], good[0]], [good[1]], [good[0]._replace(check=1), good[1]], [good[0]._replace(encoding=2)]):
        index = dump_index(wrong)
        with pytest.raises(CheckpointDamaged):
            parse_index(index, blake3(index).digest(), 79)


def harmed(path: Path) -> Iterator[str]:
    """The file in each of its damaged forms, one after the other, and whole again at the end."""
    whole = path.read_bytes()
    try:
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            yield f"cut to {length} bytes"
        path.write_bytes(whole + b"\0")
        yield "a byte longer"
        for at in range(len(whole)):
            for bit in range(8):
                with open(path, "r+b") as file:
                    file.seek(at)
                    file.write(bytes([whole[at] ^ (1 << bit)]))
                yield f"bit {bit} of byte {at} turned"
                with open(path, "r+b") as file:
                    file.seek(at)
                    file.write(whole[at : at + 1])
        path.unlink()
        yield "gone"
    finally:
        path.write_bytes(whole)


def reads(store: FolderStore) -> bool:
    try:
        with store.open(1) as checkpoint:
            checkpoint.load_all()
    except SubletError:
        return False
    return True


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of files are written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["checkpoints", "packs"])
def test_every_cut_and_every_turned_bit_is_noticed(which: str, memory: Path) -> None:
    """Never wrong data, never anything but our own error; and both the reader and the verifier notice."""
    store = save(memory, {"name": "sublet", "zeros": bytes(5000), "n": [1, 2, 3]})
    (path,) = (memory / which).iterdir()
    count = 0
    for what in harmed(path):
        count += 1
        assert not reads(store), what
        if count % 16 == 0:
            assert not verify(memory).ok, what
    assert count > 8 * path.stat().st_size
    assert verify(memory).ok


def test_a_pack_or_manifest_in_anothers_place_is_noticed(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", {"other": bytes(range(200)) * 100})
    (a,), (b,) = one.packs.iterdir(), two.packs.iterdir()
    shutil.copy(b, a)
    with pytest.raises(CheckpointDamaged):
        one.open()
    save(tmp_path / "two", {"third": 3})
    shutil.copy(two.manifest_path(1), two.manifest_path(2))
    with pytest.raises(CheckpointDamaged, match="is the manifest of checkpoint 1"):
        two.open()
    assert not verify(tmp_path / "two").ok
