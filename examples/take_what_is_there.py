"""Ask for more than there is, see what would fit, and take that. Then wait in the queue like everybody else.

Run it: ``python examples/take_what_is_there.py``
"""

from __future__ import annotations

import threading

import sublet


def main() -> None:
    """A refusal with numbers, a smaller amount, a place in the queue."""
    fabric = sublet.connect()
    free = max(device.capacity for device in fabric.status().devices if device.kind == "gpu")
    with fabric.gpu(min_vram=free // 2, exclusivity="shared") as first, first.activity("work that must not be taken"):
        try:
            fabric.gpu(min_vram=free, exclusivity="shared", wait=0)
        except sublet.CapacityExceeded as refused:
            print(f"refused: {refused.message}")
            print(f"what would fit: {refused.offer}")
        with fabric.gpu(min_vram=free, exclusivity="shared", or_smaller="64MiB") as rest:
            print(f"took {rest.devices[0]} beside {first.devices[0]}")

        def give_back_soon(place: sublet.Place) -> None:
            print(f"waiting: {place}")
            threading.Timer(0.2, first.release).start()

        with fabric.gpu(min_vram=free, on_place=give_back_soon) as whole:
            print(f"got all of it: {whole.devices[0]}")


if __name__ == "__main__":
    main()
