"""Which kinds of socket a guest may make: local ones, those of the internet, and netlink. No others.

A network namespace does not part everything: a socket to the host of a virtual machine (AF_VSOCK) goes through it. So a
filter of system calls looks at the family. It also refuses io_uring, by which a socket could be made behind its back,
and system calls of a foreign architecture, whose numbers mean something else.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Final, NamedTuple

from sublet.supervisor.isolation import syscalls

__all__ = ["FAMILIES", "program", "restrict"]

FAMILIES: Final = (int(socket.AF_UNIX), int(socket.AF_INET), int(socket.AF_INET6), 16)
"""The last is netlink, by which programs ask for their own addresses."""


class _Machine(NamedTuple):
    audit: int
    socket: int


_MACHINES: Final = {
    "x86_64": _Machine(0xC000003E, 41),
    "aarch64": _Machine(0xC00000B7, 198),
    "riscv64": _Machine(0xC00000F3, 198),
}
_IO_URING_SETUP: Final = 425
_X32: Final = 0x40000000
_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def program(machine: str) -> bytes:
    """The filter, as the kernel reads it: a list of (operation, steps if so, steps if not, value)."""
    known = _MACHINES.get(machine)
    if known is None:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known here")
    families = len(FAMILIES)
    unknown, unsupported, allow = 7 + families, 8 + families, 9 + families
    code = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 0, unknown - 2, known.audit),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, unknown - 4, 0, _X32),
        (_EQUAL, unknown - 5, 0, _IO_URING_SETUP),
        (_EQUAL, 0, allow - 6, known.socket),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        *((_EQUAL, allow - 8 - n, unsupported - 8 - n if n == families - 1 else 0, f) for n, f in enumerate(FAMILIES)),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        (_RETURN, 0, 0, _REFUSE | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in code)


def restrict() -> None:
    """From now on, for this process and all it starts. It has given up new privileges already."""
    syscalls.filter_system_calls(program(os.uname().machine))
