"""A real supervisor for tests: started as an office starts it, spoken to as an office and as holders speak to it.

Nothing here believes a table: who is there is read from /proc by the marks of the guests, what is left by looking into
the folders. Whatever happens in a test, ``close`` ends everything that carries the office's mark.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from sublet.errors import Disconnected, SubletError
from sublet.node.agent.starting import command, package_folder
from sublet.node.processes.cgroups_places import CgroupFiles, find_places
from sublet.node.storage.mounts import mounts_below
from sublet.node.supervisor.service import SOCKET_NAME
from sublet.values import GIB, Epoch, Kind, LeaseId, NodeId, ResourceId, TenantId
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.guests import (
    Admit,
    Configure,
    Configured,
    Front,
    GuestSpec,
    HolderCall,
    HolderReply,
    ListGuests,
    OfficeCall,
    OfficeReply,
    Orders,
    Profile,
    Reports,
    Start,
    Started,
)
from sublet.wire.link import Link
from sublet.wire.link_events import Event, Over
from sublet.wire.orders import Device, Inventory, Order, Report
from sublet.wire.settings import SupervisorSettings
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION
from tests.commands import Process, forked_supervisor
from tests.traces import PATIENCE_S, Traces, until

TENANT: Final = TenantId("local")
PATH: Final = os.environ.get("PATH", os.defpath)
needs_freezer: Final = pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/freezer", os.W_OK), reason="needs a freezer of cgroup v1, and root"
)


def inventory_of(gpus: int = 2) -> Inventory:
    devices = tuple(
        Device(id=ResourceId(f"bench/gpu{n}"), kind=Kind.GPU, capacity=16 * GIB, model="host", host=True)
        for n in range(gpus)
    )
    cores = Device(id=ResourceId("bench/cpu"), kind=Kind.CPU, capacity=4096)
    memory = Device(id=ResourceId("bench/memory"), kind=Kind.MEMORY, capacity=64 * GIB)
    return Inventory(node=NodeId("bench"), domain="bench", devices=(*devices, cores, memory))


class SupervisorStage(Traces):
    """One supervisor process with folders of its own."""

    def __init__(self, place: Path, *, gpus: int = 2, office: str = "") -> None:
        super().__init__(office or f"t{secrets.token_hex(4)}", place / "run")
        self.state = place / "state"
        self.inventory = inventory_of(gpus)
        self.settings = SupervisorSettings(
            office=self.office,
            runtime=str(self.runtime),
            state=str(self.state),
            package=package_folder(),
            version="test",
        )
        self.env = {"PATH": PATH}
        self.faults = ""
        """Python that is run in the supervisor before it begins: mistakes, put where they are wanted."""
        self.process: Process | None = None
        self.says: OfficeLine | None = None
        self._holders: dict[tuple[LeaseId, Epoch], HolderLine] = {}

    # ---- the process ----

    def start(self) -> None:
        """Start it and wait until it listens."""
        for folder in (self.runtime, self.state):
            folder.mkdir(parents=True, exist_ok=True)
        argv = command(self.settings)
        if self.faults:
            code = argv.index("-c") + 1
            argv[code] = f"import sys\nsys.path.insert(0, sys.argv[1])\n{self.faults}\n{argv[code]}"
        with open(self.state / "supervisor.log", "ab") as log:
            forked = None if self.faults else forked_supervisor(argv, self.env, log.fileno())
            self.process = forked or subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=self.env,
            )
        until("a supervisor that listens", self._listens)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the supervisor ended: {self.log}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(str(self.runtime / SOCKET_NAME)) == 0

    @property
    def log(self) -> str:
        path = self.state / "supervisor.log"
        return path.read_text() if path.exists() else ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.hang_up()

    def hang_up(self) -> None:
        """The office and all holders go away."""
        if self.says is not None:
            self.says.close()
            self.says = None
        for holder in self._holders.values():
            holder.close()
        self._holders.clear()

    def connect(self) -> OfficeLine:
        """Be its office."""
        self.says = OfficeLine(self)
        return self.says

    @property
    def office_line(self) -> OfficeLine:
        assert self.says is not None, "connect first"
        return self.says

    def holder(self, lease: LeaseId, epoch: Epoch) -> HolderLine:
        """The connection of this pair; one is made for the first call."""
        found = self._holders.get((lease, epoch))
        if found is None or found.is_over:
            if found is not None:
                found.close()
            found = self._holders[lease, epoch] = self.office_line.admit(lease, epoch)
        return found

    # ---- the end ----

    def close(self) -> None:
        """Nothing of it is left, however the test went."""
        self.hang_up()
        if self.process is not None:
            for number in (signal.SIGCONT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    self.process.send_signal(number)
            self.process.wait(PATIENCE_S)
        self.clear()
        shutil.rmtree(self.runtime, ignore_errors=True)


@contextlib.contextmanager
def supervisor_at(
    place: Path, *, gpus: int = 2, faults: str = "", inventory: Inventory | None = None
) -> Iterator[SupervisorStage]:
    """A running supervisor with an office, and surely nothing of it afterwards."""
    stage = SupervisorStage(place, gpus=gpus)
    stage.faults = faults
    stage.inventory = inventory or stage.inventory
    try:
        stage.start()
        stage.connect()
        yield stage
    finally:
        stage.close()
        for mount in (*mounts_below(str(stage.state)), *mounts_below(str(stage.runtime))):
            os.system(f"umount '{mount.point}'")


class OfficeLine:
    """An office's connection."""

    def __init__(self, stage: SupervisorStage) -> None:
        self.reports: list[Report] = []
        self.error: SubletError | None = None
        self._talk = Conversation.connect(str(stage.runtime / SOCKET_NAME), timeout_s=PATIENCE_S)
        configured = self.ask(Configure(office=stage.office, inventory=stage.inventory))
        assert isinstance(configured, Configured)
        self.configured = configured

    def ask(self, asked: OfficeCall, fds: Sequence[int] = ()) -> OfficeReply:
        reply: OfficeReply = loads(OfficeReply, self._talk.call(dumps(asked), fds, timeout_s=PATIENCE_S).body)
        self.pump()
        return reply

    def send(self, *orders: Order, incarnation: int = 1) -> None:
        """Send, and ask nothing."""
        self._talk.link.event(dumps(Orders(orders=orders, incarnation=incarnation)))
        self._talk.flush(PATIENCE_S)

    def order(self, *orders: Order, incarnation: int = 1) -> None:
        """Send, and come back when all of them were taken and what was said at once is here."""
        self.send(*orders, incarnation=incarnation)
        self.ask(ListGuests(guest="g-none"))

    def pump(self) -> None:
        """What came meanwhile."""
        for happening in self._talk.pump():
            match happening:
                case Event():
                    self.reports += loads(Reports, happening.body).reports
                case Over():
                    self.error = happening.error or Disconnected("it hung up")
                case _:
                    pass

    def wait(self, timeout_s: float) -> None:
        """Until something may have come."""
        self._talk.flush(0.0)
        poll = select.poll()
        poll.register(self._talk.fileno(), select.POLLIN)
        poll.poll(max(1, int(timeout_s * 1000)))
        self.pump()

    def admit(
        self,
        lease: LeaseId | None,
        epoch: Epoch | None,
        *,
        tenant: TenantId = TENANT,
        operator: bool = False,
        operations: tuple[str, ...] = ("logs", "run", "write"),
        oldest: int = WIRE_OLDEST,
        newest: int = WIRE_VERSION,
        **rights: Any,
    ) -> HolderLine:
        """A holder's connection, as the agent's door hands one over."""
        mine, theirs = socket.socketpair()
        front = Front(
            tenant=tenant,
            operator=operator,
            profile=Profile.LOCAL,
            lease=lease,
            epoch=epoch,
            operations=operations,
            **rights,
        )
        try:
            self.ask(Admit(front=front, oldest=oldest, newest=newest), (theirs.detach(),))  # the link closes it
        except BaseException:
            mine.close()
            raise
        return HolderLine(mine)

    def close(self) -> None:
        self._talk.close()


