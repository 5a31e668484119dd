"""Runs a Python program as a guest: the lease's end reaches it as an exception, and its exit status says what
happened.

The supervisor announces an end with SIGTERM, after it wrote the reason on the guest's page. The main thread then gets
``LeaseInterrupt``, once, wherever it is in Python code; a call into C that does not come back delays it. A program may
catch it to save and leave; if it goes on, it is ended by force when the grace is over.

A program that gets no processor for a while, or is stopped, may come to handle the signal when its reason is gone. What
it does then follows from the page as it is *then*, and from whether the page counts a warning (``PageView.warnings``)
that this process has not met:

=========================================  =====================  ====================
the page says                              a warning, met late    any other SIGTERM
=========================================  =====================  ====================
live: renewed, or parked and resumed       goes on                ends by the signal
noticed, for another reason than its time  goes on                ``LeaseInterrupt``
parked                                     goes on                ``LeaseInterrupt``
noticed: its time runs out                 ``LeaseInterrupt``     ``LeaseInterrupt``
leaving, over                              ``LeaseInterrupt``     ``LeaseInterrupt``
=========================================  =====================  ====================

A guest that leaves says so in the tally of its lease first and then looks again, so the supervisor knows of everything
that stands still whether it would leave when it goes on: that is not parked (``node.supervisor.parking``).

Where it goes through to the top the program is over: its other threads are not waited for, as Python would, since they
would only be met by that force (who wants to wait for them catches it and does). SIGTERM *without* an end on the
page is an ordinary one and does what it always does.

The exit status is 76 where the lease's end went through to the top, and what plain Python gives in every other case.

Begun in a fresh interpreter with ``python -m sublet.guest.bootstrap package.module:callable [JSON]`` (or ``--`` and
what stands after ``python`` on a command line), and by the zygote after its forks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from sublet.errors import LeaseInterrupt, SubletError
from sublet.guest.current import PAGE_VARIABLE, end_of, own_device
from sublet.guest.ending import end_at_once
from sublet.guest.program import Program
from sublet.guest.program import __file__ as program_file
from sublet.wire.cards import COUNT_VARIABLE
from sublet.wire.page import PageReader, PageState
from sublet.wire.page import __file__ as page_file
from sublet.wire.usage_counters import TALLY_VARIABLE, TallyFile
from sublet.wire.zygote import LEASE_ENDED

SAVING_S: Final = 600.0
_INTERRUPTED: Final = -int(signal.SIGINT)
"""In place of a status: Python tells a Ctrl-C by ending itself with the signal, so that a shell stops its script."""
_OURS: Final = frozenset((__file__, program_file, page_file))
"""The files whose part in a traceback is nothing that the program did."""


def run(program: Program, end: Callable[[int], NoReturn] = sys.exit) -> NoReturn:
    """Run the program to its end, and end this process as Python does, with all that a program can notice of it.

    Nothing is cut short (no ``os._exit``): files that were left open are written out, for instance. ``end`` is how the
    process ends once the status is known; a forked guest has a way of its own (``ending``).
    """
    status = 0
    for step in (arrange_interrupt, _count_launches, program.run, _wait_for_threads, _finish_saving):
        try:
            step()
        except BaseException as error:  # noqa: BLE001 - this is the top: whatever comes is told, as Python tells it
            status = _print_error(error)
            if step is arrange_interrupt or status == LEASE_ENDED:
                break
    if status == LEASE_ENDED:
        _finish_saving()
        if threading.active_count() > 1:
            end_at_once(status)
    if status == _INTERRUPTED:
        sys.excepthook = lambda *_: None  # it is told already
        raise KeyboardInterrupt
    end(status)


def _count_launches() -> None:
    if os.environ.get(COUNT_VARIABLE) == "1":
        from sublet.guest.launch_counter import start_counting

        start_counting(own_device())


def arrange_interrupt() -> None:
    """From now on SIGTERM of the supervisor is ``LeaseInterrupt`` in the main thread, once. Nothing without a page."""
    path = os.environ.get(PAGE_VARIABLE, "")
    if not path:
        return
    signal.signal(signal.SIGTERM, EndOfLease(PageReader(path), os.environ.get(TALLY_VARIABLE, "")))
    _let_processes_be_terminated()


class EndOfLease:
    """Handles SIGTERM in a guest, as the table at the top of the module has it."""

    def __init__(self, page: PageReader, tally_path: str) -> None:
        self._page = page
        self._tally_path = tally_path
        self._pid = os.getpid()
        self._raised = False
        self._warnings = page.read().warnings
        """Those that this process has met, or that came before it did."""
        self._tally: TallyFile | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._pid != os.getpid():  # a fork of the program inherits the handler, and has its own one time
            self._pid, self._raised, self._tally = os.getpid(), False, None
        if self._raised:
            return
        view = self._page.read()
        is_warning, self._warnings = view.warnings != self._warnings, view.warnings
        if is_warning and not view.is_leaving:
            return
        if view.state is PageState.LIVE:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._note_leaving()
        view = self._page.read()
        if is_warning and not view.is_leaving:  # renewed, or parked, between the two looks
            self._note_staying()
            return
        self._raised = True
        raise _interrupt_class()(end_of(view))

    def stays(self) -> None:
        """What was raised has been caught, and the program does not leave: it may be parked, and is told of the next
        warning or end as of the first."""
        if self._raised and self._pid == os.getpid():
            self._raised = False
            self._note_staying()

    def _note_leaving(self) -> None:
        if self._tally is None and self._tally_path:  # not before: a fork would share what is locked
            self._tally = TallyFile.open(self._tally_path)
        if self._tally is not None:
            self._tally.leaving(begins=True)

    def _note_staying(self) -> None:
        if self._tally is not None:
            self._tally.leaving(begins=False)


def _let_processes_be_terminated() -> None:
    """A child of ``multiprocessing`` ends by SIGTERM as it does anywhere. A handler in Python is run between two steps
    of the interpreter: a child that is told to end just as it begins to wait for a lock would wait on, and the
    process that terminates a pool waits for it. Blocked around the fork, so that none is lost before the child has no
    handler."""
    masks: list[set[int]] = []

    def is_meant() -> bool:
        return sys._getframe(2).f_globals.get("__name__") == "multiprocessing.popen_fork"

    def before() -> None:
        if is_meant():
            masks.append({int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})})

    def in_parent() -> None:
        if is_meant():
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        if is_meant():
            if str(getattr(signal.getsignal(signal.SIGTERM), "__module__", "")).startswith("sublet.guest."):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def main(arguments: list[str]) -> NoReturn:
    """The program of a fresh interpreter."""
    match arguments:
        case ["--", *argv] if argv:
            program = Program(argv=tuple(argv))
        case [entry] if not entry.startswith("-"):
            program = Program(entry=entry)
        case [entry, args] if not entry.startswith("-"):
            program = Program(entry=entry, args=args)
        case _:
            sys.stderr.write("usage: python -m sublet.guest.bootstrap package.module:callable [JSON] | -- COMMAND\n")
            raise SystemExit(2)
    run(program)


# ----------------------------------------------------------------------------------------------- what it ended with


def _status(error: SystemExit) -> int:
    """As Python does: nothing is 0, a number is itself, anything else is printed and 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    _print_last(str(error.code))
    return 1


