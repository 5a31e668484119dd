"""Who may listen behind the path of a unix socket, and paths that are longer than an address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sublet.client import aio_transport
from sublet.client.office import answers
from sublet.errors import InvalidRequest
from sublet.wire import unix
from tests.left_open import nothing_left_open

ROOT = os.geteuid() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sublet-unix-") as made:
        yield Path(made)


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with unix.short_path(str(path)) as address:
        sock.bind(address)
    sock.listen(1)
    return sock


def test_a_socket_in_a_folder_of_ones_own_is_connected_to(folder: Path) -> None:
    with listening(folder / "s") as there, unix.connect(str(folder / "s"), timeout_s=1.0) as here:
        here.sendall(b"x")
        with there.accept()[0] as accepted:
            assert accepted.recv(1) == b"x"
        assert here.gettimeout() == 1.0
        assert not here.get_inheritable()


def test_a_path_longer_than_an_address_is_bound_and_connected_to(folder: Path) -> None:
    deep = folder / ("a" * 120) / ("é" * 60)
    deep.mkdir(parents=True)
    with listening(deep / "office.sock"), unix.connect(str(deep / "office.sock"), timeout_s=1.0):
        pass
    with nothing_left_open(), pytest.raises(ConnectionRefusedError):
        unix.connect(str(deep / "office.sock"), timeout_s=1.0)


def test_a_full_backlog_is_waited_for(folder: Path) -> None:
    """By a program and by asyncio: an office that many ask at once is no office that is gone."""
    path = str(folder / "s")
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(listening(folder / "s"))
        for _ in range(2):  # what listen(1) lets wait
            stack.enter_context(unix.connect(path, timeout_s=1.0))
        with pytest.raises(TimeoutError):
            unix.connect(path, timeout_s=0.05)
        with pytest.raises(TimeoutError):
            asyncio.run(open_in_time(path, 0.05))
        assert answers(folder / "s")

        for connect in (connect_in_time, lambda path: asyncio.run(open_in_time(path, 60.0))):
            room = threading.Timer(0.05, lambda: stack.enter_context(there.accept()[0]))
            room.start()
            connect(path)
            room.join()


def connect_in_time(path: str) -> None:
    unix.connect(path, timeout_s=60.0).close()


async def open_in_time(path: str, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        _, writer = await aio_transport.open_unix(path, named=False)
    writer.transport.abort()


@pytest.mark.parametrize("length", [106, 107, 108, 109])
def test_the_longest_address_is_used_whole(folder: Path, length: int) -> None:
    name = "s" * (length - len(os.fsencode(folder)) - 1)
    with listening(folder / name), unix.connect(str(folder / name), timeout_s=1.0):
        pass


def test_where_nothing_is_the_error_is_the_systems(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unix.connect(str(folder / "none" / "s"), timeout_s=1.0)
    with pytest.raises(FileNotFoundError):
        unix.connect(str(folder / "s"), timeout_s=1.0)


def as_link(folder: Path) -> Path:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    return folder / "link"


def as_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


def world_writable(folder: Path) -> Path:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    return folder / "open"


def sticky(folder: Path) -> Path:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o1777)
    return folder / "open"


def below_world_writable(folder: Path) -> Path:
    made = world_writable(folder) / "mine"
    made.mkdir(mode=0o700)
    return made


def through_a_link_to_world_writable(folder: Path) -> Path:
    below_world_writable(folder)
    (folder / "way").symlink_to(folder / "open")
    return folder / "way" / "mine"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (as_link, "is not a folder"),
        (as_file, "is not a folder"),
        (world_writable, "can be written by other users"),
        (sticky, "can be written by other users"),
        (below_world_writable, "which other users can write"),
        (through_a_link_to_world_writable, "which other users can write"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_folder_into_which_others_can_put_a_socket_is_refused(
    folder: Path, made: Callable[[Path], Path], why: str, named: bool
) -> None:
    found = made(folder)
    with pytest.raises(InvalidRequest, match=why) as refused:
        unix.connect(str(found / "s"), timeout_s=1.0, named=named)
    assert str(found) in refused.value.message
    assert refused.value.do


def test_a_folder_below_a_sticky_one_such_as_tmp_is_good(folder: Path) -> None:
    sticky(folder)
    (folder / "open" / "mine").mkdir(mode=0o700)
    assert unix.check_folder(str(folder / "open" / "mine")) == os.getuid()


@pytest.mark.skipif(not ROOT, reason="gives files to other users")
class TestOwners:
    def test_a_folder_of_another_user_is_refused_unless_it_was_named(self, folder: Path) -> None:
        os.chown(folder, 65534, 65534)
        with pytest.raises(InvalidRequest, match="not to you"):
            unix.check_folder(str(folder))
        assert unix.check_folder(str(folder), named=True) == 65534

    def test_a_folder_below_one_of_another_user_is_refused(self, folder: Path) -> None:
        (folder / "his" / "mine").mkdir(parents=True, mode=0o700)
        os.chown(folder / "his", 65534, 65534)
        for named in (False, True):
            with pytest.raises(InvalidRequest, match="which belongs to"):
                unix.check_folder(str(folder / "his" / "mine"), named=named)

    def test_a_listener_of_another_user_in_a_folder_of_ours_is_refused(self, folder: Path) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(folder / "s"))
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:  # who listens is who calls listen()
            os.setuid(65534)
            sock.listen(1)
            os.write(told, b"x")
            accepted, _ = sock.accept()
            os._exit(1 if accepted.recv(1) else 0)
        assert os.read(ready, 1)
        with pytest.raises(InvalidRequest, match="is served by a process of"):
            unix.connect(str(folder / "s"), timeout_s=1.0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it received nothing"
        for fd in (ready, told):
            os.close(fd)
        sock.close()


def test_the_folders_of_a_user_with_a_group_of_his_own_may_be_written_by_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a umask of 0002 every folder of such a user looks like this."""
    ours = os.stat(folder)
    uid, gid = 7001, ours.st_gid
    members: list[str] = []
    users = [SimpleNamespace(pw_name="ada", pw_uid=uid, pw_gid=gid)]
    monkeypatch.setattr("pwd.getpwuid", lambda _: users[0])
    monkeypatch.setattr("pwd.getpwall", lambda: users)
    monkeypatch.setattr("grp.getgrgid", lambda _: SimpleNamespace(gr_gid=gid, gr_mem=members))
    found = os.stat_result((0o040775, 0, 0, 2, uid, gid, 0, 0, 0, 0))
    assert unix._is_private_group(str(folder), found)
    members.append("ben")
    assert not unix._is_private_group(str(folder), found), "the group has another member"
    members.clear()
    users.append(SimpleNamespace(pw_name="eve", pw_uid=7002, pw_gid=gid))
    assert not unix._is_private_group(str(folder), found), "it is another user's group too"
    users.pop()
    users[0].pw_gid = gid + 1
    assert not unix._is_private_group(str(folder), found), "it is not this user's own group"
    users[0].pw_gid = gid
    assert not unix._is_private_group(str(folder), os.stat_result((0o040777, 0, 0, 2, uid, gid, 0, 0, 0, 0)))
    monkeypatch.setattr("os.getxattr", lambda *_: b"acl")
    assert not unix._is_private_group(str(folder), found), "an access list may name anybody"
