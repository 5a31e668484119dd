"""Stories of a job's coordinator: one event per line, and what came of it.

``> AT take L1 2`` takes up to two chunks for lease L1, ``> AT L1 made ok raise flaky`` are outcomes of the next chunks
of its batch; ``> AT L1 lost worker begun`` (or ``lease``, ``memory``; ``queued``); ``publish``. ``L1-last`` is the
batch that L1 had before.
"""

from __future__ import annotations

from typing import Any, Final

from sublet.errors import LeaseRevoked, OutOfMemory, WorkerLost
from sublet.jobs import RetryPolicy
from sublet.jobs.chunks import Needs
from sublet.jobs.core import ChunkBatch, Coordinator, RunFailed, Works
from sublet.jobs.identity import ChunkId
from sublet.jobs.states import Cause
from sublet.values import format_duration, format_size, parse_duration_ns

__all__ = ["replayed"]

CAUSES: Final = {
    "worker": RunFailed(Cause.WORKER_LOST, WorkerLost("killed")),
    "lease": RunFailed(Cause.LEASE_LOST, LeaseRevoked("preempted")),
    "memory": RunFailed(Cause.OUT_OF_MEMORY, OutOfMemory("more")),
}
OUTCOMES: Final[dict[str, Any]] = {
    "ok": b"",
    "raise": RunFailed(Cause.RAISED, ValueError("no")),
    "flaky": RunFailed(Cause.RAISED_TRANSIENT, ConnectionError("later")),
}


class _Story:
    def __init__(self) -> None:
        self.core = Coordinator(RetryPolicy(3, "1s", "16s", 0.0), collect=True)
        self.batches: dict[str, list[ChunkBatch]] = {}
        self.put: list[Works] = []
        self.failures = 0

    def line(self, text: str) -> list[str]:
        at, *words = text.split()
        now_ns = parse_duration_ns(at, "time", zero_ok=True)
        match words:
            case ["chunks", count, *size]:
                memory = int(size[0].removesuffix("MiB")) << 20 if size else 0
                every = list(range(int(count)))
                keys = [ChunkId(n.to_bytes(16, "big")) for n in every]
                self.core.add(Works(keys, every, [()] * len(every), None, Needs(1, memory)))
                self.core.complete()
                return [f"{count} wait"]
            case ["job", "stops", "at", "the", "first", "failure"]:
                self.core = Coordinator(RetryPolicy(3, "1s", "16s", 0.0))
                return ["so be it"]
            case ["take", lease, most, *size]:
                memory = int(size[0].removesuffix("MiB")) << 20 if size else 0
                batch = self.core.take(lease, Needs(1, memory), int(most), now_ns)
                if batch is None:
                    return self._nothing(now_ns)
                self.batches.setdefault(lease, []).append(batch)
                return [f"{lease} has {', '.join(map(str, batch.works.indexes))}"]
            case [lease, "made", *outcomes]:
                batch = self.batches[lease][0]
                fresh = self.core.results(batch, [OUTCOMES[one] for one in outcomes], now_ns)
                self.put += [works for works, _ in fresh]
                if not batch.is_open and not lease.endswith("-last"):
                    self.batches.setdefault(f"{lease}-last", []).insert(0, self.batches[lease].pop(0))
                indexes = [str(index) for works, _ in fresh for index in works.indexes]
                return [f"{', '.join(indexes)} to be stored"] if fresh else ["nothing new"]
            case [lease, "lost", cause, "begun" | "queued" as how]:
                batch = self.batches[lease].pop(0)
                rest = batch.rest
                charged = {key: self.core.charges(key) for key in rest.keys}
                failed = len(self.core.failures)
                self.core.lost(batch, CAUSES[cause], begun=how == "begun", now_ns=now_ns)
                self.batches.setdefault(f"{lease}-last", []).insert(0, batch)
                given_up = {one.chunk for one in self.core.failures[failed:]}
                return [
                    f"{index}: {'charged' if is_charged else 'back in the queue'}"
                    for key, index in zip(rest.keys, rest.indexes, strict=True)
                    for is_charged in [key in given_up or self.core.charges(key) > charged[key]]
                ]
            case ["publish"]:
                self.core.published(self.put, now_ns)
                self.put.clear()
                return [f"{self.core.counts.succeeded} are stored"]
            case _:
                raise AssertionError(f"no such event: {text}")

    def _nothing(self, now_ns: int) -> list[str]:
        due_ns = self.core.next_due_ns()
        if due_ns is not None and due_ns > now_ns:
            return [f"nothing for {format_duration(due_ns - now_ns)}"]
        sizes = [f"a lease with {format_size(needs.memory)}" for needs in self.core.wanted() if needs.memory]
        return [f"nothing; wanted: {', '.join(sizes)}" if sizes else "nothing"]

    def told(self) -> list[str]:
        """Failures that are new."""
        new = self.core.failures[self.failures :]
        self.failures = len(self.core.failures)
        return [f"failed {one.reason}: {one.detail}" for one in new]


def replayed(told: str) -> str:
    """The story as it really goes. A line of dashes begins a new one."""
    story, lines = _Story(), []
    for line in told.splitlines():
        if line.startswith("> "):
            lines += [line, *(f"  {text}" for text in story.line(line[2:])), *(f"  {text}" for text in story.told())]
            story.core.check()
            if story.core.is_over:
                lines.append("  the job is over")
        elif not line.startswith("  "):
            lines.append(line)
            if line.startswith("# "):
                story = _Story()
    return "\n".join(lines) + "\n"
