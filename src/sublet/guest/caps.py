"""Sets PyTorch's memory limit to the lease's share of a GPU before the first allocation.

This is for programs that mean well; one that does not may set it back, and is ended when the driver shows that it has
too much (``node.processes.memory_watch``). Warp has no such bound to be set: of it, and of whatever else allocates,
only that watch knows. Nothing is imported here, and CUDA is not begun: the bound is left with PyTorch for when it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from sublet.guest.usage_counters import VRAM_VARIABLE
from sublet.wire.orders import card_uuid

_TORCH: Final = "torch"


def cap_torch(devices: Sequence[str], caps: Sequence[int] | None = None, *, own: int = 0) -> bool:
    """Bound PyTorch on the cards among these devices, now or when it is imported. It sees them in this order, with its
    own before the others. Whether there is anything to bound."""
    if caps is None:
        caps = [int(cap) for cap in os.environ.get(VRAM_VARIABLE, "").split(",") if cap]
    pairs = list(zip(devices, caps, strict=False))
    pairs = [*pairs[own : own + 1], *pairs[:own], *pairs[own + 1 :]]
    cards = [cap for device, cap in pairs if card_uuid(device)]
    if not cards:
        return False
    loaded = sys.modules.get(_TORCH)
    if loaded is not None:
        _cap(loaded, cards)
    else:
        sys.meta_path.insert(0, _WhenImported(_TORCH, lambda module: _cap(module, cards)))
    return True


def _cap(torch: Any, caps: Sequence[int]) -> None:
    def apply() -> None:
        for ordinal, cap in enumerate(caps[: torch.cuda.device_count()]):
            whole = torch.cuda.get_device_properties(ordinal).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap / whole), ordinal)

    torch.cuda._lazy_call(apply)  # at once where CUDA has begun, else with its beginning


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls back once, when a module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec
