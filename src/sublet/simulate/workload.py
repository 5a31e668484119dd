"""Workloads: generated from published distributions, or read from a trace, a batch cluster's jobs, or a journal.

The generator draws sessions, not arrivals. A session has a size (GPUs at most), a number of cells and a tempo; its
cells are alike (the logarithms of two durations in a row correlate with 0.45), long sessions have short pauses (-0.69),
and once in about twenty cells the person goes home for the night. The quantiles are those of one month of a company's
notebooks, the AdobeTrace of June 2021: piecewise log-linear between the points, since no one-line law fits a tail in
which three cells in a hundred use four fifths of the time.

Nothing below 15 seconds was visible in that month, so cells of seconds, of which there must have been many, are missing
here as well.

A course is drawn apart: students who come within ten minutes of the beginning of a lab, with cells of seconds to
minutes, and a night before the deadline.
"""

from __future__ import annotations

import csv
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Final, NamedTuple

from sublet.errors import InvalidRequest
from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.placement import models_of
from sublet.values import Tier, shown

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

CELLS_MAX: Final = 200_000
"""Of one workload. The ledger takes some minutes for so many."""
GPUS_MAX: Final = 4096
MINUTES_MAX: Final = 10 * 366 * MINUTES_PER_DAY

COURSE_CELL_MIN: Final[Table] = ((0, 0.02), (0.25, 0.1), (0.5, 0.4), (0.75, 1.5), (0.9, 4), (0.99, 10), (1, 20))
"""How long a cell of a course runs: seconds to minutes."""
COURSE_PAUSE_MIN: Final[Table] = ((0, 0.3), (0.25, 1), (0.5, 3), (0.75, 7), (0.9, 35), (1, 60))
"""Between the end of a cell and the next: the published pauses up to their ninetieth percentile."""
COURSE_VRAM_MAX_GIB: Final = 16.0
ARRIVE_MIN: Final = 10.0
"""Students come within so many minutes of the beginning of a lab."""
CRAMMING: Final = (6 * MINUTES_PER_DAY + 18 * 60.0, 7 * MINUTES_PER_DAY)
"""The evening before the deadline: Sunday, 18:00 to 24:00."""
CRAMMING_SHARE: Final = 0.5

