"""Lease a GPU, work under it, give it back. On a machine without one this gets a host device, and says so.

Run it: ``python examples/lease_a_gpu.py``
"""

from __future__ import annotations

import sublet


def main() -> None:
    """Acquire, work, look at the bill."""
    fabric = sublet.connect()  # the office on this machine; started in the background if there is none
    with fabric.gpu(min_vram="1GiB", ttl="1m", labels={"example": "lease"}) as lease:
        print(f"{lease.id} holds {lease.devices[0]} for {lease.remaining:.0f} s, epoch {lease.epoch}")
        with lease.activity("counting"):  # while this runs, the lease is renewed by itself
            total = sum(range(1_000_000))
        print(f"the work came to {total}")
    assert lease.end is not None
    print(f"it ended: {lease.end.reason}")
    for line in fabric.bill(by="label:example"):
        print(f"billed to {line.key}: {line.gpu_seconds:.3f} GPU seconds, {line.busy_seconds:.3f} of them busy")


if __name__ == "__main__":
    main()
