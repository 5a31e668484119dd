"""Computes the number of threads of a launch within what the device and Warp allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sublet.errors import InvalidRequest
from sublet.values import shown

Extent = tuple[int, int, int]

AXES: Final = "xyz"
GRID_MAX: Final = ((1 << 31) - 1, 65_535, 65_535)
BLOCK_MAX: Final = (1024, 1024, 64)
BLOCK_THREADS_MAX: Final = 1024
"""The limits of every CUDA device there is today. They hold on host devices too: what runs here runs there."""
INDEX_MAX: Final = (1 << 31) - 1
"""A Warp kernel learns its place as 32-bit numbers."""


def whole_extent(given: int | Sequence[int], what: str) -> Extent:
    """Grid or block with all three axes, each within its limit. ``what`` is ``"grid"`` or ``"block"``."""
    axes: tuple[int, ...] = tuple(given) if isinstance(given, Sequence) else (given,)
    limits = GRID_MAX if what == "grid" else BLOCK_MAX
    if not 1 <= len(axes) <= 3 or not all(type(n) is int for n in axes):
        raise InvalidRequest(f"launch: {what} {shown(given)} is not one to three whole numbers", do="Give (x, y, z).")
    for axis, count, limit in zip(AXES, axes, limits, strict=False):
        if not 1 <= count <= limit:
            raise InvalidRequest(
                f"launch: {what} has {shown(count)} in {axis}, and 1 to {limit} are possible", do=_DO[what]
            )
    x, y, z = (*axes, 1, 1)[:3]
    if what == "block" and x * y * z > BLOCK_THREADS_MAX:
        raise InvalidRequest(
            f"launch: a block of {x}×{y}×{z} has {x * y * z} threads, and {BLOCK_THREADS_MAX} are possible",
            do=_DO["block"],
        )
    return x, y, z


_DO: Final = {
    "grid": "Give every axis at least 1, and let each thread do more where a grid would be too large.",
    "block": "Use smaller blocks and a larger grid.",
}


def warp_dim(grid: Extent, block: Extent) -> tuple[int, ...]:
    """The dimensions of a Warp launch: grid × block for each axis, without the ones at the end."""
    dim = [g * b for g, b in zip(grid, block, strict=True)]
    for axis, count in zip(AXES, dim, strict=True):
        if count > INDEX_MAX:
            raise InvalidRequest(
                f"launch: grid × block is {count} in {axis}, and a Warp kernel can count to {INDEX_MAX}", do=_DO["grid"]
            )
    while len(dim) > 1 and dim[-1] == 1:
        dim.pop()
    return tuple(dim)
