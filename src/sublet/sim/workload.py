"""Notebook sessions: generated from published distributions, or read from a trace.

The generator draws sessions, not arrivals. A session has a size (GPUs at most), a number of cells and a tempo; its
cells are alike (the logarithms of two durations in a row correlate with 0.45), long sessions have short pauses (-0.69),
and once in about twenty cells the person goes home for the night. The quantiles are those of one month of a company's
notebooks, the AdobeTrace of June 2021: piecewise log-linear between the points, since no one-line law fits a tail in
which three cells in a hundred use four fifths of the time.

Nothing below 15 seconds was visible in that month, so cells of seconds, of which there must have been many, are missing
here as well.
"""

from __future__ import annotations

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

from sublet.errors import InvalidRequest

__all__ = ["COLUMNS", "Cell", "Session", "generate", "quantile", "read_trace"]

MINUTES_PER_DAY: Final = 24 * 60

Table = Sequence[tuple[float, float]]
"""(share of cases, value) points of an inverse distribution function."""

DURATION_MIN: Final[dict[int, Table]] = {
    1: ((0, 1), (0.25, 2), (0.5, 3), (0.75, 5), (0.9, 11), (0.95, 24), (0.99, 186), (1, 5_734)),
    4: ((0, 1), (0.25, 4), (0.5, 9), (0.75, 19), (0.9, 80), (0.95, 261), (0.99, 2_416), (1, 20_000)),
    8: ((0, 1), (0.25, 4), (0.5, 8), (0.75, 18), (0.9, 60), (0.95, 214), (0.99, 1_708), (1, 20_000)),
}
"""How long a cell runs, by the GPUs it uses."""
CELLS: Final[Table] = ((0, 1), (0.25, 5), (0.5, 17), (0.75, 77), (0.9, 207), (0.95, 427), (1, 2_693))
"""Cells of a session."""
VRAM_GIB: Final[Table] = ((0, 0.05), (0.37, 0.5), (0.5, 2.3), (0.75, 4.6), (0.9, 18), (0.95, 31), (0.99, 38), (1, 40))
"""What a GPU cell has in use at most."""
SESSION_GPUS: Final = ((1, 0.347), (4, 0.264), (8, 0.389))
FULL_SIZE: Final = 0.62
"""The share of cells in a session of several GPUs that use all of them; the others use one."""
NO_GPU: Final = 0.34
"""The share of cells that use none."""
ALIKE: Final = 0.45
"""Correlation of the logarithms of two durations in a row."""
TEMPO_LN_MIN: Final = (2.0, 1.25)
"""Mean and deviation, over sessions, of the logarithm of the pause between two cells in minutes."""
TEMPO_BY_CELLS: Final = -0.69
PAUSE_LN_SD: Final = 1.0
"""Deviation within a session."""
NIGHT_EVERY: Final = 22
"""Cells between two nights; a night lasts from eight hours to three days."""
EARLY: Final = 0.34
"""The share of sessions that start in the first two days (they were there when the month began)."""

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a cell: what comes after how long a pause."""

    pause_min: float
    duration_min: float
    gpus: int
    vram_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One notebook, from the moment it was opened."""

    name: str
    start_min: float
    cells: tuple[Cell, ...]
    stop_min: float
    """When it was closed; with whole-session reservation it holds its GPUs until then."""

    @property
    def gpus(self) -> int:
        """What it would have to reserve."""
        return max((cell.gpus for cell in self.cells), default=0)


def quantile(table: Table, share: float) -> float:
    """The value below which this share of cases lies; straight lines between the logarithms of the points."""
    index = min(bisect_right([point for point, _ in table], share), len(table) - 1)
    (low, low_value), (high, high_value) = table[index - 1], table[index]
    if share >= high:
        return high_value
    part = (share - low) / (high - low)
    return math.exp(math.log(low_value) + part * (math.log(high_value) - math.log(low_value)))


