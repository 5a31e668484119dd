"""A suite of one file under this suite's conftest, in a process of its own: for tests of what the conftest promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
INI = f"""
[pytest]
addopts = --strict-markers -p xdist -p pytest_timeout
pythonpath = {CONFTEST.parents[1]}
markers =
    needs(*programs): x
    gpu: x
    xdist_group(name): x
"""


def run_small(folder: Path, source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on ``source``; what the suite's own run has in its environment does not count. Of the plugins only
    those are loaded that have to do with it."""
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text(INI)
    (folder / "test_small.py").write_text("import os, pytest\n" + source)
    plain = {"SUBLET_REQUIRE_ALL": "", "SUBLET_AGAIN": "", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env={**os.environ, **plain, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
