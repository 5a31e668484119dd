"""Figures of one job, folded from its events: counters, and how long chunks take."""

from __future__ import annotations

import bisect
import contextlib
import os
import tempfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sublet.jobs.core import JobEvent

BUCKETS_MS: Final = (0.01, 0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)


class Metrics:
    """What a job has done so far. Names as in the Prometheus text, without the prefix."""

    __slots__ = (
        "buckets",
        "chunks_failed",
        "chunks_retry_total",
        "chunks_returned",
        "chunks_skipped",
        "chunks_succeeded",
        "cpu_leases_active",
        "fuel",
        "tasklet_count",
        "tasklet_ms_sum",
    )

    def __init__(self) -> None:
        self.chunks_succeeded = 0
        self.chunks_skipped = 0
        self.chunks_failed = 0
        self.chunks_retry_total = 0
        self.chunks_returned = 0
        self.cpu_leases_active = 0
        self.fuel = 0
        """Fuel that WASM tasklets used."""
        self.buckets = [0] * (len(BUCKETS_MS) + 1)
        self.tasklet_count = 0
        self.tasklet_ms_sum = 0.0

    @property
    def chunks_done(self) -> int:
        """Finished: with a result (now or by an earlier run), or failed."""
        return self.chunks_succeeded + self.chunks_skipped + self.chunks_failed

    def on_event(self, event: JobEvent) -> None:
        """Count one event of the coordinator."""
        match event.what:
            case "done":
                self.chunks_succeeded += event.count
            case "skipped":
                self.chunks_skipped += event.count
            case "failed":
                self.chunks_failed += event.count
            case "retry":
                self.chunks_retry_total += event.count
            case "returned":
                self.chunks_returned += event.count
            case "leases":
                self.cpu_leases_active = event.count
            case _:
                pass

    def add_duration(self, took_ns: int, count: int) -> None:
        """So many chunks took so long together, one after the other."""
        each_ms = took_ns / count / 1e6
        self.buckets[bisect.bisect_left(BUCKETS_MS, each_ms)] += count
        self.tasklet_count += count
        self.tasklet_ms_sum += took_ns / 1e6

    def prometheus(self, job: str, total: int) -> str:
        """The Prometheus text format, for a textfile collector."""
        label = f'{{job="{_escaped(job)}"}}'
        lines = []
        for name, kind, text, value in (
            ("chunks_total", "gauge", "Chunks of the job that were read.", total),
            ("chunks_done", "gauge", "Chunks that are finished or failed.", self.chunks_done),
            ("chunks_failed", "gauge", "Chunks that failed.", self.chunks_failed),
            ("chunks_skipped", "gauge", "Chunks whose result an earlier run had stored.", self.chunks_skipped),
            ("chunks_retry_total", "counter", "Retries that were charged to chunks.", self.chunks_retry_total),
            ("cpu_leases_active", "gauge", "Leases the job holds.", self.cpu_leases_active),
            ("fuel_used_total", "counter", "Fuel that WASM tasklets used.", self.fuel),
        ):
            lines += [f"# HELP sublet_{name} {text}", f"# TYPE sublet_{name} {kind}", f"sublet_{name}{label} {value}"]
        lines += [
            "# HELP sublet_tasklet_duration_ms How long chunks take in a worker; of a batch its mean.",
            "# TYPE sublet_tasklet_duration_ms histogram",
        ]
        cumulative = 0
        for bound, count in zip((*map(str, BUCKETS_MS), "+Inf"), self.buckets, strict=True):
            cumulative += count
            lines.append(f'sublet_tasklet_duration_ms_bucket{{job="{_escaped(job)}",le="{bound}"}} {cumulative}')
        lines += [
            f"sublet_tasklet_duration_ms_sum{label} {self.tasklet_ms_sum:.3f}",
            f"sublet_tasklet_duration_ms_count{label} {self.tasklet_count}",
        ]
        return "\n".join(lines) + "\n"


def write_metrics(path: str, text: str) -> None:
    """Replace the file whole: a collector that reads it meanwhile sees the old text or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=".sublet-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
