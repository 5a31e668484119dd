"""Lists, makes and removes mounts and loop devices below a folder.

What there is is read from the kernel each time (``/proc/self/mountinfo``, ``/sys/block``) and never from a table of
ours, so that what a supervisor that died has left is found in the same way as what this one made. A loop device is made
so that it goes by itself when the last who uses it is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import Final, NamedTuple

from sublet.node.sandbox import syscalls
from sublet.wire.open_files import open_files, text_of_process

_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_SET_FD: Final = 0x4C00
_LOOP_CLR_FD: Final = 0x4C01
_LOOP_SET_STATUS64: Final = 0x4C04
_AUTOCLEAR: Final = 4
_INFO: Final = struct.Struct("=5Q4I160s2Q")
_TRIES: Final = 64
"""Others look for a free loop device at the same time."""
_EXT4_IOC_SHUTDOWN: Final = 0x8004587D
_WITHOUT_WRITING: Final = struct.pack("=I", 2)
_ALL_WRITTEN: Final = struct.pack("=I", 0)
_DELETED: Final = " (deleted)"
_FLAGS: Final = syscalls.MS_NODEV | syscalls.MS_NOSUID


class Mount(NamedTuple):
    """One line of the kernel's list."""

    point: str
    kind: str
    source: str


def mounts_in(text: str, folder: str) -> list[Mount]:
    """Those below a folder (or at it), in the order in which they can be taken down."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = _unescaped(fields[4])
        if point == folder or point.startswith(folder + "/"):
            found.append(Mount(point, rest[0], _unescaped(rest[1])))
    return found[::-1]


def mounts_below(folder: str) -> list[Mount]:
    """The same, as it is now."""
    with open("/proc/self/mountinfo", "rb") as file:
        return mounts_in(os.fsdecode(file.read()), os.path.realpath(folder))


def loops_in(backing: dict[str, str], folder: str) -> list[str]:
    """Of loop devices and the files behind them, those whose file lies below the folder, or lay there."""
    return sorted(name for name, file in backing.items() if file.removesuffix(_DELETED).startswith(folder + "/"))


def loops_of(folder: str) -> list[str]:
    """The loop devices of images in this folder, as they are now."""
    backing = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/sys/block"):
            with contextlib.suppress(OSError), open(f"/sys/block/{name}/loop/backing_file", "rb") as file:
                backing[f"/dev/{name}"] = os.fsdecode(file.read()).rstrip("\n")
    return loops_in(backing, os.path.realpath(folder))


def why_busy(device: str, proc: str = "/proc") -> str:
    """Which process keeps this device busy, as a sentence: one that has a file on it open or works there, or one that
    copied our mounts while it was among them, as a container or ``unshare --mount`` does. Empty if none is seen to."""
    try:
        number = os.stat(device).st_rdev
    except OSError:
        return ""
    found = next(open_files(number, proc), None)
    return str(found) if found is not None else _with_a_mount_of(device, proc)


def _with_a_mount_of(device: str, proc: str) -> str:
    looked = {_mounts_of(f"{proc}/self")}
    for pid in sorted((int(name) for name in os.listdir(proc) if name.isdigit()), reverse=True):
        with contextlib.suppress(OSError):
            if (space := _mounts_of(f"{proc}/{pid}")) in looked:
                continue
            looked.add(space)
            with open(f"{proc}/{pid}/mountinfo", "rb") as file:
                if f" {device} ".encode() not in file.read():
                    continue
            who = text_of_process(f"{proc}/{pid}")
            return f"process {who} copied the mounts of this machine while it was one of them"
    return ""


def _mounts_of(folder: str) -> str:
    """Which mount namespace this process is in."""
    return os.readlink(f"{folder}/ns/mnt")


def attach_loop(image: str) -> tuple[str, int]:
    """A loop device over this file, and its descriptor: once that is closed and nothing mounted, the device is free."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            device = f"/dev/loop{_free_loop()}"
            fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, _LOOP_SET_FD, backing)
            except OSError as error:
                os.close(fd)
                if error.errno == errno.EBUSY:
                    continue
                raise
            try:
                fcntl.ioctl(fd, _LOOP_SET_STATUS64, _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"", 0, 0))
            except OSError:
                fcntl.ioctl(fd, _LOOP_CLR_FD)
                os.close(fd)
                raise
            return device, fd
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "others took every free loop device", image)


def detach_loop(device: str) -> None:
    """Let the device go: one that was left half made does not go by itself."""
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _LOOP_CLR_FD)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EBUSY):  # it went just now; or it goes when the last user does
            raise
    finally:
        os.close(fd)


def mount_image(image: str, folder: str) -> None:
    """An image with ext4 in it, at this folder."""
    device, fd = attach_loop(image)
    try:
        syscalls.mount("ext4", folder, _FLAGS, "noinit_itable", source=device)
    finally:
        os.close(fd)


def mount_memory(folder: str, size: int, *, names: int) -> None:
    """A file system in memory that takes so many bytes and so many names, and no more."""
    syscalls.mount("tmpfs", folder, _FLAGS, f"size={size},nr_inodes={names},mode=0700", source="sublet")


def take_down(point: str, *, unwritten: bool, forced: bool = False) -> bool:
    """Unmount what is at this folder. ``unwritten``: what it has in memory need not come to disk. Whether the file
    system was shut down: then nothing is written to it any more, also by a process that has a file of it open.
    ``forced``: it is shut down and unmounted even while processes use it."""
    is_down = unwritten and _shut_down(point, _WITHOUT_WRITING)
    try:
        syscalls.unmount(point)
    except OSError as error:
        if error.errno != errno.EBUSY or not forced:
            raise
        is_down = is_down or _shut_down(point, _ALL_WRITTEN)
        if not is_down:
            raise
        syscalls.unmount(point, lazily=True)
    return is_down


def _shut_down(point: str, how: bytes) -> bool:
    """Whether that could be done: not on another kind of file system, or an old kernel."""
    try:
        fd = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, how)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _free_loop() -> int:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)


def _unescaped(path: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, sign)
    return path
