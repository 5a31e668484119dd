"""Draws the planner's figures as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, log10
from typing import Final, NamedTuple

from sublet.simulate.find import Answer, Point
from sublet.simulate.results import HOUR_NS, Result
from sublet.values import NS_PER_S

WIDTH: Final = 760
HEIGHT: Final = 380
LEFT: Final = 72
RIGHT: Final = 150
TOP: Final = 56
BOTTOM: Final = 52
COLOURS: Final = ("#2563a8", "#b45309", "#15803d", "#7c3aed", "#be123c", "#0e7490", "#4b5563")
DASHES: Final = ("", "6 3", "2 3", "8 3 2 3", "10 4", "4 4", "1 3")
WAITS_S: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 10800, 36000)
_WAIT_TEXT: Final = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36000: "10 h"}
DOTTED: Final = 'stroke-dasharray="1 4"'
_NICE: Final = (1, 1.5, 2, 3, 4, 5, 6, 8)


class PlotLine(NamedTuple):
    """One line of a plot. The points' x and y are shares of the axes, from 0 to 1."""

    name: str
    points: Sequence[tuple[float, float]]


def waits(results: Sequence[Result]) -> str:
    """The share of cells that started within a time, of each result."""
    low, high = log10(WAITS_S[0]), log10(WAITS_S[-1])

    def x(seconds: float) -> float:
        return (log10(seconds) - low) / (high - low)

    floor = min(result.start_within(WAITS_S[0] * NS_PER_S) for result in results)
    base = min(0.9, int(floor * 10) / 10)
    lines = [
        PlotLine(
            result.name, [(x(s), max(0.0, (result.start_within(s * NS_PER_S) - base) / (1 - base))) for s in WAITS_S]
        )
        for result in results
    ]
    ticks_x = [(x(seconds), text) for seconds, text in _WAIT_TEXT.items()]
    ticks_y = [(n / 5, f"{base + (1 - base) * n / 5:.0%}") for n in range(6)]
    title = f"Cells that start within a time, {results[0].gpus} GPUs"
    return _plot(title, lines, ticks_x, ticks_y, "wait", "share of cells")


def queue(results: Sequence[Result]) -> str:
    """Waiting requests over time, of each result; as long as the workload lasts where nothing waits."""
    hours = max(1e-9, max(result.planned_ns for result in results) / HOUR_NS)
    curves = [(result.name, [(hour, mean) for hour, mean, _ in result.queue() if hour <= hours]) for result in results]
    top = _axis_end(max((mean for _, points in curves for _, mean in points), default=1.0))
    lines = [PlotLine(name, [(hour / hours, mean / top) for hour, mean in points]) for name, points in curves]
    step = _axis_end(hours / 6)
    ticks_x = [(n * step / hours, f"{n * step:g}") for n in range(int(hours / step) + 1)]
    ticks_y = [(n / 5, f"{top * n / 5:g}") for n in range(6)]
    title = f"Requests that wait, {results[0].gpus} GPUs"
    return _plot(title, lines, ticks_x, ticks_y, "hours", "requests")


def gpu_hours(results: Sequence[Result]) -> str:
    """GPU-hours held, of each result, with what cells used of them."""
    top = _axis_end(max(result.held_ns for result in results) / HOUR_NS or 1.0)
    wide, high = (WIDTH - LEFT - 24) / len(results), HEIGHT - TOP - BOTTOM
    parts = _frame(f"GPU-hours held (dark: used), {results[0].gpus} GPUs", WIDTH - 24)
    for n in range(6):
        parts += _grid(n / 5, f"{top * n / 5:g}", WIDTH - 24)
    for n, result in enumerate(results):
        x = LEFT + wide * (n + 0.2)
        for ns, colour in ((result.held_ns, "#93b8dd"), (min(result.used_ns, result.held_ns), COLOURS[0])):
            tall = high * ns / HOUR_NS / top
            y = TOP + high - tall
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide * 0.6:.1f}" height="{tall:.1f}" fill="{colour}"/>'
            )
        middle = x + wide * 0.3
        held_y = TOP + high * (1 - result.held_ns / HOUR_NS / top) - 6
        parts.append(_text(middle, held_y, f"{result.held_ns / HOUR_NS:,.0f}", "middle", "#111827"))
        parts.append(_text(middle, HEIGHT - BOTTOM + 20, result.name, "middle"))
    return "\n".join([*parts, "</svg>\n"])


