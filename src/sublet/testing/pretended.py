"""Simulated hardware behind the port of the node's rules, with injectable ``Faults``.

``Machine`` is the account of which guest is where. Here is what takes time: a guest that was told needs a while to
leave, a kill a while to work, and looking a while to find out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sublet.lease.hardware import Clean, Leftover, Need, NotYet, Unclean, Verdict
from sublet.lease.teardown import Bounds
from sublet.lease_end import EndReason
from sublet.testing.machine import FaultName, Faults, Machine
from sublet.values import GIB, NS_PER_S, Epoch, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Notify, Parking, Part, StoredVolume, VolumeRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long the steps of a teardown take on pretended hardware, and how often they are tried."""

    leave_ns: int = 0
    """From being told to having left, for a guest that listens."""
    kill_ns: int = 0
    kill_slow_ns: int = 20 * NS_PER_S
    """The same under ``slow_teardown``."""
    park_ns: int = 0
    """To copy what a guest has on its device."""
    retry_ns: int = 1 * NS_PER_S
    """Between one attempt to kill and the next."""
    attempts: int = 5
    """Attempts to kill before the resource is given up (and quarantined by the office)."""
    verify_ns: int = 0
    """Looking and scrubbing."""

    @property
    def bounds(self) -> Bounds:
        """What of it is the law's."""
        return Bounds(retry_ns=self.retry_ns, attempts=self.attempts)


