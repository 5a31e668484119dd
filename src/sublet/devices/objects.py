"""Checks whether bytes can be PTX or a cubin before a driver sees them.

A driver is handed an address and no length, so it would read on behind the end of what is cut short.
"""

from __future__ import annotations

import struct
from typing import Final

from sublet.errors import InvalidRequest

_ELF_MAGIC: Final = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_ELF_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_ELF_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_ELF_PROGRAM: Final = struct.Struct("<IIQQQQQQ")
_ELF_CUDA: Final = 190
_NO_BITS: Final = 8
"""The type of sections that take no room in the file."""


def check_ptx(data: bytes) -> None:
    """Raises for what is no PTX."""
    if b".version" not in data or b".target" not in data:
        raise InvalidRequest("module_load: this is no PTX: it names no version or target", do="Give the PTX text.")
    if b"\0" in data.rstrip(b"\0"):
        raise InvalidRequest("module_load: this is no PTX: there is a zero byte in it", do="Give the PTX text.")


def check_cubin(data: bytes) -> None:
    """Raises for what is no cubin, or one that is cut short."""
    if len(data) < _ELF_HEADER.size or not data.startswith(_ELF_MAGIC):
        raise _no_cubin("it is not an ELF file of 64 bits")
    (_, _, machine, _, _, programs, sections, _, _, program_size, program_count, section_size, section_count, _) = (
        _ELF_HEADER.unpack_from(data)
    )
    if machine != _ELF_CUDA:
        raise _no_cubin("it is not made for a GPU of NVIDIA")
    if (section_count and section_size != _ELF_SECTION.size) or (program_count and program_size != _ELF_PROGRAM.size):
        raise _no_cubin("its tables have entries of another size")
    if sections + section_count * section_size > len(data) or programs + program_count * program_size > len(data):
        raise _no_cubin("it is cut short")
    for index in range(section_count):
        _, kind, _, _, offset, size, *_ = _ELF_SECTION.unpack_from(data, sections + index * section_size)
        if kind != _NO_BITS and offset + size > len(data):
            raise _no_cubin("it is cut short")
    for index in range(program_count):
        _, _, offset, _, _, size, _, _ = _ELF_PROGRAM.unpack_from(data, programs + index * program_size)
        if offset + size > len(data):
            raise _no_cubin("it is cut short")


def _no_cubin(why: str) -> InvalidRequest:
    return InvalidRequest(f"module_load: this is no cubin: {why}", do="Give the whole cubin.")
