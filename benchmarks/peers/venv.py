"""Throw-away environments for what only a benchmark needs (numpy, ray). Nothing is installed into our own.

With SUBLET_BENCH_VENVS set to a folder they are kept there for the next run; otherwise they go with the row.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

__all__ = ["python_with", "version_in"]

INSTALL_WITHIN_S: Final = 600


def python_with(distribution: str, folder: Path, *also: str) -> Path:
    """An interpreter that has it, and others beside it. Raises ``RuntimeError`` where they cannot be installed."""
    kept = os.environ.get("SUBLET_BENCH_VENVS")
    place = (Path(kept) if kept else folder) / f"venv-{distribution}"
    python = place / "bin" / "python"
    if not all(_has(python, one) for one in (distribution, *also)):
        _run([sys.executable, "-m", "venv", str(place)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", distribution, *also])
    if not _has(python, distribution):
        raise RuntimeError(f"{distribution} was installed and cannot be imported.")
    return python


def version_in(python: Path, distribution: str) -> str:
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", code, distribution], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "not installed"


def _has(python: Path, distribution: str) -> bool:
    return python.exists() and version_in(python, distribution) != "not installed"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_WITHIN_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])!r} failed: {done.stderr[-500:].strip()}")
