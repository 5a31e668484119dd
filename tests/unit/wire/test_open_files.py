"""Which processes have a device or a file of a file system open, and how they came by it."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.node.agent.clean_card import _handed_on
from sublet.wire.open_files import handed_on, open_files

ZERO = os.stat("/dev/zero").st_rdev
FULL = os.stat("/dev/full").st_rdev
"""The device that is handed on. Who has it is looked for on the whole machine, so no other file's tests do it, and
these run one after the other."""
pytestmark = pytest.mark.xdist_group("tests/unit/wire/test_open_files.py")
OPENS = """
import os, socket, sys
from sublet.node.sandbox import syscalls
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)
tree = syscalls.open_tree("/dev/full", recursive=False, follow=False)
syscalls.mount_fd_at(tree, sys.argv[2])
sock = socket.socket(fileno=int(sys.argv[1]))
socket.send_fds(sock, [b"x"], [os.open(sys.argv[2], os.O_RDWR)])
"""
"""As a guest: the node of a device, shown in mounts of its own, opened there and handed on."""


def mine(found: Iterator[tuple[int, str, int, str]]) -> list[str]:
    return [path for pid, _, _, path in found if pid == os.getpid()]


@pytest.fixture
def handed(tmp_path: Path) -> Iterator[int]:
    """A stand-in for the node of a card that came from a process with mounts of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can show a device in mounts of its own")
    (tmp_path / "node").touch()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-c", OPENS, str(theirs.fileno()), str(tmp_path / "node")]
        subprocess.run(argv, check=True, pass_fds=[theirs.fileno()], timeout=60)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    yield fds[0]
    os.close(fds[0])


def test_a_device_that_was_handed_on_is_told_from_one_that_was_opened(handed: int) -> None:
    own = os.open("/dev/full", os.O_RDWR)
    try:
        assert len(mine(handed_on(FULL))) == 1
        os.dup2(own, handed)
        assert mine(handed_on(FULL)) == []
        assert mine(open_files(FULL)) == ["/dev/full"]
    finally:
        os.close(own)


def test_a_card_is_not_clean_while_somebody_has_it_from_a_guest(handed: int) -> None:
    assert f"process {os.getpid()} (" in _handed_on("/dev/full")
    assert "was handed by a command of a lease" in _handed_on("/dev/full")
    assert _handed_on("/dev/random") == _handed_on("/dev/nvidia-none") == _handed_on("") == ""


def test_what_is_only_mapped_is_found(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root is told of files that are mapped")
    with open("/dev/zero", "r+b") as file:
        private = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE)
    assert mine(open_files(ZERO)) == ["/dev/zero"]
    private.close()
    assert mine(open_files(ZERO)) == []


def test_each_process_is_told_with_name_user_and_file(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        number = os.fstat(file.fileno()).st_dev
        found = [one for one in open_files(number) if one.pid == os.getpid()]
    name = Path("/proc/self/comm").read_text().strip()
    assert str(found[0]).startswith(f"process {os.getpid()} ({name}, user {os.geteuid()}) has /")
