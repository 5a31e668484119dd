"""Sublet for asyncio: the same names as in `sublet`, awaited.

::

    from sublet import aio

    async with await aio.connect() as fabric:
        async with fabric.gpu(min_vram="2GiB", ttl="5m") as lease:
            ...
"""

from __future__ import annotations

from sublet.client.aio_fabric import Acquiring, Fabric, connect
from sublet.client.aio_guests import Guest
from sublet.client.aio_lease import Lease
from sublet.client.aio_many import Leases

__all__ = ["Acquiring", "Fabric", "Guest", "Lease", "Leases", "connect"]
