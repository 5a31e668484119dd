"""Connections that say nothing take no connection from those that do: not from the owner, not from another user."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import sublet
from sublet.client.home import data_path, socket_path
from sublet.wire.unix import short_path
from tests.security.conftest import Place

PYTHON: Final = "/usr/bin/python3"
"""One that every user may run."""
STRANGER: Final = 65534
NEIGHBOUR: Final = 65533
TO_CONTROL: Final = 4300
TO_DATA: Final = 600
ASKS: Final = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer sublet_x\r\n\r\n"


@pytest.fixture(autouse=True)
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = TO_CONTROL + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may have {hard} descriptors here, and the attack takes {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def silent(path: Path, count: int) -> Iterator[None]:
    """So many connections that are open and say nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connected(path))
        yield


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(os.fspath(path)) as address:
        sock.connect(address)
    return sock


def test_the_operator_is_answered_beside_4300_silent_connections(place: Place) -> None:
    with silent(socket_path(place.home), TO_CONTROL):
        for _ in range(3):
            with sublet.connect(home=place.home) as operator:
                assert operator.request("GET", "/v1/status", shape=dict)["pid"]


def test_a_command_is_started_beside_600_silent_visitors_of_the_data_door(place: Place) -> None:
    with place.ana.cpu(1) as lease, silent(data_path(place.home), TO_DATA):
        assert lease.start(["true"], cwd="/").wait(timeout=60) == 0


_OF_ANOTHER_USER: Final = """
import contextlib, resource, socket, sys
count = int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
socks = []
for _ in range(count):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    if len(sys.argv) > 3:
        with contextlib.suppress(OSError):
            sock.sendall(sys.argv[3].encode())
    socks.append(sock)
if len(sys.argv) > 3:
    print(socks[-1].recv(65536).split(b"\\r\\n")[0].decode(), flush=True)
else:
    print("connected", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def open_to_all(path: Path) -> Iterator[Path]:
    """The socket as other users may reach it."""
    path.parent.chmod(0o711)
    path.chmod(0o666)
    try:
        yield path
    finally:
        path.chmod(0o600)
        path.parent.chmod(0o700)


def as_user(uid: int, path: Path, count: int, said: bytes = b"") -> subprocess.Popen[str]:
    words = [PYTHON, "-I", "-S", "-c", _OF_ANOTHER_USER, os.fspath(path), str(count)]
    if said:
        words.append(said.decode())
    return subprocess.Popen(words, user=uid, group=uid, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")
@pytest.mark.parametrize("said", [b"", ASKS.replace(b"Connection: close\r\n", b"")], ids=["silent", "idle"])
def test_one_user_keeps_neither_the_operator_nor_another_user_out(place: Place, said: bytes) -> None:
    """Whether its connections say nothing, or were answered once and stay open."""
    with open_to_all(socket_path(place.home)) as path:
        attacker = as_user(STRANGER, path, TO_CONTROL, said)
        try:
            assert attacker.stdout is not None
            assert attacker.stdout.readline().strip() == (
                "connected" if not said else "HTTP/1.1 503 Service Unavailable"
            )
            neighbour = as_user(NEIGHBOUR, path, 1, ASKS)
            assert neighbour.communicate(timeout=60)[0].strip() == "HTTP/1.1 401 Unauthorized"
            with sublet.connect(home=place.home) as operator:
                assert operator.request("GET", "/v1/status", shape=dict)["pid"]
        finally:
            attacker.kill()
            attacker.communicate()
