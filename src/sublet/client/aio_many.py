"""Many leases of one request, for asyncio."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from sublet.client.aio_lease import Lease
from sublet.client.asking import Asked, ExclusivityText, Size, Terms, ask_cpu, ask_gpu, ask_memory
from sublet.client.many import LeaseSequence, could_not_release
from sublet.errors import SubletError

if TYPE_CHECKING:
    from sublet.client.aio_fabric import Acquiring, Fabric


class Leases(LeaseSequence[Lease]):
    """The leases that one request was granted, in the order of their grant; see `sublet.Leases`."""

    def __init__(self, fabric: Fabric, leases: Iterable[Lease]) -> None:
        super().__init__(leases)
        self._fabric = fabric
        self._pid = os.getpid()
        self._held = tuple(lease._held for lease in self._leases)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back. What the body raised goes on as it is, whatever becomes of the release."""
        try:
            if os.getpid() == self._pid:
                await self._fabric.release([lease for lease in self._leases if not lease._left])
        except SubletError as failed:
            could_not_release(failed, error)
        except BaseException:
            self._fabric._book.abandoned.append(self._held)  # at once: the next interrupt may come with the call
            self._fabric._keeper.wake()
            raise

    async def release(self) -> None:
        """Give all of them back, in one message. Twice is harmless, and so is after the end."""
        await self._fabric.release(self._leases)


class Many:
    """So many leases in one request. Made by ``fabric.many()``; what it returns is awaited or entered."""

    def __init__(self, fabric: Fabric, count: int, at_least: int) -> None:
        self._fabric = fabric
        self._count = count
        self._at_least = at_least

    def cpu(self, cores: int = 1, *, memory: Size | None = None, **terms: Unpack[Terms]) -> Acquiring[Leases]:
        """Acquire leases with whole cores of one machine each; with ``memory`` under the same lease."""
        return self._acquire(ask_cpu(terms, cores=cores, or_smaller=False, memory=memory))

    def gpu(
        self,
        *,
        min_vram: Size,
        count: int = 1,
        exclusivity: ExclusivityText | None = None,
        model: str | None = None,
        **terms: Unpack[Terms],
    ) -> Acquiring[Leases]:
        """Acquire leases with GPU memory on ``count`` devices each; see `sublet.Fabric.gpu`."""
        return self._acquire(
            ask_gpu(terms, min_vram=min_vram, count=count, exclusivity=exclusivity, model=model, or_smaller=False)
        )

    def memory(self, size: Size, **terms: Unpack[Terms]) -> Acquiring[Leases]:
        """Acquire leases with host memory."""
        return self._acquire(ask_memory(terms, size=size, or_smaller=False))

    def _acquire(self, asked: Asked) -> Acquiring[Leases]:
        return self._fabric._acquire_many(asked, self._count, self._at_least)
