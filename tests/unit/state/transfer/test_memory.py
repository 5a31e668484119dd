"""Memory that is fetched in large pieces is the same everywhere, also where the kernel has only small ones."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from sublet.state.transfer import memory
from sublet.state.transfer.memory import HUGE, fresh_memory


class Small(mmap.mmap):
    """As of a kernel that was built without huge pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("length", [1, memory.PAGE, HUGE])
def test_it_is_had_without_huge_pages_too(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Small)
    got = fresh_memory(length)
    got[:] = b"x" * length
    assert got.nbytes == length
    assert not got.readonly
