"""Bridges a holder's connection to the kernel's sockets, in both directions.

The kernel runs in this very process and its sockets are ZeroMQ's *inproc* ones: they lie in no folder, have no address
on any network, and no other process can reach them. Only this thread touches their other ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from sublet.values import MIB
from sublet.wire.channels import WINDOW
from sublet.wire.conversation import Conversation
from sublet.wire.happenings import Closed, Credit, Data, Happening, Opened, Over
from sublet.wire.jupyter import CHANNELS, Messages, pack_message

WAITING_MAX: Final = 16 * MIB
"""Bytes of one channel that wait for the holder; while there are more, the kernel's socket is not read."""
IDENTITY: Final = b"sublet"
"""The kernel sends a question for input to the same name that the request to execute came from."""
WAIT_MS: Final = 1000


class Bridge:
    """One line to one kernel."""

    def __init__(self, conversation: Conversation, context: Any, addresses: Mapping[str, str]) -> None:
        """``context`` is the ZeroMQ context of the kernel, ``addresses`` say where each channel is bound."""
        import zmq

        self._zmq = zmq
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
                    self._hear(happening)
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
            socket.identity = IDENTITY
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

    def _hear(self, happening: Happening) -> None:
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
