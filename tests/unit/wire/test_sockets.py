"""Links on real sockets: descriptors go once and leak nowhere, a slow reader costs nobody memory, and waiting ends."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.errors import CapacityExceeded, Disconnected, NotFound
from sublet.wire import conversation
from sublet.wire.channels import WINDOW
from sublet.wire.conversation import Conversation
from sublet.wire.frames import CONTROL_MAX, FDS_MAX, FrameKind, close_all, encode
from sublet.wire.link import LINK_OUT_MAX, Link
from sublet.wire.link_events import (
    Called,
    Closed,
    Data,
    Event,
    Happening,
    Opened,
    Over,
    PeerHello,
    Replied,
    Welcome,
)
from sublet.wire.sockets import RECEIVE_MAX, RECEIVE_USUAL, peer_of, receive_some, send_some
from tests.left_open import nothing_left_open, same_file, some_fd

PATIENCE_S = 30.0
"""For waits that end as soon as what they wait for is there."""


class Ends:
    """Two links on the two ends of a real socket."""

    def __init__(self, *, small: bool = False) -> None:
        self.left, self.right = socket.socketpair()
        for sock in (self.left, self.right):
            sock.setblocking(False)
            if small:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it its least
        self.a, self.b = Link.connecting(), Link.accepting()
        self.told_a: list[Happening] = []
        self.told_b: list[Happening] = []
        self.turn()
        [hello] = self.told_b
        assert isinstance(hello, PeerHello)
        self.b.welcome()
        self.turn()
        self.told_a, self.told_b = [], []

    def turn(self) -> None:
        """Everything that can go goes."""
        while True:
            out = send_some(self.left, self.a) and send_some(self.right, self.b)
            told_a, told_b = receive_some(self.left, self.a), receive_some(self.right, self.b)
            self.told_a += told_a
            self.told_b += told_b
            if out and not told_a and not told_b and not (self.a.has_output or self.b.has_output):
                return

    def close(self) -> None:
        """Both ends, and what was still on its way."""
        for link, sock in ((self.a, self.left), (self.b, self.right)):
            link.end()
            link.drop_output()
            sock.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with nothing_left_open():
        made = Ends()
        yield made
        made.close()


@pytest.fixture
def narrow() -> Iterator[Ends]:
    """A socket that takes a few kilobytes at a time, so that every larger frame is cut."""
    with nothing_left_open():
        made = Ends(small=True)
        yield made
        made.close()


def test_calls_and_answers_cross_a_socket(ends: Ends) -> None:
    call = ends.a.call(b"hello")
    ends.turn()
    assert ends.told_b == [Called(call, b"hello", ())]
    ends.b.reply(call, b"hello yourself")
    ends.turn()
    assert ends.told_a == [Replied(call, b"hello yourself", ())]


def test_descriptors_arrive_once_close_on_exec_and_ours_are_closed(ends: Ends) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    kept = os.dup(write)
    ends.a.event(b"take", (read, write))
    ends.turn()
    [event] = ends.told_b
    assert isinstance(event, Event)
    assert len(event.fds) == 2
    assert not any(os.get_inheritable(fd) for fd in event.fds)
    assert same_file(event.fds[1], kept)
    os.close(kept)
    os.write(event.fds[1], b"x")
    assert os.read(event.fds[0], 1) == b"x"
    close_all(event.fds)


def test_descriptors_go_exactly_once_when_their_frame_is_cut_by_the_kernel(narrow: Ends) -> None:
    for turn in range(20):
        narrow.a.event(b"before" * 2000)
        narrow.a.event(bytes([turn]) * 300_000, (some_fd(), some_fd()))
        narrow.a.event(b"after", (some_fd(),))
        narrow.turn()
    assert [(len(one.body), len(one.fds)) for one in narrow.told_b if isinstance(one, Event)] == [
        *((12_000, 0), (300_000, 2), (5, 1)) * 20
    ]
    for one in narrow.told_b:
        assert isinstance(one, Event)
        close_all(one.fds)


def test_several_frames_with_descriptors_do_not_mix_them_up(ends: Ends) -> None:
    files = [os.memfd_create(f"number-{number}", os.MFD_CLOEXEC) for number in range(50)]
    for number, fd in enumerate(files):
        ends.a.event(b"%d" % number, (fd,))
        ends.a.event(b"none")
    ends.turn()
    got = [one for one in ends.told_b if isinstance(one, Event) and one.fds]
    assert [os.readlink(f"/proc/self/fd/{one.fds[0]}").split()[0] for one in got] == [
        f"/memfd:number-{number}" for number in range(50)
    ]
    assert [one.body for one in got] == [b"%d" % number for number in range(50)]
    for one in got:
        close_all(one.fds)


def test_descriptors_on_their_way_when_a_connection_ends_are_closed(narrow: Ends) -> None:
    for _ in range(10):
        narrow.a.event(bytes(200_000), (some_fd(),))
    send_some(narrow.left, narrow.a)
    narrow.told_b += receive_some(narrow.right, narrow.b, 100)


def send_raw(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    close_all(fds)


@pytest.mark.parametrize("count", [1, FDS_MAX, FDS_MAX + 1, 100, 253])
def test_descriptors_nobody_announced_end_it_and_are_closed(ends: Ends, count: int) -> None:
    send_raw(ends.left, encode(FrameKind.PING, 0), [some_fd() for _ in range(count)])
    ends.turn()
    over = ends.told_b[-1]
    assert isinstance(over, Over)
    assert "descriptors" in str(over.error)


def test_more_descriptors_than_this_process_may_open_end_it_and_are_closed(ends: Ends) -> None:
    """The kernel drops what does not fit; the frame would come without what it announced."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = [some_fd() for _ in range(8)]
    send_raw(ends.left, encode(FrameKind.EVENT, 0, fds=fds), fds)
    room = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    filled = [some_fd() for _ in range(room)]  # every gap below is taken, whatever was open before
    top = max(filled)
    close_all(filled[-3:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, limits[1]))
    try:
        told = receive_some(ends.right, ends.b)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        close_all(filled[:-3])
    [over] = told
    assert isinstance(over, Over)
    assert "descriptors were lost" in str(over.error)