_NORMAL: Final = NormalDist()
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_LAB: Final = re.compile(r"([A-Z][a-z]{2}) (\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a cell: what comes after how long a pause."""

    pause_min: float
    duration_min: float
    gpus: int
    vram_gib: float = 0.0
    shared: bool = False
    """It needs a part of one device, as large as its memory."""
    model: str | None = None
    """Models that do, in the order of preference: ``H200|A100``. None: any."""


@dataclass(frozen=True, slots=True)
class WorkloadSession:
    """One notebook, from the moment it was opened."""

    name: str
    start_min: float
    cells: tuple[Cell, ...]
    stop_min: float
    """When it was closed; with whole-session reservation it holds its GPUs until then."""
    tenant: str = ""
    """Empty: a tenant of its own."""
    tier: Tier = Tier.INTERACTIVE
    group: str = ""
    """Of its tenant; empty: as the policy says, or the default group."""
    pays_priority: bool = False

    @property
    def owner(self) -> str:
        """The name of its tenant."""
        return self.tenant or self.name

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


def generate(seed: int, *, sessions: int, days: float) -> list[WorkloadSession]:
    """So many sessions over so many days. What would run beyond the end is cut off."""
    source = random.Random(f"workload/{seed}")
    end_min = days * MINUTES_PER_DAY
    return _in_order(_session(source, f"s{number}", days, end_min) for number in range(sessions))


def _session(source: random.Random, name: str, days: float, end_min: float) -> WorkloadSession:
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
    return WorkloadSession(name, start_min, tuple(cells), min(end_min, at_min))


COLUMNS: Final = (
    "session",
    "session_start_min",
    "session_stop_min",
    "cell_start_min",
    "cell_duration_min",
    "gpus",
    "vram_gb",
)


class Lab(NamedTuple):
    """When a course meets, in minutes since Monday, 0:00."""

    start_min: float
    stop_min: float


def parse_lab(text: str) -> Lab:
    """``Tue 10:00-12:00``."""
    found = _LAB.fullmatch(text.strip())
    if found is not None and found[1] in _DAYS:
        hours = [int(number) for number in found.groups()[1:]]
        day = _DAYS.index(found[1]) * MINUTES_PER_DAY
        start, stop = day + 60 * hours[0] + hours[1], day + 60 * hours[2] + hours[3]
        if start < stop <= day + MINUTES_PER_DAY and hours[1] < 60 and hours[3] < 60:
            return Lab(start, stop)
    raise InvalidRequest(f"{shown(text)} is not the time of a lab", do="Write it as 'Tue 10:00-12:00'.")


def course(seed: int, *, students: int, labs: Sequence[Lab]) -> list[WorkloadSession]:
    """One week of a course: all students come to each lab, and half of them work on the evening before the deadline."""
    source = random.Random(f"course/{seed}")
    first_min = course_start_min(labs)
    return _in_order(
        replace(session, start_min=session.start_min - first_min, stop_min=session.stop_min - first_min)
        for student in range(students)
        for session in _week(source, f"student-{student}", labs)
    )


def _week(source: random.Random, tenant: str, labs: Sequence[Lab]) -> Iterator[WorkloadSession]:
    """Of one student."""
    for number, lab in enumerate(labs):
        start_min = lab.start_min + source.random() * ARRIVE_MIN
        yield _sitting(source, f"{tenant}-lab-{number}", tenant, start_min, lab.stop_min)
    if source.random() < CRAMMING_SHARE:
        low, high = CRAMMING
        start_min = low + source.random() * (high - low) * 0.75
        yield _sitting(source, f"{tenant}-night", tenant, start_min, high)


def course_start_min(labs: Sequence[Lab]) -> float:
    """Where in the week the workload of a course begins: with its first lab, or with the cramming night."""
    return min(CRAMMING[0], *(lab.start_min for lab in labs))


def _sitting(source: random.Random, name: str, tenant: str, start_min: float, end_min: float) -> WorkloadSession:
    cells: list[Cell] = []
    at_min = start_min
    while True:
        pause_min = quantile(COURSE_PAUSE_MIN, source.random()) if cells else source.random()
        duration_min = quantile(COURSE_CELL_MIN, source.random())
        if at_min + pause_min >= end_min:
            return WorkloadSession(name, start_min, tuple(cells), max(end_min, at_min), tenant)
        at_min += pause_min + duration_min
        if source.random() < NO_GPU:
            cells.append(Cell(pause_min, duration_min, 0))
        else:
            vram_gib = min(COURSE_VRAM_MAX_GIB, math.ceil(2 * quantile(VRAM_GIB, source.random())) / 2)
            cells.append(Cell(pause_min, duration_min, 1, vram_gib, shared=True))


def resample(sessions: Sequence[WorkloadSession], seed: int) -> list[WorkloadSession]:
    """As many sessions, drawn with replacement: another month like this one. Seed 1 is the workload as it is."""
    if seed == 1:
        return list(sessions)
    source = random.Random(f"resample/{seed}")
    drawn = (replace(source.choice(sessions), name=f"r{number}") for number in range(len(sessions)))
    return _in_order(drawn)


def paying(sessions: Sequence[WorkloadSession], share: float, seed: int) -> list[WorkloadSession]:
    """The same sessions; this share of their tenants, drawn by the seed, pays for priority."""
    source = random.Random(f"priority/{seed}")
    tenants = list(dict.fromkeys(session.owner for session in sessions))
    pay = set(source.sample(tenants, math.ceil(share * len(tenants))))
    return [replace(session, pays_priority=session.owner in pay) for session in sessions]


def merged(sessions: Sequence[WorkloadSession], background: Sequence[WorkloadSession]) -> list[WorkloadSession]:
    """Both at once. Jobs that come after the last session is closed are left out."""
    if not background:
        return list(sessions)
    end_min = max((session.stop_min for session in sessions), default=0.0)
    both = [*sessions, *(job for job in background if job.start_min <= end_min)]
    return _in_order(both)


def peak_gpus(sessions: Sequence[WorkloadSession], vram_gib: float) -> int:
    """GPUs of this size that cells use at once at most, if none waits."""
    edges: list[tuple[float, float]] = []
    for session in sessions:
        at_min = session.start_min
        for cell in session.cells:
            gpus = min(1.0, cell.vram_gib / vram_gib) if cell.shared else float(cell.gpus)
            edges += [(at_min + cell.pause_min, gpus), (at_min + cell.pause_min + cell.duration_min, -gpus)]
            at_min += cell.pause_min + cell.duration_min
    level = most = 0.0
    for _, more in sorted(edges):
        level += more
        most = max(most, level)
    return max(1, math.ceil(most - 1e-6))


def _in_order(sessions: Iterable[WorkloadSession]) -> list[WorkloadSession]:
    """Those that have cells, by their beginning; refused as soon as there are too many."""
    found, left = [], CELLS_MAX
    for session in sessions:
        left -= len(session.cells)
        if left < 0:
            raise InvalidRequest(
                f"the workload has more than {CELLS_MAX:,} cells", do="Take fewer days, sessions or students."
            )
        if session.cells:
            found.append(session)
    return sorted(found, key=lambda session: session.start_min)


def read_trace(path: Path) -> list[WorkloadSession]:
    """Sessions from a table with these columns, and perhaps one for the ``model`` of a cell, or several in the order of
    preference; what else it has is ignored."""
    by_session: dict[str, list[tuple[dict[str, float], str | None]]] = {}
    for number, row in _rows(path, COLUMNS):
        numbers = _numbers(path, number, row, COLUMNS[1:])
        _whole(path, number, numbers["gpus"])
        if numbers["session_stop_min"] < numbers["session_start_min"]:
            raise InvalidRequest(f"line {number} of {path}: the session stops before its start", do="Correct it.")
        by_session.setdefault(row["session"], []).append((numbers, _model(path, number, row, "model")))
    found = [_from_rows(name, cells) for name, cells in by_session.items()]
    return sorted(found, key=lambda session: session.start_min)


_UNIT_MIN: Final = {"s": 1 / 60, "min": 1.0, "h": 60.0}
_JOB_COLUMNS: Final = ("start", "duration", "gpus")
JOB_NAMES: Final = (*_JOB_COLUMNS, "user", "model", "tier", "unit")


def read_jobs(path: Path, columns: Mapping[str, str]) -> list[WorkloadSession]:
    """A batch cluster's jobs as sessions of one cell. ``columns`` says what its columns are called, and may name the
    unit of its times and the tier of all (``unit=min``, ``tier=spot``)."""
    for name in columns:
        if name not in JOB_NAMES:
            raise InvalidRequest(f"jobs have no {shown(name)}", do=f"Name columns for {', '.join(JOB_NAMES)}.")
    missing = [name for name in _JOB_COLUMNS if name not in columns]
    if missing:
        raise InvalidRequest(
            f"the columns of {path} for {', '.join(missing)} are not named",
            do="Write --job-columns start=COLUMN,duration=COLUMN,gpus=COLUMN.",
        )
    unit, tier = columns.get("unit", "s"), columns.get("tier", Tier.BATCH.value)
    if unit not in _UNIT_MIN:
        raise InvalidRequest(f"{shown(unit)} is not a unit of time", do=f"Use one of {', '.join(_UNIT_MIN)}.")
    if tier not in (Tier.BATCH, Tier.SPOT):
        raise InvalidRequest(f"{shown(tier)} is no tier of background work", do="Use batch or spot.")
    per, found = _UNIT_MIN[unit], []
    wanted = [columns[name] for name in (*_JOB_COLUMNS, "user", "model") if name in columns]
    for number, row in _rows(path, wanted):
        numbers = _numbers(path, number, row, wanted[:3])
        start_min, duration_min = numbers[wanted[0]] * per, numbers[wanted[1]] * per
        gpus = _whole(path, number, numbers[wanted[2]])
        if gpus and duration_min:
            name = f"job-{number}"
            tenant = f"user-{row[columns['user']]}" if "user" in columns else "jobs"
            model = _model(path, number, row, columns["model"]) if "model" in columns else None
            cells = (Cell(0.0, duration_min, gpus, model=model),)
            found.append(WorkloadSession(name, start_min, cells, start_min + duration_min, tenant, Tier(tier)))
    return sorted(found, key=lambda session: session.start_min)


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    number, missing = 1, set(columns)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            missing -= set(table.fieldnames or ())
            for row in table if not missing else ():
                number = table.line_num
                if number > CELLS_MAX + 1:
                    raise InvalidRequest(f"{path} has more than {CELLS_MAX:,} cells", do="Take a part of it.")
                yield number, row
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read ({error.strerror})", do="Give the path of a CSV file.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is not in UTF-8 (after line {number})", do="Save it as CSV in UTF-8; iconv does that."
        ) from error
    except csv.Error as error:
        raise InvalidRequest(f"{path} is not a CSV file (after line {number}: {error})", do="Correct it.") from error
    if missing:
        needed = ", ".join(columns)
        raise InvalidRequest(f"{path} has no {', '.join(sorted(missing))}", do=f"It needs the columns {needed}.")
    if number == 1:
        raise InvalidRequest(f"{path} has no rows", do="Give a file with at least one cell.")


