"""A person at JupyterLab: runs cells on a device, loses it to somebody else, reads why, and goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import ensure_office
from tests.browser.lab import lab, notebook, opened

PICTURES = os.environ.get("SUBLET_PICTURES", "")
"""A folder: what is seen is kept there, for people to look at."""

CELLS = (
    "%load_ext sublet",
    "x = list(range(10))\ntotal = 0",
    "%%gpu --vram 64MiB --tier spot\nfrom tqdm.auto import tqdm\nfor n in tqdm(x):\n    total += n\ntotal",
    "%%gpu --tier spot\nimport time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.1)",
    "%%gpu --tier spot\nprint('it is still', total)",
    "%gpu bill",
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "home"
    made.mkdir()
    ensure_office(made, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)


@pytest.mark.needs("chromium")
@pytest.mark.browser
@pytest.mark.slow
def test_a_notebook_loses_its_device_and_goes_on(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    made = notebook(folder / "cells.ipynb", *CELLS)
    with sublet.connect(home=home) as office, lab(home, made) as address, opened(address) as page:
        token = office.request("POST", "/v1/tenants", {"id": "ben"}, shape=dict)["token"]
        for number in (0, 1, 2):
            page.run(number)
        said = page.wait_said(2, r"lease .* busy ")
        assert "45" in said
        assert "100%" in said
        assert "host device, no GPU" in said
        page.run(3)
        page.wait_said(3, "begun")
        with sublet.connect(f"unix://{socket_path(home)}", token=token) as ben:
            other = ben.gpu(min_vram="1GiB", ttl="1m", wait="1m")
            with other, other.activity("ben's"):
                page.wait_said(3, "preempted")
                if PICTURES:
                    page.picture(Path(PICTURES) / "suspended.png")
        page.wait_said(3, "running")
