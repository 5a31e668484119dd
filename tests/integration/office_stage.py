"""A whole office with its supervisor, and holders that run guests under leases, for tests that break them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sublet.client.home import data_path, runtime_dir, socket_path
from sublet.node.agent.starting import package_folder
from sublet.node.processes.procs import Procs
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Greeting, GuestSpec, HolderCall, HolderReply, Start, Started
from tests.crash.office_process import Answer, Call, Line, OfficeProcess
from tests.traces import PATIENCE_S, Traces, end_office, office_of, supervisor_of, until

PATH: Final = os.environ.get("PATH", os.defpath)
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease of ours, with the token that lets us run guests under it."""

    id: LeaseId
    epoch: Epoch
    devices: tuple[str, ...]
    token: str


class OfficeStage:
    """An office of its own."""

    def __init__(self, place: Path, devices: str, *words: str) -> None:
        self.office = OfficeProcess(place, devices, words)
        self.runtime = runtime_dir(self.office.home)
        self.procs = Procs()
        self.traces: Traces | None = None

    # ---- processes ----

    def start(self) -> None:
        assert self.office.start(), self.office.said
        until("a supervisor", self.find_supervisor)
        self.traces = Traces(office_of(self.supervisor), self.runtime)

    def kill_office(self) -> None:
        """Ours, and one that a client has started since ours was killed last."""
        self.office.kill()
        self.office.ended()
        self._kill_embedded()

    def find_office(self) -> int | None:
        """The pid of whoever answers as the office: ours, or one that a client started when ours was killed."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            if sock.connect_ex(str(socket_path(self.office.home))) != 0:
                return None
            pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(pid)

    def _kill_embedded(self) -> None:
        """It would end by itself, after ten idle minutes."""

        def is_ours(pid: int) -> bool:
            home = self.procs.marks(pid, "SUBLET_").get("SUBLET_HOME")
            return home == str(self.office.home) and "--embedded" in self.procs.text(pid, "cmdline").split("\0")

        found = [stat.identity for stat in self.procs.table().stats.values() if is_ours(stat.pid)]
        for one in found:
            self.procs.send(one, signal.SIGKILL)
        until("dead offices", lambda: not any(map(self.procs.is_there, found)))

    def find_supervisor(self) -> int | None:
        return supervisor_of(self.runtime)

    @property
    def supervisor(self) -> int:
        """Its pid; waits until there is one."""
        until("a supervisor", self.find_supervisor)
        found = self.find_supervisor()
        assert found is not None
        return found

    def kill_supervisor(self) -> None:
        pid = self.supervisor
        identity = self.procs.identity(pid)
        os.kill(pid, signal.SIGKILL)
        until("a dead supervisor", lambda: identity is None or not self.procs.is_there(identity))

    @property
    def supervisor_log(self) -> str:
        path = self.office.home / "supervisor.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """Everything that was started ends: the office, its supervisor, what that started."""
        if self.office.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.office.process.send_signal(signal.SIGCONT)
            self.kill_office()
        end_office(self.runtime)
        if self.traces is not None:
            self.traces.clear()

    @property
    def residue(self) -> list[str]:
        assert self.traces is not None, "start first"
        return self.traces.residue()

    # ---- leases ----

    def acquire(self, line: Line, *, memory: int, ttl_s: float, wait_s: float = WAIT_S, **more: Any) -> Held:
        """As a patient client does it: into the line, wait for the turn, claim. A grant without a token is of a lease
        that was over before its answer was on its way, as a machine that stands still for a TTL has it: then again."""
        while True:
            doc = self._granted(line, memory=memory, ttl_s=ttl_s, wait_s=wait_s, **more)
            if doc.get("token"):
                lease = doc["lease"]
                devices = tuple(part["resource"] for part in lease["parts"])
                return Held(id=LeaseId(lease["id"]), epoch=Epoch(*lease["epoch"]), devices=devices, token=doc["token"])

    def _granted(self, line: Line, *, memory: int, ttl_s: float, wait_s: float, **more: Any) -> dict[str, Any]:
        body = {
            "request_id": f"r-{os.urandom(8).hex()}",
            "wants": [{"kind": "gpu", "amount": memory, "exclusivity": "session"}],
            "ttl": ttl_s,
            "wait": wait_s,
            "token": True,
            **more,
        }
        doc: dict[str, Any] = asked(line, "POST", "/v1/leases", body).doc
        while (lease := doc["lease"])["status"] in ("queued", "granted"):
            if lease["status"] == "granted":
                doc = self._claimed(line, lease["id"])
            else:
                doc = asked(line, "GET", f"/v1/leases/{lease['id']}?wait=30&after={lease['status']}").doc
        assert lease["status"] == "active" or lease["end"]["reason"] == "holder_gone", doc
        return doc

    def _claimed(self, line: Line, lease: str) -> dict[str, Any]:
        """How it is then: over, without a token, if the machine stood still for as long as it could be claimed."""
        answer = line.ask(Call(method="POST", path=f"/v1/leases/{lease}/claim", body={"token": True}))
        assert answer is not None, "no answer to a claim"
        if "error" in answer.doc:
            assert answer.doc["error"]["kind"] == "LeaseNotActive", answer
            answer = asked(line, "GET", f"/v1/leases/{lease}")
        found: dict[str, Any] = answer.doc
        return found

    def hold(self, held: Held) -> Conversation:
        """A holder's connection."""
        return Conversation.connect(
            str(data_path(self.office.home)), dumps(Greeting(capability=held.token)), timeout_s=PATIENCE_S
        )


def asked(line: Line, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
    """An answer that is no error."""
    answer = line.ask(Call(method=method, path=path, body=body))
    assert answer is not None, f"no answer to {method} {path}"
    assert not (isinstance(answer.doc, dict) and "error" in answer.doc), f"{method} {path}: {answer}"
    return answer


def started(talk: Conversation, *argv: str, env: dict[str, str] | None = None) -> Started:
    """Run this under the connection's lease."""
    reply = called(talk, Start(spec=GuestSpec(argv=argv, cwd="/", env={"PATH": PATH, **(env or {})})))
    assert isinstance(reply, Started), reply
    return reply


def called(talk: Conversation, what: HolderCall) -> HolderReply:
    reply: HolderReply = loads(HolderReply, talk.call(dumps(what), timeout_s=PATIENCE_S).body)
    return reply


class HolderProcess:
    """A holder that can be killed and stopped. It started a guest under each lease, as far as that was possible."""

    def __init__(self, stage: OfficeStage, wanted: list[tuple[Held, GuestSpec]], what: str = "stay") -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("holder_program.py")),
                str(data_path(stage.office.home)),
                what,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": PATH, "PYTHONPATH": package_folder()},
            text=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            for held, spec in wanted:
                words = json.dumps([held.token, spec.argv, spec.imports, spec.env])
                self.process.stdin.write(f"{words}\n")
            self.process.stdin.close()
        self.pids = []
        while (said := self.said()) not in ("all", ""):
            self.pids.append(int(said))

    def said(self) -> str:
        """The next thing it says; nothing if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL; harmless twice."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def office_stage(place: Path, devices: str = "4x4GiB", *words: str) -> Iterator[OfficeStage]:
    stage = OfficeStage(place, devices, *words)
    try:
        stage.start()
        yield stage
    finally:
        stage.close()
