"""The demo's first step: a notebook loses its device in the middle of a cell and resumes from what was saved.

It runs as a person would run it, with ``sublet nb run``, and is left in a folder to look at.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, Final

from sublet.cli.demo.office import DemoOffice
from sublet.cli.demo.report import Report
from sublet.cli.show import Json, plural
from sublet.errors import InvalidRequest

NOTEBOOK: Final = "five-minute-gpu.ipynb"
STOP_S: Final = 20.0
WIDTH: Final = 105
ROWS: Final = 40
"""From one save of the notebook to the next."""
TOO_LITTLE: Final = 16 << 20
"""Too little memory to suspend a kernel into."""
NEEDED: Final = ("nbclient", "nbconvert", "ipykernel")


def can_play() -> bool:
    """Whether the packages that run notebooks are installed."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def place_for(folder: str) -> Path:
    """The folder for the notebook and its page, made if need be, and tried: better refused now than after the run."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InvalidRequest(
            f"the folder {folder} for the executed notebook cannot be written: {error.strerror}",
            do="Name another with --out.",
        ) from error
    return place


def play(report: Report, folder: Path, place: Path) -> list[tuple[str, str]]:
    """Run it in an office of its own, and check the result. Returns the files that are left, each with what it is."""
    report.step(
        "A notebook cell loses its GPU and goes on",
        "The notebook runs on the CPU; only its cells that begin with %%gpu use the device. In one of them, of low "
        "priority (--tier spot), another user takes the device away.",
    )
    source = folder / NOTEBOOK
    source.write_bytes(resources.files("sublet.notebook").joinpath(NOTEBOOK).read_bytes())
    target = place / NOTEBOOK
    (folder / "notebook").mkdir()
    report.progress("starting an office")
    with DemoOffice(folder / "notebook", "1x2GiB") as office:
        # With room for it the office would suspend the cell, and it would just stand still for a while. Here is none:
        # so the cell is ended, which is what happens on cards that cannot be suspended.
        tenant: Json = office.operator.get("/v1/tenants/local")
        office.operator.patch("/v1/tenants/local", {"quota": {**tenant["quota"], "memory_bytes": TOO_LITTLE}})
        code, output = _run(report, office, source, target)
        report.check(code == 0, "Every cell has run.", but=output)
        row, rows = _check(report, target)
        lines: list[Json] = [line for line in office.operator.get("/v1/bill", by="label:job") if line["key"]]
    report.check(
        len(lines) == 1 and lines[0]["leases"] == 2 and lines[0]["gpu_seconds"] > 0,
        f"Billed: {plural(lines[0]['leases'] if lines else 0, 'lease')}, "
        f"{lines[0]['gpu_seconds'] if lines else 0:.1f} s of the device.",
        but=lines,
    )
    page = target.with_suffix(".html")
    report.check(target.exists() and page.exists(), f"The executed notebook and its page are in {target.parent}.")
    report.result("The cell got notice and was ended, with the reason: preempted. What it had saved was kept.")
    report.result(f"Run again, it got the device and its variables back, and went on at row {row} of {rows}.")
    report.result(f"It is billed for {lines[0]['gpu_seconds']:.0f} s of the device, under two leases.")
    return [
        (str(page), "the notebook as it ran, with its bill: open it in a browser"),
        (str(target), "the same, for Jupyter"),
    ]


def _run(report: Report, office: DemoOffice, source: Path, target: Path) -> tuple[int, str]:
    words = [sys.executable, "-u", "-m", "sublet", "nb", "run", str(source), "-o", str(target)]
    lines = []
    report.progress("starting the notebook")
    with subprocess.Popen(
        words, env=office.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if cell := re.match(r"(?:ok|again|fail)\w*\s+\[(\d+)/(\d+)\]", line):
                    report.detail(_short(line.rstrip()))
                    report.progress(f"running the notebook, cell {min(int(cell[1]) + 1, int(cell[2]))} of {cell[2]}")
            code = process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it gives its leases back before its office goes
                process.wait(STOP_S)
            raise
    return code, "".join(lines)


def _short(line: str) -> str:
    """As many of its parts as have room."""
    parts = line.split(" · ")
    while len(parts) > 1 and len(" · ".join(parts)) > WIDTH:
        parts.pop()
    return " · ".join(parts)


def _check(report: Report, target: Path) -> tuple[int, int]:
    """What the cells printed, as it stands in the executed notebook: the row at which it went on, and the last row."""
    import json

    cells: list[Any] = [cell for cell in json.loads(target.read_text())["cells"] if cell["cell_type"] == "code"]
    first, again = [cell for cell in cells if "%%gpu" in "".join(cell["source"])]
    ended = [output["evalue"] for output in first["outputs"] if output["output_type"] == "error"]
    report.check(
        len(ended) == 1 and "preempted" in ended[0] and "Rerun this cell" in ended[0],
        f"The cell ended with: “{ended[0].partition(' (')[0] if ended else ''} … Rerun this cell to reacquire.”",
        but=first["outputs"],
    )
    saved = [int(row) for row in re.findall(r"row (\d+) saved", _text(first))]
    begins = [int(row) for row in re.findall(r"begins at row (\d+)", _text(again))]
    last = max(saved, default=0)  # or the next: the cell may end between a save and its print
    report.check(
        len(begins) == 1 and begins[0] > 0 and begins[0] in (last, last + ROWS),
        f"Run again under a new lease, it went on at row {(begins or '?')[0]}.",
        but=f"saved {saved}, begins {begins}",
    )
    done = [int(row) for row in re.findall(r"row (\d+) saved", _text(again))]
    pictures = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    report.check(len(pictures) == 1 and bool(done), "It finished its picture, every row of it.", but=done)
    return begins[0], max(done)


def _text(cell: Json) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])
