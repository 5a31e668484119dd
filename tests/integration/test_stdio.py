"""Real guests at real pipes and terminals: nothing is lost, nobody waits who should not, nothing stays open."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.clock import SystemClock
from sublet.node.loop import Loop
from sublet.node.processes import stdio as stdio_module
from sublet.node.processes.log_readers import Following
from sublet.node.processes.logs import GuestLog, LogReader
from sublet.node.processes.stdio import OUTPUT_READ_BYTES, STDIN_BYTES_MAX, Stdio, child_setup
from tests.left_open import nothing_left_open, open_now

PLENTY: Final = 1 << 40
PATIENCE_S: Final = 60.0
GUESTS: Final = int(os.environ.get("SUBLET_STDIO_GUESTS", "60"))
"""Of which none leaves a descriptor: at least 60, in which every way to run and to end one meets every other."""
CLOCK: Final = SystemClock()


class Reading:
    """A follower with as much room as it is given; it checks that nothing is missing unsaid and nothing comes twice."""

    def __init__(self, room: int = PLENTY, *, keep: bool = True) -> None:
        self.left = room
        self.at: int | None = None
        self.got = {0: bytearray(), 1: bytearray(), 2: bytearray()}
        self.all = bytearray()
        self.keep = keep
        self.lost = 0
        self.ended = False
        self.taken = 0

    def room(self) -> int:
        return self.left

    def take(self, stream: int, offset: int, data: bytes) -> None:
        assert not self.ended
        assert 0 < len(data) <= self.left
        assert self.at in (None, offset)
        self.at = offset + len(data)
        self.left -= len(data)
        self.taken += len(data)
        if self.keep:
            self.got[stream] += data
            self.all += data

    def gap(self, offset: int, dropped: int) -> None:
        assert not self.ended
        assert self.at in (None, offset)
        self.at = offset + dropped
        self.lost += dropped

    def end(self) -> None:
        assert not self.ended
        self.ended = True


class Guest:
    """A process, its stdio, and how often it was said to be done."""

    def __init__(self, stage: Stage, stdio: Stdio, argv: tuple[str, ...], done: list[bool]) -> None:
        self.stage = stage
        self.stdio = stdio
        self._done = done
        ends = stdio.child
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the runner has threads; the child only makes calls
            self.pid = os.fork()
        if self.pid == 0:
            try:
                child_setup(ends)
                os.execvp(argv[0], argv)
            finally:
                os._exit(127)
        self.status: int | None = None
        stdio.started()

    @property
    def done(self) -> int:
        return len(self._done)

    @property
    def has_exited(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def until_offset(self, offset: int) -> None:
        self.stage.until(lambda: self.stdio.log.offset >= offset)

    def finish(self, deadline_s: float = PATIENCE_S) -> int:
        """To the end of the process, of its output, and of its descriptors; its exit status."""
        self.stage.until(lambda: self.has_exited)
        self.stdio.drain_until(self.stage.loop.now_ns() + round(deadline_s * 1e9))
        self.stage.until(lambda: self.stdio.is_done)
        assert self.done == 1
        self.stdio.close()
        assert self.status is not None
        return self.status

    def end(self) -> None:
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # it leads its own group: child_setup saw to that
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.stdio.close()


class Stage:
    """A loop, and guests that are cleared away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = Loop(CLOCK)
        self.guests: list[Guest] = []

    def guest(self, *argv: str, kind: str = "pipes", bound: int = 16 << 20, reader: Reading | None = None) -> Guest:
        """Run it; a reader given here follows it losslessly from the start."""
        log = GuestLog(str(self.folder / f"log{len(self.guests)}"), CLOCK, bound)
        done: list[bool] = []
        stdio: Stdio = getattr(Stdio, kind)(self.loop, log, lambda: done.append(True))
        if reader is not None:
            stdio.attach(reader, lossless=True)
        guest = Guest(self, stdio, argv, done)
        self.guests.append(guest)
        return guest

    def shell(self, script: str, *, kind: str = "pipes", bound: int = 16 << 20, reader: Reading | None = None) -> Guest:
        return self.guest("sh", "-c", script, kind=kind, bound=bound, reader=reader)

    def until(self, condition: Callable[[], object], each: Callable[[], None] = lambda: None) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up, "it never came to pass"
            each()
            self.loop.turn(0.01)

    def until_end(self, reader: Reading) -> None:
        self.until(lambda: reader.ended)

    def turn_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.loop.turn(0.01)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for guest in stage.guests:
        guest.end()
    stage.loop.close()


