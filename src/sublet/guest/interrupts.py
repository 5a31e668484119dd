"""Delivers an interrupt to the cell that it is for, at a safe place.

A kernel as it comes lets an interrupt be raised wherever its main thread happens to be while it deals with a request,
and nowhere else. So one that comes a moment too early is lost, one that comes a moment too late stops a cell that
was not meant, and one in between leaves a request without an answer. Here an interrupt names the cell that is meant.
It is raised in code of that cell and in nothing else: what comes before its first line is raised there, and what comes
after its last makes it a cell that was interrupted, since a client that runs cells in sequence runs none after it.

What is asked for is kept in a flag; a signal only wakes the main thread up, so two of them are no worse than one. And
one may be too few: it does not wake a thread that is just going to sleep, and what it raises in a finaliser is lost.
So it is sent again until it took effect.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, TracebackType
from typing import Any, Final

from sublet.background import start_thread
from sublet.guest.current import note_graph_elsewhere, note_host_device

LATE: Final = "interrupted after the cell was done"
"""What is said of an interrupt that nothing was left of the cell for."""
AGAIN_S: Final = 0.02
"""The signal is sent again then, and again after longer and longer pauses."""
AGAIN_MAX_S: Final = 1.0


class KernelInterrupts:
    """Of one kernel. Asked for on the thread of the control channel, raised on the main thread."""

    def __init__(self, wake: Callable[[], object]) -> None:
        """``wake`` sends SIGINT to this process and to what its cells have started."""
        self._wake = wake
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        """Between the end of a cell and its caller. The main thread's signals never wait for it."""
        self._cell = self._before = self._early = ""
        """The one that runs; the one before it; one that is to come and shall not begin."""
        self._is_wanted = False
        self._was_requested = False
        """By the name of a cell. Then a signal only wakes the thread; else it is an interrupt from elsewhere."""
        self._is_open = False
        """Whether code of the cell runs."""
        self._task: asyncio.Future[Any] | None = None
        """Of a cell with ``await`` in it. It stands aside, and other things run, while it waits."""
        self.is_cancelled = False
        """Such a cell was interrupted while it waited."""
        self.last_shown: tuple[str, str] | None = None
        """Name and text of the error that this cell showed last."""

    # ---- who asks

    def ask(self, cell: str) -> bool:
        """Interrupt that cell, or with "" the one that runs. False: it is over."""
        with self._lock:
            cell = cell or self._cell
            if cell in ("", self._before):
                return False
            if cell == self._cell:
                self._is_wanted = self._was_requested = True
                self._wake()
                self._wake_again()
            else:
                self._early = cell
            return True

    # ---- the cell

    def begin(self, cell: str) -> None:
        """It was asked for; its code is still to come."""
        with self._lock:
            self._cell, self._task, self.is_cancelled, self.last_shown = cell, None, False, None
            self._is_wanted = self._was_requested = self._early == cell
            self._early = ""

    def finish(self) -> bool:
        """It is over. True: an interrupt is left that was not raised."""
        with self._lock:
            self._before, self._cell = self._cell, ""
            left, self._is_wanted, self._task = self._is_wanted, False, None
            return left

    def begin_task(self, task: asyncio.Future[Any]) -> None:
        """The cell is one with ``await`` in it, and this is how it can be cancelled."""
        self._task = task

    def on_signal(self, _number: int, _frame: object) -> None:
        """For SIGINT."""
        if not self._cell:
            return
        if not self._was_requested:
            self._is_wanted = True
        self._raise_if_wanted()

    def _raise_if_wanted(self) -> None:
        if not self._is_wanted or not self._is_open:
            return
        self._is_wanted = False
        task = self._task
        if task is None or asyncio.current_task() is task:
            raise KeyboardInterrupt
        self.is_cancelled = True
        task.cancel()  # not by the loop: the task's next step may be due first, and that may wait for nothing any more
        task.get_loop().call_soon_threadsafe(lambda: None)  # it may be asleep

    def _wake_again(self) -> None:
        cell = self._cell
        _ = start_thread("interrupt", lambda: self._interrupt_until_done(cell))

    def _interrupt_until_done(self, cell: str) -> None:
        pause_s = AGAIN_S
        while True:
            time.sleep(pause_s)
            if not self._is_wanted or self._cell != cell:
                return
            signal.pthread_kill(self._main, signal.SIGINT)
            pause_s = min(pause_s * 1.5, AGAIN_MAX_S)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """In code of the cell, on the main thread: something of ours that must not be cut in two."""
        was, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = was
        self._raise_if_wanted()

    # ---- IPython around it

    def watch(self, shell: Any) -> None:
        """From now on its cells can be interrupted, and what it does around them cannot."""
        run_code, show, unraisable = shell.run_code, shell.showtraceback, sys.unraisablehook
        os.register_at_fork(after_in_child=self._part)

        async def run(code: CodeType, result: Any = None, *, async_: bool = False) -> Any:
            was, self._is_open = self._is_open, True
            try:
                if self._is_wanted:
                    self._is_wanted = False
                    code = _stopped_at(code)
                return await run_code(code, result, async_=async_)
            finally:
                self._is_open = was

        def show_whole(exc_tuple: Any = None, *args: Any, **named: Any) -> None:
            was, self._is_open = self._is_open, False
            try:
                if (error := (exc_tuple or sys.exc_info())[1]) is not None:
                    note_host_device(error)
                    note_graph_elsewhere(error)
                    self.last_shown = type(error).__name__, str(error)
                show(self._as_interrupt(exc_tuple), *args, **named)
            finally:
                self._is_open = was
            if not named.get("running_compiled_code"):  # else the cell has raised, and ends
                self._raise_if_wanted()

        def on_unraisable(one: Any) -> None:
            if one.exc_type is not KeyboardInterrupt or not self._cell or threading.get_ident() != self._main:
                unraisable(one)
                return
            was, self._is_open = self._is_open, False
            self._is_wanted = True
            self._wake_again()
            self._is_open = was

        shell.run_code, shell.showtraceback, sys.unraisablehook = run, show_whole, on_unraisable

    def _as_interrupt(self, exc_tuple: Any) -> Any:
        """As a person is to see it: where the cell was, and not where we were; and one that waited was interrupted as
        any other, though it was cancelled."""
        kind, error, trace = exc_tuple or sys.exc_info()
        if kind is KeyboardInterrupt:
            _cut_off(trace)
        if self.is_cancelled and kind is asyncio.CancelledError:
            return KeyboardInterrupt, KeyboardInterrupt(*getattr(error, "args", ())), trace
        return exc_tuple

    def _part(self) -> None:
        """In a process that a cell forked: no request names its cell."""
        self._lock = threading.Lock()
        self._is_wanted = self._was_requested = False


