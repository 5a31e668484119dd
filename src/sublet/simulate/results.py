"""The figures of a replayed workload, the same for the ledger and the models beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from typing import Any, Final

from sublet.lazy_dataclass import dataclass
from sublet.office.ledger.bills import Rates
from sublet.values import NS_PER_S, Kind, format_duration

AT_ONCE_NS: Final = 5 * NS_PER_S
HOUR_NS: Final = 3600 * NS_PER_S
DAY_NS: Final = 24 * HOUR_NS
LENGTHS_MIN: Final = ((5, "up to 5 min"), (30, "5 to 30 min"), (240, "30 min to 4 h"), (1440, "4 to 24 h"))
LONGEST: Final = "over 24 h"
SHARES: Final = (0.5, 0.95, 0.99)
"""Of the cells, whose wait is told."""
BINS: Final = 240
"""Points of the queue over time that are reported."""
_MICRO: Final = 1_000_000


@dataclass(slots=True)
class Result:
    """One workload on one number of GPUs under one way to share them."""

    name: str = "leases"
    gpus: int = 0
    sessions: int = 0
    cells: int = 0
    """That needed a GPU and started."""
    impossible: int = 0
    """Cells that need more GPUs, or more memory on one, than any node has; they are left out."""
    refused: int = 0
    """Cells that a quota will never let in; they are left out."""
    waits_ns: list[int] = field(default_factory=list)
    waits_paying_ns: list[int] = field(default_factory=list)
    """Of those, the waits of tenants that pay for priority."""
    waits_others_ns: list[int] = field(default_factory=list)
    warm: int = 0
    """Cells that found their GPUs still held."""
    preemptions: dict[str, int] = field(default_factory=dict)
    """By reason those under which a cell ran; "idle": leases that an idle holder gave up, which costs nothing."""
    moving_ns: int = 0
    """GPU × nanoseconds in which cells that were taken saved and restored."""
    held_ns: int = 0
    """GPU × nanoseconds, from grant to end."""
    held_by_model: dict[str, int] = field(default_factory=dict)
    paying_ns: int = 0
    """Of that, what was held by those that pay for priority."""
    used_ns: int = 0
    reserved_ns: int = 0
    """The same for whole-session reservation with as many GPUs as that would need."""
    notice_ns: int = 60 * NS_PER_S
    """Notice, and what it may take to clear a device."""
    done: list[tuple[str, int, int]] = field(default_factory=list)
    """Of each finished cell: tenant, run time alone, and time from the wish to the end."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(instant, by how much the queue grew), in the order of time."""
    stopped: bool = False
    """Too many cells had waited too long, and the rest was not run."""
    shared: bool = False
    """Whether cells had parts of devices."""
    start_ns: int = 0
    end_ns: int = 0
    finished_ns: int = 0
    """When the last cell was through, counted from the beginning."""
    fluid_ns: int = 0
    """Before which no policy could have been through with all cells that fit a node: the fluid bound."""
    planned_ns: int = 0
    """Until when the workload lasts if nothing waits."""
    commands: int = 0
    wall_s: float = 0.0

    def note_queue(self, at_ns: int, by: int) -> None:
        self.changes.append((at_ns, by))

    def note_held(self, held_ns: int, model: str) -> None:
        self.held_ns += held_ns
        self.held_by_model[model] = self.held_by_model.get(model, 0) + held_ns

    def note_wait(self, wait_ns: int, *, pays_priority: bool = False) -> None:
        self.waits_ns.append(wait_ns)
        (self.waits_paying_ns if pays_priority else self.waits_others_ns).append(wait_ns)

    def wait_s(self, share: float) -> float:
        """The wait that this share of the cells did not exceed."""
        return quantile_of(self.waits_ns, share) / NS_PER_S

    def start_within(self, bound_ns: int) -> float:
        """The share of cells that started within this time. One that was left out did not."""
        wanted = len(self.waits_ns) + self.impossible + self.refused
        return sum(wait <= bound_ns for wait in self.waits_ns) / max(1, wanted)

    @property
    def at_once(self) -> float:
        """The share of cells that started within five seconds."""
        return self.start_within(AT_ONCE_NS)

    @property
    def load(self) -> float:
        """Demand alone, per what all GPUs give in the time of the workload."""
        return (self.used_ns - self.moving_ns) / max(1, self.gpus * self.planned_ns)

    @property
    def bound_ns(self) -> int | None:
        """The fluid bound; None where a quota left out some of the work that it counts."""
        return None if self.refused else self.fluid_ns

    def slowdowns(self) -> list[tuple[str, int, float, float]]:
        """By length of cell: how many, and the median and p95 of time from wish to end per run time."""
        found: dict[str, list[float]] = {name: [] for name in (*(name for _, name in LENGTHS_MIN), LONGEST)}
        for _, run_ns, took_ns in self.done:
            minutes = run_ns / (60 * NS_PER_S)
            name = next((name for most, name in LENGTHS_MIN if minutes <= most), LONGEST)
            found[name].append(took_ns / run_ns)
        return [
            (name, len(values), quantile_of(values, 0.5), quantile_of(values, 0.95))
            for name, values in found.items()
            if values
        ]

    def speeds(self) -> dict[str, float]:
        """Run time per time from wish to end, of each tenant: 1 for one that never waited."""
        run: defaultdict[str, int] = defaultdict(int)
        took: defaultdict[str, int] = defaultdict(int)
        for tenant, run_ns, took_ns in self.done:
            run[tenant] += run_ns
            took[tenant] += took_ns
        return {tenant: run[tenant] / took[tenant] for tenant in run if took[tenant]}

    def jain(self) -> float:
        """Jain's index of the tenants' speeds: 1 if all are slowed down alike."""
        speeds = list(self.speeds().values())
        squares = sum(speed * speed for speed in speeds)
        return sum(speeds) ** 2 / (len(speeds) * squares) if squares else 1.0

    def worst(self) -> tuple[str, float]:
        """The tenant that was slowed down most, and how much."""
        tenant, speed = min(self.speeds().items(), key=lambda entry: (entry[1], entry[0]), default=("-", 1.0))
        return tenant, 1 / speed

    def queue(self, bins: int = BINS) -> list[tuple[float, float, int]]:
        """(hours since the start, mean, maximum) of the waiting requests, in intervals of one length."""
        span_ns = max(1, self.end_ns - self.start_ns)
        area, most = [0.0] * bins, [0] * bins
        at_ns, level = self.start_ns, 0
        for until_ns, by in [*self.changes, (self.end_ns, 0)]:
            _spread(
                area, most, (at_ns - self.start_ns) * bins / span_ns, (until_ns - self.start_ns) * bins / span_ns, level
            )
            at_ns, level = max(at_ns, until_ns), level + by
        return [(n * span_ns / bins / HOUR_NS, area[n], most[n]) for n in range(bins)]

    def figures(self, rates: Rates | None = None) -> dict[str, Any]:
        """All of it, for a JSON document."""
        worst, slowdown = self.worst()
        found: dict[str, Any] = {
            "name": self.name,
            "gpus": self.gpus,
            "sessions": self.sessions,
            "cells": self.cells,
            "impossible": self.impossible,
            "refused": self.refused,
            "gpu_hours": {
                "held": self.held_ns / HOUR_NS,
                "used": self.used_ns / HOUR_NS,
                "reserved": self.reserved_ns / HOUR_NS,
            },
            "load": self.load,
            "through_after_days": {
                "measured": self.finished_ns / DAY_NS,
                "fluid_bound": None if self.bound_ns is None else self.bound_ns / DAY_NS,
            },
            "start_within": {
                "at_once": self.at_once,
                "notice": self.start_within(self.notice_ns),
                "notice_s": self.notice_ns / NS_PER_S,
            },
            "wait_s": {"p50": self.wait_s(0.5), "p95": self.wait_s(0.95), "p99": self.wait_s(0.99)},
            "warm": self.warm / max(1, self.cells),
            "slowdown": [
                {"length": name, "cells": count, "p50": median, "p95": p95}
                for name, count, median, p95 in self.slowdowns()
            ],
            "preemptions": dict(sorted(self.preemptions.items())),
            "preemption_gpu_hours": self.moving_ns / HOUR_NS,
            "fairness": {"jain": self.jain(), "worst_tenant": worst, "worst_slowdown": slowdown},
            "queue": [
                {"hour": round(hour, 4), "mean": round(mean, 3), "most": most} for hour, mean, most in self.queue()
            ],
            "commands": self.commands,
            "seconds": self.wall_s,
        }
        if len(self.held_by_model) > 1:
            found["gpu_hours"]["held_by_model"] = {
                model: held_ns / HOUR_NS for model, held_ns in sorted(self.held_by_model.items())
            }
        if self.waits_paying_ns:
            by = {"paying": self.waits_paying_ns, "others": self.waits_others_ns}
            found["priority"] = {
                whose: {f"p{share * 100:.0f}": quantile_of(waits, share) / NS_PER_S for share in SHARES}
                for whose, waits in by.items()
            }
        if rates is not None:
            found["cost"] = {"amount": self.cost(rates), "currency": rates.currency}
        return found

    def cost(self, rates: Rates) -> float:
        """Of what was held, and of priority."""
        held = sum(ns * rates.of(Kind.GPU, model) for model, ns in self.held_by_model.items())
        return (held + self.paying_ns * (rates.priority or 0)) / HOUR_NS / _MICRO


