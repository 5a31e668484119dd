"""A program's own Warp kernels, with all that they may use."""

# mypy: ignore-errors
# A kernel's annotations are Warp's types, made by calls; its body is no Python that runs.
from __future__ import annotations

import math
from typing import Any

import warp as wp

from_elsewhere = wp.float32
COUNT = 7
ENDLESS = math.inf
TABLE = {"a": 1}


@wp.struct
class Pair:
    a: wp.float32
    b: from_elsewhere


@wp.func
def twice(x: from_elsewhere) -> wp.float32:
    return x * 2.0


@wp.func
def more(x: wp.float32) -> wp.float32:
    pair = Pair()
    pair.a = twice(x)
    pair.b = wp.float32(COUNT)
    return pair.a + pair.b


@wp.kernel
def first(x: wp.array(dtype=wp.float32)) -> None:
    i = wp.tid()
    if wp.float32(i) < ENDLESS:
        x[i] = more(wp.float32(i))


@wp.kernel
def with_a_table(x: wp.array(dtype=wp.float32)) -> None:
    x[0] = wp.float32(TABLE["a"])


def made(number: int) -> Any:
    @wp.kernel(enable_backward=False)
    def captured(x: wp.array(dtype=wp.float32)) -> None:
        i = wp.tid()
        x[i] = twice(wp.float32(number))

    return captured
