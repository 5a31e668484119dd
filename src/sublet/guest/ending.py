"""Ends a forked guest with all of Python's exit that a program can notice, without tearing down the interpreter.

Python ends by destroying every object of every module. In a fork that touches, and so copies, nearly all the memory
that was shared with the zygote: with torch loaded a quarter of a second, for objects that only the zygote ever knew.
The zygote has frozen those (``gc.freeze``), and here they are left alone. What the guest made itself is treated as
always: exit functions run, the program's own names are cleared and cycles collected, so that finalizers run; files that
are still open are written out; then the C library's exit, with what libraries registered there. Only objects that
neither the program's main module nor a cycle lets go of miss their finalizer, which Python never promised them.

Two things are left out, in which torch takes its operators apart one by one, 10 to 50 ms of processor in each guest
while the next lease waits: finalizers (``weakref.finalize``) that modules of the zygote registered for objects of the
zygote, and, at the end of a lease, what libraries registered with the C library; its open files are written out all the
same.

While daemon threads run, Python's own way is taken: it knows how to hold them still.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from sublet.wire.zygote import LEASE_ENDED

_FLUSH_FAILED = 120
"""What Python exits with when the last of its output could not be written."""


def end_forked(status: int) -> NoReturn:
    """End this process, which was forked from a zygote. Threads it should wait for have ended."""
    if threading.active_count() > 1:
        raise SystemExit(status)
    for step in (atexit._run_exitfuncs, _clear_main, _flush_all):  # as Python itself ends
        _succeeds(step)
    if not (_succeeds(lambda: _flush(sys.stdout)) and _succeeds(lambda: _flush(sys.stderr))):
        status = status or _FLUSH_FAILED
    library = ctypes.PyDLL(None)
    if status == LEASE_ENDED:
        library.fflush(None)
        os._exit(status)
    library.exit(status)  # holds the lock of the interpreter, so that nothing else runs meanwhile
    raise SystemExit(status)


def keep_finalizers_back() -> None:
    """What has been registered so far is not called when this process or a fork of it exits; called in the zygote."""
    registry: Any = getattr(weakref.finalize, "_registry", ())
    for one in list(registry):
        one.atexit = False


def end_at_once(status: int) -> NoReturn:
    """End this process, forked or not, without waiting for its threads: exit functions, files, and no more."""
    for step in (atexit._run_exitfuncs, _flush_all, lambda: _flush(sys.stdout), lambda: _flush(sys.stderr)):
        _succeeds(step)
    os._exit(status)


def _clear_main() -> None:
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        main[name] = None  # not deleted: a finalizer that looks for it finds something
    gc.collect()


def _flush_all() -> None:
    """Text first: it writes into the binary files below it."""
    found = gc.get_objects()  # of the guest alone: what is frozen is not listed
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for one in found:
            if type(one) is kind and one not in (sys.stdout, sys.stderr):
                _succeeds(lambda one=one: _flush(one))  # type: ignore[misc]


def _flush(file: Any) -> None:
    if file is not None and not file.closed and file.writable():
        file.flush()


def _succeeds(step: Callable[[], object]) -> bool:
    """Whether it went well. Nothing that fails now may keep the rest from being done."""
    try:
        step()
    except BaseException:  # noqa: BLE001 - the process is ending, and its status is settled
        return False
    return True
