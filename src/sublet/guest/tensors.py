"""How tensors of PyTorch travel: their storages as large buffers, so that they are not copied into the pickle.

Tensors that share a storage share it again on the other side. One on a GPU does not travel: taking it apart would touch
CUDA in a process that must not, or bring it up in the holder when it is put together. Loaded only where torch is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from sublet.errors import InvalidRequest


def tensor_reducers(table: Mapping[type, Callable[[Any], Any]]) -> dict[type, Callable[[Any], Any]]:
    """The table of a pickler, with tensors. One for each pickle: it remembers the storages it has met."""
    torch = sys.modules["torch"]
    storages: dict[int, Any] = {}

    def reduce(tensor: Any) -> Any:
        if tensor.is_cuda:
            raise InvalidRequest(
                f"a tensor on {tensor.device} cannot travel to another process",
                do="Move it with .cpu(); on the GPU it lives inside the functions that run there.",
            )
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.__reduce_ex__(5)
        if not tensor.is_leaf:
            raise InvalidRequest(
                "a tensor with a gradient history cannot travel to another process", do="Send tensor.detach()."
            )
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages or not key:
            storages[key] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        view = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride())
        extra = dict(tensor.__dict__)
        return _rebuild, (storages[key], tensor.dtype, view, tensor.requires_grad, type(tensor), extra)

    return {**table, torch.Tensor: reduce, torch.nn.Parameter: reduce}


def _rebuild(storage: Any, dtype: Any, view: Any, requires_grad: bool, kind: Any, extra: dict[str, Any]) -> Any:
    import torch

    base = torch.from_numpy(storage)
    made: Any = torch.empty(0, dtype=dtype).set_(base.untyped_storage(), *view)
    if kind is torch.nn.Parameter:
        made = torch.nn.Parameter(made, requires_grad)
    elif requires_grad:
        made.requires_grad_()
    made.__dict__.update(extra)
    return made
