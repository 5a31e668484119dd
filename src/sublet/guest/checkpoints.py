"""Calls what a program registered to save its state, when it is time to save.

By hand (``sublet.current().checkpoint()``), or when the page says that the lease will be taken: then once for each
notice, on a thread of its own, because the main thread is busy with just what is worth saving. A program that ends when
that is said, in whichever way, is held until it is saved; the grace bounds that, as it bounds everything.

A lock in the tally of the lease says whether there is anything left to save: an idle lease whose guests cannot be
parked ends as soon as there is not.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final

from sublet.background import start_thread
from sublet.errors import Disconnected, NotFound, Unsupported
from sublet.lease_end import EndReason
from sublet.values import Epoch, LeaseId
from sublet.wire.codec import dumps, loads
from sublet.wire.page import PageReader, PageState
from sublet.wire.refusals import Refusal, error_of
from sublet.wire.unix import connect_waiting
from sublet.wire.usage_counters import TALLY_VARIABLE, TallyFile
from sublet.wire.volumes import (
    MESSAGE_MAX,
    PUBLISH_VARIABLE,
    VOLUME_VARIABLE,
    OpenVolume,
    VolumeCall,
    VolumeOpened,
    VolumeReply,
)

LOOK_S: Final = 0.1
"""Between two looks at the page: some microseconds each."""

GIVEN_BACK: Final = frozenset((EndReason.RELEASED, EndReason.WITHDRAWN))
"""Its holder needs nothing more of it; one that does saves first. (That of a parked guest could not.)"""


class Checkpoints:
    """What one program registered."""

    def __init__(self, page: PageReader) -> None:
        self._page = page
        self._save: Callable[[], object] | None = None
        self._saving = threading.RLock()
        self._watcher: threading.Thread | None = None
        self._pid = os.getpid()
        self._tally: TallyFile | None = None
        self._answered: LeaseId | None = None
        """The lease whose end was announced, and for which it was saved since."""
        self.is_by_hand = False
        """While it saves: whether the program itself asked for it."""

    def register(self, save: Callable[[], object]) -> None:
        """From now on this is what saves."""
        self._save = save
        if self._watcher is None or self._pid != os.getpid():
            self._pid, self._saving = os.getpid(), threading.RLock()
            path = os.environ.get(TALLY_VARIABLE, "")
            self._tally = TallyFile.open(path) if path else None
            self._watcher = start_thread("notice", self._watch, again=True)
        self._report(unsaved=True)

    def save(self, *, by_hand: bool = False) -> object:
        """Save, one at a time: a second caller waits for the first."""
        save = self._save
        if save is None:
            raise Unsupported(
                "this program has registered no function that saves it",
                do="Register what saves it: sublet.current().on_checkpoint(function).",
            )
        with self._saving:
            before, self.is_by_hand = self.is_by_hand, by_hand
            try:
                return save()
            finally:
                self.is_by_hand = before

    def ask_again(self) -> None:
        """What is saved cannot be now; it is no answer to the notice that it was called."""
        self._answered = None

    @property
    def is_due(self) -> bool:
        """Whether it is announced that the lease ends, and there is something to save."""
        return self._save is not None and self._pid == os.getpid() and self._ending() is not None

    def wait(self, timeout_s: float) -> None:
        """Until no save is under way; one that is due and has not begun is done here."""
        if self._save is None or self._pid != os.getpid() or not self._saving.acquire(timeout=timeout_s):
            return
        try:
            self._answer()
        finally:
            self._saving.release()

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            with self._saving:
                self._answer()
            if self._page.read().state is PageState.OVER:
                return

    def _answer(self) -> None:
        """Save, if it is time to and it was not done since the end was announced."""
        lease = self._ending()
        if lease is None:
            if self._answered is not None:
                self._answered = None
                self._report(unsaved=True)
        elif lease != self._answered:
            self._answered = lease
            try:
                is_whole = self.save() is not False
            except Exception:  # noqa: BLE001 - a thread of ours has no caller to raise it to
                sys.stderr.write("sublet: what was registered with on_checkpoint() failed:\n")
                traceback.print_exc()
                is_whole = False
            self._report(unsaved=not is_whole or self._answered is None)

    def _report(self, *, unsaved: bool) -> None:
        if self._tally is not None:
            self._tally.unsaved(begins=unsaved)

    def _ending(self) -> LeaseId | None:
        """The lease before whose end it is to be saved, if it is time to. One that was noticed, and whose guest was
        parked then, is another than the parking lease that ends later."""
        view = self._page.read()
        is_due = view.state in (PageState.NOTICED, PageState.LEAVING) or (
            view.state is PageState.OVER and view.reason not in GIVEN_BACK
        )
        return view.lease if is_due else None


def checkpoints_of(path: str) -> Checkpoints:
    """Those of this program, whose page lies there."""
    found = _known.get(path)
    if found is None:
        found = _known[path] = Checkpoints(PageReader(path))
    return found


def is_save_due() -> bool:
    """Whether a program that ends now ends with its lease, and has something to save."""
    return any(found.is_due for found in tuple(_known.values()))


def wait_for_save(timeout_s: float) -> None:
    """The program is about to end because its lease does: a save is done first, if there is one to do."""
    for found in tuple(_known.values()):
        found.wait(timeout_s)


_known: dict[str, Checkpoints] = {}


# --------------------------------------------------------------------------------------------------------------- volume
#
# The volume that a guest saves to, and its connection to the supervisor, which alone publishes.
#
# One connection for the life of the program, made when it is first needed and again in a fork: a question, its answer,
# and then the next. It is the process that the supervisor knows, so nothing here is secret.


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
        if self._pid != os.getpid():  # a fork: connection and lock are its parent's, which may be in the middle
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
    found = _known_volumes.get(path)
    if found is None:
        line = GuestLine(path, own)
        found = _known_volumes[path] = line.open()
    return found


_known_volumes: dict[str, GuestVolume] = {}
