"""ipykernel's application and kernel as a guest runs them. Importing this needs ipykernel.

A warm interpreter imports it, so that the classes are made before it is known who needs a kernel. What a kernel does
then, the notebook's first cell waits for: it leaves out what serves front ends, command lines and debuggers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from ipykernel import ipkernel
from ipykernel.kernelapp import IPKernelApp

from sublet.guest.interrupts import kernel_class
from sublet.wire.jupyter import DELIMITER

__all__ = ["IDENTITY", "make_app"]

_DEBUGGER: Final = "debugpy"
IDENTITY: Final = b"sublet"
"""The kernel sends a question for input to the same name that the request to execute came from."""


def _leave_debugger_out() -> None:
    """A front end debugs the notebook's own kernel, never the guest's. debugpy takes a third of the time of all that a
    kernel imports, and ipykernel makes do where it is not installed. So for the one moment in which ipykernel looks for
    it, it is not. A program that imports it gets it."""
    if _DEBUGGER in sys.modules or "ipykernel.debugger" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules  # None says that there is no such module
    modules[_DEBUGGER] = None
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("ipykernel.debugger")
    finally:
        del modules[_DEBUGGER]


_leave_debugger_out()


def in_standby() -> None:
    """Called in a copy of a warm interpreter that waits to be a guest (``guest.zygote``). A kernel looks at every
    module before its first cell: which of them came from where."""
    for module in list(sys.modules.values()):
        getattr(getattr(module, "__spec__", None), "origin", None)


def make_app() -> Any:
    """The application of this process; it is not initialized."""
    app = GuestKernelApp.instance(
        quiet=False,  # what is printed is in the guest's log as well, for `sublet logs`
        capture_fd_output=True,
        kernel_class=GuestKernel,
        log_level=40,
    )
    app.session.key = b""  # only the line's thread reaches the sockets, so signatures are not needed
    app.config.HistoryManager.enabled = False  # the history is the notebook's, not the guest's
    return app


def _nothing(self: object, *args: object, **keywords: object) -> None:
    """There is no such thing here."""


class GuestKernelApp(IPKernelApp):
    """The kernel without what is for finding it and for watching over it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]  # traitlets have no types
        self.addresses: dict[str, str] = {}
        self._bound: list[str] = []

    def parse_command_line(self, argv: Any = None) -> None:
        """It has none. To make a parser for all options, and to parse nothing, takes a sixth of a kernel's start."""
        self.argv, self.extra_args = [], []

    def _try_bind_socket(self, socket: Any, port: int) -> int:
        self._bound.append(f"inproc://sublet-{len(self._bound)}")
        socket.bind(self._bound[-1])
        return len(self._bound)

    def init_sockets(self) -> None:
        super().init_sockets()  # type: ignore[no-untyped-call]
        for name in ("shell", "control", "stdin", "iopub"):
            self.addresses[name] = self._bound[getattr(self, f"{name}_port") - 1]

    init_connection_file = init_heartbeat = init_poller = _nothing
    write_connection_file = log_connection_info = cleanup_connection_file = _nothing


class GuestKernel(kernel_class()):  # type: ignore[misc]  # one that is made when it is wanted
    cells_context: contextvars.Context
    """Everything that comes from the holder runs in this one, as in ipykernel everything of the shell channel."""
    _called_cell = ""
    """The cell that came as a call."""

    def __init__(self, **settings: Any) -> None:
        with _no_modules_listed():
            super().__init__(**settings)

    def start(self) -> None:
        self.cells_context = contextvars.copy_context()
        super().start()

    async def shell_main(self, subshell_id: str | None, msg: Any) -> None:
        handled = super().shell_main(subshell_id, msg)

        async def handle() -> None:  # not by the name of ``shell_main``: one task of that name is one message
            await handled

        if subshell_id is None:
            await asyncio.get_running_loop().create_task(handle(), context=self.cells_context)
        else:
            await handled

    async def run_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the cell of a request that did not come on the shell channel; the content of the reply. What it says
        goes to the other channels as ever, and ``idle`` behind it."""
        reply = _Reply()
        async with self._main_asyncio_lock:
            self.set_parent([IDENTITY], request, channel="shell")
            self._called_cell = request["header"]["msg_id"]
            self.pre_handler_hook()
            try:
                await self.execute_request(reply, [IDENTITY], request)
            finally:
                self.post_handler_hook()
                self._publish_status("idle", "shell")
        return reply.content

    def _publish_execute_input(self, code: str, parent: dict[str, Any], execution_count: int) -> None:
        if parent["header"]["msg_id"] != self._called_cell:  # who asks by a call knows what it has asked
            super()._publish_execute_input(code, parent, execution_count)


@contextlib.contextmanager
def _no_modules_listed() -> Iterator[None]:
    """For the debugger ipykernel asks each module that is loaded for its file, and there is no debugger here. In a
    process that was forked each of thousands of modules so costs a page of memory."""

    module: Any = ipkernel
    module.sys = SimpleNamespace(**{**vars(sys), "modules": {}})
    try:
        yield
    finally:
        module.sys = sys


class _Reply:
    """Takes the place of the socket to which the kernel sends its reply."""

    content: dict[str, Any]

    def send_multipart(self, parts: list[Any], *_: object, **__: object) -> None:
        """As ``Session.send`` calls it: the content stands behind header, parent and metadata."""
        self.content = json.loads(parts[parts.index(DELIMITER) + 5])
