"""Connections of tenants' guests: whatever is said arrives as it was, and of descriptors only shared memory."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest

from sublet.errors import SubletError
from sublet.node.loop import Loop
from sublet.node.processes import forwarding
from sublet.node.processes.forwarding import Forwarding, FrameStarts, why_refused
from sublet.node.storage import stores
from sublet.testing.clock import HeldClock
from sublet.wire.conversation import Conversation
from sublet.wire.frames import FrameKind, close_all, encode
from sublet.wire.link import Link
from sublet.wire.link_events import Called, Event, Opened, Over, Replied
from sublet.wire.persistent_memory import Lasting
from sublet.wire.sealed_memory import write_shared
from sublet.wire.sockets import receive_some, send_some
from sublet.wire.work import Board
from tests.left_open import left_of, open_now


class Bench:
    """A holder and a guest, and what is between them. Time stands still, so no last word comes too late."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.loop = Loop(self.clock)
        self.holder, a = socket.socketpair()
        b, self.guest = socket.socketpair()
        self.refused: list[SubletError] = []
        self._ends = 0
        self._between = frozenset((fd, os.readlink(f"/proc/self/fd/{fd}")) for fd in (a.fileno(), b.fileno()))
        self.forwarding = Forwarding(self.loop, a, b, self._over, self.refused.append)
        for sock in (self.holder, self.guest):
            sock.setblocking(False)

    def _over(self) -> None:
        self._ends += 1

    def over(self) -> bool:
        return self._ends > 0

    def check_closed(self, before: frozenset[tuple[int, str]]) -> None:
        """Its own two ends are closed, and nothing is left open but what was open before."""
        assert not open_now() & self._between
        assert not left_of(open_now, before)

    def turn(self, times: int = 8) -> None:
        for _ in range(times):
            self.loop.turn(0)

    def read(self, sock: socket.socket) -> bytes:
        """Whatever has arrived."""
        found = b""
        while True:
            self.turn(2)
            try:
                data = sock.recv(1 << 20)
            except (BlockingIOError, ConnectionResetError):  # or it hung up without having read all
                return found
            if not data:
                return found
            found += data

    def fill(self, sock: socket.socket) -> None:
        """Say more than the other side reads, which is nothing."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.turn(4)
                sock.send(encode(FrameKind.DATA, 1, bytes(200_000)))

    def close(self) -> None:
        self.forwarding.close()
        self.holder.close()
        self.guest.close()
        self.loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def memory() -> int:
    return write_shared((memoryview(b"shared"),))[0]


def opened(path: str, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def unsealed() -> int:
    return os.memfd_create("x", os.MFD_ALLOW_SEALING)


def in_a_file_system() -> int:
    """As the memory of a lease of root's office: a file of a file system in memory."""
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def lent_memory() -> int:
    return stores.make_segment(4096)


def end_of_a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def connection() -> int:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours.detach()


REFUSED: list[tuple[Callable[[], int], str]] = [
    (lambda: opened("/dev/zero"), "a device"),
    (lambda: opened("/"), "a folder"),
    (lambda: opened("/", os.O_PATH), "a folder"),
    (lambda: opened("/etc/passwd"), "a file"),
    (lambda: opened("/proc/self/mem"), "a file"),
    (lambda: opened(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR), "a file"),
    (in_a_file_system, "a file in memory that can still change its size"),
    (unsealed, "a file in memory that can still change its size"),
    (lent_memory, "the memory of a lease"),
    (end_of_a_pipe, "a pipe"),
    (connection, "a socket"),
    (lambda: os.pidfd_open(os.getpid()), "a file"),
]


@pytest.mark.parametrize(("make", "what"), REFUSED, ids=[what for _, what in REFUSED])
@pytest.mark.parametrize("way", ["from the guest", "from the holder"])
def test_a_descriptor_of_anything_else_ends_the_connection_and_arrives_nowhere(
    bench: Bench, make: Callable[[], int], what: str, way: str
) -> None:
    source, target = (bench.guest, bench.holder) if way == "from the guest" else (bench.holder, bench.guest)
    fd = make()
    before = open_now()
    socket.send_fds(source, [encode(FrameKind.EVENT, 0, b"take it", fds=[fd])], [fd])
    bench.turn()
    data, fds, _, _ = socket.recv_fds(target, 1 << 16, 16)
    assert (data, fds) == (b"", [])
    assert bench.over()
    (error,) = bench.refused
    assert what in error.message
    bench.check_closed(before)
    os.close(fd)


