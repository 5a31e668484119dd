"""Detects CUDA in the program that holds a lease, before it does harm.

The holder's process must not touch the GPU: what it allocates lies outside of every lease, is not torn down, and
memory that is not back at its baseline keeps the card from the next lease. Most often it is one call too many, such as
``torch.cuda.is_available()`` being followed by ``.to("cuda")`` at import. So it is said at the first call, in words.

What counts is a context. CUDA that was only begun (that very question does it, in the first cell of most notebooks)
keeps device files open and has nothing of a card; so has who asks NVML.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import InvalidRequest
from sublet.values import Kind

if TYPE_CHECKING:
    from sublet.client.handle import LeaseFacts

ALLOWED_BY: Final = "SUBLET_HOLDER_CUDA"
"""Set to ``allow`` by who has a card of his own in this program and knows what he does."""
_DO: Final = (
    "Move what uses CUDA into the function that is called, and restart this program; "
    f"or, if it has another card of its own, set {ALLOWED_BY}=allow."
)


def check_holder(lease: LeaseFacts) -> None:
    """Raise if this program uses CUDA while it holds a lease of a real GPU."""
    if not any(device.kind is Kind.GPU and not device.host for device in lease.devices):
        return
    if os.environ.get(ALLOWED_BY) == "allow":
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise InvalidRequest("torch has begun to use CUDA in the program that holds the lease", do=_DO)
    count = contexts(loaded_driver())
    if count:
        cards = "a card" if count == 1 else f"{count} cards"
        raise InvalidRequest(f"the program that holds the lease has a CUDA context on {cards}", do=_DO)


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