# ---- everything arrives


def test_fifty_megabytes_reach_a_slow_reader_whole(stage: Stage, tmp_path: Path) -> None:
    """The log keeps one of them, so that the rest cannot have come from there."""
    source = tmp_path / "source"
    with source.open("wb") as file:
        for number in range(50):
            file.write(bytes([number]) + os.urandom((1 << 20) - 1))
    chance, want = random.Random(50), hashlib.sha256(source.read_bytes()).digest()
    reader, got = Reading(0, keep=False), hashlib.sha256()
    take = reader.take

    def hashing(stream: int, offset: int, data: bytes) -> None:
        take(stream, offset, data)
        got.update(data)

    reader.take = hashing  # type: ignore[method-assign]
    guest = stage.guest("cat", str(source), bound=1 << 20)
    following = guest.stdio.attach(reader, lossless=True)

    def credit() -> None:
        reader.left += chance.choice((0, 0, 1, 1000, 100_000, 300_000, 600_000))
        guest.stdio.resume(following)

    stage.until(lambda: guest.done, credit)
    assert guest.finish() == 0
    stage.until(lambda: reader.ended, credit)
    assert reader.taken == 50 << 20
    assert reader.lost == 0
    assert got.digest() == want


def test_a_guest_waits_while_its_lossless_reader_has_no_room_and_goes_on_after(stage: Stage, tmp_path: Path) -> None:
    reader = Reading(1000)
    guest = stage.shell(f"head -c 1000000 /dev/zero; : > {tmp_path}/through")
    following = guest.stdio.attach(reader, lossless=True)
    stage.until(lambda: reader.taken == 1000)
    stage.turn_for(0.3)
    assert not (tmp_path / "through").exists()
    assert guest.stdio.log.offset == 1000
    reader.left = PLENTY
    guest.stdio.resume(following)
    assert guest.finish() == 0
    assert (tmp_path / "through").exists()
    assert reader.taken == 1_000_000


def test_a_guest_waits_for_the_reader_that_is_to_come_and_loses_nothing(stage: Stage) -> None:
    """However long that takes; one who may miss something is not the one who is awaited."""
    guest = stage.shell("head -c 50000000 /dev/zero")
    guest.stdio.await_reader()
    guest.stdio.detach(guest.stdio.attach(Reading()))
    stage.turn_for(0.2)
    assert guest.stdio.log.offset == 0
    reader = Reading(keep=False)
    guest.stdio.attach(reader, lossless=True)
    assert guest.finish() == 0
    stage.until_end(reader)
    assert (reader.taken, reader.lost) == (50_000_000, 0)


def test_a_guest_goes_on_when_nobody_comes_any_more(stage: Stage) -> None:
    guest = stage.shell("head -c 50000000 /dev/zero")
    guest.stdio.await_reader()
    guest.stdio.stop_awaiting_reader()
    guest.stdio.stop_awaiting_reader()
    assert guest.finish() == 0
    assert guest.stdio.log.offset == 50_000_000


def test_a_guest_goes_on_when_the_lossless_reader_it_waits_for_leaves(stage: Stage) -> None:
    guest = stage.shell("head -c 1000000 /dev/zero")
    following = guest.stdio.attach(Reading(0), lossless=True)
    stage.turn_for(0.1)
    assert not guest.done
    guest.stdio.detach(following)
    guest.stdio.detach(following)
    assert guest.finish() == 0
    assert guest.stdio.log.offset == 1_000_000


def test_a_guest_whose_grace_has_begun_is_not_made_to_wait(stage: Stage) -> None:
    reader = Reading(10)
    guest = stage.shell("head -c 1000000 /dev/zero")
    following = guest.stdio.attach(reader, lossless=True)
    stage.until(lambda: reader.taken == 10)
    guest.stdio.stop_blocking()
    stage.until(lambda: guest.has_exited)
    reader.left = PLENTY
    guest.stdio.resume(following)
    guest.finish()
    stage.until_end(reader)
    assert (reader.taken, reader.lost) == (1_000_000, 0)


