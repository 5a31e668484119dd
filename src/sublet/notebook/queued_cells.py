"""Counts cells that the front end has queued: while there are any, the last lease is in use.

"Run all" sends every cell at once. The kernel takes one after the other, and between two cells on the device there may
be others that run on the CPU for a while. A lease that counted as idle meanwhile would go to the next request, and the
notebook would have to wait for it a moment later.

What is queued is seen in two places of ipykernel (7 and later): messages that the thread of the shell channel has
handed to the main thread, and those that the main thread has read already, each of which has a task that waits for its
turn. It is looked at when a cell begins, and when the event loop is free again after one. If neither place is there,
nothing counts as queued: then the lease is idle between cells.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sublet.client.lease import Lease

FREE_S: Final = 0.05
"""An event loop that has been free for so long has begun whatever was queued."""
_READABLE: Final = 1
"""``zmq.POLLIN``"""


class QueuedCells:
    """Of one shell. Used on the thread that runs its cells."""

    def __init__(self, shell: Any) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._using = contextlib.ExitStack()
        self._is_running = False
        self._is_waiting = False
        """Whether it will be looked when the loop is free."""
        if self._kernel is not None:
            shell.events.register("pre_run_cell", self._begun)
            shell.events.register("post_run_cell", self._on_cell_end)

    def hold_while_queued(self, lease: Lease) -> None:
        """A cell on this lease is over. While others are queued the lease is in use."""
        self._using.close()
        if self._kernel is not None and has_queued(self._kernel, running=1):
            self._using.enter_context(lease.activity("queued cells"))

    def release(self) -> None:
        """Nothing is queued that would need it."""
        self._using.close()

    def _begun(self, *_: object) -> None:
        self._is_running = True
        if not has_queued(self._kernel, running=1):
            self.release()  # if this cell is for the device, it says so itself

    def _on_cell_end(self, *_: object) -> None:
        self._is_running = False
        self._schedule_check()

    def _schedule_check(self) -> None:
        loop = getattr(self._kernel, "io_loop", None)
        if loop is not None and not self._is_waiting:
            self._is_waiting = True
            loop.call_later(FREE_S, self._check)

    def _check(self) -> None:
        self._is_waiting = False
        if self._is_running:
            return  # it is looked again when that cell is over
        if has_queued(self._kernel, running=0):
            self._schedule_check()
        else:
            self.release()


def has_queued(kernel: Any, *, running: int) -> bool:
    """Whether messages wait for the main thread of this ipykernel. ``running``: how many it is just working on."""
    try:
        pair = kernel.shell_channel_thread.manager.get_shell_channel_to_subshell_pair(None)
        tasks = asyncio.all_tasks(kernel.io_loop.asyncio_loop)
        stream, socket = pair.to_stream, pair.to_socket
    except AttributeError:  # another version, or another kernel
        return False
    if sum(_is_message(task) for task in tasks) > running:
        return True
    if socket.closed or not socket.events & _READABLE:  # closed: the kernel ends
        return False
    # To ask takes the event away from the stream, so it is told.
    kernel.io_loop.add_callback(lambda: stream.closed() or stream._handle_events(socket, 0))
    return True


def _is_message(task: asyncio.Task[Any]) -> bool:
    """Whether a task handles a message of the shell channel. Each has an outer task, and an inner one once it began."""
    return str(getattr(task.get_coro(), "__qualname__", "")).endswith("shell_main")
