"""Output stores: the same contract for each, and no damage of the one on disk is believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from sublet.errors import CheckpointDamaged, CheckpointFailed, InvalidRequest, NotFound
from sublet.jobs import JobOutputStore, MemoryOutputStore, VolumeOutputStore, volume_store
from sublet.jobs.core import SavedChunk
from sublet.jobs.identity import ChunkId
from sublet.jobs.running import load_state, save_state
from sublet.jobs.volume_store import check_result, data_name, dump_index, index_name, parse_index, whole_segments
from sublet.state.checkpoints.store import FolderStore
from tests.left_open import nothing_left_open

RESULTS = [(ChunkId(bytes([n]) * (16 + n)), bytes([n]) * (100 * n)) for n in range(5)]
A, B = ChunkId(b"a" * 16), ChunkId(b"b" * 16)

Maker = Callable[[Path], JobOutputStore]
EACH = pytest.mark.parametrize("make", [lambda path: MemoryOutputStore(), VolumeOutputStore], ids=["memory", "volume"])


@EACH
def test_what_is_published_is_there_and_the_first_result_stays(make: Maker, tmp_path: Path) -> None:
    store = make(tmp_path)
    assert store.begin("job") == b""
    store.put([(A, b"first"), (B, b"")])
    store.put([(A, b"second")])
    store.publish(b"state 1")
    store.put([(A, b"third")])
    store.publish(b"state 2")
    assert (store.get(A), store.get(B)) == (b"first", b"")
    assert (len(store), set(store.chunks()), A in store) == (2, {A, B}, True)
    assert ChunkId(b"c" * 16) not in store
    with pytest.raises(NotFound, match="there is no result of chunk 6363"):
        store.get(ChunkId(b"c" * 16))
    assert store.begin("job") == b"state 2"


@EACH
def test_a_store_of_another_job_is_refused(make: Maker, tmp_path: Path) -> None:
    store = make(tmp_path)
    store.begin("first")
    store.put([(A, b"x")])
    store.publish(b"")
    with pytest.raises(InvalidRequest, match="has the results of job 'first', not of 'second'"):
        store.begin("second")


def test_results_on_disk_are_found_by_the_next_program(tmp_path: Path) -> None:
    for n in range(30):
        store = VolumeOutputStore(tmp_path)
        store.begin("job")
        assert len(store) == 10 * n
        store.put([(ChunkId(bytes([n, m]) * 8), bytes([m]) * 5000) for m in range(10)])
        store.publish(b"state %d" % n)
        store.close()
    store = VolumeOutputStore(tmp_path)
    assert store.begin("job") == b"state 29"
    assert all(store.get(ChunkId(bytes([n, m]) * 8)) == bytes([m]) * 5000 for n in range(30) for m in range(10))
    assert len(FolderStore(tmp_path).numbers()) <= 2


def test_what_was_put_and_not_published_is_not_there(tmp_path: Path) -> None:
    store = VolumeOutputStore(tmp_path)
    store.put([(A, b"x")])
    assert A not in store
    with pytest.raises(NotFound):
        store.get(A)
    assert A not in VolumeOutputStore(tmp_path)


def test_a_place_with_other_checkpoints_is_refused(tmp_path: Path) -> None:
    from sublet import Durable

    Durable([1, 2], tmp_path).checkpoint()
    with nothing_left_open(), pytest.raises(InvalidRequest, match="holds other checkpoints"):
        VolumeOutputStore(tmp_path)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sublet.jobs.volume_store.VERSION", 7)
        store = VolumeOutputStore(tmp_path)
        store.put([(A, b"x")])
        store.publish(b"")
    with pytest.raises(InvalidRequest, match="of version 7, and this Sublet reads version 1"):
        VolumeOutputStore(tmp_path)


def test_a_full_store_says_so_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = VolumeOutputStore(tmp_path)
    store.put([(A, b"x")])
    store.publish(b"")
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "room", 1000)
        store.put([(B, b"y" * 5000)])
        with pytest.raises(CheckpointFailed, match=r"the store of job '' is full: 1 more results need .* for 1000B"):
            store.publish(b"")
    assert set(VolumeOutputStore(tmp_path).chunks()) == {A}
    store.publish(b"")
    assert set(VolumeOutputStore(tmp_path).chunks()) == {A, B}


def test_two_writers_of_one_place_do_not_lose_results(tmp_path: Path) -> None:
    """The second publication on the same base is refused, not merged in silence."""
    from sublet.errors import VersionConflict

    one, other = VolumeOutputStore(tmp_path), VolumeOutputStore(tmp_path)
    one.put([(A, b"x")])
    one.publish(b"")
    other.put([(B, b"y")])
    with pytest.raises(VersionConflict):
        other.publish(b"")
    assert set(VolumeOutputStore(tmp_path).chunks()) == {A}


# ---- the index


def test_an_index_says_where_each_result_lies() -> None:
    index, data = dump_index("job", RESULTS)
    found = parse_index("job", 3, index)
    assert {chunk: check_result(chunk, where, data) for chunk, where in found.items()} == dict(RESULTS)
    assert {where.segment for where in found.values()} == {3}
    assert parse_index("job", 1, dump_index("job", [])[0]) == {}


def test_an_index_that_is_cut_off_at_any_byte_is_refused() -> None:
    index, _ = dump_index("job", RESULTS)
    for length in range(len(index)):
        with pytest.raises(CheckpointDamaged):
            parse_index("job", 1, index[:length])
    with pytest.raises(CheckpointDamaged):
        parse_index("job", 1, index + b"\0")


def test_a_flip_of_any_bit_of_an_index_is_noticed() -> None:
    index, _ = dump_index("job", RESULTS)
    for at in range(len(index)):
        for bit in range(8):
            damaged = bytearray(index)
            damaged[at] ^= 1 << bit
            with pytest.raises(CheckpointDamaged):
                parse_index("job", 1, bytes(damaged))


def test_an_index_of_another_job_is_refused() -> None:
    with pytest.raises(CheckpointDamaged, match="is of another job"):
        parse_index("other", 1, dump_index("job", RESULTS)[0])


def test_a_result_that_was_changed_is_not_handed_out() -> None:
    index, data = dump_index("job", RESULTS)
    where = parse_index("job", 1, index)
    chunk = RESULTS[2][0]
    damaged = bytearray(data)
    damaged[where[chunk].offset + 7] ^= 1
    with pytest.raises(CheckpointDamaged, match="is not what was stored"):
        check_result(chunk, where[chunk], bytes(damaged))


def read_all(place: Path) -> dict[ChunkId, bytes]:
    store = VolumeOutputStore(place)
    return {chunk: store.get(chunk) for chunk in store.chunks()}


def test_a_flipped_bit_on_the_disk_is_noticed_whatever_file_it_is_in(tmp_path: Path) -> None:
    """One byte of each stretch of every file; the publication's own tests flip them all."""
    store = VolumeOutputStore(tmp_path)
    store.begin("job")
    store.put([(ChunkId(bytes([n]) * 16), bytes([n]) * 9000) for n in range(4)])
    store.publish(b"state")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    tried = 0
    for path in files:
        whole = path.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            path.chmod(0o600)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            with pytest.raises(CheckpointDamaged):
                read_all(tmp_path)
            tried += 1
        path.write_bytes(whole)
    assert tried > 60
    assert len(read_all(tmp_path)) == 4


