"""Attends a guest: forwards input and signals to it, prints its output, and ends it when asked to.

One loop, nothing in it waits for one thing: a reader of our output that stands still must not keep Ctrl-C from the
guest. Back-pressure goes through: what our reader does not take is not asked for, and then the guest waits in its own
write, as it would in a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from sublet.cli.messages import OUTPUT_HEAD_BYTES, STREAM_STDOUT, message, output_head, read
from sublet.cli.terminal import Terminal, size_of
from sublet.errors import SubletError
from sublet.wire.channels import WINDOW
from sublet.wire.conversation import Conversation
from sublet.wire.link_events import Closed, Data, Event, Happening, Over

if TYPE_CHECKING:
    from sublet.cli.terminal_filter import TerminalFilter

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_TYPED_MAX: Final = 64 * 1024
TWICE_S: Final = 2.0
"""A second Ctrl-C within this time ends the guest; the first is the guest's own affair."""
LEFT_BEHIND_S: Final = 0.02
"""The last process of a guest is nearly always gone with its first. If not, so long after it we go on without them."""
LASTING_S: Final = 0.4
"""What runs for longer needs its lease renewed, some time; the shortest time to live is 2 s."""
LOOK_AGAIN_S: Final = 0.5
LAST_WORDS: Final = 2000
"""Bytes of its output that are kept, to see why it failed."""
_CTRL_C: Final = 0x03
_LOCAL_TENANT: Final = "local"
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Attendance:
    """From the attaching to the last byte."""

    def __init__(self, conversation: Conversation, guest: str, *, stdin: bool = True, terminal: bool = False) -> None:
        self.exit_code: int | None = None
        """Of the guest's main process, once it is known."""
        self.reason: str | None = None
        """Why it was ended, if it did not end by itself."""
        self.grace_reason: str | None = None
        """The end that was announced with a SIGTERM and not called off."""
        self.lost: SubletError | None = None
        """Why the connection broke before the guest was gone."""
        self.is_over = False
        self.is_onlooker = False
        """It only looks: a signal ends the looking, not the guest."""
        self.last_words = b""
        """The end of what it wrote, on both streams."""
        self.wants_end = False
        """Whether a person, or the program that started us, asked for its end."""
        self._conversation = conversation
        self._link = conversation.link
        self._guest = guest
        self._terminal = terminal
        self._out = Outlet(_STDOUT, on_broken=self._output_closed)
        self._err = Outlet(_STDERR)
        self._channel = 0
        self._takes_input = stdin
        self._filters: tuple[()] | tuple[TerminalFilter, TerminalFilter] = ()
        """For stderr and stdout, where another user looks at what a tenant wrote."""
        self._typed = b""
        self._input_over = not stdin
        self._signals: list[int] = []
        self._interrupted_s = -TWICE_S
        self._endings = 0
        self._exited_s: float | None = None
        self._drop_at_s: float | None = None
        self._lasts_at_s: float | None = time.monotonic() + LASTING_S

    def attach(self, *, offset: int = 0, follow: bool = True, lossless: bool = True) -> None:
        """Begin with its output from this offset on."""
        request = message(
            "Attach", guest=self._guest, offset=offset, follow=follow, stdin=self._takes_input, lossless=lossless
        )
        attached = read(self._conversation.call(request).body)
        self._channel = int(attached["output"])
        self._link.grant(self._channel, WINDOW)
        if self.is_onlooker and attached["view"]["tenant"] != _LOCAL_TENANT:
            from sublet.cli.terminal_filter import TerminalFilter  # with regular expressions, which commands do without

            self._filters = (TerminalFilter(), TerminalFilter())
        self._saw(attached["view"])

    def run(
        self, *, on_lasting: Callable[[], None] = lambda: None, on_exited: Callable[[], None] = lambda: None
    ) -> None:
        """Until the guest is gone and everything it said is written, or the connection is lost.

        ``on_lasting`` is called once, when its main process has run for longer than a moment; ``on_exited`` once, when
        that has ended and what it left behind takes its time.
        """
        self._on_lasting, self._on_exited = on_lasting, on_exited
        with contextlib.ExitStack() as stack:
            self._signals, wake = stack.enter_context(caught(*_FORWARDED, signal.SIGWINCH))
            if self._terminal:
                stack.enter_context(Terminal(_STDIN))
            while not self._is_done():
                for happening in self._conversation.pump():
                    self._on_event(happening)
                while self._signals:
                    self._signalled(self._signals.pop(0))
                self._pass_input()
                self._check_deadlines()
                if not self._is_done():
                    self._wait(wake)

    def _is_done(self) -> bool:
        return self.is_over and not (self._out.waits or self._err.waits)

    @property
    def unwritten(self) -> str:
        """Why some of its output is lost here, if so."""
        return self._out.why or self._err.why

    # ---- what comes from the guest ----

    def _on_event(self, happening: Happening) -> None:
        match happening:
            case Data(channel=channel, data=data):
                self._on_output(channel, data)
            case Event(body=body):
                self._news(read(body))
            case Closed():
                self.is_over = True
            case Over(error=error):
                if not self.is_over:
                    self.lost = error or SubletError("the supervisor hung up")
                self.is_over = True
            case _:
                pass

    def _on_output(self, channel: int, piece: bytes) -> None:
        stream, _ = output_head(piece)
        outlet = self._out if stream == STREAM_STDOUT else self._err
        self.last_words = (self.last_words + piece[max(OUTPUT_HEAD_BYTES, len(piece) - LAST_WORDS) :])[-LAST_WORDS:]
        data: bytes | memoryview = memoryview(piece)[OUTPUT_HEAD_BYTES:]
        if self._filters and os.isatty(outlet.fd):
            data = self._filters[stream == STREAM_STDOUT].passed(bytes(data))
        outlet.write(data, lambda: self._link.consumed(channel, len(piece)))

    def _news(self, news: dict[str, Any]) -> None:
        match news["what"]:
            case "exited" | "gone":
                self._saw(news)
            case "notice" if news.get("reason") == "expired":  # this one came with a SIGTERM
                self.grace_reason = "expired"
            case "spared":
                self.grace_reason = None
            case "gap":
                self._err.write(f"sublet: {news.get('detail', '')}{self._line_end}".encode())
            case _:
                pass

    def _saw(self, seen: dict[str, Any]) -> None:
        code = int(seen.get("exit_code", -1))
        self.reason = seen.get("reason") or self.reason
        if code >= 0 and self.exit_code is None:
            self.exit_code = code
            self._exited_s = time.monotonic()
            self._lasts_at_s = None
            self._input_over = True

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        if self._lasts_at_s is not None and now_s >= self._lasts_at_s:
            self._lasts_at_s = None
            self._on_lasting()
        if self._drop_at_s is not None and now_s >= self._drop_at_s:
            self._drop_at_s = None
            self._end()
        if self._exited_s is not None and (self.is_over or now_s >= self._exited_s + LEFT_BEHIND_S):
            self._exited_s = None
            self._on_exited()

    @property
    def _line_end(self) -> str:
        return "\r\n" if self._terminal else "\n"

    # ---- what goes to it ----

    def _pass_input(self) -> None:
        if self._typed:
            sent = self._link.send_data(self._channel, self._typed)
            self._typed = self._typed[sent:]
        if self._input_over and not self._typed and self._takes_input:
            self._takes_input = False
            self._link.finish(self._channel)

    def _read_input(self) -> None:
        try:
            data = os.read(_STDIN, _TYPED_MAX)
        except BlockingIOError:
            return
        except OSError:  # closed, or a terminal that went away
            data = b""
        if not data:
            self._input_over = True
            return
        self._typed += data
        if self._terminal:
            for byte in data:
                if byte == _CTRL_C:
                    self._interrupted(sent=True)
                else:
                    self._interrupted_s = -TWICE_S
        self._pass_input()

    def _may_read(self) -> bool:
        """Whether input may be read now. The input of a terminal whose foreground is another job is not ours."""
        if self._input_over or self._typed or not self._link.may_send(self._channel):
            return False
        try:
            return os.tcgetpgrp(_STDIN) == os.getpgrp()
        except OSError:  # no terminal, or not ours
            return True

    # ---- signals ----

    def _signalled(self, number: int) -> None:
        if self.is_onlooker:
            self.wants_end = self.is_over = number != signal.SIGWINCH or self.is_over
        elif number == signal.SIGWINCH:
            if self._terminal:
                rows, cols = size_of(_STDOUT)
                self._ask("Resize", rows=rows, cols=cols)
        elif number == signal.SIGINT:
            self._interrupted(sent=False)
        elif number == signal.SIGHUP:
            self.wants_end = True
            self._ask("SignalGuest", number=number, tree=True)
            self._end()
        elif number == signal.SIGTERM and self.wants_end:
            self._end()
        else:
            self.wants_end = self.wants_end or number == signal.SIGTERM
            self._ask("SignalGuest", number=number, tree=number == signal.SIGQUIT)

    def _interrupted(self, *, sent: bool) -> None:
        """Ctrl-C. A terminal of the guest's own has made a signal of it already."""
        now_s = time.monotonic()
        again = now_s - self._interrupted_s < TWICE_S
        self._interrupted_s = now_s
        if again:
            self._end()
        elif not sent:
            self._ask("SignalGuest", number=int(signal.SIGINT), tree=True)

    def _end(self) -> None:
        """SIGTERM, and after its grace the end; asked once more, the end at once."""
        self.wants_end = True
        self._endings += 1
        self._ask("EndGuest", grace_ns=-1 if self._endings == 1 else 0)

    def _output_closed(self) -> None:
        """As in a pipe whose reader has gone: SIGPIPE. A program that ignores it is ended a moment later."""
        if self.is_onlooker:
            self.is_over = True
            return
        self._ask("SignalGuest", number=int(signal.SIGPIPE), tree=True)
        self._drop_at_s = time.monotonic() + LOOK_AGAIN_S

    def _ask(self, kind: str, **fields: object) -> None:
        """The answer is not awaited: the outcome shows in the guest."""
        if self.exit_code is None or kind == "EndGuest":
            self._link.call(message(kind, guest=self._guest, **fields))

    # ---- waiting ----

    def _wait(self, wake: int) -> None:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if self._link.over is None:
            writing = select.POLLOUT if self._conversation.wants_write else 0
            poll.register(self._conversation.fileno(), select.POLLIN | writing)
        may_read = self._may_read()
        if may_read:
            poll.register(_STDIN, select.POLLIN)
        for outlet in (self._out, self._err):
            if outlet.waits:
                poll.register(outlet.fd, select.POLLOUT)
        ready = dict(poll.poll(0 if self._conversation.has_kept else self._timeout_ms(may_read)))
        if wake in ready:
            os.read(wake, 512)
        for outlet in (self._out, self._err):
            if outlet.waits and outlet.fd in ready:
                outlet.ready()
        if may_read and _STDIN in ready:
            self._read_input()

    def _timeout_ms(self, may_read: bool) -> int:
        now_s = time.monotonic()
        left_s = [LOOK_AGAIN_S * 10]  # a wait stands still while the machine sleeps
        if self._exited_s is not None:
            left_s.append(self._exited_s + LEFT_BEHIND_S - now_s)
        left_s += [moment_s - now_s for moment_s in (self._drop_at_s, self._lasts_at_s) if moment_s is not None]
        if not may_read and not self._input_over:
            left_s.append(LOOK_AGAIN_S)
        return 1 + max(0, int(min(left_s) * 1000))


