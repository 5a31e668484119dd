"""Finds where control groups can be made: mounted hierarchies, and our rights in them.

There are three kinds of machine: one unified hierarchy (v2), one hierarchy for each controller (v1), and both, where
the unified one has no controllers and can still end, freeze and count. In each, the place is looked for from our own
group upwards, so that whatever confines this process confines the guests as well, as far as that can be had: in a
unified hierarchy a group with processes in it cannot hand controllers on, and then the nearest above that can is taken.
A supervisor to which a group was given makes room in it first (``enter_child_group``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final, NamedTuple

CONTROLLERS: Final = ("memory", "pids", "cpu", "cpuset", "devices", "freezer", "cpuacct")
"""Those we know how to use; a unified hierarchy has neither of the last three, and needs none of them."""
_PIECE: Final = 1 << 16
_NUMBER_MAX: Final = 64
_LEAF: Final = "supervisor"
_UNREADABLE: Final = frozenset((errno.ENODEV, errno.EOPNOTSUPP))
"""The group went while its list was open; or it has threads of processes that are listed further up."""
_NOTHING_BELOW: Final = 2
"""Links to a folder without folders in it: its name and its dot. It spares reading forty names to find none."""


class CgroupFiles:
    """The few acts on the folders of a hierarchy, in one place, so that a test can put other folders there."""

    def read(self, path: str) -> str | None:
        """The whole text; None where there is no such file or it has nothing to say."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # three calls, where a file object makes seven
        except OSError:
            return None
        try:
            text = piece = os.read(fd, _PIECE)
            while piece:
                piece = os.read(fd, _PIECE)
                text += piece
            return os.fsdecode(text)
        except OSError:
            return None
        finally:
            os.close(fd)

    def number(self, path: str) -> int:
        """One number in a file of its own; 0 where there is none."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            text = os.read(fd, _NUMBER_MAX).strip()
        except OSError:
            return 0
        finally:
            os.close(fd)
        return int(text) if text.isdigit() else 0

    def is_blank(self, path: str) -> bool:
        """Whether it has nothing to say, or is not there. ``OSError`` where that cannot be seen."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            return not os.read(fd, 1)
        except OSError as error:
            if error.errno in _UNREADABLE:
                return True
            raise
        finally:
            os.close(fd)

    def write(self, path: str, text: str) -> None:
        """In one piece, as the kernel wants it; never makes a file."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def make(self, folder: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o755)

    def remove(self, folder: str) -> None:
        """An empty group; ``OSError`` where something is in it."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)

    def folders(self, folder: str, *, sure: bool = False) -> list[str]:
        """The groups directly below, as paths. ``sure``: ``OSError`` where that cannot be seen."""
        try:
            if os.stat(folder).st_nlink == _NOTHING_BELOW:
                return []
            with os.scandir(folder) as entries:
                return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError:
            if sure:
                raise
            return []

    def has(self, path: str) -> bool:
        return os.path.exists(path)

    def may_write(self, path: str) -> bool:
        return os.access(path, os.W_OK)


class CgroupPlace(NamedTuple):
    """A folder below which our groups are made, and what they can do there."""

    is_v2: bool
    base: str
    controllers: frozenset[str]
    top: str
    """Where the hierarchy is mounted."""
    why_not: str = ""
    """Why groups cannot be made here; empty where they can."""


class _Mount(NamedTuple):
    is_v2: bool
    root: str
    """Which part of the hierarchy is mounted."""
    point: str
    controllers: frozenset[str]


def enter_child_group(proc: str = "/proc", files: CgroupFiles | None = None, *, pid: int = 0) -> None:
    """Make room in a group that was given to this process alone, as a scope of a service manager is: go into one below
    it, so that ours can be handed controllers beside it. Harmless everywhere else. ``pid``: this process."""
    files = files or CgroupFiles()
    own = _own_groups(files.read(f"{proc}/self/cgroup") or "")
    for mount in _mounts(files.read(f"{proc}/self/mountinfo") or ""):
        group = _folder(mount, own.get("", "/"), files) if mount.is_v2 else ""
        alone = (files.read(f"{group}/cgroup.procs") or "").split() == [str(pid or os.getpid())]
        if not group or not alone or _is_root(group, files) or not files.read(f"{group}/cgroup.controllers"):
            continue
        with contextlib.suppress(OSError):  # not ours to divide: then it stays as it is
            files.make(f"{group}/{_LEAF}")
            files.write(f"{group}/{_LEAF}/cgroup.procs", "0")


