"""Studio and office at work, and either is killed at random moments, while the disk is full, a device is quarantined or
the wall clock jumps: no double grant, no session lost or there twice, and bills that reconcile.

Everything is drawn from a seed, which a failure prints. ``SUBLET_STUDIO_KILLS`` says how many rounds (3), and
``SUBLET_STUDIO_SEED`` with which seed. What a hub that is away changes is in ``tests/browser/test_studio``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import sublet
from sublet.errors import SubletError
from sublet.values import GIB
from tests.commands import fork_where
from tests.integration.office_stage import OfficeStage, asked
from tests.integration.studio_load import Judge, Load
from tests.integration.studio_stage import PATIENCE_S, StudioStage
from tests.integration.supervisor_stage import Freezer
from tests.traces import until

pytestmark = [pytest.mark.slow, pytest.mark.needs("gcc")]

ROUNDS: Final = int(os.environ.get("SUBLET_STUDIO_KILLS", "3"))
SEED: Final = int(os.environ.get("SUBLET_STUDIO_SEED", "20"))
DISK_MIB: Final = 64
HERE: Final = Path(__file__).parent
JUMPS_S: Final = (-30 * 86_400, -3600, -1, 1, 3600, 400 * 86_400)
FAULTS: Final = ("disk", "quarantine", "clock")
VICTIMS: Final = ("studio", "office", "both")
STARTED_BY_ITSELF: Final = "--no-start"
"""The office is the test's to start, or two would begin at once."""
WORKS_S: Final = 0.3
ROOM_FOR_ONE: Final = 32 << 10
"""SQLite can open one database in it, beside which it lays an index, and no second one at the same time."""
WAITING: Final = 6
"""Sessions that wait, so that their databases are opened while a studio starts."""
LITTLE_ROOM: Final = range(min(ROUNDS, 20))


