"""Runs one notebook in an ordinary ipykernel, as a front end does, and writes down what each cell showed and left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import sublet
from sublet.client.home import runtime_dir
from sublet.client.office import ensure_office
from tests.notebook.corpus.notebooks import Mode, Notebook, choose_cells
from tests.notebook.kernel_sockets import KernelSockets

__all__ = ["Cell", "Kernel", "KernelDied", "Run", "kernel_on", "office_on", "run_notebook", "with_gpu"]

PATIENCE_S: Final = 300.0
"""For one cell."""
QUIET_S: Final = 2.0
"""Between looks at whether the kernel is still alive."""
PROBE: Final = Path(__file__).with_name("probe.py")
SETUP: Final = f"""
import importlib.util as _u, sys as _s
_spec = _u.spec_from_file_location("corpus_probe", {str(PROBE)!r})
_s.modules["corpus_probe"] = _m = _u.module_from_spec(_spec)
_spec.loader.exec_module(_m)
del _u, _s, _spec, _m
"""
STATUS: Final = "sublet: "
MAGIC: Final = "%%gpu"


class KernelDied(Exception):
    """The notebook's own kernel is gone."""


@dataclass(slots=True, kw_only=True)
class Cell:
    """What a cell showed, and what was there after it."""

    source: str
    streams: dict[str, str] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    """Results and displays in their order, as they stand in the end; each by its types."""
    error: tuple[str, str] | None = None
    payload: list[Any] = field(default_factory=list)
    """Of the reply: what a front end shows in its pager."""
    status: list[str] = field(default_factory=list)
    """Sublet's own line, as it changed. Not part of what the cell showed."""
    names: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    """The value of one name, part by part, where that was asked for."""
    took_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a notebook from top to bottom."""

    notebook: str
    mode: Mode
    seed: int
    folder: Path
    cells: list[Cell] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    """Of the libraries whose settings are looked at, those that were loaded in the end."""
    died_in: int | None = None
    """The cell in which the kernel died."""

    @property
    def took_s(self) -> float:
        return sum(cell.took_s for cell in self.cells)


class Kernel:
    """One ipykernel and its client."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        from jupyter_client.manager import KernelManager

        self._folder = folder
        self.manager: Any = KernelManager(kernel_name="python3")
        self._sockets = KernelSockets()
        self._sockets.use_for(self.manager)
        with open(folder.parent / "kernel.log", "ab") as log:
            self.manager.start_kernel(cwd=str(folder), env=dict(env), stdout=log, stderr=log)
        self.client: Any = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def silent(self, code: str) -> None:
        """Run something that is no cell."""
        self._finish(self.client.execute(code, silent=True, store_history=False), Cell(source=code), must=True)

    def run(self, source: str, meanwhile: Callable[[], object] = lambda: None) -> Cell:
        """Run a cell. ``meanwhile`` is called when the kernel was asked."""
        cell = Cell(source=source)
        began_s = time.monotonic()
        asked = self.client.execute(source, allow_stdin=False)
        meanwhile()
        self._finish(asked, cell)
        cell.took_s = time.monotonic() - began_s
        return cell

    def look(self, cell: Cell, load: tuple[str, ...] = (), trace: str = "") -> list[str]:
        """Write into the cell what is there now."""
        path = self._folder.parent / "looked.json"
        path.unlink(missing_ok=True)
        asked = f"__import__('sys').modules['corpus_probe'].look(get_ipython().user_ns, {str(path)!r}, {load!r}"
        self.silent(f"{asked}, {trace!r})")
        found = json.loads(path.read_text())
        cell.names, cell.settings = found["names"], found["settings"]
        cell.trace = found.get("trace", [])
        loaded: list[str] = found["loaded"]
        return loaded

    def _finish(self, asked: str, cell: Cell, *, must: bool = False) -> None:
        shown = _Shown(cell)
        until_s = time.monotonic() + PATIENCE_S
        while True:
            message = self._next(self.client.get_iopub_msg, until_s)
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            shown.take(message)
        while True:  # of a kernel that was killed just now the end of the cell may have come, and its answer may not
            reply = self._next(self.client.get_shell_msg, until_s)
            if reply["parent_header"].get("msg_id") == asked:
                break
        content = reply["content"]
        cell.payload = content.get("payload") or []
        shown.finish()
        if content["status"] == "error" and cell.error is None:
            cell.error = (content.get("ename", ""), content.get("evalue", ""))
        if must and content["status"] != "ok":
            raise AssertionError(f"{cell.source}: {content.get('ename')}: {content.get('evalue')}")

    def _next(self, receive: Callable[..., Any], until_s: float) -> Any:
        while True:
            with contextlib.suppress(queue.Empty):
                return receive(timeout=QUIET_S)
            if not self.manager.is_alive():
                raise KernelDied
            if time.monotonic() > until_s:
                raise TimeoutError(f"the cell does not end in {PATIENCE_S:.0f} s")

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def close(self) -> None:
        from jupyter_core.utils import ensure_event_loop

        self.client.stop_channels()
        self.manager.shutdown_kernel(now=not self.manager.is_alive())
        self.manager.cleanup_resources()
        self._sockets.remove()
        ensure_event_loop().close()  # the one that the manager's calls have made for this thread


