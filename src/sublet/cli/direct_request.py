"""Asks the office of this machine over one kept connection, in plain JSON, with few imports.

``call`` is for every command; this is for those that are measured in milliseconds (`run`, `exec`, `ps`). What it cannot
do, such as retrying, waiting in the queue, or an office elsewhere, is left to the client's own programs.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from sublet.cli.messages import greeting
from sublet.client.home import home_dir, home_text, runtime_text
from sublet.client.http1 import AnswerReader, ProtocolError, encode_request
from sublet.errors import Disconnected, SubletError, Unsupported
from sublet.wire import unix
from sublet.wire.version import AS_TENANT_HEADER, AS_TENANT_VARIABLE, WIRE_VERSION

if TYPE_CHECKING:
    from sublet.wire.conversation import Conversation

ANSWER_S: Final = 10.0
"""How long an answer may take. The office answers in milliseconds; this is for a machine that is very busy."""
_PIECE: Final = 256 * 1024


class Direct:
    """One connection, opened when it is first needed and again when it broke between two requests."""

    def __init__(self, path: str, token: str | None, *, named: bool = False) -> None:
        """``named``: the path stands in SUBLET_URL (``unix.connect``)."""
        self.token = token
        self.sent_ns = 0
        """The instant before the last request left: what is granted counts from there."""
        self._path = path
        self._named = named
        self._as_tenant = os.environ.get(AS_TENANT_VARIABLE) == "1"
        self._sock: socket.socket | None = None

    @classmethod
    def reach(cls, *, start: bool = True) -> Direct:
        """The office of this machine, started if none runs and ``start`` says so."""
        token = os.environ.get("SUBLET_TOKEN") or None
        if os.environ.get("SUBLET_URL"):
            return cls._reach_url(token)
        made = cls(f"{runtime_text(home_text())}/office.sock", token)
        try:
            made._open()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if not start:
                from sublet.cli.call import no_office

                raise no_office(home_text()) from error
            from sublet.client.office import ensure_office

            ensure_office(home_dir())
        return made

    @classmethod
    def _reach_url(cls, token: str | None) -> Direct:
        from sublet.client.address import find_address

        found = find_address(None, token, None, os.environ).socket
        if found is None:
            raise Unsupported(
                "a command runs on the machine of its office, and the one that SUBLET_URL names is reached over TCP, "
                "which carries leases and no commands yet",
                do="Log in to that machine (ssh) and run it there; or unset SUBLET_URL to use the office of this one.",
            )
        return cls(os.fspath(found), token, named=True)

    def connect_data(self, *, capability: str = "") -> Conversation:
        """A data connection: with a lease's token; or, to look and stop, as whom our token says we are."""
        from sublet.wire.conversation import Conversation

        access = None if capability else self.token
        hello = greeting(capability=capability, access=access, as_tenant=self._as_tenant)
        path = os.path.join(os.path.dirname(self._path), "data.sock")
        return Conversation.connect(path, hello, named=self._named)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Ask; ``answer`` brings what comes of it, and meanwhile something else can be done."""
        headers = {"sublet-wire": str(WIRE_VERSION), "accept": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        if self._as_tenant:
            headers[AS_TENANT_HEADER] = "1"
        raw = None if body is None else json.dumps({k: v for k, v in body.items() if v is not None}).encode()
        try:
            request = encode_request(method, path, host="localhost", headers=headers, body=raw)
            sock = self._sock or self._open()
            self.sent_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            sock.sendall(request)
        except (OSError, ProtocolError) as error:
            self.close()
            raise self._lost(error, sent=False) from error

    def answer(self) -> tuple[int, bytes]:
        """The status and body of the answer to what was sent."""
        reader, pieces = AnswerReader(), []
        sock = self._sock
        if sock is None:
            raise Disconnected("nothing was asked", sent=False)
        try:
            while not reader.complete:
                reader.feed(sock.recv(_PIECE))
                pieces.append(reader.take())
        except (OSError, ProtocolError) as error:
            self.close()
            raise self._lost(error, sent=True) from error
        except BaseException:
            self.close()
            raise
        if not reader.reusable:
            self.close()
        return reader.status, b"".join(pieces)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask and wait. A refusal is raised as the error it is."""
        self.send(method, path, body)
        return self.read(*self.answer())

    def read(self, status: int, body: bytes) -> Any:
        """What an answer says, or the error that it is."""
        try:
            document = json.loads(body)
        except ValueError as error:
            raise Disconnected(f"what answers at {self._path} is not an office of ours (status {status})") from error
        if status >= 400:
            from sublet.cli.call import error_of

            raise error_of(document, status)
        return document

    def close(self) -> None:
        """Harmless twice; the next question opens it again."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _open(self) -> socket.socket:
        self._sock = unix.connect(self._path, timeout_s=ANSWER_S, named=self._named)
        return self._sock

    def _lost(self, why: BaseException, *, sent: bool) -> SubletError:
        reason = "in time" if isinstance(why, TimeoutError) else f"({getattr(why, 'strerror', None) or why})"
        return Disconnected(f"the office at {self._path} did not answer {reason}", sent=sent)
