"""Finds how many GPUs reach a goal: the simulated curve with its confidence, and the number.

The largest count is tried first, then the gap below the smallest count from which on all that were tried meet the
goal is halved, until the count beneath it misses. More GPUs do not always help: one node more changes where things are
placed and who is preempted. So nothing is concluded from a count about those that were not tried: counts right above
the answer are tried as well, and some between it and the largest. Each that misses moves the answer up. What was tried
is told with the answer.

Several seeds are replayed at a time, each in a process of its own. The processes are forked, so that workloads and
rules need not be sent. Replays that are of no use any more, since another count is tried, are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from math import sqrt
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple, Protocol

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.simulate.results import Result
from sublet.values import NS_PER_S, format_duration, parse_duration_ns, shown

SPREAD: Final = 3
"""Counts between the answer and the largest that are tried as well; and over the range, where the largest misses."""
NEAR: Final = 4
"""Counts right above the answer that are tried as well: where the curve falls again, it does so there."""
TRIES_MAX: Final = 40
FAR: Final = 0.2
"""A run is stopped when its share is certain to be below the goal by this much, and no other seed is tried."""
LOOK_EVERY_S: Final = 0.2
Progress = Callable[[float], None]
Show = Callable[[int, int, float], None]
"""Is told the number of GPUs, how many seeds are done, and the share of the whole that is."""
_GOAL: Final = re.compile(r"\s*start_within\(([^()]+)\)\s*>=\s*([0-9.]+)(%?)\s*", re.ASCII)
_DO: Final = "Write it as 'start_within(10s) >= 0.95'."
_T95: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t, two-sided 95 %, by degrees of freedom from 1."""


class Goal(NamedTuple):
    """A share of the cells starts within a time."""

    bound_ns: int
    share: float

    def __str__(self) -> str:
        return f"start_within({format_duration(self.bound_ns)}) >= {self.share:g}"


def parse_goal(text: str) -> Goal:
    """``start_within(10s) >= 0.95``, or ``>= 95%``."""
    found = _GOAL.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{shown(text)} is not a goal", do=_DO)
    bound_ns = parse_duration_ns(found[1], zero_ok=True)
    try:
        share = float(found[2]) / (100 if found[3] else 1)
    except ValueError:
        raise InvalidRequest(f"{shown(found[2])} is not a number", do=_DO) from None
    if not 0 < share <= 1:
        raise InvalidRequest(f"no share of the cells is {share:g}", do=_DO)
    return Goal(bound_ns, share)


def late(goal: Goal, cells: int) -> tuple[int, int]:
    """The wait, and the number of cells that may be longer, beyond which the goal is far out of reach."""
    return goal.bound_ns, int(cells * (1 - goal.share + FAR))


