"""Changes owner and mode of files by descriptor: the file that was checked is the file that is changed.

The supervisor of root's office works in folders in which guests may make, move and replace names. A name that root
looks up there may lead anywhere by the time it is used. So the kernel is told to refuse a symbolic link (those of
``/proc`` too) wherever it stands on the way: ``openat2`` with ``RESOLVE_NO_SYMLINKS`` and ``RESOLVE_NO_MAGICLINKS``. On
kernels and in containers that do not have that call, each part is opened from the descriptor of the one before it.

This is the one module of the supervisor that may change owner or rights; a test holds that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Final

_HOLD: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS: Final = 2 | 4 | 8
"""``RESOLVE_NO_MAGICLINKS``, ``RESOLVE_NO_SYMLINKS`` and ``RESOLVE_BENEATH``. Not with ``O_NOFOLLOW``, for which a link
at the end is what is asked for."""
_WALK_INSTEAD: Final = frozenset(
    (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG, errno.EAGAIN, errno.ENAMETOOLONG, errno.ELOOP)
)
"""The kernel, or the container's filter of system calls, does not have the call, or not for this; or there is a link,
and the walk says where."""


def change(path: str, *, mode: int | None = None, owner: tuple[int, int] | None = None) -> None:
    """Set owner (user, group) and rights of what is at ``path``, if it is no link. A file with a second name is not
    changed either: it may be a file of another user."""
    with opened(path) as fd:
        found = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1:
            raise OSError(errno.EMLINK, "it has more than one name", path)
        inode = f"/proc/self/fd/{fd}"  # of a descriptor that only holds a name this is the way to its inode
        if owner is not None:
            os.chown(inode, *owner)
        if mode is not None:
            os.chmod(inode, mode)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor that holds what is at ``path`` (``O_PATH``), no part of which is a link."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts:
        raise OSError(errno.EINVAL, "not a plain absolute path", path)
    top = os.open("/", _HOLD | os.O_DIRECTORY)
    try:
        fd = _found(parts, top)
    finally:
        os.close(top)
    try:
        yield fd
    finally:
        os.close(fd)


def _found(parts: list[str], top: int) -> int:
    from sublet.node.sandbox.syscalls import openat2  # with ctypes, which not every user of this module needs

    try:
        return openat2("/".join(parts) or ".", os.O_PATH | os.O_CLOEXEC, dir_fd=top, resolve=_NO_LINKS)
    except OSError as error:
        if error.errno not in _WALK_INSTEAD:
            raise OSError(error.errno, error.strerror, "/" + "/".join(parts)) from None
    return _walked(parts, top)


def _walked(parts: list[str], top: int) -> int:
    """The same step by step. It says which part is a link, too."""
    fd = os.dup(top)
    try:
        for place, part in enumerate(parts):
            below = os.open(part, _HOLD, dir_fd=fd)
            os.close(fd)
            fd = below
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                raise OSError(errno.ELOOP, "a symbolic link is on the way", "/" + "/".join(parts[: place + 1]))
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def opened_folder(path: str) -> Iterator[int]:
    """A descriptor of this folder, from which names below it are opened (``dir_fd``)."""
    with opened(path) as held:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=held)
    try:
        yield fd
    finally:
        os.close(fd)