def find_places(proc: str = "/proc", files: CgroupFiles | None = None) -> tuple[CgroupPlace, ...]:
    """All hierarchies that concern us, usable or not."""
    files = files or CgroupFiles()
    own = _own_groups(files.read(f"{proc}/self/cgroup") or "")
    found = []
    for mount in _mounts(files.read(f"{proc}/self/mountinfo") or ""):
        if mount.is_v2:
            found.append(_place_v2(mount, own.get("", "/"), files))
        elif mount.controllers:
            path = next((own[name] for name in sorted(mount.controllers) if name in own), "/")
            found.append(_place_v1(mount, path, files))
    return tuple(found)


def _own_groups(text: str) -> dict[str, str]:
    """Controller → our path in its hierarchy; the unified hierarchy stands under the empty name."""
    own = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(","):
            own[name] = path
    return own


def _mounts(text: str) -> list[_Mount]:
    """Later mounts on the same point hide the earlier ones."""
    found = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = frozenset(kind[2].split(",")) & frozenset(CONTROLLERS)
        point = _unescaped(fields[4])
        found[point] = _Mount(kind[0] == "cgroup2", _unescaped(fields[3]), point, controllers)
    return list(found.values())


def _unescaped(path: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, sign)
    return path


def _folder(mount: _Mount, own: str, files: CgroupFiles) -> str:
    """Where our own group appears below the mount; the mount itself if it does not."""
    inside = own if mount.root == "/" else own.removeprefix(mount.root)
    folder = os.path.normpath(f"{mount.point}/{inside}")
    is_below = folder == mount.point or folder.startswith(mount.point + "/")
    return folder if is_below and files.has(folder) else mount.point


def _place_v1(mount: _Mount, own: str, files: CgroupFiles) -> CgroupPlace:
    base = _folder(mount, own, files)
    why_not = "" if files.may_write(base) else f"no right to make groups in {base}"
    return CgroupPlace(False, base, mount.controllers, mount.point, why_not)


def _place_v2(mount: _Mount, own: str, files: CgroupFiles) -> CgroupPlace:
    """The nearest group from ours upwards that hands controllers on; our own where none does."""
    first = _folder(mount, own, files)
    folder, best = first, frozenset[str]()
    if not _may_make(first, files):
        return CgroupPlace(True, first, best, mount.point, f"no right to make groups in {first}")
    base = first
    while _may_make(folder, files):
        handed_on = _handed_on(folder, files)
        if len(handed_on) > len(best):
            base, best = folder, handed_on
        if folder == mount.point or best:
            break
        folder = os.path.dirname(folder)
    return CgroupPlace(True, base, best, mount.point)


def _may_make(folder: str, files: CgroupFiles) -> bool:
    """Whether groups can be made here and our processes moved into them."""
    return files.may_write(folder) and files.may_write(f"{folder}/cgroup.procs")


def _is_root(folder: str, files: CgroupFiles) -> bool:
    """Whether it is the group of the whole machine, for which fewer rules hold."""
    return not files.has(f"{folder}/cgroup.type")


def _handed_on(folder: str, files: CgroupFiles) -> frozenset[str]:
    """The controllers that groups made here would have, after asking for all of them.

    Not where processes are in the group itself. The kernel would still hand on those that can share out among threads
    (``cpu``, ``pids``), and from then on no process could join any group made here.
    """
    if files.read(f"{folder}/cgroup.procs") and not _is_root(folder, files):
        return frozenset()
    present = frozenset((files.read(f"{folder}/cgroup.controllers") or "").split()) & frozenset(CONTROLLERS)
    handed_on = f"{folder}/cgroup.subtree_control"
    for name in sorted(present - frozenset((files.read(handed_on) or "").split())):
        with contextlib.suppress(OSError):  # busy: a process has just come into the group; or not ours to change
            files.write(handed_on, f"+{name}")
    return present & frozenset((files.read(handed_on) or "").split())
