"""Functions that workers run on pretended cards: they fill a piece of memory, and look later whether it is the same."""

from __future__ import annotations

import os
from typing import Any, Final

__all__ = ["begin", "look"]

SIZE: Final = 16 << 20
BYTE: Final = 0xA7  # not what the office writes when it tries a card out

_kept: list[Any] = []


def begin() -> tuple[int, str, bool]:
    """On the first card that CUDA shows."""
    from sublet.devices.plain_cuda import open_plain_driver

    driver = open_plain_driver()
    device = driver("t", "cuDeviceGet", 0)
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
    memory = driver("t", "cuMemAlloc", SIZE)
    driver("t", "cuMemsetD8", memory, BYTE, SIZE)
    _kept[:] = driver, device, memory
    return look()


def look() -> tuple[int, str, bool]:
    """This process, the UUID of its card, and whether its memory is what it was."""
    import ctypes

    driver, device, memory = _kept
    driver("t", "cuCtxSetCurrent", driver("t", "cuDevicePrimaryCtxRetain", device))
    back = ctypes.create_string_buffer(SIZE)
    driver("t", "cuMemcpyDtoH", ctypes.addressof(back), memory, SIZE)
    uuid = bytes(driver("t", "cuDeviceGetUuid", device).bytes).hex()
    return os.getpid(), uuid, back.raw == bytes([BYTE]) * SIZE