GUEST_BYTES: Final = 1 * GIB
"""What a guest has in memory and on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaving:
    at_ns: int
    epoch: Epoch
    by_itself: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParkingNow:
    at_ns: int
    until_ns: int
    epoch: Epoch
    under: Parking


class PretendedHardware:
    """A ``Machine`` that can be told, killed and looked at."""

    def __init__(self, machine: Machine, faults: Faults, timings: Timings) -> None:
        self._machine = machine
        self._faults = faults
        self._timings = timings
        self._leaving: dict[tuple[ResourceId, LeaseId], _Leaving] = {}
        self._looking: dict[tuple[ResourceId, LeaseId], int] = {}
        self._live: dict[LeaseId, tuple[Epoch, tuple[Part, ...]]] = {}
        self._parking: dict[LeaseId, _ParkingNow] = {}
        self._warned: dict[LeaseId, int] = {}
        """Leases that run out, and when."""

    def advance(self, now_ns: int) -> list[LeaseId]:
        """Guests that were ending and have ended."""
        if not self._leaving and not self._parking:
            return []
        gone = [lease for lease, parking in tuple(self._parking.items()) if self._has_parked(lease, parking, now_ns)]
        for (resource, lease), leaving in tuple(self._leaving.items()):
            if leaving.at_ns <= now_ns:
                del self._leaving[resource, lease]
                if self._lets_go(resource, leaving) and self._machine.is_there(resource, lease, leaving.epoch):
                    self._machine.leave(resource, lease)
                    gone.append(lease)
        return gone

    def next_ns(self) -> int | None:
        """When the next one arrives."""
        if not self._leaving and not self._parking:
            return None
        moments = [leaving.at_ns for leaving in self._leaving.values()]
        moments += [parking.at_ns for parking in self._parking.values()]
        return min(moments, default=None)

    # ---- the port ----

    def grant(self, lease: LeaseId, tenant: TenantId, epoch: Epoch, parts: tuple[Part, ...], deadline_ns: int) -> None:
        self._live[lease] = (epoch, parts)

    def extend(self, lease: LeaseId, epoch: Epoch, deadline_ns: int) -> None:
        return

    def notice(self, lease: LeaseId, notice: Notify | None) -> None:
        return

    def warn(self, lease: LeaseId, epoch: Epoch, deadline_ns: int) -> None:
        self._warned[lease] = deadline_ns
        self._set_going(lease, epoch)

    def cancel_warning(self, lease: LeaseId, epoch: Epoch) -> None:
        self._warned.pop(lease, None)

    def need(self, lease: LeaseId, epoch: Epoch) -> Need:
        guests = self._machine.of(lease, epoch)
        if any(self._faults.is_on(FaultName.FAILED_PARK, guest.part.resource) for guest in guests):
            return Need(why_not="its driver cannot copy what it has")
        return Need(amount=GUEST_BYTES if guests else 0)

    def park(self, lease: LeaseId, epoch: Epoch, under: Parking, room: int, until_ns: int, now_ns: int) -> bool:
        if self.need(lease, epoch).amount not in range(1, room + 1):
            return False
        at_ns = now_ns + self._timings.park_ns
        parking = _ParkingNow(at_ns=at_ns, until_ns=until_ns, epoch=epoch, under=under)
        self._parking[lease] = parking
        self._has_parked(lease, parking, now_ns)
        return True

    def parked(self, under: LeaseId) -> bool:
        return bool(self._machine.parked(under))

    def resume(self, under: Parking, lease: LeaseId, epoch: Epoch) -> None:
        self._machine.unpark(under.lease, lease, epoch, self._live[lease][1])
        self._live.pop(under.lease, None)

    def announce_end(
        self, lease: LeaseId, epoch: Epoch, reason: EndReason, kill_at_ns: int, detail: str, now_ns: int
    ) -> None:
        if lease in self._live and self._live[lease][0] <= epoch:
            del self._live[lease]
        self._warned.pop(lease, None)
        if kill_at_ns > now_ns and self._machine.parked(lease):
            self._machine.set_going.add(lease)
        for device in self._machine.inventory.devices:
            self._notify_one(device.id, lease, epoch, kill_at_ns, now_ns)

    def kill(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int) -> int | None:
        if self._faults.is_on(FaultName.STUCK_TEARDOWN, resource):
            return None
        slow = self._faults.is_on(FaultName.SLOW_TEARDOWN, resource)
        takes_ns = self._timings.kill_slow_ns if slow else self._timings.kill_ns
        self._go(resource, lease, _Leaving(at_ns=now_ns + takes_ns, epoch=epoch, by_itself=False), now_ns)
        return now_ns + takes_ns

    def is_there(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> bool:
        return self._machine.is_there(resource, lease, epoch)

    def why_alive(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> str:
        return ""

    def verify(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int) -> Verdict:
        found_ns = self._looking.setdefault((resource, lease), now_ns) + self._timings.verify_ns
        if now_ns < found_ns:
            return NotYet(what="it is still being looked at", again_ns=found_ns)
        del self._looking[resource, lease]
        if (wrong := self.fault(resource)) is not None:
            return Unclean(detail=wrong, hard=True)
        if self._machine.is_dirty(resource, lease) and self._faults.is_on(FaultName.SCRUB_FAILURE, resource):
            return Unclean(detail="device memory could not be cleared", hard=True)
        self._machine.scrub(resource, lease)
        return Clean()

    def volumes(self) -> list[StoredVolume]:
        stored = self._machine.disk.stored.values()
        return [one for one in stored if not self._is_had(one)]

    def volume_epoch(self, volume: VolumeRef) -> Epoch | None:
        stored = self._machine.disk.stored.get(volume)
        return None if stored is None else stored.epoch

    def remove_volume(self, volume: VolumeRef, epoch: Epoch, now_ns: int) -> None:
        stored = self._machine.disk.stored.get(volume)
        if stored is None or stored.epoch > epoch or self._is_had(stored):
            return
        if not self._faults.is_on(FaultName.STUCK_TEARDOWN, stored.resource):
            self._machine.disk.remove(volume)

    def _is_had(self, stored: StoredVolume) -> bool:
        live = self._live.get(stored.lease)
        is_live = live is not None and live[0] >= stored.epoch
        return is_live or self._machine.is_there(stored.resource, stored.lease, stored.epoch)

    def forget(self, resource: ResourceId, lease: LeaseId) -> None:
        self._machine.scrub(resource, lease)

    def leftovers(self) -> list[Leftover]:
        found = self._machine.leftovers()
        return [Leftover(lease=guest.lease, epoch=guest.epoch, part=guest.part) for guest in found]

    def fault(self, resource: ResourceId) -> str | None:
        return "the device reported an error" if self._faults.is_on(FaultName.DEVICE_FAULT, resource) else None

    # ---- within ----

    def _has_parked(self, lease: LeaseId, parking: _ParkingNow, now_ns: int) -> bool:
        """If it is time: off the device and under the other lease, or told to leave. Whether it is off."""
        if now_ns < parking.at_ns:
            return False
        del self._parking[lease]
        guests, under = self._machine.of(lease, parking.epoch), self._live.get(parking.under.lease)
        broken = (FaultName.FAILED_PARK, FaultName.STUCK_TEARDOWN)
        fails = any(self._faults.is_on(fault, guest.part.resource) for guest in guests for fault in broken)
        if under is None or not guests or fails or now_ns > parking.until_ns:
            for guest in guests:
                self._notify_one(guest.part.resource, lease, parking.epoch, parking.until_ns, now_ns)
            return False
        self._machine.park(lease, parking.epoch, parking.under.lease, *under)
        self._set_going(parking.under.lease, under[0])
        return True

    def _set_going(self, lease: LeaseId, epoch: Epoch) -> None:
        """What is parked under a lease that runs out saves, and has left just before the deadline."""
        if lease not in self._warned or not self._machine.parked(lease):
            return
        self._machine.set_going.add(lease)
        leaving = _Leaving(at_ns=self._warned[lease] - 1, epoch=epoch, by_itself=True)
        for device in self._machine.inventory.devices:
            if self._machine.is_there(device.id, lease, epoch):
                self._leaving.setdefault((device.id, lease), leaving)

    def _notify_one(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, kill_at_ns: int, now_ns: int) -> None:
        leaving = _Leaving(at_ns=now_ns + self._timings.leave_ns, epoch=epoch, by_itself=True)
        if leaving.at_ns < kill_at_ns and self._machine.is_there(resource, lease, epoch):
            self._go(resource, lease, leaving, now_ns)

    def _go(self, resource: ResourceId, lease: LeaseId, leaving: _Leaving, now_ns: int) -> None:
        if not self._lets_go(resource, leaving):
            return
        if leaving.at_ns <= now_ns:
            self._leaving.pop((resource, lease), None)
            self._machine.leave(resource, lease)
        else:
            self._leaving[resource, lease] = leaving

    def _lets_go(self, resource: ResourceId, leaving: _Leaving) -> bool:
        """Nothing moves a guest that is stuck, and a deaf one does not go by itself."""
        stuck = self._faults.is_on(FaultName.STUCK_TEARDOWN, resource)
        deaf = leaving.by_itself and self._faults.is_on(FaultName.DEAF_GUEST, resource)
        return not (stuck or deaf)
