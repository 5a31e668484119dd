"""Shows running notebooks: a line for each cell, a table of jobs, the notebook to continue with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

from sublet.cli.progress_line import LiveLine
from sublet.cli.show import Json, paint, plural, seconds, table, visible
from sublet.errors import NotFound, SubletError
from sublet.invocation import typeable
from sublet.notebook.batch.job_options import in_words
from sublet.notebook.batch.job_states import JobRecord
from sublet.notebook.batch.jobs import Job
from sublet.notebook.batch.page import bill_parts, first_line
from sublet.notebook.batch.progress import JobProgress


class ProgressLines(JobProgress):
    """Progress on a terminal: a line for each cell that is done, and one below it that counts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._cells = job.record().cells
        self._line = LiveLine(sys.stdout)
        self._source = ""

    def __enter__(self) -> Self:
        spec = self._job.spec()
        words = in_words(spec.leases)
        print(f"{paint(visible(spec.name), 'bold')}, {plural(self._cells, 'cell')}{', ' if words else ''}{words}")
        self._line.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.__exit__(kind, error, trace)

    def begun(self, record: JobRecord, restored: int) -> None:
        self._cells = record.cells
        if record.done:
            self._line.print_above(f"goes on from cell {record.done + 1}, with {plural(restored, 'variable')} restored")

    def waiting(self, why: str) -> None:
        self._line.set(lambda waited: f"{why} ({waited:.0f}s)" if waited >= 1 else why)

    def cell(self, number: int, source: str) -> None:
        self._source = first_line(source)
        if self._line.live:
            self._line.set(lambda ran: f"[{number}/{self._cells}] {self._source}  {ran:.0f}s")

    def cell_done(self, number: int, seconds: float, bill: dict[str, Any]) -> None:
        parts = " · ".join(bill_parts(bill))
        device = paint(f"  {parts}", "dim") if parts else ""
        if number == self._cells and self._line.live:
            self._line.set(lambda _waited: "gives its leases back, writes the page")
        self._line.print_above(
            f"{paint('ok', 'green')}   {self._at(number)} {seconds:6.2f}s  {visible(self._source)}{device}"
        )

    def note(self, text: str) -> None:
        self._line.print_above(visible(text))

    def again(self, number: int, why: str) -> None:
        self._line.print_above(f"{paint('again', 'yellow')}{self._at(number)}          {visible(why)}")

    def failed(self, number: int, traceback: str) -> None:
        self._line.print_above(f"{paint('fail', 'red')} {self._at(number)}          {visible(self._source)}")
        if traceback:
            sys.stdout.flush()
            sys.stderr.write(traceback if sys.stderr.isatty() else _plain(traceback))
            sys.stderr.write("\n")

    def end(self, record: JobRecord) -> None:
        """After the last cell."""
        if record.unsaved:
            self._line.print_above(f"not saved with the variables: {visible('; '.join(record.unsaved))}")

    def _at(self, number: int) -> str:
        width = len(str(self._cells))
        return f"[{number:{width}}/{self._cells}]"


def as_document(job: Job) -> Json:
    """A job as programs see it."""
    spec, record = job.spec(), job.record()
    return {
        "id": job.id,
        "name": spec.name,
        "state": str(record.state),
        "notebook": spec.notebook,
        "lease": spec.lease,
        "tier": None if spec.leases.tier is None else str(spec.leases.tier),
        "parameters": list(spec.parameters),
        "cells": record.cells,
        "done": record.done,
        "runs": record.runs,
        "again": record.again,
        "pid": job.runner or None,
        "message": record.message,
        "do": record.do,
        "unsaved": list(record.unsaved),
        "exit_code": record.exit_code,
        "submitted_at": _at(spec.submitted_wall_ns),
        "changed_at": _at(record.changed_wall_ns),
        "folder": str(job.folder),
    }


