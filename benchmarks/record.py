"""What a run found, written down: one JSON file per row, and one table made from all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Report

__all__ = ["FOLDER", "as_text", "write"]

FOLDER: Final = Path(__file__).parent / "results"
SCHEMA: Final = "sublet-benchmark/2"
_COLUMNS: Final = ("what", "ours", "peer", "ratio", "p10 to p90", "p99", "goal", "")


def write(report: Report, folder: Path = FOLDER) -> Path:
    """The row's own file, then the table of all rows again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report.row}.json"
    path.write_text(json.dumps(to_dict(report), indent=2, ensure_ascii=False) + "\n")
    found = [json.loads(one.read_text()) for one in sorted(folder.glob("*.json"))]
    (folder / "README.md").write_text(table([one for one in found if one.get("schema") == SCHEMA]))
    return path


def to_dict(report: Report) -> dict[str, Any]:
    made = {"schema": SCHEMA, **asdict(report)}
    for verdict, judged in zip(made["verdicts"], report.verdicts, strict=True):
        verdict["said"] = judged.said
    rounded: dict[str, Any] = _rounded(made)
    return rounded


def as_text(report: Report) -> str:
    """One row, for the terminal."""
    return "\n".join(_section(to_dict(report))) + "\n"


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """The page that people read."""
    lines = [
        "# Results",
        "",
        "Made by `python -m benchmarks`; do not edit. Medians, ours and the peer measured alternately in one run. A",
        "ratio says how many times better ours is (above 1), its spread is that of the pairs; for a figure without a",
        "peer the spread is that of the samples. p99 is over single operations, reported and not promised. A goal is",
        "judged on medians. Where the time of a lease goes, and what bounds it, is in [speed](../../docs/speed.md).",
        "",
    ]
    for report in reports:
        lines += [*_section(report), ""]
    return "\n".join(lines)


def _section(report: Mapping[str, Any]) -> list[str]:
    lines = [f"## {report['row']}: {report['title']}", ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    by_figure: dict[str, list[Mapping[str, Any]]] = {}
    for verdict in report["verdicts"]:
        by_figure.setdefault(verdict["goal"]["figure"], []).append(verdict)
    for found in report["figures"]:
        lines.append(_line(found, by_figure.pop(found["name"], [])))
    for name, verdicts in by_figure.items():
        goals, said = _goals(verdicts, "")
        lines.append(f"| {name} | not measured | | | | | {goals} | {said} |")
    lines += ["", _about(report)]
    lines += ["", *(f"- {note}" for note in report["notes"])] if report["notes"] else []
    return lines


def _line(found: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> str:
    unit, ours, peer, comparison = found["unit"], found["ours"], found["peer"], found["comparison"]
    if comparison:
        ratio = times(comparison["ratio"])
        spread = f"{times(comparison['p10'])} to {times(comparison['p90'])}"
    else:
        ratio, spread = "", f"{number(ours['p10'])} to {number(ours['p90'])}" if ours["n"] > 1 else ""
    tails = [number(side["p99"]) for side in (ours, peer) if side and side["p99"] is not None]
    goals, said = _goals(verdicts, unit)
    theirs = f"{number(peer['median'])} ({found['peer_name']})" if peer else ""
    cells = (f"{found['name']}, {unit}", number(ours["median"]), theirs, ratio, spread, " / ".join(tails), goals, said)
    return f"| {' | '.join(cells)} |"


def _goals(verdicts: Sequence[Mapping[str, Any]], unit: str) -> tuple[str, str]:
    goals, said = [], []
    for verdict in verdicts:
        goal = verdict["goal"]
        bound = f"≤ {number(goal['at_most'])}" if goal["at_most"] is not None else f"≥ {number(goal['at_least'])}"
        of = {"ours": f" {unit}", "ratio": "×", "difference": f" {unit} over the peer"}[goal["of"]]
        goals.append(bound + of)
        value = verdict["value"]
        shown = f" ({number(value)} {unit})" if goal["of"] == "difference" and value is not None else ""
        said.append(f"**{verdict['said']}**{shown}")
    return "; ".join(goals), "; ".join(said)


def _about(report: Mapping[str, Any]) -> str:
    machine, disk = report["machine"], report["disk"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    quick = " **A short look, not a measurement.**" if report["quick"] else ""
    memory, busy = machine["memory_bytes"] / 2**30, report["busy_during"]
    return (
        f"{report['measured_at']}, sublet {report['sublet']}, {report['took_s']:.0f} s. {machine['cores']} cores "
        f"({machine['cpu']}), {memory:.0f} GiB, Linux {machine['kernel']}, {disk['filesystem']} with fsync in "
        f"{disk['fsync_us']:.0f} µs; {busy:.2f} cores busy with other things. Versions: {versions}.{quick}"
    )


def times(value: float | None) -> str:
    """A ratio; a peer or a side that used nothing at all has none."""
    return "no bound" if value is None else f"{number(value)}×"


def number(value: float) -> str:
    """Three digits that matter, thousands set apart."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    """Five significant digits: more would be noise in the file's history. JSON knows no infinity."""
    match value:
        case float():
            return float(f"{value:.5g}") if math.isfinite(value) else None
        case dict():
            return {key: _rounded(one) for key, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
        case _:
            return value