def test_the_kernel_says_who_connected(ends: Ends) -> None:
    assert peer_of(ends.left) == (os.getpid(), os.getuid(), os.getgid())


def test_a_slow_reader_stops_the_sender_and_neither_side_piles_up(ends: Ends) -> None:
    channel = ends.a.open_channel(b"stdout")
    ends.turn()
    ends.b.grant(channel, WINDOW)
    ends.turn()
    sent, piece = 0, os.urandom(50_000)
    for _ in range(200):
        sent += ends.a.send_data(channel, piece)
        ends.turn()
    assert sent == WINDOW, "the reader consumed nothing, so no more than the window went"
    assert ends.a.may_send(channel) == 0
    received = 0
    while sent < 4 * WINDOW:
        for one in ends.told_b:
            if isinstance(one, Data):
                received += one.cost
                ends.b.consumed(channel, one.cost)
        ends.told_b = []
        ends.turn()
        sent += ends.a.send_data(channel, piece)
        ends.turn()
        assert sent - received <= WINDOW


def test_a_peer_that_never_reads_its_socket_bounds_what_waits_here() -> None:
    with nothing_left_open():
        ends = Ends()
        channel = ends.a.open_channel(b"stdout")
        ends.turn()
        ends.b.grant(channel, 16 * WINDOW)
        ends.turn()
        for _ in range(100):
            ends.a.send_data(channel, bytes(100_000))
            send_some(ends.left, ends.a)
        assert ends.a.may_send(channel) == 0
        for _ in range(10):
            ends.a.event(bytes(CONTROL_MAX))
            send_some(ends.left, ends.a)
        assert isinstance(ends.a.over, Over), "messages beyond the limit: it is cut off"
        assert sum(len(data) for data, _ in ends.a.take_output()) < LINK_OUT_MAX
        ends.close()


def test_hanging_up_is_told_after_the_last_words(ends: Ends) -> None:
    ends.a.event(b"last words")
    ends.a.end(NotFound("the lease is gone"))
    send_some(ends.left, ends.a)
    ends.left.close()
    ends.b.event(b"into the void")
    assert send_some(ends.right, ends.b)
    told = [*receive_some(ends.right, ends.b), *receive_some(ends.right, ends.b)]
    assert told[0] == Event(0, b"last words", ())
    over = told[1]
    assert isinstance(over, Over)
    assert isinstance(over.error, NotFound)


def test_nothing_waits_on_a_blocking_socket_either() -> None:
    with nothing_left_open():
        left, right = socket.socketpair()
        link = Link.accepting()
        assert receive_some(left, link) == []
        link = Link.adopted(PeerHello(1, 1, b""))
        link.welcome()
        link.event(bytes(CONTROL_MAX))
        assert not send_some(left, link)
        link.drop_output()
        left.close()
        right.close()


