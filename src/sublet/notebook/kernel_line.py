"""A kernel in a guest for the code that runs cells in it: sends requests, receives messages in order.

A cell is run by ``execute``: it returns when the kernel has answered *and* said that it is idle again, and gives every
message in between to the caller, which shows them. Questions for input come the same way and are answered with
``answer_input``.
"""

from __future__ import annotations

import contextlib
import json
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from sublet.errors import Disconnected, SubletError
from sublet.notebook.interrupts import Interrupts
from sublet.wire.conversation import Conversation
from sublet.wire.jupyter import CHANNELS, DELIMITER, Messages, pack_message
from sublet.wire.link_events import Closed, Data, Happening, Over

Message = dict[str, Any]
"""A message of the Jupyter protocol: ``header``, ``parent_header``, ``metadata``, ``content``, ``buffers``."""
LOOK_S: Final = 1.0
VOID_S: Final = 1.0
"""A question that crossed with an interrupt is put to the person if the cell is not over by then."""


class Call(Protocol):
    """One by which a cell was asked for."""

    def fileno(self) -> int:
        """Readable when it may have been answered; below zero: nothing more comes."""

    def has_failed(self) -> bool:
        """Whether it was answered before the cell began."""


class KernelLine:
    """Owns the connection. One thread uses it at a time."""

    def __init__(self, conversation: Conversation) -> None:
        from jupyter_client.session import Session

        self._conversation = conversation
        self._session: Any = Session(key=b"unused", username="sublet")
        self._session.key = b""  # from the start, it would warn of what the line makes needless
        link = conversation.link
        self._numbers = {name: link.open_channel(name.encode()) for name in CHANNELS}
        self._names = {number: name for name, number in self._numbers.items()}
        self._streams = {name: Messages() for name in CHANNELS}
        self._unsent: deque[tuple[int, memoryview]] = deque()
        conversation.flush()

    def __enter__(self) -> KernelLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(
        self,
        code: str,
        show: Callable[[str, Message], None],
        *,
        silent: bool = False,
        store_history: bool = True,
        allow_stdin: bool = True,
        user_expressions: Mapping[str, str] | None = None,
    ) -> Message:
        """Run code; the kernel's reply. ``show(channel, message)`` is told everything that belongs to it, in order.

        A ``KeyboardInterrupt`` (or anything else) that comes out of here leaves the code running; see ``interrupt``.
        """
        content = {
            "code": code,
            "silent": silent,
            "store_history": store_history and not silent,
            "user_expressions": dict(user_expressions or {}),
            "allow_stdin": allow_stdin,
            "stop_on_error": True,
        }
        request = self.send("shell", "execute_request", content)
        return self.finish(request, show)

    def finish(
        self,
        request: str,
        show: Callable[[str, Message], None],
        *,
        look: Callable[[], float] = lambda: LOOK_S,
        interrupts: Interrupts | None = None,
        call: Call | None = None,
    ) -> Message:
        """Wait for the end of what was asked for before: reply and idle. ``look`` is called now and then, and says
        when it would like to be again. Of ``interrupts`` each that comes is passed on; one that the kernel says came
        when the cell was over is put back. What ``show`` raises stops the code, and is raised when that is over.

        ``call``: by which it was asked for, where that was not done here. Then there is no reply (it is empty) but the
        answer of that, which may come after this returns."""
        failed: Exception | None = None
        reply: Message = {}
        is_idle = is_late = False
        passed_on: set[str] = set()
        question, then_s = list[Message](), 0.0
        while not is_idle or passed_on or (call is None and not reply):
            if call is not None and call.has_failed():
                break
            if not (reply or is_idle) and interrupts is not None and interrupts.take():
                passed_on.add(self.interrupt(request))
            if question and not passed_on and time.monotonic() >= then_s:
                failed = self._shown(show, "stdin", question.pop(), failed, passed_on, request)
            for channel, message in self.wait(
                min(look(), VOID_S) if question else look(), None if reply or is_idle else interrupts, call
            ):
                parent, kind = message["parent_header"].get("msg_id"), message["header"]["msg_type"]
                if channel == "control" and parent in passed_on:
                    passed_on.discard(parent)
                    then_s = time.monotonic() + VOID_S
                    is_late = is_late or bool(message["content"].get("late"))
                elif parent == request and channel == "shell":
                    reply = message
                elif parent == request and kind == "status":
                    is_idle = message["content"]["execution_state"] == "idle"
                elif channel == "stdin" and passed_on:  # most often the cell is over before an answer could come
                    question = [message]
                else:
                    failed = self._shown(show, channel, message, failed, passed_on, request)
        if failed is not None:
            raise failed
        if is_late and interrupts is not None:
            interrupts.put_back()
        return reply

    def _shown(
        self,
        show: Callable[[str, Message], None],
        channel: str,
        message: Message,
        failed: Exception | None,
        passed_on: set[str],
        request: str,
    ) -> Exception | None:
        """Shown, unless that failed before; what it raises."""
        if failed is not None:
            return failed
        try:
            show(channel, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next cell must not find this code running
            passed_on.add(self.interrupt(request))
            return error
        return None

    def interrupt(self, request: str = "") -> str:
        """Stop what was asked for, or whatever runs, as Ctrl-C does; the message's id. It is over when its ``finish``
        returns. The kernel answers whether it came too late for that."""
        return self.send("control", "interrupt_request", {"of": request})

    def answer_input(self, question: Message, text: str) -> None:
        """Give what was typed to the cell that asked."""
        self.send("stdin", "input_reply", {"value": text, "status": "ok"}, parent=question)

    def request(self, content: Mapping[str, Any]) -> Message:
        """To execute this, for a call."""
        message: Message = self._session.msg("execute_request", dict(content))
        return message

    def send(
        self, channel: str, kind: str, content: Mapping[str, Any], *, parent: Message | None = None, **extra: Any
    ) -> str:
        """Send a message; its id."""
        message = self._session.msg(kind, dict(content), parent=parent, metadata=extra.get("metadata"))
        parts = [*self._session.serialize(message), *extra.get("buffers", ())]
        self._unsent.append((self._numbers[channel], memoryview(pack_message(parts))))
        self._push()
        return str(message["header"]["msg_id"])

    def wait(
        self, timeout_s: float, interrupts: Interrupts | None = None, call: Call | None = None
    ) -> list[tuple[str, Message]]:
        """What came, as soon as something did, or an interrupt of these, or the answer of a call. Raises when the
        kernel is gone."""
        until_s = time.monotonic() + timeout_s
        found: list[tuple[str, Message]] = []
        while True:
            self._push()
            for happening in self._conversation.pump():
                found += self._decode(happening)
            left_s = until_s - time.monotonic()
            if found or left_s <= 0 or (call is not None and call.has_failed()):
                return found
            if interrupts is None:
                self._sleep(left_s, call)
                continue
            interrupts.cut_short(lambda: self._sleep(left_s, call))  # noqa: B023 - called at once
            if interrupts.are_waiting:
                return found

    @property
    def has_kept(self) -> bool:
        """Whether ``wait`` has something at once, whatever ``fileno`` looks like."""
        return self._conversation.has_kept

    def fileno(self) -> int:
        """For who waits for several things; then ``wait(0)``. Below zero: it is closed."""
        return self._conversation.fileno()

    def close(self) -> None:
        """Hang up. The kernel goes on."""
        with contextlib.suppress(OSError):
            self._conversation.close()

    def _sleep(self, timeout_s: float, call: Call | None = None) -> None:
        """Until there is something to do."""
        if self._conversation.link.over is not None or self.fileno() < 0:
            raise Disconnected("the connection to the kernel is over")
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self._conversation.wants_write else 0))
        if call is not None and (number := call.fileno()) >= 0:
            poll.register(number, select.POLLIN)
        poll.poll(1 + int(min(timeout_s, LOOK_S) * 1000))

    def _push(self) -> None:
        link = self._conversation.link
        while self._unsent:
            number, data = self._unsent[0]
            sent = link.send_data(number, data)
            if sent < len(data):
                self._unsent[0] = (number, data[sent:])
                break
            self._unsent.popleft()
        self._conversation.flush(0)

    def _decode(self, happening: Happening) -> list[tuple[str, Message]]:
        match happening:
            case Data(channel=number, data=data):
                name = self._names[number]
                found = [(name, read_message(parts)) for parts in self._streams[name].feed(data)]
                self._conversation.link.consumed(number, happening.cost)
                return found
            case Closed(reason=reason):
                raise Disconnected(f"the kernel closed a channel: {reason or 'no reason was given'}")
            case Over(error=error):
                raise error or Disconnected("the kernel's guest hung up")
            case _:
                return []


