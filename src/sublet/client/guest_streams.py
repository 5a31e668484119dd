"""The input and output of one guest for a program with an event loop of its own: nothing here waits."""

from __future__ import annotations

from collections import deque

from sublet.client.guests import Guest, Output, attach, piece_of
from sublet.client.line import connect_data
from sublet.errors import Disconnected, SubletError
from sublet.wire.channels import WINDOW
from sublet.wire.conversation import Conversation
from sublet.wire.guests import Attach
from sublet.wire.link_events import Closed, Data, Over

__all__ = ["GuestStreams", "open_streams"]


def open_streams(guest: Guest) -> GuestStreams:
    """Connect to them; this alone waits. The guest waits, once a buffer is full, for the reader here."""
    conversation = connect_data(guest._address, "")
    try:
        attached = attach(conversation, Attach(guest=guest.id, offset=0, lossless=True, follow=True, stdin=True))
        conversation.link.grant(attached.output, WINDOW)
    except BaseException:
        conversation.close()
        raise
    return GuestStreams(conversation, attached.stdin)


class GuestStreams:
    """One connection. For one thread.

    Watch ``fileno()`` for reading, and for writing while ``wants_write``; call ``pump`` whenever it is ready.
    """

    def __init__(self, conversation: Conversation, stdin: int) -> None:
        self.is_over = False
        """Nothing more comes: the guest is gone, or the connection is."""
        self.lost: SubletError | None = None
        """How the connection broke, if it did."""
        self._conversation, self._stdin = conversation, stdin
        self._rest: deque[memoryview] = deque()
        """Not sent yet: the guest has no room for it."""

    def fileno(self) -> int:
        """For the loop; it stays the same until ``close``."""
        return self._conversation.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room in the socket."""
        return self._conversation.wants_write

    def send(self, data: bytes) -> None:
        """Give it this to read, after what was sent before. What it has no room for yet goes with a later ``pump``."""
        if not self.is_over:
            self._rest.append(memoryview(data))
            self._feed()

    def pump(self) -> list[Output]:
        """Send and receive what can be now; what the guest wrote meanwhile."""
        pieces: list[Output] = []
        if self.is_over:
            return pieces
        link = self._conversation.link
        for happening in self._conversation.pump():
            if isinstance(happening, Closed):
                self.is_over = True
            elif isinstance(happening, Over):
                self.is_over, self.lost = True, happening.error or Disconnected("the supervisor hung up")
            elif (piece := piece_of(happening)) is not None:
                pieces.append(piece)
            if isinstance(happening, Data):
                link.consumed(happening.channel, happening.cost)
        if not self.is_over:
            self._feed()
        return pieces

    def close(self) -> None:
        """Let go of the connection. The guest goes on."""
        self.is_over = True
        self._rest.clear()
        self._conversation.close()

    def _feed(self) -> None:
        while True:
            sent = 0
            while self._rest and (count := self._conversation.link.send_data(self._stdin, self._rest[0])):
                sent += count
                self._rest[0] = self._rest[0][count:]
                if not self._rest[0]:
                    self._rest.popleft()
            if not self._conversation.send_now() or not sent or not self._rest:
                return  # the rest goes when the socket, or the guest, has room again