def _numbers(path: Path, number: int, row: Mapping[str, str], columns: Sequence[str]) -> dict[str, float]:
    try:
        found = {column: float(row[column]) for column in columns}
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"line {number} of {path} has something that is not a number", do="Correct it.") from error
    for column, value in found.items():
        if not (math.isfinite(value) and 0 <= value <= MINUTES_MAX * 60):
            raise InvalidRequest(
                f"line {number} of {path}: {column} is {value:g}, which is below zero or too large", do="Correct it."
            )
    return found


def _model(path: Path, number: int, row: Mapping[str, str], column: str) -> str | None:
    """Of no cell that leaves it out, or whose table has no such column."""
    text = (row.get(column) or "").strip()
    if text and not (text.isprintable() and len(text) <= 128 and all(models_of(text))):
        raise InvalidRequest(
            f"line {number} of {path} has no model in {shown(text)}", do='Write "A100", or "H200|A100".'
        )
    return text or None


def _whole(path: Path, number: int, gpus: float) -> int:
    if gpus != int(gpus) or gpus > GPUS_MAX:
        raise InvalidRequest(
            f"line {number} of {path} needs {gpus:g} GPUs", do=f"Use whole numbers up to {GPUS_MAX}; 0 is without."
        )
    return int(gpus)


def _from_rows(name: str, rows: Iterable[tuple[dict[str, float], str | None]]) -> WorkloadSession:
    ordered = sorted(rows, key=lambda row: row[0]["cell_start_min"])
    first, _ = ordered[0]
    start_min = first["session_start_min"]
    cells, at_min = [], start_min
    for row, model in ordered:
        pause_min = max(0.0, row["cell_start_min"] - at_min)
        cells.append(Cell(pause_min, row["cell_duration_min"], int(row["gpus"]), row["vram_gb"], model=model))
        at_min += pause_min + row["cell_duration_min"]
    return WorkloadSession(name, start_min, tuple(cells), max(at_min, first["session_stop_min"]))
