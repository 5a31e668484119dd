"""``import sublet`` costs next to nothing: what a person does not use is not loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

HEAVY: Final = (
    # our own needs, each loaded by the part that uses it
    *(
        "asyncio",
        "ssl",
        "http.client",
        "sqlite3",
        "multiprocessing",
        "subprocess",
        "inspect",
        "email",
        "urllib.request",
    ),
    *("msgspec", "starlette", "uvicorn", "uvloop", "httptools", "biscuit_auth", "typer", "click", "rich", "psutil"),
    *("platformdirs", "pynvml", "prometheus_client"),
    # the world our users live in
    *(
        "IPython",
        "ipykernel",
        "jupyter_client",
        "numpy",
        "pandas",
        "torch",
        "ray",
        "cuda",
        "warp",
        "wasmtime",
        "cloudpickle",
    ),
)


def loaded_by(statement: str) -> frozenset[str]:
    """The modules a fresh interpreter has after ``statement``, without those it starts with."""
    script = f"import sys; before = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=240, check=True)
    return frozenset(done.stdout.split())


def heavy(modules: frozenset[str]) -> list[str]:
    return sorted(m for m in modules if any(m == name or m.startswith(f"{name}.") for name in HEAVY))


@pytest.mark.parametrize(
    "statement",
    [
        "import sublet",
        "import sublet; dir(sublet); sublet.__version__; sublet.__all__",
        "import sublet; hasattr(sublet, '_repr_html_'); hasattr(sublet, '__path__')",  # what notebooks and pickle ask
    ],
)
def test_importing_sublet_loads_nothing_heavy(statement: str) -> None:
    assert heavy(loaded_by(statement)) == []


def test_importing_sublet_loads_no_room() -> None:
    assert sorted(m for m in loaded_by("import sublet") if m.startswith("sublet.")) == []


@pytest.mark.parametrize("program", ["clean_card", "rehearsal"])
def test_programs_that_use_a_card_load_neither_an_event_loop_nor_the_orders(program: str) -> None:
    """One runs twice for each lease of a card, the other for each card when an office starts."""
    loaded = loaded_by(f"import sublet.node.agent.{program}")
    assert {"sublet.node.agent.nvml", "sublet.devices.cuda_driver"} <= loaded
    assert sorted({"asyncio", "sublet.wire.orders", "sublet.node.agent.health"} & loaded) == []


def test_the_probe_sees_what_is_loaded() -> None:
    """A probe that sees nothing would call everything light."""
    assert heavy(loaded_by("import asyncio, rich.table")) != []


def test_a_notebook_is_read_without_a_grammar_of_addresses(tmp_path: Path) -> None:
    """Its parsers take longer to make than all the rest of a job's start."""
    pytest.importorskip("nbformat")
    path = tmp_path / "one.ipynb"
    cell = '{"cell_type": "code", "id": "a", "metadata": {}, "source": "1", "outputs": [], "execution_count": null}'
    path.write_text(f'{{"cells": [{cell}], "metadata": {{}}, "nbformat": 4, "nbformat_minor": 5}}')
    words = f"from sublet.notebook.batch.prepare import read_notebook; read_notebook(Path({str(path)!r}))"
    loaded = loaded_by(f"from pathlib import Path; {words}")
    assert {"nbformat", "jsonschema"} <= loaded
    assert "lark" not in loaded