def test_a_reader_may_leave_or_make_us_speak_while_it_takes(stage: Stage) -> None:
    """Another one gets everything all the same, in order."""
    leaver, talker, other = Reading(), Reading(), Reading()
    guest = stage.shell("read x; echo 1; read x; echo 2")
    followings = [guest.stdio.attach(one, lossless=True) for one in (leaver, talker, other)]
    heard: list[int] = []

    def leave(stream: int, offset: int, data: bytes) -> None:
        guest.stdio.detach(followings[0])
        guest.stdio.write_notice("one left")

    def talk(stream: int, offset: int, data: bytes) -> None:
        Reading.take(talker, stream, offset, data)
        if stream:
            heard.append(offset)
            guest.stdio.write_notice("heard")

    leaver.take = leave  # type: ignore[method-assign]
    talker.take = talk  # type: ignore[method-assign]
    for _ in range(2):
        guest.stdio.feed(b"\n")
    guest.finish()
    stage.until_end(other)
    stage.until_end(talker)
    assert not leaver.ended
    assert other.all == talker.all
    assert other.got[1] == b"1\n2\n"
    assert other.got[0].count(b"sublet: heard\n") == len(heard) > 0
    assert other.got[0].count(b"sublet: one left\n") == 1
    assert len(other.all) == guest.stdio.log.offset


def test_a_reader_that_is_not_lossless_makes_nobody_wait_and_reads_up_from_the_log(stage: Stage) -> None:
    whole, part = Reading(0), Reading(10)
    guest = stage.shell("head -c 3000000 /dev/zero")
    followings = [guest.stdio.attach(one) for one in (whole, part)]
    assert guest.finish() == 0
    assert (whole.taken, part.taken) == (0, 10)
    for one, following in zip((whole, part), followings, strict=True):
        one.left = PLENTY
        guest.stdio.resume(following)
        stage.until_end(one)
        assert (one.taken, one.lost) == (3_000_000, 0)


def test_what_the_log_no_longer_has_is_said_as_a_gap(stage: Stage) -> None:
    reader = Reading(10)
    guest = stage.shell("head -c 3000000 /dev/zero", bound=1 << 18)
    following = guest.stdio.attach(reader)
    assert guest.finish() == 0
    reader.left = PLENTY
    guest.stdio.resume(following)
    stage.until_end(reader)
    assert reader.lost == guest.stdio.log.dropped - 10
    assert reader.taken + reader.lost == 3_000_000


def test_readers_that_come_late_get_it_from_the_beginning_or_from_where_they_ask(stage: Stage) -> None:
    guest = stage.shell("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; read x; echo last")
    want = "".join(f"line {number}\n" for number in range(3000)).encode() + b"last\n"
    readers: list[tuple[int, Reading]] = []
    for offset in (0, 5, 9999, 20_000):
        guest.until_offset(offset)
        readers.append((offset, Reading()))
        guest.stdio.attach(readers[-1][1], offset, lossless=offset == 5)
    guest.until_offset(len(want) - 5)
    only_new, what_is_there = Reading(), Reading()
    guest.stdio.attach(only_new, -1)
    guest.stdio.attach(what_is_there, 0, follow=False)
    stage.until(lambda: what_is_there.ended)
    guest.stdio.feed(b"\n")
    guest.finish()
    after = Reading()
    guest.stdio.attach(after, 7)
    stage.until(lambda: after.ended and only_new.ended and all(one.ended for _, one in readers))
    assert what_is_there.all == want[:-5]
    assert only_new.all == b"last\n"
    assert after.all == want[7:]
    for offset, one in readers:
        assert one.all == want[offset:]


def test_no_turn_of_the_loop_reads_more_than_one_pipe_full_of_each_output(stage: Stage) -> None:
    """So that somebody else's deadline never waits for a guest that prints without end."""
    guest = stage.shell("cat /dev/zero >&2 & exec cat /dev/zero")
    for _ in range(200):
        before = guest.stdio.log.offset
        stage.loop.turn(0.01)
        assert guest.stdio.log.offset - before <= 2 * OUTPUT_READ_BYTES


# ---- the bound


def test_two_hundred_megabytes_leave_a_bounded_log(
    stage: Stage, record_property: Callable[[str, object], None]
) -> None:
    guest = stage.shell("head -c 200000000 /dev/zero")
    began, busy = time.perf_counter(), time.process_time()
    assert guest.finish() == 0
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - busy
    record_property("megabytes_per_second", 200 / wall_s)
    print(f"200 MB through a pipe into a log: {200 / wall_s:.0f} MB/s, {cpu_s / 200 * 1e6:.0f} µs of CPU per MB")
    folder = Path(guest.stdio.log.folder)
    assert 11 << 20 <= sum(path.stat().st_size for path in folder.iterdir()) <= 16 << 20
    assert guest.stdio.log.offset == 200_000_000