def _stopped_at(code: CodeType) -> CodeType:
    """What raises in place of this, at its first line."""
    line = next((number for _, _, number in code.co_lines() if number), 1)
    tree = ast.increment_lineno(ast.parse("raise KeyboardInterrupt"), line - 1)
    return compile(tree, code.co_filename, "exec")


def _cut_off(trace: TracebackType | None) -> None:
    """What is ours at the end of it."""
    while trace is not None:
        if trace.tb_next is not None and trace.tb_next.tb_frame.f_code is KernelInterrupts.on_signal.__code__:
            trace.tb_next = None
        trace = trace.tb_next


def kernel_class() -> Any:
    """ipykernel's kernel with interrupts of ours."""
    from ipykernel.ipkernel import IPythonKernel

    class InterruptedByName(IPythonKernel):
        """An ``interrupt_request`` names the cell it is ``of``, and is told whether it was too ``late``."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)  # type: ignore[no-untyped-call]  # traitlets have no types
            self.interrupts = KernelInterrupts(self._send_interrupt_children)
            self.interrupts.watch(self.shell)

        def pre_handler_hook(self) -> None:
            signal.signal(signal.SIGINT, self.interrupts.on_signal)  # a cell may have set another

        post_handler_hook = pre_handler_hook

        def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Any:
            self.interrupts.begin_task(future)
            return contextlib.nullcontext()

        async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
            in_time = self.interrupts.ask(str(parent["content"].get("of", "")))
            content = {"status": "ok", "late": not in_time}
            session: Any = self.session
            session.send(stream, "interrupt_reply", content, parent, ident=ident)

        async def do_execute(self, *args: Any, **named: Any) -> dict[str, Any]:
            shell: Any = self.shell
            shell.displayhook.msg, shell._last_traceback_during_displayhook = (
                None,
                False,
            )  # of one cut short while shown
            request: Any = self.get_parent("shell")  # type: ignore[no-untyped-call]
            self.interrupts.begin(request["header"]["msg_id"])
            try:
                reply: dict[str, Any] = await super().do_execute(*args, **named)  # type: ignore[no-untyped-call]
            finally:
                is_left = self.interrupts.finish()
            if self.interrupts.is_cancelled and reply.get("ename") == "CancelledError":
                reply |= {"ename": "KeyboardInterrupt"}
            if reply["status"] == "error" and reply.get("ename") == "NoneType" and self.interrupts.last_shown:
                # ipykernel names an error of the cell itself only, not one that its result's __repr__ raised.
                name, text = self.interrupts.last_shown
                reply |= {"ename": name, "evalue": text}
            if is_left and reply["status"] == "ok":
                traceback = [f"KeyboardInterrupt: {LATE}"]
                shell._showtraceback(KeyboardInterrupt, LATE, traceback)
                reply |= {"status": "error", "ename": "KeyboardInterrupt", "evalue": LATE, "traceback": traceback}
            return reply

    return InterruptedByName
