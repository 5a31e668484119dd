"""A guest's log: what is read is what was written, from where it is still kept, whatever happened to the writer."""

from __future__ import annotations

import errno
import itertools
import os
import random
import tempfile
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.clock import SystemClock
from sublet.node.processes.log_readers import Following
from sublet.node.processes.logs import GuestLog, LogReader

BOUND: Final = 4096
CLOCK: Final = SystemClock()
Said = list[tuple[int, int]]
"""Every byte that was said: its stream and its value."""


def bytes_for(count: int, seed: int) -> bytes:
    return bytes((seed + index) % 251 for index in range(count))


def read_all(reader: LogReader, most: int = 1000) -> tuple[int, Said]:
    """Everything from the reader's place on: how much was missing, and each byte with its stream."""
    dropped = 0
    said: Said = []
    place = reader.offset
    for _ in range(100_000):
        replay = reader.read(most)
        assert not (replay.dropped and said), "a hole in the middle of a whole log"
        dropped += replay.dropped
        place += replay.dropped
        for record in replay.records:
            assert record.offset == place
            place += len(record.data)
            said += [(record.stream, value) for value in record.data]
        assert reader.offset == place
        if replay.at_end:
            return dropped, said
    raise AssertionError("the reader never came to an end")


def size_of(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).iterdir()) if os.path.isdir(folder) else 0


# ---- any sequence

ACTS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 2500)),
        st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 30)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
        st.tuples(st.just("torn write"), st.just(0), st.integers(1, 60)),
        st.tuples(st.just("cut"), st.just(0), st.integers(1, 400)),
        st.tuples(st.just("read"), st.just(0), st.integers(1, 3000)),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(acts=ACTS, bound=st.sampled_from([BOUND, 5001, 20_000]))
