"""Guests that save, for tests: programs with everything they need to, under leases of blocks of a real supervisor."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final

from sublet.errors import CapacityExceeded, Disconnected
from sublet.node.agent.starting import package_folder
from sublet.state.checkpoints.store import FolderStore
from sublet.state.checkpoints.volume import VolumeStore
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.guests import GuestSpec, HolderReply, Start, Started
from sublet.wire.volumes import VolumeCall, VolumeReply
from tests.integration.supervisor_stage import PATH, HolderLine, SupervisorStage
from tests.traces import until

SITES: Final = [path for path in sys.path if path.endswith("site-packages")]
HEAD: Final = """
import json, os, sys, time
sys.path[:0] = {paths!r}
def say(it):
    name = {out!r} + "." + str(len(said)); said.append(it)
    open(name + "~", "w").write(json.dumps(it))
    os.rename(name + "~", name)
said = []
def wait_for(name):
    while not os.path.exists({out!r} + "-" + name):
        time.sleep(0.01)
import sublet
from sublet.guest.current import current
from sublet.state.checkpoints.durable import Durable
from sublet.state.checkpoints.volume import VolumeStore
from sublet.errors import CapacityExceeded, Disconnected
from sublet.errors import *
def attempt(act):
    try:
        return act()
    except SubletError as error:
        return type(error).__name__ + ": " + error.message
"""


class Program:
    """A guest that says things."""

    def __init__(self, out: str, started: Started) -> None:
        self._out = out
        self._heard = 0
        self.id = started.guest
        self.pid = started.pid

    def hear(self) -> Any:
        """The next thing it says."""
        name = f"{self._out}.{self._heard}"
        until("a word of the guest", lambda: os.path.exists(name))
        self._heard += 1
        with open(name, encoding="utf-8") as file:
            return json.loads(file.read())

    def go(self, name: str) -> None:
        """What it waits for with ``wait_for`` has come."""
        with open(f"{self._out}-{name}", "w", encoding="utf-8"):
            pass


def program(
    line: HolderLine, stage: SupervisorStage, code: str, *, volume: str = "", bootstrap: bool = False
) -> Program:
    """Run this as a guest: with ``say``, ``wait_for``, ``attempt`` and all that saves."""
    out = str(stage.state / f"said-{os.urandom(4).hex()}")
    text = HEAD.format(paths=[package_folder(), *SITES], out=out) + code
    argv = [sys.executable, "-c", text]
    if bootstrap:
        argv = [sys.executable, "-m", "sublet.guest.bootstrap", "--", "-c", text]
    env = {"PATH": PATH, "PYTHONPATH": package_folder()}
    reply = line.ask(Start(spec=GuestSpec(argv=tuple(argv), cwd="/", env=env), volume=volume))
    assert isinstance(reply, Started), reply
    return Program(out, reply)


class StageLine:
    """``VolumeLine`` of a holder, over a test's connection."""

    def __init__(self, line: HolderLine, lease: LeaseId, epoch: Epoch) -> None:
        self._line, self._pair = line, (lease, epoch)

    def pair(self) -> tuple[LeaseId, Epoch]:
        return self._pair

    def ask(self, call: VolumeCall) -> VolumeReply:
        """Raises what it is refused with."""
        reply: VolumeReply = loads(HolderReply, self._line.talk.call(dumps(call), timeout_s=30.0).body)
        return reply


def store_at(stage: SupervisorStage, lease: LeaseId, epoch: Epoch) -> VolumeStore:
    """The volume of this lease, as its holder saves there. What a predecessor had is put away first."""
    found: list[VolumeStore] = []

    def opened() -> bool:
        try:
            found.append(VolumeStore(StageLine(stage.holder(lease, epoch), lease, epoch)))
        except (CapacityExceeded, Disconnected):
            stage.office_line.wait(0.02)
            return False
        return True

    until("an open volume", opened)
    return found[0]


def reader(place: str) -> FolderStore:
    return FolderStore(place, create=False)
