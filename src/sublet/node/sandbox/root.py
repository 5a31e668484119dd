"""Builds the file system that a guest sees: empty, with only what was named, under its usual paths.

What is to be shown is taken hold of first, as descriptors; then the new root is built and the old one let go. So no
path is looked up in a half-built tree, and no place is needed on disk. What a guest may write is put up from the
descriptor that was looked at, and a symbolic link anywhere on the way to it is refused, since a user that may write
there may not choose what is shown.

Of what the kernel tells below /proc and /sys, some is covered and some made read-only, last of all.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Final, NamedTuple

from sublet.node.by_descriptor import opened
from sublet.node.sandbox import syscalls
from sublet.node.sandbox.abilities import SandboxPart
from sublet.node.sandbox.plan import GROUPS, MASKED, SEALED, Bind, SandboxPlan, SandboxStep

_STAGES: Final = ("/tmp", "/run", "/mnt")
_NO_RIGHTS: Final = syscalls.MS_NOSUID | syscalls.MS_NODEV
_SHOWN: Final = syscalls.MOUNT_ATTR_NOSUID
_FILES_MAX: Final = 262_144
"""Files in each private folder: a file costs memory even when it is empty."""
_FILES_MIN: Final = 1024
_BYTES_PER_FILE: Final = 4096
"""A home has as many names as it could hold files of a page each."""

_EMPTY: Final = ".empty"
"""Shown in place of a folder; it goes itself once that is done."""

_LINKS: Final = (
    ("dev/ptmx", "pts/ptmx"),
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
)


class _Piece(NamedTuple):
    path: str
    put: Callable[[str], None]
    """Given the path below the new root."""


def build(plan: SandboxPlan) -> int:
    """Replace the root of this process. It has a mount namespace of its own already.

    Returns a descriptor of its /proc without what is made read-only there, for the steps that still write to it; -1
    where none does.
    """
    os.umask(0o022)  # the inherited umask may be another, and the guest must be able to pass these folders
    syscalls.mount("", "/", syscalls.MS_REC | syscalls.MS_PRIVATE)
    pieces = [*_private(plan), *(_Piece(path, _cover) for path in plan.covers)]
    pieces += [piece for bind in plan.binds if (piece := _shown(bind, plan)) is not None]
    if SandboxPart.PROC not in plan.namespaces:
        tree = syscalls.open_tree("/proc", recursive=True, follow=False)
        pieces.append(_Piece("/proc", lambda at: _put_up(tree, at, is_folder=True)))
    stage = next(path for path in _STAGES if os.path.isdir(path))
    syscalls.mount("tmpfs", stage, _NO_RIGHTS, "size=1m,nr_inodes=4096,mode=0755")
    os.chdir(stage)
    for piece in sorted(pieces, key=lambda piece: (piece.path.count("/"), piece.path)):
        piece.put(piece.path.lstrip("/"))
    for name, target in _LINKS:
        os.symlink(target, name)
    os.makedirs("run", exist_ok=True)
    proc = syscalls.open_tree("proc", recursive=False, follow=False) if SandboxStep.NO_NESTED in plan.steps else -1
    os.mkdir(_EMPTY, 0o555)
    for path in (*MASKED, *((GROUPS,) if SandboxPart.USER_NS in plan.namespaces else ())):
        _mask(path.lstrip("/"))
    os.rmdir(_EMPTY)
    for path in SEALED:
        _seal(path.lstrip("/"))
    for path in (*(cover.lstrip("/") for cover in plan.covers), "dev", "."):
        syscalls.set_mount_attributes(path, syscalls.MOUNT_ATTR_RDONLY)
    syscalls.pivot_root()
    os.chdir("/")
    return proc


def _private(plan: SandboxPlan) -> list[_Piece]:
    policy = plan.policy
    pieces = [
        _tmpfs("/dev", "size=64k,mode=0755"),
        _tmpfs("/tmp", f"size={policy.tmp_bytes},nr_inodes={_FILES_MAX},mode=1777"),
        _tmpfs("/var/tmp", f"size={policy.tmp_bytes},nr_inodes={_FILES_MAX},mode=1777"),
        _tmpfs("/dev/shm", f"size={policy.shm_bytes},nr_inodes={_FILES_MAX},mode=1777"),
        _Piece("/dev/pts", _terminals),
    ]
    if plan.home:
        owner = "" if plan.ids is None else f",uid={plan.ids.uid},gid={plan.ids.gid}"
        files = min(_FILES_MAX, max(_FILES_MIN, policy.home_bytes // _BYTES_PER_FILE))
        pieces.append(_tmpfs(plan.home, f"size={policy.home_bytes},nr_inodes={files},mode=0700{owner}"))
    if SandboxPart.PROC in plan.namespaces:
        pieces.append(_Piece("/proc", _processes))
    return pieces


def _tmpfs(path: str, options: str) -> _Piece:
    def put(at: str) -> None:
        os.makedirs(at, exist_ok=True)
        syscalls.mount("tmpfs", at, _NO_RIGHTS, options)

    return _Piece(path, put)


def _mask(at: str) -> None:
    """An empty folder, or a file that is always empty, in place of what is there, if anything is."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(at).st_mode)
    except OSError:
        return
    tree = syscalls.open_tree(_EMPTY if is_folder else "dev/null", recursive=False, follow=False)
    syscalls.set_mount_attributes(tree, _SHOWN | syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOEXEC)
    syscalls.mount_fd_at(tree, at)
    os.close(tree)


