"""Rounds of SIGKILL at random moments: of holder, guest, zygote, supervisor and office, alone and together.

After every round nothing is left (no process, no group, no folder, no page, no note), every lease has ended, and what
the office shows is the fold of its journal. While office and supervisor live they do not grow: neither descriptors,
nor processes, nor memory. Everything is drawn from a seed, which a failure prints.

``SUBLET_KILL_ROUNDS`` says how many, half of them with an office and a supervisor that live (25, and 15 with those that
are killed as well), ``SUBLET_KILL_SEED`` with which seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.client.home import socket_path
from sublet.errors import SubletError
from sublet.values import GIB
from sublet.wire.codec import dumps
from sublet.wire.conversation import Conversation
from sublet.wire.guests import GuestSpec, Start
from tests.crash.office_judge import judge_office
from tests.crash.office_process import Call, Line
from tests.integration.office_stage import PATH, Held, HolderProcess, OfficeStage, asked, office_stage
from tests.traces import until

ROUNDS: Final = int(os.environ.get("SUBLET_KILL_ROUNDS", "0"))
STEADY: Final = ROUNDS // 2 or 25
"""Rounds in which only holders, guests and zygotes are killed, so that the others' growth shows."""
ALL_VICTIMS: Final = ROUNDS // 2 or 15
"""Rounds in which supervisor and office are killed as well."""
SEED: Final = int(os.environ.get("SUBLET_KILL_SEED", "1"))
TTL_S: Final = 2.0
WARM: Final = 0.3
"""The part of the steady rounds in which caches fill."""
FDS_PER_ROUND: Final = 0.02
LOOKS: Final = 50
LOOK_AGAIN_S: Final = 0.01
KIB_PER_ROUND: Final = {"office": 40.0, "supervisor": 24.0}
"""The office remembers ended leases for a day. The supervisor remembers its last 256 guests with their logs, some 8 KiB
for each of two in a round; it is full after 125 rounds, which only the soak reaches, and grows no more."""

GUESTS: Final = (
    ("sleep", "1000"),
    ("sh", "-c", "trap '' TERM HUP; (setsid sleep 1000 &) ; (sleep 1000 &) ; exec sleep 1000"),
    ("sh", "-c", "while :; do sleep 0.01; echo x; done"),
)
WARM_GUEST: Final = GuestSpec(
    argv=(sys.executable, "-c", "import time; time.sleep(1000)"), imports=("json",), cwd="/", env={"PATH": PATH}
)


class Holder:
    """Who holds the leases and started guests under them: a process of its own if it is to be killed."""

    def __init__(self, stage: OfficeStage, wanted: list[tuple[Held, GuestSpec]], *, alone: bool) -> None:
        self._process = HolderProcess(stage, wanted) if alone else None
        self._talks: list[Conversation] = []
        for held, spec in () if alone else wanted:
            with contextlib.suppress(SubletError):
                self._talks.append(stage.hold(held))
                self._talks[-1].call(dumps(Start(spec=spec)))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        for talk in self._talks:
            talk.close()


