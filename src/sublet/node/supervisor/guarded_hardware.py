"""Wraps the hardware so that a failing call does not end the node's rules.

A page that cannot be written, a folder that goes away under our hands, a mistake in how one guest is looked after: none
of it may stop the law's turn, which keeps the deadlines of all other leases. What was only to be *said* is then said in
the log instead; what was *asked* is answered so that nothing becomes free: a process is still there, it is not clean
yet. So a mistake that stays ends in a quarantine of its own resource, with its reason, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from sublet.lease.hardware import Hardware, Leftover, Need, NotYet, Verdict
from sublet.lease_end import EndReason
from sublet.node.loop import log_internal_error
from sublet.values import NS_PER_S, Epoch, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Notify, Parking, Part, StoredVolume, VolumeRef

T = TypeVar("T")

AGAIN_NS: Final = NS_PER_S // 2
"""After a question that could not be answered, so that a mistake that stays does not fill the log."""


class GuardedHardware:
    """``lease.hardware.Hardware`` over another one, which may fail."""

    def __init__(self, inner: Hardware, on_mistake: Callable[[LeaseId], None] = lambda _: None) -> None:
        """``on_mistake`` is told the lease whose guests can no longer be told what they must be told."""
        self._inner = inner
        self._on_mistake = on_mistake

    # ---- while a lease lives ----

    def grant(
        self, lease: LeaseId, tenant: TenantId, epoch: Epoch, parts: tuple[Part, ...], deadline_ns: int, /
    ) -> None:
        self._call_for_lease(lease, lambda: self._inner.grant(lease, tenant, epoch, parts, deadline_ns))

    def extend(self, lease: LeaseId, epoch: Epoch, deadline_ns: int, /) -> None:
        self._call_for_lease(lease, lambda: self._inner.extend(lease, epoch, deadline_ns))

    def notice(self, lease: LeaseId, notice: Notify | None, /) -> None:
        self._call_for_lease(lease, lambda: self._inner.notice(lease, notice))

    def warn(self, lease: LeaseId, epoch: Epoch, deadline_ns: int, /) -> None:
        self._call_for_lease(lease, lambda: self._inner.warn(lease, epoch, deadline_ns))

    def cancel_warning(self, lease: LeaseId, epoch: Epoch, /) -> None:
        self._call_for_lease(lease, lambda: self._inner.cancel_warning(lease, epoch))

    # ---- parking ----

    def need(self, lease: LeaseId, epoch: Epoch, /) -> Need:
        return self._guarded(lambda: self._inner.need(lease, epoch), Need())

    def park(self, lease: LeaseId, epoch: Epoch, under: Parking, room: int, until_ns: int, now_ns: int, /) -> bool:
        return self._guarded(lambda: self._inner.park(lease, epoch, under, room, until_ns, now_ns), False)

    def parked(self, under: LeaseId, /) -> bool:
        return self._guarded(lambda: self._inner.parked(under), False)

    def resume(self, under: Parking, lease: LeaseId, epoch: Epoch, /) -> None:
        self._call_for_lease(lease, lambda: self._inner.resume(under, lease, epoch))

    # ---- when it is over ----

    def announce_end(
        self, lease: LeaseId, epoch: Epoch, reason: EndReason, kill_at_ns: int, detail: str, now_ns: int, /
    ) -> None:
        self._call_for_lease(lease, lambda: self._inner.announce_end(lease, epoch, reason, kill_at_ns, detail, now_ns))

    def kill(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int, /) -> int | None:
        again_ns: int | None = now_ns + AGAIN_NS
        return self._guarded(lambda: self._inner.kill(resource, lease, epoch, now_ns), again_ns)

    def is_there(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, /) -> bool:
        return self._guarded(lambda: self._inner.is_there(resource, lease, epoch), True)

    def why_alive(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, /) -> str:
        return self._guarded(
            lambda: self._inner.why_alive(resource, lease, epoch), "the supervisor cannot tell, see its log"
        )

    def verify(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int, /) -> Verdict:
        unknown: Verdict = NotYet(what="the supervisor could not look, see its log", again_ns=now_ns + AGAIN_NS)
        return self._guarded(lambda: self._inner.verify(resource, lease, epoch, now_ns), unknown)

    def forget(self, resource: ResourceId, lease: LeaseId, /) -> None:
        self._guarded(lambda: self._inner.forget(resource, lease), None)

    # ---- volumes ----

    def volumes(self) -> Iterable[StoredVolume] | None:
        return self._guarded(self._inner.volumes, None)

    def volume_epoch(self, volume: VolumeRef, /) -> Epoch | None:
        kept: Epoch | None = Epoch(0, 0)
        return self._guarded(lambda: self._inner.volume_epoch(volume), kept)

    def remove_volume(self, volume: VolumeRef, epoch: Epoch, now_ns: int, /) -> None:
        self._guarded(lambda: self._inner.remove_volume(volume, epoch, now_ns), None)

    # ---- at any time ----

    def leftovers(self) -> Iterable[Leftover]:
        return self._inner.leftovers()  # before the first order: a law that does not know them must not begin

    def fault(self, resource: ResourceId, /) -> str | None:
        return self._guarded(lambda: self._inner.fault(resource), None)

    def _call_for_lease(self, lease: LeaseId, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - see the head of the module
            log_internal_error(error)
            self._guarded(lambda: self._on_mistake(lease), None)

    def _guarded(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the same
            log_internal_error(error)
            return otherwise
