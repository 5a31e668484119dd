"""Draws a burst as SVG from the job's own events: leases over time, and chunks done."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from sublet.values import NS_PER_S, format_duration

if TYPE_CHECKING:
    from sublet.jobs.session import JobResult

WIDTH: Final = 760
HEIGHT: Final = 340
LEFT: Final = 56
RIGHT: Final = 72
TOP: Final = 64
BOTTOM: Final = 48
TICKS: Final = 5
LEASES: Final = "#2563a8"
CHUNKS: Final = "#b45309"
TEXT: Final = f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12"'
DASHED: Final = 'stroke-dasharray="6 3" stroke-linejoin="round"'
_NICE: Final = (1, 2, 5)

Point = tuple[int, int, int]
"""(nanoseconds since the start, leases held, chunks done)."""


def picture(result: JobResult) -> str:
    """The whole SVG document. Leases step up and down on the left axis, finished chunks rise on the right one."""
    total = result.chunks_succeeded + result.chunks_failed + result.chunks_skipped
    end_ns = max(1, round(result.duration_s * NS_PER_S), *(at for at, _, _ in result.history))
    points: list[Point] = [(0, 0, 0), *result.history, (end_ns, 0, total)]
    return _drawn(points, result.name, total, result.leases_most, result.retries, end_ns)


def _drawn(points: Sequence[Point], name: str, total: int, most: int, retries: int, end_ns: int) -> str:
    lease_top, chunk_top = _axis_end(max(1, most)), _axis_end(max(1, total))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at_ns: int) -> float:
        return LEFT + wide * at_ns / end_ns

    def y(value: float, top: int) -> float:
        return TOP + high * (1 - value / top)

    leases = [(x(0), y(0, lease_top))]
    for at_ns, held, _ in points:
        leases += [(x(at_ns), leases[-1][1]), (x(at_ns), y(held, lease_top))]
    chunks = [(x(at_ns), y(done, chunk_top)) for at_ns, _, done in points]
    area = [*leases, (leases[-1][0], y(0, lease_top)), (LEFT, y(0, lease_top))]
    retried = f", {retries} retried" if retries else ""
    title = f"{name}: {total} chunks on up to {most} leases in {format_duration(end_ns)}{retried}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {TEXT} role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#111827">{escape(title)}</text>',
        _key(LEFT, "leases held", LEASES),
        _key(LEFT + 120, "chunks finished", CHUNKS),
    ]
    for n in range(TICKS + 1):
        share = n / TICKS
        line_y = TOP + high * (1 - share)
        parts += [
            f'<line x1="{LEFT}" y1="{line_y:.1f}" x2="{LEFT + wide}" y2="{line_y:.1f}" stroke="#e5e7eb"/>',
            _label(LEFT - 8, line_y + 4, _number(lease_top * share), LEASES, "end"),
            _label(LEFT + wide + 8, line_y + 4, _number(chunk_top * share), CHUNKS, "start"),
        ]
    for at_ns in _moments(end_ns):
        parts.append(_label(x(at_ns), TOP + high + 20, f"{at_ns / NS_PER_S:g}", "#4b5563", "middle"))
    parts += [
        f'<polygon points="{_points(area)}" fill="{LEASES}" fill-opacity="0.12"/>',
        f'<polyline points="{_points(leases)}" fill="none" stroke="{LEASES}" stroke-width="2"/>',
        f'<polyline points="{_points(chunks)}" fill="none" stroke="{CHUNKS}" stroke-width="2" {DASHED}/>',
        _label(LEFT + wide / 2, HEIGHT - 8, "seconds since the first request", "#4b5563", "middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axis_end(most: int) -> int:
    """The smallest round number that is not below ``most`` and divides well into the ticks."""
    scale = 1
    while True:
        for nice in _NICE:
            if nice * scale * TICKS >= most:
                return nice * scale * TICKS if most > TICKS else TICKS
        scale *= 10


def _key(x: float, text: str, colour: str) -> str:
    return (
        f'<rect x="{x}" y="36" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="{x + 18}" y="46" fill="#111827">{text}</text>'
    )


def _label(x: float, y: float, text: str, colour: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u2009")


def _moments(end_ns: int) -> list[int]:
    """Round times from the start to the end, not more than there are ticks."""
    step_ns = 1_000_000
    while True:
        for nice in _NICE:
            if nice * step_ns * (TICKS + 1) > end_ns:
                return [n * nice * step_ns for n in range(end_ns // (nice * step_ns) + 1)]
        step_ns *= 10


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