def _seal(at: str) -> None:
    """What is there, read-only, if anything is."""
    if os.path.lexists(at):
        tree = syscalls.open_tree(at, recursive=True, follow=False)
        syscalls.set_mount_attributes(tree, _SHOWN | syscalls.MOUNT_ATTR_RDONLY, recursive=True)
        syscalls.mount_fd_at(tree, at)
        os.close(tree)


def _cover(at: str) -> None:
    if os.path.isdir(at):
        syscalls.mount("tmpfs", at, _NO_RIGHTS, "size=64k,mode=0755")


def _terminals(at: str) -> None:
    os.makedirs(at, exist_ok=True)
    syscalls.mount("devpts", at, syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0600")


def _processes(at: str) -> None:
    os.makedirs(at, exist_ok=True)
    syscalls.mount("proc", at, _NO_RIGHTS | syscalls.MS_NOEXEC, "hidepid=2")


def _shown(bind: Bind, plan: SandboxPlan) -> _Piece | None:
    """Take hold of one thing to show; None where it is not on this machine and need not be."""
    path = bind.path
    try:
        target = os.readlink(path) if not (bind.writable or bind.device) and os.path.islink(path) else None
        if target is not None and _is_shown_elsewhere(path, target, plan):
            return _Piece(path, lambda at: _link(target, at))
        # Below /sys other file systems are mounted, which a guest has no use for; in a user namespace they are locked
        # to it and come along, and are then read-only like the rest.
        alone = path == "/sys" and SandboxPart.USER_NS not in plan.namespaces
        if bind.writable:
            with opened(path) as held:
                tree = syscalls.open_tree(held, recursive=True, follow=False)
        else:
            tree = syscalls.open_tree(path, recursive=not (alone or bind.device), follow=True)
    except OSError as error:
        if bind.optional and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return None
        raise
    mode = os.fstat(tree).st_mode
    if bind.device and not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
        raise OSError(errno.ENODEV, "this is no device node", path)
    if bind.file and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "the file is not a file any more", path)
    if bind.writable and not bind.file and not stat.S_ISDIR(mode):
        raise OSError(errno.ENOTDIR, "the folder is not a folder any more", path)
    attributes = _SHOWN | (0 if bind.device else syscalls.MOUNT_ATTR_NODEV)
    attributes |= 0 if bind.writable or bind.device else syscalls.MOUNT_ATTR_RDONLY
    syscalls.set_mount_attributes(tree, attributes, recursive=True)
    return _Piece(path, lambda at: _put_up(tree, at, is_folder=stat.S_ISDIR(mode)))


def _is_shown_elsewhere(path: str, target: str, plan: SandboxPlan) -> bool:
    """Whether a link needs only to be drawn again: ``/bin``, where it leads to ``usr/bin``."""
    leads_to = os.path.normpath(os.path.join(os.path.dirname(path), target))
    return any(f"{leads_to}/".startswith(f"{bind.path}/") for bind in plan.binds if bind.path != path)


def _link(target: str, at: str) -> None:
    os.makedirs(os.path.dirname(at) or ".", exist_ok=True)
    os.symlink(target, at)


def _put_up(tree: int, at: str, *, is_folder: bool) -> None:
    if is_folder:
        os.makedirs(at, exist_ok=True)
    elif not os.path.lexists(at):
        os.makedirs(os.path.dirname(at) or ".", exist_ok=True)
        os.close(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    syscalls.mount_fd_at(tree, at)
    os.close(tree)