def test_whatever_happened_a_reader_gets_a_suffix_of_what_was_said(
    acts: list[tuple[str, int, int]], bound: int
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/log"
        log, said = GuestLog(folder, CLOCK, bound), Said()
        for number, (act, stream, count) in enumerate(acts):
            if act == "append":
                data = bytes_for(count, number)
                assert log.append(stream, data) == len(said)
                said += [(stream, value) for value in data]
            elif act == "read":
                check_suffix(folder, said, count)
            else:
                log.close()
                spoil(folder, act, count)
                log = GuestLog(folder, CLOCK, bound)
                assert log.offset <= len(said)
                if act != "cut":
                    assert log.offset == len(said)
                del said[log.offset :]
            assert not log.stopped
            assert log.offset == log.kept_until == len(said)
            assert size_of(folder) <= bound
        assert check_suffix(folder, said, 777) == log.dropped
        log.close()


def check_suffix(folder: str, said: Said, most: int) -> int:
    reader = LogReader(folder)
    dropped, read = read_all(reader, most)
    reader.close()
    assert read == said[dropped:]
    return dropped


def spoil(folder: str, act: str, count: int) -> None:
    """What a writer killed in the middle of a write, or a disk that lost the last of it, leaves behind."""
    last = max(Path(folder).glob("*.log"), default=None) if os.path.isdir(folder) else None
    if last is None:
        return
    whole = last.read_bytes()
    if act == "torn write":
        last.write_bytes(whole + whole[8 : 8 + count][: max(1, count)])
    elif act == "cut":
        last.write_bytes(whole[: max(0, len(whole) - count)])


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, 3999), value=st.integers(1, 255))
def test_a_spoilt_byte_costs_what_follows_it_in_its_segment_and_is_never_handed_out(place: int, value: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, said = GuestLog(folder, CLOCK, BOUND), Said()
        for number in range(60):
            data = bytes_for(50 + number % 7, number)
            log.append(1, data)
            said += [(1, byte) for byte in data]
        log.close()
        path = sorted(Path(folder).iterdir())[place % 3]  # the last segment is the writer's to mend
        content = bytearray(path.read_bytes())
        content[place % len(content)] ^= value
        path.write_bytes(content)
        reader = LogReader(folder)
        at, read = 0, 0
        while not (replay := reader.read(500)).at_end or replay.records:
            at += replay.dropped
            for record in replay.records:
                assert [(1, byte) for byte in record.data] == said[at : at + len(record.data)]
                at += len(record.data)
                read += len(record.data)
        assert at == len(said) == log.offset
        assert read >= 1024
        reader.close()


@settings(max_examples=40, deadline=None)
@given(
    offset=st.integers(0, 5000),
    most=st.integers(1, 5000),
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=20),
)
def test_a_reader_may_begin_anywhere_also_inside_a_record(offset: int, most: int, sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, said = GuestLog(folder, CLOCK, 1 << 16), Said()
        for number, size in enumerate(sizes):
            log.append(1 + number % 2, bytes_for(size, number))
            said += [(1 + number % 2, byte) for byte in bytes_for(size, number)]
        log.close()
        offset = min(offset, len(said))
        reader = LogReader(folder, offset)
        assert read_all(reader, most) == (0, said[offset:])
        reader.close()


# ---- what follows a log that is written meanwhile

STEPS: Final = 200
"""Of one random walk; so long that a follower falls behind and catches up many times."""


FRAME: Final = 9


class Reading:
    """A follower that has as much room as it was given, some of which it needs for each piece."""

    def __init__(self, begin: int) -> None:
        self.credit = 0
        self.at = begin
        self.got: list[tuple[int, int, bytes]] = []
        self.lost = 0

    def room(self) -> int:
        return max(0, self.credit - FRAME)

    def take(self, stream: int, offset: int, data: bytes) -> None:
        assert 0 < len(data) <= self.room(), "more than there was room for"
        assert offset == self.at, "a hole that was not said, or something twice"
        self.credit -= len(data) + FRAME
        self.at += len(data)
        self.got.append((stream, offset, data))

    def gap(self, offset: int, dropped: int) -> None:
        assert offset == self.at
        self.at += dropped
        self.lost += dropped

    def end(self) -> None:
        raise AssertionError("nobody ended it")


@settings(max_examples=60, deadline=None)
@given(
    before=st.integers(0, 6000),
    begin=st.integers(0, 6000),
    size=st.sampled_from([5, 50, 1500]),
    seed=st.integers(0, 1 << 32),
)
def test_replay_and_live_have_no_gap_that_is_not_said_and_nothing_twice(
    before: int, begin: int, size: int, seed: int
) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        log = GuestLog(folder, CLOCK, BOUND)
        log.append(1, bytes_for(before, 0))
        said = bytearray(bytes_for(before, 0))
        reading = Reading(min(begin, before))
        following = Following(log, reading, position=reading.at)
        for number in range(STEPS):
            step = chance.choice(("say", "say", "say", "credit", "turn", "turn"))
            if step == "say":
                data = bytes_for(chance.randint(1, size), number)
                stream = chance.randint(0, 2)
                said += data
                following.offer(stream, log.append(stream, data), data)
            elif step == "credit":
                reading.credit += chance.randint(1, 5 * (size + FRAME))
            else:
                following.catch_up()
            assert following.position == reading.at
        reading.credit = 1 << 30
        while following.catch_up():
            pass
        assert reading.at == len(said) == log.offset
        for _, offset, data in reading.got:
            assert data == said[offset : offset + len(data)]
        if not log.dropped:
            assert reading.lost == 0
        following.close()
        log.close()


# ---- the bound, and a disk that is full


def test_the_oldest_goes_and_three_quarters_of_the_bound_stay(tmp_path: Path) -> None:
    log = GuestLog(str(tmp_path), CLOCK, 1 << 16)
    for number in range(1000):
        log.append(1, bytes_for(1000, number))
        assert size_of(str(tmp_path)) <= 1 << 16
    assert log.offset == 1_000_000
    assert log.offset - log.dropped > 0.7 * (1 << 16)
    log.close()


def test_a_reader_that_holds_a_dropped_segment_reads_it_to_its_end(tmp_path: Path) -> None:
    log = GuestLog(str(tmp_path), CLOCK, BOUND)
    log.append(1, b"a" * 900)
    reader = LogReader(str(tmp_path))
    assert sum(len(record.data) for record in reader.read(100).records) == 100
    for _ in range(10):
        log.append(1, b"b" * 900)
    first = reader.read(5000)
    assert b"".join(record.data for record in first.records) == b"a" * 800
    dropped, rest = read_all(reader)
    assert dropped == log.dropped - 900 > 0
    assert bytes(value for _, value in rest) == b"b" * (log.offset - log.dropped)
    reader.close()
    log.close()


def test_a_full_disk_stops_the_log_and_not_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of a record that did fit is taken back."""
    log = GuestLog(str(tmp_path), CLOCK, BOUND)
    log.append(1, b"kept")
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: real(fd, [b"".join(parts)[:30]]))
    assert log.append(1, b"x" * 50) == 4
    monkeypatch.setattr(os, "writev", real)
    assert log.stopped == os.strerror(errno.ENOSPC)
    assert log.append(2, b"y" * 6) == 54
    assert (log.offset, log.kept_until, log.dropped) == (60, 4, 56)
    reader = LogReader(str(tmp_path))
    assert read_all(reader) == (0, [(1, value) for value in b"kept"])
    reader.close()
    again = GuestLog(str(tmp_path), CLOCK, BOUND)
    assert again.offset == 4
    again.append(1, b"more")
    again.close()


def test_a_follower_of_a_stopped_log_is_told_what_it_misses(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"in the way of the folder")
    log = GuestLog(str(tmp_path / "log" / "here"), CLOCK, BOUND)
    reading = Reading(0)
    following = Following(log, reading, position=0)
    reading.credit = FRAME + 3
    following.offer(1, log.append(1, b"abcdef"), b"abcdef")
    assert log.stopped
    assert [data for _, _, data in reading.got] == [b"abc"]
    reading.credit = 100
    assert not following.catch_up()
    assert (reading.lost, reading.at) == (3, 6)
    following.offer(1, log.append(1, b"ghi"), b"ghi")
    assert reading.got[-1] == (1, 6, b"ghi")


def test_a_guest_that_says_nothing_leaves_no_file(tmp_path: Path) -> None:
    log = GuestLog(str(tmp_path / "log"), CLOCK)
    log.append(1, b"")
    log.close()
    assert not (tmp_path / "log").exists()
    assert read_all(LogReader(str(tmp_path / "log"))) == (0, [])


def test_a_log_that_was_prepared_is_as_one_that_was_not(tmp_path: Path) -> None:
    """Its file is there before anything is said, and no descriptor is held for that; once something was, it is left
    alone."""
    prepared, plain = (GuestLog(str(tmp_path / name), CLOCK) for name in ("a", "b"))
    prepared.prepare()
    assert prepared._fd < 0
    assert read_all(LogReader(prepared.folder)) == (0, [])
    for log in (prepared, plain):
        log.append(1, b"one ")
        log.prepare()
        log.append(2, b"two")
        log.close()
        assert bytes(value for _, value in read_all(LogReader(log.folder))[1]) == b"one two"
    assert prepared.size == plain.size
    again = GuestLog(prepared.folder, CLOCK)
    again.prepare()
    assert again.append(1, b"!") == 7
    again.close()


def test_a_log_goes_on_after_it_was_closed(tmp_path: Path) -> None:
    log = GuestLog(str(tmp_path), CLOCK)
    log.append(1, b"one ")
    log.close()
    log.append(0, b"two")
    log.close()
    assert bytes(value for _, value in read_all(LogReader(str(tmp_path)))[1]) == b"one two"


def test_a_bound_too_small_to_keep_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        GuestLog("/nowhere", CLOCK, 100)


def test_wall_time_is_kept_with_each_record(tmp_path: Path) -> None:
    class Walls:
        domain = "test"
        walls = itertools.count(5)

        def now_ns(self) -> int:
            return 0

        def wall_ns(self) -> int:
            return next(self.walls)

    log = GuestLog(str(tmp_path), Walls())
    log.append(1, b"a")
    log.append(2, b"b")
    log.close()
    reader = LogReader(str(tmp_path))
    assert [(record.stream, record.wall_ns) for record in reader.read().records] == [(1, 5), (2, 6)]
    reader.close()