class Rounds:
    """One office and what happens to it."""

    def __init__(self, stage: OfficeStage, seed: int) -> None:
        self.stage = stage
        self.chance = random.Random(seed)
        self.sizes: dict[str, list[tuple[int, int, int, int]]] = {"office": [], "supervisor": []}
        """Round → (round, descriptors, processes below it, resident KiB)."""
        self.killed: Counter[str] = Counter()

    def victims_of(self, rounds: int, victims: tuple[str, ...]) -> Iterator[list[str]]:
        """Whom each round kills: each of them in turn, in an order that chance makes, and sometimes another as well."""
        chance, order = random.Random(f"{SEED} {victims}"), list[str]()
        for _ in range(rounds):
            order = order or chance.sample(victims, len(victims))
            chosen = [order.pop()]
            if chance.random() < 0.25:
                chosen += [chance.choice([one for one in victims if one not in chosen])]
            yield chance.sample(chosen, len(chosen))

    def run(self, chosen: list[str]) -> None:
        chance = self.chance
        held = [self._take() for _ in range(chance.randint(1, 3))]
        specs = [
            WARM_GUEST if chance.random() < 0.3 else GuestSpec(argv=chance.choice(GUESTS), cwd="/", env={"PATH": PATH})
            for _ in held
        ]
        holder = Holder(self.stage, list(zip(held, specs, strict=True)), alone="holder" in chosen)
        try:
            line = Line(socket_path(self.stage.office.home))
            with contextlib.closing(line):
                if chance.random() < 0.4:  # in the middle of an end
                    line.send(Call(method="POST", path=f"/v1/leases/{held[0].id}/release", body={}))
                for victim in chosen:
                    time.sleep(chance.choice((0, 0.001, 0.005, 0.02, 0.05)))
                    self._kill(victim, holder)
            self._come_back()
            for one in held:
                self._give_back(one)
            until("the end of all leases", lambda: not asked(self.stage.office.line(), "GET", "/v1/leases").doc)
            until("no residue", lambda: not self._strays())
        finally:
            holder.kill()
        judge_office(self.stage.office)

    def _take(self) -> Held:
        return self.stage.acquire(self.stage.office.line(), memory=GIB, ttl_s=TTL_S)

    def _kill(self, victim: str, holder: Holder) -> None:
        self.killed[victim] += 1
        match victim:
            case "holder":
                holder.kill()
            case "office":
                self.stage.kill_office()
            case "supervisor":
                with contextlib.suppress(ProcessLookupError):
                    if (pid := self.stage.find_supervisor()) is not None:
                        os.kill(pid, signal.SIGKILL)
            case "zygote":
                self._kill_one(lambda words: "sublet.guest.zygote" in words)
            case _:
                assert self.stage.traces is not None
                marked = self.stage.traces.marked()
                if marked:
                    self.stage.procs.send(self.chance.choice(marked), signal.SIGKILL)

    def _kill_one(self, is_it: Callable[[str], bool]) -> None:
        supervisor = self.stage.find_supervisor() or 0
        for stat in self.stage.procs.table().children(supervisor):
            if is_it(self.stage.procs.text(stat.pid, "cmdline")):
                self.stage.procs.send(stat.identity, signal.SIGKILL)

    def _come_back(self) -> None:
        assert self.stage.office.process is not None
        if self.stage.office.process.poll() is not None:
            self.stage.start()
        until("a supervisor", self.stage.find_supervisor)

    def _give_back(self, held: Held) -> None:
        """Unless it has run out already."""
        answer = self.stage.office.line().ask(Call(method="POST", path=f"/v1/leases/{held.id}/release", body={}))
        assert answer is not None

    def _strays(self) -> list[str]:
        return self.stage.residue

    def measure(self, number: int) -> None:
        """Without zygotes, which come and go, and have descriptors."""

        def is_alone() -> bool:
            self._kill_one(lambda words: True)
            return not self.stage.procs.table().children(self.stage.supervisor)

        until("a supervisor without children", is_alone)
        for name, pid in (("office", self.stage.office.pid), ("supervisor", self.stage.supervisor)):
            status = self.stage.procs.text(pid, "status")
            kib = int(status.split("VmRSS:")[1].split()[0])
            fds, below = self._held_by(pid, self.sizes[name])
            self.sizes[name].append((number, fds, below, kib))

    def _held_by(self, pid: int, before: list[tuple[int, int, int, int]]) -> tuple[int, int]:
        """Descriptors, and processes below it. What is open for a moment is no leak, so where there is more than there
        was the last time it is looked again."""
        fds, below = before[-1][1:3] if before else (1 << 30, 1 << 30)
        looks: list[tuple[int, int]] = []
        for _ in range(LOOKS):
            time.sleep(LOOK_AGAIN_S)
            looks.append(
                (len(os.listdir(f"/proc/{pid}/fd")), sum(1 for _ in self.stage.procs.table().below([pid])) - 1)
            )
            if looks[-1][0] <= fds and looks[-1][1] <= below:
                break
        return min(fds for fds, _ in looks), min(below for _, below in looks)


def slope(points: list[tuple[int, int]]) -> float:
    """Of the line that fits best (least squares)."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with office_stage(tmp_path / "place", "4x4GiB") as found:
        yield found


@pytest.mark.timeout(60 + 10 * STEADY)  # a round takes half a second, and several where very much else runs
def test_after_any_kill_what_lives_on_has_not_grown(stage: OfficeStage) -> None:
    print(f"SUBLET_KILL_SEED={SEED}")
    rounds, victims = Rounds(stage, SEED), ("holder", "guest", "zygote")
    for number, chosen in enumerate(rounds.victims_of(STEADY, victims)):
        print(f"round {number}: {chosen}")
        rounds.run(chosen)
        rounds.measure(number)
    for name, sizes in rounds.sizes.items():
        after = sizes[round(STEADY * WARM) :]
        assert abs(slope([(at, fds) for at, fds, _, _ in after])) <= FDS_PER_ROUND, (name, after)
        assert abs(slope([(at, below) for at, _, below, _ in after])) <= FDS_PER_ROUND, (name, after)
        assert slope([(at, kib) for at, _, _, kib in after]) <= KIB_PER_ROUND[name], (name, after)
        print(name, [round(slope([(size[0], size[n]) for size in after]), 3) for n in (1, 2, 3)], after[-1])
    assert set(rounds.killed) == set(victims)


@pytest.mark.timeout(60 + 10 * ALL_VICTIMS)
def test_after_any_kill_nothing_is_left_and_the_books_agree(stage: OfficeStage) -> None:
    print(f"SUBLET_KILL_SEED={SEED}")
    rounds, victims = Rounds(stage, SEED), ("holder", "guest", "zygote", "supervisor", "office")
    for number, chosen in enumerate(rounds.victims_of(ALL_VICTIMS, victims)):
        print(f"round {number}: {chosen}")
        rounds.run(chosen)
    assert set(rounds.killed) == set(victims), "not each of them was killed"


def test_the_slope_of_a_line_is_found() -> None:
    assert slope([(x, 3 * x + 1) for x in range(10)]) == pytest.approx(3.0)
    assert slope([(5, 1), (5, 2)]) == 0.0