def test_all_shared_memory_that_the_protocol_knows_passes(bench: Bench) -> None:
    board, page = Board.create()
    lasting = Lasting.filled(memoryview(b"x" * 4096))
    fds = [memory(), page, os.dup(lasting.file.fd)]
    assert [why_refused(fd) for fd in fds] == ["", "", ""]
    link = Conversation(bench.guest, Link.connecting()).link
    socket.send_fds(bench.guest, [encode(FrameKind.EVENT, 0, b"three", fds=fds)], fds)
    bench.turn()
    data, came, _, _ = socket.recv_fds(bench.holder, 1 << 16, 16)
    assert data.endswith(b"three")
    assert [os.fstat(one).st_ino for one in came] == [os.fstat(one).st_ino for one in fds]
    close_all((*fds, *came))
    board.close()
    del link


def descriptors_without_a_frame(bench: Bench) -> None:
    fd = memory()
    socket.send_fds(bench.guest, [encode(FrameKind.PING, 0)[:5]], [fd])
    os.close(fd)


def descriptors_that_no_frame_announces(bench: Bench) -> None:
    fd = memory()
    socket.send_fds(bench.guest, [encode(FrameKind.PING, 0)], [fd])
    os.close(fd)


def a_frame_that_announces_what_does_not_come(bench: Bench) -> None:
    bench.guest.send(encode(FrameKind.EVENT, 0, b"", fds=[1, 2]))


def more_than_a_frame_may_have(bench: Bench) -> None:
    fds = [memory() for _ in range(17)]
    socket.send_fds(bench.guest, [encode(FrameKind.PING, 0)], fds)
    close_all(fds)


@pytest.mark.parametrize(
    "act",
    [
        descriptors_without_a_frame,
        descriptors_that_no_frame_announces,
        a_frame_that_announces_what_does_not_come,
        more_than_a_frame_may_have,
    ],
)
def test_who_breaks_the_rules_of_descriptors_is_cut_off(bench: Bench, act: Callable[[Bench], None]) -> None:
    before = open_now()
    act(bench)
    bench.turn()
    assert bench.over()
    assert len(bench.refused) == 1
    bench.check_closed(before)


def test_what_one_side_says_is_read_only_while_the_other_reads(bench: Bench) -> None:
    """Nothing piles up here: who writes waits, as on a connection of its own."""
    sent = 0
    piece = encode(FrameKind.DATA, 1, bytes(200_000))
    for _ in range(200):
        bench.turn(4)
        try:
            sent += bench.guest.send(piece[sent % len(piece) :])
        except BlockingIOError:
            break
    assert sent < 1 << 20
    assert not bench.over()
    bench.holder.send(encode(FrameKind.PING, 0))
    bench.turn()
    assert bench.guest.recv(100) == encode(FrameKind.PING, 0), "the other way is open"
    assert len(bench.read(bench.holder)) == sent


@pytest.mark.parametrize("side", ["guest", "holder"])
def test_last_words_arrive_before_the_end(bench: Bench, side: str) -> None:
    speaker, hearer = (bench.guest, bench.holder) if side == "guest" else (bench.holder, bench.guest)
    said = encode(FrameKind.EVENT, 0, b"x" * 100_000)
    speaker.send(said)
    speaker.close()
    assert bench.read(hearer) == said
    assert bench.over()


def test_last_words_arrive_though_the_other_side_was_speaking(bench: Bench) -> None:
    said = encode(FrameKind.EVENT, 0, b"last")
    bench.guest.send(said)
    bench.guest.close()
    bench.holder.send(encode(FrameKind.PING, 0))
    assert bench.read(bench.holder) == said
    assert bench.over()


@pytest.mark.parametrize("how", ["end", "cut"])
def test_what_a_guest_had_said_when_it_ended_is_still_sent(bench: Bench, how: str) -> None:
    said = encode(FrameKind.EVENT, 0, b"x" * 50_000)
    bench.guest.send(said)
    getattr(bench.forwarding, how)()
    assert bench.read(bench.holder) == said
    assert bench.over(), "though the guest, or a child of it, still has its end"


