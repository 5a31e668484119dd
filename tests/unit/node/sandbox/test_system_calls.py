"""The filter of system calls, judged by a reader of its own for the packet filter's language."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path

import pytest

from sublet.node.sandbox.system_calls import (
    FAMILIES,
    LAST,
    NAMESPACES,
    PERSONALITIES,
    names,
    number_of,
    program,
    refused_names,
)

ALLOWED = "allowed"
X86_64, I386, AARCH64, RISCV64 = 0xC000003E, 0x40000003, 0xC00000B7, 0xC00000F3
MACHINES = [("x86_64", X86_64), ("aarch64", AARCH64), ("riscv64", RISCV64)]
BY_ARGUMENT = ("socket", "socketpair", "personality", "clone", "mknod", "mknodat")
NOT_THERE = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")


def verdict(code: bytes, audit: int, number: int, *words: int) -> str | int:
    """``allowed``, or the error. Every way ends: jumps only lead forward."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *words, *(0,) * (6 - len(words)))
    lines = [struct.unpack_from("<HBBI", code, at) for at in range(0, len(code), 8)]
    here = value = 0
    while True:
        operation, if_so, if_not, operand = lines[here]
        here += 1
        match operation:
            case 0x20:
                value = struct.unpack_from("<I", data, operand)[0]
            case 0x54:
                value &= operand
            case 0x05:
                here += operand
            case 0x15:
                here += if_so if value == operand else if_not
            case 0x35:
                here += if_so if value >= operand else if_not
            case 0x45:
                here += if_so if value & operand else if_not
            case 0x06:
                return ALLOWED if operand == 0x7FFF0000 else operand & 0xFFFF
            case _:
                raise AssertionError(f"no such operation: {operation:#x}")


def asked(machine: str, name: str, *words: int) -> str | int:
    number = number_of(name, machine)
    assert number is not None
    return verdict(program(machine), dict(MACHINES)[machine], number, *words)


@pytest.mark.parametrize(("machine", "audit"), MACHINES)
def test_what_is_listed_passes_and_nothing_else(machine: str, audit: int) -> None:
    code = program(machine)
    allowed = {number_of(name, machine) for name in names() if name not in BY_ARGUMENT} - {None}
    by_argument = {number_of(name, machine) for name in BY_ARGUMENT}
    not_there = {number_of(name, machine) for name in NOT_THERE}
    for number in range(LAST + 200):
        if number not in by_argument:
            refused = errno.ENOSYS if number > LAST or number in not_there else errno.EPERM
            assert verdict(code, audit, number) == (ALLOWED if number in allowed else refused), number


@pytest.mark.parametrize(("machine", "audit"), MACHINES)
def test_no_name_is_both_allowed_and_refused_and_no_number_has_two_names(machine: str, audit: int) -> None:
    assert not names() & refused_names()
    numbers = [number_of(name, machine) for name in names() | refused_names()]
    there = [number for number in numbers if number is not None]
    assert len(there) == len(set(there))
    assert max(there) == LAST


def test_the_numbers_are_the_kernels() -> None:
    """By the header of this machine's C library, where there is one; it may be older than the table."""
    machine = os.uname().machine
    header = Path(f"/usr/include/{machine}-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no header of the kernel's numbers is installed (package linux-libc-dev)")
    known = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    for name, number in known.items():
        assert number_of(name.removeprefix("__NR_"), machine) == int(number), name


@pytest.mark.parametrize("machine", [machine for machine, _ in MACHINES])
def test_the_usual_families_and_no_others(machine: str) -> None:
    for family in range(64):
        expected = ALLOWED if family in FAMILIES else errno.EAFNOSUPPORT
        for name in ("socket", "socketpair"):
            assert asked(machine, name, family) == expected, family
            # The kernel takes an int, so what stands in the upper half must change nothing.
            assert asked(machine, name, family | 1 << 32) == expected
    assert {*FAMILIES} >= {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}


@pytest.mark.parametrize("machine", [machine for machine, _ in MACHINES])
def test_processes_but_no_namespaces(machine: str) -> None:
    for bit in range(32):
        expected = errno.EPERM if NAMESPACES & 1 << bit else ALLOWED
        assert asked(machine, "clone", 1 << bit) == expected, hex(1 << bit)
    assert asked(machine, "clone", 0x3D0F00) == ALLOWED, "a thread, as the C library makes one"
    assert NAMESPACES == 0x7E020000


@pytest.mark.parametrize("machine", [machine for machine, _ in MACHINES])
def test_personalities_that_change_nothing_of_how_memory_is_laid_out(machine: str) -> None:
    for persona in (*range(256), *(1 << bit for bit in range(32)), 0x20008, 0xFFFFFFFF, 0xFFFFFFFE):
        expected = ALLOWED if persona in PERSONALITIES else errno.EPERM
        assert asked(machine, "personality", persona) == expected, hex(persona)


@pytest.mark.parametrize("machine", [machine for machine, _ in MACHINES])
def test_pipes_and_files_but_no_devices(machine: str) -> None:
    devices = (stat.S_IFCHR, stat.S_IFBLK)
    for kind in (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, *devices):
        expected = errno.EPERM if kind in devices else ALLOWED
        assert asked(machine, "mknodat", 3, 0, kind | 0o666) == expected
        if machine == "x86_64":
            assert asked(machine, "mknod", 0, kind | 0o666) == expected


@pytest.mark.parametrize("number", [0, 41, 102, 359, 425])
def test_the_calls_of_another_architecture_are_not_there(number: int) -> None:
    assert verdict(program("x86_64"), I386, number, socket.AF_UNIX) == errno.ENOSYS
    assert verdict(program("x86_64"), X86_64, number | 0x40000000, socket.AF_UNIX) == errno.ENOSYS


def test_a_machine_that_is_not_known_is_said() -> None:
    with pytest.raises(OSError, match="sparc64"):
        program("sparc64")