def read_message(parts: Sequence[bytes]) -> Message:
    """A message of the guest's kernel. Jupyter's own reader would parse the dates in it as well, which nothing here
    looks at, and takes eight times as long for that."""
    at = parts.index(DELIMITER) + 2
    header, parent, metadata, content = (json.loads(part.decode("utf8", "replace")) for part in parts[at : at + 4])
    buffers = [memoryview(part) for part in parts[at + 4 :]]
    return {
        "header": header,
        "msg_id": header["msg_id"],
        "msg_type": header["msg_type"],
        "parent_header": parent,
        "metadata": metadata,
        "content": content,
        "buffers": buffers,
    }


# -------------------------------------------------------------------------------------------------------------- between
#
# Forwards messages of the guest's kernel between cells, such as callbacks of a moved widget.
#
# While a cell runs the line belongs to it. Afterwards it is watched by the event loop of the notebook's own kernel, on
# the thread that runs cells, so there is never more than one who reads it. Where there is no such loop, in a terminal,
# there are no widgets either.


READABLE: Final = 1
"""As tornado's loops say it."""


class Between:
    """Watches the line of one guest's kernel while no cell uses it."""

    def __init__(self, shell: Any, show: Callable[[str, Message], None]) -> None:
        self._shell = shell
        self._show = show
        self._line: KernelLine | None = None
        self._watched = -1

    def watch(self, line: KernelLine) -> None:
        """A cell is done with it."""
        self.stop()
        loop = getattr(getattr(self._shell, "kernel", None), "io_loop", None)
        number = line.fileno()
        if loop is None or number < 0:
            return
        self._line, self._watched = line, number
        loop.add_handler(number, self._on_readable, READABLE)
        self.on_sent()

    def on_sent(self) -> None:
        """A message was sent to the kernel. What it answered at once was read with that, and causes no wake-up."""
        if self._line is not None and self._line.has_kept:
            self._shell.kernel.io_loop.add_callback(self._on_readable)

    def stop(self) -> None:
        """A cell begins, or the line is closed: before its number can come to mean another."""
        if self._line is not None:
            self._shell.kernel.io_loop.remove_handler(self._watched)
            self._line, self._watched = None, -1

    def _on_readable(self, *_: object) -> None:
        line = self._line
        if line is None:
            return
        try:
            found = line.wait(0)
        except SubletError:  # it is gone; the next cell finds out why
            self.stop()
            return
        for channel, message in found:
            if message["header"]["msg_type"] != "input_request":  # no cell runs that could answer it
                self._show(channel, message)
