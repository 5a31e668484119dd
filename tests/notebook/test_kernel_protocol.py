"""``jupyter_kernel_test`` on the ``sublet`` kernelspec: no failure that ipykernel does not have in the same run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.notebook import kernel_mode
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


def outcome_of(kernel: str, env: dict[str, str], folder: Path) -> dict[str, Any]:
    place = folder / kernel
    place.mkdir()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.notebook.kernel_protocol", kernel],
        env=env,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    shutil.rmtree(place)
    return found


def test_the_leased_kernel_fails_no_test_of_the_protocol_that_ipykernel_passes(
    env: dict[str, str], tmp_path: Path
) -> None:
    plain, leased = (outcome_of(name, env, tmp_path) for name in ("python3", "sublet"))
    assert leased["ran"] == plain["ran"] >= 12
    assert leased["skipped"].keys() == plain["skipped"].keys()
    more = {test: why for test, why in leased["failed"].items() if test not in plain["failed"]}
    assert not more
