"""A program that runs a burst with a store, and is killed while it does: ``HOME VOLUME LOG COUNT``."""

from __future__ import annotations

import functools
import sys

import sublet
from sublet import jobs
from tests.integration import burst_functions as functions


def main(home: str, volume: str, log: str, count: int) -> None:
    """Print what it came to; the same call from another process goes on."""
    with sublet.connect(home=home) as fabric, fabric.block("64MiB", name=volume, renew="always") as block:
        store = jobs.VolumeOutputStore(block, publish_after="50ms")
        work = functools.partial(functions.noted, log)
        policy = jobs.RetryPolicy(20, "10ms", "50ms")
        results = jobs.map(work, range(count), fabric=fabric, want=2, name=volume, store=store, policy=policy)
        values = list(results)
        done = results.result
        assert done is not None
        assert values == list(range(count))
        print("done", done.chunks_succeeded, done.chunks_skipped, done.leases_after)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
