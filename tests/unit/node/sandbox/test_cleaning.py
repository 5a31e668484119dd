"""Removing what a hostile guest left: trees made to get out, to hold on, or to take for ever."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.node.sandbox import cleaning
from sublet.node.sandbox.cleaning import remove_tree
from tests.left_open import nothing_left_open
from tests.traces import LETS_GO

ORDINARY = 65534


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """What must be there afterwards, untouched."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("kept")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "precious").write_text("kept")
    yield folder
    assert (folder / "precious").read_text() == "kept"
    assert (folder / "deeper" / "precious").read_text() == "kept"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


def test_an_ordinary_tree_goes(tree: Path) -> None:
    for name in ("a/b/c", "a/d", "e"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_text("x")
    left = remove_tree(str(tree))
    assert left.is_clean
    assert (left.removed, str(left)) == (9, "nothing is left")
    assert not tree.exists()


def test_a_folder_that_is_not_there_is_clean(tmp_path: Path) -> None:
    assert remove_tree(str(tmp_path / "nothing")).is_clean


def test_the_top_may_stay(tree: Path) -> None:
    (tree / "a").mkdir()
    assert remove_tree(str(tree), keep_top=True).is_clean
    assert list(tree.iterdir()) == []


def test_links_are_removed_and_not_followed(tree: Path, outside: Path) -> None:
    (tree / "folder").symlink_to(outside)
    (tree / "file").symlink_to(outside / "precious")
    (tree / "up").symlink_to("..")
    (tree / "loop").symlink_to("loop")
    os.link(outside / "precious", tree / "hard")
    assert remove_tree(str(tree)).is_clean
    assert not tree.exists()


def test_a_top_that_became_a_link_is_removed_as_a_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "top").symlink_to(outside)
    assert remove_tree(str(tmp_path / "top")).is_clean
    assert not (tmp_path / "top").is_symlink()


def test_things_that_are_neither_file_nor_folder_go(tree: Path) -> None:
    import socket

    os.mkfifo(tree / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tree / "s"))
    assert remove_tree(str(tree)).is_clean


@pytest.mark.parametrize("name", ["-rf", "a\nb", " ", "...", "\udcff\udcfe", "x" * 255, "'; rm -rf *'", "%s{0}"])
def test_names_are_only_names(tree: Path, name: str) -> None:
    (tree / name).mkdir()
    (tree / name / name).write_text("x")
    assert remove_tree(str(tree)).is_clean


