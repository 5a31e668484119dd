"""A person at JupyterLab: runs cells on a device, loses it to somebody else, reads why, and goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from tests.browser.lab import PICTURES, Page, cells_in, lab, notebook, opened

DARK: Final = os.environ.get("SUBLET_DARK") == "1"

LOAD, STRIPE, PAINT, NEIGHBOUR, TAKEN, AGAIN, STORY, PICTURE, BILL, SHOWS, LOST, AFTER, SUM = range(13)
"""The code cells: those of the example, and some behind them."""
MORE: Final = (
    (
        "%%gpu\nimport matplotlib.pyplot as plt\nfrom tqdm.auto import tqdm\n"
        "total = sum(tqdm(range(10)))\nplt.figure(figsize=(3, 1)); plt.plot([1, 3, 2]); plt.show()\ntotal"
    ),
    "%%gpu\nprint('begun', flush=True)\ntime.sleep(600)",
    "%%gpu\nprint('the sum is still', total)",
    "%gpu bill",
)

FIRST: Final = (
    "%load_ext sublet\nimport random; random.seed(3)",
    (
        "%%gpu --vram 600MiB --ttl 1m\nimport os\nnumbers = [random.random() for _ in range(3)]\n"
        "print('on', os.environ['SUBLET_DEVICES'])"
    ),
    "print('drawn', len(numbers), round(random.random(), 3)); print('pid', os.getpid())",
    "%%gpu --vram 600MiB --ttl 1m\nimport time\nprint('working', flush=True)\ntime.sleep(1200)",
)
SECOND: Final = ("%load_ext sublet", "%%gpu --vram 600MiB --ttl 1m\nprint('it is mine now')")
BEGUN, LEASED, HERE, LONG = range(4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    ensure_office(made, words=("up", "--host-gpus", "1x1GiB", "--foreground"))
    yield made
    with sublet.connect(home=made) as fabric:
        fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
    shutil.rmtree(runtime_dir(made.resolve()), ignore_errors=True)


@pytest.fixture(scope="module")
def page(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One JupyterLab and one browser for all: they are most of what a notebook costs here."""
    folder = tmp_path_factory.mktemp("folder")
    made = notebook(folder / "cells.ipynb", *MORE)
    cells_in(folder / "first.ipynb", *FIRST)
    cells_in(folder / "second.ipynb", *SECOND)
    with lab(home, made, dark=DARK) as address, opened(address) as page:
        yield page


def picture(page: Page, name: str, first: int, last: int) -> None:
    if PICTURES:
        page.picture(Path(PICTURES) / f"{name}.png", first, last)


@pytest.mark.needs("chromium")
@pytest.mark.browser
@pytest.mark.slow
def test_a_notebook_loses_its_device_and_goes_on(home: Path, page: Page) -> None:
    """Taken by another tenant in the middle of a cell, the cell stands still, says why, and goes on by itself. Ended by
    the operator, it says so in one sentence and what to do. At no moment is there anything of our inside to be seen."""
    with sublet.connect(home=home) as office:
        page.watch(TAKEN)
        for number in range(LOAD, SHOWS):
            page.run(number)
        said = page.wait_seen("suspended, the cell stands still")
        assert "a request of tier interactive goes before tier spot" in said
        assert "row 240 saved" not in said
        picture(page, "notebook-suspended", NEIGHBOUR, TAKEN)
        page.wait_said(TAKEN, r"suspended .*, and went on")
        said = page.wait_said(TAKEN, "row 240 saved")  # what came first may be drawn last
        assert "host device, no GPU" in said
        page.wait_done(BILL)
        page.wait_said(STORY, "has it after")
        assert page.count_images(PICTURE) == 1

        page.run(SHOWS)
        page.wait_said(SHOWS, r"no GPU\) · [\d.]+m?s")
        page.wait_said(SHOWS, "100%")
        page.wait_seen_again(SHOWS, r"\b45\s*$", unlike="")
        assert page.count_images(SHOWS) == 1
        page.run(LOST)
        page.wait_said(LOST, "begun")
        for lease in office.leases():
            if any(part.kind == "gpu" for part in lease.parts):
                office.request("POST", f"/v1/leases/{lease.id}/revoke", {}, shape=dict)
        page.wait_said(LOST, "GpuSessionEnded: the GPU session ended")
        said = page.wait_seen_again(LOST, r"(Rerun this cell to reacquire\.[^]*){2}", unlike="")
        assert said.count("Rerun this cell to reacquire.") == 2, "in the status line, and in the error"
        assert "Traceback" not in said
        page.run(AFTER)
        page.wait_said(AFTER, "the sum is still 45")
        page.run(SUM)
        page.wait_said(SUM, "suspended")
        picture(page, "notebook-ended", SHOWS, SUM)
        page.close("cells.ipynb")


@pytest.mark.needs("chromium")
@pytest.mark.browser
@pytest.mark.slow
def test_run_all_restart_two_notebooks_and_a_killed_kernel(page: Page) -> None:
    """Two notebooks share one device by turns. A kernel that is restarted or killed holds nothing back."""
    page.open("first.ipynb")
    page.menu("Run", "Run All Cells")
    page.wait_said(LONG, "working")
    page.wait_said(LEASED, "on local/gpu0")
    drawn = page.wait_seen_again(HERE, r"pid \d+", unlike="")
    picture(page, "lab-run-all", BEGUN, LONG)

    page.menu("Kernel", "Restart Kernel…")
    page.agree()
    page.wait_idle()
    page.menu("Run", "Run All Cells")
    page.wait_seen_again(HERE, r"pid \d+", unlike=drawn)
    page.wait_said(LONG, "working")
    again = page.said(HERE)
    assert again.partition("pid")[0] == drawn.partition("pid")[0], "the seed holds again, on both sides"

    page.open("second.ipynb")
    page.watch(1)
    page.run(0)
    page.run(1)
    said = page.wait_seen("queued, place 1")
    assert "Traceback" not in said
    picture(page, "lab-second-waits", 0, 1)

    found = re.search(r"pid (\d+)", again)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    page.wait_said(1, "it is mine now")
    picture(page, "lab-second-runs", 0, 1)
    page.page.locator(".jp-Dialog", has_text="died").first.wait_for()
    if PICTURES:
        page.page.screenshot(path=Path(PICTURES) / "lab-killed.png")
    page.agree()
    page.show("first.ipynb")
    page.wait_idle()
    page.run(BEGUN)
    page.run(LEASED)
    page.wait_said(LEASED, "on local/gpu0")
