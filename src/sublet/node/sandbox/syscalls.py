"""System calls that Python (3.11) lacks. Every failure is an ``OSError``.

The numbers from 424 on are the same on every architecture; older calls go through the C library.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MOUNT_ATTR_RDONLY: Final = 1
MOUNT_ATTR_NOSUID: Final = 2
MOUNT_ATTR_NODEV: Final = 4
MOUNT_ATTR_NOEXEC: Final = 8

_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_CLOSE_RANGE: Final = 436
_SYS_OPENAT2: Final = 437
_SYS_MOUNT_SETATTR: Final = 442
_SYS_LANDLOCK_CREATE_RULESET: Final = 444
_SYS_LANDLOCK_ADD_RULE: Final = 445
_SYS_LANDLOCK_RESTRICT_SELF: Final = 446

_SYS_KEYCTL: Final = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1

_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MNT_DETACH: Final = 2
_CLOSE_RANGE_CLOEXEC: Final = 4
_UINT_MAX: Final = 0xFFFFFFFF
_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_FILTER_LINE_BYTES: Final = 8
_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_CAPS_MAX: Final = 64


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _OpenHow(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(answer: int, what: str) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return answer


def _syscall(number: int, what: str, *arguments: object) -> int:
    call = _libc().syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(call(ctypes.c_long(number), *words), what)


def unshare(flags: int) -> None:
    """Leave these namespaces for new ones."""
    _checked(_libc().unshare(ctypes.c_int(flags)), "unshare")


def mount(kind: str, target: str, flags: int = 0, data: str = "", *, source: str = "") -> None:
    """Mount a file system of this kind, or with an empty kind change the propagation of one that is there."""
    raw = kind.encode() or None
    named = os.fsencode(source) or raw or b"none"
    answer = _libc().mount(named, os.fsencode(target), raw, ctypes.c_ulong(flags), data.encode() or None)
    _checked(answer, f"mount {kind} at {target}")


def openat2(path: str, flags: int, *, dir_fd: int, resolve: int) -> int:
    """Open an existing file with rules for every part of the way to it; from Linux 5.6 on."""
    how = _OpenHow(flags, 0, resolve)
    return _syscall(_SYS_OPENAT2, path, dir_fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))


def open_tree(path: str | int, *, recursive: bool, follow: bool) -> int:
    """A copy of the mount under ``path`` (or a descriptor), as a descriptor, not yet put up anywhere."""
    fd, name = (path, b"") if isinstance(path, int) else (_AT_FDCWD, os.fsencode(path))
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | (_AT_EMPTY_PATH if isinstance(path, int) else 0)
    flags |= (_AT_RECURSIVE if recursive else 0) | (0 if follow else _AT_SYMLINK_NOFOLLOW)
    return _syscall(_SYS_OPEN_TREE, str(path), fd, name, flags)


def mount_fd_at(tree: int, target: str) -> None:
    """Put up what ``open_tree`` gave."""
    _syscall(_SYS_MOVE_MOUNT, target, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


def set_mount_attributes(where: int | str, attributes: int, *, recursive: bool = False) -> None:
    """Add attributes to a mount: by its descriptor, or by its path."""
    fd, path = (where, b"") if isinstance(where, int) else (_AT_FDCWD, os.fsencode(where))
    flags = (_AT_EMPTY_PATH if isinstance(where, int) else 0) | (_AT_RECURSIVE if recursive else 0)
    wanted = _MountAttributes(attributes, 0, 0, 0)
    size = ctypes.sizeof(wanted)
    _syscall(_SYS_MOUNT_SETATTR, f"attributes of {where}", fd, path, flags, ctypes.byref(wanted), size)


def pivot_root() -> None:
    """The current folder, which is a mount, becomes the root; the old root goes."""
    _checked(_libc().pivot_root(b".", b"."), "pivot_root")
    detach(".")


def detach(path: str) -> None:
    """Take down a mount and all below it."""
    _checked(_libc().umount2(os.fsencode(path), _MNT_DETACH), f"umount {path}")


def unmount(path: str, *, lazily: bool = False) -> None:
    """Unmount; raises ``OSError`` (EBUSY) while a process uses the mount. ``lazily``: it is detached at once, and
    remains only for the processes that use it."""
    _checked(_libc().umount2(os.fsencode(path), _MNT_DETACH if lazily else 0), f"umount {path}")


def set_host_name(name: str) -> None:
    """Only in a namespace of its own, one hopes."""
    raw = name.encode()
    _checked(_libc().sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def close_from(first: int) -> None:
    """Close every descriptor from this one on."""
    _syscall(_SYS_CLOSE_RANGE, "close_range", first, _UINT_MAX, 0)


def cloexec_from(first: int) -> None:
    """Every descriptor from this one on closes at the exec."""
    _syscall(_SYS_CLOSE_RANGE, "close_range", first, _UINT_MAX, _CLOSE_RANGE_CLOEXEC)


def set_dumpable(dumpable: bool) -> None:
    """Whether others of the same user may look into this process."""
    _prctl("dumpable", _PR_SET_DUMPABLE, int(dumpable))


def drop_bounding_set() -> None:
    """No exec gives any capability, whatever the file says."""
    for number in range(_CAPS_MAX):
        if _libc().prctl(_PR_CAPBSET_READ, ctypes.c_ulong(number), 0, 0, 0) != 1:
            continue
        _prctl("capability bounds", _PR_CAPBSET_DROP, number)
    _prctl("ambient capabilities", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def filter_system_calls(code: bytes) -> None:
    """Every system call from now on is judged by this program of the packet filter's language."""
    wanted = _Filter(len(code) // _FILTER_LINE_BYTES, code)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _checked(_libc().prctl(_PR_SET_SECCOMP, mode, ctypes.byref(wanted), zero, zero), "seccomp")


def set_capabilities(mask: int = 0) -> None:
    """Keep these (permitted and effective) and give up all others."""
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    low, high = mask & _UINT_MAX, mask >> 32
    data = (_CapData * 2)(_CapData(low, low, 0), _CapData(high, high, 0))
    _checked(_libc().capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def landlock_abi() -> int:
    """Which version the kernel speaks."""
    return _syscall(_SYS_LANDLOCK_CREATE_RULESET, "landlock", None, 0, _LANDLOCK_CREATE_RULESET_VERSION)


def landlock_ruleset(fs: int, net: int, scoped: int, *, abi: int) -> int:
    """A new set of rules: these kinds of access are refused unless a rule allows them. Returns a descriptor."""
    wanted = _Ruleset(fs, net, scoped)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    return _syscall(_SYS_LANDLOCK_CREATE_RULESET, "landlock", ctypes.byref(wanted), size, 0)


def landlock_add_path(ruleset: int, parent: int, allowed: int) -> None:
    """Allow this below the file or folder behind a descriptor."""
    rule = _PathRule(allowed, parent)
    kind = _LANDLOCK_RULE_PATH_BENEATH
    _syscall(_SYS_LANDLOCK_ADD_RULE, "landlock rule", ruleset, kind, ctypes.byref(rule), 0)


def landlock_restrict(ruleset: int) -> None:
    """From now on, for this process and all it starts."""
    _syscall(_SYS_LANDLOCK_RESTRICT_SELF, "landlock", ruleset, 0)


def new_session_keyring() -> None:
    """Leave the kernel keyring of our parent behind. Where a keyring cannot be had, none leaks either."""
    number = _SYS_KEYCTL.get(os.uname().machine)
    if number is None:
        return
    try:
        _syscall(number, "keyring", _KEYCTL_JOIN_SESSION_KEYRING, None, 0, 0, 0)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise


def _prctl(what: str, option: int, second: int = 0) -> None:
    prctl = _libc().prctl
    zero = ctypes.c_ulong(0)
    _checked(prctl(ctypes.c_int(option), ctypes.c_ulong(second), zero, zero, zero), what)
