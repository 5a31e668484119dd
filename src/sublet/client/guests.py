"""Commands under a lease, as a program starts and holds them: ``lease.start(["python", "train.py"])``.

A guest is everything that a command has started. It ends with its lease, whatever becomes of this program; while its
command runs the lease counts as being in use, so it is renewed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from sublet.background import shortage_explained
from sublet.client.address import Address
from sublet.client.command_words import StdioText, checked_env, command_spec
from sublet.client.line import connect_data
from sublet.errors import Disconnected, InvalidRequest, LeaseEnded, NotFound, SubletError
from sublet.lease.states import GuestState
from sublet.lease.value import ended_error
from sublet.lease_end import EndReason
from sublet.values import GuestId, LeaseId, parse_duration_ns
from sublet.wire.channels import WINDOW
from sublet.wire.codec import dumps, loads
from sublet.wire.conversation import PATIENCE_S, Conversation
from sublet.wire.frames import CONTROL_MAX
from sublet.wire.guests import (
    OUTPUT_HEAD,
    STDERR,
    STDOUT,
    Attach,
    Attached,
    EndGuest,
    GuestNews,
    Guests,
    GuestSpec,
    GuestView,
    HolderCall,
    HolderReply,
    ListGuests,
    NotStarted,
    Resize,
    SignalGuest,
    Start,
    Started,
)
from sublet.wire.link_events import Closed, Data, Event, Happening, Over
from sublet.wire.zygote import WARM_WITHIN_S, Warm

if TYPE_CHECKING:
    from sublet.client.guest_watch import GuestWatch
    from sublet.client.handle import LeaseFacts, LeaseHandle
    from sublet.client.volume_line import HasVolume
    from sublet.lease_end import LeaseEnd

__all__ = [
    "Guest",
    "GuestStreams",
    "Output",
    "StdioText",
    "attach",
    "begin",
    "command_spec",
    "end_known_to_office",
    "environment",
    "list_guests",
    "open_streams",
    "piece_of",
    "start_guest",
    "start_spec",
    "warm",
]

T = TypeVar("T")
_STREAMS: Final = {STDOUT: "stdout", STDERR: "stderr"}
_LOCAL: Final = "local"
PAUSE_MAX_S: Final = 0.1
"""Between two looks at a guest that is being stopped."""


class Output(NamedTuple):
    """A piece of what a guest said."""

    stream: str
    """stdout, stderr, sublet (a line of ours: a notice, say), or gap: bytes in between are no longer kept."""
    data: bytes


class Guest:
    """A command under a lease. Made by ``lease.start``; safe to use from several threads.

    As a context manager it is stopped at the end of the block, if it still runs. Otherwise it runs until it is done, or
    until its lease ends.
    """

    def __init__(self, id: GuestId, pid: int, lease: LeaseId, address: Address) -> None:  # noqa: A002
        self.id = id
        self.pid = pid
        self.lease_id = lease
        self._address = address
        self._exited = threading.Event()
        self._exit_code: int | None = None
        self._reason: EndReason | None = None
        self._lost: SubletError | None = None
        self._on_exit: Callable[[], None] = lambda: None
        self._ending = threading.Lock()
        self._lock = threading.Lock()
        self._asking: Conversation | None = None
        self._stdin = 0

    def __repr__(self) -> str:
        state = "runs" if self._exit_code is None else f"exit {self._exit_code}"
        return f"<Guest {self.id} pid {self.pid} {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop it. What the body raised goes on as it is."""
        try:
            self.stop()
        except NotFound:  # gone so long that it is forgotten
            pass
        except SubletError as failed:
            if error is None:
                raise
            error.add_note(f"guest {self.id} could not be stopped: {failed}")
        finally:
            self.close()

    @property
    def exit_code(self) -> int | None:
        """Of its command: 128 + n if signal n ended it; None while it runs."""
        return self._exit_code

    @property
    def reason(self) -> EndReason | None:
        """Why it was ended; None if it was not, and ended by itself."""
        return self._reason

    def wait(self, timeout: float | None = None) -> int:
        """Wait until its command has ended; the exit code. ``TimeoutError`` if it has not by then.

        Its output is kept meanwhile, within a bound; read it with ``output()``, also afterwards.
        """
        if not self._exited.wait(timeout):
            raise TimeoutError(f"guest {self.id} has not ended within {timeout} s")
        with self._ending:  # its lease does not count as in use any more
            pass
        if self._exit_code is None:
            raise self._lost or Disconnected("the supervisor hung up")
        return self._exit_code

    def send_signal(self, number: int, *, tree: bool = False) -> None:
        """Send it a signal: its command, or (``tree``) every process it has."""
        self._ask(SignalGuest(guest=self.id, number=int(number), tree=tree))

    def resize(self, rows: int, cols: int) -> None:
        """Its terminal has another size now. Nothing happens without one."""
        self._ask(Resize(guest=self.id, rows=rows, cols=cols))

    def stop(self, grace: float | str | None = None) -> int:
        """SIGTERM, and after the grace (its own by default) the end of every process it has. Returns when they are
        gone."""
        grace_ns = -1 if grace is None else parse_duration_ns(grace, "grace", zero_ok=True)
        self._ask(EndGuest(guest=self.id, grace_ns=grace_ns))
        pause_s = 0.005
        while (view := self.view()).state != GuestState.GONE:
            time.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 1.5 * pause_s)
        self._reason = _reason_of(view)
        self._exit_code = view.exit_code
        self._ended()  # the thread that watches may hear of it later
        return view.exit_code

    def view(self) -> GuestView:
        """Everything about it: state, processes, CPU time, peak memory, size of its output."""
        found = self._ask(ListGuests(guest=self.id, ended=True))
        if not isinstance(found, Guests) or not found.guests:
            raise NotFound(f"guest {self.id} is not remembered any more")
        return found.guests[0]

    def output(self, *, offset: int = 0, lossless: bool = True, follow: bool = True) -> Iterator[Output]:
        """What it says, from the beginning (or an offset in bytes) until it is gone; or, without ``follow``, so far.

        With ``lossless`` the guest waits, once a buffer is full, for the reader here. Its output outlives it, so
        this also works when it has ended.
        """
        with connect_data(self._address, "") as conversation:
            wanted = Attach(guest=self.id, offset=offset, lossless=lossless, follow=follow)
            attached = attach(conversation, wanted)
            conversation.link.grant(attached.output, WINDOW)
            while True:
                for happening in conversation.wait(1.0):
                    if isinstance(happening, Closed):
                        return
                    if isinstance(happening, Over):
                        raise happening.error or Disconnected("the supervisor hung up")
                    if (piece := piece_of(happening)) is not None:
                        yield piece
                    if isinstance(happening, Data):
                        conversation.link.consumed(happening.channel, happening.cost)

    def write(self, data: bytes) -> None:
        """Give it something to read. Returns when all of it is on its way; ``BrokenPipeError`` if it has ended."""
        with self._lock:
            conversation = self._at_stdin()
            rest = memoryview(data)
            while rest:
                if self._exited.is_set():
                    raise BrokenPipeError(f"guest {self.id} has ended and reads no more")
                sent = conversation.link.send_data(self._stdin, rest)
                rest = rest[sent:]
                conversation.flush(1.0)
                if not sent:
                    self._on_events(conversation.wait(0.2))

    def close_stdin(self) -> None:
        """Nothing more comes: it finds the end of its input."""
        with self._lock:
            conversation = self._at_stdin()
            conversation.link.finish(self._stdin)
            conversation.flush()

    def close(self) -> None:
        """Let go of our connection to it. It goes on; everything here still works."""
        with self._lock:
            if self._asking is not None:
                self._asking.close()
                self._asking, self._stdin = None, 0

    # ---- within

    def _ask(self, call: HolderCall) -> HolderReply:
        with self._lock:
            return _ask(self._connected(), call)

    def _connected(self) -> Conversation:
        """One connection for questions and for its input, made when it is needed, and again if it broke."""
        if self._asking is not None and self._asking.link.over is not None:
            self._asking.close()
            self._asking, self._stdin = None, 0
        if self._asking is None:
            self._asking = connect_data(self._address, "")
        return self._asking

    def _at_stdin(self) -> Conversation:
        conversation = self._connected()
        if not self._stdin:  # no output is granted here, so none comes
            self._stdin = attach(conversation, Attach(guest=self.id, offset=-1, stdin=True)).stdin
        return conversation

    def _on_events(self, happenings: Sequence[Happening]) -> None:
        for happening in happenings:
            if isinstance(happening, Over):
                raise happening.error or Disconnected("the supervisor hung up")

    def _on_event(self, happening: Happening) -> bool:
        """News, on the thread that watches. True: there is nothing more to come."""
        match happening:
            case Event(body=body):
                news = loads(GuestNews, body)
                if news.what == "exited":  # the rest is in its output
                    self._saw(news)
            case Over(error=error):
                self._lost = error or Disconnected("the supervisor hung up")
                self._ended()
            case _:
                pass
        return self._exited.is_set()

    def _saw(self, news: GuestNews) -> None:
        self._reason = news.reason or self._reason
        if news.exit_code >= 0:
            self._exit_code = news.exit_code
            self._ended()

    def _ended(self) -> None:
        """Once, though the thread that watches and one that stops it may both come to it."""
        with self._ending:
            if not self._exited.is_set():
                self._exited.set()
                self._on_exit()


