"""Which process is at the other end, and whether it lives: with the kernel's own pidfd, without it, and without any."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sublet.office.access import Origin
from sublet.office.api.processes import SO_PEERPIDFD, PeerConnection, ProcessFate, ProcessTable, _origin
from sublet.office.ledger.records import ProcessRecord
from tests.left_open import left_of, open_now

LATER_NS = 1 << 62
"""As if the connection was accepted after every process had begun."""
CONNECTS = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
if sys.argv[2] == "fork" and os.fork():
    os._exit(0)
sock.send(b"!")
sys.stdin.read()
"""


@dataclass
class Remote:
    """A program that has connected to us."""

    program: subprocess.Popen[bytes]
    sock: socket.socket

    @property
    def pid(self) -> int:
        return self.program.pid

    def end(self) -> None:
        self.program.kill()
        self.program.wait()


def connected(folder: Path, how: str = "stay") -> Iterator[Remote]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "sock"))
        listening.listen()
        words = [sys.executable, "-c", CONNECTS, str(folder / "sock"), how]
        program = subprocess.Popen(words, stdin=subprocess.PIPE)
        sock, _ = listening.accept()
        sock.recv(1)
        with sock:
            yield Remote(program, sock)
        program.kill()
        program.communicate()


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    yield from connected(tmp_path)


class Kernel:
    """A socket of a kernel that answers otherwise."""

    def __init__(self, sock: socket.socket, *, peer_pidfd: int | None = None, pid: int | None = None) -> None:
        self._sock = sock
        self._errno = peer_pidfd
        self._pid = pid
        self.asked = 0

    def getsockopt(self, level: int, option: int, size: int = 0, /) -> Any:
        if option == SO_PEERPIDFD:
            self.asked += 1
            if self._errno is not None:
                raise OSError(self._errno, os.strerror(self._errno))
        if option == socket.SO_PEERCRED and self._pid is not None:
            return self._pid.to_bytes(4, "little", signed=True) + bytes(8)
        return self._sock.getsockopt(level, option, size) if size else self._sock.getsockopt(level, option)


