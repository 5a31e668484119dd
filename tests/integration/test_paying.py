"""Priority that is paid for, from each program that leases GPUs: the office has it in the request, and on the bill."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

import sublet
from sublet import jobs
from sublet.cli import main
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office

pytestmark = [
    pytest.mark.slow,  # two kernels: one second each
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of an office that sells priority."""
    made = tmp_path / "home"
    made.mkdir()
    (made / "rates.toml").write_text('currency = "EUR"\ngpu = 2.0\npriority = 500.0\n')
    monkeypatch.setenv("SUBLET_HOME", str(made))
    ensure_office(made, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)
    asyncio.set_event_loop(None)  # nbclient and tornado ask for the thread's loop; ours are closed by asyncio.run


def notebook_of(path: Path, *cells: str) -> str:
    book = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    book.cells.extend(nbformat.v4.new_code_cell(cell) for cell in cells)  # type: ignore[no-untyped-call]
    nbformat.write(book, path)  # type: ignore[no-untyped-call]
    return str(path)


def test_each_program_pays_for_the_gpus_of_its_leases(home: Path, tmp_path: Path) -> None:
    cells = notebook_of(
        tmp_path / "cells.ipynb",
        "#SUBLET --vram 256MiB\nx = 1",
        "%%gpu --pay-priority\ny = x + 1",
        "%gpu release\n%env SUBLET_SESSION=thesis",  # the session pays, and no cell says so
        "%%gpu\nz = y + 1",
    )
    whole = notebook_of(tmp_path / "whole.ipynb", "#SUBLET --vram 256MiB --pay-priority --lease whole\nx = 1")
    out, gpu = str(tmp_path / "done.ipynb"), ("--gpu", "256MiB")
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")

    paid = list[int]()
    with sublet.connect(home=home) as fabric:

        def note(what: str) -> None:
            lines = [line for line in fabric.bill(by="lease") if line.gpu_seconds]
            assert all(line.priority_cost > 0 for line in lines), (what, lines)
            paid.append(len(lines))

        assert main(["run", *gpu, "--pay-priority", "--", "true"]) == 0
        note("run")
        assert main(["session", "start", "thesis", "--vram", "256MiB", "--pay-priority"]) == 0
        note("a session")
        assert main(["session", "rest", "thesis"]) == 0
        assert main(["nb", "run", cells, "-o", out]) == 0
        note("a cell, and a cell of the session")
        of_session = [line for line in fabric.bill(by="session") if line.key and line.priority_cost]
        assert [line.leases for line in of_session] == [2], "its first lease, and the cell's"
        assert main(["nb", "run", whole, "-o", out]) == 0
        note("a whole notebook")
        assert main(["train", str(script), *gpu, "--pay-priority", "--state", "64MiB"]) == 0
        note("training")
        assert list(jobs.map(abs, [-3], gpu="256MiB", want=1, pay_priority=True, name="paid", fabric=fabric)) == [3]
        note("a job")
    assert paid == [1, 2, 4, 5, 6, 7], "each of them had a lease of its own"
