"""Run Python functions on a leased GPU: one call, a generator, a map, and a decorated function.

Run it: ``python examples/run_functions.py``. On a machine without a GPU it gets a host device, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import sublet


def where() -> str:
    """What the function is to compute on."""
    return sublet.device()


def losses(steps: int) -> Iterator[float]:
    """A loop whose progress is watched from here."""
    loss = 1.0
    for _ in range(steps):
        loss *= 0.8
        yield loss


def square(x: int) -> int:
    return x * x


@sublet.gpu(min_vram="256MiB", ttl="20s")
def embed(texts: list[str]) -> list[int]:
    """Acquires a GPU when it is called, and uses it again while it is held."""
    return [len(text) for text in texts]


def main() -> None:
    """First a lease of our own, then one that comes by itself."""
    fabric = sublet.connect()
    with fabric.gpu(min_vram="256MiB", ttl="1m") as lease:
        print("running on", lease.run(where))
        for step, loss in enumerate(lease.run(losses, 5)):
            print(f"step {step}: {loss:.3f}")
        print("squares add up to", sum(lease.map(square, range(1000))))
    print("lengths:", embed(["one", "three"]), embed(["eleven"]))


if __name__ == "__main__":
    main()