@dataclass(frozen=True, slots=True)
class Point:
    """What one number of GPUs came to, by seed."""

    gpus: int
    shares: tuple[float, ...]
    stopped: bool = False
    """The share is below what stands here: the run was stopped when that was certain."""

    @property
    def mean(self) -> float:
        return fmean(self.shares)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean over seeds; of one seed, the figure itself."""
        count = len(self.shares)
        if count == 1:
            return self.mean, self.mean
        half = _T95[min(count - 1, len(_T95)) - 1] * stdev(self.shares) / sqrt(count)
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    @property
    def one_run(self) -> tuple[float, float]:
        """Between what the share of a single workload like these lies in 95 of 100 cases: the prediction interval."""
        count = len(self.shares)
        if count == 1:
            return 0.0, 1.0
        half = _T95[min(count - 1, len(_T95)) - 1] * stdev(self.shares) * sqrt(1 + 1 / count)
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    def meets(self, goal: Goal) -> bool:
        """Whether the goal is reached even at the lower end of the interval."""
        return self.interval[0] >= goal.share


@dataclass(frozen=True, slots=True)
class Answer:
    """The number, and what was tried for it."""

    goal: Goal
    gpus: int
    points: tuple[Point, ...]
    """By number of GPUs."""

    @property
    def exceptions(self) -> list[int]:
        """Smaller counts that meet the goal although a larger one below the answer does not."""
        return [point.gpus for point in self.points if point.gpus < self.gpus and point.meets(self.goal)]

    def figures(self) -> dict[str, Any]:
        return {
            "goal": {"start_within_s": self.goal.bound_ns / NS_PER_S, "share": self.goal.share},
            "gpus": self.gpus,
            "below_that_meet_it": self.exceptions,
            "points": [
                {
                    "gpus": p.gpus,
                    "mean": p.mean,
                    "low": p.interval[0],
                    "high": p.interval[1],
                    "one_run": None if len(p.shares) == 1 else dict(zip(("low", "high"), p.one_run, strict=True)),
                    "seeds": list(p.shares),
                    "at_most": p.stopped,
                }
                for p in self.points
            ],
        }


def _may_meet(goal: Goal, shares: Sequence[float], count: int) -> bool:
    """Whether a count can still meet the goal once all of ``count`` seeds are tried. For a given smallest share the
    lower end of the interval is highest if all others are 1; with up to four seeds it is never above the smallest."""
    low, others = min(shares), count - 1
    if not others:
        return low >= goal.share
    gain = max(0.0, 1 - _T95[min(others, len(_T95)) - 1] / others)
    return low + gain * (1 - low) * others / count >= goal.share


def find(
    goal: Goal,
    most: int,
    seeds: Sequence[int],
    run: Callable[[int, int], Result],
    note: Callable[[Point], None] = lambda _: None,
) -> Answer:
    """The answer, from ``run(gpus, seed)``, which may stop as ``late`` says, for counts from 1 to ``most``: as many as
    the workload could ever use."""
    tried: dict[int, Point] = {}

    def point(gpus: int) -> Point:
        if gpus not in tried:
            shares: list[float] = []
            for seed in seeds:
                result = run(gpus, seed)
                if result.stopped:
                    tried[gpus] = Point(gpus, (max(0.0, goal.share - FAR),), stopped=True)
                    break
                shares.append(result.start_within(goal.bound_ns))
                if not _may_meet(goal, shares, len(seeds)):
                    break
            tried.setdefault(gpus, Point(gpus, tuple(shares)))
            note(tried[gpus])
        return tried[gpus]

    if not point(most).meets(goal):
        for gpus in _spread(0, most):
            point(gpus)
        whole = [one for one in tried.values() if not one.stopped]
        best = max(whole, key=lambda one: one.interval[0], default=None)
        text = f"all are below {goal.share - FAR:.0%}"
        if best is not None:
            text = f"the best is {best.mean:.1%}, with {best.gpus}"
            if len(seeds) > 1:
                text += f" ({best.interval[0]:.1%} at the lower end of the interval over seeds)"
        raise InvalidRequest(
            f"no number of GPUs up to {most} reaches {goal}; {text}",
            do="Ask for a longer time or a smaller share. Cells that fit no node count as not started: see "
            "--gpus-per-node and --vram.",
        )
    while len(tried) < TRIES_MAX:
        answer = _smallest(goal, tried)
        below = max((gpus for gpus in tried if gpus < answer), default=0)
        above = [gpus for gpus in range(answer + 1, min(most, answer + NEAR) + 1) if gpus not in tried]
        if below + 1 < answer:
            point((below + answer) // 2)
        elif above:
            point(above[0])
        elif between := [gpus for gpus in _spread(answer, most) if gpus not in tried]:
            point(between[0])
        else:
            break
    return Answer(goal, _smallest(goal, tried), tuple(tried[gpus] for gpus in sorted(tried)))


def _spread(low: int, high: int) -> list[int]:
    return [gpus for n in range(1, SPREAD + 1) if low < (gpus := low + (high - low) * n // (SPREAD + 1)) < high]


def _smallest(goal: Goal, tried: dict[int, Point]) -> int:
    """The smallest count from which on all that were tried meet the goal."""
    missing = [gpus for gpus, one in tried.items() if not one.meets(goal)]
    return min(gpus for gpus in tried if gpus > max(missing, default=0))


class Run(Protocol):
    """One replay; it tells its own progress."""

    def __call__(self, gpus: int, seed: int, progress: Progress) -> Result: ...


def processes_of(seeds: Sequence[int]) -> int:
    """How many at once. A process that has threads does not fork."""
    if threading.active_count() > 1:
        return 1
    return min(len(seeds), len(os.sched_getaffinity(0)))


class SeedProcesses:
    """Results by number of GPUs and seed, asked for one number after the other."""

    def __init__(self, run: Run, seeds: Sequence[int], show: Show, *, processes: int) -> None:
        self._run, self._seeds, self._show, self._most = run, list(seeds), show, processes
        self._context = multiprocessing.get_context("fork")
        self._shares = self._context.Array("d", len(seeds), lock=False)
        self._gpus = 0
        self._waiting: list[int] = []
        self._running: dict[Connection, tuple[int, ForkProcess]] = {}
        self._found: dict[int, Result | Exception] = {}

    def result(self, gpus: int, seed: int) -> Result:
        """Wait for it. The other seeds of this number are replayed meanwhile."""
        if gpus != self._gpus:
            self.close()
            self._gpus, self._waiting, self._found = gpus, list(self._seeds), {}
            self._shares[:] = [0.0] * len(self._seeds)
        while seed not in self._found:
            while self._waiting and len(self._running) < self._most:
                self._start(self._waiting.pop(0))
            for ended in wait(list(self._running), LOOK_EVERY_S):
                assert isinstance(ended, Connection)
                self._take(ended)
            self._show(gpus, len(self._found), sum(self._shares) / len(self._seeds))
        found = self._found[seed]
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """Kill what runs."""
        running, self._running = self._running, {}
        for ours, (_, process) in running.items():
            process.kill()
            process.join()
            ours.close()

    def _start(self, seed: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=self._replay, args=(seed, theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = seed, process

    def _take(self, ours: Connection) -> None:
        seed, process = self._running.pop(ours)
        try:
            self._found[seed] = ours.recv()
        except EOFError:
            process.join()
            self._found[seed] = RuntimeError(f"the replay of seed {seed} ended with code {process.exitcode}")
        process.join()
        ours.close()
        self._shares[self._seeds.index(seed)] = 1.0

    def _replay(self, seed: int, theirs: Connection, parent: int) -> None:
        """In the forked process."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        index = self._seeds.index(seed)

        def progress(share: float) -> None:
            self._shares[index] = share
            if os.getppid() != parent:
                os._exit(1)

        try:
            found: Result | Exception = self._run(self._gpus, seed, progress)
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            found = error
        theirs.send(found)