def curve(answer: Answer) -> str:
    """The share that starts in time by number of GPUs, with its interval, the goal, and the answer."""
    points, goal = answer.points, answer.goal
    most = points[-1].gpus
    shown = [p for p in points if p.gpus <= max(2 * answer.gpus, 8)] or list(points)
    last = max(2, min(most, shown[-1].gpus))
    high = HEIGHT - TOP - BOTTOM

    def at(gpus: int, share: float) -> tuple[float, float]:
        return gpus / last, share

    def place(gpus: int, share: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * gpus / last:.1f},{TOP + high * (1 - share):.1f}"

    runs: list[list[Point]] = [[]]
    for p in shown:  # nothing is drawn between points where a run was stopped and so only its bound is known
        if p.stopped:
            runs.append([])
        else:
            runs[-1].append(p)
    step = max(1, round(_axis_end(last / 8)))
    ticks_x = [(n / last, str(n)) for n in range(0, last + 1, step)]
    ticks_y = [(n / 5, f"{n / 5:.0%}") for n in range(6)]
    lines = [
        PlotLine("mean of seeds", [at(p.gpus, p.mean) for p in runs[-1]]),
        PlotLine(f"goal: {goal.share:.0%}", [(0.0, goal.share), (1.0, goal.share)]),
    ]
    under: list[str] = []
    for run in runs:
        band = [place(p.gpus, p.interval[1]) for p in run] + [place(p.gpus, p.interval[0]) for p in reversed(run)]
        under.append(f'<polygon points="{" ".join(band)}" fill="{COLOURS[0]}" fill-opacity="0.15"/>')
        means = " ".join(place(p.gpus, p.mean) for p in run)
        under.append(f'<polyline points="{means}" fill="none" stroke="{COLOURS[0]}" stroke-width="2"/>')
    for p in shown:
        x, y = place(p.gpus, p.mean).split(",")
        if p.stopped:
            under.append(f'<line x1="{x}" y1="{y}" x2="{x}" y2="{TOP + high}" stroke="{COLOURS[0]}" {DOTTED}/>')
        else:
            under.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{COLOURS[0]}"/>')
    x, y = place(answer.gpus, goal.share).split(",")
    under.append(f'<circle cx="{x}" cy="{y}" r="6" fill="none" stroke="#be123c" stroke-width="2"/>')
    within = f"{goal.bound_ns / NS_PER_S:g} s"
    title = f"{answer.gpus} GPUs: {goal.share:.0%} of the cells start within {within}"
    return _plot(title, lines, ticks_x, ticks_y, "GPUs", f"started within {within}", under)


def _plot(
    title: str,
    lines: Sequence[PlotLine],
    ticks_x: Sequence[tuple[float, str]],
    ticks_y: Sequence[tuple[float, str]],
    label_x: str,
    label_y: str,
    under: Sequence[str] = (),
) -> str:
    wide, high, right = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM, WIDTH - RIGHT
    parts = _frame(title, right)
    for share, text in ticks_y:
        parts += _grid(share, text, right)
    for share, text in ticks_x:
        parts.append(_text(LEFT + wide * share, HEIGHT - BOTTOM + 18, text, "middle"))
    parts.append(_text(LEFT + wide / 2, HEIGHT - 10, label_x, "middle"))
    parts.append(_text(LEFT - 58, TOP - 12, label_y, "start"))
    parts += under
    for n, line in enumerate(lines):
        colour, dash = COLOURS[n % len(COLOURS)], DASHES[n % len(DASHES)]
        points = " ".join(f"{LEFT + wide * x:.1f},{TOP + high * (1 - y):.1f}" for x, y in line.points)
        style = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        y = TOP + 10 + 20 * n
        parts.append(f'<line x1="{right + 12}" y1="{y}" x2="{right + 36}" y2="{y}" {style}/>')
        parts.append(_text(right + 42, y + 4, line.name, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _frame(title: str, right: int) -> list[str]:
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    bottom = HEIGHT - BOTTOM
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#111827">{escape(title)}</text>',
        f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#9ca3af"/>',
    ]


def _grid(share: float, text: str, right: int) -> list[str]:
    y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e5e7eb"/>'
    return [line, _text(LEFT - 8, y + 4, text, "end")]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#4b5563") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _axis_end(value: float) -> float:
    if value <= 0:
        return 1.0
    size: float = 10.0 ** (ceil(log10(value)) - 1)
    return next((nice * size for nice in _NICE if nice * size >= value), 10 * size)
