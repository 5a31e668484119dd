"""The office's Prometheus metrics.

A registry of its own, so that two offices in one process (tests) or a program with metrics of its own do not mix.
Labels are few and closed: kind, tier, reason, code, limit. No lease id, no tenant and no secret is ever a label, for a
metrics page is read by more people than a lease is. What is a level (queue length, held devices) is read when a scraper
asks and costs nothing otherwise. prometheus_client, which brings an HTTP server of its own, is imported by the first
the caller: most offices end without ever having been asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import accumulate
from typing import TYPE_CHECKING

from sublet.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from sublet.wire.http_views import EstimatesView, TroubleView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COMMIT_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0)
_BATCH = (1, 2, 5, 10, 20, 50, 100, 500, 2000)
_WAIT_S = (0.01, 0.1, 1, 5, 15, 60, 300, 900, 3600, 14400)
TEARDOWN_STEPS = {
    "told": "the grace that guests took to leave",
    "killing": "ending those that had not left",
    "verifying": "seeing that nothing is left",
    "scrubbing": "overwriting its memory",
}
"""As agents report them."""
_TEARDOWN_S = (0.001, 0.01, 0.05, 0.2, 1, 2, 5, 15, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The levels at one moment."""

    queued: int
    live: dict[str, int]
    """Leases granted and not yet ended, by kind."""
    quarantined: int
    """Slices and devices that are not lent."""
    lost: int
    """Devices that their node does not have any more, or whose node does not answer."""
    streams: int
    """Open event streams."""
    commits: int
    gpu_seconds: float
    """Device time held since the office started, running leases included."""
    capacity: dict[str, int] = field(default_factory=dict)
    """By kind, in bytes or cores."""
    used: dict[str, int] = field(default_factory=dict)
    """By kind: leased, in teardown or quarantined."""
    troubles: tuple[TroubleView, ...] = ()
    """What has failed in background loops."""
    supervisor_silent_s: float = 0.0
    """For how long the supervisor has answered nothing."""
    budgets: dict[str, int] = field(default_factory=dict)
    """Budgets, by how far they are used."""
    estimates: EstimatesView | None = None
    """How good the estimates were of the last requests that waited."""
    disk_short: bool = False
    """Whether new leases are refused because the disk is full."""


class Count:
    """A number that only rises, for each combination of label values.

    A dictionary, and no more: prometheus_client's own counter takes a lock and looks its child up at every step, and a
    lease meets a dozen of them in its life. One loop counts here, so nothing is shared.
    """

    __slots__ = ("_by_labels", "_labels", "_name", "_text")

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._by_labels: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def inc(self, *values: str) -> None:
        """One more, with these values of the labels."""
        self.add(1, *values)

    def add(self, amount: int, *values: str) -> None:
        """So many more."""
        self._by_labels[values] = self._by_labels.get(values, 0) + amount

    def family(self) -> Metric:
        """As Prometheus reads it."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in sorted(self._by_labels.items()):
            family.add_metric(values, count)
        return family


class Spread:
    """How often a measured value fell between which bounds."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        """As Prometheus reads it: each bound with all that lies at or below it."""
        from prometheus_client.core import HistogramMetricFamily

        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


def metrics_page(families: Callable[[], Iterator[Metric]]) -> bytes:
    """The text that Prometheus reads."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Page(Collector):
        collect = staticmethod(families)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Page())
    return generate_latest(registry)


