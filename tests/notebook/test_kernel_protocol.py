"""``jupyter_kernel_test`` on the ``sublet`` kernelspec: no failure that ipykernel does not have in the same run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.notebook import kernel_mode
from tests.light_jupyter import python_module
from tests.notebook.corpus.run import office_on

ROOT: Final = Path(__file__).parents[2]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    kernel_mode.install("sublet", ["--vram", "64MiB", "--ttl", "1m"], prefix=str(tmp_path))
    with office_on(tmp_path / "home", "1x1GiB") as office:
        yield {
            **os.environ,
            **office,
            "JUPYTER_PATH": str(tmp_path / "share" / "jupyter"),
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "PYTHONPATH": str(ROOT),
        }


def outcomes_of(kernels: tuple[str, ...], env: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """In a process of their own, which is the client of all of them."""
    place = folder / "kernels"
    place.mkdir()
    ran = subprocess.run(
        [*python_module("tests.notebook.kernel_protocol"), *kernels],
        env=env,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in ran.stdout.splitlines()[-len(kernels) :]]
    shutil.rmtree(place)
    return found


def test_the_leased_kernel_fails_no_test_of_the_protocol_that_ipykernel_passes(
    env: dict[str, str], tmp_path: Path
) -> None:
    plain, leased = outcomes_of(("python3", "sublet"), env, tmp_path)
    assert leased["ran"] == plain["ran"] >= 12
    assert leased["skipped"].keys() == plain["skipped"].keys()
    more = {test: why for test, why in leased["failed"].items() if test not in plain["failed"]}
    assert not more
