"""Kill a whole office, or fail its disk, while several tenants ask things of it; then look at what the next one finds.

A chain is a home and the offices that live and die there, one after the other, each under load. A life ends

- by SIGKILL at the n-th call of some kind that writes: to the journal, to the files beside it, to a client;
- by SIGKILL at a moment drawn by chance;
- by EIO or ENOSPC from a write or a sync: then the office must end by itself, at once, with status 1, one sentence
  of what happened and one of what to do.

After each, the books are judged where they lie, and the next office has to answer for all that was ever answered here:
every grant, renewal and release is there as it was told; no epoch was given twice; the audit chain fits its anchor and
the bill both sides of the account; what was asked and not answered is asked again and has one effect.

A sample runs with the suite. ``SUBLET_CRASH_ALL=1`` runs every point, ``SUBLET_CRASH_SEED`` draws another sample.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from sublet.office.journal.files import JOURNAL_NAME
from tests.crash.office_judge import judge_disk, judge_office
from tests.crash.office_load import ROUNDS, Told, carry_out, draw, repeat
from tests.crash.office_process import OfficeProcess, office_at

ALL: Final = os.environ.get("SUBLET_CRASH_ALL") == "1"
SEED: Final = int(os.environ.get("SUBLET_CRASH_SEED", "20262"))
CALLS: Final = (
    *("write", "pwrite64", "fsync", "fdatasync", "ftruncate", "rename", "link", "unlink", "mkdir", "sendto"),
    *("sendmsg", "writev", "fallocate"),
)
FAILING: Final = ("pwrite64", "fsync", "fdatasync")
ERRORS: Final = ("EIO", "ENOSPC")
CHAINS: Final = 2
FIRST: Final = 1
"""In each chain of the sample: points in the life that begins the journal,"""
LATER: Final = 2
"""in lives that go on with it,"""
CHANCE: Final = 2
"""at moments drawn by chance,"""
FAILURES: Final = 2
"""and failed writes."""
SPARE: Final = 16
"""More such chains, of which only as many are lived as it takes to meet each kind of end: whether anything rests on the
write that fails is chance."""
ALL_CHAIN: Final = 12
MOMENT_S: Final = 0.004
KINDS: Final = ("failed, and ended", "kill at a call", "kill by chance")
"""How lives end, each of which is met."""
HARMLESS: Final = r"<[^>]*sublet-anchors/[^>]*>|<[^>]*-shm>|fdatasync\(\d+<[^>]*/home>"
"""Failed calls that may be passed over: an anchor (the office says so, and goes on), the shared memory of the log
(it is made anew), and SQLite's own sync of the folder, which the office did before."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """How a life ends. Without a call it is a kill at a moment drawn by chance."""

    call: str = ""
    n: int = 0
    fault: str = "kill"

    @property
    def strace(self) -> list[str]:
        if not self.call:
            return []
        what = "signal=KILL" if self.fault == "kill" else f"error={self.fault}"
        return ["-e", f"trace={self.call}", "-e", f"inject={self.call}:{what}:when={self.n}"]


@dataclass(frozen=True, slots=True)
class Points:
    """What a life has."""

    first: list[Point]
    later: list[Point]
    failures: list[Point]


