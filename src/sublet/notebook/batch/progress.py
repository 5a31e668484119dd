"""The progress events of a runner."""

from __future__ import annotations

from typing import Any

from sublet.notebook.batch.job_states import JobRecord


class JobProgress:
    """Events of a run; a program overrides the methods for the events that it shows."""

    def begun(self, record: JobRecord, restored: int) -> None: ...

    def waiting(self, why: str) -> None: ...

    def cell(self, number: int, source: str) -> None: ...

    def cell_done(self, number: int, seconds: float, bill: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def again(self, number: int, why: str) -> None: ...

    def failed(self, number: int, traceback: str) -> None: ...
