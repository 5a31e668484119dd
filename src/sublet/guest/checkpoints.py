"""Calls what a program registered to save its state, when it is time to save.

By hand (``sublet.current().checkpoint()``), or when the page says that the lease will be taken: then once for each
notice, on a thread of its own, because the main thread is busy with just what is worth saving. A program that ends when
that is said, in whichever way, is held until it is saved; the grace bounds that, as it bounds everything.

A lock in the tally of the lease says whether there is anything left to save: an idle lease whose guests cannot be
parked ends as soon as there is not.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final

from sublet.background import start_thread
from sublet.errors import Unsupported
from sublet.values import EndReason, LeaseId
from sublet.wire.page import PageReader, PageState
from sublet.wire.tally import TALLY_VARIABLE, TallyFile

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
        self._say(unsaved=True)

    def save(self, *, by_hand: bool = False) -> object:
        """Save, one at a time: a second caller waits for the first."""
        save = self._save
        if save is None:
            raise Unsupported(
                "this program has not said how it is saved",
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
                self._say(unsaved=True)
        elif lease != self._answered:
            self._answered = lease
            try:
                is_whole = self.save() is not False
            except Exception:  # noqa: BLE001 - a thread of ours has no caller to raise it to
                sys.stderr.write("sublet: what was registered with on_checkpoint() failed:\n")
                traceback.print_exc()
                is_whole = False
            self._say(unsaved=not is_whole or self._answered is None)

    def _say(self, *, unsaved: bool) -> None:
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
