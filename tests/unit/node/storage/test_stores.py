"""What can be known of folders and segments without making any: tables and counts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.clock import SystemClock
from sublet.node.forked_jobs import FORKED_JOBS_MAX, ForkedJobs
from sublet.node.loop import Loop
from sublet.node.processes.limits import choose
from sublet.node.processes.memory_watch import share_of
from sublet.node.processes.messages import out_of_memory
from sublet.node.processes.procs import PAGE_BYTES, ProcessStat, Procs
from sublet.node.processes.tree import Trees
from sublet.node.storage.mounts import Mount, loops_in, mounts_in, why_busy
from sublet.node.storage.store import NAMES_MAX, FolderCount, count
from sublet.values import MIB
from tests.left_open import nothing_left_open

CORES: list[tuple[int, tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]] = [
    (1, (0, 1, 2, 3), [], (0,)),
    (2, (0, 1, 2, 3), [(0, 1)], (2, 3)),
    (2, (0, 1, 2, 3), [(0,), (0, 1)], (2, 3)),
    (3, (0, 1, 2, 3), [(0,), (0, 1)], (1, 2, 3)),
    (1, (5, 7), [(5,), (7,)], (5,)),
    (1, (5, 7), [(5,), (5,), (7,)], (7,)),
    (9, (0, 1), [(0,)], (0, 1)),
    (1, (2, 3), [(0,), (1,)], (2,)),
    (0, (0, 1), [], ()),
    (-1, (0, 1), [], ()),
    (2, (), [], ()),
]


@pytest.mark.parametrize(("wanted", "allowed", "taken", "chosen"), CORES)
def test_the_least_used_cores_are_chosen(
    wanted: int, allowed: tuple[int, ...], taken: list[tuple[int, ...]], chosen: tuple[int, ...]
) -> None:
    assert choose(wanted, allowed, taken) == chosen


MOUNTS = """\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 24 7:0 / /srv/blocks/leases/a.1.5/0 rw,nosuid,nodev - ext4 /dev/loop0 rw
32 31 0:44 / /srv/blocks/leases/a.1.5/0/inner rw - tmpfs none rw
33 24 7:1 / /srv/blocks/leases/a.1.55/0 rw shared:2 master:1 - ext4 /dev/loop1 rw
34 24 7:2 / /srv/blocks/with\\040space/0 rw - ext4 /dev/loop2 rw
a line that is none
"""


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        (
            "/srv/blocks/leases/a.1.5",
            [
                Mount("/srv/blocks/leases/a.1.5/0/inner", "tmpfs", "none"),
                Mount("/srv/blocks/leases/a.1.5/0", "ext4", "/dev/loop0"),
            ],
        ),
        ("/srv/blocks/leases/a.1.55", [Mount("/srv/blocks/leases/a.1.55/0", "ext4", "/dev/loop1")]),
        ("/srv/blocks/with space", [Mount("/srv/blocks/with space/0", "ext4", "/dev/loop2")]),
        ("/srv/blocks/leases/a", []),
    ],
)
def test_mounts_are_those_below_the_very_folder_inner_ones_first(folder: str, found: list[Mount]) -> None:
    assert mounts_in(MOUNTS, folder) == found


def test_a_loop_device_is_known_by_its_file_even_after_it_was_removed() -> None:
    backing = {"/dev/loop0": "/b/a/0.img", "/dev/loop1": "/b/a/0.img (deleted)", "/dev/loop2": "/b/aa/0.img"}
    assert loops_in(backing, "/b/a") == ["/dev/loop0", "/dev/loop1"]


def test_who_copied_a_mount_is_named(tmp_path: Path) -> None:
    """By one process of each namespace but our own; who is gone while one looks has nothing."""
    for pid, space, mounts in (
        ("self", "mnt:[1]", "36 24 7:0 / /srv/0 rw - ext4 /dev/loop0 rw"),
        ("7", "mnt:[1]", "36 24 7:0 / /srv/0 rw - ext4 /dev/loop0 rw"),
        ("8", "mnt:[2]", "36 24 7:1 / /srv/1 rw - ext4 /dev/loop01 rw"),
        ("9", "mnt:[3]", "36 24 7:0 / /srv/0 rw - ext4 /dev/loop0 rw"),
    ):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "ns" / "mnt").symlink_to(space)
        (tmp_path / pid / "mountinfo").write_text(mounts + "\n")
        (tmp_path / pid / "comm").write_text("shell\n")
    (tmp_path / "10").mkdir()
    assert why_busy("/dev/loop0", str(tmp_path)).startswith("process 9 (shell, user ")
    assert why_busy("/dev/loop5", str(tmp_path)) == ""


def test_what_is_in_a_folder_is_counted_in_steps_and_said_once(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    (folder / "deep" / "down").mkdir(parents=True)
    (folder / "link").symlink_to("/")
    for number in range(20):
        (folder / "deep" / "down" / str(number)).write_bytes(os.urandom(8192))
    assert 20 * 8192 <= sum(count(str(folder))) < 20 * 8192 + MIB
    small = FolderCount(str(folder), 65536)
    said = [small.step(3) for _ in range(40)]
    lines = [line for line in said if line]
    assert len(lines) == 1, "of one fact one line, however often it is counted"
    assert "64KiB are leased" in lines[0]
    assert said[0] == ""
    for path in (folder / "deep" / "down").iterdir():
        path.unlink()
    assert not any(small.step(3) for _ in range(20))
    (folder / "again").write_bytes(os.urandom(200_000))
    assert any(small.step(3) for _ in range(20)), "too much again is news again"
    assert FolderCount(str(tmp_path / "not there"), 1).step(10) == ""
    assert NAMES_MAX > 0


def stat(pid: int, pages: int) -> ProcessStat:
    return ProcessStat(pid, 1, pid, pid, ord("S"), 1, 1, 0, pages)


def test_what_processes_share_is_divided_among_them(tmp_path: Path) -> None:
    for pid, kib in ((1, 100), (2, 50)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "smaps_rollup").write_text(
            f"00-ff r 0 [rollup]\nRss: 900 kB\nPss: {kib} kB\nPss_Dirty: 1 kB\n"
        )
    stats = [stat(1, 1000), stat(2, 500), stat(3, 10)]
    assert share_of(stats, str(tmp_path)) == 150 * 1024 + 10 * PAGE_BYTES, "whose share nobody tells counts as it is"


def test_the_line_says_how_much_was_allowed() -> None:
    assert "has 48MiB of memory" in out_of_memory(48 * MIB)
    assert "used 60MiB" in out_of_memory(48 * MIB, 60 * MIB)
    assert "the machine has no memory left" in out_of_memory(0)


class Runner:
    """A loop with forked jobs."""

    def __init__(self) -> None:
        self.loop = Loop(SystemClock())
        self.alive: set[int] = set()
        self.most = 0
        self.forked_jobs = ForkedJobs(self.loop, self.life)

    def life(self, pid: int, lives: bool) -> None:
        (self.alive.add if lives else self.alive.discard)(pid)
        self.most = max(self.most, len(self.alive))
        if not lives:
            with contextlib.suppress(ChildProcessError):  # it was waited for already
                os.waitpid(pid, 0)

    def until(self, is_so: Callable[[], object]) -> None:
        for _ in range(3000):
            if is_so():
                return
            self.loop.turn(0.01)
        raise AssertionError("never came to be")


def test_forked_jobs_are_done_elsewhere_and_few_at_a_time() -> None:
    runner, said = Runner(), list[str | None]()
    here = os.getpid()
    for number in range(10):
        runner.forked_jobs.run(lambda number=number: f"{number} {os.getpid() != here}", said.append)  # type: ignore[misc]
    runner.until(lambda: len(said) == 10)
    assert sorted(map(str, said)) == [f"{number} True" for number in range(10)]
    assert runner.most == FORKED_JOBS_MAX // 2
    assert not runner.alive
    runner.loop.close()


def waits_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return "done"


def test_a_forked_job_of_one_tenant_does_not_wait_for_those_of_another(tmp_path: Path) -> None:
    """However many there are, and however long each of them takes."""
    runner, said = Runner(), list[str | None]()
    for _ in range(20):
        runner.forked_jobs.run(lambda: waits_for(tmp_path / "word"), said.append, tenant="ben")
    for name in ("ana", "cat"):
        runner.forked_jobs.run(lambda name=name: name, said.append, tenant=name)  # type: ignore[misc]
    runner.until(lambda: len(said) == 2)
    assert sorted(map(str, said)) == ["ana", "cat"]
    (tmp_path / "word").touch()
    runner.until(lambda: len(said) == 22)
    runner.loop.close()


def test_a_forked_job_that_is_stopped_before_its_turn_is_never_begun(tmp_path: Path) -> None:
    runner, said = Runner(), list[str | None]()
    for _ in range(FORKED_JOBS_MAX // 2):
        runner.forked_jobs.run(lambda: waits_for(tmp_path / "word"), said.append)
    key = runner.forked_jobs.run(lambda: str((tmp_path / "done").write_text("done")), said.append)
    runner.forked_jobs.stop(key)
    runner.until(lambda: said == [None])
    assert runner.forked_jobs.why_failed == "it was stopped before its turn"
    (tmp_path / "word").touch()
    runner.until(lambda: len(said) == 1 + FORKED_JOBS_MAX // 2)
    assert not (tmp_path / "done").exists()
    runner.loop.close()


def test_a_forked_job_that_fails_has_no_answer_and_one_that_hangs_is_ended_with_us(
    capfd: pytest.CaptureFixture[str],
) -> None:
    runner, said = Runner(), list[str | None]()

    def fails() -> str:
        raise OSError("no such luck")

    def hangs() -> str:
        select.select([], [], [])
        return ""

    with nothing_left_open():
        runner.forked_jobs.run(fails, said.append)
        runner.until(lambda: said == [None])
        assert "no such luck" in capfd.readouterr().err
        assert "no such luck" in runner.forked_jobs.why_failed, "whose log lies on a full disk hears of it all the same"
        runner.forked_jobs.run(hangs, said.append)
        runner.until(lambda: runner.alive)
        (pid,) = runner.alive
        runner.forked_jobs.close()
    assert not runner.alive
    assert said == [None]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    runner.loop.close()


def test_why_a_forked_job_has_no_answer_is_known_to_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, why = Runner(), list[str]()
    forked_jobs = ForkedJobs(runner.loop, runner.life, longest_s=0.01)

    def told(said: str | None) -> None:
        assert said is None
        why.append(forked_jobs.why_failed)

    def full() -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hangs() -> str:
        select.select([], [], [])
        return ""

    def dies() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    with nothing_left_open():
        forked_jobs.run(hangs, told)
        runner.until(lambda: why == ["it took too long"])
        forked_jobs = ForkedJobs(runner.loop, runner.life)  # with time to die of something else
        forked_jobs.run(dies, told)
        runner.until(lambda: why[1:] == ["its process was killed"])
        forked_jobs.run(full, told)
        runner.until(lambda: why[2:] == ["No space left on device"])

        def no_process() -> int:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        monkeypatch.setattr(os, "fork", no_process)
        forked_jobs.run(lambda: "", told)
        runner.until(lambda: why[3:] == ["no process could be started for it (Resource temporarily unavailable)"])
    runner.loop.close()


def test_a_forked_job_that_cannot_be_watched_is_ended_and_says_so() -> None:
    """Without descriptors its process cannot be told from a stranger's, and its end would never be seen."""
    runner, said = Runner(), list[str | None]()
    met: list[int] = []

    def life(pid: int, lives: bool) -> None:
        met.append(pid)
        if lives:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    forked_jobs = ForkedJobs(runner.loop, life)

    def hangs() -> str:
        select.select([], [], [])
        return ""

    with nothing_left_open():
        forked_jobs.run(hangs, said.append)
        runner.until(lambda: said == [None])
    assert forked_jobs.why_failed == "no process could be started for it (Too many open files)"
    assert os.waitpid(met[0], 0)[1] == signal.SIGKILL
    runner.loop.close()


def test_the_end_of_an_own_process_is_known_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever waits for what it did would never be told."""
    trees = Trees(Procs(), os.getpid())
    trees.helper_lives(os.getpid(), True)
    assert os.getpid() in trees.helpers

    def no_descriptor(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", no_descriptor)
    trees.helper_lives(os.getpid(), False)
    assert os.getpid() not in trees.helpers
