"""Stdin, stdout and stderr of one guest, from its start to its last byte.

What the guest writes goes into its log and, from there or at once, to those who follow it. Reading stands still while
a lossless follower has no room: then the pipe fills, and the guest waits in its own write. Nothing else can make a
guest wait, and no guest can keep the loop from others for longer than one read of a pipe.

In the order of a life: ``pipes``, ``pty`` or ``null``; the fork, with ``child_setup(stdio.child)`` in the child;
``started``; then, once nothing of the guest's tree is left, ``drain_until``; when it ``is_done``, ``close``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Final

from sublet.node.loop import READ, WRITE, Loop, Timer, reading
from sublet.node.processes.log_readers import Follower, Following, NullFollower
from sublet.node.processes.logs import NOTICE, GuestLog
from sublet.node.processes.stdio_pipes import (
    ChildEnds,
    StdioPipes,
    child_setup,
    open_pipes,
    open_serving,
    open_terminal,
    read_some,
)
from sublet.wire.guests import STDERR, STDOUT

__all__ = ["OUTPUT_READ_BYTES", "STDIN_BYTES_MAX", "Stdio", "child_setup"]

OUTPUT_READ_BYTES: Final = 64 << 10
"""From each pipe in one turn of the loop; what a pipe holds, so that more would seldom find more."""
STDIN_BYTES_MAX: Final = 256 << 10
"""Waiting for the guest to read them."""
DRAIN_BYTES_MAX: Final = 4 << 20
"""From a pipe that something outside the guest's tree still holds open, and perhaps writes to, when time is up."""
PREPARE_S: Final = 0.2
"""After the start, when no caller waits: a guest that lives for longer has its log before it writes anything."""
SAY_PATIENCE_S: Final = 0.2
"""How long a line of ours waits for the guest to end one of its own."""
UNSAID_MAX: Final = 32

OnDone = Callable[[], None]


