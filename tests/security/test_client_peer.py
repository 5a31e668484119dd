"""A client sends nothing to a socket that another user could have put there: neither its token nor anything else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import sublet
import sublet.aio
from sublet.client.home import runtime_dir, runtime_text
from sublet.client.line import connect_data
from sublet.errors import InvalidRequest
from sublet.wire.unix import short_path
from tests.security.other_users import COMMANDS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")

STRANGER = 65534
TOKEN = "sublet_this-is-secret"


class Trap:
    """Listeners that wait behind the names of the office's sockets, and what they received."""

    def __init__(self, folder: Path) -> None:
        self.received: list[bytes] = []
        self._socks = []
        for name in ("office.sock", "data.sock", "supervisor.sock"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with short_path(str(folder / name)) as address:
                sock.bind(address)
            sock.listen(16)
            sock.settimeout(0.05)
            self._socks.append(sock)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(sock,)) for sock in self._socks]
        for thread in self._threads:
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        while not self._over.is_set():
            try:
                accepted, _ = sock.accept()
            except TimeoutError:
                continue
            with accepted:
                accepted.settimeout(0.2)
                try:
                    if data := accepted.recv(65536):
                        self.received.append(data)
                except OSError:
                    continue

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("SUBLET_HOME", str(home))
    monkeypatch.setenv("SUBLET_TOKEN", TOKEN)
    monkeypatch.delenv("SUBLET_URL", raising=False)
    return home


def by_another_user(folder: Path) -> None:
    os.chown(folder, STRANGER, STRANGER)


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def by_a_link(folder: Path) -> None:
    real = folder.with_name(folder.name + "-real")
    folder.rename(real)
    folder.symlink_to(real)


@pytest.fixture(params=[by_another_user, open_to_all, by_a_link])
def trap(request: pytest.FixtureRequest, home: Path) -> Iterator[Trap]:
    folder = runtime_dir(home)
    folder.mkdir(mode=0o700)
    found = Trap(folder)
    spoil: Callable[[Path], None] = request.param
    spoil(folder)
    yield found
    found.close()
    real = folder.resolve()
    for name in ("office.sock", "data.sock", "supervisor.sock"):
        (real / name).unlink()
    if folder.is_symlink():
        folder.unlink()
    real.rmdir()


CELLS: Final = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("%load_ext sublet").raise_error()
sys.exit(not shell.run_cell("%%gpu --vram 64MiB\\npass").success)
"""


def test_no_entry_point_sends_a_byte(trap: Trap, request: pytest.FixtureRequest) -> None:
    def sync() -> None:
        with sublet.connect() as fabric:
            fabric.leases()

    async def aio() -> None:
        async with await sublet.aio.connect() as fabric:
            await fabric.leases()

    def data() -> None:
        with connect_data(sublet.client.address.find_address(None, None, None, os.environ), ""):
            pass

    for entry in (sync, lambda: asyncio.run(aio()), data):
        with pytest.raises(InvalidRequest, match="nothing was sent"):
            entry()
    words: tuple[tuple[str, ...], ...] = (
        ("status",),
        ("top", "--once"),
        ("run", "--cpu", "1", "--", "true"),
        ("lease", "ls"),
        ("ps",),
        ("exec", "l-1", "--", "true"),
        ("volume", "ls"),
        ("bill",),
        ("up",),
        ("down",),
    )
    programs = [["-c", COMMANDS, json.dumps([[one, {}] for one in words])]]
    if request.node.callspec.params["trap"] is by_another_user:
        programs += [["-m", "sublet", "status"], ["-W", "ignore", "-c", CELLS]]
    told: list[list[Any]] = []
    for program in programs:
        done = subprocess.run([sys.executable, *program], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        told += [[program, done.stdout, done.stderr]] if done.returncode else json.loads(done.stdout)
    for one, (status, out, err) in zip((*words, *programs[1:]), told, strict=True):
        assert status, one
        assert "nothing was sent" in out + err, (one, out, err)
    assert trap.received == []


def test_the_folder_is_never_one_that_others_can_make_first(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for uid, place in ((0, "/run"), (64_021, str(home))):
        monkeypatch.setattr("os.getuid", lambda uid=uid: uid)
        assert runtime_text(str(home)).startswith(place)


def test_a_folder_that_a_stranger_made_where_earlier_versions_had_theirs_is_ignored(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = runtime_dir(home)
    monkeypatch.setattr("sublet.client.home.EARLIER", str(tmp_path / "earlier"))
    folder = tmp_path / "earlier" / expected.name
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, STRANGER, STRANGER)
    trap = Trap(folder)
    try:
        assert runtime_dir(home) == expected
    finally:
        trap.close()
    assert trap.received == []
