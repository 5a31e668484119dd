"""The state of one stream of a link, and its send queue."""

from __future__ import annotations

from typing import Final

from sublet.values import MIB
from sublet.wire.frames import close_all, protocol_error

WINDOW: Final = 1 * MIB
"""Bytes that a new channel may have under way."""
CREDIT_MAX: Final = 16 * MIB
"""The most that may be granted and not yet used, in each direction of a channel."""
PIECES_MAX: Final = 64
"""Frames handed to the kernel in one call; far below its own limit of 1024."""
BATCH_MAX: Final = 512 * 1024
"""Bytes in one call: more than a socket's buffer holds brings nothing."""


class Channel:
    """Both directions of one stream, seen from one end."""

    __slots__ = ("_owed", "_window", "allowed", "credit", "has_ended", "is_deaf", "writes")

    def __init__(self) -> None:
        self.credit = 0
        """What we may still send."""
        self.allowed = 0
        """What the other side may still send."""
        self.writes = True
        """Whether we may still send at all."""
        self.is_deaf = False
        """We do not read any more: what comes is dropped."""
        self.has_ended = False
        """The other side sends no more."""
        self._window = 0
        self._owed = 0

    @property
    def reads(self) -> bool:
        """Whether granting makes sense."""
        return not (self.is_deaf or self.has_ended)

    @property
    def is_done(self) -> bool:
        """Both sides have closed."""
        return self.has_ended and not self.writes

    def grant(self, amount: int) -> None:
        """The other side may send so much more."""
        if not 0 < amount <= CREDIT_MAX - self.allowed:
            raise ValueError(f"{amount} cannot be granted: {self.allowed} is granted, and the most is {CREDIT_MAX}")
        self.allowed += amount
        self._window = max(self._window, self.allowed)

    def consumed(self, cost: int) -> int:
        """How much to grant again now: nothing, until half a window is owed."""
        self._owed += cost
        if self._owed < self._window // 2:
            return 0
        again, self._owed = min(self._owed, CREDIT_MAX - self.allowed), 0
        return again

    def spend(self, cost: int, number: int) -> None:
        """The other side sent something that costs so much."""
        if self.has_ended:
            raise protocol_error(f"more came on channel {number} after its end")
        if cost > self.allowed:
            raise protocol_error(f"{cost} bytes came on channel {number}, where {self.allowed} were granted")
        self.allowed -= cost

    def gain(self, amount: int, number: int) -> None:
        """The other side granted so much."""
        if not 0 < amount <= CREDIT_MAX - self.credit:
            raise protocol_error(
                f"a CREDIT of {amount} on channel {number} is nothing, or over the limit of {CREDIT_MAX}"
            )
        self.credit += amount


class OutgoingFrames:
    """Frames in the order they are sent. Descriptors in it belong to it until they are sent or taken."""

    def __init__(self) -> None:
        self.waiting = 0
        """Bytes still to be sent."""
        self._frames: list[tuple[bytes, tuple[int, ...]]] = []  # mostly empty, where a deque takes 0.7 KB
        self._sent_of_first = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, data: bytes, fds: tuple[int, ...]) -> None:
        """Behind everything else."""
        self._frames.append((data, fds))
        self.waiting += len(data)

    def holds(self, fds: tuple[int, ...]) -> bool:
        """Whether these descriptors belong to it."""
        return any(with_it == fds for _, with_it in self._frames)

    def take(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Everything, and the taker answers for it."""
        frames = list(self._frames)
        if frames and self._sent_of_first:
            frames[0] = (frames[0][0][self._sent_of_first :], ())
        self._frames.clear()
        self.waiting = self._sent_of_first = 0
        return frames

    def batch(self) -> tuple[list[memoryview], tuple[int, ...]]:
        """Pieces for one call to the kernel. A frame with descriptors begins a batch: they go with its first byte."""
        pieces: list[memoryview] = []
        fds: tuple[int, ...] = ()
        size = 0
        for data, with_it in self._frames:
            if not pieces:
                pieces.append(memoryview(data)[self._sent_of_first :])
                fds = () if self._sent_of_first else with_it
            elif with_it or size >= BATCH_MAX or len(pieces) >= PIECES_MAX:
                break
            else:
                pieces.append(memoryview(data))
            size += pieces[-1].nbytes
        return pieces, fds

    def sent(self, count: int) -> None:
        """So many bytes are out."""
        if not 0 <= count <= self.waiting:
            raise ValueError(f"{count} bytes cannot have been sent: {self.waiting} were waiting")
        self.waiting -= count
        done = 0
        while count:
            data, fds = self._frames[done]
            if not self._sent_of_first:
                close_all(fds)
            left = len(data) - self._sent_of_first
            if count < left:
                self._sent_of_first += count
                break
            count -= left
            done += 1
            self._sent_of_first = 0
        del self._frames[:done]

    def clear(self, *, keep_begun: bool = False) -> None:
        """Drop everything; with ``keep_begun`` not a frame whose first part is out, since what follows would be read
        as the rest of it."""
        begun = self._frames[0] if keep_begun and self._sent_of_first else None
        at = self._sent_of_first
        for index, (_, fds) in enumerate(self._frames):
            if index or not at:
                close_all(fds)
        self._frames.clear()
        self.waiting = self._sent_of_first = 0
        if begun is not None:
            self._frames.append(begun)
            self._sent_of_first = at
            self.waiting = len(begun[0]) - at