# ---- the coordinator's state


def test_the_state_goes_to_bytes_and_back() -> None:
    chunks = {A: SavedChunk(charges=2, memory=1 << 30, runs_ns=(5, 6)), B: SavedChunk(charges=1, memory=0)}
    assert load_state(save_state("reduce", chunks)) == ("reduce", chunks)
    assert load_state(b"") == ("", {})


@pytest.mark.parametrize("data", [b"x", b"{}", b'{"version":1}', b'{"version":1,"phase":"","chunks":{"zz":[1,2,[]]}}'])
def test_a_state_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_state(data)
    with pytest.raises(InvalidRequest, match="of version 9"):
        load_state(b'{"version":9}')


def test_an_index_whose_results_are_gone_is_damage() -> None:
    """Nothing may be skipped for its sake."""
    names = [index_name(1), data_name(1), index_name(2), data_name(2), "state"]
    assert whole_segments(names) == [1, 2]
    with pytest.raises(CheckpointDamaged, match="segment 1 of the results has an index and no data"):
        whole_segments([name for name in names if name != data_name(1)])


def test_results_of_many_publications_are_read_with_few_of_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those read last stay; the others come from the newest checkpoint, also where an older one was open."""
    monkeypatch.setattr("sublet.jobs.volume_store.SEGMENTS_READ", 2)
    store = VolumeOutputStore(tmp_path)
    chunks = [ChunkId(bytes([n]) * 16) for n in range(9)]
    for n, chunk in enumerate(chunks):
        store.put([(chunk, bytes([n]))])
        store.publish(b"")
        assert store.get(chunks[0]) == b"\0"
        if n == 5:
            assert list(store._read) == [6, 1]
            assert [store.get(chunk) for chunk in chunks[:6]] == [bytes([n]) for n in range(6)]
    assert [store.get(chunk) for chunk in chunks] == [bytes([n]) for n in range(9)]
    assert len(store._read) == 2
    store.close()


@pytest.mark.parametrize("how", ["two results of one chunk", "fewer data than it says"])
def test_an_index_that_contradicts_itself_is_refused_though_nothing_of_it_was_changed(how: str) -> None:
    """As by a mistake of its writer."""
    entry = volume_store._ENTRY.pack(len(A), 0, 0, bytes(16)) + A
    many, data_bytes = (2, 0) if how == "two results of one chunk" else (1, 5)
    name = blake3(b"job").digest(16)
    body = volume_store._HEAD.pack(volume_store.MAGIC, volume_store.VERSION, 0, many, data_bytes, name) + entry * many
    with pytest.raises(CheckpointDamaged, match="contradicts itself"):
        parse_index("job", 1, body + blake3(body).digest())
