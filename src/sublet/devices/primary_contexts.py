"""Counts the CUDA contexts of this process, without loading the driver or making one."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def loaded_driver() -> Any:
    """The CUDA driver's library, if this process has it already; None otherwise. Loads nothing."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def contexts(driver: Any) -> int:
    """On how many cards this process has a primary context, which torch, Warp and the runtime share. Makes none."""
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:  # not begun
        return 0
    found = 0
    for device in range(count.value):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        known = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += known and active.value != 0
    return found
