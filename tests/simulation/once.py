"""A pretended world lives for a tenth of a second: nothing of it is worth looking for garbage in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def swept_afterwards() -> Iterator[None]:
    """Without the collector of cycles, which else walks the living world again and again: an eighth of all the time.
    What is left over goes with the first look after it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