class Stdio:
    """The standard streams of one guest, in the loop."""

    def __init__(
        self, loop: Loop, log: GuestLog, ends: StdioPipes | None = None, on_done: OnDone | None = None
    ) -> None:
        """Without ends it is what is left of a guest that is gone: a log to be followed."""
        self.log = log
        self.on_stdin_room: Callable[[], None] | None = None
        """Called when there is room for input again after there was not enough."""
        self._loop = loop
        self._ends = ends
        self._on_done = on_done
        self._outputs = ends.outputs if ends else {}
        self._watched: tuple[int, ...] = ()
        self._started = False
        self._unheld = False
        self._draining: Timer | None = None
        self._closed = ends is None
        self._followings: list[Following] = []
        self._is_stop_noted = False
        self._input = bytearray()
        self._input_ends = ends is None or ends.stdin < 0
        self._input_midline = False
        self._input_refused = False
        """Whether the sender of input waits for room."""
        self._writing = False
        self._voice = STDOUT if ends and ends.is_terminal else STDERR
        """The stream among whose lines ours appear."""
        self._awaited: Following | None = None
        self._line_end = "\r\n" if ends and ends.is_terminal else "\n"
        self._midline = False
        self._unsaid: list[str] = []
        self._patience: Timer | None = None

    @classmethod
    def pipes(cls, loop: Loop, log: GuestLog, on_done: OnDone | None = None) -> Stdio:
        """Three pipes."""
        return cls(loop, log, open_pipes(stdin=True), on_done)

    @classmethod
    def pty(cls, loop: Loop, log: GuestLog, on_done: OnDone | None = None, *, rows: int = 24, cols: int = 80) -> Stdio:
        """A terminal; both outputs are one then."""
        return cls(loop, log, open_terminal(rows, cols), on_done)

    @classmethod
    def serving(cls, loop: Loop, log: GuestLog, on_done: OnDone | None = None) -> Stdio:
        """Two pipes, and an inbox for the connections of holders."""
        return cls(loop, log, open_serving(), on_done)

    @classmethod
    def null(cls, loop: Loop, log: GuestLog, on_done: OnDone | None = None) -> Stdio:
        """Nothing to read; what the guest writes is kept all the same."""
        return cls(loop, log, open_pipes(stdin=False), on_done)

    @property
    def child(self) -> ChildEnds:
        """For ``child_setup``, or to be sent to the process that forks."""
        assert self._ends is not None, "a guest that is gone has no descriptors"
        return self._ends.child

    @property
    def inbox(self) -> int:
        """Where connections are sent to the guest; -1 if it takes none. It stays open as long as the rest."""
        return -1 if self._ends is None or self._closed else self._ends.inbox

    @property
    def is_done(self) -> bool:
        """Whether everything the guest wrote was read. Of a terminal only ``drain_until`` can find that out."""
        return not self._outputs

    def give_to(self, uid: int, gid: int) -> None:
        """Before the fork: the guest will be this user."""
        if self._ends is not None:
            self._ends.give_to(uid, gid)

    def started(self) -> None:
        """The child has its half: let go of it here, and begin to read."""
        assert self._ends is not None
        self._started = True
        self._loop.after(PREPARE_S, lambda: None if self._closed else self.log.prepare())
        if not self._ends.is_terminal:
            self._ends.close_these(*self._ends.child.distinct)
        self._throttle()

    # ---- what the guest says ----

    def attach(self, follower: Follower, offset: int = 0, *, lossless: bool = False, follow: bool = True) -> Following:
        """Give it the log from this offset on (-1: from now on), then what comes, without a gap or anything twice.

        It is not called before this returns. Without ``follow`` it gets what there is now, and then the end.
        """
        position = self.log.offset if offset < 0 else min(offset, self.log.offset)
        following = Following(self.log, follower, position=position, lossless=lossless, follow=follow)
        self._followings.append(following)
        self._serve_soon(following)
        if lossless:
            self.stop_awaiting_reader()
        self._throttle()
        return following

    def await_reader(self) -> None:
        """Read nothing more from the guest until a lossless follower attaches."""
        if self._awaited is None:
            self._awaited = self.attach(NullFollower(), -1, lossless=True)

    def stop_awaiting_reader(self) -> None:
        """Wait for a reader no longer: one has attached, or none will. Harmless twice."""
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            self.detach(awaited)

    def detach(self, following: Following) -> None:
        """No more for this one; harmless twice."""
        following.close()
        if following in self._followings:
            self._followings.remove(following)
            self._throttle()

    def resume(self, following: Following) -> None:
        """It has room again."""
        if following.active:
            self._serve(following)

    def write_notice(self, line: str) -> None:
        """A line of Sublet's own on stderr: between two lines of the guest if it ends one soon, else on a new one."""
        self._unsaid += [f"sublet: {part}{self._line_end}" for part in line.splitlines()]
        if not self._midline or not self._outputs or len(self._unsaid) >= UNSAID_MAX:
            self._flush_notices()
        elif self._patience is None:
            self._patience = self._loop.after(SAY_PATIENCE_S, self._flush_notices)

    # ---- what the guest reads ----

    def room(self) -> int:
        """How much ``feed`` would accept."""
        return STDIN_BYTES_MAX if self._input_ends else max(0, STDIN_BYTES_MAX - len(self._input))

    def feed(self, data: bytes) -> int:
        """How much of it was accepted. What a guest that no longer reads is sent is accepted and lost, as in a pipe."""
        accepted = 0
        while not self._input_ends and accepted < len(data) and (room := self.room()):
            piece = data[accepted : accepted + room]
            accepted += len(piece)
            self._input += piece
            self._input_midline = not piece.endswith(b"\n")
            self._write_input()
        if self._input_ends:
            return len(data)
        self._input_refused = accepted < len(data)
        return accepted

    def close_stdin(self) -> None:
        """After what was fed the guest finds the end of its input; a program at a terminal, as if ^D were typed."""
        if self._input_ends or self._ends is None:
            return
        if self._ends.is_terminal:
            # In the middle of a line the first only hands the line over.
            self._input += self._ends.end_of_file() * (2 if self._input_midline else 1)
            self._input_midline = False
        else:
            self._input_ends = True
        self._write_input()

    def resize(self, rows: int, cols: int) -> None:
        """The window has this size now; nothing for a guest without a terminal."""
        if self._ends is not None:
            self._ends.resize(rows, cols)

    # ---- the end ----

    def stop_blocking(self) -> None:
        """From now on no follower makes the guest wait: its grace has begun, and it must not spend it in a write.

        A lossless follower without room finds what it could not take in the log.
        """
        self._unheld = True
        self._throttle()

    def drain_until(self, deadline_ns: int) -> None:
        """Nothing of the guest's tree is left: read what it left behind.

        At the end of it, or at the deadline if something outside the tree keeps a pipe open, this ``is_done``. No
        process of the guest waits any more, so a lossless follower without room finds the rest in the log.
        """
        if self.is_done or self._draining is not None or self._ends is None:
            return
        self._draining = self._loop.at(deadline_ns, self._drain_now)
        self._ends.close_these(*self._ends.child.distinct)
        self._started = True
        self._throttle()

    def close(self) -> None:
        """Let go of every descriptor. Followers still get the rest of the log, and then the end."""
        if self._closed:
            return
        self._flush_notices()
        self._closed = True
        if self._draining is not None:
            self._draining.cancel()
        for fd in tuple(self._outputs):
            self._drop(fd)
        self._drop_stdin()
        if self._ends is not None:
            self._ends.close_these(*self._ends.open)
        self.log.close()
        for following in tuple(self._followings):
            self._serve_soon(following)

    def abandon(self) -> None:
        """Something here failed: let go of everything, read nothing more, and tell the followers that this was all."""
        self._closed = True
        for fd in (*self._watched, *((self._ends.stdin,) if self._ends is not None and self._writing else ())):
            self._loop.forget(fd)
        self._watched, self._outputs, self._writing, self._input_ends = (), {}, False, True
        if self._ends is not None:
            self._ends.close_these(*self._ends.open)
        followings, self._followings = self._followings, []
        for following in followings:
            following.close()
            following.follower.end()
        self.log.close()

    # ---- outputs, inside ----

    def _allowed(self) -> int:
        """How much may be read now: no more than every lossless follower can take, and none while one is behind."""
        if self._unheld or (self._draining is not None and not self.log.stopped):
            return OUTPUT_READ_BYTES
        allowed = OUTPUT_READ_BYTES
        for one in self._followings:
            if one.lossless and one.until is None:
                allowed = min(allowed, 0 if one.is_behind else one.follower.room())
        return allowed

    def _throttle(self) -> None:
        """Watch the outputs exactly while they may be read. A pipe with a hang-up would not let the loop sleep."""
        if not self._started:
            return
        wanted = tuple(self._outputs) if self._allowed() > 0 else ()
        for fd in self._watched:
            if fd not in wanted:
                self._loop.forget(fd)
        for fd in wanted:
            if fd not in self._watched:
                self._loop.watch(fd, READ, partial(self._on_readable, fd))
        self._watched = wanted

    def _on_readable(self, fd: int, events: int) -> None:
        allowed = self._allowed()
        if allowed > 0:
            data = reading(lambda: read_some(fd, allowed))
            if data:
                self._on_output(self._outputs[fd], data)
            elif data is not None:
                self._ended(fd)
        self._throttle()

    def _on_output(self, stream: int, data: bytes) -> None:
        if stream != self._voice:
            self._give(stream, data)
            return
        cut = data.rfind(b"\n") + 1 if self._unsaid else 0
        if cut:
            self._give(stream, data[:cut])
            self._midline = False
            self._flush_notices()
            data = data[cut:]
        if data:
            self._give(stream, data)
            self._midline = not data.endswith(b"\n")

    def _give(self, stream: int, data: bytes) -> None:
        """To the log first: a follower that cannot take it now reads it there."""
        offset = self.log.append(stream, data)
        for following in tuple(self._followings):
            following.offer(stream, offset, data)
            if following.is_behind and following.follower.room() > 0:
                self._serve_soon(following)
        if self.log.stopped and not self._is_stop_noted:
            self._is_stop_noted = True
            self.write_notice(
                f"the log of this guest ends here ({self.log.stopped}); it runs on, and is still shown live"
            )

    def _flush_notices(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if not self._unsaid:
            return
        text = (self._line_end if self._midline else "") + "".join(self._unsaid)
        self._unsaid.clear()
        self._midline = False
        self._give(NOTICE, text.encode("utf-8", "replace"))
        if self._closed:
            self.log.close()
        self._throttle()

    def _serve_soon(self, following: Following) -> None:
        if not following.due:
            following.due = True
            self._loop.soon(lambda: self._serve(following))

    def _serve(self, following: Following) -> None:
        following.due = False
        if not following.active:
            return
        if following.catch_up():
            self._serve_soon(following)
        elif not following.is_behind and (self._closed or following.until is not None):
            self.detach(following)
            following.follower.end()
        self._throttle()

    def _ended(self, fd: int) -> None:
        self._drop(fd)
        if self._outputs:
            return
        self._flush_notices()
        if self._draining is not None:
            self._draining.cancel()
        if self._on_done is not None and not self._closed:
            self._on_done()

    def _drain_now(self) -> None:
        """Time is up: what is there now, and no more."""
        for fd, stream in tuple(self._outputs.items()):
            left = DRAIN_BYTES_MAX
            while fd in self._outputs and left > 0 and (data := read_some(fd, OUTPUT_READ_BYTES)):
                left -= len(data)
                self._on_output(stream, data)
            if fd in self._outputs:
                self._ended(fd)

    def _drop(self, fd: int) -> None:
        self._outputs.pop(fd, None)
        if fd in self._watched:
            self._watched = tuple(one for one in self._watched if one != fd)
            self._loop.forget(fd)
        if self._ends is not None:
            self._ends.close_these(fd)

    # ---- stdin, inside ----

    def _write_input(self) -> None:
        assert self._ends is not None
        while self._input:
            try:
                written = os.write(self._ends.stdin, memoryview(self._input)[:OUTPUT_READ_BYTES].tobytes())
            except BlockingIOError:
                break
            except OSError:  # EPIPE, or EIO of a terminal: no process reads any more
                self._input.clear()
                self._drop_stdin()
                break
            del self._input[:written]
        self._wait_to_write(bool(self._input))
        if self._input_ends and not self._input:
            self._drop_stdin()
        if self._input_refused and self.room() > 0:
            self._input_refused = False
            if self.on_stdin_room is not None:
                self.on_stdin_room()

    def _wait_to_write(self, wanted: bool) -> None:
        if wanted and not self._writing:
            assert self._ends is not None
            self._loop.watch(self._ends.stdin, WRITE, lambda _events: self._write_input())
        elif not wanted and self._writing:
            assert self._ends is not None
            self._loop.forget(self._ends.stdin)
        self._writing = wanted

    def _drop_stdin(self) -> None:
        self._input_ends = True
        if self._ends is not None:
            self._wait_to_write(False)
            self._input.clear()
            self._ends.close_these(self._ends.stdin)
