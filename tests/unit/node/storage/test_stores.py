"""Folders of leases and volumes: what can be known of them, and how they are made, kept and put away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.clock import SystemClock
from sublet.errors import CapacityExceeded, InvalidRequest, SubletError
from sublet.node.forked_jobs import FORKED_JOBS_MAX, ForkedJobs
from sublet.node.loop import Loop
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.limits import choose
from sublet.node.processes.memory_watch import share_of
from sublet.node.processes.messages import out_of_memory
from sublet.node.processes.procs import PAGE_BYTES, ProcessStat, Procs
from sublet.node.processes.tree import Trees
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.storage import stores, stores_work
from sublet.node.storage.mounts import Mount, loops_in, mounts_in, why_busy
from sublet.node.storage.store import NAMES_MAX, FolderCount, count
from sublet.node.storage.stores import Stores
from sublet.node.storage.stores_work import StoreNote
from sublet.values import MIB, Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.codec import dumps
from sublet.wire.disk import DiskSpace, disk_reserve
from sublet.wire.orders import Part, VolumeRef
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


# ------------------------------------------------------------------------------------- made, kept, and put away again


A, B = LeaseId("l-a"), LeaseId("l-b")
E5, E6 = Epoch(1, 5), Epoch(1, 6)
ANNA = TenantId("anna")
BLOCK = Part(resource=ResourceId("n/block"), kind=Kind.BLOCK, amount=8 * MIB)
VOLUME = VolumeRef(tenant=ANNA, name="ckpt")


class Machine:
    """Stands for loop, clock and forked jobs: a job is done, here, when the test says so."""

    def __init__(self) -> None:
        self.now = 0
        self.jobs: list[tuple[Callable[[], str], Callable[[str | None], None]]] = []
        self.why_failed = "its process was killed"
        self.later: list[Callable[[], None]] = []

    def guarded(self, _: object) -> Machine:
        return self

    def now_ns(self) -> int:
        return self.now

    def soon(self, call: Callable[[], None]) -> None:
        self.later.append(call)

    def run(self, work: Callable[[], str], done: Callable[[str | None], None], **_: object) -> object:
        self.jobs.append((work, done))
        return done

    def done(self) -> None:
        """The job that waits longest does its work."""
        work, done = self.jobs.pop(0)
        done(work())

    def dies(self) -> None:
        self.jobs.pop(0)[1](None)


class StoresBench:
    """The stores of a supervisor, on a machine without images. What it was told is in ``told``, by what it is of."""

    def __init__(self, place: Path) -> None:
        self.machine, self.place = Machine(), place
        self.told: list[tuple[str, LeaseId]] = []
        self.answers: list[SubletError | None] = []
        self.stores = self.begun()

    def begun(self) -> Stores:
        """A supervisor's, as it begins."""
        machine = cast("Any", self.machine)
        return Stores(
            loop=machine,
            forked_jobs=machine,
            state=str(self.place / "state"),
            runtime=str(self.place / "runtime"),
            on_gone=lambda lease: self.told.append(("gone", lease)),
            on_leave=lambda store: self.told.append(("leave", store.note.lease)),
            on_stuck=lambda store: self.told.append(("stuck", store.note.lease)),
        )

    def open(self, tenancy: LeaseRuntime) -> bool:
        return self.stores.open(tenancy, None, self.answers.append)

    def made(self, tenancy: LeaseRuntime, *, file: str = "") -> Path:
        """Its folder, with something in it if that is named."""
        if self.open(tenancy):
            self.machine.done()
        folder = Path(tenancy.blocks[0])
        if file:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("something")
        return folder

    def kept(self, *, epoch: Epoch = E5) -> Path:
        """The folder of a volume that is kept, of a lease that has ended."""
        tenancy = leased(epoch=epoch)
        folder = self.made(tenancy, file="data")
        self.stores.leave(tenancy)
        self.machine.done()
        return folder.parent


def leased(lease: LeaseId = A, *, name: str = "ckpt", epoch: Epoch = E5) -> LeaseRuntime:
    return LeaseRuntime(
        lease=lease, tenant=ANNA, epoch=epoch, parts=(BLOCK,), deadline_ns=1 << 60, office="o", name=name
    )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoresBench:
    for module in (stores, stores_work):
        monkeypatch.setattr(module, "why_no_image", lambda: "no images here")
    return StoresBench(tmp_path)


