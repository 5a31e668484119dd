"""Decorated functions that a worker can import."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import sublet

STATE = 0


@sublet.gpu(min_vram="64MiB", ttl="20s")
def where(x: int = 0) -> tuple[int, str, int]:
    """Who it is, on what, and how often this was called there."""
    global STATE
    STATE += 1
    return os.getpid(), sublet.device(), STATE


@sublet.gpu(min_vram="64MiB", ttl="20s")
def square(x: int) -> int:
    return x * x


@sublet.gpu(min_vram="64MiB", ttl="20s")
def nested(x: int) -> int:
    """In a worker a decorated function is the plain one."""
    return square(x) + 1


@sublet.gpu(min_vram="64MiB", ttl="20s")
async def awaited(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


@sublet.gpu(min_vram="64MiB", ttl="20s")
def numbers(n: int) -> Iterator[int]:
    yield from range(n)


@sublet.gpu(min_vram="64MiB", ttl="20s")
async def letters() -> AsyncIterator[str]:
    for letter in "abc":
        yield letter


class Model:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @sublet.gpu(min_vram="64MiB", ttl="20s")
    def times(self, x: int) -> int:
        return self.factor * x
