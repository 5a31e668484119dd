"""A person at JupyterLab: runs cells on a device, loses it to somebody else, reads why, and goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import sublet
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import ensure_office
from tests.browser.lab import Page, lab, notebook, opened

PICTURES: Final = os.environ.get("SUBLET_PICTURES", "")
"""A folder: what is seen is kept there, for people to look at, and for the docs."""
DARK: Final = os.environ.get("SUBLET_DARK") == "1"

LOAD, HERE, BAR, LONG, AGAIN, LOST, BILL = range(7)
CELLS: Final = (
    "%load_ext sublet",
    "import numpy as np\ndata = np.arange(10)",
    (
        "%%gpu --vram 64MiB --tier spot\nimport matplotlib.pyplot as plt\nfrom tqdm.auto import tqdm\n"
        "total = sum(int(n) for n in tqdm(data))\nplt.figure(figsize=(3, 1)); plt.plot(data ** 2); plt.show()\ntotal"
    ),
    (
        "%%gpu --tier spot\nimport time\nprint('begun', flush=True)\n"
        "for step in tqdm(range(70)):\n    time.sleep(0.1)\nprint('done: step', step)"
    ),
    "%%gpu\nprint('the sum is still', total)",
    "%%gpu\nprint('begun', flush=True)\ntime.sleep(60)",
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


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.picture(Path(PICTURES) / f"{name}.png")


@pytest.mark.needs("chromium")
@pytest.mark.browser
@pytest.mark.slow
def test_a_notebook_loses_its_device_and_goes_on(home: Path, tmp_path: Path) -> None:
    """Taken by another tenant in the middle of a cell, the cell stands still, says why, and goes on by itself. Ended by
    the operator, it says so in one sentence and what to do. At no moment is there anything of our inside to be seen."""
    folder = tmp_path / "folder"
    folder.mkdir()
    made = notebook(folder / "cells.ipynb", *CELLS)
    with sublet.connect(home=home) as office, lab(home, made, dark=DARK) as address, opened(address) as page:
        token = office.request("POST", "/v1/tenants", {"id": "ben"}, shape=dict)["token"]
        for number in (LOAD, HERE, BAR, LONG):
            page.run(number)
        page.wait_said(LONG, "begun")
        said = page.said(BAR)
        assert "host device, no GPU" in said
        assert "lease" in said
        assert "100%" in said
        assert said.rstrip().endswith("45")
        assert page.cell(BAR).locator("img").count() == 1
        with sublet.connect(f"unix://{socket_path(home)}", token=token) as ben:
            other = ben.gpu(min_vram="1GiB", ttl="1m", wait="1m", renew="always")
            said = page.wait_said(LONG, "suspended, the cell stands still")
            assert "a request of tier interactive goes before tier spot" in said
            assert "done" not in said
            page.wait_said(LONG, "place 1")
            picture(page, "suspended")
            other.release()
        said = page.wait_said(LONG, r"lease .* suspended .*, and went on")
        assert "done: step 69" in said
        page.run(AGAIN)
        page.wait_said(AGAIN, "the sum is still 45")
        page.run(LOST)
        page.wait_said(LOST, "begun")
        for lease in office.leases():
            if any(part.kind == "gpu" for part in lease.parts):
                office.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
        said = page.wait_said(LOST, "GpuSessionEnded: the GPU session ended")
        assert said.count("Rerun this cell to reacquire.") == 2, "in the status line, and in the error"
        assert "Traceback" not in said
        page.run(BILL)
        page.wait_said(BILL, "suspended")
        picture(page, "ended")
        page.run(AGAIN)
        page.wait_said(AGAIN, "waited")
        assert "the sum is still 45" in page.said(AGAIN)