def quantile_of(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _spread(area: list[float], most: list[int], start: float, stop: float, level: int) -> None:
    """Add a level that was held from start to stop, both counted in intervals."""
    if stop <= start or level == 0:
        return
    last = len(area) - 1
    for n in range(min(last, int(start)), min(last, int(stop)) + 1):
        part = min(stop, n + 1) - max(start, n)
        if part > 0:
            area[n] += level * part
            most[n] = max(most[n], level)


def compare(results: Sequence[Result], rates: Rates | None = None) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table with a column for each result."""

    def row(label: str, *cells: str) -> list[str]:
        return [label, *cells]

    def hours(ns: int) -> str:
        return f"{ns / HOUR_NS:,.0f}" if ns >= 100 * HOUR_NS else f"{ns / HOUR_NS:,.1f}"

    def seconds(value: float) -> str:
        return format_duration(round(value) * NS_PER_S) if value >= 1 else "0s"

    rows = [
        row("GPU-hours held", *(hours(r.held_ns) for r in results)),
        row("  of reservation", *(f"{r.held_ns / max(1, r.reserved_ns):.1%}" for r in results)),
        row("start at once (5 s)", *(f"{r.at_once:.1%}" for r in results)),
        row("start within a notice", *(f"{r.start_within(r.notice_ns):.1%}" for r in results)),
        *(row(f"wait p{share * 100:.0f}", *(seconds(r.wait_s(share)) for r in results)) for share in SHARES),
    ]
    if any(r.waits_paying_ns for r in results):
        for share in SHARES:
            cells = (
                " / ".join(seconds(quantile_of(w, share) / NS_PER_S) for w in (r.waits_paying_ns, r.waits_others_ns))
                if r.waits_paying_ns
                else "-"
                for r in results
            )
            rows.append(row(f"  p{share * 100:.0f}, paying / others", *cells))
    lengths = [name for _, name in LENGTHS_MIN] + [LONGEST]
    slow = [{name: (median, p95) for name, _, median, p95 in r.slowdowns()} for r in results]
    for name in lengths:
        if any(name in by for by in slow):
            cells = (f"{_ratio(by[name][0])} / {_ratio(by[name][1])}" if name in by else "-" for by in slow)
            rows.append(row(f"slowdown {name}", *cells))
    rows += [
        row("all through after, days", *(_days(r.finished_ns) for r in results)),
        row("  at least (fluid bound)", *(_days(r.bound_ns) for r in results)),
        row("cells preempted", *(f"{_taken(r):,}" for r in results)),
        row("  cost, GPU-hours", *(hours(r.moving_ns) for r in results)),
        row("Jain's index", *(f"{r.jain():.3f}" for r in results)),
        row("worst tenant's slowdown", *(_ratio(r.worst()[1]) for r in results)),
        row("queue, mean / most", *(_queue_text(r) for r in results)),
    ]
    if rates is not None:
        costs = (f"{r.cost(rates):,.2f}" for r in results)
        rows.append(row(f"cost ({rates.currency})", *costs))
    return ["", *(r.name for r in results)], rows


def _days(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / DAY_NS:.2f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _taken(result: Result) -> int:
    return sum(count for reason, count in result.preemptions.items() if reason != "idle")


def _queue_text(result: Result) -> str:
    points = result.queue()
    return f"{sum(mean for _, mean, _ in points) / len(points):.1f} / {max(most for _, _, most in points)}"
