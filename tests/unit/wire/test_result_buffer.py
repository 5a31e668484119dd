"""The memory in which results of a call of many lie: nothing half-written is ever taken for a result."""

from __future__ import annotations

import mmap
import os
import pickle
import random
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.errors import InvalidRequest
from sublet.wire.work import RESULT_MAX, RESULTS_BYTES, RESULTS_MAX, Board, ResultBuffer

CALL = 7


@pytest.fixture
def both() -> Iterator[tuple[ResultBuffer, ResultBuffer]]:
    """The worker's and the holder's."""
    holder, fd = ResultBuffer.create()
    worker = ResultBuffer.opened(fd)
    os.close(fd)
    yield worker, holder
    worker.close()
    holder.close()


def test_each_result_is_with_the_holder_when_it_was_put(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    worker, holder = both
    worker.begin(CALL)
    results: list[bytes] = []
    for number in range(100):
        results.append(pickle.dumps(number))
        assert worker.put(results[-1])
        assert holder.read(CALL) == (0, results)


def test_results_of_another_call_are_not_taken(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    worker, holder = both
    worker.begin(CALL)
    worker.put(b"one")
    assert holder.read(CALL + 2) == (0, [])
    worker.begin(CALL + 2)
    assert holder.read(CALL) == (0, [])
    assert holder.read(CALL + 2) == (0, [])


def test_after_they_were_sent_it_goes_on_from_the_next_item(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    worker, holder = both
    worker.begin(CALL)
    for data in (b"a", b"", b"ccc"):
        worker.put(data)
    assert (len(worker), worker.first) == (3, 0)
    assert holder.read(CALL) == (0, [b"a", b"", b"ccc"])
    worker.restart_at(3)
    worker.put(b"dd")
    assert holder.read(CALL) == (3, [b"dd"])
    assert (len(worker), worker.first) == (1, 3)


@pytest.mark.parametrize("then", ["begin", "restart_at"])
def test_a_worker_that_goes_on_while_it_is_read_gives_no_result_a_wrong_place(
    both: tuple[ResultBuffer, ResultBuffer], monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Its records are read, and the item that they begin at belongs to others by then."""
    worker, holder = both
    worker.begin(CALL)
    worker.put(b"0")
    read = holder._whole

    def goes_on() -> list[bytes]:
        found = read()
        if worker.call == CALL and worker.first == 0:
            getattr(worker, then)(CALL + 1 if then == "begin" else 1)
            worker.put(b"later")
        return found

    monkeypatch.setattr(holder, "_whole", goes_on)
    assert holder.read(CALL) == ((0, []) if then == "begin" else (1, [b"later"]))


def test_what_finds_no_room_is_refused_and_changes_nothing(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    worker, holder = both
    worker.begin(CALL)
    whole = RESULTS_BYTES // RESULT_MAX
    assert [worker.put(bytes(RESULT_MAX)) for _ in range(whole + 1)] == [True] * whole + [False]
    assert len(holder.read(CALL)[1]) == whole
    worker.begin(CALL)
    assert [worker.put(b"") for _ in range(RESULTS_MAX + 1)] == [True] * RESULTS_MAX + [False]
    assert len(holder.read(CALL)[1]) == RESULTS_MAX


def test_a_record_that_is_torn_at_any_write_is_not_taken(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    """Every write that makes a record, done in order and ended behind each: it is there after the last, not before."""
    worker, holder = both
    data = pickle.dumps("a result")
    writes = ("data", "ends", "sums", "count")
    for done in range(len(writes)):
        worker.begin(CALL)
        worker.put(b"first")
        start = len(b"first")
        if done > 0:
            worker._data[start : start + len(data)] = data
        if done > 1:
            worker._ends[1] = start + len(data)
        if done > 2:
            worker._sums[1] = zlib.crc32(data, 1)
        assert holder.read(CALL) == (0, [b"first"]), f"after {writes[:done]}"
    worker._head[2] = 2
    assert holder.read(CALL) == (0, [b"first", data])


def test_a_flipped_bit_is_never_taken_for_a_result(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    """What scribbles over the buffer ends the results before it; those that are told are whole."""
    worker, holder = both
    worker.begin(CALL)
    results = [pickle.dumps({"item": number, "value": number * 1.5}) for number in range(20)]
    for one in results:
        worker.put(one)
    size = len(b"".join(results))
    chance = random.Random(1)
    places: list[tuple[Any, int, int]] = [(worker._data, at, 8) for at in range(size)]
    places += [(worker._ends, at, 32) for at in range(20)] + [(worker._sums, at, 32) for at in range(20)]
    places.append((worker._head, 2, 64))
    for view, at, bits in places:
        bit = chance.randrange(bits)
        before = view[at]
        view[at] = before ^ (1 << bit)
        first, found = holder.read(CALL)
        view[at] = before
        assert first == 0
        assert found == results[: len(found)], f"bit {bit} at {at}"
        if view is not worker._head:
            assert len(found) < 20
    assert holder.read(CALL) == (0, results)


def test_a_process_that_is_killed_at_any_moment_leaves_whole_results(both: tuple[ResultBuffer, ResultBuffer]) -> None:
    """A real SIGKILL, at random moments: whatever is counted is right, and at most the last one is not counted."""
    worker, holder = both
    done = mmap.mmap(-1, 16)  # shared with the fork: which result it makes now, and how many were sent
    chance = random.Random(2)
    try:
        for turn in range(20):
            worker.begin(CALL)
            done[:] = bytes(16)
            pid = os.fork()  # no thread of ours runs
            if pid == 0:
                number = 0
                while True:
                    done[:8] = number.to_bytes(8, "little")
                    if not worker.put(pickle.dumps((number, "x" * (number % 97)))):
                        done[8:] = number.to_bytes(8, "little")
                        worker.restart_at(number)
                        continue
                    number += 1
            _wait_for_work(done, chance.randrange(1, 3000))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            first, found = holder.read(CALL)
            loaded = [pickle.loads(one) for one in found]  # noqa: S301 - our own
            assert loaded == [(first + n, "x" * ((first + n) % 97)) for n in range(len(found))], f"turn {turn}"
            making, sent = (int.from_bytes(done[at : at + 8], "little") for at in (0, 8))
            assert making - max(first + len(found), sent) in (-1, 0)
    finally:
        done.close()


def _wait_for_work(done: mmap.mmap, items: int) -> None:
    while int.from_bytes(done[:8], "little") < items:
        pass


def test_what_is_no_result_buffer_is_refused() -> None:
    board, fd = Board.create()
    with pytest.raises(InvalidRequest, match="no result buffer"):
        ResultBuffer.opened(fd)
    os.close(fd)
    board.close()


def test_it_cannot_be_made_smaller_by_the_other_side() -> None:
    buffer, fd = ResultBuffer.create()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, mmap.PAGESIZE)
    os.close(fd)
    buffer.close()
    buffer.close()
