"""The harness's end of the pipe to a load generator."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from benchmarks.load.closed import ClosedSample
from benchmarks.load.http1 import Address, Step
from benchmarks.load.paced import Due, PacedSample
from benchmarks.procs import Child

__all__ = ["ClosedGenerator", "LoadFailed", "PacedGenerator"]


class LoadFailed(Exception):
    """The generator got an answer that the script does not allow; nothing it measured counts."""


class _Generator:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.child = Child([sys.executable, "-m", "benchmarks.load"], name="load generator", pipes=True)
        try:
            self._tell(spec)
        except BaseException:
            self.child.end()
            raise

    def close(self) -> None:
        """End the process, and with it its connections."""
        self.child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, message: dict[str, Any]) -> dict[str, Any]:
        line = self.child.ask(json.dumps(message))
        if not line:
            raise LoadFailed(f"the load generator ended: {self.child.complaint()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LoadFailed(answer["error"])
        return answer


class ClosedGenerator(_Generator):
    """So many clients, each with values of its own, repeating a cycle."""

    def __init__(self, address: Address, steps: Sequence[Step], clients: Sequence[Mapping[str, str]]) -> None:
        super().__init__(
            {
                "kind": "closed",
                "address": asdict(address),
                "steps": [asdict(step) for step in steps],
                "clients": [dict(own) for own in clients],
            }
        )

    def run(self, seconds: float, *, cycles_max: int | None = None, keep_taken: bool = False) -> ClosedSample:
        answer = self._tell({"seconds": seconds, "cycles_max": cycles_max, "keep_taken": keep_taken})
        return ClosedSample(**answer["sample"])


class PacedGenerator(_Generator):
    """A schedule of requests, repeated every period."""

    def __init__(self, address: Address, schedule: Sequence[Due], *, connections: int) -> None:
        super().__init__(
            {
                "kind": "paced",
                "address": asdict(address),
                "schedule": [asdict(due) for due in schedule],
                "connections": connections,
            }
        )

    def run(self, seconds: float) -> PacedSample:
        return PacedSample(**self._tell({"seconds": seconds})["sample"])
