"""Notebooks of a tenant, whose guests see neither the notebook's folder nor the job's."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import sublet
from sublet.cli import main
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from sublet.notebook.batch.job_states import JobState
from sublet.notebook.batch.jobs import find_job

pytestmark = [
    pytest.mark.slow,  # real kernels: one second each
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning"),
]
V4: Any = nbformat.v4


@pytest.fixture
def fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sublet.Fabric]:
    """Of the owner; programs that are started meanwhile are the tenant's."""
    home = tmp_path / "home"
    ensure_office(home, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    with sublet.connect(home=home) as made:
        token = made.request("POST", "/v1/tenants", {"id": "ada"}, shape=dict)["token"]
        monkeypatch.setenv("SUBLET_HOME", str(home))
        monkeypatch.setenv("SUBLET_TOKEN", token)
        monkeypatch.setenv("SUBLET_AS_TENANT", "1")
        yield made
        made.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)
    asyncio.set_event_loop(None)


def outputs(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells  # type: ignore[no-untyped-call]
    return ["".join(one.get("text", "") for one in cell.outputs) for cell in cells if cell.cell_type == "code"]


def put(path: Path, *cells: str) -> Path:
    made = V4.new_notebook(cells=[V4.new_code_cell(one) for one in cells])
    nbformat.write(made, path)  # type: ignore[no-untyped-call]
    return path


def test_its_cells_run_in_a_home_of_their_own_and_jobs_save_in_a_volume(
    fabric: sublet.Fabric, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once with a lease for each cell, once with one for all; then a notebook that starts from what that left."""
    cells = (
        "import os\nkept = [os.getuid()]",
        "%%gpu --vram 64MiB\nopen('mine', 'w').close()\nprint(os.getuid() >= 1_900_000_000, os.path.exists('mine'))",
        "print(kept)",
    )
    path = put(tmp_path / "work.ipynb", *cells)
    assert main(["nb", "run", str(path)]) == 0, capsys.readouterr()
    assert outputs(tmp_path / "work.executed.ipynb")[1:] == ["True True\n", "[0]\n"]

    whole = put(tmp_path / "whole.ipynb", cells[0], cells[1].partition("\n")[2], cells[2])
    assert main(["nb", "run", "--lease", "whole", str(whole)]) == 0, capsys.readouterr()
    assert outputs(tmp_path / "whole.executed.ipynb")[1] == "True True\n"
    job = find_job("2")
    assert job.record().state is JobState.DONE
    [volume] = fabric.volumes()
    assert (volume.tenant, volume.name) == ("ada", job.spec().label)

    assert main(["nb", "open", "2", "--no-browser", "--out", str(tmp_path / "next.ipynb")]) == 0
    further = nbformat.read(tmp_path / "next.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    further.cells = [*further.cells[:2], V4.new_code_cell("print(kept[0] >= 1_900_000_000)")]  # the job's are known
    nbformat.write(further, tmp_path / "next.ipynb")  # type: ignore[no-untyped-call]
    assert main(["nb", "run", str(tmp_path / "next.ipynb")]) == 0, capsys.readouterr()
    assert outputs(tmp_path / "next.executed.ipynb")[-1] == "True\n"