def refuse(number: int) -> Any:
    def opened(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return opened


def closed(found: int | ProcessFate) -> bool:
    """Whether it is a pidfd; it is not needed any more."""
    if isinstance(found, int):
        os.close(found)
    return isinstance(found, int)


@pytest.mark.parametrize("missing", [False, True], ids=["with SO_PEERPIDFD", "without it"])
def test_the_process_that_connected_is_known_until_it_ends(remote: Remote, missing: bool) -> None:
    """On a kernel with and without the option: found, watched, gone; and nothing is left open."""
    kernel = Kernel(remote.sock, peer_pidfd=errno.ENOPROTOOPT if missing else None)
    processes = ProcessTable()
    before = open_now()
    found = processes.of_peer(kernel, remote.pid, LATER_NS)
    assert found is not None
    assert found.pid == remote.pid
    assert found.start_ticks > 0
    assert processes.of_peer(kernel, remote.pid, LATER_NS) == found
    assert kernel.asked == (1 if missing else 2), "what the kernel does not have is not asked for again"
    assert closed(processes.open(found))
    assert processes.fate_of(found) is ProcessFate.ALIVE
    assert not left_of(open_now, before)
    remote.end()
    assert processes.open(found) is ProcessFate.GONE
    assert processes.fate_of(found) is ProcessFate.GONE
    assert not left_of(open_now, before)


def test_a_zombie_is_gone(remote: Remote) -> None:
    """It has ended; that nobody has asked for its exit status changes nothing."""
    processes = ProcessTable()
    found = processes.of_peer(remote.sock, remote.pid, LATER_NS)
    assert found is not None
    remote.program.kill()
    until = time.monotonic() + 100
    while processes.fate_of(found) is not ProcessFate.GONE:
        assert time.monotonic() < until
    assert os.path.exists(f"/proc/{remote.pid}")
    assert not closed(processes.open(found))


def test_a_peer_that_has_ended_by_now_is_a_process_that_is_gone(remote: Remote) -> None:
    """Its request is decided after its end: the lease is bound, and ends at once, and does not live its whole time."""
    remote.end()
    processes = ProcessTable()
    found = processes.of_peer(remote.sock, remote.pid, LATER_NS)
    assert found is not None
    assert processes.open(found) is ProcessFate.GONE


@pytest.mark.parametrize("missing", [False, True], ids=["with SO_PEERPIDFD", "without it"])
def test_a_fork_that_holds_the_connection_is_not_the_holder(tmp_path: Path, missing: bool) -> None:
    """The peer is who connected. It is gone, its child lives: the child does not keep the lease."""
    for remote in connected(tmp_path, "fork"):
        remote.program.wait()
        kernel = Kernel(remote.sock, peer_pidfd=errno.ENOPROTOOPT if missing else None)
        processes = ProcessTable()
        found = processes.of_peer(kernel, remote.pid, LATER_NS)
        assert found is not None
        assert processes.open(found) is ProcessFate.GONE
        assert processes.of_peer(kernel, remote.pid + 1, LATER_NS) is None, "the child says its own pid"


def test_a_reused_pid_is_another_process(remote: Remote) -> None:
    """The same pid with another start time: whoever had the lease is gone."""
    processes = ProcessTable()
    found = processes.of_peer(remote.sock, remote.pid, LATER_NS)
    assert found is not None
    before = msgspec.structs.replace(found, start_ticks=found.start_ticks - 1)
    assert processes.open(before) is ProcessFate.GONE
    assert processes.fate_of(before) is ProcessFate.GONE


def test_without_the_option_a_process_that_began_after_the_connection_is_not_its_peer(remote: Remote) -> None:
    """The pid was reused between the two: nobody is bound to a stranger."""
    kernel = Kernel(remote.sock, peer_pidfd=errno.ENOPROTOOPT)
    assert ProcessTable().of_peer(kernel, remote.pid, 1) is None
    assert ProcessTable(peer_pidfd=None).of_peer(remote.sock, remote.pid, 1) is None
    assert ProcessTable().of_peer(remote.sock, remote.pid, 1) is not None, "with it the kernel knows better"


@pytest.mark.parametrize("pid", [0, -1])
def test_a_peer_that_cannot_be_seen_is_no_process(remote: Remote, pid: int) -> None:
    """In another PID namespace the kernel says 0."""
    assert ProcessTable().of_peer(Kernel(remote.sock, pid=pid), remote.pid, LATER_NS) is None


def test_a_proxy_is_not_the_holder(remote: Remote) -> None:
    """Whoever made the connection has another pid than the one that asks: a tunnel, or a proxy before the office."""
    assert ProcessTable().of_peer(remote.sock, os.getpid(), LATER_NS) is None


def test_a_socket_of_another_kind_has_no_peer_process() -> None:
    with socket.socket(socket.AF_INET) as sock:
        assert ProcessTable().of_peer(sock, os.getpid(), LATER_NS) is None
        assert _origin(sock, shared=False) == Origin(shared=False), "nor a user"


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"boot_id": "another boot"}, ProcessFate.GONE),
        ({"namespaces": "pid:[1] time:[1]"}, ProcessFate.UNSEEN),
        ({"boot_id": "another boot", "namespaces": "pid:[1]"}, ProcessFate.GONE),
        ({"pid": 1 << 22}, ProcessFate.GONE),
    ],
    ids=["before a reboot", "seen from another namespace", "both", "no such pid"],
)
def test_what_a_restarted_office_finds(remote: Remote, changes: dict[str, object], fate: ProcessFate) -> None:
    processes = ProcessTable()
    found = processes.of_peer(remote.sock, remote.pid, LATER_NS)
    assert found is not None
    assert processes.open(msgspec.structs.replace(found, **changes)) is fate


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_descriptors_nothing_is_bound_and_that_is_said_once(
    remote: Remote, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends by its time to live then. What is bound already is looked at by its start time."""
    found = ProcessTable().of_peer(remote.sock, remote.pid, LATER_NS)
    assert found is not None
    processes = ProcessTable(pidfd_open=refuse(number))
    kernel = Kernel(remote.sock, peer_pidfd=number)
    with caplog.at_level(logging.WARNING, "sublet.office"):
        assert processes.of_peer(kernel, remote.pid, LATER_NS) is None
        assert processes.of_peer(kernel, remote.pid, LATER_NS) is None
        assert processes.open(found) is ProcessFate.ALIVE
        remote.end()
        assert processes.open(found) is ProcessFate.GONE
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "open files" in caplog.text


def test_what_cannot_be_read_for_want_of_descriptors_is_taken_to_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ProcessRecord(pid=os.getpid(), start_ticks=1, boot_id="b", namespaces="n")
    processes = ProcessTable()
    monkeypatch.setattr(os, "open", refuse(errno.EMFILE))
    assert processes.fate_of(found) is ProcessFate.ALIVE


def test_a_process_that_proc_hides_is_not_seen(remote: Remote, tmp_path: Path) -> None:
    """As with the mount option hidepid: there is a pidfd, and no file. It lives, so nothing ends with it."""
    hides = ProcessTable(str(tmp_path))
    assert hides.of_peer(remote.sock, remote.pid, LATER_NS) is None
    record = ProcessRecord(pid=remote.pid, start_ticks=5, boot_id="", namespaces=" ")
    assert hides.open(record) is ProcessFate.UNSEEN


def test_a_name_with_brackets_and_a_first_thread_that_has_ended(tmp_path: Path) -> None:
    """The fields count from the last bracket; a process whose other threads work is no zombie."""
    (tmp_path / "7").mkdir()
    stat = "7 (a) b (c) {state} 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 4242 1 1"
    for state, threads, gone in (("S", 1, False), ("Z", 1, True), ("Z", 3, False), ("X", 1, True)):
        (tmp_path / "7" / "stat").write_text(stat.format(state=state, threads=threads))
        found = ProcessTable(str(tmp_path)).stat(7)
        assert found is not None
        assert (found.start_ticks, found.is_gone) == (4242, gone)


def test_a_connection_is_asked_once(remote: Remote) -> None:
    """And again only for who says another pid, or was not found."""
    kernel = Kernel(remote.sock)
    peer = PeerConnection(ProcessTable(), kernel, LATER_NS)
    assert peer.process(remote.pid) == peer.process(remote.pid)
    assert kernel.asked == 1
    assert peer.process(remote.pid + 1) is None
    assert peer.process(remote.pid) is not None
    assert kernel.asked == 2
