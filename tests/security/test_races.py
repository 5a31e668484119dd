"""Names that are swapped all the time, while root goes along them: nothing outside is read, changed or removed.

``SUBLET_RACE_S=60`` races so long each, instead of two seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from sublet.client.guests import start_spec
from sublet.errors import SubletError, Unsupported
from sublet.node.sandbox import cleaning
from sublet.node.sandbox.cleaning import remove_tree
from sublet.node.sandbox.walls import prefix_of
from sublet.wire.guests import GuestSpec
from sublet.wire.unix import replaceable
from tests.security.conftest import Place
from tests.security.kernels import KERNELS, on_kernel

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")

RACE_S: Final = float(os.environ.get("SUBLET_RACE_S", "2"))
REMOVED_MIN: Final = 200
"""Names that a race removes, however little of the machine it has."""
STRANGER: Final = 65_534
SECRET: Final = "in a folder that only root may enter"
EXCHANGE: Final = 2
HERE: Final = -100
RENAMEAT2: Final = {"x86_64": 316, "aarch64": 276}[os.uname().machine]


def exchange(one: str, other: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(RENAMEAT2, HERE, one.encode(), HERE, other.encode(), EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), "they were not exchanged")


@contextlib.contextmanager
def meanwhile(*acts: Callable[[], None]) -> Iterator[None]:
    """Another user does these things over and over, each in a process of its own."""
    pids = []
    for act in acts:
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(STRANGER, STRANGER, STRANGER)
                os.setresuid(STRANGER, STRANGER, STRANGER)
                while os.getppid() != 1:
                    with contextlib.suppress(OSError):
                        act()
            finally:
                os._exit(1)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sublet-race-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_an_interpreter_that_turns_into_another_folder_shows_nothing_of_it(place: Place, folder: Path) -> None:
    """Checked and mounted is the same folder, and only one that no other user can change."""
    closed = folder / "closed"
    (closed / "inside").mkdir(parents=True)
    (closed / "inside" / "notes").write_text(SECRET)
    closed.chmod(0o700)
    his = folder / "his"
    (his / "there" / "bin").mkdir(parents=True)
    (his / "there" / "bin" / "python3").symlink_to("/usr/bin/python3")
    (his / "there" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (his / "link").symlink_to(closed / "inside")
    for path in (his, *his.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    there, link = str(his / "there"), str(his / "link")
    script = f"cat {there}/notes {closed}/inside/notes; ls {there} {closed}"
    refused, started, until_s = 0, 0, time.monotonic() + RACE_S
    with place.ben.block("1MiB", ttl="1h") as lease, meanwhile(lambda: exchange(there, link)):
        while time.monotonic() < until_s or refused + started < 10:
            try:
                guest = start_spec(lease, GuestSpec(argv=("sh", "-c", script), cwd="/", python=f"{there}/bin/python3"))
            except SubletError:
                refused += 1
            else:
                started += 1
                guest.wait(timeout=60)
                assert SECRET not in b"".join(piece.data for piece in guest.output()).decode()
    print(f"{refused} refused, {started} started in {RACE_S:g} s")


def test_a_folder_that_becomes_a_link_while_it_is_looked_at_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment that the race above is for, held."""
    for name in ("there", "closed"):
        (folder / name).mkdir()
        (folder / name / "pyvenv.cfg").write_text("")
    (folder / "link").symlink_to("closed")
    for name in ("there", "link"):
        os.chown(folder / name, STRANGER, STRANGER, follow_symlinks=False)
    looked: list[str] = []

    def swapped(path: str, owners: set[int]) -> str:
        looked.append(path)
        exchange(f"{folder}/there", f"{folder}/link")
        try:
            return replaceable(path, owners)
        finally:
            exchange(f"{folder}/there", f"{folder}/link")

    monkeypatch.setattr("sublet.node.sandbox.walls.replaceable", swapped)
    with pytest.raises(Unsupported, match="which belongs to"):
        prefix_of(f"{folder}/there/bin/python3", ())
    assert looked


def facts(top: Path) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for at, _, files in sorted(os.walk(top)):
        for path in (at, *(os.path.join(at, name) for name in sorted(files))):
            one = os.lstat(path)
            content = Path(path).read_bytes() if stat.S_ISREG(one.st_mode) else sorted(os.listdir(path))
            found.append((path, one.st_uid, one.st_gid, one.st_mode, one.st_nlink, content))
    return found


@pytest.mark.usefixtures("kernel")
def test_a_folder_that_becomes_a_link_while_it_is_removed_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment that the race below is for, held."""
    canary, top = folder / "canary", folder / "top"
    for path in (canary, top / "there"):
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "file").write_text("root only")
    (folder / "link").symlink_to(canary)
    before, opened, real = facts(canary), list[str](), cleaning._open_folder

    def swapped(name: str, parent: int) -> int:
        opened.append(name)
        if name == "there" and opened.count(name) == 1:
            exchange(f"{top}/there", f"{folder}/link")
        return real(name, parent)

    monkeypatch.setattr(cleaning, "_open_folder", swapped)
    remove_tree(str(top))
    assert "there" in opened
    assert facts(canary) == before


def test_a_tree_that_is_being_swapped_is_removed_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = folder / "canary"
    for number in range(20):
        (canary / f"d{number}").mkdir(parents=True)
        (canary / f"d{number}" / "file").write_text("root only")
    before = facts(canary)
    top = folder / "top"
    top.mkdir()
    os.chown(top, STRANGER, STRANGER)
    monkeypatch.chdir("/")

    def plant() -> None:
        for number in range(20):
            with contextlib.suppress(OSError):
                os.makedirs(f"{top}/a{number}/b/c")
            with contextlib.suppress(OSError):
                os.symlink(canary, f"{top}/l{number}")

    def swap() -> None:
        for number in range(20):
            with contextlib.suppress(OSError):
                exchange(f"{top}/a{number}", f"{top}/l{number}")

    def move() -> None:
        for number in range(20):
            with contextlib.suppress(OSError):
                os.rename(f"{top}/a{number}/b", f"{top}/a{(number + 1) % 20}/moved{number}")
            with contextlib.suppress(OSError):
                os.symlink(f"{canary}/d{number}", f"{top}/a{number}/b")

    rounds, removed, until_s = 0, 0, time.monotonic() + RACE_S
    with meanwhile(plant, swap, move):
        while time.monotonic() < until_s or removed < REMOVED_MIN:
            with on_kernel(KERNELS[rounds % 2]):
                removed += remove_tree(str(top), keep_top=True).removed
            rounds += 1
            assert rounds % 50 or facts(canary) == before
    print(f"{rounds} rounds, {removed} names removed in {RACE_S:g} s")
    assert facts(canary) == before
    assert remove_tree(str(top)).is_clean
    assert not top.exists()
