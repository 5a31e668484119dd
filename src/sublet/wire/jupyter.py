"""Jupyter messages on a connection: each channel of the protocol is a stream of whole messages.

A message is what ZeroMQ calls multipart: some parts of bytes. Here it is a count, the lengths, then the parts. Neither
side looks into them; that is for the kernel and its front end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from sublet.values import MIB
from sublet.wire.frames import protocol_error
from sublet.wire.zygote import LATER

CHANNELS: Final = ("shell", "control", "stdin", "iopub")
"""By the names that the Jupyter protocol gives them. A line opens each of them once."""
DELIMITER: Final = b"<IDS|MSG>"
"""Between the names that a message is for and its parts: signature, header, parent, metadata, content, buffers."""
MESSAGE_MAX: Final = 256 * MIB
"""Bytes of one message: a large picture is some; a gigabyte belongs in shared memory."""
PARTS_MAX: Final = 256

KERNEL_ENTRY: Final = "sublet.guest.kernel:main"
"""The program of a guest that is a kernel."""
KERNEL_IMPORTS: Final = (
    "ipykernel.kernelapp",
    "ipykernel.ipkernel",
    "ipykernel.zmqshell",
    "IPython.core.completer",
    "IPython.core.completerlib?",
    "IPython.core.debugger?",
    "IPython.core.history",
    "IPython.core.oinspect?",
    "IPython.extensions.storemagic?",
    "tornado.platform.asyncio",
    "sublet.guest.kernel",
    "sublet.guest.kernel_app",
    "sublet.guest.checkpoints",
    "sublet.notebook.guest_side?",
    "cloudpickle?",
    "numpy?",
    "torch?",
    LATER,
    "matplotlib_inline.config?",
    "warp?",
)
"""What a warm interpreter for kernels imports: all that a kernel does between its first step and its first cell."""

_COUNT: Final = struct.Struct("!I")


def pack_message(parts: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """The bytes of one message on its stream."""
    lengths = [memoryview(part).nbytes for part in parts]
    if len(parts) > PARTS_MAX or sum(lengths) > MESSAGE_MAX:
        raise protocol_error(f"a message of {len(parts)} parts and {sum(lengths)} bytes is over the limit")
    return b"".join((struct.pack(f"!I{len(parts)}I", len(parts), *lengths), *parts))


class Messages:
    """Puts messages together from whatever pieces a stream comes in."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """All that are complete now. Raises ``InvalidRequest`` for what cannot be one."""
        self._bytes += data
        found = []
        while (parts := self._next()) is not None:
            found.append(parts)
        return found

    def _next(self) -> list[bytes] | None:
        if len(self._bytes) < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(self._bytes)
        if count > PARTS_MAX:
            raise protocol_error(f"a message announced {count} parts")
        at = _COUNT.size * (1 + count)
        if len(self._bytes) < at:
            return None
        lengths = struct.unpack_from(f"!{count}I", self._bytes, _COUNT.size)
        if sum(lengths) > MESSAGE_MAX:
            raise protocol_error(f"a message announced {sum(lengths)} bytes")
        if len(self._bytes) < at + sum(lengths):
            return None
        parts = []
        for length in lengths:
            parts.append(bytes(self._bytes[at : at + length]))
            at += length
        del self._bytes[:at]
        return parts
