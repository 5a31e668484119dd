"""The tally of a lease: rows of processes, those that live and those that do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sublet.errors import OutOfMemory
from sublet.guest.usage_counters import LeaseAccounts, SharedAccount
from sublet.wire.usage_counters import ROWS_MAX, TALLY_BYTES, TallyFile, UsageRow, total

HOUR_NS = 3600 * 10**9


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = str(tmp_path / "tally")
    TallyFile.create(found).close()
    return found


def opened(path: str) -> TallyFile:
    found = TallyFile.open(path)
    assert found is not None
    return found


def test_a_row_comes_back_as_it_was_written() -> None:
    row = UsageRow(pid=7, place=1, used_bytes=1, peak_bytes=2, at_ns=3, byte_ns=1 << 100, launches=4, failures=5)
    assert UsageRow.decode(row.encode()) == row
    assert UsageRow().is_free


def test_bytes_times_how_long() -> None:
    row = UsageRow(pid=7, at_ns=100).used(10, 100).used(30, 200).used(5, 300)
    assert row.byte_ns == 10 * 100 + 30 * 100
    assert row.peak_bytes == 30
    assert row.over(400).byte_ns == 4500
    assert row.used(0, 50).byte_ns == row.byte_ns, "a clock that is behind takes nothing away"
    assert total([row, row], 400).byte_ns == 9000
    big = UsageRow(at_ns=0).used(80 << 30, 0).over(HOUR_NS)
    assert UsageRow.decode(big.encode()).byte_ns == (80 << 30) * HOUR_NS


def test_what_living_processes_have_counts_and_what_dead_ones_had_does_not(path: str) -> None:
    first, second = opened(path), opened(path)
    one, two = SharedAccount(100, first, 0), SharedAccount(100, second, 0)
    other = SharedAccount(100, second, 1)
    one.take(60, "mem_alloc")
    other.take(100, "mem_alloc")
    with pytest.raises(OutOfMemory, match="40 bytes of the 100B under this lease are free"):
        two.take(41, "mem_alloc")
    assert two.used_bytes == 0
    two.take(40, "mem_alloc")
    assert (one.free_bytes, two.free_bytes) == (0, 0)
    two.give(40)
    assert one.free_bytes == 40
    first.close()  # as when the process ends, however it ends
    two.take(100, "mem_alloc")
    second.close()


def test_what_was_done_is_kept_when_rows_are_used_again(path: str) -> None:
    for _ in range(3 * ROWS_MAX):
        tally = opened(path)
        account = SharedAccount(1 << 20, tally, 0)
        account.take(10, "mem_alloc")
        account.count(launches=2, failures=1, bytes_in=3, bytes_out=4)
        tally.close()
    reader = opened(path)
    found = total(reader.rows(), 0)
    n = 3 * ROWS_MAX
    assert (found.launches, found.failures, found.bytes_in, found.bytes_out) == (2 * n, n, 3 * n, 4 * n)
    assert len(reader.rows()) == 2
    reader.close()


def test_one_process_has_a_row_for_each_device(path: str) -> None:
    tally = opened(path)
    assert [tally.claim(1, place, 0) for place in (0, 1, 2)] == [1, 2, 3]
    assert [tally.claim(1, 0, 0) for _ in range(ROWS_MAX)][-1] == -1, "more than there are is no error"
    tally.close()


def test_counts_without_memory_are_counted(path: str) -> None:
    tally = opened(path)
    account = SharedAccount(100, tally, 0)
    account.count(launches=1, failures=0, bytes_in=0, bytes_out=0)
    assert total(tally.rows(), 0).launches == 1
    tally.close()


def test_fuel_is_written_by_itself_and_kept_with_the_rest(path: str) -> None:
    for _ in range(ROWS_MAX + 3):
        tally = opened(path)
        row = tally.claim(1, 0, 0)
        tally.write(row, UsageRow(pid=1, launches=1, at_ns=5))
        tally.write_fuel(row, 1 << 40)
        assert tally.read(row) == UsageRow(pid=1, launches=1, at_ns=5, fuel=1 << 40)
        tally.close()
    reader = opened(path)
    found = total(reader.rows(), 0)
    assert (found.fuel, found.launches) == ((ROWS_MAX + 3) << 40, ROWS_MAX + 3)
    reader.close()


def test_all_rows_are_read_in_one_go_the_last_one_too(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of every lease waits for this, and most have written nothing: 256 reads took it some milliseconds."""
    tally, reads, read = opened(path), list[int](), os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(fd)
        return read(fd, length, offset)

    monkeypatch.setattr("sublet.wire.usage_counters.os.pread", counted)
    assert tally.rows() == []
    row = UsageRow(pid=9, launches=3)
    tally.write(ROWS_MAX - 1, row)
    assert tally.rows() == [row], "whatever lies before it"
    assert len(reads) == 2
    tally.close()


@pytest.mark.parametrize("damage", ["short", "other", "empty", "gone"])
def test_a_file_that_somebody_spoilt_harms_nobody(path: str, damage: str) -> None:
    if damage == "gone":
        os.unlink(path)
        assert TallyFile.open(path) is None
        return
    reader = opened(path)
    match damage:
        case "short":
            os.truncate(path, TALLY_BYTES // 2 + 3)
        case "empty":
            os.truncate(path, 0)
        case _:
            Path(path).write_bytes(os.urandom(TALLY_BYTES))
    total(reader.rows(), 1)
    reader.close()
    again = TallyFile.open(path)
    assert (again is None) == (damage != "short")
    if again is not None:
        again.close()


def test_who_has_something_to_save_and_who_has_memory_is_seen_by_others(path: str) -> None:
    """And not of a process that has ended."""
    mine, other = opened(path), opened(path)
    assert not mine.is_unsaved()
    other.unsaved(begins=True)
    assert mine.is_unsaved()
    assert not mine.is_at_work()
    other.unsaved(begins=False)
    assert not mine.is_unsaved()
    row = other.claim(5, 0, 1)
    assert not mine.is_any_used()
    other.write(row, other.read(row).used(100, 2))
    assert mine.is_any_used()
    other.unsaved(begins=True)
    other.close()
    assert not mine.is_any_used()
    assert not mine.is_unsaved()
    mine.close()


def test_without_a_tally_each_process_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_VRAM", "100,200")
    monkeypatch.setenv("SUBLET_TALLY", "/nonexistent")
    accounts = LeaseAccounts.from_environment()
    accounts.of(1).take(200, "mem_alloc")
    with pytest.raises(OutOfMemory):
        accounts.of(0).take(101, "mem_alloc")
    assert accounts.of(1) is accounts.of(1)
