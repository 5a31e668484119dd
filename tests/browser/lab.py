"""JupyterLab in a real browser: ``sublet lab`` behind it, Debian's Chromium in front."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

import sublet
from tests.light_jupyter import light_environment
from tests.traces import plain_env

__all__ = ["PROGRAMS", "Page", "browser", "cells_in", "keep_quiet", "lab", "notebook", "opened"]

PICTURES = os.environ.get("SUBLET_PICTURES", "")
"""A folder: what is seen is kept there, for people to look at, and for the docs."""
PATIENCE_MS = 180_000
POLL_MS = 100
"""The browser looks no oftener: at each frame, it would compute the layout of the page at each frame."""
CHROMIUM = (
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update"),
)
PROGRAMS = ("chromium-headless-shell", "chromium")
"""Debian's, the first of them that is there. The other draws windows around its pages: a start, and each page of a
person who has been nowhere yet, take more than twice the time of a processor."""
SHOWN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
"""The notebook whose tab is in front."""
EXAMPLE = Path(sublet.__file__).parent / "notebook" / "five-minute-gpu.ipynb"
QUIET = {
    "notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "themes": {"adaptive-theme": False},
}


def cells_in(path: Path, *cells: str) -> Path:
    """A notebook with these code cells."""
    made: Any = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    for source in cells:
        made.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
    nbformat.write(made, path)  # type: ignore[no-untyped-call]
    return path


def notebook(path: Path, *cells: str) -> Path:
    """The example that ``sublet lab`` opens, with these code cells behind it."""
    example: Any = nbformat.read(EXAMPLE, as_version=4)  # type: ignore[no-untyped-call]
    for source in cells:
        example.cells.append(nbformat.v4.new_code_cell(source))  # type: ignore[no-untyped-call]
    nbformat.write(example, path)  # type: ignore[no-untyped-call]
    return path


@contextmanager
def lab(home: Path, opened: Path, *, dark: bool = False, path: str = "") -> Iterator[str]:
    """``sublet lab``, and the address it prints. Configuration is its own and nobody else's."""
    places = opened.parent / ".jupyter"
    keep_quiet(opened.parent, places / "config", dark=dark)
    env = plain_env()
    env |= {f"JUPYTER_{name.upper()}_DIR": str(places / name) for name in ("config", "data", "runtime")}
    env |= {"SUBLET_HOME": str(home), "IPYTHONDIR": str(places / "ipython"), "JUPYTER_PATH": path}
    env |= light_environment(places / "python")
    with open(opened.parent / ".lab.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sublet", "lab", "--no-browser", str(opened)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    said: list[str] = []
    timer = threading.Timer(PATIENCE_MS / 1000, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"https?://\S+", line):
                break
        else:
            raise AssertionError("".join(said) + (opened.parent / ".lab.log").read_text())
        timer.cancel()
        yield found[0]
    finally:
        timer.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def keep_quiet(home: Path, config: Path | None = None, *, dark: bool = False) -> None:
    """No news, and every cell of a notebook is in its page, for a user with this home."""
    settings = (config or home / ".jupyter") / "lab" / "user-settings" / "@jupyterlab"
    _write(settings / "apputils-extension" / "notification.jupyterlab-settings", QUIET["notification"])
    theme = {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"}
    _write(settings / "apputils-extension" / "themes.jupyterlab-settings", theme)
    _write(settings / "notebook-extension" / "tracker.jupyterlab-settings", {"windowingMode": "none"})


def _write(path: Path, settings: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))


@contextmanager
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, PROGRAMS))), args=CHROMIUM
        )
        try:
            yield made
        finally:
            made.close()


@contextmanager
def opened(address: str) -> Iterator[Page]:
    """The notebook at this address, in a browser of its own. A picture shows what fits into the window."""
    with browser() as chromium:
        page = chromium.new_context(
            viewport={"width": 1000, "height": 3400 if PICTURES else 1000}, reduced_motion="reduce"
        ).new_page()
        try:
            yield Page(page, address)
        except BaseException:
            if PICTURES:
                page.screenshot(path=Path(PICTURES) / "failed.png")
            raise


