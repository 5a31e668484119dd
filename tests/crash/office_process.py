"""A whole office as a process, and lines to it that carry one request at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sublet.client.home import runtime_dir, socket_path
from sublet.client.http1 import AnswerReader, ProtocolError, encode_request
from sublet.office.journal.files import Anchors
from sublet.wire import unix
from tests.commands import Process, start_sublet
from tests.traces import end_office, plain_env, until

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 120.0
NAP_S: Final = 0.01
DEVICES: Final = "2x4GiB"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    doc: Any


class Line:
    """One connection. What was sent on it and not answered when it broke stays unanswered."""

    def __init__(self, path: Path) -> None:
        self.sock = unix.connect(os.fspath(path), timeout_s=PATIENCE_S)

    def send(self, call: Call) -> None:
        """A broken connection is noticed by whoever waits for the answer."""
        headers = {} if call.token is None else {"authorization": f"Bearer {call.token}", "sublet-as-tenant": "1"}
        body = None if call.body is None else json.dumps(call.body).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(encode_request(call.method, call.path, host="localhost", headers=headers, body=body))

    def answer(self) -> Answer | None:
        """None if the office went away before the whole answer was here."""
        reader, body = AnswerReader(), b""
        try:
            while not reader.complete:
                reader.feed(self.sock.recv(1 << 16))
                body += reader.take()
        except (ConnectionResetError, ProtocolError):
            return None
        return Answer(reader.status, json.loads(body))

    def ask(self, call: Call) -> Answer | None:
        self.send(call)
        return self.answer()

    @property
    def was_closed(self) -> bool:
        """By the office, while nothing was asked: it does so after two minutes, which a loaded machine may take from
        one request of a test to the next."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def close(self) -> None:
        self.sock.close()


def release_all(home: Path) -> None:
    """Whatever is leased there, until it is over. Two commands of `sublet` after every test would be a process each."""
    line = Line(socket_path(home.resolve()))

    def leased() -> set[str]:
        found = line.ask(Call(method="GET", path="/v1/leases"))
        assert found is not None
        assert found.status == 200, found.doc
        return {lease["id"] for lease in found.doc}

    def is_released(lease: str) -> bool:
        body = {"request_id": f"r-{os.urandom(8).hex()}"}
        answer = line.ask(Call(method="POST", path=f"/v1/leases/{lease}/release", body=body))
        return answer is not None and answer.status == 200

    try:
        released = {lease for lease in leased() if is_released(lease)}  # others are another tenant's
        until("their end", lambda: not released & leased())
    finally:
        line.close()


@dataclass(slots=True)
class OfficeProcess:
    """``sublet up --foreground`` on a home of its own, perhaps under strace."""

    place: Path
    devices: str = DEVICES
    words: tuple[str, ...] = ()
    """More options of `sublet up`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of its environment."""
    home: Path = field(init=False)
    process: Process | None = field(default=None, init=False)
    lines: list[Line] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.home = (self.place / "home").resolve()

    @property
    def log(self) -> Path:
        """What strace saw."""
        return self.place / "calls"

    @property
    def anchors(self) -> Anchors:
        return Anchors(self.place / "state" / "sublet-anchors", self.home)

    def env(self, **more: str) -> dict[str, str]:
        env = plain_env()
        own = {"SUBLET_HOME": str(self.home), "XDG_STATE_HOME": str(self.place / "state")}
        return env | own | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error", **self.variables, **more}

    def start(self, *, strace: Iterable[str] = (), before: Iterable[str] = ()) -> bool:
        """Start it; whether it came to answer. Under strace it may end before that, and elsewhere it must not."""
        self.place.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        tracing = list(strace)
        if tracing:  # -D: strace is the grandchild, so that the child, and its exit status, are the office's own
            tracing = ["strace", "-D", "-f", "--seccomp-bpf", "-qq", "-y", "-o", str(self.log), *tracing]
        words = ["up", "--foreground", "--host-gpus", self.devices, *self.words]
        before = [*before, *tracing]
        with open(self.place / "said", "wb") as said:
            if before:
                command = [*before, sys.executable, "-m", "sublet", *words]
                self.process = subprocess.Popen(
                    command, env=self.env(), stdin=subprocess.DEVNULL, stdout=said, stderr=said
                )
            else:
                self.process = start_sublet(*words, env=self.env(), said=said)
        limit, path = time.monotonic() + PATIENCE_S, socket_path(self.home)
        while self.process.poll() is None:
            if self._answers(path):
                return True
            assert time.monotonic() < limit, f"the office does not answer: {self.said}"
            time.sleep(NAP_S)
        return False

    def _answers(self, path: Path) -> bool:
        """One look is cheap, since very many are had: who looks takes the time from what he waits for."""
        if not os.path.exists(path):
            return False
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            line = Line(path)
            if line.ask(Call(method="GET", path="/v1/hello")) is not None:
                self.lines.append(line)
                return True
            line.close()
        return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def said(self) -> str:
        """Everything it printed."""
        return (self.place / "said").read_text()

    def line(self, n: int = 0) -> Line:
        while len(self.lines) <= n:
            self.lines.append(Line(socket_path(self.home)))
        return self.lines[n]

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """As tenant ``local``, of an office that nobody kills."""
        if self.lines and self.lines[0].was_closed:
            self.lines.pop(0).close()
            self.lines.insert(0, Line(socket_path(self.home)))
        answer = self.line().ask(Call(method=method, path=path, body=body))
        assert answer is not None, f"no answer to {method} {path}: {self.said}"
        return answer

    def kill(self) -> None:
        """SIGKILL; it may be over already."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def ended(self) -> int:
        """Wait until it is gone; its exit status, negative for a signal."""
        assert self.process is not None
        status = self.process.wait(timeout=PATIENCE_S)
        for line in self.lines:
            line.close()
        self.lines.clear()
        return status

    def stop(self) -> None:
        """As Ctrl-C does; leases stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        status = self.ended()
        assert status == 0, f"the office ended with {status}: {self.said}"


@contextlib.contextmanager
def office_at(place: Path) -> Iterator[OfficeProcess]:
    """An office that is surely gone afterwards, with the folder of its socket."""
    office = OfficeProcess(place)
    try:
        yield office
    finally:
        if office.process is not None:
            with contextlib.suppress(ProcessLookupError):
                office.process.send_signal(signal.SIGCONT)
            office.kill()
            office.ended()
        end_office(runtime_dir(office.home))
