"""Arrays and tensors as memory ranges: which overlap, and how to rebuild one as a view of another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from sublet.durable.rebuild import computed_tensor, is_computed_elsewhere, operation_of
from sublet.errors import Unpicklable
from sublet.state.transfer.memory import copy_bytes, memory_at
from sublet.state.transfer.pages import process_pages
from sublet.state.transfer.reducers import loaded
from sublet.state.transfer.sealed import move
from sublet.state.transfer.shared_arrays import Exchanged, area_at, exchange

MOVED_MIN: Final = 1 << 20
Span = tuple[int, int]
"""From the first byte to behind the last."""


class Window(NamedTuple):
    """The memory of an array that came, and of what stands for it."""

    target: Any
    came: Any
    old: Span
    new: Span
    is_fresh: bool
    """Nothing here is its original."""

    @property
    def key(self) -> int:
        return id(self.came)


def windows_of(target: Any, came: Any, *, is_fresh: bool) -> list[Window]:
    """The one window, or none where there is no memory."""
    old, new = _span_of(target), _span_of(came)
    return [] if old is None or new is None else [Window(target, came, old, new, is_fresh)]


def overlapping(windows: Sequence[Window], span: Callable[[Window], Span]) -> Iterator[tuple[Window, Window]]:
    """Every pair that shares a byte on this side."""
    line = sorted(windows, key=span)
    for n, one in enumerate(line):
        for other in line[n + 1 :]:
            if span(other)[0] >= span(one)[1]:
                break
            yield one, other


def view_of(original: Any, copy: Any, part: Any) -> Any:
    """What looks at the original as ``part`` looks at the copy, within whose memory it lies."""
    start, at = _start(original), _start(part) - _start(copy)
    if is_array(part):
        numpy = sys.modules["numpy"]
        looked = numpy.asarray(_Looked(original, start + at, part))
        looked = looked if looked.dtype == part.dtype else looked.view(part.dtype)
        if not part.flags.writeable:
            looked.flags.writeable = False
        if type(part) is numpy.ndarray:
            return looked
        looked = looked.view(type(part))
        looked.__dict__.update(part.__dict__)
        return looked
    torch = sys.modules["torch"]
    if is_array(original):
        return part
    storage = original.untyped_storage()
    offset = (start + at - storage.data_ptr()) // part.element_size()
    looked = torch.empty(0, dtype=part.dtype).set_(storage, offset, part.size(), part.stride())
    if type(part) is torch.nn.Parameter:
        looked = torch.nn.Parameter(looked, part.requires_grad)
    elif part.is_leaf:
        looked.requires_grad_(part.requires_grad)
    else:
        looked = computed_tensor(looked, operation_of(part), part.retains_grad)
        looked.grad = gradient_of(part)
    looked.__dict__.update(part.__dict__)
    return looked


class _Looked:
    """Memory of an array, whose views keep it alive."""

    def __init__(self, owner: Any, address: int, like: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": like.shape,
            "typestr": like.dtype.str,
            "descr": like.dtype.descr,
            "strides": like.strides,
            "data": (address, is_array(owner) and not owner.flags.writeable),
        }


def is_memory(value: Any) -> bool:
    """An array or a tensor."""
    return is_array(value) or is_tensor(value)


def is_array(value: Any) -> bool:
    numpy = loaded("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_tensor(value: Any) -> bool:
    torch = loaded("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def same_array(old: Any, new: Any) -> bool:
    """Whether the one can take what the other holds and be as it is."""
    if old.dtype != new.dtype or old.shape != new.shape:
        return False
    if is_settled(old):
        return bool((old.view(sys.modules["numpy"].ndarray) == new).all())
    return bool(old.strides == new.strides)


def is_settled(value: Any) -> bool:
    """Whether an array cannot take over anything: it is read-only, or it shows some memory twice."""
    twice = any(step == 0 and n > 1 for step, n in zip(value.strides, value.shape, strict=True))
    return bool(twice or not value.flags.writeable)


def same_tensor(old: Any, new: Any) -> bool:
    """The same of tensors. Raises ``Unpicklable`` if the old one would lose its autograd graph."""
    alike = bool(
        old.dtype == new.dtype
        and old.shape == new.shape
        and old.layout == new.layout
        and old.stride() == new.stride()
        and old.device == new.device
        and old.is_leaf == new.is_leaf
        and (old.is_leaf or old.requires_grad == new.requires_grad)
        and old.is_inference() == new.is_inference()
    )
    if not alike or old.is_leaf or (is_computed_elsewhere(old) and operation_of(old) == operation_of(new)):
        return alike
    if same_values(old, new):
        return True
    if is_computed_elsewhere(old):
        return False
    raise Unpicklable(
        "a tensor was changed on one side, and its autograd graph is on the other",
        what="a tensor that was changed on this side while its autograd graph is on the other; change a copy of it "
        "(x = x.detach().clone()), or change it where it was computed",
    )


def is_given_memory(old: Any, new: Any) -> bool:
    """Whether a leaf tensor was given other numbers as a whole (``p.data = ...``, ``model.half()``), so that its memory
    cannot take them, and the tensor can: it is then given them in the same way."""
    torch = sys.modules["torch"]
    if not is_tensor(old) or type(old) is not type(new) or not (old.is_leaf and new.is_leaf):
        return False
    if old.is_inference() or new.is_inference() or old.is_quantized or new.is_quantized:
        return False
    if old.device != new.device or not (old.layout is new.layout is torch.strided):
        return False
    return bool(old.dtype != new.dtype or old.shape != new.shape or old.stride() != new.stride())


def same_values(old: Any, new: Any) -> bool:
    """Whether two tensors that are alike hold the same bytes. Quantized ones are not looked into: their bytes mean
    nothing without their scales, and PyTorch crashes the process that looks at them as bytes."""
    torch = sys.modules["torch"]
    if old.is_quantized or new.is_quantized:
        return False
    try:
        one, other = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (old, new))
        return bool(torch.equal(one, other))
    except (RuntimeError, NotImplementedError):
        return False


def gradient_of(tensor: Any) -> Any:
    """Its gradient, where it keeps one."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def move_array(target: Any, new: Any) -> None:
    """Write all of an array into another of the same layout; large ones by moving their pages, where that can be."""
    start, length = _start(target), target.nbytes
    if length >= MOVED_MIN and target.flags.forc and new.flags.forc:
        at = _start(new)
        if not move(start, at, length) and not _exchange(start, at, length):
            process_pages().unprotect(start, length)
            copy_bytes(memory_at(start, length), memory_at(at, length))
        return
    ndarray = sys.modules["numpy"].ndarray
    target.view(ndarray)[...] = new.view(ndarray)


def _exchange(start: int, at: int, length: int) -> bool:
    target, source = area_at(start, length), area_at(at, length)
    exchanged = None if target is None or source is None else exchange(target, source)
    if exchanged is not None:
        _exchanged.append(exchanged)
    return exchanged is not None


def take_exchanged() -> list[Exchanged]:
    """Those that were exchanged and are to be finished; they are the caller's from here on."""
    found = list(_exchanged)
    _exchanged.clear()
    return found


_exchanged: Final[list[Exchanged]] = []


def _start(value: Any) -> int:
    return int(value.__array_interface__["data"][0]) if is_array(value) else int(value.data_ptr())


def _span_of(value: Any) -> Span | None:
    """None if it has no memory of its own."""
    if is_array(value) and value.size and not value.dtype.hasobject:
        low, high = sys.modules["numpy"].lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    if is_tensor(value) and value.device.type == "cpu" and value.layout is sys.modules["torch"].strided:
        reach = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        return (value.data_ptr(), value.data_ptr() + (reach + 1) * value.element_size()) if value.numel() else None
    return None
