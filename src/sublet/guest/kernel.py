"""The program of a kernel guest: an unmodified ipykernel, bridged to the holder's connection.

Its sockets are inproc ones of this process (``jupyter``): there is no connection file, no port and no heartbeat. That
the guest lives is for the supervisor to know. Needs ipykernel in the guest's interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from sublet.errors import LeaseInterrupt, Unsupported
from sublet.guest.caps import cap_torch
from sublet.guest.current import PAGE_VARIABLE
from sublet.guest.inbox import Inbox
from sublet.guest.launch_counter import flush_launches
from sublet.guest.main_thread import MainThreadQueue
from sublet.guest.serving import start_serving
from sublet.guest.streams import Speech, SpokenRecords
from sublet.guest.within import kernels
from sublet.guest.work import GuestWorker
from sublet.values import MIB
from sublet.wire.channels import WINDOW
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Service, Visit
from sublet.wire.jupyter import CHANNELS, Messages, pack_message
from sublet.wire.link_events import Closed, Credit, Data, Happening, Opened, Over
from sublet.wire.page import PageReader, PageState

T = TypeVar("T")
LOOK_S: Final = 1.0


def main() -> None:
    """Run until the lease ends or the holder stops it."""
    inbox = Inbox.from_stdin()
    try:
        from sublet.guest.kernel_app import IDENTITY, make_app
    except ImportError as error:  # the holder shows the end of stderr: the sentence, and not where we raised it
        message = f"{sys.executable} has no ipykernel ({error})"
        sys.exit(str(Unsupported(message, do=f"{sys.executable} -m pip install ipykernel")))
    app = make_app()
    forget_doctest()
    app.initialize([])
    app.kernel._execute_sleep = 0.0  # so that output comes before the reply; the caller here waits for both
    end_with_the_cell(app.shell, _loop().asyncio_loop)
    set_backend_of_environment(app.shell)
    page = PageReader(os.environ[PAGE_VARIABLE])
    cap_torch(page.read().devices)
    app.shell.events.register("post_run_cell", lambda _: flush_launches())
    app.shell.events.register("post_run_cell", lambda _: _leave_if_over(page))
    main_queue = _KernelQueue(page, app.shell)
    kernels.append(main_queue)
    worker = GuestWorker(main_queue, page, Speech(), SpokenRecords(sys.stderr))

    def serve_jupyter(conversation: Conversation, visit: Visit) -> None:
        Bridge(conversation, app.context, app.addresses, IDENTITY).run()

    start_serving(inbox, {Service.JUPYTER: serve_jupyter, Service.WORK: worker.serve})
    app.start()


def forget_doctest() -> None:
    """ipykernel replaces ``pdb.Pdb``. Where a warm interpreter imported ``doctest`` before that, its class derives from
    the old one and calls the new one, and fails in every cell. Cells import it anew."""
    sys.modules.pop("doctest", None)


def set_backend_of_environment(shell: Any) -> None:
    """matplotlib reads ``MPLBACKEND`` when it is imported. A warm interpreter may have done so before it was known
    that this would be a notebook, and then plots would be drawn and never shown."""
    matplotlib, backend = sys.modules.get("matplotlib"), os.environ.get("MPLBACKEND")
    if matplotlib is None or not backend:
        return
    if "matplotlib.pyplot" not in sys.modules:
        _set_backend(matplotlib.rcParams, backend)
        sys.modules.pop("matplotlib_inline.backend_inline", None)  # imported anew it finds the shell, and teaches it
    elif "inline" in backend:
        shell.enable_matplotlib("inline")  # as ``%matplotlib inline``: also how figures become pictures
    else:
        matplotlib.use(backend)


def _set_backend(settings: Any, backend: str) -> None:
    """Of matplotlib. To tell whether the name is valid it reads what every installed package offers; a module is."""
    if backend.startswith("module://"):
        dict.__setitem__(settings, "backend", backend)
    else:
        settings["backend"] = backend


class _KernelQueue(MainThreadQueue):
    """The kernel's main thread belongs to its loop; calls of functions are done there between cells.

    What is printed meanwhile is the kernel's, and nothing is interrupted: that is for cells.
    """

    def __init__(self, page: PageReader, shell: Any) -> None:
        super().__init__()
        self._loop = _loop()
        self._page = page
        self._shell = shell
        self._putting = threading.Lock()
        self._within: queue.SimpleQueue[Callable[[], None]] | None = None
        """Calls that came while a cell waits for one."""

    def put(self, job: Callable[[], None]) -> None:
        def done() -> None:
            try:
                job()
            finally:
                _leave_if_over(self._page)

        with self._putting:
            if self._within is not None:
                self._within.put(done)
            else:
                self._loop.add_callback(done)

    def answer_calls(self, ask: Callable[[], object], until: Callable[[], bool]) -> None:
        """On the main thread, within a cell: ask the holder for something, and do what it calls for, until that is
        so. Interrupts wait meanwhile."""
        waiting = self._within = queue.SimpleQueue[Callable[[], None]]()
        try:
            with self._shell.kernel.interrupts.held_back():
                ask()
                while not until():
                    try:
                        job = waiting.get(timeout=LOOK_S)
                    except queue.Empty:
                        continue
                    job()
        finally:
            with self._putting:
                self._within = None
            while not waiting.empty():
                self._loop.add_callback(waiting.get())

    def awaited(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Future[object]:
        """Where cells run: what one sets of its context, such as the precision of decimals, the next one finds."""
        kernel = self._shell.kernel
        task: asyncio.Future[object] = self._loop.asyncio_loop.create_task(coroutine, context=kernel.cells_context)
        return task

    async def run_cell(self, request: dict[str, Any], then: Callable[[], Any]) -> tuple[Any, ...]:
        """As ``within.Kernel`` says."""
        reply = await self._shell.kernel.run_request(request)
        return reply, self.execute(then)

    def execute(self, work: Callable[[], T]) -> T:
        """The end of the lease is raised wherever the kernel is. In the middle of a function it is no mistake of the
        function's.

        A library that is imported meanwhile, for an object that came, finds ``get_ipython`` as in a cell. Pandas looks
        for it once, on import, and sets its widths for a terminal where there is none."""
        try:
            with self._shell.builtin_trap:
                return super().execute(work)
        except BaseException as error:
            cause = getattr(error, "error", error)  # as the calls wrap it
            if isinstance(cause, LeaseInterrupt):
                raise cause from None
            raise

    def interrupt(self, what: object) -> None:
        """Not here."""


def _leave_if_over(page: PageReader) -> None:
    """The lease was taken, and what ran has been told: IPython shows that and would wait for another cell, until the
    grace is over and it is killed."""
    view = page.read()
    taken = view.state is PageState.NOTICED and view.take_at_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    if taken or view.state in (PageState.OVER, PageState.LEAVING):
        _loop().add_callback(_loop().stop)
    elif (stays := getattr(signal.getsignal(signal.SIGTERM), "stays", None)) is not None:
        stays()


def _loop() -> Any:
    """The kernel's, of its main thread."""
    from tornado.ioloop import IOLoop

    return IOLoop.current()


