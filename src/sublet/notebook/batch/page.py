"""What a run leaves behind: the executed notebook, and an HTML page with the bill.

The page needs no network: its style is in it, and scripts that Jupyter would fetch are left out where they do nothing.
"""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Mapping
from typing import Any, Final

from sublet.errors import Unsupported
from sublet.invocation import installing
from sublet.lazy_dataclass import dataclass
from sublet.notebook.batch.job_states import JobRecord, JobState
from sublet.notebook.batch.jobs import JobSpec
from sublet.notebook.batch.prepare import code_cells
from sublet.notebook.status import WHOLE_S, CellBill
from sublet.values import NS_PER_S, format_cost, format_duration

LINE_MAX: Final = 60
COLOURS: Final = {
    JobState.DONE: "#16a34a",
    JobState.FAILED: "#dc2626",
    JobState.STOPPED: "#d97706",
    JobState.INTERRUPTED: "#d97706",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBill:
    """What the office has on its books for a job: every lease it had, also those that were lost."""

    leases: int
    held_s: float
    busy_s: float
    gpu_s: float
    cost: float
    currency: str

    @classmethod
    def of(cls, line: Any) -> JobBill:
        """From a line of a bill."""
        return cls(
            leases=line.leases,
            held_s=line.held_seconds,
            busy_s=line.busy_seconds,
            gpu_s=line.gpu_seconds,
            cost=line.cost,
            currency=line.currency,
        )

    def __str__(self) -> str:
        leases = "1 lease" if self.leases == 1 else f"{self.leases} leases"
        parts = [leases, f"held {_seconds(self.held_s)}", f"busy {_seconds(self.busy_s)}"]
        parts.append(f"device time {_seconds(self.gpu_s)}")
        if self.cost:
            parts.append(f"cost {format_cost(self.cost, self.currency)}")
        return ", ".join(parts)


def written(notebook: Any) -> bytes:
    """A notebook as its file holds it."""
    import nbformat

    text: str = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    return text.encode("utf-8", errors="surrogatepass") + b"\n"


def bill_parts(bill: Mapping[str, Any]) -> list[str]:
    """What a cell consumed, for people; nothing for a cell that used no device."""
    known = {name: value for name, value in bill.items() if name in CellBill.__dataclass_fields__}
    return CellBill(**known).parts() if known.get("held_s") else []


def first_line(source: str) -> str:
    """What a cell is called in a line: its first line that says something."""
    lines = [line.strip() for line in source.splitlines()]
    code = [line for line in lines if line and not line.startswith("#")] or lines or [""]
    line = code[0] if not code[0].startswith("%%gpu") or len(code) < 2 else f"{code[0]}: {code[1]}"
    return line if len(line) <= LINE_MAX else line[: LINE_MAX - 1] + "…"


def page_of(notebook: Any, spec: JobSpec, record: JobRecord, bill: JobBill | None) -> str:
    """The HTML page. Raises ``Unsupported`` where nbconvert is missing."""
    try:
        from nbconvert import HTMLExporter
    except ImportError as error:
        raise Unsupported(
            f"the HTML page cannot be made: {error}", do=f"Install it: `{installing('sublet[notebook]')}`."
        ) from error
    shown = copy.deepcopy(notebook)
    # Formulas are the one thing that is set by a script from elsewhere; without it they are shown as they are written.
    named = {} if _has_formulas(notebook) else {"mathjax_url": ""}
    exporter: Any = HTMLExporter(template_name="lab", require_js_url="", **named)  # type: ignore[no-untyped-call]
    body: str
    body, _ = exporter.from_notebook_node(shown, resources={"metadata": {"name": spec.name}})
    head, tail = _head(spec, record, bill), _bill_table(notebook, bill)
    body = re.sub(r'<script src="">\s*</script>', "", body)
    opening = body.find(">", body.find("<body")) + 1
    closing = body.rfind("</body>")
    return body[:opening] + head + body[opening:closing] + tail + body[closing:]


def _has_formulas(notebook: Any) -> bool:
    return any(
        "$" in cell.source
        if cell.cell_type == "markdown"
        else any("text/latex" in output.get("data", {}) for output in cell.get("outputs", []))
        for cell in notebook.cells
    )


_BOX: Final = "font-family:system-ui,sans-serif;font-size:14px;margin:24px auto;max-width:1000px;padding:0 24px"


def _head(spec: JobSpec, record: JobRecord, bill: JobBill | None) -> str:
    colour = COLOURS.get(record.state, "#3b82f6")
    is_done = record.done == record.cells
    state = "done" if is_done and not record.is_over else str(record.state)
    colour = COLOURS[JobState.DONE] if state == "done" else colour
    facts = [f"{record.done} of {record.cells} cells"]
    if record.again:
        facts.append(f"{record.again} run again after a lease was lost")
    if record.runs > 1:
        facts.append(f"{record.runs} runs")
    if bill is not None:
        facts.append(str(bill))
    lines = "".join(f"<span style='color:#57606a'> · {html.escape(one)}</span>" for one in facts)
    news = "" if is_done or not record.message else f"<div>{html.escape(record.message)}</div>"
    return (
        f'<div style="{_BOX}"><div style="border-left:4px solid {colour};padding:6px 12px">'
        f"<b>{html.escape(spec.name)}</b> <b style='color:{colour}'>{state}</b>{lines}{news}</div></div>"
    )


def _bill_table(notebook: Any, bill: JobBill | None) -> str:
    rows = []
    for number, at in enumerate(code_cells(notebook), 1):
        cell = notebook.cells[at]
        found = cell.metadata.get("sublet")
        if found is None:
            continue
        parts = bill_parts(found["bill"])
        seconds = _seconds(found["seconds"])
        rows.append((str(number), first_line(cell.source), seconds, " · ".join(parts) or "no device"))
    if not rows:
        return ""
    cell_style = 'style="text-align:left;padding:4px 16px 4px 0;border-bottom:1px solid #d0d7de"'
    table = "".join(
        "<tr>" + "".join(f"<td {cell_style}>{_code(n, text)}</td>" for n, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    heads = "".join(f"<th {cell_style}>{head}</th>" for head in ("cell", "", "took", "device"))
    total = (
        "" if bill is None else f"<p>On the office's books, lost leases included: <b>{html.escape(str(bill))}</b>.</p>"
    )
    return (
        f'<div style="{_BOX}"><h2 style="font-size:18px">The bill</h2>'
        f'<table style="border-collapse:collapse;font-size:13px"><tr>{heads}</tr>{table}</table>{total}</div>'
    )


def _code(column: int, text: str) -> str:
    escaped = html.escape(text)
    return f"<code>{escaped}</code>" if column == 1 else escaped


def _seconds(seconds: float) -> str:
    return f"{round(seconds, 3):.2g}s" if seconds < WHOLE_S else format_duration(round(seconds) * NS_PER_S)