def test_a_folder_that_could_not_be_made_may_be_asked_for_again(bench: StoresBench) -> None:
    tenancy = leased()
    assert bench.open(tenancy)
    bench.machine.dies()
    (refused,) = bench.answers
    assert isinstance(refused, CapacityExceeded)
    assert "its process was killed" in refused.message
    with pytest.raises(CapacityExceeded, match="still being put away"):
        bench.open(tenancy)
    bench.machine.done()
    assert bench.made(tenancy).is_dir()


def test_a_volume_is_of_one_lease_at_a_time(bench: StoresBench) -> None:
    bench.made(leased())
    with pytest.raises(InvalidRequest, match="the folder named ckpt is used by lease l-a"):
        bench.open(leased(B))
    assert bench.stores.volumes() == []


def test_a_lease_that_ends_while_its_folder_is_made_leaves_none(bench: StoresBench) -> None:
    tenancy = leased()
    bench.open(tenancy)
    bench.stores.leave(tenancy)
    assert bench.told == [("leave", A)]
    assert len(bench.machine.jobs) == 1, "nothing is taken away while it is made"
    bench.machine.done()
    assert len(bench.machine.jobs) == 1, "and then at once"
    assert bench.stores.remaining(BLOCK.resource, A, E5)
    bench.machine.done()
    assert not bench.stores.remaining(BLOCK.resource, A, E5)
    assert os.listdir(bench.place / "state" / "blocks" / "named" / "anna") == [], "nothing was put into it"
    for call in bench.machine.later:
        call()
    assert bench.told[1:] == [("gone", A)]


def test_a_volume_is_kept_with_the_last_epoch_that_had_it(bench: StoresBench) -> None:
    """So an order to remove it that is older than that does nothing, and what is asked of it is answered by it."""
    tenancy = leased()
    bench.made(tenancy, file="data")
    tenancy.epoch = E6
    bench.stores.leave(tenancy)
    assert not bench.stores.remaining(BLOCK.resource, A, E5), "what E5 had is of E6 now"
    assert bench.stores.remaining(BLOCK.resource, A, E6)
    bench.machine.done()
    (volume,) = bench.stores.volumes()
    assert (volume.volume, volume.epoch) == (VOLUME, E6)
    bench.stores.remove_volume(VOLUME, E5)
    assert not bench.machine.jobs
    bench.stores.remove_volume(VOLUME, E6)
    bench.machine.done()
    assert bench.stores.volume_epoch(VOLUME) is None


def test_a_volume_that_a_lease_has_is_not_removed_and_is_none_that_is_kept(bench: StoresBench) -> None:
    folder = bench.kept()
    assert len(bench.stores.volumes()) == 1
    bench.open(leased(B, epoch=E6))
    assert bench.stores.volumes() == []
    bench.stores.remove_volume(VOLUME, Epoch(1, 9))
    bench.machine.done()
    assert not bench.machine.jobs
    assert (folder / "0" / "data").exists()


def test_what_is_published_or_read_there_is_finished_first(bench: StoresBench) -> None:
    tenancy = leased()
    bench.made(tenancy)
    (store,) = tenancy.stores
    store.at_work = 1
    bench.stores.leave(tenancy)
    assert not bench.machine.jobs
    assert bench.stores.remaining(BLOCK.resource, A, E5) == "a checkpoint is just being published in it, or read"
    store.at_work = 0
    bench.stores.on_idle(store)
    bench.machine.done()
    assert not bench.stores.remaining(BLOCK.resource, A, E5)


