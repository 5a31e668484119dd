"""Kernels with the system call ``openat2`` and without it: what root does by descriptor must hold on both."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Final
from unittest import mock

from sublet.node.sandbox import syscalls

KERNELS: Final = ("with openat2", "without openat2")


def _no_such_call(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


@contextlib.contextmanager
def on_kernel(kind: str) -> Iterator[None]:
    """As if on a kernel of this kind."""
    with mock.patch.object(syscalls, "openat2", _no_such_call) if kind == KERNELS[1] else contextlib.nullcontext():
        yield
