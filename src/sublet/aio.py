"""Sublet for asyncio: the same names as in `sublet`, awaited.

::

    from sublet import aio

    async with await aio.connect() as fabric:
        async with fabric.gpu(min_vram="2GiB", ttl="5m") as lease:
            ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.client.aio_fabric import Acquiring, Fabric, connect
from sublet.client.aio_guests import Guest
from sublet.client.aio_lease import Lease, Leases

if TYPE_CHECKING:
    from sublet.jobs import aio as jobs

__all__ = ["Acquiring", "Fabric", "Guest", "Lease", "Leases", "connect", "jobs"]


def __getattr__(name: str) -> object:
    """``jobs`` is fetched when it is first used."""
    if name != "jobs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sublet.jobs import aio as jobs

    globals()["jobs"] = jobs
    return jobs
