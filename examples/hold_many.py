"""Asyncio: a hundred small jobs share a few cores, each under a lease of its own.

Run it: ``python examples/hold_many.py``
"""

from __future__ import annotations

import asyncio

from sublet import aio


async def job(fabric: aio.Fabric, number: int) -> int:
    """One job: wait for a core, use it, give it back."""
    async with fabric.cpu(1, ttl="30s", name=f"job-{number}") as lease:
        with lease.activity():
            await asyncio.sleep(0.001)
        return number * number


async def main() -> None:
    """All of them at once; the queue keeps order."""
    async with await aio.connect() as fabric:
        results = await asyncio.gather(*(job(fabric, number) for number in range(100)))
        print(f"{len(results)} jobs came to {sum(results)}")
        print(f"leases that are still held: {sum(view.end is None for view in await fabric.leases())}")


if __name__ == "__main__":
    asyncio.run(main())
