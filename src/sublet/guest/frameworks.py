"""What frameworks keep of a device for later, given back before this process is taken off it.

PyTorch, CuPy and Warp hold on to memory that the program has freed, so that it need not be asked for again. To take it
along when a process leaves its GPU would cost host memory and time for nothing. Only what is loaded is asked, by its
own public calls, and only where it has begun to use the device: asking must not begin it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

_log = logging.getLogger("sublet.guest")


def free_caches(modules: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Which frameworks gave something back. One that cannot is left as it is, and the others are asked."""
    loaded = sys.modules if modules is None else modules
    done = []
    for name, free in _FREE.items():
        framework = loaded.get(name)
        if framework is None:
            continue
        try:
            if free(framework):
                done.append(name)
        except Exception:  # noqa: BLE001 - it goes along as it is, which only costs
            _log.warning("%s could not give back what it keeps", name, exc_info=True)
    return tuple(done)


def _torch(torch: Any) -> bool:
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.empty_cache()
    return True


def _cupy(cupy: Any) -> bool:
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return True


def _warp(warp: Any) -> bool:
    """Its pool gives back what is above a threshold whenever the device is waited for."""
    if not _has_begun(warp):
        return False
    found = False
    for device in warp.get_cuda_devices():
        if device.has_context and warp.is_mempool_enabled(device):
            before = warp.get_mempool_release_threshold(device)
            warp.set_mempool_release_threshold(device, 0)
            try:
                warp.synchronize_device(device)
            finally:
                warp.set_mempool_release_threshold(device, before)
            found = True
    return found


def _has_begun(warp: Any) -> bool:
    """Whether ``warp.init`` was called, which none of its public names tells; where that is kept depends on its age."""
    inner = getattr(warp, "_src", warp)
    return getattr(getattr(inner, "context", None), "runtime", None) is not None


_FREE: Final[Mapping[str, Callable[[Any], bool]]] = {"torch": _torch, "cupy": _cupy, "warp": _warp}
