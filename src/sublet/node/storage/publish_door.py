"""The socket on which guests request publication: one message per question and answer.

The kernel names the process that connected: it must be a guest's, of the guest's user. The socket lies in the runtime
folder, where guests of other users find nothing but it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from sublet.errors import CapacityExceeded, InvalidRequest, SubletError, Unauthorized
from sublet.node.by_descriptor import change
from sublet.node.loop import READ, Accepting, Loop
from sublet.node.processes.guest import GuestProcess
from sublet.node.storage.publish_queue import AnyReply, Asker, Handed, Publishing
from sublet.values import NS_PER_S
from sublet.wire.codec import dumps, loads
from sublet.wire.refusals import refusal_of
from sublet.wire.sockets import PeerProcess, peer_of
from sublet.wire.unix import short_path
from sublet.wire.volumes import MESSAGE_MAX, VolumeCall

NAME: Final = "publish.sock"
BACKLOG: Final = 64
CONNECTIONS_MAX: Final = 256
PER_TENANT_MAX: Final = 128
PER_GUEST_MAX: Final = 8
TURNED_MAX: Final = 32
"""Connections that are being refused with a reason at once; beyond them the reason is left out."""
TURNED_S: Final = 2.0
QUICK_NS: Final = 1_000_000
REST_SHARE: Final = 2
"""To identify a connecting process may take a scan of all processes. For this many times as long no other connection is
accepted, so that a process that connects again and again does not keep the supervisor from its work."""


class PublishDoor:
    """The socket, and all connections to it."""

    def __init__(
        self,
        loop: Loop,
        runtime: str,
        publishing: Publishing,
        who: Callable[[PeerProcess], GuestProcess | None],
        asker: Callable[[GuestProcess], Asker],
    ) -> None:
        """``who`` finds the guest of a process, ``asker`` says what it may ask for, as of now."""
        self.path: Final = os.path.join(runtime, NAME)
        self._loop = loop
        self._publishing = publishing
        self._who = who
        self._asker = asker
        self._accepting: Accepting | None = None
        self._lines: set[_Line] = set()
        self._turned = 0

    def open(self) -> str:
        """Its path; made when the first guest needs it. The process that listened here before is gone."""
        if self._accepting is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            listening = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            )
            try:
                with short_path(self.path) as address:
                    listening.bind(address)
                change(self.path, mode=0o666)  # only we enter the folder; a guest shown this file may connect
                listening.listen(BACKLOG)
                accepting = Accepting(self._loop.guarded(lambda _: None), "publish_door", listening, self._accept)
                accepting.begin()
            except BaseException:
                listening.close()
                raise
            self._accepting = accepting
        return self.path

    def close(self) -> None:
        """Hang up on all connections, and accept no more."""
        for line in tuple(self._lines):
            line.close()
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _accept(self, sock: socket.socket) -> None:
        began_ns = self._loop.now_ns()
        self._admit(sock)
        took_ns = self._loop.now_ns() - began_ns
        if took_ns > QUICK_NS and self._accepting is not None:
            self._accepting.rest(REST_SHARE * took_ns / NS_PER_S)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            guest = self._admitted(sock)
            line = _Line(self._loop, sock, guest, lambda call, then: self._ask(guest, call, then), self._lines)
        except (SubletError, OSError) as error:
            self._refuse(sock, error if isinstance(error, SubletError) else CapacityExceeded("no more can be served"))
        else:
            self._lines.add(line)

    def _refuse(self, sock: socket.socket, error: SubletError) -> None:
        """It hears why, and is then listened to no more. Were it hung up on at once, a question that is under way would
        cost it the answer."""
        if self._turned >= TURNED_MAX:
            sock.close()
            return
        loop, fd = self._loop.guarded(lambda _: None), sock.fileno()

        def over() -> None:
            if sock.fileno() >= 0:
                self._turned -= 1
                loop.forget(fd)
                sock.close()

        def on_readable(events: int) -> None:
            try:
                is_over = not sock.recv(1)
            except OSError as error:
                is_over = not isinstance(error, BlockingIOError)
            if is_over:
                over()

        with contextlib.suppress(OSError):
            sock.send(dumps(refusal_of(error)), socket.MSG_NOSIGNAL)
        loop.watch(fd, READ, on_readable)
        self._turned += 1
        loop.after(TURNED_S, over)

    def _admitted(self, sock: socket.socket) -> GuestProcess:
        if len(self._lines) >= CONNECTIONS_MAX:
            raise CapacityExceeded(f"{CONNECTIONS_MAX} connections to volumes are open, and that is the most")
        guest = self._who(peer_of(sock))
        if guest is None:
            raise Unauthorized("only what runs under a lease may ask here", do="Start it with `sublet run`.")
        if sum(line.guest is guest for line in self._lines) >= PER_GUEST_MAX:
            raise CapacityExceeded(f"this guest has {PER_GUEST_MAX} connections open, and that is the most")
        if sum(line.guest.tenant == guest.tenant for line in self._lines) >= PER_TENANT_MAX:
            raise CapacityExceeded(f"this tenant's guests have {PER_TENANT_MAX} connections open, and that is the most")
        return guest

    def _ask(self, guest: GuestProcess, call: VolumeCall, then: Callable[[AnyReply | Handed], None]) -> None:
        self._publishing.ask(self._asker(guest), call, then)


class _Line:
    """One connection: a question, its answer, and then the next."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        guest: GuestProcess,
        ask: Callable[[VolumeCall, Callable[[AnyReply | Handed], None]], None],
        lines: set[_Line],
    ) -> None:
        self.guest = guest
        self._sock = sock
        self._ask = ask
        self._lines = lines
        self._is_open = True
        self._is_busy = False
        self._loop = loop.guarded(lambda _: self.close())
        self._loop.watch(sock.fileno(), READ, self._ready)

    def close(self) -> None:
        """Hang up. Harmless twice."""
        if self._is_open:
            self._is_open = False
            self._lines.discard(self)
            self._loop.forget(self._sock.fileno())
            self._sock.close()

    def _ready(self, events: int) -> None:
        if not events & READ or self._is_busy:  # it hung up; what it asked for is done all the same
            self.close()
            return
        try:
            data, _, flags, _ = self._sock.recvmsg(MESSAGE_MAX)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not data:
            self.close()
            return
        self._is_busy = True
        self._loop.change(self._sock.fileno(), 0)
        try:
            if flags & socket.MSG_TRUNC:
                raise InvalidRequest(f"a question has more than {MESSAGE_MAX} bytes", do="Name fewer packs.")
            call = loads(VolumeCall, data)
        except SubletError as error:
            self._answer(refusal_of(error))
        else:
            self._ask(call, self._answer)

    def _answer(self, answer: AnyReply | Handed) -> None:
        if not self._is_open:
            return
        self._is_busy = False
        try:
            self._sock.send(dumps(answer), socket.MSG_NOSIGNAL)
            self._loop.change(self._sock.fileno(), READ)
        except OSError:  # it does not read, or is gone
            self.close()
