"""What the documents show is run as it stands: Python blocks, shell blocks and cells.

Of the blocks that begin with ```` ```sh ```` each page's run in one folder, in which lie the files that they name. A
block that is run elsewhere says so behind its language (``sh checkout``: by `make wheel`), as does one that is not run.
"""

from __future__ import annotations

import builtins
import gzip
import json
import os
import re
import subprocess
import symtable
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.cli.table import COMMANDS
from sublet.client.home import runtime_dir
from tests.commands import command_file, run_sublet
from tests.crash.office_process import release_all

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL: Final = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL: Final = re.compile(r"^```python cell\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED: Final = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BY: Final = {
    "sh": "test_shell_blocks_run_as_they_stand",
    "sh checkout": "tools/check_install.sh",
    "sh wheel": "tools/check_install.sh",
    "sh uv": "tools/check_install.sh",
    "sh course": "test_course.py",
    "sh course studio": "test_course.py",
    "sh course student": "test_course.py",
    "sh notest": "",
}
"""The marks that a block with commands may have, and what runs it."""


LONGEST_S = 280
"""For all blocks of a page: what hangs ends before the limit of a test, and what is slow beside others is not called
hanging."""


def test_there_are_pages_with_blocks() -> None:
    """Otherwise the other tests would pass for want of anything to look at."""
    assert BLOCK.search((ROOT / "docs/tutorial.md").read_text())
    assert len(PAGES) > 8


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """State folders of offices that the first page starts: one for pages on Warp, one for all others, and one for
    commands. The page on training imports torch itself, and in its guests nothing does."""
    found = {name: tmp_path_factory.mktemp(name) / "home" for name in ("warm", "cold", "shell")}
    yield found
    for home in found.values():
        run_sublet("down", "--now", env={**os.environ, "SUBLET_HOME": str(home)})


