"""The folder replica's bytes: golden, cut at every byte, flipped at every bit, copied, restored, handed on."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.errors import InvalidRequest
from sublet.replicated import FolderReplica
from sublet.state.replicated.ballot import Ballot, Garbled, WriteStamp
from sublet.state.replicated.cell import (
    Accept,
    AcceptedWrite,
    BallotPromised,
    Here,
    Install,
    Prepare,
    Query,
    ReplicaCell,
    Took,
)
from sublet.state.replicated.checkpoint_record import Effect, Save, SaveHistory
from sublet.state.replicated.files import refuse_network
from sublet.state.replicated.folder_format import (
    SECTOR,
    Header,
    LogEntry,
    Torn,
    batch,
    entries,
    entries_of,
    frame,
    scan,
)
from sublet.state.replicated.idempotency_record import Book, KeyRecord
from sublet.state.replicated.quorum import ReplicaSet, Seats
from sublet.state.replicated.replica import PackName, ReplicaFaulty, ReplicaFull, ReplicaSilent, seal, unseal
from sublet.state.replicated.s3 import SealedObject
from sublet.state.replicated.state import RegisterState
from sublet.values import Epoch

EVERY_BIT = os.environ.get("SUBLET_CRASH_ALL") == "1"
GOLDEN = Path(__file__).parent / "golden"
IDENTITY = "00112233445566778899aabbccddeeff"
BALLOT = Ballot(1, "office", Epoch(2, 7), 3, b"noncenon")
SET = ReplicaSet(3, Seats(("a", "b"), 1, 2), Seats(("a",), 1, 1))
PACK = str(PackName(1, 2, 7, "ab" * 8, "cd" * 16))
STATE = RegisterState(9, (b"w" * 8, b"v" * 8), b"body")
SAVES = SaveHistory(
    (
        Save(
            version=9,
            size=5,
            hash="ef" * 32,
            schema="s.v1",
            policy="34" * 32,
            epoch=Epoch(2, 7),
            wall_ns=1_700_000_000_000_000_000,
            effect=Effect("job/9", "f", 9),
            inline=b"bytes",
        ),
        Save(
            version=8,
            size=6,
            hash="ee" * 32,
            schema="s.v1",
            policy="34" * 32,
            epoch=Epoch(2, 6),
            wall_ns=1,
            packs=(PACK,),
        ),
    )
)
BOOK = Book({"job/9": KeyRecord("f", "claimant", "l1", Epoch(2, 7), 5, 9, "done")}, {"job/": 4})
CELL = ReplicaCell(BALLOT, AcceptedWrite(WriteStamp(BALLOT, 4), STATE.pack(), (PACK,)))


def log_file() -> bytes:
    """A log of 16 KiB with three batches."""
    head = Header(1 << 14, 4711, 1, IDENTITY, b"salt", 1_700_000_000_000_000_000)
    first = batch([LogEntry(3, "", SET)])
    second = batch([LogEntry(3, "c/x", CELL), LogEntry(3, "c/y", ReplicaCell(BALLOT))])
    third = batch([LogEntry(3, "c/x", ReplicaCell(BALLOT, AcceptedWrite(WriteStamp(BALLOT, 5), bytes(1000))))])
    body = b"".join(frame(data, number, b"salt") for number, data in enumerate((first, second, third), start=1))
    return (head.pack() + body).ljust(1 << 14, b"\0")


FORMATS = {
    "ballot": BALLOT.pack(),
    "cell": CELL.pack(),
    "set": SET.pack(),
    "state": STATE.pack(),
    "checkpoint": SAVES.pack(),
    "reservations": BOOK.pack(),
    "pack": seal(b"bytes of a pack"),
    "object": SealedObject(IDENTITY, 3, b"noncenon", "c/x", CELL.pack()).pack(),
    "log": log_file(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bytes_are_what_they_were(name: str) -> None:
    """A change of format breaks what people have on their disks; then a new version, and a reader for the old one."""
    assert (GOLDEN / name).read_bytes() == FORMATS[name]


def test_golden_bytes_are_read() -> None:
    """As what they are."""

    def read(name: str) -> bytes:
        return (GOLDEN / name).read_bytes()

    assert Ballot.unpack(read("ballot"), 0) == (BALLOT, len(read("ballot")))
    assert ReplicaCell.unpack(read("cell")) == CELL
    assert ReplicaSet.unpack(read("set")) == SET
    assert RegisterState.unpack(read("state")) == STATE
    assert SaveHistory.unpack(read("checkpoint")) == SAVES
    assert Book.unpack(read("reservations")) == BOOK
    assert unseal(read("pack")) == b"bytes of a pack"
    assert ReplicaCell.unpack(SealedObject.unpack(read("object")).content) == CELL
    head = Header.unpack(read("log")[:SECTOR])
    assert [entry.key for entry in entries(read("log"), head)] == ["", "c/x", "c/y", "c/x"]


@pytest.mark.parametrize("name", ["cell", "set", "checkpoint", "reservations", "pack", "object"])
def test_what_is_cut_short_is_noticed_at_every_byte(name: str) -> None:
    """Never a crash, never another value."""
    readers: dict[str, Callable[[bytes], object]] = {
        "cell": ReplicaCell.unpack,
        "set": ReplicaSet.unpack,
        "checkpoint": SaveHistory.unpack,
        "reservations": Book.unpack,
        "pack": unseal,
        "object": SealedObject.unpack,
    }
    read = readers[name]
    for length in range(1, len(FORMATS[name])):
        with pytest.raises(Garbled):
            read(FORMATS[name][:length])


@pytest.mark.parametrize("name", ["pack", "object"])
def test_a_flipped_bit_is_noticed_wherever_it_is(name: str) -> None:
    """The two that stand by themselves; records stand in a log, which is checked below."""
    read: Callable[[bytes], object] = unseal if name == "pack" else SealedObject.unpack
    for flipped in flips(FORMATS[name]):
        with pytest.raises(Garbled):
            read(flipped)


def flips(data: bytes) -> Iterator[bytes]:
    """In each byte one bit, and each of the eight by turns; all of them with ``SUBLET_CRASH_ALL=1``."""
    for at in range(len(data)):
        for bit in range(8) if EVERY_BIT else (at % 8,):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            yield bytes(changed)


@pytest.mark.slow
def test_a_flipped_bit_in_a_log_is_noticed_wherever_it_is() -> None:
    """In the head, in a batch, in the zeros behind; never taken for the end of the log. By the sectors alone, before
    anybody reads what is in them."""
    data = log_file()
    for flipped in flips(data):
        with pytest.raises(Garbled):
            for _ in scan(flipped[SECTOR:], SECTOR, 1, Header.unpack(flipped[:SECTOR]).salt):
                pass


def test_a_batch_that_a_power_cut_tore_is_told_from_damage() -> None:
    """Any sectors of the last one may be missing; nothing of one before it."""
    pieces = frame(bytes(range(256)) * 8, 1, b"salt")
    last = frame(b"x" * 1500, 2, b"salt")
    sectors = [last[at : at + SECTOR] for at in range(0, len(last), SECTOR)]
    for there in range(1 << len(sectors)):
        tail = b"".join(s if there >> n & 1 else bytes(SECTOR) for n, s in enumerate(sectors))
        found = list(scan(pieces + tail + bytes(4096), 0, 1, b"salt"))
        whole = [piece for piece in found if not isinstance(piece, Torn)]
        assert len(whole) == (2 if there == (1 << len(sectors)) - 1 else 1)
    for lost in range(0, len(pieces), SECTOR):
        broken = pieces[:lost] + bytes(SECTOR) + pieces[lost + SECTOR :]
        with pytest.raises(Garbled):
            list(scan(broken + last + bytes(4096), 0, 1, b"salt"))


# ---- on a real disk ----


@pytest.fixture
def seated(tmp_path: Path) -> Iterator[FolderReplica]:
    replica = seat(tmp_path / "replica")
    yield replica
    replica.close()


def seat(folder: Path) -> FolderReplica:
    replica = FolderReplica(folder, log_bytes=1 << 14)
    replica.ask([("", Install(ReplicaSet(1, Seats((replica.identity,), 1, 1))))])
    assert replica.ask([("k", Prepare(1, BALLOT)), ("k", Accept(1, AcceptedWrite(WriteStamp(BALLOT, 0), b"v")))]) == [
        BallotPromised(None),
        Took(),
    ]
    return replica


def reopened(folder: Path) -> list[object]:
    replica = FolderReplica(folder)
    try:
        return list(replica.ask([("k", Query(1))]))
    finally:
        replica.close()


THERE = Here(AcceptedWrite(WriteStamp(BALLOT, 0), b"v"), BALLOT)


def test_writes_that_do_part_of_the_work_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, write = random.Random(5), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: chance.randrange(len(data)) + 1], at))
    replica = seat(tmp_path / "replica")
    writes = [AcceptedWrite(WriteStamp(BALLOT, number), bytes([number]) * 700) for number in range(1, 40)]
    for one in writes:  # more than the log holds, so that it is written anew
        assert replica.ask([("k", Accept(1, one))]) == [Took()]
    replica.close()
    monkeypatch.undo()
    assert reopened(tmp_path / "replica") == [Here(writes[-1], BALLOT)]


def test_a_write_that_ends_within_a_sector_for_want_of_room_is_no_damage(
    seated: FolderReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was told of it, so what there is of it goes."""
    write, sizes = os.pwrite, iter((700, 0))

    def filling(fd: int, data: bytes, at: int) -> int:
        size = next(sizes, len(data))
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:size], at)

    monkeypatch.setattr(os, "pwrite", filling)
    refused = AcceptedWrite(WriteStamp(BALLOT, 1), bytes(range(256)) * 8)
    with pytest.raises(ReplicaFull):
        seated.ask([("k", Accept(1, refused))])
    assert next(sizes, None) is None
    assert reopened(seated.folder) == [THERE]
    assert seated.verify() == []
    assert seated.ask([("k", Accept(1, refused))]) == [Took()]
    assert reopened(seated.folder) == [Here(refused, BALLOT)]


