"""The interfaces of lease and device session that a step needs. Tests of programs implement them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sublet.values import Epoch


class StepLease(Protocol):
    """A lease, as `sublet.Lease` is one."""

    @property
    def id(self) -> Any: ...
    @property
    def epoch(self) -> Epoch: ...
    @property
    def ttl(self) -> float: ...
    def check(self, needs: float | str = 0.0) -> None:
        """Raise `LeaseEnded` if it is over, or if work that takes so long must not begin on it."""

    def activity(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """Something runs under it, so it is renewed."""


class Session(Protocol):
    """A session on one device of the lease, as `sublet.GpuSession` is one.

    It is used from one thread, as a context manager: left in peace, it has freed everything, or raises; left by an
    error, it does nothing more, frees what it can, and lets the error pass.
    """

    def mem_alloc(self, size: int, /) -> Any: ...
    def mem_write(self, buffer: Any, offset: int, data: bytes, /) -> None: ...
    def mem_read(self, buffer: Any, offset: int, length: int, /) -> bytes: ...
    def mem_free(self, buffer: Any, /) -> None: ...
    def module_load(self, source: Mapping[Any, bytes], /) -> Any: ...
    def module_unload(self, module: Any, /) -> None: ...
    def launch(self, module: Any, kernel: str, grid: Any, block: Any, args: Sequence[Any], /) -> None: ...
    def sync(self) -> None: ...


class OpenSession(Protocol):
    """Opens a session on a lease; ``sublet.GpuSession`` itself is one."""

    def __call__(self, lease: Any, /) -> contextlib.AbstractContextManager[Session]: ...