def _pages_with_blocks() -> Iterator[Any]:
    for page in PAGES:
        program = "\n".join(BLOCK.findall(page.read_text()))
        if program:
            marks = [pytest.mark.warm("warp", "numpy")] if "warp" in program else []
            yield pytest.param(page, program, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize(("page", "program"), list(_pages_with_blocks()))
def test_python_blocks_run_in_order(
    page: Path, program: str, homes: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """All Python blocks of a page make one program. It leaves no lease to the next page."""
    home = homes["warm" if request.node.get_closest_marker("warm") else "cold"]
    environment = {**os.environ, "SUBLET_HOME": str(home)}
    command = [sys.executable, "-W", "error", "-c", program]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if runtime_dir(home).exists():
        release_all(home)
    assert run.returncode == 0, f"{page.name}:\n{run.stdout}\n{run.stderr}"


# ------------------------------------------------------------------------------------------------------ shell blocks

TRAIN: Final = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.5)
args = parser.parse_args()
print("trained", args.epochs, args.lr)
"""
SETS_UP: Final = re.compile(r"\bsublet (?:up|down|tenant|group|budget|reservation|policy|audit|session)\b")
"""Commands that say what an office has and who may use it, or that look at all it ever did."""
NOTEBOOK: Final = (("parameters", "lr = 0.01"), ("", "%%gpu --vram 64MiB\nloss = lr * 2"), ("", "print('loss', loss)"))
TOKENIZE: Final = "#!/bin/sh\ntr -s ' ' '\\n'\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the files that the documents name, small ones."""
    folder = tmp_path / "place"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "sweep.py").write_text("def score(number):\n    return number * number\n")
    (folder / "tokenize").write_text(TOKENIZE)
    (folder / "tokenize").chmod(0o755)
    with gzip.open(folder / "corpus.gz", "wt") as corpus:
        corpus.write("to be or not to be\n")
    cells: list[dict[str, Any]] = [
        {
            "cell_type": "code",
            "id": f"cell-{n}",
            "metadata": {"tags": [tag]} if tag else {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for n, (tag, source) in enumerate(NOTEBOOK)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    text = json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    for name in ("training.ipynb", "five-minute-gpu.ipynb"):
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if SHELL.search(p.read_text())], ids=lambda p: str(p.relative_to(ROOT))
)
def test_shell_blocks_run_as_they_stand(page: Path, place: Path, homes: dict[str, Path]) -> None:
    """In a shell, as a person types them: each line, one after the other, until one fails. A page that sets an office
    up has one of its own; one that only uses it leaves no lease to the next."""
    script = "\n".join(SHELL.findall(page.read_text()))
    home = place.parent / "home" if SETS_UP.search(script) else homes["shell"]
    programs = place.parent / "bin"
    programs.mkdir()
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    environment = {**os.environ, "SUBLET_HOME": str(home), "HOME": str(place.parent), "PATH": path}
    command_file(programs / "sublet", environment)

    def sublet(*words: str) -> bytes:
        return run_sublet(*words, cwd=place, env=environment, timeout=LONGEST_S).out

    try:
        run = subprocess.run(
            ["sh", "-eux"], input=script, cwd=place, env=environment, capture_output=True, text=True, timeout=LONGEST_S
        )
        assert run.returncode == 0, f"{page.name}:\n{run.stdout}\n{run.stderr}"
        if "nb submit" in script:  # and the job that goes on in the background ends well
            jobs = _jobs_when_over(sublet)
            assert {job["state"] for job in jobs} == {"done"}, jobs
        shown = run.stdout
    finally:
        if home != homes["shell"]:
            sublet("down", "--now")
        elif runtime_dir(home).exists():
            release_all(home)
    if "train.py" in script:
        assert "trained" in shown
    if "words" in script:
        assert (place / "words").read_text().split() == ["be", "not", "or", "to"]


def _jobs_when_over(sublet: Any) -> list[dict[str, Any]]:
    until = time.monotonic() + LONGEST_S
    while True:
        jobs: list[dict[str, Any]] = json.loads(sublet("nb", "status", "--json"))
        if (
            all(job["state"] in ("done", "failed", "stopped", "interrupted") for job in jobs)
            or time.monotonic() > until
        ):
            return jobs
        time.sleep(0.2)


def test_every_block_with_commands_says_what_runs_it() -> None:
    """A command of ours is not shown in a block without a mark; one that cannot be run as it stands (it has names to
    fill in) is text, and begins with a command that there is."""
    blocks = [(page, mark, text) for page in PAGES for mark, text in FENCED.findall(page.read_text())]
    for page, mark, text in blocks:
        first = [line.split() for line in text.splitlines() if line.startswith(("sublet ", "make "))]
        if mark.startswith("sh") or mark == "bash":
            assert mark in RUN_BY, f"{page.name}: who runs a block that is marked {mark!r}?"
        elif first:
            assert mark == "text", f"{page.name}: {' '.join(first[0])} stands in a block that is marked {mark!r}"
        for words in first:
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (page.name, words)
            else:
                known = words[1] in COMMANDS or " ".join(words[1:3]) in COMMANDS or words[1] == "--version"
                assert known, (page.name, words)


def test_no_page_shows_a_command_that_not_every_machine_has() -> None:
    """Debian has no `python`; and `pip` alone is another interpreter's on many a machine."""
    for page in PAGES:
        shown = page.read_text()
        code = [text for _, text in FENCED.findall(shown)] + re.findall(r"`([^`\n]+)`", FENCED.sub("", shown))
        lines = [line for text in code for line in text.splitlines() if line != "python"]
        wrong = [line for line in lines if re.search(r"(?:^|-- |&& |\| )python(?= (?!=)|$)", line)]
        assert wrong == [], f"{page.name}: write python3, or .venv/bin/python"


def test_ci_runs_the_commands_that_the_blocks_leave_to_it() -> None:
    """`make demo` on the first page, and the ways to install."""
    ci = (ROOT / ".ci" / "run").read_text()
    named = re.findall(r"^for target in ([a-z ]+);|^make (?:--\S+ )*([a-z ]+)$", ci, re.MULTILINE)
    assert {"demo", "wheel", "test"} <= {target for words in named for target in " ".join(words).split()}
    assert "check_install.sh" in (ROOT / "tools" / "check_wheel.sh").read_text()
    marks = {mark for page in PAGES for mark, _ in FENCED.findall(page.read_text())}
    assert {mark for mark, by in RUN_BY.items() if by} <= marks


# ------------------------------------------------------------------------------------------------------------- cells

BEFORE: Final = """
model = {"weight": 1.0}
data = [1.0, 2.0]

def train(model, data):
    model["weight"] += sum(data)
    return [1 / model["weight"]]
"""
"""What a page takes for granted: a model, data, and a function that trains."""


@pytest.mark.slow
def test_cells_of_the_first_pages_run_in_a_notebook(tmp_path: Path) -> None:
    """Those of the README and the first ones of the page on `%%gpu`, after cells that define what they read."""
    sources = ["%load_ext sublet", BEFORE]
    for name in ("README.md", "docs/notebook.md"):
        found = CELL.findall((ROOT / name).read_text())
        assert found, name
        sources += found
    sources.append("assert model['weight'] == 7.0 and len(losses) == 1, model")
    notebook = {
        "cells": [
            {"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": s, "outputs": [], "execution_count": None}
            for n, s in enumerate(sources)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "page.ipynb").write_text(json.dumps(notebook))
    environment = {**os.environ, "SUBLET_HOME": str(tmp_path / "home")}
    try:
        run = subprocess.run(
            ["sublet", "nb", "run", "page.ipynb"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        assert run.returncode == 0, run.stdout + run.stderr
    finally:
        run_sublet("down", "--now", env=environment)
    assert len(re.findall(r"^ok", run.stdout, re.MULTILINE)) == len(sources)


def test_the_cells_of_the_tutorial_define_every_name_that_they_read() -> None:
    """So that they work in a notebook of one's own. That they do what they say is in the demo, which runs them."""
    known = set(dir(builtins))
    for cell in CELL.findall((ROOT / "docs/tutorial.md").read_text()):
        text = "\n".join(line for line in cell.splitlines() if not line.startswith("%"))
        table = symtable.symtable(text, "cell", "exec")
        known |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        known |= {child.get_name() for child in table.get_children()}
        assert _globals_read(table) <= known, f"in the cell {cell.splitlines()[0]!r}"


def _globals_read(table: symtable.SymbolTable) -> set[str]:
    is_top = table.get_type() == "module"
    found = {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and (symbol.is_global() or is_top)
    }
    return found.union(*(_globals_read(child) for child in table.get_children()))