class WallClock:
    """That of the studio, the office and what it starts: what moves it needs no rights."""

    def __init__(self, place: Path) -> None:
        self._file, self._library = place / "moved", place / "wall_clock.so"
        self.move(0)
        flags = ["-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["gcc", *flags, "-o", self._library, HERE / "wall_clock.c"], check=True)
        fork_where(**self.variables)

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK": str(self._file)}

    def move(self, by_s: int) -> None:
        """From here on it is so far ahead, or back, of the machine's."""
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", by_s * 10**9))


class Rounds:
    """One office, one studio, people at work, and what happens to them."""

    def __init__(self, studio: StudioStage, clock: WallClock | None, seed: int) -> None:
        self.studio, self.office, self.clock = studio, studio.office, clock
        self.chance = random.Random(seed)
        self.load = Load(studio, seed)
        self.judge = Judge(self.load)
        self.met: Counter[str] = Counter()

    def faults(self) -> list[str]:
        """Those that this machine can have."""
        can = {"disk": os.path.ismount(self.office.office.place), "quarantine": self._has_freezer()}
        return [fault for fault in FAULTS if can.get(fault, True)]

    def _has_freezer(self) -> bool:
        freezer = Freezer.make("probe")
        if freezer is not None:
            freezer.close()
        return freezer is not None

    def run(self, fault: str, victim: str) -> None:
        """One fault and one kill while people work, and a notebook has run a cell."""
        self.load.notebook.turn()
        with contextlib.ExitStack() as undone:
            if fault == "quarantine":
                undone.callback(self._quarantine())
            with self.load.going_on():
                self._nap()
                if fault == "disk":
                    undone.callback(self.fill_disk())
                elif fault == "clock":
                    self._clock.move(self.chance.choice(JUMPS_S))
                self._nap()
                self._kill(victim)
                self._nap()
                if fault == "disk" and self.studio.process is None and not self.starts_without_room():
                    undone.close()
                self._come_back()
                self._nap()
                if fault == "disk":
                    undone.close()
                elif fault == "clock":
                    self._clock.move(self.chance.choice(JUMPS_S))
                until("it is ready", self._is_ready, PATIENCE_S)
                time.sleep(WORKS_S)
        self.met[fault] += 1
        self.met[victim] += 1
        self.judge.judge()

    @property
    def _clock(self) -> WallClock:
        assert self.clock is not None
        return self.clock

    def _is_ready(self) -> bool:
        assert self.studio.process is not None
        assert self.studio.process.poll() is None, self.studio.log.read_text()
        try:
            return self.studio.ask("GET", "/readyz").status == 200
        except OSError as error:
            error.add_note(self.studio.log.read_text())
            raise

    def _nap(self) -> None:
        time.sleep(self.chance.choice((0.0, 0.01, 0.05, 0.2, 0.5)))

    def _kill(self, victim: str) -> None:
        victims = ["studio", "office"] if victim == "both" else [victim]
        self.chance.shuffle(victims)
        for one in victims:
            if one == "studio":
                self.studio.kill()
            else:
                self.office.kill_office()
            time.sleep(self.chance.choice((0.0, 0.005, 0.05)))

    def _come_back(self) -> None:
        """In any order."""
        starts = []
        if self.office.find_office() is None:
            starts.append(self.office.start)
        if self.studio.process is None:
            starts.append(lambda: self.studio.start(STARTED_BY_ITSELF))
        self.chance.shuffle(starts)
        for start in starts:
            start()

    def starts_without_room(self) -> bool:
        """Whether the studio comes up on a full disk; else it has said what to do."""
        try:
            self.studio.start(STARTED_BY_ITSELF)
        except AssertionError as error:
            if "Make room on its disk" not in str(error):
                raise
            self.studio.gone()
            return False
        return True

    def fill_disk(self, *, but: int = 0) -> Callable[[], None]:
        """The disk on which journal and records lie, but for so many bytes; what makes room again."""
        filler = self.office.office.place / "filler"
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        os.truncate(filler, filler.stat().st_size - but)
        return filler.unlink

    def start_in_little_room(self) -> None:
        """Where the studio says that it is up it stays so, and says what is wrong to those who ask."""
        if not self.starts_without_room():
            return
        time.sleep(WORKS_S)
        assert self.studio.process is not None
        assert self.studio.process.poll() is None, self.studio.log.read_text()
        assert self.studio.ask("GET", "/livez").status == 200
        self.studio.kill()

    def _quarantine(self) -> Callable[[], None]:
        """A device whose guest cannot be ended; what lets it end, so that the device is verified."""
        traces = self.office.traces
        assert traces is not None
        freezer = Freezer.make(f"elsewhere-{traces.office}")
        assert freezer is not None
        with sublet.connect(home=self.studio.home, start=False) as fabric:
            lease = fabric.gpu(min_vram="2GiB", wait="60s")
            lease.start(["sleep", "1000"], cwd="/", stdio="null")
            freezer.freeze([one.pid for one in traces.marked(lease.id)])
            with contextlib.suppress(SubletError):
                lease.release()
        line = self.office.office.line
        until("a quarantine", lambda: asked(line(), "GET", "/v1/fences").doc)
        [fence] = asked(line(), "GET", "/v1/fences").doc

        def undo() -> None:
            still = asked(line(), "GET", "/v1/fences").doc
            freezer.close()
            assert [one["resource"] for one in still] == [fence["resource"]], "it is kept whoever is killed"
            until("a device that is verified", lambda: not asked(line(), "GET", "/v1/fences").doc)

        return undo

    def end(self) -> None:
        """Everybody goes home: nothing is left."""
        for person in self.load.people:
            for view in person.member.done("GET", "/v1/sessions"):
                person.member.done("POST", f"/v1/sessions/{view['id']}/end", {"now": True})
        until("the end of all leases", lambda: not asked(self.office.office.line(), "GET", "/v1/leases").doc)
        until("no residue", lambda: not self.office.residue)


@contextlib.contextmanager
def rounds_at(place: Path, clock: WallClock | None) -> Iterator[Rounds]:
    """With a disk of its own, where that can be had."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB + ROUNDS // 4}m,mode=700", "tmpfs", str(place)]
    mounted = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
    office = OfficeStage(place, "2x2GiB")
    if clock is not None:
        office.office.variables = clock.variables
    try:
        office.start()
        with contextlib.closing(StudioStage(office)) as studio:
            studio.start(STARTED_BY_ITSELF)
            for tenant in ("physics", "biology"):
                studio.tenant(tenant)
            yield Rounds(studio, clock, SEED)
    finally:
        office.close()
        if mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def rounds(tmp_path: Path) -> Iterator[Rounds]:
    with rounds_at(tmp_path / "place", WallClock(tmp_path)) as made:
        yield made


@pytest.fixture
def rounds_without_jumps(tmp_path: Path) -> Iterator[Rounds]:
    """On the machine's clock, so that what forks for all tests forks for this one."""
    with rounds_at(tmp_path / "place", None) as made:
        yield made


def test_a_studio_that_was_killed_on_a_full_disk_starts_once_there_is_room_with_all_that_was_there(
    rounds_without_jumps: Rounds,
) -> None:
    """A lease goes on meanwhile, and what waited is granted as if nothing had been. Started too early it says what to
    do, or comes up; either way it changes nothing."""
    rounds = rounds_without_jumps
    if "disk" not in rounds.faults():
        pytest.skip("a disk of its own, to fill, needs the right to mount one")
    studio, member = rounds.studio, rounds.studio.member("cleo", "physics")
    asked = {"vram": 2 * GIB, "ttl": 600}
    with (
        sublet.connect(home=studio.home, start=False) as fabric,
        fabric.gpu(min_vram="2GiB", count=2, wait="60s") as lease,
        lease.activity(),
    ):
        member.done("POST", "/v1/sessions", {"name": "rests", "later": True, **asked})
        waiting = [f"waits-{number}" for number in range(WAITING)]
        waits = [member.done("POST", "/v1/sessions", {"name": name, **asked}) for name in waiting]
        assert {one["state"] for one in waits} == {"waiting"}
        before = member.done("GET", "/v1/records?after=0")
        with contextlib.ExitStack() as undone:
            undone.callback(rounds.fill_disk())
            assert member.ask("POST", "/v1/sessions", {"name": "late", **asked}).status == 503
            studio.kill()
            started = [rounds.starts_without_room() for _ in range(2)]
            if studio.process is not None:
                studio.kill()
        for _ in LITTLE_ROOM:
            with contextlib.ExitStack() as undone:
                undone.callback(rounds.fill_disk(but=ROOM_FOR_ONE))
                rounds.start_in_little_room()
        studio.start(STARTED_BY_ITSELF)
        assert member.done("GET", "/v1/records?after=0")[: len(before)] == before, started
        shown = {one["name"]: one["state"] for one in member.done("GET", "/v1/sessions")}
        assert shown == {"rests": "resting", **dict.fromkeys(waiting, "waiting")}
        assert lease.status == "active"
    until("what waited has its lease", lambda: member.state(waits[0]["id"]) == "active", PATIENCE_S)
    for name in ("rests", *waiting):
        member.done("POST", f"/v1/sessions/{name}/end", {"now": True})
    rounds.end()


@pytest.mark.timeout(240 + 20 * ROUNDS)
def test_no_session_is_lost_and_no_device_lent_twice_whoever_is_killed_while_people_work(rounds: Rounds) -> None:
    """Each fault and each victim in three rounds, which with which by chance."""
    print(f"SUBLET_STUDIO_SEED={SEED}")
    faults, victims = rounds.faults(), list(VICTIMS)
    plan: list[tuple[str, str]] = []
    while len(plan) < ROUNDS:  # in three rounds each fault and each victim
        rounds.chance.shuffle(faults)
        rounds.chance.shuffle(victims)
        plan += zip(itertools.cycle(faults), victims, strict=False)
    for number, (fault, victim) in enumerate(plan[:ROUNDS]):
        print(f"round {number}: {fault}, {victim}")
        rounds.run(fault, victim)
    rounds.end()
    print(sum((person.asked for person in rounds.load.people), Counter()), rounds.load.notebook.ran, rounds.met)
    assert set(rounds.met) == {*faults, *VICTIMS}
    assert rounds.load.notebook.ran, list(rounds.load.notebook.refused)