def for_people(jobs: Sequence[Job]) -> str:
    """All of them."""
    rows = []
    for job in reversed(jobs):
        try:
            spec, record = job.spec(), job.record()
        except SubletError as error:
            rows.append([job.id, "?", "damaged", "", "", error.message])
            continue
        rows.append(
            [job.id, spec.name, str(record.state), f"{record.done}/{record.cells}", _ago(record), record.message]
        )
    if not rows:
        return typeable("No notebook was submitted. `sublet nb submit NOTEBOOK` submits one.")
    return table(["JOB", "NAME", "STATE", "CELLS", "SINCE", ""], rows)


def one_for_people(job: Job) -> str:
    """One of them, with everything there is to say."""
    spec, record = job.spec(), job.record()
    lines = [
        f"{paint(f'job {job.id}', 'bold')}  {visible(spec.name)}: {record.state}, {record.done} of {record.cells} cells"
    ]
    if record.message:
        lines.append(f"  {visible(typeable(record.message))}")
    if record.do:
        lines.append(f"  {visible(typeable(record.do))}")
    words = in_words(spec.leases)
    lines.append(f"  notebook   {visible(spec.notebook)}")
    if words:
        lines.append(f"  asks for   {words}")
    if spec.parameters:
        lines.append(f"  parameters {visible(' '.join(spec.parameters))}")
    if record.again or record.runs > 1:
        lines.append(f"  runners    {record.runs}, cells run again {record.again}")
    if record.unsaved:
        lines.append(f"  not saved  {visible('; '.join(record.unsaved))}")
    lines += [f"  {text}" for text in _cells_of(job)]
    lines.append(f"  since      {_ago(record)}; what it says is in {visible(str(job.log))}")
    return "\n".join(lines)


def _cells_of(job: Job) -> list[str]:
    from sublet.notebook.batch.prepare import code_cells, read_notebook

    lines = []
    with contextlib.suppress(SubletError):
        notebook = read_notebook(job.executed if job.executed.exists() else job.notebook)
        done = job.record().done
        for number, at in enumerate(code_cells(notebook), 1):
            cell = notebook.cells[at]
            found = cell.metadata.get("sublet") if number <= done else None
            took = f"{found['seconds']:6.2f}s" if found else "      -"
            parts = " · ".join(bill_parts(found["bill"])) if found else ""
            lines.append(f"[{number}] {took}  {visible(first_line(cell.source))}{'  ' + parts if parts else ''}")
    return lines


FIRST: Final = """\
%load_ext sublet
import sublet.notebook.batch

sublet.notebook.batch.restore({folder!r})"""


def continued(job: Job) -> bytes:
    """A notebook that begins where the job ended."""
    import nbformat

    from sublet.notebook.batch.page import written
    from sublet.notebook.batch.prepare import read_notebook

    spec, record = job.spec(), job.record()
    if not record.checkpoint:
        raise NotFound(f"job {job.id} has saved no variables yet: it is {record.state}", do="Wait for its first cell.")
    v4: Any = nbformat.v4
    notebook = read_notebook(job.executed)
    note = f"The first cell restores the variables as cell {record.done} of job {job.id} left them."
    first = v4.new_code_cell(FIRST.format(folder=str(job.folder)))
    past = v4.new_markdown_cell("Below is what the job ran, with its outputs; nothing of it needs to run again.")
    notebook.cells = [
        v4.new_markdown_cell(f"# {spec.name}, continued\n{note}"),
        first,
        v4.new_code_cell(""),
        past,
        *notebook.cells,
    ]
    return written(notebook)


def _at(wall_ns: int) -> str | None:
    if not wall_ns:
        return None
    moment = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ago(record: JobRecord) -> str:
    if not record.changed_wall_ns:
        return "-"
    gone = datetime.now(UTC).timestamp() - record.changed_wall_ns / 1e9
    return f"{seconds(max(0.0, round(gone)))}"


def _plain(text: str) -> str:
    """Without the colours that IPython puts into tracebacks."""
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)
