"""One office at a time has a device: with real processes, two users, a holder that is killed, and somebody hostile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import pytest

from sublet.errors import InvalidRequest
from sublet.node.supervisor import locks
from sublet.node.supervisor.locks import (
    PREFIX,
    DeviceLocked,
    DeviceLocks,
    LockHolder,
    LockUnusable,
    all_held,
    lock_folder,
)
from tests.left_open import nothing_left_open

CARD: Final = "GPU-00000000-1111-2222-3333-444444444444"
NOBODY: Final = 65534
IS_ROOT: Final = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="another user can only be played by root")

PROGRAM: Final = """
import json, os, pwd, sys
from sublet.node.supervisor.locks import DeviceLocks, DeviceLocked
folder, home, user, roots = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if user >= 0:  # after the imports, which this user may have no right to read
    os.setgroups([]); os.setgid(user); os.setuid(user)
locks = DeviceLocks(home, since="noon", folder=folder, roots=roots or None)
for line in sys.stdin:
    what, device = line.split()
    try:
        locks.refresh() if what == "refresh" else getattr(locks, what)(device)
        answer = {"held": list(locks.held)}
    except DeviceLocked as error:
        answer = {"taken": error.message, "uid": error.holder.uid, "pid": error.holder.pid, "home": error.holder.home}
    print(json.dumps(answer), flush=True)