def test_a_copied_folder_does_not_vote(seated: FolderReplica, tmp_path: Path) -> None:
    """A backup that is put back may have forgotten what it promised."""
    assert reopened(seated.folder) == [THERE]
    shutil.copytree(seated.folder, tmp_path / "copy")
    with pytest.raises(ReplicaFaulty, match="copied or restored"):
        FolderReplica(tmp_path / "copy")
    shutil.copy(tmp_path / "copy" / "log", tmp_path / "put back")
    os.replace(tmp_path / "put back", seated.folder / "log")
    for _ in range(2):
        with pytest.raises(ReplicaFaulty, match="copied or restored"):
            seated.ask([("k", Query(1))])
    assert seated.verify()


def test_a_log_that_is_shorter_longer_or_gone_is_damage(seated: FolderReplica) -> None:
    """Not a new replica."""
    log = seated.folder / "log"
    os.truncate(log, (1 << 14) - 1)
    with pytest.raises(ReplicaFaulty, match="should have"):
        reopened(seated.folder)
    os.truncate(log, (1 << 14) + 512)
    with pytest.raises(ReplicaFaulty, match="should have"):
        reopened(seated.folder)
    os.truncate(log, 1 << 14)
    assert reopened(seated.folder) == [THERE]
    log.unlink()
    with pytest.raises(ReplicaFaulty, match="is gone"):
        seated.ask([("k", Query(1))])


