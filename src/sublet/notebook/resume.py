"""Resumes a suspended cell under the next lease, at the line where it was stopped.

The office parks the guest (``lease.end.parked`` says where) and the notebook waits in line for a device for it. Nothing
of the cell is lost, so nothing is raised; only the status line tells. A user who does not want to wait interrupts:
then what is parked is given up, and the cell ends as one whose device was taken.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sublet.errors import CapacityExceeded, InvalidRequest, LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lease.states import LeaseStatus
from sublet.lease_end import EndReason
from sublet.notebook.options import CellOptions
from sublet.notebook.status import Suspended
from sublet.values import NS_PER_S, Tier

if TYPE_CHECKING:
    from sublet.client.fabric import Fabric
    from sublet.client.lease import Lease
    from sublet.client.model import Place
    from sublet.compute.kernel_guest import KernelGuest

GAVE_WAY: Final = frozenset({EndReason.PREEMPTED, EndReason.FAIR_SHARE, EndReason.IDLE})
"""Why a lease ends between two cells for want of work, or for others."""
GONE_S: Final = 10.0
"""Longer than any grace. A guest that is there still has not saved for want of time."""
PAUSE_S: Final = 0.02
TAKEN_S: Final = 10.0
"""Longer than it may take to park a kernel: on a busy machine its processes have five seconds to stand still."""


def is_parked(lease: Lease | None) -> bool:
    """Whether what ran under it lives on without a device."""
    return lease is not None and lease.end is not None and bool(lease.end.parked)


def estimate_error_s(fabric: Fabric) -> float | None:
    """Within how many seconds nine tenths of the office's estimates were right; None where that is not known."""
    with contextlib.suppress(SubletError):  # the place in the queue is shown all the same
        if (estimates := fabric.status().estimates) is not None:
            return estimates.p90_error
    return None


def resume_parked(
    fabric: Fabric,
    lease: Lease,
    kernel: KernelGuest,
    options: CellOptions,
    show: Callable[[Suspended], None],
    labels: Mapping[str, str],
) -> Lease:
    """Wait for a device for what is parked; the lease it has then. Raises ``LeaseEnded`` when nothing is parked now,
    and ``CapacityExceeded`` when there was no device in the time the cell would wait; then it stays parked."""
    end = lease.end
    assert end is not None
    why = end.reason if not end.detail else f"{end.reason} ({end.detail})"
    show(Suspended(why=why, place=0))

    def waiting(place: Place) -> None:
        error_s = None if place.estimate is None else estimate_error_s(fabric)
        show(Suspended(why=why, place=place.position, estimate_s=place.estimate, error_s=error_s))

    terms: dict[str, Any] = {} if options.ttl_ns is None else {"ttl": options.ttl_ns / NS_PER_S}
    try:
        new = fabric.gpu(
            resume=lease,
            tier=options.tier or Tier.INTERACTIVE,
            pay_priority=options.pay_priority,
            wait=None if options.wait_ns is None else options.wait_ns / NS_PER_S,
            on_place=waiting,
            labels=dict(labels),
            **terms,
        )
    except (NotFound, StaleEpoch, InvalidRequest) as error:
        raise LeaseEnded(f"{why}, and what was parked is gone: {error.message}", end=end) from error
    except CapacityExceeded as error:
        if options.wait_ns is not None:
            raise
        raise LeaseEnded(f"{why}, and it could not be parked after all", end=end) from error  # who waits is not refused
    kernel.now_under(new)
    return new


def wait_until_taken(lease: Lease) -> None:
    """It was announced that the lease will be taken, and nothing runs under it. So it is taken as soon as its guests
    are parked, and the cell goes on with them; what takes longer than ``TAKEN_S`` is not waited for."""
    until_s = time.monotonic() + TAKEN_S
    while lease.end is None and lease.notice is not None and time.monotonic() < until_s:
        time.sleep(PAUSE_S)


def is_known_to_be_over(lease: Lease) -> bool:
    """The office said that the lease is over. How it ended comes to its holder a moment later; whether it came."""
    until_s = time.monotonic() + TAKEN_S
    while lease.end is None and time.monotonic() < until_s:
        time.sleep(PAUSE_S)
    return lease.end is not None


def wait_until_gone(fabric: Fabric, lease: str) -> None:
    """A lease is over for its holder when its end begins, and then its guest may only begin to save. A caller that
    wants to find that, on another device, waits until the guest is gone."""
    until_s = time.monotonic() + GONE_S
    with contextlib.suppress(SubletError):  # the office has forgotten it, or is away
        while fabric.lease(lease).status != LeaseStatus.ENDED and time.monotonic() < until_s:
            time.sleep(PAUSE_S)


def end_parked(fabric: Fabric, lease: Lease) -> None:
    """End the parked guest instead of resuming it, so that its memory is free."""
    end = lease.end
    if end is None or not end.parked:
        return
    parking = end.parked.partition("@")[0]
    with contextlib.suppress(SubletError):  # it is over already, or ends by its time to live
        fabric.request("POST", f"/v1/leases/{parking}/release", {"request_id": f"give-up-{parking}"}, shape=dict)