class Page:
    """JupyterLab, as somebody sees it; cells are those of the notebook whose tab is in front."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        page.set_default_timeout(PATIENCE_MS)
        if page.url != address:
            page.goto(address)
        self._wait_ready()

    def _wait_ready(self) -> None:
        self.cell(0).wait_for()
        self.wait_idle()  # a cell that is run before asks which kernel is meant

    def wait_idle(self) -> None:
        self.page.locator("#jp-bottom-panel", has_text="| Idle").wait_for()

    def open(self, name: str) -> None:
        """Another notebook of the folder, in a tab of its own."""
        self.menu("File", "Open from Path…")
        self.page.locator(".jp-Dialog input").fill(name)
        self.agree()
        self._tab(name).wait_for()
        self._wait_ready()

    def show(self, name: str) -> None:
        """A notebook that is open."""
        self._tab(name).click()

    def _tab(self, name: str) -> Any:
        return self.page.locator("#jp-main-dock-panel .lm-TabBar-tab", has_text=name)

    def close(self, name: str) -> None:
        """The notebook in front, and its kernel."""
        self.menu("File", "Close and Shut Down Notebook")
        self.agree()
        self._tab(name).wait_for(state="detached")

    def menu(self, name: str, entry: str) -> None:
        """Choose an entry of a menu."""
        self.page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{name}$")).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile(f"^{entry}")).first.click()

    def agree(self) -> None:
        """Press the button that a dialog recommends."""
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def cell(self, number: int) -> Any:
        """A code cell, counted from 0."""
        return self.page.locator(f"{SHOWN} .jp-CodeCell").nth(number)

    def run(self, number: int) -> None:
        """Click into a cell and press Shift-Enter."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def said(self, number: int) -> str:
        """What stands below a cell."""
        return str(self.cell(number).locator(".jp-Cell-outputArea").inner_text())

    def wait_said(self, number: int, text: str) -> str:
        """Until this stands there."""
        self.cell(number).locator(".jp-Cell-outputArea", has_text=re.compile(text)).wait_for()
        return self.said(number)

    def wait_seen_again(self, number: int, text: str, *, unlike: str) -> str:
        """Until this stands below a cell, in another way than before."""
        wanted = f"([number, pattern, before]) => {{ const said = document.querySelectorAll('{SHOWN} .jp-CodeCell')"
        wanted += "[number].querySelector('.jp-Cell-outputArea').innerText;"
        wanted += " return said !== before && new RegExp(pattern).test(said) }"
        self.page.wait_for_function(wanted, arg=[number, text, unlike], polling=POLL_MS)
        return self.said(number)

    def count_images(self, number: int) -> int:
        """Of those below a cell, once there is one."""
        images = self.cell(number).locator(".jp-Cell-outputArea img")
        images.first.wait_for()
        return int(images.count())

    def watch(self, number: int) -> None:
        """Remember whatever stands below a cell from now on, however short."""
        self.cell(number).evaluate(
            "cell => { window.seen = []; new MutationObserver(() => window.seen.push(cell.innerText))"
            ".observe(cell, {subtree: true, childList: true, characterData: true}) }"
        )

    def wait_seen(self, text: str) -> str:
        """Until this stands there, or has stood there; what stood there then."""
        found = f"() => window.seen.find(text => text.includes({json.dumps(text)}))"
        self.page.wait_for_function(found, polling=POLL_MS)
        return str(self.page.evaluate(found))

    def wait_done(self, number: int) -> str:
        """Until the cell has its number; what stands below it."""
        self.cell(number).locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]")).first.wait_for()
        return self.said(number)

    def interrupt(self) -> None:
        """Press ``I`` twice, as one does."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("i")
        self.page.keyboard.press("i")

    def picture(self, path: Path, first: int, last: int) -> None:
        """Of these cells and all between them."""
        boxes = [self.cell(number).bounding_box() for number in (first, last)]
        top, bottom = boxes[0]["y"], boxes[1]["y"] + boxes[1]["height"]
        clip = {"x": boxes[0]["x"], "y": top, "width": boxes[0]["width"], "height": bottom - top}
        self.page.screenshot(path=path, clip=clip)