class Asked:
    """A socket that notes how much room was made for what is there."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.rooms: list[int] = []

    def recvmsg(self, room: int, *rest: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        self.rooms.append(room)
        return self._sock.recvmsg(room, *rest)


def test_room_for_much_is_made_only_while_much_comes(ends: Ends) -> None:
    """To make room for 256 KiB takes several times as long as to receive an order."""
    asked = Asked(ends.right)
    much = bytes(2 * RECEIVE_USUAL)
    for said in (b"few words", much, b"few words"):
        ends.a.event(said)
        assert send_some(ends.left, ends.a)
        told: list[Happening] = []
        while not told:
            told += receive_some(asked, ends.b)  # type: ignore[arg-type]
        assert told == [Event(0, said, ())]
    assert receive_some(asked, ends.b) == []  # type: ignore[arg-type]
    receive_some(asked, ends.b)  # type: ignore[arg-type]
    assert asked.rooms == [RECEIVE_USUAL, RECEIVE_USUAL, RECEIVE_MAX, RECEIVE_MAX, RECEIVE_USUAL, RECEIVE_USUAL]


# ------------------------------------------------------------------------------------------------------ conversation

Answer = Callable[[Link, Happening], None]


class Echo:
    """Gives back what comes on a channel, and takes more only as fast as it is rid of it."""

    def __init__(self) -> None:
        self._channel = 0
        self._kept = bytearray()
        self._at_end = False

    def take(self, one: Happening) -> None:
        match one:
            case Data(channel, data):
                self._channel = channel
                self._kept += data
                assert len(self._kept) <= WINDOW
            case Closed(channel, _, _):
                self._channel, self._at_end = channel, True
            case _:
                pass

    def give(self, link: Link) -> None:
        count = link.send_data(self._channel, bytes(self._kept))
        del self._kept[:count]
        if count:
            link.consumed(self._channel, count)
        if self._at_end and not self._kept:
            link.finish(self._channel)


class Server:
    """Serves one connection at a time in a thread, as it is told."""

    def __init__(self, path: str, answer: Answer) -> None:
        self._answer = answer
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)
        self._listening.close()

    def _serve(self) -> None:
        while self._is_ready(self._listening):
            sock, _ = self._listening.accept()
            link, echo = Link.accepting(), Echo()
            sock.setblocking(False)
            with sock:
                while link.over is None and self._is_ready(sock, writes=link.has_output):
                    for one in receive_some(sock, link):
                        self._answer(link, one)
                        echo.take(one)
                    send_some(sock, link)
                    echo.give(link)
                    send_some(sock, link)
                while link.has_output and not send_some(sock, link):
                    select.select([], [sock], [], 1)
            link.end()
            link.drop_output()

    def _is_ready(self, sock: socket.socket, *, writes: bool = False) -> bool:
        ready, _, _ = select.select([sock.fileno(), self._stop], [sock.fileno()] if writes else [], [])
        return self._stop not in ready


def answer(link: Link, one: Happening) -> None:
    """What the server of these tests does when asked."""
    match one:
        case PeerHello(body=b"stranger"):
            link.end(NotFound("nobody knows you"))
        case PeerHello(body=b"silence"):
            pass
        case PeerHello():
            link.welcome(b"welcome")
        case Called(call, b"file", _):
            link.reply(call, b"", (some_fd(),))
        case Called(call, b"refuse", _):
            link.refuse(call, NotFound("there is no such guest", do="See `sublet ps`."))
        case Called(call, b"news first", _):
            for number in range(5):
                link.event(b"%d" % number, (some_fd(),))
            link.reply(call, b"after the news")
        case Called(call, b"too much", _):
            for _ in range(20):
                link.event(b"")
            link.reply(call)
        case Called(_, b"hang up", _):
            link.end()
        case Called(call, b"echo", fds):
            link.reply(call, b"echo", fds)
        case Opened(channel, b"cat", _):
            link.grant(channel, WINDOW)
        case _:
            pass


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with nothing_left_open():
        server = Server(str(tmp_path / "s"), answer)
        yield str(tmp_path / "s")
        server.close()


def test_a_program_connects_asks_and_gets_an_answer(path: str) -> None:
    with Conversation.connect(path, b"me", timeout_s=PATIENCE_S) as talk:
        assert talk.call(b"echo", timeout_s=PATIENCE_S).body == b"echo"
        reply = talk.call(b"echo", (some_fd(),), timeout_s=PATIENCE_S)
        assert len(reply.fds) == 1
        close_all(reply.fds)
        with pytest.raises(NotFound, match="no such guest") as caught:
            talk.call(b"refuse", timeout_s=PATIENCE_S)
        assert caught.value.do == "See `sublet ps`."


def test_what_happens_while_an_answer_is_waited_for_is_kept_in_order(path: str) -> None:
    with Conversation.connect(path, timeout_s=PATIENCE_S) as talk:
        assert talk.call(b"news first", timeout_s=PATIENCE_S).body == b"after the news"
        assert talk.has_kept
        news = talk.pump()
        assert [one.body for one in news if isinstance(one, Event)] == [b"0", b"1", b"2", b"3", b"4"]
        for one in news:
            assert isinstance(one, Event)
            close_all(one.fds)
        talk.call(b"news first", timeout_s=PATIENCE_S)  # left untaken: closing closes their descriptors


def test_what_nobody_takes_is_kept_up_to_a_limit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "KEPT_MAX", 10)
    with (
        Conversation.connect(path, timeout_s=PATIENCE_S) as talk,
        pytest.raises(CapacityExceeded, match="more than 10 things"),
    ):
        _call_twice(talk, b"too much")


def _call_twice(talk: Conversation, body: bytes) -> None:
    """The first answer may come together with what is too much; then it is still given."""
    talk.call(body, timeout_s=PATIENCE_S)
    talk.call(body, timeout_s=PATIENCE_S)


def test_a_program_polls_its_connection_together_with_something_else(path: str) -> None:
    """As `sublet run` does with a terminal: input goes out, what comes back is read, the end is seen."""
    read, write = os.pipe2(os.O_CLOEXEC)
    said = os.urandom(3 * WINDOW)
    writer = threading.Thread(target=_write_all, args=(write, said), daemon=True)
    writer.start()
    echoed = bytearray()
    with Conversation.connect(path, timeout_s=PATIENCE_S) as talk:
        channel = talk.link.open_channel(b"cat")
        at_end = False
        while not at_end or len(echoed) < len(said):
            poll = select.poll()
            poll.register(talk.fileno(), select.POLLIN | (select.POLLOUT if talk.wants_write else 0))
            if talk.link.may_send(channel):
                poll.register(read, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(PATIENCE_S * 1000)}
            assert ready, "it is stuck"
            if read in ready:
                data = os.read(read, talk.link.may_send(channel))
                if data:
                    assert talk.link.send_data(channel, data) == len(data)
                else:
                    talk.link.finish(channel)
            for one in talk.pump():
                if isinstance(one, Data):
                    echoed += one.data
                    talk.link.consumed(channel, one.cost)
                at_end = at_end or isinstance(one, Closed)
        assert talk.flush(PATIENCE_S)
    writer.join()
    os.close(read)
    assert echoed == said


def _write_all(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def test_waiting_ends(path: str) -> None:
    with Conversation.connect(path, timeout_s=PATIENCE_S) as talk:
        assert talk.wait(0.01) == []
        with pytest.raises(Disconnected, match=r"no answer came within 0\.01 s"):
            talk.call(b"never", timeout_s=0.01)
        assert talk.call(b"echo", timeout_s=PATIENCE_S).body == b"echo"
        with pytest.raises(Disconnected, match="ended before everything was said"):
            talk.call(b"hang up", timeout_s=PATIENCE_S)
        assert isinstance(talk.wait(PATIENCE_S)[-1], Over)
        assert talk.wait(PATIENCE_S) == []


@pytest.mark.parametrize(
    ("hello", "timeout_s", "error", "words"),
    [(b"stranger", PATIENCE_S, NotFound, "nobody knows you"), (b"silence", 0.01, Disconnected, "no welcome came")],
)
def test_a_connection_that_is_not_welcomed_is_closed_with_its_reason(
    path: str, hello: bytes, timeout_s: float, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):  # that nothing is left open, ``path`` asks once its thread has ended
        Conversation.connect(path, hello, timeout_s=timeout_s)


def test_where_nobody_listens_nothing_was_sent(tmp_path: Path) -> None:
    with nothing_left_open(), pytest.raises(Disconnected, match="no answer at") as caught:
        Conversation.connect(str(tmp_path / "none"))
    assert not caught.value.sent


def test_closing_twice_and_asking_after_it_is_harmless() -> None:
    with nothing_left_open():
        left, right = socket.socketpair()
        talk = Conversation(left, Link.connecting())
        talk.close()
        talk.close()
        assert talk.wait(1) == [] or isinstance(talk.pump(), list)
        with pytest.raises(Disconnected):
            talk.call(b"")
        assert Welcome not in map(type, talk.pump())
        right.close()


@pytest.mark.parametrize("where", ["sent", "receive"])
def test_an_interrupt_between_the_kernel_and_the_link_ends_it(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What went out would go out twice, and what came in would be lost."""
    a, b = socket.socketpair()
    one, other = Link.connecting(), Link.accepting()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with a, b:
        if where == "receive":
            assert send_some(a, one)
        link, act = (one, lambda: send_some(a, one)) if where == "sent" else (other, lambda: receive_some(b, other))
        monkeypatch.setattr(link, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            act()
        assert link.over is not None
        assert "interrupt" in str(link.over.error)
        assert where == "receive" or not link.has_output