@dataclass(slots=True)
class Chain:
    """One home, life after life."""

    office: OfficeProcess
    seed: str
    told: Told
    ends: Counter[str]
    life: int = 0

    def live(self, point: Point) -> None:
        self.life += 1
        try:
            self._live(point, random.Random(f"{self.seed}/{self.life}"))
        except Exception as error:
            where = f"SUBLET_CRASH_SEED={SEED}, chain {self.seed}, life {self.life}, {point}"
            raise AssertionError(f"{where}: {error}\nit said: {self.office.said}\n{self._last_call()}") from error

    def _live(self, point: Point, rng: random.Random) -> None:
        office = self.office
        self.told.may_be_full = point.fault == "ENOSPC"
        alive = office.start(strace=point.strace)
        last_turn = rng.randrange(1, ROUNDS) if not point.call else -1
        alive = alive and repeat(office, self.told)
        if alive and not point.call:
            judge_office(office)
        for turn, asks in enumerate(draw(rng, self.told, f"{self.seed}-{self.life}") if alive else ()):

            def strike(turn: int = turn) -> None:
                if turn == last_turn:
                    time.sleep(rng.random() * MOMENT_S)
                    office.kill()

            if not carry_out(office, asks, self.told, pause=strike) or turn == last_turn:
                break
        else:
            office.kill()
        self._judge_end(point, office.ended())
        judge_disk(office, self.told)

    def _judge_end(self, point: Point, status: int) -> None:
        """A failed write ends the office, or else it was one that nothing rests on; a kill is a kill."""
        struck = "INJECTED" in self._last_call() or (bool(point.call) and point.fault == "kill" and status == -9)
        if point.fault == "kill" or not struck:
            assert status == -9, f"the office ended with {status}"
            self.ends["kill at a call" if point.call and struck else "kill by chance"] += 1
            return
        if status == -9 and point.fault == "ENOSPC" and "the room that was reserved for it" in self.office.said:
            self.ends["full, and written to the reserve"] += 1
            return
        if status == -9 and not re.search(HARMLESS, self._last_call()):
            # It may have been a write behind the last answer (of a teardown, say): then it was killed on its way out.
            assert not self._wrote_on(), "it went on after a failed write"
            self.ends["failed, and killed before it ended"] += 1
            return
        if status == -9:
            self.ends["failed, and nothing rests on it"] += 1
            return
        assert status == 1, f"the office ended with {status}"
        told = ("The office is up", "Until `")
        said = [line for line in self.office.said.splitlines() if not line.startswith(told)]
        assert len(said) == 2, said
        assert re.fullmatch(r"sublet: [^\n]+", said[0]), said
        assert said[1].startswith("  "), said
        self.ends["failed, and ended"] += 1

    def _wrote_on(self) -> bool:
        """Whether the journal was written to, or synced, after the failed call."""
        lines = self.office.log.read_text().splitlines()
        last = max(at for at, line in enumerate(lines) if "INJECTED" in line)
        return any(f"/home/{JOURNAL_NAME}" in line for line in lines[last + 1 :])

    def _last_call(self) -> str:
        if not self.office.log.exists():
            return ""
        lines = self.office.log.read_text().splitlines()
        injected = [line for line in lines if "INJECTED" in line]
        return (injected or lines or [""])[-1]

    def close(self) -> None:
        """The last office of the home ends as it should, and all of it is still there."""
        assert self.office.start()
        assert repeat(self.office, self.told)
        judge_office(self.office)
        self.office.stop()
        judge_disk(self.office, self.told)


def chain_at(place: Path, seed: str) -> Iterator[Chain]:
    with office_at(place) as office:
        yield Chain(office, seed, Told(), Counter())


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Points:
    """Found by two lives that nobody disturbs."""
    found: list[list[Point]] = []
    failures: list[Point] = []
    with office_at(tmp_path_factory.mktemp("dry")) as office:
        told = Told()
        for name in ("first", "later"):
            assert office.start(strace=["-e", "trace=" + ",".join(f"?{call}" for call in CALLS)])
            for asks in draw(random.Random(name), told, name):
                assert carry_out(office, asks, told)
            main = str(office.pid)
            office.stop()
            counts: Counter[str] = Counter()
            found.append([])
            for line in office.log.read_text().splitlines():
                pid, _, rest = line.partition(" ")
                call = rest.strip().partition("(")[0]
                if pid != main or call not in CALLS:
                    continue
                counts[call] += 1
                found[-1].append(Point(call, counts[call]))
                if name == "later" and call in FAILING and "/home" in rest and "journal.lock" not in rest:
                    failures += [Point(call, counts[call], error) for error in ERRORS]
    assert len(found[1]) > 100, "the load writes hardly anything"
    return Points(found[0], found[1], failures)


def chains(points: Points) -> list[list[Point]]:
    """The lives of each chain."""
    rng = random.Random(SEED)
    if ALL:
        later = [*points.later, *points.failures, *(Point() for _ in range(100))]
        rng.shuffle(later)
        begun = [[point] for point in points.first]
        return begun + [later[at : at + ALL_CHAIN] for at in range(0, len(later), ALL_CHAIN)]
    drawn = []
    for _ in range(CHAINS + SPARE):
        lives = [*rng.sample(points.later, LATER), *rng.sample(points.failures, FAILURES)]
        lives += [Point() for _ in range(CHANCE)]
        rng.shuffle(lives)
        drawn.append([*rng.sample(points.first, FIRST), *lives])
    return drawn


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.needs("strace")
@pytest.mark.timeout(7200 if ALL else 1200)
@pytest.mark.parametrize("half", [0, 1])
def test_whatever_ends_an_office_the_next_one_keeps_every_word(half: int, points: Points, tmp_path: Path) -> None:
    """Two halves of the same sample, for two cores."""
    ends: Counter[str] = Counter()
    answers = 0
    for number, lives in enumerate(chains(points)[half::2]):
        if not ALL and number >= CHAINS // 2 and all(ends[kind] for kind in KINDS):
            break
        for chain in chain_at(tmp_path / str(number), f"{SEED}.{half}.{number}"):
            for point in lives:
                chain.live(point)
            chain.close()
            ends += chain.ends
            answers += chain.told.answers
    print(f"{ends.total()} lives, {answers} answers: {dict(ends)}")
    assert all(ends[kind] for kind in KINDS), ends
