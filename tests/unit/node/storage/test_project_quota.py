"""Quotas of projects: against a kernel that is pretended to, and for real where this one has them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.node.storage import project_quota
from sublet.node.storage.project_quota import limit, why_not

MIB = 1 << 20


class Pretended:
    """One file system: which folder is in which project, and what each project may have and has."""

    def __init__(self, fails: str = "", number: int = errno.EPERM) -> None:
        self.projects: dict[int, int] = {}
        self.flags: dict[int, int] = {}
        self.limits: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.done: list[str] = []
        self._fails, self._number = fails, number

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what == self._fails:
            raise OSError(self._number, os.strerror(self._number))

    def attributes(self, fd: int) -> bytes:
        self._do("attributes")
        inode = os.fstat(fd).st_ino
        return project_quota._ATTRIBUTES.pack(self.flags.get(inode, 1), 0, 0, self.projects.get(inode, 0), 0, b"\7" * 8)

    def set_attributes(self, fd: int, attributes: bytes) -> None:
        self._do("join")
        inode = os.fstat(fd).st_ino
        self.flags[inode], _, _, self.projects[inode], _, rest = project_quota._ATTRIBUTES.unpack(attributes)
        assert rest == b"\7" * 8, "what is not ours stays as it is"

    def quota(self, fd: int, command: int, project: int, limits: bytes) -> bytes:
        if command == project_quota._SET:
            self._do("limit")
            hard, *_, meant = project_quota._LIMITS.unpack(limits)
            assert meant == 1
            self.limits[project] = hard * 1024
            return limits
        self._do("ask")
        if project not in self.limits and project not in self.used:
            raise FileNotFoundError(errno.ENOENT, "none")
        return project_quota._LIMITS.pack(0, 0, self.used.get(project, 0), 0, 0, 0, 0, 0, 0)


def test_a_folder_gets_a_project_of_its_own_and_that_the_limit(tmp_path: Path) -> None:
    kernel = Pretended()
    assert limit(str(tmp_path), 5 * MIB + 1, kernel) == ""
    inode = tmp_path.stat().st_ino
    project = kernel.projects[inode]
    assert project_quota._is_ours(project)
    assert kernel.limits == {project: 5 * MIB + 1024}, "not a byte less than leased"
    assert kernel.flags[inode] == 1 | 0x200, "what is made in it belongs to it as well"
    assert kernel.done[-2:] == ["limit", "join"], "it is never in a project without a limit"


def test_the_same_folder_keeps_its_project(tmp_path: Path) -> None:
    kernel = Pretended()
    limit(str(tmp_path), MIB, kernel)
    project = kernel.projects[tmp_path.stat().st_ino]
    kernel.used[project] = 4096
    assert limit(str(tmp_path), 2 * MIB, kernel) == ""
    assert kernel.limits == {project: 2 * MIB}


def test_a_number_that_is_in_use_is_left_to_who_has_it(tmp_path: Path) -> None:
    kernel = Pretended()
    first = project_quota._OURS | (tmp_path.stat().st_ino & project_quota._OURS_MAX)
    kernel.used[first] = 1
    assert limit(str(tmp_path), MIB, kernel) == ""
    assert kernel.projects[tmp_path.stat().st_ino] != first
    for number in range(project_quota._TRIES):
        kernel.used[project_quota._OURS | ((tmp_path.stat().st_ino + number) & project_quota._OURS_MAX)] = 1
    other = Pretended()
    other.used = kernel.used
    assert "no number" in limit(str(tmp_path), MIB, other)


def test_somebody_elses_project_is_left_alone(tmp_path: Path) -> None:
    kernel = Pretended()
    kernel.projects[tmp_path.stat().st_ino] = 42
    assert limit(str(tmp_path), MIB, kernel) == "the folder belongs to project 42 already"
    assert kernel.done == ["attributes"]


@pytest.mark.parametrize("fails", ["attributes", "ask", "limit", "join"])
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EPERM, "only root"),
        (errno.ESRCH, "prjquota"),
        (errno.ENOTTY, "prjquota"),
        (errno.EIO, "could not be set"),
    ],
)
def test_what_cannot_be_had_is_said(tmp_path: Path, fails: str, number: int, said: str) -> None:
    assert said in limit(str(tmp_path), MIB, Pretended(fails, number))


def test_a_folder_that_is_not_there_or_a_link_is_not_limited(tmp_path: Path) -> None:
    assert "could not be set" in limit(str(tmp_path / "none"), MIB, Pretended())
    (tmp_path / "link").symlink_to(tmp_path)
    kernel = Pretended()
    assert limit(str(tmp_path / "link"), MIB, kernel)
    assert not kernel.done


@contextlib.contextmanager
def file_system(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """An ext4, and whether it has quotas of projects: not every kernel knows them."""
    image, place = tmp_path / "image", tmp_path / "mounted"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota", image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop,prjquota", image, place], capture_output=True)
    try:
        yield place, mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", place], check=True)


def somebody_writes_8_mib(folder: Path) -> int:
    """From where it is, since what lies above may be for its owner only. The exit status."""
    write = ["dd", "if=/dev/zero", "of=file", "bs=1M", "count=8", "conv=fsync"]
    done = subprocess.run(write, cwd=folder, capture_output=True, user=65534, group=65534, extra_groups=())
    return done.returncode


@pytest.mark.needs("mkfs.ext4")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")
def test_it_holds_for_whoever_is_not_root(tmp_path: Path) -> None:
    """Where the kernel has them; where it has not, that is said, and nothing is limited."""
    with file_system(tmp_path) as (place, has_quotas):
        folder = place / "folder"
        folder.mkdir()
        if not has_quotas:
            assert why_not(str(place))
            assert limit(str(folder), 4 * MIB) == why_not(str(place))
            return
        assert why_not(str(place)) == ""
        folder.chmod(0o777)
        place.chmod(0o755)
        assert limit(str(folder), 4 * MIB) == ""
        assert somebody_writes_8_mib(folder) != 0
        assert (folder / "file").stat().st_size <= 4 * MIB
        assert limit(str(folder), 16 * MIB) == "", "and can be made larger"
        assert somebody_writes_8_mib(folder) == 0


def test_here_it_is_one_or_the_other(tmp_path: Path) -> None:
    """Whatever this machine has, it is said, and nothing is raised."""
    assert limit(str(tmp_path), MIB) == "" or why_not(str(tmp_path)) or os.geteuid() != 0