class OfficeMetrics:
    """The counters, and the page."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read
        self._counted: list[Count | Spread] = []

        def counter(name: str, text: str, *labels: str) -> Count:
            made = Count(f"sublet_{name}", text, *labels)
            self._counted.append(made)
            return made

        def spread(name: str, text: str, bounds: Sequence[float]) -> Spread:
            made = Spread(f"sublet_{name}", text, bounds)
            self._counted.append(made)
            return made

        self.grants = counter("grants", "Leases granted.", "kind", "tier")
        self.refusals = counter("refusals", "Requests refused.", "code")
        self.places = counter("queue_places", "Requests that were given a place in the queue.")
        self.ends = counter("ends", "Leases ended, and why.", "kind", "reason")
        self.renewals = counter("renewals", "Renewals that moved a deadline.")
        self.notices = counter("notices", "Notices given.", "reason")
        self.budgets_reached = counter("budgets_reached", "Times a budget was warned or used_up.", "level")
        self.parkings = counter(
            "parkings", "Devices taken from guests: parked, saved, not_saved; and resumed, of those parked.", "outcome"
        )
        self.limits = counter("limits_hit", "Times a named limit was reached.", "limit")
        self.lagged = counter("events_lagged", "Event streams that were too slow and lost events.")
        self.quarantines = counter("quarantines", "Slices or devices that were quarantined.")
        self.commit_seconds = spread("commit_seconds", "Time of one commit of the journal.", _COMMIT_S)
        self.commit_events = spread("commit_events", "Facts in one commit.", _BATCH)
        self.wait_seconds = spread("wait_seconds", "From request to grant.", _WAIT_S)
        self.estimate_error = spread(
            "estimate_error_seconds", "Between the wait that was estimated at the request, and the wait.", _WAIT_S
        )
        self.teardown_seconds = spread("teardown_seconds", "From the end to verified or quarantined.", _TEARDOWN_S)
        self.launches = counter("launches", "Kernels launched by sessions, and those of frameworks that were counted.")
        self.uncounted = counter(
            "uncounted_leases",
            "Leases of devices on which a framework or a command ran whose launches were not counted.",
        )
        self.launch_errors = counter("launch_errors", "Operations of sessions that failed, launches among them.")
        self.fuel = counter("fuel_used", "Fuel that WASM tasklets used, of leases that were torn down.")
        self.device_bytes = counter("device_bytes", "Bytes moved by sessions.", "way")
        self.vram_byte_seconds = counter("vram_byte_seconds", "Device memory allocated through Sublet, times how long.")
        self.teardown_steps = {
            step: spread(f"teardown_{step}_seconds", f"Of the teardown of a device: {text}.", _TEARDOWN_S)
            for step, text in TEARDOWN_STEPS.items()
        }

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return metrics_page(self._families)

    def _families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        yield from (one.family() for one in self._counted)
        now = self._read()
        yield GaugeMetricFamily("sublet_queue_length", "Requests waiting.", value=now.queued)
        yield GaugeMetricFamily("sublet_quarantined", "Slices and devices that are not lent.", value=now.quarantined)
        yield GaugeMetricFamily("sublet_lost", "Devices that are gone, or whose node is.", value=now.lost)
        yield GaugeMetricFamily("sublet_event_streams", "Open event streams.", value=now.streams)
        yield GaugeMetricFamily(
            "sublet_supervisor_silent_seconds",
            "For how long the supervisor has answered nothing: no deadline is enforced meanwhile.",
            value=now.supervisor_silent_s,
        )
        yield GaugeMetricFamily(
            "sublet_disk_short", "1 while new leases are refused because the disk is full.", value=now.disk_short
        )
        yield CounterMetricFamily("sublet_commits", "Commits of the journal.", value=now.commits)
        yield CounterMetricFamily(
            "sublet_gpu_seconds", "Device time held, in devices times seconds.", value=now.gpu_seconds
        )
        for name, text, amounts in (
            ("sublet_live_leases", "Leases granted and not yet ended.", now.live),
            ("sublet_capacity", "What is there, in bytes or cores.", now.capacity),
            ("sublet_used", "What is not free, in bytes or cores.", now.used),
            ("sublet_budgets", "Budgets: open, warned (80 % are used) or used_up.", now.budgets),
        ):
            family = GaugeMetricFamily(name, text, labels=["level" if amounts is now.budgets else "kind"])
            for label, amount in sorted(amounts.items()):
                family.add_metric([label], amount)
            yield family
        if now.estimates is not None:
            errors = GaugeMetricFamily(
                "sublet_estimate_error_quantile_seconds",
                "Between the estimated and the actual wait, of the last requests that waited.",
                labels=["quantile"],
            )
            errors.add_metric(["0.5"], now.estimates.median_error)
            errors.add_metric(["0.9"], now.estimates.p90_error)
            yield errors
        failures = CounterMetricFamily(
            "sublet_background_failures",
            "Failures of background loops: shortage (descriptors, memory, processes) or error.",
            labels=["part", "loop", "kind"],
        )
        failing = GaugeMetricFamily(
            "sublet_background_failing", "Background loops that do not work now.", labels=["part", "loop"]
        )
        for one in now.troubles:
            failures.add_metric([one.part, one.loop, "shortage"], one.shortages)
            failures.add_metric([one.part, one.loop, "error"], one.errors)
            failing.add_metric([one.part, one.loop], one.failing)
        yield failures
        yield failing
