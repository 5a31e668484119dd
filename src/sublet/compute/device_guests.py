"""The guest in which a lease's devices are used: one per lease, started at the first use."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from sublet.client.guests import Guest, environment, start_spec
from sublet.wire.guests import GuestSpec, StdioKind

if TYPE_CHECKING:
    from sublet.client.lease import Lease

ENTRY: Final = "sublet.guest.device_service:main"
IMPORTS: Final = ("cloudpickle?", "numpy?", "torch?", "warp?")
"""What its warm interpreter has loaded, where it is there: the same as a worker's, so that one does for both."""

LOCAL: Final = "local"

_lock = threading.Lock()
_guests: WeakKeyDictionary[Lease, Guest] = WeakKeyDictionary()


def device_guest(lease: Lease, *, instead_of: Guest | None = None) -> Guest:
    """The one of this lease; another one if it has ended, or is the one that the caller knows to have ended."""
    with _lock:
        guest = _guests.get(lease)
        if guest is None or guest is instead_of or guest.exit_code is not None:
            guest = _guests[lease] = start_spec(lease, _spec(lease), busy=False)
        return guest


def _spec(lease: Lease) -> GuestSpec:
    return GuestSpec(
        entry=ENTRY,
        # Named, so that it is shown to a guest behind walls; for others it is the one that warm interpreters are of.
        python=sys.executable if lease._held.view.tenant != LOCAL else "",
        imports=IMPORTS,
        env=environment(lease, None),
        stdio=StdioKind.NULL,
        serves=True,
        name="GpuSession",
    )