class GuestStreams:
    """Input and output of a guest, for a program with an event loop of its own: nothing here waits. For one thread.

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


def start_guest(
    lease: LeaseHandle,
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    stdio: StdioText,
    rows: int,
    cols: int,
    name: str,
    grace: float | str | None,
    volume: HasVolume | None = None,
) -> Guest:
    """Run a command under the lease, and count it as being in use until the command has ended."""
    spec = command_spec(
        argv, env=environment(lease, env), cwd=cwd, stdio=stdio, rows=rows, cols=cols, name=name, grace=grace
    )
    return start_spec(lease, spec, volume=volume)


def start_spec(lease: LeaseHandle, spec: GuestSpec, *, busy: bool = True, volume: HasVolume | None = None) -> Guest:
    """Run this under the lease. ``busy``: the lease counts as being in use until the guest's program has ended.
    ``volume``: a lease of blocks that it may save to. Where the lease ends meanwhile, its end is raised."""
    with shortage_explained():
        from sublet.client.volume_line import in_use_of, lease_token, ticket_for

    fabric = lease._fabric
    try:
        with shortage_explained():
            in_use, ticket = in_use_of(lease if busy else None, volume), ticket_for(volume)
            return begin(fabric.address, lease_token(lease), lease.id, spec, fabric._watch, in_use, volume=ticket)
    except LeaseEnded as refused:  # what refuses it knows that the lease is over, and not why
        end = None if refused.end is not None else lease.end or end_known_to_office(lease)
        if end is None:
            raise
        raise ended_error(lease.id, end) from refused


def end_known_to_office(lease: LeaseHandle) -> LeaseEnd | None:
    """How the lease has ended; the supervisor may know that it has before we do: an operator ends both at once."""
    from sublet.client.responses import end_of  # the parts for a bare machine do without what it needs

    with contextlib.suppress(SubletError):
        if (end := lease._fabric.lease(lease.id).end) is not None:
            return end_of(end)
    return lease.end


def begin(
    address: Address,
    token: str,
    lease: LeaseId,
    spec: GuestSpec,
    watch: GuestWatch,
    in_use: Callable[[], Callable[[], None]] | None,
    *,
    volume: str = "",
) -> Guest:
    """Run this with the lease's token. ``in_use`` is called when it runs; what it returns, when its program ended.
    ``volume``: a ticket for one. What is raised once it runs ends it: the caller has nothing to end it by."""
    conversation = connect_data(address, token)
    try:
        started = _start(conversation, spec, volume)
        guest = Guest(started.guest, started.pid, lease, address)
        try:
            if in_use is not None:
                guest._on_exit = in_use()
            view = attach(conversation, Attach(guest=guest.id, offset=-1)).view  # no credit: the news alone
            # It may have been quicker than we.
            guest._saw(GuestNews(guest=guest.id, what="exited", exit_code=view.exit_code, reason=_reason_of(view)))
            if guest.exit_code is not None:
                conversation.close()
            else:
                watch.add(conversation, guest._on_event)
        except BaseException:
            guest._ended()
            with contextlib.suppress(SubletError, OSError):
                _ask(conversation, EndGuest(guest=guest.id, grace_ns=0))
            raise
    except BaseException:
        conversation.close()
        raise
    return guest


def list_guests(address: Address, lease: str, *, ended: bool) -> list[GuestView]:
    """Those that one may see, page by page."""
    seen: list[GuestView] = []
    after = 0
    with connect_data(address, "") as conversation:
        while True:
            page = _expected(_ask(conversation, ListGuests(lease=lease, ended=ended, after=after)), Guests)
            seen += page.guests
            if not page.more:
                return seen
            after = page.more


def warm(address: Address, wish: Warm) -> None:
    """Have a warm interpreter made, if there is none of the kind. It is begun, and not waited for."""
    with connect_data(address, "") as conversation:
        _ask(conversation, wish)


def _start(conversation: Conversation, spec: GuestSpec, volume: str = "") -> Started:
    body = dumps(Start(spec=spec, volume=volume))
    if len(body) > CONTROL_MAX:
        raise InvalidRequest(
            f"arguments and environment take {len(body)} bytes together, and {CONTROL_MAX} is the most",
            do="Give a smaller env=, or hand it over in a file.",
        )
    within_s = PATIENCE_S + (WARM_WITHIN_S if spec.patient else 0.0)
    answer = loads(HolderReply, conversation.call(body, timeout_s=within_s).body)
    if isinstance(answer, NotStarted):
        raise InvalidRequest(answer.message, do=answer.do)
    return _expected(answer, Started)


def attach(conversation: Conversation, request: Attach) -> Attached:
    """Follow a guest on this connection."""
    return _expected(_ask(conversation, request), Attached)


def _ask(conversation: Conversation, call: HolderCall) -> HolderReply:
    answer: HolderReply = loads(HolderReply, conversation.call(dumps(call)).body)
    return answer


def _expected(answer: HolderReply, kind: type[T]) -> T:
    if not isinstance(answer, kind):
        raise Disconnected(f"the supervisor answered with a {type(answer).__name__}")
    return answer


def piece_of(happening: Happening) -> Output | None:
    """What a guest said, if it is that which happened."""
    match happening:
        case Data(data=data):
            stream, _ = OUTPUT_HEAD.unpack_from(data)
            return Output(_STREAMS.get(stream, "sublet"), data[OUTPUT_HEAD.size :])
        case Event(body=body):
            news = loads(GuestNews, body)
            return Output("gap", news.detail.encode()) if news.what == "gap" else None
        case _:
            return None


def _reason_of(view: GuestView) -> EndReason | None:
    with contextlib.suppress(ValueError):
        return EndReason(view.reason)
    return None


def environment(lease: LeaseFacts, env: Mapping[str, str] | None) -> dict[str, str]:
    """Ours, where the guest runs as the same user; that of another tenant begins with an empty one."""
    if env is not None:
        return checked_env(env)
    return dict(os.environ) if lease._held.view.tenant == _LOCAL else {}
