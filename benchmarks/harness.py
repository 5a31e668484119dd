"""Rows, goals, figures and verdicts; A B A B in one run; a limit on every run.

A row is one file with one question. It measures ours and its peer alternately, so that what else the machine does falls
on both, and says what it found as figures. Its goals stand beside it, were written before the run, and are judged by
this file, met or not met: a row cannot word its own verdict.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, Literal, TypeVar

from benchmarks.machine import (
    Disk,
    Machine,
    busy_with_others,
    disk_at,
    home_for_state,
    sublet_commit,
    this_machine,
    versions_of,
)
from benchmarks.stats import Comparison, Summary, compare, summarise

__all__ = [
    "Bench",
    "Figure",
    "Goal",
    "Report",
    "Row",
    "TookTooLong",
    "Verdict",
    "be_first_in_line",
    "figure",
    "judge",
    "run_row",
]

QUIET_CORES: Final = 0.15
QUIET_LOOK_S: Final = 0.5
DISTURBED_CORES: Final = 0.3
"""A pair with more than this is measured again."""
TRIES_PER_PAIR: Final = 2

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


class TookTooLong(Exception):
    """The row passed its limit; what it started has been ended, and nothing is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a figure must reach, stated before anything was measured."""

    figure: str
    of: Literal["ours", "ratio", "difference"] = "ours"
    """Which number of the figure: our median, how many times better than the peer, or ours minus the peer's."""
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"the goal for {self.figure} needs exactly one bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured quantity, of ours and (where there is one) of the peer in the same run."""

    name: str
    unit: str
    ours: Summary
    peer: Summary | None = None
    peer_name: str = ""
    comparison: Comparison | None = None
    samples: Sequence[float] = ()
    peer_samples: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    goal: Goal
    value: float | None
    """None: the figure was not measured, for a reason the notes give."""
    met: bool | None

    @property
    def said(self) -> str:
        return {True: "met", False: "not met", None: "not measured"}[self.met]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a run of one row found."""

    row: str
    title: str
    figures: Sequence[Figure]
    verdicts: Sequence[Verdict]
    notes: Sequence[str]
    versions: Mapping[str, str]
    machine: Machine
    disk: Disk
    busy_before: float
    """Cores that were busy with other things just before."""
    busy_during: float
    """And during the run; above a few tenths the figures are disturbed."""
    sublet: str
    """Commit."""
    measured_at: str
    took_s: float
    quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question. ``measure`` returns its figures in the order people should read them."""

    name: str
    title: str
    goals: Sequence[Goal]
    measure: Callable[[Bench], list[Figure]]
    limit_s: float
    """The run is stopped after this long."""
    distributions: Sequence[str] = ()
    """Whose versions the result names."""
    is_in_all: bool = True
    """Whether it is run with all others; else by its name alone."""


