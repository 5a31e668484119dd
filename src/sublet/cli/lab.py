"""``sublet lab``: runs JupyterLab with an office, and ends both together."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

from sublet.cli.call import CommandOffice, NoOffice
from sublet.cli.declare import Arg, Opt
from sublet.cli.exit_status import DONE, FAILED
from sublet.cli.parsing import count
from sublet.cli.show import plural, visible
from sublet.errors import Disconnected, InvalidRequest, NotFound, SubletError, Unsupported
from sublet.invocation import installing, typeable
from sublet.lease.states import SliceState
from sublet.node.prctl import set_pdeathsig
from sublet.values import Kind

EXAMPLE: Final = "five-minute-gpu.ipynb"
START_S: Final = 60.0
"""JupyterLab takes a second or two; a busy machine may need more."""
LISTENS_S: Final = 2.0
STOP_S: Final = 15.0
"""It ends its kernels first, and they give back their leases."""
GIVEN_BACK_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.05
_NEEDED: Final = {"jupyterlab": "jupyterlab", "ipykernel": "sublet[notebook]"}
"""Module → what brings it."""


def lab(
    *,
    where: Annotated[
        str | None, Arg("NOTEBOOK|FOLDER", help="What to open (default: a copy of the example notebook).")
    ] = None,
    no_browser: Annotated[bool, Opt("--no-browser", help="Print the address and open no browser.")] = False,
    port: Annotated[
        int | None, Opt("--port", metavar="N", parse=count, help="Port to listen on (default: a free one).")
    ] = None,
) -> int:
    """Open JupyterLab, with an office running.

    `%load_ext sublet` and `%%gpu` work there at once. Without a notebook it opens the example: a GPU for five minutes,
    lost in the middle, and what happens then. Ctrl-C ends JupyterLab and its kernels, and the office if this command
    started it and no other program uses it.
    """
    _check_installed()
    folder, opened = place(where)
    with _office():
        return _serve(folder, opened, port=port, no_browser=no_browser)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed beside this Sublet",
            do=f"Install it: `{installing(*(_NEEDED[name] for name in missing))}`.",
        )


def place(where: str | None) -> tuple[Path, str]:
    """The folder that JupyterLab shows, and what it opens there."""
    if where is None:
        return Path.cwd(), _example(Path.cwd())
    path = Path(where).expanduser().absolute()
    if path.is_dir():
        return path, ""
    if not path.exists():
        raise NotFound(f"there is no {where}", do="Name a notebook or a folder that is there, or none for the example.")
    if path.suffix != ".ipynb":
        raise InvalidRequest(f"{where} is no notebook", do="Name a file that ends in .ipynb, or a folder.")
    return path.parent, path.name


def _example(folder: Path) -> str:
    """A copy to play with. An existing one may hold work, and stays as it is."""
    from importlib import resources

    target = folder / EXAMPLE
    try:
        with open(target, "xb") as file:
            file.write(resources.files("sublet.notebook").joinpath(EXAMPLE).read_bytes())
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidRequest(
            f"the example cannot be written into {folder} ({error.strerror})",
            do="Go to a folder of yours, or name one.",
        ) from error
    return target.name


@contextlib.contextmanager
def _office() -> Iterator[None]:
    """An office that answers. One that was started here ends afterwards, unless another program uses it."""
    office = CommandOffice.reach(start=False)
    try:
        office.get("/v1/hello")
        was_running = True
    except NoOffice:
        was_running = False
    office = CommandOffice.reach()
    all_devices = office.get("/v1/status")["devices"]
    devices = [device for device in all_devices if device["kind"] == Kind.GPU and device["state"] != SliceState.LOST]
    kind = "host device, no GPU" if all(device["host"] for device in devices) else "GPU"
    print(f"The office {'is up already' if was_running else 'is up'}: {plural(len(devices), 'device')} ({kind}).")
    try:
        yield
    finally:
        if not was_running:
            _end(office)


def _end(office: CommandOffice) -> None:
    until_s = time.monotonic() + GIVEN_BACK_S
    while True:
        try:
            office.post("/v1/down", {"how": "idle"})
        except InvalidRequest as error:  # leases live: of a kernel that is just leaving, or of another program
            if time.monotonic() < until_s:
                time.sleep(_LOOK_EVERY_S)
                continue
            print(typeable(f"The office goes on: {visible(error.message)}. `sublet down` ends it."))
        except SubletError:  # gone by itself
            return
        else:
            print("The office has ended.")
        return


def _serve(folder: Path, opened: str, *, port: int | None, no_browser: bool) -> int:
    words = [f"--ServerApp.root_dir={folder}", "--no-browser", "--ServerApp.log_level=WARN"]
    if port is not None:
        words += [f"--port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:
        words.append("--allow-root")
    log, ours = _log(), os.getpid()
    with open(log, "wb") as output:
        # A session of its own: Ctrl-C is for us, and JupyterLab would ask whether it was meant. It ends with us, even
        # if we are killed.
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: set_pdeathsig(signal.SIGTERM, ours),  # noqa: PLW1509 - there are no threads
        )
    with _ended(process), _signals_as_interrupt():
        try:
            address = _address(process, opened, log)
            print(f"JupyterLab is up: {address}\n  Ctrl-C ends it and its kernels. It logs to {log}.", flush=True)
            if not no_browser:
                import webbrowser

                webbrowser.open(address)
            status = process.wait()
        except KeyboardInterrupt:
            print("\nJupyterLab ends.", flush=True)
            return DONE
    return DONE if status == 0 else FAILED


def _log() -> Path:
    """What JupyterLab and its kernels say beside what is shown in the browser."""
    from jupyter_core.paths import jupyter_runtime_dir

    folder = Path(jupyter_runtime_dir())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"sublet-lab-{os.getpid()}.log"


def _address(process: subprocess.Popen[bytes], opened: str, log: Path) -> str:
    facts = log.parent / f"jpserver-{process.pid}.json"
    until_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, ValueError):  # not there, not yet whole, or not yet listening
            server: dict[str, Any] = json.loads(facts.read_text())
            socket.create_connection((server["hostname"], server["port"]), LISTENS_S).close()
            path = f"lab/tree/{quote(opened)}" if opened else "lab"
            return f"{server['url']}{path}?token={server['token']}"
        if process.poll() is not None:
            raise Disconnected(f"JupyterLab ended as it began{_last(log)}", do=f"All it said is in {log}.")
        if time.monotonic() > until_s:
            raise Disconnected(f"JupyterLab has not begun after {START_S:.0f} s", do=f"What it said is in {log}.")
        time.sleep(_LOOK_EVERY_S)


def _last(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {visible(lines[-1])}" if lines else ""


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Gone at the end of the block, with its kernels, whose leases go back."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP are taken as Ctrl-C is."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
