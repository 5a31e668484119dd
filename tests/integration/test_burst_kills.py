"""Workers, the program of a burst and its office are killed in the middle of tiny chunks; nothing finished runs again.

A job is killed ``ROUNDS`` times. Where a worker was killed, the same program goes on: each kill may repeat the chunk
that was executing, and no other. Where the program was killed, with its office or without, the same call from another
process goes on: what was published never runs again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import jobs
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.jobs.identity import function_digest, positioned_ids
from sublet.jobs.leases import leases_left
from tests.integration import burst_functions as functions
from tests.traces import PUT_AWAY_S, Traces, office_of, supervisor_of, until

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0 + PUT_AWAY_S
ROUNDS = 20
"""Kills of one job."""
CHUNKS = 1500
KINDS = ("worker",) * 16 + ("program",) * 2 + ("office",) * 2
"""Of one job, in an order that chance makes; ``office``: with the program."""
ALL = int(os.environ.get("SUBLET_BURST_KILLS", str(ROUNDS)))
SEED = int(os.environ.get("SUBLET_SEED", "17"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    ensure_office(folder, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield folder
    with sublet.connect(home=folder) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(folder.resolve()), ignore_errors=True)


class KilledJob:
    """One burst and what became of its chunks."""

    def __init__(self, home: Path, folder: Path, name: str, seed: int) -> None:
        self.home = home
        self.name = name
        self.log = folder / f"{name}.log"
        self.log.touch()
        self.chance = random.Random(seed)
        self.killed_workers: set[int] = set()
        self.published: set[int] = set()
        self.begun_at = 0
        """Lines of the log when the present program was started."""
        self.kills_of_life = 0
        self.running: subprocess.Popen[str] | None = None
        work = function_digest(functools.partial(functions.noted, str(self.log)))
        self.places = {chunk: n for n, chunk in enumerate(positioned_ids(work, range(CHUNKS), 0))}

    def lines(self) -> list[tuple[int, int]]:
        """Chunk and process of each that ran to its end."""
        whole = self.log.read_text().rpartition("\n")[0]
        return [(int(chunk), int(pid)) for chunk, pid in (line.split() for line in whole.splitlines())]

    def start(self) -> None:
        words = [
            "-X",
            "faulthandler",
            "-m",
            "tests.integration.burst_program",
            str(self.home),
            self.name,
            str(self.log),
            str(CHUNKS),
        ]
        self.begun_at, self.kills_of_life = len(self.lines()), 0
        self.running = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def goes_on(self, by: int) -> bool:
        """Wait for more chunks; False if the program has come to its end."""
        running, before = self.running, len(self.lines())
        assert running is not None
        try:
            until(
                "the burst to go on",
                lambda: len(self.lines()) >= before + by or running.poll() is not None,
                PATIENCE_S,
            )
        except AssertionError:
            running.send_signal(signal.SIGABRT)  # it says where it stands
            print(*running.communicate(timeout=PATIENCE_S))
            raise
        return running.poll() is None

    def kill_worker(self) -> None:
        pid = self.lines()[-1][1]
        if pid not in self.killed_workers:
            self.killed_workers.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills_of_life += 1

    def kill_program(self, *, office: bool) -> None:
        assert self.running is not None
        with sublet.connect(home=self.home) as fabric:
            pid = fabric.status().pid
        self.running.kill()
        if office:
            os.kill(pid, signal.SIGKILL)
        self.running.communicate()
        self.running = None
        with sublet.connect(home=self.home) as fabric, self.block(fabric) as block:
            until("the end of its workers", self.has_no_worker)  # or what they still execute would count for the next
            self.judge()
            store = jobs.VolumeOutputStore(block)
            self.published = {self.places[chunk] for chunk in store.chunks()}
            store.close()
        assert {chunk for chunk, _ in self.lines()} >= self.published

    def has_no_worker(self) -> bool:
        runtime = runtime_dir(self.home.resolve())
        supervisor = supervisor_of(runtime)
        assert supervisor is not None
        alive = {one.pid for one in Traces(office_of(supervisor), runtime).marked()}
        return not alive & {pid for _, pid in self.lines()[self.begun_at :]}

    def block(self, fabric: sublet.Fabric) -> sublet.Lease:
        """The volume, once a new office has seen that the program which had it is gone."""
        found: list[sublet.Lease] = []
        why = ""

        def is_free() -> bool:
            nonlocal why
            try:
                found.append(fabric.block(name=self.name, wait="2s"))
            except sublet.CapacityExceeded as error:
                if why != error.message:
                    why = error.message
                    print(why)
            return bool(found)

        until("the volume to be free", is_free, PUT_AWAY_S)
        return found[0]

    def judge(self) -> None:
        """What the present program, which has ended, had its workers execute."""
        ran = Counter(chunk for chunk, _ in self.lines()[self.begun_at :])
        again = self.published & ran.keys()
        assert not again, f"published before, and executed again: {sorted(again)}"
        repeated = sum(ran.values()) - len(ran)
        assert repeated <= self.kills_of_life, f"{repeated} repeated after {self.kills_of_life} kills of workers"

    def finish(self) -> None:
        assert self.running is not None
        said, wrong = self.running.communicate(timeout=PATIENCE_S)
        assert self.running.returncode == 0, wrong
        self.judge()
        done, succeeded, skipped, left = said.split()
        assert (done, int(succeeded) + int(skipped), left) == ("done", CHUNKS, "0")
        assert int(skipped) == len(self.published)
        assert {chunk for chunk, _ in self.lines()} == set(range(CHUNKS))
        with sublet.connect(home=self.home) as fabric:
            assert leases_left(fabric, self.name, wait=0) == 0
            until("the volume to be put away", lambda: self.is_removed(fabric), PUT_AWAY_S)

    def is_removed(self, fabric: sublet.Fabric) -> bool:
        try:
            fabric.remove_volume(self.name)
        except sublet.CapacityExceeded:
            return False
        return True

    def run(self) -> Counter[str]:
        """Kill it ``ROUNDS`` times, unless it ends before, and let it end. What was killed how often."""
        kills: Counter[str] = Counter()
        self.start()
        try:
            for kind in self.chance.sample(KINDS, ROUNDS):
                if not self.goes_on(self.chance.randrange(5, 40)):
                    break
                kills[kind] += 1
                if kind == "worker":
                    self.kill_worker()
                else:
                    self.kill_program(office=kind == "office")
                    self.start()
            self.finish()
        finally:
            if self.running is not None:
                self.running.kill()
                self.running.communicate()
        return kills


@pytest.mark.slow
@pytest.mark.timeout(180 + 60 * (ALL // ROUNDS))
def test_finished_chunks_never_run_again_whatever_is_killed(home: Path, tmp_path: Path) -> None:
    kills: Counter[str] = Counter()
    for seed in itertools.count(SEED):
        print("seed", seed)
        kills += KilledJob(home, tmp_path, f"killed-{seed}", seed).run()
        print(dict(kills))
        if kills.total() >= ALL and kills.keys() == set(KINDS):
            return
