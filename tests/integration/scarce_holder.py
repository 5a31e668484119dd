"""A program that works with an office while processes run out of what they need, and notes what it was promised.

``python -m tests.integration.scarce_holder WORK HOME PLACE NAME``, where WORK is one of

- ``calls``: leases a device, runs functions on it, releases it;
- ``saves``: leases a volume, changes a value, saves it;
- ``cells``: runs cells on a device as a notebook does.

It goes on until ``PLACE/stop`` is there, then prints its account as one line of JSON. What it may meet on the way is an
error of the product (``SubletError``) or of the system (``OSError``, ``MemoryError``, no room for a thread); each is
counted, and any other is written down whole: it is a mistake. While there is ``PLACE/wait`` it does nothing.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sublet
from sublet.errors import LeaseInterrupt, RemoteError, SubletError

TTL = "4s"
WAIT = "6s"
ODD_MAX = 5
PAUSE_S = 0.25
"""Between two pieces of work: what counts is that one is under way when something runs out, not how many are done."""


def alone_on(device: str, place: str) -> str:
    """In a guest: nobody else is on this device meanwhile, whatever any table believes."""
    fd = os.open(os.path.join(place, device.replace("/", "-") + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(os.path.join(place, "overlaps"), "a") as file:
                file.write(f"{device}: {os.getpid()}\n")
            return "overlap"
        time.sleep(0.02)
        return "alone"
    finally:
        os.close(fd)


class Account:
    """What came of it."""

    def __init__(self, place: Path, name: str) -> None:
        self.place, self.name = place, name
        self.done = 0
        self.saved = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.odd: list[str] = []

    def note(self) -> None:
        """How far it has come, for whoever watches."""
        with contextlib.suppress(OSError, MemoryError):
            (self.place / f"{self.name}.done").write_text(str(self.done))

    def attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
            self.done += 1
            time.sleep(PAUSE_S)
        except (SubletError, LeaseInterrupt, OSError, MemoryError) as error:
            self.errors[type(error).__name__] += 1
            with contextlib.suppress(OSError, MemoryError):
                print(f"{self.name} {time.monotonic():.2f}: {type(error).__name__}: {error}", file=sys.stderr)
            if isinstance(error, RemoteError) and not _is_shortage(str(error)):
                self._write_down(error)
            time.sleep(0.05)
        except Exception as error:
            # Such as what a cell raised on its device.
            if _is_shortage(f"{type(error).__name__}: {error}"):
                self.errors[type(error).__name__] += 1
            else:
                self._write_down(error)
            time.sleep(0.05)
        self.note()

    def _write_down(self, error: BaseException) -> None:
        if len(self.odd) < ODD_MAX:
            try:
                self.odd.append("".join(traceback.format_exception(error))[-3000:])
            except (OSError, MemoryError):
                self.odd.append(repr(error))

    def report(self) -> str:
        found = {"done": self.done, "saved": self.saved, "errors": dict(self.errors), "odd": self.odd}
        return json.dumps(found)


def _is_shortage(text: str) -> bool:
    words = ("MemoryError", "Too many open files", "Cannot allocate memory", "No space left", "temporarily unavailable")
    return any(word in text for word in (*words, "can't start new thread"))


def calls(account: Account, fabric: sublet.Fabric) -> Callable[[], object]:
    def work() -> None:
        with fabric.gpu(min_vram="16MiB", ttl=TTL, wait=WAIT) as lease:
            for _ in range(3):
                lease.run(alone_on, lease.devices[0].id, str(account.place))

    return work


def saves(account: Account, fabric: sublet.Fabric) -> Callable[[], object]:
    def work() -> None:
        # Below a MiB it is a plain folder: an image that is mounted is copied by whoever makes a mount namespace here.
        with fabric.block("960KiB", name=account.name, ttl=TTL, wait=WAIT) as lease:
            try:
                state = sublet.Durable.restore(lease)
            except sublet.NotFound:
                assert account.saved == 0, "what was saved is not there"
                state = sublet.Durable({"n": 0}, lease)
            assert state.value["n"] >= account.saved, f"{account.saved} was saved, and {state.value['n']} is there"
            for _ in range(3):
                number = state.value["n"] + 1
                state.mutate(lambda value: value.update(n=value["n"] + 1))
                state.checkpoint()
                account.saved = number  # only now is it promised

    return work


def _shell() -> Any:
    """As a notebook's kernel has one."""
    from IPython.core.interactiveshell import InteractiveShell

    return InteractiveShell.instance()


def cells(account: Account, fabric: sublet.Fabric) -> Callable[[], object]:
    shell = _shell()
    shell.run_cell("%load_ext sublet").raise_error()
    shell.run_cell("n = 0").raise_error()

    def work() -> None:
        before = shell.user_ns["n"]
        result = shell.run_cell(f"%%gpu --vram 16MiB --ttl {TTL} --wait {WAIT}\nn = n + 1\n")
        after = shell.user_ns["n"]
        if result.success:
            assert after == before + 1, f"a cell that succeeded made {after} of {before}"
        else:
            assert after in (before, before + 1), f"a cell that failed made {after} of {before}"
        result.raise_error()
        if account.done % 4 == 3:
            shell.run_cell("%gpu release").raise_error()

    return work


WORKS: dict[str, Callable[[Account, sublet.Fabric], Callable[[], object]]] = {
    "calls": calls,
    "saves": saves,
    "cells": cells,
}


def main(kind: str, home: str, place: Path, name: str) -> None:
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)  # where it stands, if it makes no progress
    account = Account(place, name)
    fabric = sublet.connect(home=home)
    work: Any = WORKS[kind](account, fabric)
    while not (place / "stop").exists():
        if (place / "wait").exists():
            time.sleep(0.05)
        else:
            account.attempt(work)
    if kind == "cells":
        _shell().run_cell("%gpu release")
    fabric.close()
    sys.stdout.flush()
    print(account.report(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