WRITING: Final = """
import sys
from sublet.clock import SystemClock
from sublet.node.processes.logs import GuestLog
log = GuestLog(sys.argv[1], SystemClock(), 1 << 17)
for number in range(30_000):
    log.append(1, b"%08d" % number * (number % 50))
"""


def test_another_process_reads_a_log_while_it_is_written_and_loses_its_beginning(tmp_path: Path) -> None:
    reader, at, dropped, read = LogReader(str(tmp_path)), 0, 0, 0
    with subprocess.Popen([sys.executable, "-c", WRITING, str(tmp_path)]) as writer:
        while True:
            is_over = writer.poll() is not None
            replay = reader.read()
            at += replay.dropped
            dropped += replay.dropped
            for record in replay.records:
                assert record.offset == at
                assert record.data == record.data[:8] * (len(record.data) // 8)
                at += len(record.data)
                read += len(record.data)
            if is_over and replay.at_end:
                break
    reader.close()
    assert writer.returncode == 0
    assert at == dropped + read == sum(8 * (number % 50) for number in range(30_000))
    assert read >= 1 << 16


def test_a_log_that_cannot_be_written_says_so_once_and_the_guest_and_its_readers_go_on(
    stage: Stage, tmp_path: Path
) -> None:
    (tmp_path / "log0").write_text("something in the way")
    reader = Reading()
    guest = stage.shell("echo one; read x; echo two", reader=reader)
    stage.until(lambda: reader.got[1] == b"one\n")
    guest.stdio.feed(b"\n")
    assert guest.finish() == 0
    stage.until_end(reader)
    assert reader.got[1] == b"one\ntwo\n"
    assert reader.got[0].count(b"the log of this guest ends here") == 1
    assert reader.lost == 0


# ---- stdin


def test_five_megabytes_are_fed_and_a_full_buffer_tells_when_there_is_room(stage: Stage, tmp_path: Path) -> None:
    reader, reads = Reading(keep=True), tmp_path / "reads"
    guest = stage.shell(f"while ! test -e {reads}; do sleep 0.02; done; exec sha256sum", reader=reader)
    text = os.urandom(5 << 20)
    fed = 0

    def feed() -> None:
        nonlocal fed
        fed += guest.stdio.feed(text[fed : fed + (1 << 20)])
        if fed == len(text):
            guest.stdio.close_stdin()

    guest.stdio.on_stdin_room = feed
    feed()
    assert fed < len(text)
    assert guest.stdio.room() < STDIN_BYTES_MAX
    reads.touch()
    for _ in range(10_000):
        if fed == len(text):
            break
        if guest.stdio.room():
            feed()
        stage.loop.turn(0.01)
    assert guest.finish() == 0
    stage.until_end(reader)
    assert reader.all.split()[0].decode() == hashlib.sha256(text).hexdigest()


def test_who_waits_for_room_is_told(stage: Stage, tmp_path: Path) -> None:
    told: list[int] = []
    reads = tmp_path / "reads"
    guest = stage.shell(f"while ! test -e {reads}; do sleep 0.02; done; cat > /dev/null")
    guest.stdio.on_stdin_room = lambda: told.append(guest.stdio.room())
    accepted = guest.stdio.feed(b"x" * (1 << 20))
    assert STDIN_BYTES_MAX <= accepted < 1 << 20
    reads.touch()
    stage.until(lambda: told)
    assert told[0] > 0
    guest.stdio.close_stdin()
    assert guest.finish() == 0


def test_input_for_a_guest_that_does_not_read_is_no_error(stage: Stage) -> None:
    guest = stage.shell("exec 0<&-; echo ready; sleep 0.1")
    guest.until_offset(6)
    assert guest.stdio.feed(b"x" * 100) == 100
    assert guest.stdio.feed(b"x" * (1 << 20)) == 1 << 20
    guest.stdio.close_stdin()
    assert guest.finish() == 0


def test_a_guest_with_nothing_to_read_finds_the_end_at_once(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell("cat; echo out; echo err >&2; test -t 1 || echo none", kind="null", reader=reader)
    assert guest.stdio.feed(b"lost") == 4
    assert guest.finish() == 0
    stage.until_end(reader)
    assert reader.got == {0: b"", 1: b"out\nnone\n", 2: b"err\n"}


# ---- terminals


def test_a_terminal_is_one_has_the_size_asked_for_and_is_resized(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell(
        "test -t 0 && test -t 1 && test -t 2 && stty size; echo own > /dev/tty;"
        "trap 'stty size; exit 7' WINCH; echo ready; while :; do sleep 0.05; done",
        kind="pty",
        reader=reader,
    )
    stage.until(lambda: b"ready" in reader.all)
    assert reader.all.split() == [b"24", b"80", b"own", b"ready"]
    guest.stdio.resize(50, 132)
    assert guest.finish() == 7
    stage.until_end(reader)
    assert reader.all.endswith(b"50 132\r\n")


def test_control_c_interrupts_what_runs_at_the_terminal(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell(
        "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.05; done", kind="pty", reader=reader
    )
    stage.until(lambda: b"ready" in reader.all)
    guest.stdio.feed(b"\x03")
    assert guest.finish() == 3
    stage.until_end(reader)
    assert b"caught" in reader.all


def test_control_z_stops_a_job_of_a_shell(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell("set -m; sh -c 'echo ready; read x'; echo stopped $?", kind="pty", reader=reader)
    stage.until(lambda: b"ready" in reader.all)
    guest.stdio.feed(b"\x1a")
    guest.finish()
    stage.until_end(reader)
    assert b"stopped 148" in reader.all


@pytest.mark.parametrize("text", [b"whole line\n", b"half a line", b""])
def test_the_end_of_the_input_reaches_a_program_at_a_terminal(stage: Stage, text: bytes) -> None:
    guest = stage.shell("stty -echo; cat; echo end", kind="pty")
    reader = Reading()
    guest.stdio.attach(reader)
    guest.stdio.feed(text)
    guest.stdio.close_stdin()
    assert guest.finish() == 0
    stage.until_end(reader)
    assert reader.all.endswith(b"end\r\n")
    assert text.strip() in reader.all


def test_a_terminal_that_nobody_has_open_for_a_while_is_not_at_its_end(stage: Stage, tmp_path: Path) -> None:
    reader = Reading()
    guest = stage.shell(
        f"exec 0<&- 1>&- 2>&-; while ! test -e {tmp_path}/again; do sleep 0.02; done; echo back > /dev/tty",
        kind="pty",
        reader=reader,
    )
    stage.turn_for(0.1)
    assert not guest.stdio.is_done
    (tmp_path / "again").touch()
    assert guest.finish() == 0
    stage.until_end(reader)
    assert reader.all == b"back\r\n"


def test_what_was_written_to_a_terminal_last_is_not_lost(stage: Stage) -> None:
    """Also where it was not read before the guest was gone."""
    for _ in range(20):
        reader = Reading()
        guest = stage.shell("head -c 3000 /dev/zero | tr '\\0' x", kind="pty")
        os.waitid(os.P_PID, guest.pid, os.WEXITED | os.WNOWAIT)
        guest.stdio.attach(reader)
        guest.finish()
        stage.until_end(reader)
        assert reader.all == b"x" * 3000


# ---- the end


def test_a_guest_that_closes_its_stdout_early_is_heard_on_stderr(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell("echo first; exec 1>&-; sleep 0.1; echo late >&2; exec 2>&-; sleep 0.1", reader=reader)
    stage.until(lambda: guest.done)
    assert not guest.has_exited or guest.status == 0
    guest.finish()
    stage.until_end(reader)
    assert reader.got == {0: b"", 1: b"first\n", 2: b"late\n"}


def test_a_grandchild_is_heard_after_the_guest_itself_has_left(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell("exec 3<&0; (read x <&3; echo late) & echo gone", reader=reader)
    stage.until(lambda: guest.has_exited)
    assert not guest.stdio.is_done
    guest.stdio.feed(b"\n")
    stage.until(lambda: guest.done)
    guest.finish()
    stage.until_end(reader)
    assert reader.all == b"gone\nlate\n"


def test_a_pipe_that_somebody_else_keeps_open_is_read_to_the_deadline_and_left(stage: Stage) -> None:
    reader = Reading()
    guest = stage.shell("head -c 50000 /dev/zero; sleep 600 & exit 5")
    guest.stdio.attach(reader)
    try:
        assert guest.finish(deadline_s=0.2) == 5
        stage.until_end(reader)
        assert reader.taken == 50_000
    finally:
        os.killpg(guest.pid, signal.SIGKILL)


def test_what_is_left_in_the_pipes_is_read_though_the_lossless_reader_has_no_room(stage: Stage) -> None:
    """The tree is gone: nobody waits any more, and the reader finds it in the log."""
    reader = Reading(0)
    guest = stage.shell("head -c 60000 /dev/zero; echo err >&2", reader=reader)
    assert guest.finish() == 0
    assert (reader.taken, reader.ended) == (0, False)
    [following] = guest.stdio._followings
    while not reader.ended:
        reader.left += 7000
        guest.stdio.resume(following)
        stage.loop.turn(0.0)
    assert (reader.taken, reader.lost) == (60_004, 0)


# ---- what Sublet says


def test_a_line_of_ours_waits_for_the_end_of_the_guests_line(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio_module, "SAY_PATIENCE_S", PATIENCE_S)
    reader = Reading()
    guest = stage.shell("printf half >&2; read x; echo ' whole' >&2; read x", reader=reader)
    stage.until(lambda: reader.all == b"half")
    guest.stdio.write_notice("the lease ends in 30 s\nsave now")
    stage.turn_for(0.05)
    assert reader.all == b"half"
    guest.stdio.feed(b"\n")
    stage.until(lambda: reader.got[0])
    assert reader.all == b"half whole\nsublet: the lease ends in 30 s\nsublet: save now\n"
    guest.stdio.write_notice("at once")
    assert reader.all.endswith(b"sublet: at once\n")


@pytest.mark.parametrize(("kind", "end"), [("pipes", b"\n"), ("pty", b"\r\n")])
def test_a_line_of_ours_does_not_wait_for_ever(stage: Stage, kind: str, end: bytes) -> None:
    reader = Reading()
    guest = stage.shell("printf half >&2; read x", kind=kind, reader=reader)
    stage.until(lambda: reader.all == b"half")
    guest.stdio.write_notice("now")
    stage.until(lambda: reader.got[0])
    assert reader.all == b"half" + end + b"sublet: now" + end


# ---- descriptors


def is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the one with which the list was read
        return False


def test_many_guests_leave_no_descriptor(stage: Stage) -> None:
    with nothing_left_open():
        for number in range(GUESTS):
            kind = ("pipes", "pty", "null")[number % 3]
            reader = Reading(0 if number % 5 == 0 else PLENTY)
            guest = stage.shell("echo $$", kind=kind)
            following: Following = guest.stdio.attach(reader, lossless=number % 2 == 0)
            if number % 4 == 0:
                guest.end()
                guest.stdio.detach(following)
                continue
            guest.finish()
            reader.left = PLENTY
            guest.stdio.resume(following)
            stage.until_end(reader)
            assert int(reader.all) == guest.pid


def test_a_guest_that_was_never_started_leaves_no_descriptor(stage: Stage) -> None:
    for make in (Stdio.pipes, Stdio.pty, Stdio.null):
        with nothing_left_open():
            before = open_now()
            stdio = make(stage.loop, GuestLog(str(stage.folder / "never"), CLOCK))
            assert open_now() - before
            stdio.close()
            stdio.close()


def test_a_guest_has_no_descriptor_but_its_own_three(stage: Stage) -> None:
    """But those that whoever runs the tests leaves open for all, and those a shell makes for itself."""
    left_open = {fd.encode() for fd in os.listdir("/proc/self/fd") if is_inherited(int(fd))}
    reader = Reading()
    stage.shell("sleep 600", kind="pty")
    guest = stage.shell("ls /proc/$$/fd", reader=reader)
    guest.finish()
    stage.until_end(reader)
    assert set(bytes(reader.all).split()) - left_open - {b"10", b"255"} <= {b"0", b"1", b"2"}


WITHOUT_ANY: Final = """
import os, sys
os.closerange(0, 3)
from sublet.clock import SystemClock
from sublet.node.processes.logs import GuestLog
from sublet.node.loop import Loop
from sublet.node.processes.stdio import Stdio, child_setup
loop = Loop(SystemClock())
stdio = Stdio.pipes(loop, GuestLog(sys.argv[1], SystemClock()), loop.stop)
pid = os.fork()
if pid == 0:
    child_setup(stdio.child)
    os.execvp("sh", ["sh", "-c", "read x; echo $x; echo err >&2"])
stdio.started()
stdio.feed(b"word\\n")
loop.run()
os.waitpid(pid, 0)
stdio.close()
"""


def test_a_supervisor_without_descriptors_0_to_2_gives_its_guests_the_right_ones(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ANY, str(tmp_path / "log")], check=True, timeout=PATIENCE_S)
    records = LogReader(str(tmp_path / "log")).read().records
    assert sorted((record.stream, record.data) for record in records) == [(1, b"word\n"), (2, b"err\n")]
