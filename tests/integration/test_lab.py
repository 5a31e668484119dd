"""``sublet lab``: an office and a JupyterLab that are there together, and gone together."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from sublet.cli import main
from sublet.cli.lab import EXAMPLE, place
from sublet.client.home import runtime_dir, socket_path
from sublet.client.office import answers
from tests.light_jupyter import light_environment
from tests.traces import plain_env, until


def env_of(folder: Path) -> dict[str, str]:
    env = plain_env()
    env |= {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in ("config", "data", "runtime")}
    env |= light_environment(folder / "python")
    return env | {"SUBLET_HOME": str(folder / "home"), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    home = (tmp_path / "home").resolve()
    if answers(socket_path(home)):
        subprocess.run([sys.executable, "-m", "sublet", "down", "--now"], env=env_of(tmp_path), check=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_it_started_ends_with_it(folder: Path, number: signal.Signals) -> None:
    """It says where it is, answers there, and after Ctrl-C neither it nor the office is left. Killed, it leaves an
    office that ends by itself when it is idle, and no JupyterLab."""
    port = free_port()
    lab = subprocess.Popen(
        [sys.executable, "-m", "sublet", "lab", "--no-browser", "--port", str(port), str(folder)],
        env=env_of(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert lab.stdout is not None
    said = ""
    try:
        while (match := re.search(r"(http://localhost:\d+)/lab\?(token=\w+)", said)) is None:
            line = lab.stdout.readline()
            assert line, said
            said += line
        assert f":{port}" in match[1]
        with urllib.request.urlopen(f"{match[1]}/api/status?{match[2]}", timeout=120) as answer:
            assert answer.status == 200
        assert answers(socket_path((folder / "home").resolve()))
        lab.send_signal(number)
        said += lab.communicate(timeout=120)[0]
    finally:
        lab.kill()
        lab.wait()
        lab.stdout.close()
    if number is signal.SIGINT:
        assert lab.returncode == 0, said
        assert "The office has ended." in said
        assert not runtime_dir((folder / "home").resolve()).joinpath("office.sock").exists()
    until("nobody listens there", lambda: not listens(port))


def free_port() -> int:
    """Below those that the kernel gives to connections: one of another test could have it before the program has."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = 1024 + os.getpid() % (low - 1024)
    while not is_free(port):
        port = port + 1 if port + 1 < low else 1024
    return port


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_without_a_notebook_it_is_a_copy_of_the_example_that_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place(None) == (tmp_path, EXAMPLE)
    assert nbformat.read(tmp_path / EXAMPLE, as_version=4).cells  # type: ignore[no-untyped-call]
    (tmp_path / EXAMPLE).write_text("somebody's work")
    assert place(None) == (tmp_path, EXAMPLE)
    assert (tmp_path / EXAMPLE).read_text() == "somebody's work"
    assert place(str(tmp_path)) == (tmp_path, "")


def test_what_is_missing_is_said_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    missing: Any = lambda name, *rest: None if name == "jupyterlab" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert main(["lab"]) == 1
    said = capsys.readouterr().err
    assert "jupyterlab is not installed" in said
    assert f"{sys.executable} -m pip install jupyterlab" in said


def test_what_is_no_notebook_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUBLET_HOME", str(tmp_path / "home"))
    (tmp_path / "notes.txt").write_text("words")
    assert main(["lab", str(tmp_path / "nobody.ipynb")]) == 1
    assert main(["lab", str(tmp_path / "notes.txt")]) == 2
    assert "no notebook" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