@dataclass(kw_only=True)
class Bench:
    """What a row is handed: a folder on a disk, a voice, and how thorough to be."""

    row: str
    folder: Path
    quick: bool = False
    """A short look, to see that a row works; its result is shown and not recorded."""
    patience_s: float = 0.0
    """How long the row may wait, all in all, for a quiet machine."""
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Progress, for who is waiting."""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {self.row}: {text}\n")
        sys.stderr.flush()

    def note(self, text: str) -> None:
        """What a reader of the result must know."""
        self.notes.append(text)

    def either(self, full: T, quick: T) -> T:
        """The number for a real run, or the one for a short look."""
        return quick if self.quick else full

    def pairs(
        self, what: str, ours: Callable[[], A], peer: Callable[[], B], *, pairs: int, show: Callable[[A, B], str]
    ) -> tuple[list[A], list[B]]:
        """A B A B …: one sample of ours, one of the peer, again and again. The first pair warms up and is left out.

        A pair during which the machine was busy with other things is measured again, up to a bound. What decides is
        the disturbance alone, never the samples; where the bound is reached, the least disturbed pairs are kept.
        """
        found: list[tuple[float, A, B]] = []
        quiet = 0
        for number in range(1 + pairs * TRIES_PER_PAIR):
            self.await_quiet()
            others = busy_with_others()
            a, b = ours(), peer()
            disturbed = others()
            told = f"pair {number}, {quiet} of {pairs} kept" if number else "warming up"
            self.say(f"{what}, {told}: {show(a, b)}; others {disturbed:.2f} cores")
            if number:
                found.append((disturbed, a, b))
                quiet += disturbed <= DISTURBED_CORES or is_first_in_line()
            if quiet >= pairs:
                break
        kept = sorted(range(len(found)), key=lambda place: found[place][0])[:pairs]
        if len(found) > pairs:
            self.note(
                f"{what}: {len(found) - pairs} pairs left out, in which more than {DISTURBED_CORES} cores were busy "
                f"with other things; the most in a pair that was kept: {max(found[place][0] for place in kept):.2f}."
            )
        return [found[place][1] for place in sorted(kept)], [found[place][2] for place in sorted(kept)]

    def await_quiet(self) -> None:
        """Wait until the machine does little else, as long as there is patience left."""
        began = time.monotonic()
        told = False
        while self.patience_s > 0:
            others = busy_with_others()
            time.sleep(min(QUIET_LOOK_S, self.patience_s))
            busy = others()
            if busy <= QUIET_CORES:
                break
            if not told:
                self.say(f"{busy:.2f} cores are busy with others; waiting for a quiet moment")
                told = True
            self.patience_s -= time.monotonic() - began
            began = time.monotonic()


def be_first_in_line() -> None:
    """From here on this process and its children go before all other work: both sides, and the generator alike.

    For a machine that is never quiet. What it shares with the others (caches, the disk) it still shares, on both sides.
    """
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def is_first_in_line() -> bool:
    return os.sched_getscheduler(0) == os.SCHED_FIFO


def medians_us(rounds_ns: Sequence[Sequence[int]]) -> list[float]:
    """The upper median of each round of single operations, in microseconds."""
    return [sorted(ns)[len(ns) // 2] / 1e3 for ns in rounds_ns]


def figure(
    name: str,
    unit: str,
    ours: Sequence[float],
    peer: Sequence[float] = (),
    *,
    peer_name: str = "",
    higher_is_better: bool = False,
    operations: Sequence[float] = (),
    peer_operations: Sequence[float] = (),
) -> Figure:
    """A figure from samples; with a peer's samples, pair by pair."""
    return Figure(
        name=name,
        unit=unit,
        ours=summarise(ours, operations=operations),
        peer=summarise(peer, operations=peer_operations) if peer else None,
        peer_name=peer_name,
        comparison=compare(ours, peer, higher_is_better=higher_is_better) if peer else None,
        samples=list(ours),
        peer_samples=list(peer),
    )


def judge(goal: Goal, figures: Sequence[Figure]) -> Verdict:
    """Met or not met, by the median; a figure that is missing is said to be missing."""
    found = next((one for one in figures if one.name == goal.figure), None)
    value = None if found is None else _value(goal, found)
    if value is None:
        return Verdict(goal=goal, value=None, met=None)
    if goal.at_most is not None:
        return Verdict(goal=goal, value=value, met=value <= goal.at_most)
    assert goal.at_least is not None
    return Verdict(goal=goal, value=value, met=value >= goal.at_least)


def run_row(row: Row, *, quick: bool = False, patience_s: float = 0.0) -> Report:
    """Measure a row in a folder of its own, within its limit, and judge it."""
    before = busy_with_others()
    time.sleep(1.0)
    busy_before, during = before(), busy_with_others()
    began = time.monotonic()
    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with (
        tempfile.TemporaryDirectory(prefix="sublet-bench-", dir=home_for_state()) as name,
        _limit(row.limit_s + patience_s),
    ):
        bench = Bench(row=row.name, folder=Path(name), quick=quick, patience_s=patience_s)
        if is_first_in_line():
            bench.note("Both sides and the generator ran at real-time priority, before all other work on the machine.")
        bench.await_quiet()
        bench.versions.update(versions_of(*row.distributions))
        disk = disk_at(bench.folder)
        bench.say(row.title)
        figures = row.measure(bench)
    return Report(
        row=row.name,
        title=row.title,
        figures=figures,
        verdicts=[judge(goal, figures) for goal in row.goals],
        notes=bench.notes,
        versions=bench.versions,
        machine=this_machine(),
        disk=disk,
        busy_before=round(busy_before, 2),
        busy_during=round(during(), 2),
        sublet=sublet_commit(),
        measured_at=measured_at,
        took_s=round(time.monotonic() - began, 1),
        quick=quick,
    )


def _value(goal: Goal, found: Figure) -> float | None:
    match goal.of:
        case "ours":
            return found.ours.median
        case "ratio":
            return None if found.comparison is None else found.comparison.ratio
        case "difference":
            return None if found.peer is None else found.ours.median - found.peer.median


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise in the middle of the row when its time is up, so that its ``with`` blocks end what it started."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"the row took longer than its {seconds:.0f} s.")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
