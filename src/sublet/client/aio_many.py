"""Many leases of one request, for asyncio."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sublet.client.aio_lease import Lease
from sublet.client.many import LeaseSequence, could_not_release
from sublet.errors import SubletError

if TYPE_CHECKING:
    from sublet.client.aio_fabric import Fabric


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
