"""Two namespaces that follow each other: the notebook's here, the device's in a process of its own."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.sides import Notebook, Other


@pytest.fixture(scope="session", autouse=True)
def _matplotlib_knows_the_fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On its first import on a machine matplotlib looks at the fonts, and where that takes more than five seconds it
    writes a line to the standard error, in some test that compares what a cell writes. So it is done before all."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("MPLCONFIGDIR") or os.path.join(caches, "matplotlib"))
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(shared / "fonts.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of this run wait until the first one has done it
        if not list(folder.glob("fontlist-*.json")):
            subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], capture_output=True, check=False)


@pytest.fixture(scope="session")
def other() -> Iterator[Other]:
    """One process for all files: each library is imported once there. Each notebook begins with an empty namespace."""
    made = Other()
    yield made
    made.close()


@pytest.fixture
def nb(other: Other) -> Notebook:
    return Notebook(other)