"""


def who_has(device: str, folder: str, roots: str | None) -> LockHolder | None:
    """The office that lends the device now, this process included."""
    return next((holder for holder in all_held(folder, roots) if holder.device == device), None)


class Office:
    """A process that takes devices when it is told to."""

    def __init__(self, folder: Path, home: str, user: int = -1, roots: str = "") -> None:
        words = [sys.executable, "-c", PROGRAM, str(folder), home, str(user), roots]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")

    def tell(self, what: str, device: str = CARD) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {device}\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def do(self, what: str, device: str = CARD) -> dict[str, Any]:
        self.tell(what, device)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder() -> Iterator[Path]:
    """As /run/lock is: everybody may make files, nobody may remove those of others."""
    import shutil
    import tempfile

    path = Path(tempfile.mkdtemp(dir="/tmp"))  # below tmp_path no other user could come near it
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def office(folder: Path) -> Iterator[Callable[..., Office]]:
    with contextlib.ExitStack() as stack:

        def start(home: str, user: int = -1) -> Office:
            started = Office(folder, home, user)
            stack.callback(started.close)
            return started

        yield start


@pytest.mark.parametrize("users", [(-1, -1), pytest.param((-1, NOBODY), marks=needs_root),
                                   pytest.param((NOBODY, -1), marks=needs_root)])  # fmt: skip
def test_one_gets_it_and_the_other_is_told_who(
    office: Callable[..., Office], users: tuple[int, int], folder: Path
) -> None:
    first, second = office("/srv/ada/sublet", users[0]), office("/srv/ben/sublet", users[1])
    assert first.do("take") == {"held": [CARD]}
    assert first.do("take") == {"held": [CARD]}, "what is ours already is taken again without harm"
    told = second.do("take")
    uid = os.geteuid() if users[0] < 0 else users[0]
    assert (told["uid"], told["pid"], told["home"]) == (uid, first.process.pid, "/srv/ada/sublet")
    assert told["taken"].startswith(f"{CARD} is lent by the office of ")
    assert f"(pid {first.process.pid}, /srv/ada/sublet, since noon)" in told["taken"]
    assert second.do("take", "GPU-other") == {"held": ["GPU-other"]}, "another device is another matter"
    assert first.do("unlock") == {"held": []}
    assert second.do("take") == {"held": ["GPU-other", CARD]}
    assert "taken" in first.do("take")


@pytest.mark.parametrize("user", [-1, pytest.param(NOBODY, marks=needs_root)])
def test_a_holder_that_is_killed_has_nothing_any_more(office: Callable[..., Office], folder: Path, user: int) -> None:
    first, second = office("/a", user), office("/b")
    first.do("take")
    assert "taken" in second.do("take")
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    assert second.do("take") == {"held": [CARD]}
    assert who_has(CARD, str(folder), None) == LockHolder(
        device=CARD, uid=os.geteuid(), pid=second.process.pid, home="/b", since="noon"
    )


def test_a_child_that_was_started_does_not_keep_the_device(folder: Path) -> None:
    """A guest outlives the supervisor for a moment; its lock does not."""
    locks = DeviceLocks("/a", folder=str(folder), roots=None)
    locks.take(CARD)
    child = subprocess.Popen(["sleep", "60"])
    try:
        locks.close()
        assert who_has(CARD, str(folder), None) is None
    finally:
        child.kill()
        child.wait()


def test_a_fork_that_forgets_leaves_the_device_to_its_parent(folder: Path) -> None:
    locks = DeviceLocks("/a", folder=str(folder), roots=None)
    locks.take(CARD)
    pid = os.fork()
    if pid == 0:
        locks.forget()
        os._exit(len(locks.held))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert locks.held == (CARD,)
    assert who_has(CARD, str(folder), None) is not None
    locks.close()
    assert who_has(CARD, str(folder), None) is None


@pytest.mark.parametrize("users", [(-1, -1), pytest.param((-1, NOBODY), marks=needs_root)])
def test_of_many_that_come_at_once_never_two_have_it(
    office: Callable[..., Office], users: tuple[int, int], folder: Path
) -> None:
    """And with two of them one always gets it: both let go and come again at moments of chance."""
    offices = [office(f"/{n}", users[n % 2]) for n in range(4)]
    for round_ in range(12):
        device = f"GPU-{round_}"
        for each in offices:
            each.tell("take", device)
        answers = [each.hear() for each in offices]
        assert sum("held" in answer for answer in answers) <= 1, answers
        for each in offices:
            each.do("unlock", device)
        assert who_has(device, str(folder), None) is None
        assert "held" in offices[round_ % 4].do("take", device)


# ------------------------------------------------------------------------------------------------ files that are traps


def own_path(folder: Path) -> Path:
    return folder / f"{PREFIX}{CARD}.{os.geteuid()}"


def test_a_link_under_our_name_is_neither_followed_nor_touched(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    own_path(folder).symlink_to(precious)
    with pytest.raises(LockUnusable, match="cannot be opened") as error:
        DeviceLocks("/a", folder=str(folder), roots=None).take(CARD)
    assert "removed" in error.value.do
    assert precious.read_text() == "keep"


def test_a_dangling_link_makes_no_file_elsewhere(folder: Path, tmp_path: Path) -> None:
    own_path(folder).symlink_to(tmp_path / "made")
    with pytest.raises(LockUnusable):
        DeviceLocks("/a", folder=str(folder), roots=None).take(CARD)
    assert not (tmp_path / "made").exists()


def test_a_second_name_for_a_file_of_ours_is_not_written_through(folder: Path) -> None:
    precious = folder / "precious"
    precious.write_text("keep")
    os.link(precious, own_path(folder))
    with pytest.raises(LockUnusable):
        DeviceLocks("/a", folder=str(folder), roots=None).take(CARD)
    assert precious.read_text() == "keep"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(folder: Path, make: Callable[[Path], None]) -> None:
    """A pipe would keep whoever opens it waiting."""
    make(own_path(folder))
    with pytest.raises(LockUnusable):
        DeviceLocks("/a", folder=str(folder), roots=None).take(CARD)


@needs_root
def test_a_file_of_somebody_else_under_our_name_is_named_and_left_alone(folder: Path) -> None:
    own_path(folder).write_text("squatted")
    os.chown(own_path(folder), NOBODY, NOBODY)
    with pytest.raises(LockUnusable, match="not a file of ours") as error:
        DeviceLocks("/a", folder=str(folder), roots=None).take(CARD)
    assert "belongs to nobody" in error.value.do
    assert own_path(folder).read_text() == "squatted"


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "socket", "unlocked", "nonsense"])
def test_traps_in_the_names_of_others_keep_nobody_from_the_device(folder: Path, tmp_path: Path, kind: str) -> None:
    path = folder / f"{PREFIX}{CARD}.4711"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "socket":
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(path))
            server.close()
        case "unlocked":
            path.write_text("1\n/srv/liar\nyesterday\n")
        case _:
            (folder / f"{PREFIX}{CARD}.x").write_text("")
            (folder / f"{PREFIX}{CARD}").write_text("")
    locks = DeviceLocks("/a", folder=str(folder), roots=None)
    locks.take(CARD)
    assert locks.held == (CARD,)
    locks.close()


@needs_root
def test_whoever_locks_it_for_nothing_is_named_and_what_his_file_says_is_made_harmless(folder: Path) -> None:
    """Who locked it is told by the kernel; the file's text is only his word."""
    import fcntl

    path = folder / f"{PREFIX}{CARD}.{NOBODY}"
    path.write_bytes(b"99999999999999\n/srv/ada\x1b[2J\xff\n" + b"x" * 10_000)
    os.chown(path, NOBODY, NOBODY)
    is_locked, is_over = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(is_over[1])
        os.setuid(NOBODY)
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
        os.write(is_locked[1], b".")
        os.read(is_over[0], 1)
        os._exit(0)
    os.read(is_locked[0], 1)
    with pytest.raises(DeviceLocked) as error:
        DeviceLocks("/a", folder=str(folder), roots=None).take(CARD)
    for end in (*is_locked, *is_over):
        os.close(end)
    os.waitpid(pid, 0)
    holder = error.value.holder
    assert (holder.uid, holder.pid) == (NOBODY, 0)
    assert str(holder).isprintable()
    assert len(str(holder)) < 1200
    assert "office of nobody" in error.value.message


