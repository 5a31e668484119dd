"""Restricts a guest's file access with Landlock, a second barrier that needs no rights and no mounts.

The kernel's version decides which kinds of access can be ruled; a kind it does not know must not be named to it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from typing import Final

from sublet.node.sandbox import syscalls
from sublet.node.sandbox.plan import SandboxPlan, SandboxStep

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_MAKE_CHAR: Final = 1 << 6
_MAKE_BLOCK: Final = 1 << 11
_FIRST_VERSION: Final = (1 << 13) - 1
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_NODE: Final = _READ_FILE | _WRITE_FILE | _READ_DIR | _TRUNCATE | _IOCTL_DEV
_NEVER: Final = _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV
"""What no folder of a guest is given: new device nodes, and calls to devices behind any."""

_SINCE_FS: Final = ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
_TCP: Final = 0b11
_SCOPES: Final = 0b11
"""Abstract sockets, and signals, of processes outside."""


def handled_fs(abi: int) -> int:
    """The kinds of file access this version can rule. All are ruled: what no rule allows is refused."""
    return _FIRST_VERSION | sum(bit for since, bit in _SINCE_FS if abi >= since)


def handled_net(abi: int, *, no_tcp: bool) -> int:
    """TCP is ruled only where there is no network namespace to do it better."""
    return _TCP if no_tcp and abi >= 4 else 0


def handled_scopes(abi: int) -> int:
    """Both, where the version has them."""
    return _SCOPES if abi >= 6 else 0


def restrict(plan: SandboxPlan) -> None:
    """This process and all it starts touch what the plan names, and nothing else. There is no way back."""
    abi = plan.landlock_abi
    fs = handled_fs(abi)
    net = handled_net(abi, no_tcp=plan.landlock_tcp)
    ruleset = syscalls.landlock_ruleset(fs, net, handled_scopes(abi), abi=abi)
    try:
        if SandboxStep.ROOT in plan.steps:
            _allow(ruleset, ("/",), _READ_DIR)  # a root of its own has nothing in it that may not be listed
        _allow(ruleset, plan.reads, _READ & fs)
        _allow(ruleset, plan.writes, fs & ~_NEVER)
        _allow(ruleset, plan.nodes, _NODE & fs)
        syscalls.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, paths: Iterable[str], wanted: int) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not on this machine, and so not to be had
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
                allowed = wanted if is_folder else wanted & _OF_FILES
                if allowed:
                    syscalls.landlock_add_path(ruleset, fd, allowed)
            finally:
                os.close(fd)
