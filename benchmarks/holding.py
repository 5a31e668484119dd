"""A holder in its barest form: leases by requests on one connection, guests by another, ends by the stream of news.

What is timed is what a program waits for; the client library's own work is measured by other rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.load.http1 import Address, BadAnswer, connect, take_answer
from benchmarks.ours import Office, sublet_command
from sublet.client.home import data_path, home_dir, runtime_dir
from sublet.wire.channels import WINDOW
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import Conversation
from sublet.wire.guests import (
    OUTPUT_HEAD,
    Attach,
    Attached,
    Greeting,
    GuestNews,
    GuestSpec,
    HolderCall,
    HolderReply,
    Start,
    Started,
)
from sublet.wire.link_events import Data, Event, Over

__all__ = ["Guest", "Holder", "Lease", "News", "ended_within", "new_tenant", "supervisor_pid"]

PATIENCE_S: Final = 60.0
_ENDED: Final = re.compile(rb'event: ended\r?\ndata: \{"what":"ended","lease":\{"id":"(l-[0-9a-f]+)"')
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"


class Holder:
    """A program with one connection to the office; with a token it is that tenant's, without one the owner's."""

    def __init__(self, office: Office, token: str = "") -> None:
        self._token = token
        self._sock = connect(office.address, timeout_s=PATIENCE_S)
        self._data = str(data_path(home_dir(None, office.env)))

    def take(self, want: Mapping[str, Any], *, ttl_s: float) -> Lease:
        """A lease, at once."""
        answer = self.ask(
            "POST",
            "/v1/leases",
            {"request_id": os.urandom(8).hex(), "wants": [want], "ttl": ttl_s, "wait": 0.0, "token": True},
        )
        if answer.get("answer") != "grant":
            raise BadAnswer(f"no lease: {answer}")
        return Lease(self, answer["lease"]["id"], answer["token"])

    def talk(self, lease: Lease) -> Conversation:
        """A connection under the lease, on which guests are started."""
        return Conversation.connect(self._data, dumps(Greeting(capability=lease.token)), timeout_s=PATIENCE_S)

    def ask(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.send(method, path, body)
        return self.answer()

    def send(self, method: str, path: str, body: Mapping[str, Any]) -> None:
        """The first half of ``ask``."""
        text = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if self._token:
            head += f"Authorization: Bearer {self._token}\r\nSublet-As-Tenant: 1\r\n"
        self._sock.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)

    def answer(self) -> dict[str, Any]:
        """The second half."""
        data = b""
        while (found := take_answer(data)) is None:
            more = self._sock.recv(1 << 16)
            if not more:
                raise BadAnswer(f"the office closed the connection after {data[:200]!r}")
            data += more
        if found.status >= 300:
            raise BadAnswer(f"status {found.status}: {found.body[:500]!r}")
        answer: dict[str, Any] = json.loads(found.body)
        return answer

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease:
    """One lease, and the connection on which its guests are started."""

    def __init__(self, holder: Holder, id_: str, token: str) -> None:
        self.id = id_
        self.token = token
        self._holder = holder
        self._talk: Conversation | None = None

    @property
    def talk(self) -> Conversation:
        if self._talk is None:
            self._talk = self._holder.talk(self)
        return self._talk

    def start(self, *argv: str, env: Mapping[str, str] | None = None, imports: Sequence[str] = ()) -> Guest:
        """Run a command. It has got a process of its own when this returns."""
        spec = GuestSpec(argv=argv, cwd="/", env={"PATH": _PATH, **(env or {})}, imports=tuple(imports))
        reply = _ask(self.talk, Start(spec=spec))
        if not isinstance(reply, Started):
            raise BadAnswer(f"{argv[0]} was not started: {reply}")
        return Guest(self.talk, reply)

    def release(self) -> None:
        """Give it back. Its end is news."""
        self._holder.ask("POST", f"/v1/leases/{self.id}/release", {"busy": 0.0})
        self.close()

    def begin_release(self, holder: Holder) -> None:
        """Send it on a connection of its own, whose answer is for somebody else to read."""
        holder.send("POST", f"/v1/leases/{self.id}/release", {"busy": 0.0})

    def close(self) -> None:
        if self._talk is not None:
            self._talk.close()
            self._talk = None


class Guest:
    """A command that runs."""

    def __init__(self, talk: Conversation, started: Started) -> None:
        self.id = started.guest
        self.pid = started.pid
        self._talk = talk
        self._said = b""
        self._is_gone = False
        self._channel = 0

    def first_line(self, within_s: float = PATIENCE_S) -> str:
        """The first that it says. Raises if it ends without a word."""
        attached = _ask(self._talk, Attach(guest=self.id))
        assert isinstance(attached, Attached)
        self._channel = attached.output
        self._talk.link.grant(attached.output, WINDOW)
        until = time.monotonic() + within_s
        while b"\n" not in self._said:
            if self._is_gone:
                raise RuntimeError(f"the guest ended without a line: {self._said[-500:]!r}")
            self._hear(until, "said nothing")
        return self._said.split(b"\n", 1)[0].decode(errors="replace")

    def gone(self, within_s: float = PATIENCE_S) -> None:
        """Wait until nothing of it is left. Only after ``first_line``, which attaches to it."""
        until = time.monotonic() + within_s
        while not self._is_gone:
            self._hear(until, "did not go")
        self._talk.link.close(self._channel)  # a connection has only so many

    def _hear(self, until: float, what: str) -> None:
        if time.monotonic() > until:
            raise TimeoutError(f"the guest {what} in time")
        for happening in self._talk.wait(1.0):
            match happening:
                case Data():
                    self._said += happening.data[OUTPUT_HEAD.size :]
                    self._talk.link.consumed(happening.channel, happening.cost)
                case Event(body=body):
                    news = loads(GuestNews, body)
                    self._is_gone |= news.what == "gone" and news.guest == self.id
                case Over():
                    raise RuntimeError(f"the supervisor hung up: {happening.error}")
                case _:
                    pass


class News:
    """The stream of news of the owner's leases: when each of them was said to have ended."""

    def __init__(self, address: Address) -> None:
        self._sock = connect(address, timeout_s=PATIENCE_S)
        self._sock.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self._rest = self._sock.recv(1 << 16)
        if b" 200 " not in self._rest.split(b"\r\n", 1)[0]:
            raise BadAnswer(f"no news: {self._rest[:200]!r}")

    def ended(self, leases: Sequence[str], *, within_s: float = PATIENCE_S) -> dict[str, float]:
        """Lease → when it was read that it had ended, once all of these have."""
        found: dict[str, float] = {}
        until = time.monotonic() + within_s
        while (missing := set(leases) - found.keys()) and (left := until - time.monotonic()) > 0:
            if select.select([self._sock], [], [], left)[0]:
                more = self._sock.recv(1 << 20)
                at = time.perf_counter()
                if not more:
                    raise BadAnswer("the stream of news ended")
                self._rest += more
                end = 0
                for match in _ENDED.finditer(self._rest):
                    found[match[1].decode()] = at
                    end = match.end()
                self._rest = self._rest[end:][-(1 << 16) :]
        if missing:
            raise TimeoutError(f"{len(missing)} of {len(leases)} leases did not end within {within_s:.0f} s")
        return found

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def ended_within(office: Office) -> Iterator[News]:
    """News while something is measured."""
    news = News(office.address)
    try:
        yield news
    finally:
        news.close()


def new_tenant(office: Office, name: str) -> str:
    """Its access token; its guests run in the profile of that name."""
    done = subprocess.run(
        [*sublet_command(), "tenant", "add", name, "--json"], env=office.env, capture_output=True, text=True, check=True
    )
    token = json.loads(done.stdout)["token"]
    assert isinstance(token, str)
    return token


def supervisor_pid(office: Office) -> int:
    """Who listens for the office's orders."""
    path = runtime_dir(home_dir(None, office.env)) / "supervisor.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def _ask(talk: Conversation, call: HolderCall) -> HolderReply:
    reply: HolderReply = loads(HolderReply, talk.call(dumps(call), timeout_s=PATIENCE_S).body)
    return reply