# --------------------------------------------------------------------------------------------------------------- forked
#
# Handles a cell that forks: the child must not continue as a second kernel.
#
# Its loop waits on what the kernel's loop waits on, so it takes wake-ups meant for the kernel, which then misses the
# next call. So it has a loop of its own from the first moment, and it is over when its cell is.


def end_with_the_cell(shell: Any, loop: asyncio.AbstractEventLoop) -> None:
    """From now on, for every process that a cell forks from this one and does not end itself."""
    home = os.getpid()

    def part() -> None:
        if getattr(loop, "_selector", None) is not None:
            loop._selector = selectors.DefaultSelector()  # type: ignore[attr-defined]  # only what is due, and no fd

    def leave(result: Any) -> None:
        if os.getpid() == home:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a cell may have closed it, or put anything in its place
                stream.flush()
        os._exit(status_of(result))

    os.register_at_fork(after_in_child=part)
    shell.events.register("post_run_cell", leave)


def status_of(result: Any) -> int:
    """The exit status that tells a waiting process how its cell ended."""
    error = None if result is None else result.error_in_exec or result.error_before_exec
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return int(result is None or error is not None)


# -------------------------------------------------------------------------------------------------------------- jupyter
#
# Bridges a holder's connection to the kernel's sockets, in both directions.
#
# The kernel runs in this very process and its sockets are ZeroMQ's *inproc* ones: they lie in no folder, have no
# address on any network, and no other process can reach them. Only this thread touches their other ends.


