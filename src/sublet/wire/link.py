"""One end of a connection, without the connection: what may be said, by whom, and how much of it.

Bytes and descriptors go in (``receive``), typed happenings come out; calls, events and streams go in, bytes and
descriptors come out (``take_output``, or ``next_output`` and ``sent``). A link reads no clock and no socket, so the
same input always gives the same output.

The greeting. Who connected sends HELLO and then nothing more until WELCOME came. Between the two the descriptor may
therefore change hands: one process reads the HELLO and checks who it is, hands over the descriptor and the ``Hello``,
and another goes on with ``Link.adopted(hello)`` and welcomes. What is asked of a link before WELCOME came is kept and
sent then.

Numbers. Calls and channels share one number space; who connected takes odd numbers, who accepted even ones. A number
is free again when the call is answered, or when both sides have closed the channel.

Streams. A channel carries bytes both ways. Nobody may send before the other side granted credit, and no more than
that; a receiver that does not consume does not grant, so what is under way is bounded by what it granted. ``finish``
says that nothing more will be sent; ``close`` says as well that nothing more will be read.

A peer that breaks a rule is told which one (an ERROR on channel 0) and the link is over. Nothing is raised for what a
peer does; the last happening of a link is ``Over``, and what is asked of a link after it has no effect.

Who accepted stops reading while its own output piles up (``wants_input``); who connected never does. So two full
queues never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from sublet.errors import CapacityExceeded, SubletError
from sublet.wire.channels import WINDOW, Channel
from sublet.wire.endpoint import (
    BUFFER_BODY,
    CALLS_MAX,
    CHANNELS_MAX,
    CREDIT_BODY,
    DATA_OUT_MAX,
    LINK_OUT_MAX,
    REASON_MAX,
    VERSION_BODY,
    VERSIONS_BODY,
    WHOLLY_CLOSED,
    error_body,
    no_version,
)
from sublet.wire.frames import DATA_MAX, FrameKind, close_all, encode
from sublet.wire.happenings import BUFFER_COST, Hello, Over
from sublet.wire.hearing import Hearing
from sublet.wire.version import WIRE_OLDEST, WIRE_VERSION

__all__ = ["CALLS_MAX", "CHANNELS_MAX", "DATA_OUT_MAX", "LINK_OUT_MAX", "Link"]


class Link(Hearing):
    """One end of a connection."""

    @classmethod
    def connecting(cls, hello: bytes = b"", *, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> Link:
        """For who connected: the greeting is in the output at once."""
        link = cls(connected=True, oldest=oldest, newest=newest)
        link._out.add(encode(FrameKind.HELLO, 0, VERSIONS_BODY.pack(oldest, newest) + hello, version=newest), ())
        return link

    @classmethod
    def accepting(cls, *, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> Link:
        """For who accepted: wait for ``Hello``, then ``welcome`` or ``end``."""
        return cls(connected=False, oldest=oldest, newest=newest)

    @classmethod
    def adopted(cls, hello: Hello, *, oldest: int = WIRE_OLDEST, newest: int = WIRE_VERSION) -> Link:
        """For who was handed a connection whose greeting somebody else has read. It is still to be welcomed."""
        link = cls(connected=False, oldest=oldest, newest=newest)
        link._greeted = hello
        return link

    # ------------------------------------------------------------------------------------------------ the greeting

    def welcome(self, body: bytes = b"") -> None:
        """Take who sent ``Hello``, in the newest version that both speak; if there is none, it is told and it is
        over."""
        if self.over is not None:
            return
        hello = self._greeted
        if hello is None or self.version is not None:
            raise RuntimeError("there is nobody to welcome")
        version = min(self._newest, hello.newest)
        if version < max(self._oldest, hello.oldest):
            self.end(no_version(hello, self._oldest, self._newest))
            return
        self._out.add(encode(FrameKind.WELCOME, 0, VERSION_BODY.pack(version) + body, version=version), ())
        self._agree(version)

    def end(self, error: SubletError | None = None) -> None:
        """It is over for us; the other side is told the error, if there is one. What was begun is still sent."""
        self._end(Over(error, by_peer=False), tell=error)

    # ------------------------------------------------------------------------------------------- calls and events

    def call(self, body: bytes, fds: Sequence[int] = ()) -> int:
        """Ask; the answer comes as ``Replied`` or ``Refused`` with this number. Descriptors given are ours to close."""
        if len(self._calls) >= CALLS_MAX:
            raise CapacityExceeded(f"{CALLS_MAX} calls on this connection are unanswered", do="Wait for an answer.")
        call = self._number()
        self._calls[call] = (
            True  # first: a Ctrl-C behind the sending must not make its answer one that nobody asked for
        )
        self._send(FrameKind.CALL, call, body, fds)
        if self.over is not None:
            self._calls.pop(call, None)
        return call

    def abandon(self, call: int) -> None:
        """The answer is not wanted any more; when it comes it is dropped."""
        if call in self._calls:
            self._calls[call] = False

    def reply(self, call: int, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Answer a call."""
        if self._answers(call, fds):
            self._send(FrameKind.REPLY, call, body, fds)
            self._called.pop(call, None)

    def refuse(self, call: int, error: SubletError) -> None:
        """Answer a call with an error."""
        if self._answers(call, ()):
            self._send(FrameKind.ERROR, call, error_body(error), ())
            self._called.pop(call, None)

    def event(self, body: bytes, fds: Sequence[int] = (), *, channel: int = 0) -> None:
        """Say something that nobody answers. On a channel that is closed it is not sent."""
        if channel and channel not in self._channels:
            close_all(fds)
            return
        self._send(FrameKind.EVENT, channel, body, fds)

    def ping(self, body: bytes = b"") -> None:
        """Ask whether the other side is there; ``Pong`` is the answer."""
        self._send(FrameKind.PING, 0, body, ())

    # ------------------------------------------------------------------------------------------------------ streams

    def open_channel(self, body: bytes = b"", fds: Sequence[int] = (), *, window: int = WINDOW) -> int:
        """A new channel. The other side may send ``window`` bytes at once; we may send when it granted some."""
        if len(self._channels) >= CHANNELS_MAX:
            raise CapacityExceeded(f"{CHANNELS_MAX} channels are open on this connection", do="Close one first.")
        number = self._number()
        self._send(FrameKind.OPEN, number, body, fds)
        if self.over is None:
            self._channels[number] = Channel()
            if window:
                self.grant(number, window)
        return number

    def grant(self, channel: int, amount: int) -> None:
        """Let the other side send so many more bytes."""
        found = self._channels.get(channel)
        if found is not None and found.reads:
            found.grant(amount)
            self._send(FrameKind.CREDIT, channel, CREDIT_BODY.pack(amount), ())

    def consumed(self, channel: int, cost: int) -> None:
        """So much was done with: the same amount is granted again, in steps, so that not every piece costs a frame."""
        found = self._channels.get(channel)
        if found is not None and found.reads and (again := found.consumed(cost)):
            self.grant(channel, again)

    def may_send(self, channel: int) -> int:
        """How many bytes a stream may send now: what is granted, and what the queue has room for."""
        found = self._channels.get(channel)
        if found is None or not found.writes or self.over is not None:
            return 0
        return max(0, min(found.credit, DATA_OUT_MAX - self._waiting))

    def send_data(self, channel: int, data: bytes | memoryview) -> int:
        """Send as much as may be sent now; how many bytes that was. Go on when ``Credit`` comes or output went out."""
        count = min(self.may_send(channel), len(data))
        with memoryview(data) as view:
            for start in range(0, count, DATA_MAX):
                self._send(FrameKind.DATA, channel, view[start : min(start + DATA_MAX, count)], ())
        if count:
            self._channels[channel].credit -= count
        return count

    def send_buffer(self, channel: int, fd: int, offset: int, length: int) -> bool:
        """Send a piece that lies in shared memory; False, with ``fd`` still the caller's, while credit is short."""
        if self.may_send(channel) < BUFFER_COST:
            return False
        self._channels[channel].credit -= BUFFER_COST
        self._send(FrameKind.BUFFER, channel, BUFFER_BODY.pack(offset, length), (fd,))
        return True

    def close(self, channel: int, reason: str = "") -> None:
        """Nothing more will be sent or read on this channel. What is under way is dropped. Harmless twice."""
        found = self._channels.get(channel)
        if found is None or found.is_deaf:
            return
        found.is_deaf, found.writes = True, False
        words = reason[:REASON_MAX].encode("utf-8", "replace")
        self._send(FrameKind.CLOSE, channel, WHOLLY_CLOSED + words, ())
        self._forget_if_done(channel, found)

    def _answers(self, call: int, fds: Sequence[int]) -> bool:
        if self.over is not None:
            close_all(fds)
            return False
        if call not in self._called:
            raise RuntimeError(f"call {call} is not waiting for an answer")
        return True
