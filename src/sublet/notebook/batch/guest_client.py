"""Adapts a kernel in a guest to the client and manager interfaces that nbclient calls.

nbclient waits for the reply and for the outputs of a cell at the same time. Here both come over one connection that
one thread reads; what came is put into two queues. Between cells no thread reads, so a request is sent without a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty
from typing import Final, TypeVar

from sublet.background import start_task, start_thread
from sublet.compute.kernel_guest import KernelGuest
from sublet.errors import SubletError
from sublet.notebook.batch.job_options import gpu_line
from sublet.notebook.kernel_line import KernelLine, Message

T = TypeVar("T")

LOOK_S: Final = 0.1
"""How long an interrupt may have to wait until it is sent."""


class _Inbox:
    """One channel."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Message] = asyncio.Queue()

    async def get_msg(self, timeout: float | None = None) -> Message:  # noqa: ASYNC109 - nbclient's word
        try:
            return await asyncio.wait_for(self.queue.get(), timeout)
        except TimeoutError:
            raise Empty from None


class GuestClient:
    """Client and manager in one."""

    has_kernel = True
    ipykernel = True
    allow_stdin = False

    def __init__(self, guest: KernelGuest, look: Callable[[], None]) -> None:
        """``look`` is called, on another thread, before each wait for what the kernel says."""
        self.shell_channel = _Inbox()
        self.iopub_channel = _Inbox()
        self._guest = guest
        self._line = KernelLine(guest.channels)
        self._look = look
        self._reader: asyncio.Future[None] | None = None
        self._is_interrupted = threading.Event()
        self._is_over = False

    # ---- what nbclient calls

    async def execute(
        self,
        code: str,
        silent: bool = False,
        store_history: bool = True,
        user_expressions: Mapping[str, str] | None = None,
        allow_stdin: bool | None = None,
        stop_on_error: bool = True,
    ) -> str:
        """Send a request; its id."""
        if self._reader is not None:
            await self._reader
        content = {
            "code": _without_gpu_line(code),
            "silent": silent,
            "store_history": store_history,
            "user_expressions": dict(user_expressions or {}),
            "allow_stdin": False,
            "stop_on_error": stop_on_error,
        }
        self._is_interrupted.clear()
        request = self._line.send("shell", "execute_request", content)
        self._reader = start_task("job_reader", lambda: self._read(request), failed=self._failed)
        return request

    async def is_alive(self) -> bool:
        return not self._is_over and not self._guest.is_lost

    async def shutdown_kernel(self, now: bool = False) -> None:
        """It ends with its lease."""

    async def cleanup_resources(self) -> None:
        """Nothing is left here."""

    def stop_channels(self) -> None:
        """They end with the line."""

    async def interrupt_kernel(self) -> None:
        self.interrupt()

    # ---- ours

    def interrupt(self) -> None:
        self._is_interrupted.set()

    async def stop(self) -> None:
        self._is_over = True
        if self._reader is not None:
            with contextlib.suppress(SubletError, OSError):
                await self._reader
        self._line.close()

    def _wait(self) -> list[tuple[str, Message]]:
        self._look()
        return self._line.wait(LOOK_S)

    def _failed(self, error: BaseException) -> None:
        """Nothing of the kernel is heard any more, so its notebook is told that it is dead."""
        self._is_over = True

    async def _read(self, request: str) -> None:
        """Until the request is answered and the kernel is idle again, or gone."""
        has_reply = is_idle = False
        while not (has_reply and is_idle) and not self._is_over:
            try:
                came = await beside(self._wait)
                if self._is_interrupted.is_set():
                    self._is_interrupted.clear()
                    self._line.interrupt(request)
            except (SubletError, OSError):
                self._is_over = True
                return
            for channel, message in came:
                if message["parent_header"].get("msg_id") == request:
                    has_reply = has_reply or channel == "shell"
                    is_idle = is_idle or message["content"].get("execution_state") == "idle"
                if channel == "shell":
                    self.shell_channel.queue.put_nowait(message)
                elif channel == "iopub":
                    self.iopub_channel.queue.put_nowait(message)


async def beside(call: Callable[[], T]) -> T:
    """Run a blocking call on a thread that does not keep the process from ending."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            done.set_exception(error)

    _ = start_thread("job", run)
    return await asyncio.wrap_future(done)


def _without_gpu_line(code: str) -> str:
    """A cell that asks for a device is on it already. Its first line becomes a comment, so lines keep their numbers."""
    if gpu_line(code) is None:
        return code
    lines = code.split("\n")
    first = next(n for n, line in enumerate(lines) if line.strip())
    rest = lines[first + 1 :]
    if next((line for line in rest if line.strip()), "").startswith("%%"):
        return "\n".join(rest)  # a magic of its own must stand first
    return "\n".join([*lines[:first], f"# {lines[first]}", *rest])
