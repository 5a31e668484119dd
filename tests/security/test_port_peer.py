"""A client sends nothing to a port of this machine that another user took: neither a token nor anything else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sublet
import sublet.aio
from sublet.errors import InvalidRequest
from sublet.studio.hub import _Servers
from sublet.studio.remote import RemoteStore
from sublet.wire.ports import TRUSTED_VARIABLE, check_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")

STRANGER = 64_021
TOKEN = "sublet_this-is-secret"
LISTENER = """
import json, os, socket, sys
uid, host = int(sys.argv[1]), sys.argv[2]
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind((host, 0))
sock.listen(16)
print(sock.getsockname()[1], flush=True)
accepted = []
for line in sys.stdin:
    if line == "accept and make way\\n":
        accepted.append(sock.accept()[0])
        sock.close()
        print("[]", flush=True)
    else:
        sock.setblocking(False)
        received = []
        try:
            while True:
                found = sock.accept()[0]
                found.settimeout(5)
                received.append(found.recv(65536).decode("latin-1"))
        except BlockingIOError:
            pass
        print(json.dumps(received), flush=True)
"""


class Taken:
    """A port that another user's process has."""

    def __init__(self, host: str, uid: int = STRANGER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", LISTENER, str(uid), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": os.defpath},
        )
        self.port = int(self._line())

    def ask(self, what: str) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        found: list[str] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def taken() -> Iterator[Callable[..., Taken]]:
    made: list[Taken] = []

    def make(host: str, uid: int = STRANGER) -> Taken:
        made.append(Taken(host, uid))
        return made[-1]

    yield make
    for one in made:
        one.close()


def sync(url: str) -> None:
    sublet.connect(url, token=TOKEN).status()


def in_a_loop(url: str) -> None:
    async def asked() -> None:
        async with await sublet.aio.connect(url, token=TOKEN) as fabric:
            await fabric.status()

    asyncio.run(asked())


def a_notebooks_records(url: str) -> None:
    RemoteStore(url, TOKEN).read(0)


def a_hub(url: str) -> None:
    _Servers(studio=url, office="unix:///run/sublet/office.sock", token=TOKEN)._ask("/v1/hub/servers", {"user": "ana"})


def test_no_entry_point_sends_a_byte(taken: Callable[..., Taken]) -> None:
    """The port of a studio that is just being started again, say, for which any user may wait."""
    stranger = taken("127.0.0.1")
    for ask in (sync, in_a_loop, a_notebooks_records, a_hub):
        with pytest.raises(InvalidRequest, match=rf"of uid {STRANGER}; nothing was sent") as refused:
            ask(f"http://127.0.0.1:{stranger.port}")
        assert f"{TRUSTED_VARIABLE}={STRANGER}" in refused.value.do
    assert stranger.ask("what came") == [""] * 4


def connected(host: str, port: int) -> Any:
    return socket.create_connection((host, port), timeout=10)


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::", "::1"), ("::1", "::1")]
)
def test_it_is_seen_at_whichever_address_it_listens(taken: Callable[..., Taken], bound: str, host: str) -> None:
    if ":" in bound and not Path("/proc/net/if_inet6").read_text().strip():
        pytest.skip("this machine has no address of version 6")
    with connected(host, taken(bound).port) as sock, pytest.raises(InvalidRequest, match=f"uid {STRANGER}"):
        check_port(sock)


def test_a_connection_that_a_stranger_has_is_not_the_next_listeners(taken: Callable[..., Taken]) -> None:
    stranger = taken("127.0.0.1")
    with connected("127.0.0.1", stranger.port) as sock, socket.socket() as next_one:
        stranger.ask("accept and make way")
        next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        next_one.bind(("127.0.0.1", stranger.port))
        next_one.listen()
        with pytest.raises(InvalidRequest, match=f"uid {STRANGER}"):
            check_port(sock)


def test_this_user_a_service_and_whom_the_user_names_are_trusted(
    taken: Callable[..., Taken], monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid in (os.getuid(), 120):
        with connected("127.0.0.1", taken("127.0.0.1", uid).port) as sock:
            check_port(sock)
    monkeypatch.setenv(TRUSTED_VARIABLE, str(STRANGER))
    with connected("127.0.0.1", taken("127.0.0.1").port) as sock:
        check_port(sock)