class HolderLine:
    """A holder's connection. Its greeting was read at the door, so it sends none here."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        link = Link.connecting()
        link.drop_output()
        self.talk = Conversation(sock, link)
        self.talk.greet(PATIENCE_S)

    @property
    def is_over(self) -> bool:
        return self.talk.link.over is not None

    def ask(self, asked: HolderCall) -> HolderReply:
        reply: HolderReply = loads(HolderReply, self.talk.call(dumps(asked), timeout_s=PATIENCE_S).body)
        return reply

    def start(self, *argv: str, env: dict[str, str] | None = None) -> Started:
        """Run this; raises what the start was refused with."""
        reply = self.ask(Start(spec=GuestSpec(argv=argv, cwd="/", env={"PATH": PATH, **(env or {})})))
        assert isinstance(reply, Started), reply
        return reply

    def close(self) -> None:
        self.talk.close()


# ------------------------------------------------------------------------------------------------------ the freezer


class Freezer:
    """A v1 freezer group of somebody else, in which not even SIGKILL ends a process."""

    def __init__(self, top: str, name: str) -> None:
        self.folder = f"{top}/{name}"
        self._files = CgroupFiles()
        self._files.make(self.folder)

    @classmethod
    def make(cls, name: str) -> Freezer | None:
        """None where there is no such thing, or it is not ours to use."""
        tops = [place.top for place in find_places() if "freezer" in place.controllers and not place.is_v2]
        if os.geteuid() != 0 or not tops:
            return None
        try:
            return cls(tops[0], name)
        except OSError:
            return None

    def freeze(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._files.write(f"{self.folder}/cgroup.procs", str(pid))
        self._files.write(f"{self.folder}/freezer.state", "FROZEN")

        def is_frozen() -> bool:
            return (self._files.read(f"{self.folder}/freezer.state") or "").strip() == "FROZEN"

        until("frozen", is_frozen)

    def thaw(self) -> None:
        self._files.write(f"{self.folder}/freezer.state", "THAWED")

    def close(self) -> None:
        """Whoever is in it goes on, and is somebody's who ends it."""
        self.thaw()

        def is_removed() -> bool:
            for pid in (self._files.read(f"{self.folder}/cgroup.procs") or "").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self._files.remove(self.folder)
            except FileNotFoundError:
                return True
            except OSError:
                return False
            return True

        until("a removed freezer", is_removed)