def test_a_flipped_bit_on_the_disk_silences_the_replica(seated: FolderReplica) -> None:
    """A sample through the real file; every bit is tried on the format above."""
    log = seated.folder / "log"
    for at in (0, 40, 100, 520, 700, 1100, 9000):
        with open(log, "r+b") as file:
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(bytes([was[0] ^ 4]))
        with pytest.raises(ReplicaFaulty):
            reopened(seated.folder)
        with open(log, "r+b") as file:
            file.seek(at)
            file.write(was)
    assert reopened(seated.folder) == [THERE]


def test_a_damaged_pack_is_not_handed_out(seated: FolderReplica) -> None:
    """And `verify` names it."""
    seated.put_pack("k", PACK, b"bytes")
    stamp = WriteStamp(BALLOT, 1)
    assert seated.ask([("k", Accept(1, AcceptedWrite(stamp, b"w", (PACK,))))]) == [Took()]
    assert seated.verify() == []
    (file,) = seated.folder.glob("packs/*/*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert seated.read_pack("k", PACK) is None
    assert seated.verify() == [f"k: the pack {PACK} is missing or damaged"]
    seated.put_pack("k", PACK, b"bytes")
    assert seated.verify() == []


def test_a_replica_that_was_marked_stays_silent(seated: FolderReplica) -> None:
    """For every process."""
    os.chmod(seated.folder / "log", 0o400)
    for ask in (lambda: seated.ask([("k", Query(1))]), lambda: reopened(seated.folder)):
        with pytest.raises(ReplicaFaulty, match=r"cannot be trusted|may not be written"):
            ask()


def test_folders_that_cannot_hold_a_replica_are_refused(tmp_path: Path) -> None:
    """With the name of the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot hold a replica"):
        FolderReplica(tmp_path / "file" / "below")
    with pytest.raises(InvalidRequest, match="cannot be looked at"):
        refuse_network(tmp_path / "nothing")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "log").write_bytes(b"somebody's notes" * 100)
    with pytest.raises(ReplicaSilent, match="not the log of a replica"):
        FolderReplica(tmp_path / "foreign")


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number that the kernel gives their kind."""

    class Libc:
        @staticmethod
        def statfs(_path: bytes, buffer: object) -> int:
            buffer[:8] = (0x6969).to_bytes(8, "little")  # type: ignore[index]
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda *_args, **_kwargs: Libc)
    with pytest.raises(InvalidRequest, match="NFS"):
        FolderReplica(tmp_path / "replica")


def test_a_batch_is_its_entries() -> None:
    """In order."""
    found = [LogEntry(1, "a", CELL), LogEntry(2, "", SET)]
    assert entries_of(batch(found)) == found
    with pytest.raises(Garbled):
        entries_of(batch(found)[:-1])
