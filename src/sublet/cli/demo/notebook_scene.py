"""The first scene: a real notebook loses its device in the middle of a cell, and goes on from what was saved.

It runs as a person would run it, with ``sublet nb run``, and what it leaves is left where the person can look at it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, Final

from sublet.cli.demo.child import DemoOffice
from sublet.cli.demo.stage import Stage
from sublet.cli.show import Json, plural

__all__ = ["NOTEBOOK", "can_play", "play"]

NOTEBOOK: Final = "five-minute-gpu.ipynb"
STOP_S: Final = 20.0
WIDTH: Final = 105
ROWS: Final = 40
"""From one save of the notebook to the next."""
TOO_LITTLE: Final = 16 << 20
"""Memory in which a suspended kernel has no room."""
NEEDED: Final = ("nbclient", "nbconvert", "ipykernel")


def can_play() -> bool:
    """Whether what runs notebooks is installed."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def place_for(folder: str) -> Path:
    """Where the notebook and its page go: there, or where one may write if not there."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            return place
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="sublet-demo-notebook-"))


def play(stage: Stage, folder: Path, out: str) -> None:
    """Run it in an office of its own, and check what it says."""
    stage.act("A notebook leases a GPU for five minutes")
    stage.tell(
        "An ordinary notebook; one of its cells says %%gpu --tier spot. In the middle of that cell a neighbour, "
        "another tenant, asks for the device and goes first. The cell is run again, and goes on from what was saved "
        "within it."
    )
    source = folder / NOTEBOOK
    source.write_bytes(resources.files("sublet.notebook").joinpath(NOTEBOOK).read_bytes())
    target = place_for(out) / NOTEBOOK
    (folder / "notebook").mkdir()
    with DemoOffice(folder / "notebook", "1x2GiB") as office:
        # With room for it the office would suspend the cell, and it would just stand still for a while. Here is none:
        # so the cell is ended, which is what happens on cards that cannot be suspended.
        tenant: Json = office.operator.get("/v1/tenants/local")
        office.operator.patch("/v1/tenants/local", {"quota": {**tenant["quota"], "memory_bytes": TOO_LITTLE}})
        code, said = _run(stage, office, source, target)
        stage.claim(code == 0, "Every cell has run.", but=said)
        _check(stage, target)
        lines: list[Json] = [line for line in office.operator.get("/v1/bill", by="label:job") if line["key"]]
    stage.claim(
        len(lines) == 1 and lines[0]["leases"] == 2 and lines[0]["gpu_seconds"] > 0,
        f"Its bill: {plural(lines[0]['leases'] if lines else 0, 'lease')}, device time "
        f"{lines[0]['gpu_seconds'] if lines else 0:.1f} s; nothing was held while the neighbour had it.",
        but=lines,
    )
    page = target.with_suffix(".html")
    stage.claim(target.exists() and page.exists(), f"The executed notebook and its page are in {target.parent}:")
    stage.exhibit(f"{target}\n{page}")


def _run(stage: Stage, office: DemoOffice, source: Path, target: Path) -> tuple[int, str]:
    words = [sys.executable, "-u", "-m", "sublet", "nb", "run", str(source), "-o", str(target)]
    said = []
    with subprocess.Popen(
        words, env=office.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if re.match(r"ok|again|fail", line):
                    stage.exhibit(_short(line.rstrip()))
            code = process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it gives its leases back before its office goes
                process.wait(STOP_S)
            raise
    return code, "".join(said)


def _short(line: str) -> str:
    """As many of its parts as have room."""
    parts = line.split(" · ")
    while len(parts) > 1 and len(" · ".join(parts)) > WIDTH:
        parts.pop()
    return " · ".join(parts)


def _check(stage: Stage, target: Path) -> None:
    """What the cells said, as it stands in the executed notebook."""
    import json

    cells: list[Any] = [cell for cell in json.loads(target.read_text())["cells"] if cell["cell_type"] == "code"]
    first, again = [cell for cell in cells if "%%gpu" in "".join(cell["source"])]
    ended = [output["evalue"] for output in first["outputs"] if output["output_type"] == "error"]
    stage.claim(
        len(ended) == 1 and "preempted" in ended[0] and "Rerun this cell" in ended[0],
        f"The cell was told: “{ended[0].partition(' (')[0] if ended else ''} … Rerun this cell to reacquire.”",
        but=first["outputs"],
    )
    saved = [int(row) for row in re.findall(r"row (\d+) saved", _text(first))]
    begins = [int(row) for row in re.findall(r"begins at row (\d+)", _text(again))]
    last = max(saved, default=0)  # or the next: the cell may end between a save and the word of it
    stage.claim(
        len(begins) == 1 and begins[0] > 0 and begins[0] in (last, last + ROWS),
        f"Run again, on a new lease, it restored what was saved and went on at row {(begins or '?')[0]}.",
        but=f"saved {saved}, begins {begins}",
    )
    pictures = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    stage.claim(len(pictures) == 1, "It finished its picture, every row of it.")


def _text(cell: Json) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])