def test_a_file_that_was_swept_away_is_made_anew_and_the_device_kept(folder: Path) -> None:
    locks = DeviceLocks("/a", folder=str(folder), roots=None)
    locks.take(CARD)
    os.utime(own_path(folder), (0, 0))
    assert locks.refresh() == {}
    assert time.time() - own_path(folder).stat().st_mtime < 3600, "nothing that sweeps old files finds it old"
    own_path(folder).unlink()
    assert who_has(CARD, str(folder), None) is None
    assert locks.refresh() == {}
    assert who_has(CARD, str(folder), None) is not None
    locks.close()


def test_what_came_into_other_hands_meanwhile_is_said(folder: Path, office: Callable[..., Office]) -> None:
    locks = DeviceLocks("/a", folder=str(folder), roots=None)
    locks.take(CARD)
    own_path(folder).unlink()
    other = office("/b")
    assert other.do("take") == {"held": [CARD]}
    lost = locks.refresh()[CARD]
    assert isinstance(lost, DeviceLocked)
    assert lost.holder.home == "/b"
    assert locks.held == ()


def test_looking_leaves_no_descriptor_and_a_file_that_others_can_see_and_not_write(folder: Path) -> None:
    mask = os.umask(0o077)
    try:
        with nothing_left_open():
            locks = DeviceLocks("/a", folder=str(folder), roots=None)
            for _ in range(3):
                locks.take(CARD)
                with pytest.raises(DeviceLocked):
                    DeviceLocks("/b", folder=str(folder), roots=None).take(CARD, tries=2)
                assert who_has(CARD, str(folder), None) is not None
                locks.close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(own_path(folder).stat().st_mode) == 0o644


@needs_root
def test_many_files_of_cards_that_are_gone_are_looked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was looked for in a list of all of them, so that ``sublet doctor`` took seconds where cards had changed."""
    roots, read = folder / "roots", list[str]()

    def opened(path: str, mode: str) -> BinaryIO:
        read.append(path)
        return Path(path).open("rb")

    def listed(path: str) -> list[str]:
        read.append(path)
        return [file.name for file in os.scandir(path)]

    taken = DeviceLocks("/srv/root", folder=str(folder), roots=str(roots))
    taken.take(CARD)
    for number in range(50):
        for where in (folder, roots):
            file = where / f"{PREFIX}GPU-{number}.0"
            file.touch(0o600)
            os.utime(file, (0, 0))
    monkeypatch.setattr("sublet.node.supervisor.locks.os.listdir", listed)
    monkeypatch.setattr(locks, "open", opened, raising=False)
    assert [(holder.device, holder.uid, holder.pid) for holder in all_held(str(folder), str(roots))] == [
        (CARD, 0, os.getpid())
    ]
    taken.close()
    assert sorted(set(read)) == sorted({str(folder), str(roots), "/proc/locks"})
    assert read.count(str(folder)) == read.count(str(roots)) == 1
    assert read.count("/proc/locks") <= 3 * locks.LOOKS, "for all of them, and for whose the one that is held is"


@pytest.mark.parametrize("device", ["", "../x", "a/b", ".x", "a b", "x" * 101, "a\n"])
def test_a_name_that_would_lead_elsewhere_is_refused(folder: Path, device: str) -> None:
    with pytest.raises(InvalidRequest):
        DeviceLocks("/a", folder=str(folder), roots=None).take(device)
    assert os.listdir(folder) == []


def test_the_folder_is_one_in_which_nobody_can_remove_what_is_not_his(tmp_path: Path) -> None:
    """Not one that belongs to a user, or lacks the sticky bit: there the first to come could undo the others' locks."""
    assert stat.S_IMODE(os.stat(lock_folder()).st_mode) & 0o1002
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(LockUnusable):
        lock_folder([str(loose), str(tmp_path / "none")])
    assert lock_folder([str(loose), "/tmp"]) == "/tmp"


@needs_root
def test_a_folder_of_a_user_is_none(tmp_path: Path) -> None:
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    assert lock_folder([str(sticky)]) == str(sticky)
    os.chown(sticky, NOBODY, NOBODY)
    with pytest.raises(LockUnusable):
        lock_folder([str(sticky)])
