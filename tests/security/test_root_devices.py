"""An ordinary user keeps root's office from no device: neither by a lock of its own, nor by one on root's files."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.node.supervisor import locks
from sublet.node.supervisor.locks import (
    PREFIX,
    TAKEOVER_S,
    DeviceLocked,
    DeviceLocks,
    all_held,
    counts,
    may_open,
    noted_by_root,
)
from tests.integration.test_device_locks import Office

CARD = "GPU-00000000-1111-2222-3333-444444444444"
STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user can only be played by root")


@pytest.mark.parametrize(
    ("other", "mine", "is_noted", "opens", "waited_s", "expected"),
    [
        (0, 0, True, True, 1e9, True),
        (0, 1000, False, True, 0, True),
        (1000, 0, True, True, 0, True),
        (1000, 0, True, True, TAKEOVER_S - 1, True),
        (1000, 0, True, True, TAKEOVER_S, False),
        (1000, 0, True, False, 0, False),
        (1000, 0, False, True, 1e9, True),
        (1000, 1001, False, True, 1e9, True),
        (1000, 1001, False, False, 0, False),
        (1000, 1000, False, False, 0, True),
    ],
)
def test_whose_lock_counts_for_whom(
    other: int, mine: int, is_noted: bool, opens: bool, waited_s: float, expected: bool
) -> None:
    assert counts(other, mine=mine, is_noted=is_noted, may_open=opens, waited_s=waited_s) is expected


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/tmp"))  # below tmp_path no other user could come near it
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def stranger(folder: Path) -> Iterator[Callable[[str], Office]]:
    started: list[Office] = []

    def start(home: str) -> Office:
        started.append(Office(folder, home, STRANGER, f"{folder}/roots"))
        return started[-1]

    yield start
    for one in started:
        one.close()


def of_root(folder: Path, clock: Clock) -> DeviceLocks:
    return DeviceLocks("/srv/root", folder=str(folder), roots=f"{folder}/roots", clock=clock)


@needs_root
def test_root_takes_a_device_that_a_user_locked_first_after_the_stated_time(
    folder: Path, stranger: Callable[[str], Office]
) -> None:
    him, clock = stranger("/srv/him"), Clock()
    assert him.do("take") == {"held": [CARD]}
    root = of_root(folder, clock)
    with pytest.raises(DeviceLocked, match=r"root's office takes it over within 30 s") as error:
        root.take(CARD, tries=1)
    assert error.value.holder.uid == STRANGER
    clock.now += TAKEOVER_S - 0.1
    with pytest.raises(DeviceLocked):
        root.take(CARD, tries=1)
    clock.now += 0.1
    root.take(CARD, tries=1)
    assert root.held == (CARD,)
    assert root.refresh() == {}
    assert him.do("refresh") == {"held": []}, "an office that works gives it up"
    told = him.do("take")
    assert (told["uid"], told["pid"]) == (0, os.getpid())
    root.close()
    assert him.do("take") == {"held": [CARD]}


@needs_root
def test_a_user_whose_office_works_gives_it_up_before_that(folder: Path, stranger: Callable[[str], Office]) -> None:
    him, clock = stranger("/srv/him"), Clock()
    him.do("take")
    root = of_root(folder, clock)
    with pytest.raises(DeviceLocked):
        root.take(CARD, tries=1)
    assert him.do("refresh") == {"held": []}
    root.take(CARD, tries=1)
    assert [(holder.device, holder.uid) for holder in all_held(str(folder), f"{folder}/roots")] == [(CARD, 0)]
    root.close()


@needs_root
@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_lock_on_the_file_of_root_keeps_root_from_nothing(folder: Path, kind: int) -> None:
    """To lock a file it is enough to be allowed to read it. Who did it may be gone, too, and a child goes on."""
    own = folder / f"{PREFIX}{CARD}.0"
    own.write_text("")
    own.chmod(0o644)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        fcntl.flock(os.open(own, os.O_RDONLY), kind)
        if os.fork() == 0:
            os.close(go[1])
            os.write(ready[1], b".")
            os.read(go[0], 1)
        os._exit(0)
    os.waitpid(child, 0)
    os.read(ready[0], 1)
    try:
        clock = Clock()
        root = of_root(folder, clock)
        with pytest.raises(DeviceLocked):
            root.take(CARD, tries=1)
        clock.now += TAKEOVER_S
        root.take(CARD, tries=1)
        assert root.refresh() == {}
        assert root.held == (CARD,)
        noted = Path(f"{folder}/roots/{PREFIX}{CARD}.0")
        assert stat.S_IMODE(noted.stat().st_mode) == 0o600, "nobody else can open it, so nobody else can lock it"
        root.close()
    finally:
        for end in (*ready, *go):
            os.close(end)


@needs_root
def test_a_lock_of_a_user_who_may_not_open_the_card_counts_for_nobody(
    folder: Path, stranger: Callable[[str], Office], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = tmp_path / "nvidia0"
    node.write_text("")
    node.chmod(0o660)
    assert may_open(0, CARD, str(tmp_path))
    assert not may_open(STRANGER, CARD, str(tmp_path))
    assert may_open(STRANGER, "host-lab-0", str(tmp_path)), "a device without a node is anybody's"
    node.chmod(0o666)
    assert may_open(STRANGER, CARD, str(tmp_path))
    node.chmod(0o660)
    monkeypatch.setattr(locks.may_open, "__defaults__", (str(tmp_path),))
    stranger("/srv/him").do("take")
    root = of_root(folder, Clock())
    root.take(CARD, tries=1)
    root.close()


@needs_root
@pytest.mark.parametrize("spoil", ["another owner", "open to all", "a link"])
def test_a_folder_of_claims_that_others_can_write_is_not_believed(folder: Path, tmp_path: Path, spoil: str) -> None:
    roots = folder / "roots"
    roots.mkdir(mode=0o755)
    with (roots / f"{PREFIX}{CARD}.0").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert noted_by_root(CARD, str(roots)) is not None
        if spoil == "another owner":
            os.chown(roots, STRANGER, STRANGER)
        elif spoil == "open to all":
            roots.chmod(0o777)
        else:
            roots.rename(folder / "real")
            roots.symlink_to(folder / "real")
        assert noted_by_root(CARD, str(roots)) is None


def test_a_lock_that_the_kernels_list_has_skipped_is_found_by_another_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list comes in pieces, and while others unlock something it lacks a line now and then."""
    file = folder / "file"
    file.touch()
    found, looks = file.stat(), list[str]()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    other = b"1: POSIX  ADVISORY  WRITE 7 00:01:7 0 EOF\n"

    def read(path: str, mode: str) -> io.BytesIO:
        looks.append(path)
        whole = other + f"2: FLOCK  ADVISORY  WRITE 4711 {place} 0 EOF\n".encode()
        return io.BytesIO(other if len(looks) < 3 else whole)

    monkeypatch.setattr(locks, "open", read, raising=False)
    assert locks._locker(found) == 4711
    assert looks == ["/proc/locks"] * 3


@needs_root
def test_a_claim_that_nobody_can_see_locked_counts_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container ``/proc/locks`` does not name the process."""
    root = of_root(folder, Clock())
    root.take(CARD, tries=1)
    monkeypatch.setattr(locks, "_locker", lambda found: None)
    roots = f"{folder}/roots"
    assert noted_by_root(CARD, roots) is not None
    os.utime(f"{roots}/{PREFIX}{CARD}.0", (0, 0))
    assert noted_by_root(CARD, roots) is None
    root.refresh()
    assert noted_by_root(CARD, roots) is not None, "an office that works touches it every few seconds"
    root.close()