def generate(seed: int, *, sessions: int, days: float) -> list[Session]:
    """So many sessions over so many days. What would run beyond the end is cut off."""
    source = random.Random(f"workload/{seed}")
    end_min = days * MINUTES_PER_DAY
    found = [_session(source, f"s{number}", days, end_min) for number in range(sessions)]
    return sorted((session for session in found if session.cells), key=lambda session: session.start_min)


def _session(source: random.Random, name: str, days: float, end_min: float) -> Session:
    early_days = min(2.0, days)
    start_min = source.random() * (early_days if source.random() < EARLY else days) * MINUTES_PER_DAY
    size = source.choices([gpus for gpus, _ in SESSION_GPUS], [share for _, share in SESSION_GPUS])[0]
    many = source.gauss(0, 1)
    count = round(quantile(CELLS, _NORMAL.cdf(many)))
    mean, deviation = TEMPO_LN_MIN
    tempo = mean + deviation * (TEMPO_BY_CELLS * many + math.sqrt(1 - TEMPO_BY_CELLS**2) * source.gauss(0, 1))
    cells: list[Cell] = []
    at_min, length = start_min, source.gauss(0, 1)
    for number in range(count):
        pause_min = math.exp(tempo + PAUSE_LN_SD * source.gauss(0, 1)) if number else 0.0
        if number and source.random() < 1 / NIGHT_EVERY:
            pause_min += 8 * 60 * math.exp(2.2 * source.random())
        length = ALIKE * length + math.sqrt(1 - ALIKE**2) * source.gauss(0, 1)
        gpus = size if source.random() < FULL_SIZE else 1
        duration_min = quantile(DURATION_MIN[gpus], _NORMAL.cdf(length))
        at_min += pause_min
        if at_min >= end_min:
            break
        duration_min = min(duration_min, end_min - at_min)
        at_min += duration_min
        if source.random() < NO_GPU:
            cells.append(Cell(pause_min, duration_min, 0))
        else:
            cells.append(Cell(pause_min, duration_min, gpus, quantile(VRAM_GIB, source.random())))
    return Session(name, start_min, tuple(cells), min(end_min, at_min))


COLUMNS: Final = (
    "session",
    "session_start_min",
    "session_stop_min",
    "cell_start_min",
    "cell_duration_min",
    "gpus",
    "vram_gb",
)


def read_trace(path: Path) -> list[Session]:
    """Sessions from a table with these columns; what else it has is ignored."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise InvalidRequest(
            f"the trace {path} cannot be read ({error.strerror})", do="Give the path of a CSV file."
        ) from error
    if not rows or not set(COLUMNS) <= set(rows[0]):
        missing = ", ".join(sorted(set(COLUMNS) - set(rows[0] if rows else ())))
        raise InvalidRequest(f"the trace {path} has no {missing}", do=f"It needs the columns {', '.join(COLUMNS)}.")
    by_session: dict[str, list[dict[str, float]]] = {}
    for number, row in enumerate(rows, start=2):
        by_session.setdefault(row["session"], []).append(_numbers(path, number, row))
    found = [_from_rows(name, cells) for name, cells in by_session.items()]
    return sorted(found, key=lambda session: session.start_min)


def _numbers(path: Path, number: int, row: dict[str, str]) -> dict[str, float]:
    try:
        found = {column: float(row[column]) for column in COLUMNS[1:]}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"line {number} of {path} has something that is not a number", do="Correct it.") from error
    if not all(math.isfinite(value) and value >= 0 for value in found.values()):
        raise InvalidRequest(f"line {number} of {path} has a number below zero or none at all", do="Correct it.")
    return found


def _from_rows(name: str, rows: Iterable[dict[str, float]]) -> Session:
    ordered = sorted(rows, key=lambda row: row["cell_start_min"])
    start_min = ordered[0]["session_start_min"]
    cells, at_min = [], start_min
    for row in ordered:
        pause_min = max(0.0, row["cell_start_min"] - at_min)
        cells.append(Cell(pause_min, row["cell_duration_min"], round(row["gpus"]), row["vram_gb"]))
        at_min += pause_min + row["cell_duration_min"]
    return Session(name, start_min, tuple(cells), max(at_min, ordered[0]["session_stop_min"]))
