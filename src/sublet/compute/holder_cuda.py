"""CUDA in the program that holds a lease, seen before it does harm.

The holder's process must not touch the GPU: what it allocates lies outside of every lease, nobody tears it down, and
memory that is not back at its baseline keeps the card from the next one. Most often it is one call too many, such as
``torch.cuda.is_available()`` being followed by ``.to("cuda")`` at import. So it is said at the first call, in words.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Final

from sublet.errors import InvalidRequest
from sublet.values import Kind

if TYPE_CHECKING:
    from sublet.client.handle import LeaseFacts

__all__ = ["ALLOWED_BY", "check_holder", "open_cards"]

ALLOWED_BY: Final = "SUBLET_HOLDER_CUDA"
"""Set to ``allow`` by who has a card of his own in this program and knows what he does."""
_HARMLESS: Final = frozenset(("/dev/nvidiactl", "/dev/nvidia-modeset"))
"""Opened by who merely looks (NVML)."""
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
    cards = open_cards()
    if cards:
        raise InvalidRequest(
            f"the program that holds the lease has {', '.join(cards)} open: something in it uses CUDA", do=_DO
        )


def open_cards(folder: str = "/proc/self/fd") -> list[str]:
    """The device files of cards that this process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                path = os.readlink(os.path.join(folder, name))
                if path.startswith("/dev/nvidia") and path not in _HARMLESS:
                    found.add(path)
    return sorted(found)
