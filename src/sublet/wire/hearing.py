"""What a link makes of the frames that come: one function for each kind, and what a peer may not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from sublet.errors import Disconnected, InvalidRequest, SubletError
from sublet.wire.channels import Channel
from sublet.wire.endpoint import (
    BUFFER_BODY,
    CALLS_MAX,
    CHANNELS_MAX,
    CREDIT_BODY,
    FINISHED,
    VERSION_BODY,
    VERSIONS_BODY,
    WHOLLY_CLOSED,
    Endpoint,
    error_in,
    no_version,
)
from sublet.wire.frames import Frame, FrameKind, broken, close_all
from sublet.wire.happenings import (
    BUFFER_COST,
    Buffer,
    Called,
    Closed,
    Credit,
    Data,
    Event,
    Happening,
    Hello,
    Opened,
    Over,
    Pong,
    Refused,
    Replied,
    Welcome,
)


class Hearing(Endpoint):
    """The half of a link that listens."""

    def receive(self, data: bytes, fds: Sequence[int] = ()) -> list[Happening]:
        """What came, in order. Takes whatever a socket gave, whole frames or not."""
        if self.over is not None:
            close_all(fds)
            return self.news()
        try:
            self._reader.add(data, fds)
            while (frame := self._next_frame()) is not None:
                self._take(frame)
        except InvalidRequest as error:
            return self.cut(error)
        return self.news()

    def cut(self, error: SubletError) -> list[Happening]:
        """The other side broke a rule. It is told which; whatever else was to be sent to it is dropped."""
        if self.over is None:
            self._out.clear(keep_begun=True)
            self._end(Over(error, by_peer=False), tell=error)
        return self.news()

    def receive_end(self) -> list[Happening]:
        """The other side hung up."""
        cut = not self._reader.is_between or bool(self._calls)
        error = Disconnected("the connection ended before everything was said") if cut else None
        self._end(Over(error, by_peer=True), tell=None)
        self._out.clear()
        return self.news()

    def _next_frame(self) -> Frame | None:
        return self._reader.next() if self.over is None else None

    def _take(self, frame: Frame) -> None:
        kind = frame.kind
        if frame.fds and kind not in _WITH_FDS:
            close_all(frame.fds)
            raise broken(f"a {kind.name} came with descriptors")
        if self.version is None and kind not in (FrameKind.HELLO, FrameKind.WELCOME, FrameKind.ERROR):
            raise broken(f"a {kind.name} came before the greeting was done")
        try:
            _TAKERS[kind](self, frame)
        except InvalidRequest:
            close_all(frame.fds)
            raise

    def _take_hello(self, frame: Frame) -> None:
        if self.connected or self._greeted is not None:
            raise broken("a HELLO came that was not due")
        if len(frame.body) < VERSIONS_BODY.size:
            raise broken("a HELLO came without versions")
        oldest, newest = VERSIONS_BODY.unpack_from(frame.body)
        hello = Hello(oldest, newest, frame.body[VERSIONS_BODY.size :])
        if not 1 <= oldest <= newest:
            raise broken(f"a HELLO named the versions {oldest} to {newest}")
        if min(newest, self._newest) < max(oldest, self._oldest):
            raise no_version(hello, self._oldest, self._newest)
        self._greeted = hello
        self._news.append(hello)

    def _take_welcome(self, frame: Frame) -> None:
        if not self.connected or self.version is not None:
            raise broken("a WELCOME came that was not due")
        if len(frame.body) < VERSION_BODY.size:
            raise broken("a WELCOME came without a version")
        (version,) = VERSION_BODY.unpack_from(frame.body)
        if not self._oldest <= version <= self._newest:
            raise broken(f"a WELCOME chose version {version}, and we speak {self._oldest} to {self._newest}")
        self._news.append(Welcome(version, frame.body[VERSION_BODY.size :]))
        self._agree(version)

    def _take_call(self, frame: Frame) -> None:
        self._check_fresh(frame)
        if len(self._called) >= CALLS_MAX:
            raise broken(f"more than {CALLS_MAX} calls were made without waiting for an answer")
        self._called[frame.channel] = None
        self._news.append(Called(frame.channel, frame.body, frame.fds))

    def _take_reply(self, frame: Frame) -> None:
        wanted = self._calls.pop(frame.channel, None)
        if wanted is None:
            raise broken(f"a REPLY came to {frame.channel}, which was not asked")
        if wanted:
            self._news.append(Replied(frame.channel, frame.body, frame.fds))
        else:
            close_all(frame.fds)

    def _take_error(self, frame: Frame) -> None:
        error = error_in(frame.body)
        if frame.channel == 0:
            self._end(Over(error, by_peer=True), tell=None)
            return
        wanted = self._calls.pop(frame.channel, None)
        if wanted is None:
            raise broken(f"an ERROR came to {frame.channel}, which was not asked")
        if wanted:
            self._news.append(Refused(frame.channel, error))

    def _take_event(self, frame: Frame) -> None:
        if frame.channel:
            channel = self._late_channel(frame)
            if channel is None or channel.is_deaf:
                close_all(frame.fds)
                return
        self._news.append(Event(frame.channel, frame.body, frame.fds))

    def _take_open(self, frame: Frame) -> None:
        self._check_fresh(frame)
        if len(self._channels) >= CHANNELS_MAX:
            raise broken(f"more than {CHANNELS_MAX} channels were opened")
        self._channels[frame.channel] = Channel()
        self._news.append(Opened(frame.channel, frame.body, frame.fds))

    def _take_data(self, frame: Frame) -> None:
        channel = self._channel(frame)
        if not frame.body:
            raise broken(f"an empty DATA came on channel {frame.channel}")
        channel.spend(len(frame.body), frame.channel)
        if not channel.is_deaf:
            self._news.append(Data(frame.channel, frame.body))

    def _take_buffer(self, frame: Frame) -> None:
        channel = self._channel(frame)
        if len(frame.fds) != 1 or len(frame.body) != BUFFER_BODY.size:
            raise broken("a BUFFER came that is not one descriptor, an offset and a length")
        channel.spend(BUFFER_COST, frame.channel)
        if channel.is_deaf:
            close_all(frame.fds)
        else:
            self._news.append(Buffer(frame.channel, frame.fds[0], *BUFFER_BODY.unpack(frame.body)))

    def _take_credit(self, frame: Frame) -> None:
        channel = self._late_channel(frame)
        if len(frame.body) != CREDIT_BODY.size:
            raise broken("a CREDIT came without an amount")
        if channel is None:
            return
        (amount,) = CREDIT_BODY.unpack(frame.body)
        channel.gain(amount, frame.channel)
        if channel.writes:
            self._news.append(Credit(frame.channel, amount))

    def _take_close(self, frame: Frame) -> None:
        channel = self._late_channel(frame)
        mark, words = frame.body[:1], frame.body[1:]
        if mark not in (FINISHED, WHOLLY_CLOSED):
            raise broken("a CLOSE came that does not say what it closes")
        if channel is None:
            return
        if channel.has_ended and mark == FINISHED:
            raise broken(f"channel {frame.channel} was closed twice")
        if not channel.is_deaf:
            self._news.append(Closed(frame.channel, words.decode("utf-8", "replace"), mark == WHOLLY_CLOSED))
        channel.has_ended = True
        if mark == WHOLLY_CLOSED:
            self.finish(frame.channel)  # harmless if we have; else it is our last word, and the number is free
        self._forget_if_done(frame.channel, channel)

    def _take_ping(self, frame: Frame) -> None:
        self._send(FrameKind.PONG, 0, frame.body, ())

    def _take_pong(self, frame: Frame) -> None:
        self._news.append(Pong(frame.body))

    def _channel(self, frame: Frame) -> Channel:
        channel = self._channels.get(frame.channel)
        if channel is None:
            raise broken(f"a {frame.kind.name} came for {frame.channel}, which is not an open channel")
        return channel

    def _late_channel(self, frame: Frame) -> Channel | None:
        """The channel; None if it is closed, which the sender may not have heard yet. One that never was is an
        error."""
        channel = self._channels.get(frame.channel)
        if channel is None and not self._was_used(frame.channel):
            raise broken(f"a {frame.kind.name} came for {frame.channel}, which never was a channel")
        return channel

    def _check_fresh(self, frame: Frame) -> None:
        number = frame.channel
        theirs = number > 0 and number % 2 != self.connected
        if not theirs or number in self._called or number in self._channels:
            raise broken(f"a {frame.kind.name} took the number {number}, which is not free")
        self._their_last = max(self._their_last, number)

    def _was_used(self, number: int) -> bool:
        if number % 2 == self.connected:
            return 0 < number < self._next_number or self._came_round
        return 0 < number <= self._their_last


_WITH_FDS: Final = frozenset((FrameKind.CALL, FrameKind.REPLY, FrameKind.EVENT, FrameKind.OPEN, FrameKind.BUFFER))

_TAKERS: Final[dict[FrameKind, Callable[[Hearing, Frame], None]]] = {
    FrameKind.HELLO: Hearing._take_hello,
    FrameKind.WELCOME: Hearing._take_welcome,
    FrameKind.CALL: Hearing._take_call,
    FrameKind.REPLY: Hearing._take_reply,
    FrameKind.ERROR: Hearing._take_error,
    FrameKind.EVENT: Hearing._take_event,
    FrameKind.OPEN: Hearing._take_open,
    FrameKind.DATA: Hearing._take_data,
    FrameKind.CREDIT: Hearing._take_credit,
    FrameKind.CLOSE: Hearing._take_close,
    FrameKind.BUFFER: Hearing._take_buffer,
    FrameKind.PING: Hearing._take_ping,
    FrameKind.PONG: Hearing._take_pong,
}