WAITING_MAX: Final = 16 * MIB
"""Bytes of one channel that wait for the holder; while there are more, the kernel's socket is not read."""
WAIT_MS: Final = 1000


class Bridge:
    """One line to one kernel."""

    def __init__(self, conversation: Conversation, context: Any, addresses: Mapping[str, str], identity: bytes) -> None:
        """``context`` is the ZeroMQ context of the kernel, ``addresses`` say where each channel is bound; to
        ``identity`` the kernel sends what it asks."""
        import zmq

        self._zmq = zmq
        self._identity = identity
        self._conversation = conversation
        self._sockets = {name: self._connect(context, name, addresses[name]) for name in CHANNELS}
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._messages = {name: Messages() for name in CHANNELS}
        self._waiting: dict[str, deque[memoryview]] = {name: deque() for name in CHANNELS}

    def run(self) -> None:
        """Until the line is over."""
        try:
            while True:
                for name in self._ready():
                    self._take_from_kernel(name)
                for happening in self._conversation.pump():
                    if isinstance(happening, Over):
                        return
                    self._on_event(happening)
                self._send()
                self._conversation.flush(0)
        finally:
            for socket in self._sockets.values():
                socket.close(linger=0)

    def _connect(self, context: Any, name: str, address: str) -> Any:
        zmq = self._zmq
        socket = context.socket(zmq.SUB if name == "iopub" else zmq.DEALER)
        socket.rcvhwm = 0  # what is too much is left with the kernel, never dropped
        if name == "iopub":
            socket.subscribe(b"")
        else:
            socket.identity = self._identity
        socket.connect(address)
        return socket

    def _ready(self) -> list[str]:
        """Wait for anything; which of the kernel's channels have something to say."""
        zmq = self._zmq
        poller = zmq.Poller()
        for name, socket in self._sockets.items():
            if name in self._numbers and sum(map(len, self._waiting[name])) < WAITING_MAX:
                poller.register(socket, zmq.POLLIN)
        line = self._conversation.fileno()
        poller.register(line, zmq.POLLIN | (zmq.POLLOUT if self._conversation.wants_write else 0))
        found = dict(poller.poll(0 if self._conversation.has_kept else WAIT_MS))
        return [name for name, socket in self._sockets.items() if socket in found]

    def _take_from_kernel(self, name: str) -> None:
        zmq = self._zmq
        while sum(map(len, self._waiting[name])) < WAITING_MAX:
            try:
                parts = self._sockets[name].recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._waiting[name].append(memoryview(pack_message(parts)))

    def _on_event(self, happening: Happening) -> None:
        link = self._conversation.link
        match happening:
            case Opened(channel=number, body=body) if (name := body.decode("ascii", "replace")) in self._sockets:
                self._numbers[name], self._names[number] = number, name
                link.grant(number, WINDOW)
            case Opened(channel=number):
                link.close(number, "there is no such channel")
            case Data(channel=number, data=data):
                name = self._names[number]
                for parts in self._messages[name].feed(data):
                    self._sockets[name].send_multipart(parts)
                link.consumed(number, happening.cost)
            case Closed(channel=number):
                self._numbers.pop(self._names.pop(number, ""), None)
                link.close(number)
            case Credit():
                pass  # sending goes on with every turn
            case _:
                pass

    def _send(self) -> None:
        for name, waiting in self._waiting.items():
            number = self._numbers.get(name)
            if number is None:
                waiting.clear()
                continue
            while waiting:
                sent = self._conversation.link.send_data(number, waiting[0])
                if sent < len(waiting[0]):
                    waiting[0] = waiting[0][sent:]
                    break
                waiting.popleft()
