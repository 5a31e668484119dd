"""The volume that a guest saves to, and its connection to the supervisor, which alone publishes.

One connection for the life of the program, made when it is first needed and again in a fork: a question, its answer,
and then the next. It is the process that the supervisor knows, so nothing here is secret.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Final

from sublet.errors import Disconnected, NotFound
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.refusals import Refusal, error_of
from sublet.wire.unix import connect_waiting
from sublet.wire.volumes import (
    MESSAGE_MAX,
    PUBLISH_VARIABLE,
    VOLUME_VARIABLE,
    OpenVolume,
    VolumeCall,
    VolumeOpened,
    VolumeReply,
)

ANSWER_S: Final = 900.0
"""A publication takes as long as the disk does; a caller that waits longer is told that no answer came."""


class GuestVolume:
    """Where this program may save: ``Durable(state, sublet.current().volume)``. From ``sublet.current()``."""

    def __init__(self, line: GuestLine, opened: VolumeOpened) -> None:
        self._line = line
        self.name = opened.name
        """What it is called; empty if it goes with its lease."""
        self.folder = opened.folder
        self.size = opened.size
        self.lease = opened.lease
        """The lease of the volume, which need not be the one that the program runs under."""
        self.epoch = opened.epoch
        """Under which it was given."""

    def volume_line(self) -> GuestLine:
        """How checkpoints are published there (``sublet.durable``)."""
        return self._line

    def __repr__(self) -> str:
        return f"<volume {self.name or self.folder} of lease {self.lease}>"


class GuestLine:
    """``state.checkpoints.volume.VolumeLine`` for a guest."""

    def __init__(self, path: str, own: Callable[[], tuple[LeaseId, Epoch]]) -> None:
        """``own``: the lease that this program runs under, as of now."""
        self._path = path
        self._own = own
        self._pair: tuple[LeaseId, Epoch] | None = None
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._pid = os.getpid()

    def open(self) -> GuestVolume:
        """Which volume it is."""
        answer = self.ask(OpenVolume())
        if isinstance(answer, Refusal):
            raise error_of(answer)
        assert isinstance(answer, VolumeOpened)
        self._pair = (answer.lease, answer.epoch)
        return GuestVolume(self, answer)

    def pair(self) -> tuple[LeaseId | str, Epoch | None]:
        """The volume of the own lease goes on under its new epoch when that is attached; one that was lent does not."""
        if self._pair is None:
            return "", None
        own = self._own()
        return own if own[0] == self._pair[0] else self._pair

    def ask(self, call: VolumeCall) -> VolumeReply:
        if self._pid != os.getpid():  # a fork: connection and lock are its parent's, who may be in the middle
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._drop()
        with self._lock:
            sock = self._connected()
            try:
                sock.sendall(dumps(call))
                data = sock.recv(MESSAGE_MAX)
            except OSError as error:
                self._drop()
                raise Disconnected(f"the supervisor did not answer: {error.strerror or error}") from error
            except BaseException:  # an answer that is not waited for any more must not answer the next question
                self._drop()
                raise
        if not data:
            self._drop()
            raise Disconnected("the supervisor hung up")
        answer: VolumeReply = loads(VolumeReply, data)
        return answer

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.settimeout(ANSWER_S)
                connect_waiting(sock, self._path)
            except OSError as error:
                sock.close()
                raise Disconnected(f"no answer at {self._path}: {error.strerror or error}", sent=False) from error
            self._sock = sock
        return self._sock

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def volume_of(own: Callable[[], tuple[LeaseId, Epoch]]) -> GuestVolume:
    """The volume of this program. Raises ``NotFound`` where it was given none."""
    path = os.environ.get(PUBLISH_VARIABLE, "")
    if not path or not os.environ.get(VOLUME_VARIABLE, ""):
        raise NotFound(
            "this program has no volume to save to",
            do="Run it under a lease of blocks, or start it with volume= the lease of blocks.",
        )
    found = _known.get(path)
    if found is None:
        line = GuestLine(path, own)
        found = _known[path] = line.open()
    return found


_known: dict[str, GuestVolume] = {}
