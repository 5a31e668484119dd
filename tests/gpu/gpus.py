"""Which GPU the tests that need one use (the first that the driver shows), and how much of it.

``SUBLET_GPU_MIB`` makes a large piece of memory smaller than the gibibyte that it is, ``SUBLET_GPU_PROGRAMS`` the
random programs fewer: on pretended cards (``tests/rig/test_gpu_suite.py``) memory is the host's.
"""

from __future__ import annotations

import os
from typing import Final

from sublet.devices.account import MemoryAccount
from sublet.devices.cuda import CudaDevice
from sublet.devices.cuda_driver import open_driver
from sublet.values import MIB

__all__ = ["FAULT", "FILL", "LARGE", "PROGRAMS", "SOURCES", "first_gpu", "open_first"]

LARGE: Final = int(os.environ.get("SUBLET_GPU_MIB", "1024")) * MIB
PROGRAMS: Final = int(os.environ.get("SUBLET_GPU_PROGRAMS", "200"))


def first_gpu() -> str:
    """Its UUID, as ``nvidia-smi`` writes it."""
    driver = open_driver()
    found = bytes(driver("open", "cuDeviceGetUuid", driver("open", "cuDeviceGet", 0)).bytes).hex()
    return f"GPU-{found[:8]}-{found[8:12]}-{found[12:16]}-{found[16:20]}-{found[20:]}"


def open_first(account: MemoryAccount, cache: str) -> CudaDevice:
    """A session's device on it."""
    return CudaDevice("gpu-0", first_gpu(), account, cache=cache)


FAULT: Final = b"""
extern "C" __global__ void fault(unsigned long long* p) { *p = 1; }
"""
"""Writes where it is told; an address that is nobody's ends the context."""
FILL: Final = b"""
extern "C" __global__ void first_word(unsigned long long* p) { *p = 7; }
"""
SOURCES: Final = {"fault": FAULT, "fill": FILL}
"""CUDA C++ of these tests beside ``sublet.testing.device_conformance``; the ordinary tests compile it for sm_90."""