def clean_without_rights(folder: Path) -> str:
    """``remove_tree`` by an ordinary user, who owns the folder and the one above it, in a child."""
    if os.geteuid() != 0:
        return str(remove_tree(str(folder), keep_top=True))
    for where, folders, files in os.walk(folder.parent):
        for name in (".", *folders, *files):
            os.chown(Path(where) / name, ORDINARY, ORDINARY)
    program = (
        "import os, sys\n"
        "from sublet.node.sandbox import cleaning, syscalls\n"
        f"above = os.open({str(folder.parent)!r}, os.O_PATH)\n"  # on the way to it there may be folders of root's alone
        f"os.setgid({ORDINARY}); os.setuid({ORDINARY}); syscalls.set_dumpable(True)\n"
        f"print(cleaning.remove_tree({folder.name!r}, dir_fd=above, keep_top=True))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr


def test_folders_that_forbid_everything_go_without_rights(tree: Path) -> None:
    top = tree / "top"
    for name in ("shut/inner", "read-only"):
        (top / name).mkdir(parents=True)
        (top / name / "file").write_text("x")
    (top / "shut" / "inner").chmod(0)
    (top / "shut").chmod(0)
    (top / "read-only").chmod(0o555)
    assert clean_without_rights(top) == "nothing is left"
    assert list(top.iterdir()) == []


@pytest.mark.needs("chattr")
def test_unchangeable_files_go_as_root_or_are_named(tree: Path) -> None:
    (tree / "a").mkdir()
    for path in (tree / "fixed", tree / "a" / "fixed"):
        path.write_text("x")
    set_flag = subprocess.run(["chattr", "+i", str(tree / "fixed"), str(tree / "a" / "fixed"), str(tree / "a")])
    left = remove_tree(str(tree))
    if set_flag.returncode == 0:
        assert left.is_clean, left
        assert not tree.exists()


def test_a_tree_deeper_than_paths_are_long_goes(tree: Path) -> None:
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=fd)
        below = os.open("deep", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    with nothing_left_open():
        left = remove_tree(str(tree))
    assert left.is_clean, left
    assert not tree.exists()


def test_the_count_is_bounded_and_the_next_call_goes_on(tree: Path) -> None:
    for n in range(100):
        (tree / f"f{n}").write_text("")
    left = remove_tree(str(tree), count_max=40)
    assert left.is_cut_short
    assert not left.is_clean
    assert "too much" in str(left)
    assert len(list(tree.iterdir())) == 60
    assert remove_tree(str(tree), count_max=40).is_cut_short
    assert remove_tree(str(tree), count_max=40).is_clean


def test_names_that_come_again_as_fast_as_they_go_end_the_call(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "first").mkdir()
    real, made = os.listdir, itertools.count()

    def look_and_plant(folder: Any) -> list[str]:
        found = real(folder)
        (tree / f"again{next(made)}").mkdir()
        return found

    monkeypatch.setattr(os, "listdir", look_and_plant)
    left = remove_tree(str(tree), count_max=10_000)
    monkeypatch.undo()
    assert left.is_cut_short
    assert left.removed < 100
    assert remove_tree(str(tree)).is_clean


@pytest.mark.needs("unshare")
@pytest.mark.parametrize("same_file_system", [True, False])
def test_it_does_not_cross_a_mount(tree: Path, outside: Path, same_file_system: bool) -> None:
    """In a namespace of mounts of its own, so that a test that dies leaves none."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    (tree / "mounted").mkdir()
    (tree / "file").write_text("x")
    how = f"mount --bind {outside} {tree}/mounted" if same_file_system else f"mount -t tmpfs none {tree}/mounted"
    program = "import sys; from sublet.node.sandbox.cleaning import remove_tree; print(remove_tree(sys.argv[1]))"
    script = LETS_GO + f'{how} && touch {tree}/mounted/here && "$0" -c "$1" {tree} && test -e {tree}/mounted/here'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mounted" in done.stdout
    assert not (tree / "file").exists()


class Swapping:
    """Stands for ``os``, and just before one call of it a folder changes places with a link that leads outside."""

    def __init__(self, swap: Callable[[], None], before: int) -> None:
        self._swap, self._before, self.calls = swap, before, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real) or isinstance(real, type):
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            if self.calls == self._before:
                self._swap()
            self.calls += 1
            return real(*arguments, **options)

        return call


def by_names(system: Any, path: str) -> None:
    """How it must not be done: every step looks the name up again."""
    for name in system.listdir(path):
        below = f"{path}/{name}"
        if stat.S_ISDIR(system.lstat(below).st_mode):
            by_names(system, below)
            system.rmdir(below)
        else:
            system.unlink(below)


def hostile_tree(tree: Path, outside: Path) -> Callable[[], None]:
    for name in ("a/deeper", "b"):
        (tree / name).mkdir(parents=True)
        (tree / name / "precious").write_text("the guest's")
    (tree / "a" / "precious").write_text("the guest's")

    def swap() -> None:
        if (tree / "a").exists():
            os.rename(tree / "a", tree / "was-a")
            os.symlink(outside, tree / "a")

    return swap


def test_a_swap_at_any_moment_gets_nobody_out(tree: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = 0, 1
    while before < calls:
        swapping = Swapping(hostile_tree(tree, outside), before)
        monkeypatch.setattr(cleaning, "os", swapping)
        remove_tree(str(tree))
        monkeypatch.setattr(cleaning, "os", os)
        calls = swapping.calls
        assert (outside / "precious").exists(), f"swapped before call {before}"
        assert (outside / "deeper" / "precious").exists(), f"swapped before call {before}"
        assert remove_tree(str(tree)).is_clean
        before += 1
    assert before > 20


def test_the_same_swaps_are_the_end_of_who_goes_by_names(tmp_path: Path) -> None:
    """The control: else the test above would prove nothing."""
    lost = 0
    for before in range(20):
        tree, outside = tmp_path / f"tree{before}", tmp_path / f"outside{before}"
        outside.mkdir()
        (outside / "precious").write_text("kept")
        with contextlib.suppress(OSError):
            by_names(Swapping(hostile_tree(tree, outside), before), str(tree))
        lost += not (outside / "precious").exists()
    assert lost


def after_each_look(monkeypatch: pytest.MonkeyPatch, plant: Callable[[int], object]) -> None:
    """Whenever the names in a folder that is being removed have been read, this is done in it."""
    real = os.listdir

    def listdir(place: Any = ".") -> list[str]:
        names: list[str] = real(place)
        if isinstance(place, int):
            plant(place)
        return names

    monkeypatch.setattr("os.listdir", listdir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root removes folders of other users")
def test_another_user_cannot_go_on_putting_more_into_what_root_removes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b", "c"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").touch()
    for path in (tree, *tree.rglob("*")):
        os.chown(path, ORDINARY, ORDINARY)
    refused = []

    def plant(folder: int) -> None:
        os.seteuid(ORDINARY)
        try:
            os.mkdir("more", dir_fd=folder)
        except PermissionError:
            refused.append(folder)
        finally:
            os.seteuid(0)

    after_each_look(monkeypatch, plant)
    assert remove_tree(str(tree)).is_clean
    assert refused
    assert not tree.exists()


@pytest.mark.parametrize("depth", [1, 40])
def test_our_own_user_who_puts_more_there_for_ever_is_left_with_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """However deep it is: the same call again goes on, and an end comes to each."""
    top, numbers = tree.stat(), itertools.count()

    def plant(folder: int) -> None:
        if os.path.samestat(os.fstat(folder), top):
            os.makedirs(f"/proc/self/fd/{folder}/{next(numbers)}/{'d/' * depth}")

    (tree / "first").touch()
    with monkeypatch.context() as patch:
        after_each_look(patch, plant)
        left = remove_tree(str(tree), count_max=1000)
    assert left.is_cut_short
    assert "more was put there meanwhile, or there was too much to remove at once" in str(left)
    assert remove_tree(str(tree)).is_clean


@pytest.mark.slow
def test_swapping_folders_for_links_gets_nobody_out(tree: Path, outside: Path) -> None:
    """A thread swaps a folder with a link to the outside for as long as it is being removed, again and again. Each
    removal begins amid the swaps, however the machine shares its time between the two."""
    stop = threading.Event()
    swaps = tries = 0

    def swap() -> None:
        nonlocal swaps, tries
        os.makedirs(tree.parent / "spare", exist_ok=True)
        while not stop.is_set():
            for name in ("a", "b", "deeper"):
                tries += 1
                aside = tree.parent / "spare" / f"{name}{tries}"  # where nothing was left by a swap that went wrong
                try:
                    os.makedirs(tree / name / "deeper", exist_ok=True)
                    (tree / name / "precious").touch()
                    os.rename(tree / name, aside)
                    os.symlink(outside, tree / name)
                    os.unlink(tree / name)
                    os.rename(aside, tree / name)
                    os.symlink(outside, tree / name / "link")
                    swaps += 1
                except OSError:
                    continue

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        rounds = 0
        while rounds < 100 or swaps < 50:
            seen = tries
            while tries < seen + 2:
                time.sleep(0)
            remove_tree(str(tree), keep_top=True)
            rounds += 1
    finally:
        stop.set()
        thread.join()
    assert remove_tree(str(tree)).is_clean