@contextlib.contextmanager
def caught(*numbers: int) -> Iterator[tuple[list[int], int]]:
    """Within the block these signals end nothing: they are put in a list, and a descriptor polls readable."""
    came: list[int] = []
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {}
    old = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:  # `nohup` stays what it is
                before[number] = signal.signal(number, lambda number, _: came.append(number))
        yield came, woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old)
        os.close(woken)
        os.close(wake)


# --------------------------------------------------------------------------------------------------------------- outlet
#
# Writes to a descriptor with a slow reader without blocking.
#
# The descriptor is shared with other programs, so it is not made non-blocking. Instead it is polled, and no more is
# written at once than a pipe or terminal that polls writable has room for.


_AT_ONCE: Final = 4096
"""A pipe that polls writable has a page free."""
_FILE_AT_ONCE: Final = 1 << 20
_CLOSED: Final = (errno.EPIPE, errno.EIO, errno.EBADF)


class Outlet:
    """What waits to be written to one descriptor, in order."""

    def __init__(self, fd: int, *, on_broken: Callable[[], None] = lambda: None) -> None:
        self.fd = fd
        self.is_broken = False
        """The reader is gone: what is given is dropped."""
        self.why = ""
        """Why something is lost that was meant to be kept, if so."""
        self._on_broken = on_broken
        self._waiting: deque[tuple[memoryview, Callable[[], None]]] = deque()
        try:
            self.is_plain = stat.S_ISREG(os.fstat(fd).st_mode)
            """A file: always writable, and in large pieces."""
        except OSError:  # it was closed before we began
            self.is_broken = self.is_plain = True

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def write(self, data: bytes | memoryview, done: Callable[[], None] = lambda: None) -> None:
        """Write it when its turn comes; ``done`` is called once it is written, or dropped."""
        self._waiting.append((memoryview(data), done))
        if self.is_plain or self.is_broken:
            self.ready()

    def ready(self) -> None:
        """It polls writable."""
        while self._waiting:
            data, done = self._waiting[0]
            if not self.is_broken and data:
                try:
                    written = os.write(self.fd, data[: _FILE_AT_ONCE if self.is_plain else _AT_ONCE])
                except BlockingIOError:
                    return
                except OSError as error:  # the reader has gone, the terminal hung up, the disk is full
                    if error.errno not in _CLOSED:
                        self.why = error.strerror or str(error)
                    self.discard()
                    continue
                data = data[written:]
            if data and not self.is_broken:
                self._waiting[0] = (data, done)
                if not self.is_plain:
                    return
            else:
                self._waiting.popleft()
                done()

    def discard(self) -> None:
        """Drop what still waits."""
        if not self.is_broken:
            self.is_broken = True
            self._on_broken()
