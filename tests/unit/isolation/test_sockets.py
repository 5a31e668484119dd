"""The filter of system calls, judged by a reader of its own for the packet filter's language."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from sublet.supervisor.isolation.sockets import FAMILIES, program

ALLOWED = "allowed"
X86_64, I386, AARCH64 = 0xC000003E, 0x40000003, 0xC00000B7
SOCKET = {"x86_64": 41, "aarch64": 198}


def verdict(code: bytes, audit: int, number: int, first: int = 0) -> str | int:
    """``allowed``, or the error. Every way ends: jumps only lead forward."""
    data = struct.pack("<IIQQ", number, audit, 0, first)
    lines = [struct.unpack_from("<HBBI", code, at) for at in range(0, len(code), 8)]
    here = value = 0
    while True:
        operation, if_so, if_not, operand = lines[here]
        here += 1
        match operation:
            case 0x20:
                value = struct.unpack_from("<I", data, operand)[0]
            case 0x15:
                here += if_so if value == operand else if_not
            case 0x35:
                here += if_so if value >= operand else if_not
            case 0x06:
                return ALLOWED if operand == 0x7FFF0000 else operand & 0xFFFF
            case _:
                raise AssertionError(f"no such operation: {operation:#x}")


@pytest.mark.parametrize(("machine", "audit"), [("x86_64", X86_64), ("aarch64", AARCH64)])
def test_the_usual_families_and_no_others(machine: str, audit: int) -> None:
    code = program(machine)
    for family in range(64):
        expected = ALLOWED if family in FAMILIES else errno.EAFNOSUPPORT
        assert verdict(code, audit, SOCKET[machine], family) == expected, family
        # The kernel takes an int, so what stands in the upper half must change nothing.
        assert verdict(code, audit, SOCKET[machine], family | 1 << 32) == expected
    assert {*FAMILIES} >= {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}


@pytest.mark.parametrize(("machine", "audit"), [("x86_64", X86_64), ("aarch64", AARCH64)])
def test_every_other_call_passes_but_the_rings(machine: str, audit: int) -> None:
    code = program(machine)
    for number in range(600):
        if number != SOCKET[machine]:
            assert verdict(code, audit, number, 40) == (errno.ENOSYS if number == 425 else ALLOWED), number


@pytest.mark.parametrize("number", [0, 41, 102, 359, 425])
def test_the_calls_of_another_architecture_are_not_there(number: int) -> None:
    assert verdict(program("x86_64"), I386, number, socket.AF_UNIX) == errno.ENOSYS
    assert verdict(program("x86_64"), X86_64, number | 0x40000000, socket.AF_UNIX) == errno.ENOSYS


def test_a_machine_that_is_not_known_is_said() -> None:
    with pytest.raises(OSError, match="sparc64"):
        program("sparc64")