@pytest.mark.parametrize("speaker", ["guest", "holder"])
@pytest.mark.parametrize("how", ["end", "cut"])
def test_who_speaks_on_without_end_does_not_keep_the_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str, speaker: str
) -> None:
    """A child of an ended guest has its end of the connection and writes, its holder reads, and both are faster than
    what is between them. The same the other way round."""
    source, target = (bench.guest, bench.holder) if speaker == "guest" else (bench.holder, bench.guest)
    receive, pieces = forwarding._Side.receive, 0

    def received(side: forwarding._Side, fds: list[int]) -> bytes:
        nonlocal pieces
        pieces += 1
        assert pieces < 100, "nothing else has its turn"
        with contextlib.suppress(BlockingIOError):
            target.recv(1 << 20)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            source.send(frame)
        return receive(side, fds)

    frame = encode(FrameKind.DATA, 1, bytes(30_000))
    if speaker == "holder":
        bench.fill(bench.guest)  # its holder does not read, so it is not over at once
    source.send(frame)
    monkeypatch.setattr(forwarding._Side, "receive", received)
    getattr(bench.forwarding, how)()
    bench.turn()
    assert pieces < 100
    assert bench.over() or (speaker, how) == ("holder", "end")


def test_a_holder_that_does_not_read_cannot_keep_an_ended_connection(bench: Bench) -> None:
    bench.fill(bench.guest)
    bench.forwarding.end()
    bench.turn()
    assert not bench.over()
    bench.clock.advance("3s")
    bench.turn()
    assert bench.over()


def test_a_peer_that_hangs_up_while_the_other_does_not_read_costs_no_time(bench: Bench) -> None:
    """epoll tells of it with every look."""
    bench.fill(bench.holder)
    bench.holder.close()
    bench.turn(20)
    assert bench.loop._epoll.poll(0) == []
    assert not bench.over()
    bench.read(bench.guest)
    assert bench.over()


@pytest.mark.parametrize("seed", range(12))
def test_a_conversation_arrives_as_it_was_said_however_it_is_cut(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    one, other = Link.connecting(), Link.accepting()
    sides = {"holder": (bench.holder, one), "guest": (bench.guest, other)}
    for sock in (bench.holder, bench.guest):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, chance.choice((4096, 20_000, 300_000)))
    said: dict[str, list[bytes]] = {"holder": [], "guest": []}
    heard: dict[str, list[bytes]] = {"holder": [], "guest": []}
    wanted, is_welcome = 150, False

    def listen(name: str) -> None:
        nonlocal is_welcome
        sock, link = sides[name]
        for happening in receive_some(sock, link, chance.choice((1, 7, 100, 32 * 1024, 1 << 18))):
            match happening:
                case Called(_, body, fds) | Event(_, body, fds) | Opened(_, body, fds) | Replied(_, body, fds):
                    content = body + b"".join(os.pread(fd, 100, 0) for fd in fds)
                    heard[name].append(content)
                    close_all(fds)
                case Over():
                    raise AssertionError(happening)
                case _:
                    pass

    while len(heard["holder"]) + len(heard["guest"]) < wanted:
        name = chance.choice(("holder", "guest"))
        sock, link = sides[name]
        if not is_welcome:
            send_some(bench.holder, one)
            bench.turn(2)
            receive_some(bench.guest, other)
            if other._greeted is not None:
                other.welcome()
                is_welcome = True
            continue
        if len(said["holder"]) + len(said["guest"]) < wanted and not link.has_output:
            body = chance.randbytes(chance.choice((0, 5, 1000, 40_000, 200_000)))
            marks = [chance.randbytes(8) for _ in range(chance.choice((0, 0, 1, 3, 16)))]
            link.event(body, [write_shared((memoryview(mark),))[0] for mark in marks])
            said["guest" if name == "holder" else "holder"].append(body + b"".join(marks))
        send_some(sock, link)
        bench.turn(chance.randrange(3))
        listen(chance.choice(("holder", "guest")))
    assert heard == said


def test_a_frame_with_descriptors_begins_a_piece_wherever_it_is_cut() -> None:
    frames = [encode(FrameKind.EVENT, 0, b"a" * 30, fds=[0] * count) for count in (0, 2, 0, 1)]
    whole = b"".join(frames)
    for cut in range(len(whole)):
        starts = FrameStarts()
        fds, pieces = [7, 8, 9], []
        for part in (whole[:cut], whole[cut:]):
            pieces += [(bytes(data), beside) for data, beside in starts.pieces(part, fds)]
        assert b"".join(data for data, _ in pieces) == whole
        assert [beside for _, beside in pieces if beside] == [[7, 8], [9]]
        assert [frames.index(data[:42]) for data, beside in pieces if beside and len(data) >= 42] in (
            [1, 3],
            [1],
            [3],
            [],
        )
