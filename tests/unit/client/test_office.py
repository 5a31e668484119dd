"""An office that is started: what is said of one that did not come up, and one that ends as it is asked."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sublet.client import aio_fabric, fabric, office
from sublet.client.address import Address
from sublet.client.clocks import client_clock
from sublet.client.fabric import HELLO_TRIES
from sublet.client.office import _failed, ensure_office
from sublet.client.steps import HttpReply
from sublet.errors import Disconnected, JournalError
from sublet.office.journal.files import LOCK_NAME, HomeLock
from sublet.wire.http import Hello
from sublet.wire.version import WIRE_VERSION
from tests.unit.client.script import NOBODY, reply


def test_one_that_could_not_write_a_word_is_asked_for(tmp_path: Path) -> None:
    """Most often there is no room for it; else nobody knows."""
    log = tmp_path / "office.log"
    log.touch()
    assert str(_failed(log, 0, "it did not start").message) == "it did not start: it wrote nothing to its log"
    assert [path.name for path in tmp_path.iterdir()] == ["office.log"]
    (tmp_path / "full").symlink_to("/proc/self")
    said = _failed(tmp_path / "full" / "limits", 1 << 20, "it did not start").message
    assert said == f"it did not start: no such file or directory in {tmp_path}/full"


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("pid", ["", "0", "ours"])
@pytest.mark.parametrize("starting_s", [0.0, 1e9])
def test_an_office_that_an_interrupted_program_has_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answered: bool, pid: str, starting_s: float
) -> None:
    """It has the journal and does not answer yet, so the one that is started now ends with that. It may not have
    written down its pid. One that is older has lost its socket, and is not waited for."""
    home, looks = tmp_path / "home", iter([False] * 5 + [answered] * 1_000_000)
    home.mkdir(mode=0o700)
    lock = HomeLock.take(home)
    if pid != "ours":
        (home / LOCK_NAME).write_text(pid)

    def spawn(home: Path, log: int, *_: object) -> int:
        with pytest.raises(JournalError) as refused:
            HomeLock.take(home)
        os.write(log, f"sublet: {refused.value.message}\n".encode())
        child = subprocess.Popen(["true"])
        child.wait()
        return child.pid

    monkeypatch.setattr(office, "_spawn", spawn)
    monkeypatch.setattr(office, "answers", lambda path: next(looks))
    monkeypatch.setattr(office, "STARTING_S", starting_s)
    if answered and starting_s:
        ensure_office(home)
    else:
        with pytest.raises(Disconnected, match=r"another office \(pid \w+\) has the journal"):
            ensure_office(home, patience_s=0.2 if starting_s else 60.0)
    lock.release()


@pytest.mark.parametrize("side", [fabric, aio_fabric], ids=["blocking", "asyncio"])
@pytest.mark.parametrize(("deaths", "ours"), [(1, True), (HELLO_TRIES, True), (1, False)])
def test_an_office_that_dies_as_it_is_asked_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side: Any, deaths: int, ours: bool
) -> None:
    """A process that is being killed takes connections to the last. An office elsewhere is not ours to start."""
    starts: list[Address] = []
    monkeypatch.setattr(side, "start_office", starts.append)
    address = Address(url="unix:///none", socket=tmp_path / "none", home=tmp_path if ours else None)

    def exchange(_: object) -> HttpReply:
        if len(starts) <= deaths:
            raise NOBODY
        return reply(Hello(wire=WIRE_VERSION, wire_oldest=WIRE_VERSION, version="1"))

    async def awaited(call: object) -> HttpReply:
        return exchange(call)

    async def greet() -> None:
        made = side.Fabric(address, client_clock())
        is_blocking = side is fabric
        monkeypatch.setattr(made._transport, "exchange", exchange if is_blocking else awaited)
        try:
            if is_blocking:
                made._check_office()
            else:
                await made._check_office()
        finally:
            closing = made.close()
            if closing is not None:
                await closing

    if ours and deaths < HELLO_TRIES:
        asyncio.run(greet())
    else:
        with pytest.raises(Disconnected):
            asyncio.run(greet())
    assert len(starts) == (min(deaths + 1, HELLO_TRIES) if ours else 1)
