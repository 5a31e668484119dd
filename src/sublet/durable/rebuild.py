"""What heads call by name to make objects of windows again. These names are part of the format: never rename one.

Runs where ``loading`` runs. A library is imported here only because the value that is being loaded needs it.
"""

from __future__ import annotations

import sys
from typing import Any

from sublet.errors import Unsupported

__all__ = ["array", "home", "itself", "memory_view", "set_grad", "torch_storage", "torch_typed_storage"]


def array(window: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> Any:
    """A numpy array over a window; without strides it is in C order."""
    import numpy as np

    return np.ndarray(shape, dtype, window, offset, strides)


def memory_view(window: Any, code: str, shape: tuple[int, ...]) -> memoryview:
    """A contiguous memoryview over a window."""
    flat = memoryview(window)
    if code == "B" and len(shape) == 1:
        return flat
    return flat.cast(code, list(shape))  # type: ignore[call-overload,no-any-return]


def torch_storage(window: Any, device: str) -> Any:
    """A storage of PyTorch over a window; copied where the window is read-only (tensors know no such thing) or where
    the storage was on a device."""
    import torch

    view = memoryview(window)
    if not view.nbytes:
        storage = torch.UntypedStorage(0)
    else:
        storage = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8).untyped_storage()
    if device == "cpu":
        return storage
    return _on_device(storage, device)


def _on_device(storage: Any, device: str) -> Any:
    """Back on its device. Another device of the same kind will do; the host's memory for a GPU's will not, unasked."""
    torch = sys.modules["torch"]
    kind, _, index = device.partition(":")
    there = getattr(torch, kind, None)
    if there is None or not there.is_available():
        raise Unsupported(
            f"a tensor was saved on {device}, and there is no such device here",
            do="Restore it where there is one, or move the state to the CPU before it is saved.",
        )
    if index and int(index) >= there.device_count():
        device = kind
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()


def torch_typed_storage(storage: Any, dtype: Any) -> Any:
    """A storage that knows the type of its numbers."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def set_grad(tensor: Any, grad: Any) -> None:
    """Give a tensor its gradient back."""
    tensor.grad = grad


def itself(value: Any) -> Any:
    """The same object again."""
    return value


def home() -> dict[str, Any]:
    """The namespace of the program itself: functions that were defined in a notebook see it as their globals, in the
    guest that of the guest."""
    return vars(sys.modules["__main__"])