class _Shown:
    """What stands below one cell, as a front end keeps it."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._by_id: dict[str, list[dict[str, Any]]] = {}
        self._clears_next = False

    def take(self, message: Any) -> None:
        kind, content, cell = message["msg_type"], message["content"], self._cell
        if kind in ("display_data", "update_display_data") and self._is_status(content):
            return
        if self._clears_next and kind in ("stream", "display_data", "execute_result", "error"):
            self._clear()
        match kind:
            case "stream":
                cell.streams[content["name"]] = cell.streams.get(content["name"], "") + content["text"]
            case "display_data" | "execute_result":
                one = {"kind": kind, "data": dict(content["data"])}
                cell.shown.append(one)
                if place := content.get("transient", {}).get("display_id"):
                    self._by_id.setdefault(place, []).append(one)
            case "update_display_data":
                for one in self._by_id.get(content["transient"]["display_id"], ()):
                    one["data"] = dict(content["data"])
            case "clear_output":
                if content.get("wait"):
                    self._clears_next = True
                else:
                    self._clear()
            case "error":
                cell.error = (content["ename"], content["evalue"])
            case _:
                pass

    def _is_status(self, content: Any) -> bool:
        text = content["data"].get("text/plain", "")
        if not text.startswith(STATUS):
            return False
        self._cell.status.append(text.removeprefix(STATUS))
        return True

    def _clear(self) -> None:
        self._clears_next = False
        self._cell.streams.clear()
        self._cell.shown.clear()
        self._by_id.clear()

    def finish(self) -> None:
        self._cell.streams = {name: text for name, text in self._cell.streams.items() if text}


def with_gpu(source: str, options: str = "") -> str:
    """The cell with ``%%gpu`` above it; a magic that it begins with stays."""
    return f"{MAGIC} {options}".rstrip() + f"\n{source}"


def run_notebook(
    notebook: Notebook,
    mode: Mode,
    folder: Path,
    env: Mapping[str, str],
    *,
    seed: int = 1,
    options: str = "",
    looks: bool = True,
    load: tuple[str, ...] = (),
    trace: str = "",
) -> Run:
    """From top to bottom. ``looks``: at names and settings after each cell. ``load``: libraries to compare at last."""
    run = Run(notebook=notebook.name, mode=mode, seed=seed, folder=folder)
    there = choose_cells(notebook, mode, seed)
    with kernel_on(notebook, folder, env, is_plain=mode == "plain") as kernel:
        for number, source in enumerate(notebook.cells):
            try:
                cell = kernel.run(with_gpu(source, options) if number in there else source)
                run.cells.append(cell)
                if looks:
                    is_last = number == len(notebook.cells) - 1
                    run.loaded = kernel.look(cell, load if is_last else (), trace)
            except KernelDied:
                run.died_in = number
                break
    return run


@contextlib.contextmanager
def kernel_on(notebook: Notebook, folder: Path, env: Mapping[str, str], *, is_plain: bool) -> Iterator[Kernel]:
    """A kernel in a working folder of its own, seeded, with the probe and (unless it runs plainly) with ``%%gpu``."""
    shutil.rmtree(folder, ignore_errors=True)
    work = notebook.lay_out(folder)
    kernel = Kernel(work, {**os.environ, "PYTHONHASHSEED": "0", "IPYTHONDIR": str(folder / "ipython"), **env})
    try:
        kernel.silent(SETUP)
        kernel.run("pass" if is_plain else "%load_ext sublet")
        kernel.run(notebook.prelude)
        yield kernel
    finally:
        kernel.close()


@contextlib.contextmanager
def office_on(home: Path, devices: str = "1x4GiB") -> Iterator[dict[str, str]]:
    """An office of its own, and the environment in which notebooks find it."""
    home.mkdir(parents=True, exist_ok=True)
    ensure_office(home, words=("up", "--host-gpus", devices, "--foreground"))
    try:
        yield {"SUBLET_HOME": str(home)}
    finally:
        with sublet.connect(home=home) as fabric:
            fabric.request("POST", "/v1/down", {"how": "now"}, shape=dict)
        shutil.rmtree(runtime_dir(home.resolve()), ignore_errors=True)
