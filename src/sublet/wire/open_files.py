"""Finds which processes have a device, or a file of a file system, open.

Descriptors travel: one that left its lease may be anywhere. What is under way in a socket, and was not received yet, is
not seen; no process can use it either.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

_NODE: Final = b" /dev/"
_SHARED: Final = b" /dev/shm/"


class OpenFile(NamedTuple):
    """One process, and one file that it has open or mapped, or in which it works."""

    pid: int
    name: str
    uid: int
    path: str
    """As the kernel shows it: below the root that the process had when it opened it."""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}, user {self.uid}) has {self.path} open"


def open_files(number: int, proc: str = "/proc") -> Iterator[OpenFile]:
    """Of the device of this number (``st_rdev``), or on the file system that lies on it (``st_dev``): the first file of
    each process, newest process first. Processes that have one mapped and not open come last."""
    rest = []
    for folder in _processes(proc):
        if path := _opened(folder, lambda found, _: number in (found.st_dev, found.st_rdev)):
            yield _open_file(folder, path)
        else:
            rest.append(folder)
    for folder in rest:
        if path := _mapped(folder, number):
            yield _open_file(folder, path)


def handed_on(number: int, proc: str = "/proc") -> Iterator[OpenFile]:
    """Processes that have the node of this device open, and have not opened it themselves: its path lies in mounts of
    others, as those of a guest do. A process that opened the machine's own node may, and is left out."""
    for folder in _processes(proc):
        mounts: set[bytes] = set()

        def came(found: os.stat_result, descriptor: str, folder: str = folder, mounts: set[bytes] = mounts) -> bool:
            if found.st_rdev != number or not descriptor:
                return False
            if not mounts:
                with open(f"{folder}/mountinfo", "rb") as file:
                    mounts.update(line.split(b" ", 1)[0] for line in file)
            with open(f"{folder}/fdinfo/{descriptor}", "rb") as file:
                mount = next((line[7:].strip() for line in file if line.startswith(b"mnt_id:")), b"")
            return bool(mount) and mount not in mounts

        if path := _opened(folder, came):
            yield _open_file(folder, path)


def text_of_process(folder: str) -> str:
    """``12 (python, user 1000)``."""
    name, uid = _who(folder)
    return f"{os.path.basename(folder)} ({name}, user {uid})"


def _processes(proc: str) -> Iterator[str]:
    for pid in sorted((int(name) for name in os.listdir(proc) if name.isdigit()), reverse=True):
        yield f"{proc}/{pid}"


def _opened(folder: str, fits: Callable[[os.stat_result, str], bool]) -> str:
    """The path of the first descriptor, working folder or root of this process that fits."""
    with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
        descriptors = os.listdir(f"{folder}/fd")
        for name, descriptor in (*((f"fd/{one}", one) for one in descriptors), ("cwd", ""), ("root", "")):
            with contextlib.suppress(OSError):
                if fits(os.stat(f"{folder}/{name}"), descriptor):
                    return os.readlink(f"{folder}/{name}")
    return ""


def _mapped(folder: str, number: int) -> str:
    """A file may be mapped and no longer open. Of one in a file system the list of maps has the number of that; a
    device's own is known by its file alone."""
    on = b" %02x:%02x " % (os.major(number), os.minor(number))
    with contextlib.suppress(OSError):
        with open(f"{folder}/maps", "rb") as file:
            maps = file.read()
        if on not in maps and _NODE not in maps:
            return ""
        for line in maps.splitlines():
            if on in line:
                return os.fsdecode(line.split(None, 5)[-1])
            if _NODE in line and _SHARED not in line:
                place, *_, path = line.split(None, 5)
                with contextlib.suppress(OSError):
                    if os.stat(f"{folder}/map_files/{os.fsdecode(place)}").st_rdev == number:
                        return os.fsdecode(path)
    return ""


def _open_file(folder: str, path: str) -> OpenFile:
    return OpenFile(int(os.path.basename(folder)), *_who(folder), path)


def _who(folder: str) -> tuple[str, int]:
    try:
        with open(f"{folder}/comm", "rb") as file:
            return file.read().decode("utf-8", "replace").strip(), os.stat(folder).st_uid
    except OSError:  # it ended just now
        return "?", -1