def _print_error(error: BaseException) -> int:
    is_end = isinstance(error, LeaseInterrupt | _interrupt_class())
    if is_end and getattr(error, "code", LEASE_ENDED) == LEASE_ENDED:  # else it says itself that it left otherwise
        return _print_end(error)
    if isinstance(error, SystemExit):
        return _status(error)
    if isinstance(error, SubletError) and _is_ours(error.__traceback__):
        _print_last(f"sublet: {error}")  # the program was never begun: a request that cannot be met, not a crash
        return 2
    _hook(error)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _print_end(error: BaseException) -> int:
    """One line, unless the program has a hook of its own."""
    end = getattr(error, "end", None)
    if sys.excepthook is not sys.__excepthook__ or end is None:
        _hook(error)
    else:
        detail = f" ({end.detail})" if end.detail else ""
        _print_last(f"sublet: the lease ended: {end.reason}{detail}. {end.resume_hint}")
    return LEASE_ENDED


def _hook(error: BaseException) -> None:
    """The traceback, from the first line that is the program's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:  # noqa: BLE001 - a broken hook must not hide the error it was to show
        traceback.print_exc()
        traceback.print_exception(error)


def _is_ours(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _OURS:
            return False
        trace = trace.tb_next
    return True


def _print_last(line: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(line + "\n")


def _wait_for_threads() -> None:
    """Python would wait for them anyway; here the end of the lease can still be told as it should. From Python 3.13 on
    what a signal raises meanwhile is printed and forgotten, so there the last part of the waiting is ours."""
    theirs: Any = threading
    waits = getattr(theirs, "_thread_shutdown", None)
    if waits is None:
        theirs._shutdown()
        return

    def join_each() -> None:
        me = threading.current_thread()
        while alive := [one for one in threading.enumerate() if not one.daemon and one is not me]:
            for one in alive:
                one.join()
        waits()

    theirs._thread_shutdown = join_each
    try:
        theirs._shutdown()
    finally:
        theirs._thread_shutdown = waits


def _finish_saving() -> None:
    """What the program registered to be saved by is under way on another thread, or is due; the grace bounds it. It may
    have read of the end on its page and left before the signal came, which is no news then and interrupts no save."""
    theirs = sys.modules.get("sublet.guest.checkpoints")
    if theirs is not None and theirs.is_save_due():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        theirs.wait_for_save(SAVING_S)


def _interrupt_class() -> type[BaseException]:
    """``LeaseInterrupt`` as the program knows it: it may have a Sublet of its own, in another version."""
    theirs = getattr(sys.modules.get("sublet.errors"), "LeaseInterrupt", None)
    return theirs if isinstance(theirs, type) and issubclass(theirs, BaseException) else LeaseInterrupt


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # put there for `-m`, and that is not how the program was begun
    main(sys.argv[1:])