def test_what_is_in_use_is_tried_again_after_a_while_and_goes_in_the_end(
    bench: StoresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that still has a file of it open is waited for; what no lease has any more waits for none."""
    forced: list[bool] = []

    def in_use(folder: str, **how: Any) -> str:
        forced.append(how["forced"])
        return "" if how["forced"] else f"{folder} is in use still"

    monkeypatch.setattr(stores, "put_away", in_use)
    tenancy = leased()
    bench.made(tenancy)
    bench.stores.leave(tenancy)
    for tries, again_ns in enumerate(stores.AGAIN_NS, 1):
        bench.machine.done()
        assert bench.told.count(("stuck", A)) == tries
        bench.machine.now += again_ns - 1
        assert "is in use still" in bench.stores.remaining(BLOCK.resource, A, E5)
        assert not bench.machine.jobs, "not before its time"
        bench.machine.now += 1
        bench.stores.remaining(BLOCK.resource, A, E5)
    bench.machine.done()
    assert not bench.stores.remaining(BLOCK.resource, A, E5)
    assert forced == [False, False, False, True]
    bench.stores.remove_volume(VOLUME, E6)
    bench.machine.done()
    assert forced[4:] == [True]


def test_a_removal_that_was_cut_off_goes_on_with_the_next_supervisor(
    bench: StoresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first moment on it is a volume no more: a lease of its name would find less in it than was kept."""
    folder = bench.kept()
    with monkeypatch.context() as patch:
        patch.setattr(stores_work, "remove_tree", lambda path: SimpleNamespace(is_clean=False))
        bench.stores.remove_volume(VOLUME, E5)
        bench.machine.done()
    bench.machine.jobs.clear()
    assert (folder / "0" / "data").exists()
    bench.stores = bench.begun()
    assert bench.stores.volumes() == []
    bench.stores.begin()
    bench.machine.done()
    assert not folder.exists()


def test_the_last_of_a_folder_that_goes_is_what_says_that_it_goes(
    bench: StoresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, removed = bench.kept(), list[str]()

    def watched(path: str) -> Any:
        removed.append(path)
        return remove_tree(path)

    monkeypatch.setattr(stores_work, "remove_tree", watched)
    bench.stores.remove_volume(VOLUME, E5)
    bench.machine.done()
    assert removed == [str(folder / "0"), str(folder)]


def test_a_supervisor_without_a_descriptor_takes_no_volume_for_one_that_was_only_begun(
    bench: StoresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be removed."""
    bench.kept()

    def none_left(folder: str, name: str = "") -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(stores, "read_note", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        bench.begun()


# ---- in a folder


def note(name: str = "ckpt") -> StoreNote:
    return StoreNote(lease=A, epoch=E5, tenant=ANNA, parts=(BLOCK,), name=name)


def test_a_volume_of_another_size_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "kept").write_bytes(dumps(note()))
    (folder / "0.img").write_bytes(b"x" * 4096)
    made = stores_work.make_blocks(str(folder), note(), None)
    assert made.refused == "the folder of this name is kept with 4KiB, and the lease has 8MiB"
    assert (folder / "0.img").read_bytes() == b"x" * 4096
    assert (folder / "kept").exists()


def test_a_volume_that_was_held_open_when_it_was_kept_is_refused_until_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that process has in memory would be written over what a second mount writes."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "kept").write_bytes(dumps(note()))
    monkeypatch.setattr(stores_work, "loops_of", lambda folder: ["/dev/loop7"])
    monkeypatch.setattr(stores_work, "why_busy", lambda device: "process 9 (shell, user 1000) has it")
    made = stores_work.make_blocks(str(folder), note(), None)
    assert "still is: process 9 (shell, user 1000) has it" in made.refused
    assert (folder / "kept").exists()


def test_what_takes_away_waits_for_forked_jobs_of_a_supervisor_before_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those of its own it goes on."""
    lock, real = str(tmp_path / "jobs" / "lock"), fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: real(fd, how | fcntl.LOCK_NB))
    with stores_work.among_forked_jobs(lock, after_others=False):
        with stores_work.among_forked_jobs(lock, after_others=False):
            pass
        with pytest.raises(BlockingIOError), stores_work.among_forked_jobs(lock, after_others=True):
            pass
    with stores_work.among_forked_jobs(lock, after_others=True):
        pass


@pytest.mark.parametrize("is_enough", [True, False])
def test_an_image_leaves_half_of_what_is_kept_back_for_the_journal(
    is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 40
    least = 2 * MIB + disk_reserve(size).withheld // 2
    monkeypatch.setattr(stores_work, "space_of", lambda folder: DiskSpace(size=size, free=least - (not is_enough)))
    if is_enough:
        stores_work._reserve(str(tmp_path / "0.img~"), 2 * MIB)
        assert (tmp_path / "0.img~").stat().st_size == 2 * MIB
    else:
        with pytest.raises(OSError, match="No space left on device"):
            stores_work._reserve(str(tmp_path / "0.img~"), 2 * MIB)


def test_what_was_only_begun_is_not_kept(tmp_path: Path) -> None:
    """Neither a folder in which a save was staged and never published, nor an image that has no name yet."""
    for name, kept in (("0/staging/1.5/s/manifest", False), ("0/data", True)):
        folder = tmp_path / str(kept)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("something")
        (folder / "note").write_bytes(dumps(note()))
        (folder / "0.img~").write_bytes(b"half of one")
        assert stores_work.put_away(str(folder), keep=True) == ""
        assert folder.exists() is kept
    assert sorted(os.listdir(tmp_path / "True")) == ["0", "kept"]
