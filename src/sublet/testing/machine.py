"""Simulated hardware: which process really is on which resource, whatever any table says.

It stands for what outlives an agent's memory: processes, and what they leave in device memory. The rules are checked
against *this*, not against the agent's own account: ``overlaps`` names every moment at which two leases were on an
exclusive resource together, more was in use than there is, or a tenant met what another had left behind.

``Faults`` are the ways in which it can go wrong, switched on and off by name.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sublet.lease.fence import is_exclusive
from sublet.values import Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.orders import Inventory, Part, StoredVolume, VolumeRef

EFFECTS_KEPT: Final = 10_000
"""Accepted effects that the log holds; older ones fall off."""


class FaultName(enum.StrEnum):
    """What can go wrong at an agent."""

    STUCK_TEARDOWN = "stuck_teardown"
    """The guest cannot be ended, as one frozen in a cgroup or inside a driver call."""
    SLOW_TEARDOWN = "slow_teardown"
    """It can be ended, but that takes long."""
    SCRUB_FAILURE = "scrub_failure"
    """Device memory cannot be cleared."""
    DEVICE_FAULT = "device_fault"
    """The device reports an error of its own (Xid, ECC), or is gone."""
    LOST_REPORTS = "lost_reports"
    """What the agent says does not arrive."""
    FAILED_PARK = "failed_park"
    """What a guest has on the device cannot be copied, so it cannot live without it."""
    DEAF_GUEST = "deaf_guest"
    """The guest ignores that it is to end, and has to be killed when its grace is over."""
    AMNESIA = "amnesia"
    """The agent starts anew with empty tables. Happens once, at the agent's next step."""


class Faults:
    """Which faults are on, for one resource or (None) for all of the node."""

    def __init__(self) -> None:
        self._on: set[tuple[FaultName, ResourceId | None]] = set()

    def turn_on(self, fault: FaultName, resource: ResourceId | None = None) -> None:
        """From now on."""
        self._on.add((FaultName(fault), resource))

    def turn_off(self, fault: FaultName, resource: ResourceId | None = None) -> None:
        """No longer; harmless if it was not on."""
        self._on.discard((FaultName(fault), resource))

    def is_on(self, fault: FaultName, resource: ResourceId | None = None) -> bool:
        """Whether it concerns this resource now."""
        return bool(self._on) and ((fault, None) in self._on or (fault, resource) in self._on)

    def take(self, fault: FaultName) -> bool:
        """Whether it was on; off from here."""
        if (fault, None) not in self._on:
            return False
        self._on.discard((fault, None))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One accepted touch of the hardware."""

    at_ns: int
    resource: ResourceId
    lease: LeaseId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A guest on a resource."""

    lease: LeaseId
    tenant: TenantId
    epoch: Epoch
    part: Part


class Machine:
    """The resources of one node, and the guests on them."""

    def __init__(
        self,
        inventory: Inventory,
        *,
        on_effect: Callable[[Effect], None] | None = None,
        on_leave: Callable[[LeaseId, Epoch], None] | None = None,
    ) -> None:
        """``on_effect`` sees every touch, ``on_leave`` every guest that is gone."""
        self.inventory = inventory
        self.effects: deque[Effect] = deque(maxlen=EFFECTS_KEPT)
        self.overlaps: list[str] = []
        """Broken rules, in words. It stays empty, or something is wrong with the agent."""
        self._capacity = {device.id: device.capacity for device in inventory.devices}
        self._residents: dict[ResourceId, dict[LeaseId, Resident]] = {}
        self._left: dict[ResourceId, dict[LeaseId, Resident]] = {}
        self._parked: dict[LeaseId, tuple[Resident, ...]] = {}
        self.set_going: set[LeaseId] = set()
        """Parking leases whose guests were told to leave, and may save."""
        self.disk = Disk()
        self._on_effect = on_effect
        self._on_leave = on_leave

    def touch(
        self,
        lease: LeaseId,
        tenant: TenantId,
        epoch: Epoch,
        parts: tuple[Part, ...],
        now_ns: int,
        *,
        name: str = "",
    ) -> None:
        """An effect that passed the fence: the guest is on these parts from here on. With a name, what it writes to
        its blocks is a volume."""
        volume = VolumeRef(tenant=tenant, name=name) if name else None
        for part in parts:
            self._settle_in(Resident(lease=lease, tenant=tenant, epoch=epoch, part=part), volume)
            if volume is not None and part.kind is Kind.BLOCK:
                self.disk.write(
                    volume,
                    StoredVolume(volume=volume, resource=part.resource, size=part.amount, lease=lease, epoch=epoch),
                )
            effect = Effect(at_ns=now_ns, resource=part.resource, lease=lease, epoch=epoch)
            self.effects.append(effect)
            if self._on_effect is not None:
                self._on_effect(effect)

    def residents(self, resource: ResourceId) -> tuple[Resident, ...]:
        """The guests that are there now."""
        return tuple(self._residents.get(resource, {}).values())

    def leftovers(self) -> tuple[Resident, ...]:
        """Every guest that is there, and every one whose memory was not scrubbed."""
        found = {}
        for residents in (*self._left.values(), *self._residents.values()):
            for resident in residents.values():
                found[resident.part.resource, resident.lease] = resident
        return tuple(found.values())

    def is_there(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> bool:
        """Whether a guest of this lease, up to this epoch, is on the resource."""
        resident = self._residents.get(resource, {}).get(lease)
        return resident is not None and resident.epoch <= epoch

    def is_dirty(self, resource: ResourceId, lease: LeaseId) -> bool:
        """Whether something of this lease is still in memory."""
        return lease in self._left.get(resource, {})

    def leave(self, resource: ResourceId, lease: LeaseId) -> None:
        """The guest is gone. What it had in memory stays until it is scrubbed."""
        resident = self._residents.get(resource, {}).pop(lease, None)
        if resident is not None:
            self._parked.pop(lease, None)
            self._left.setdefault(resource, {})[lease] = resident
            if self._on_leave is not None:
                self._on_leave(lease, resident.epoch)

    def of(self, lease: LeaseId, epoch: Epoch) -> tuple[Resident, ...]:
        """The guests of a lease, up to this epoch."""
        guests = (residents.get(lease) for residents in self._residents.values())
        return tuple(one for one in guests if one is not None and one.epoch <= epoch)

    def parked(self, under: LeaseId) -> tuple[Resident, ...]:
        """The guest that is parked under this lease, as it was before."""
        return self._parked.get(under, ())

    def all_parked(self) -> dict[LeaseId, tuple[Resident, ...]]:
        """All parked residents, by the lease that they are parked under."""
        return dict(self._parked)

    def park(self, lease: LeaseId, epoch: Epoch, under: LeaseId, at: Epoch, parts: tuple[Part, ...]) -> None:
        """Its guests leave all they are on, and are in the memory that these parts stand for."""
        guests = self.of(lease, epoch)
        for guest in guests:
            self.leave(guest.part.resource, lease)
        for part in parts:
            self._settle_in(Resident(lease=under, tenant=guests[0].tenant, epoch=at, part=part))
        self._parked[under] = guests

    def unpark(self, under: LeaseId, lease: LeaseId, epoch: Epoch, parts: tuple[Part, ...]) -> None:
        """They come back, onto these parts."""
        guests = self._parked[under]
        for resource, residents in tuple(self._residents.items()):
            if under in residents:
                self.leave(resource, under)
        for part in parts:
            self._settle_in(Resident(lease=lease, tenant=guests[0].tenant, epoch=epoch, part=part))

    def scrub(self, resource: ResourceId, lease: LeaseId) -> None:
        """Clear what this lease left behind."""
        self._left.get(resource, {}).pop(lease, None)

    def agent_died(self, faults: Faults) -> None:
        """Guests die with what watched over them, except those that nothing can end."""
        for resource, residents in self._residents.items():
            if not faults.is_on(FaultName.STUCK_TEARDOWN, resource):
                for lease in tuple(residents):
                    self.leave(resource, lease)

    def rebooted(self) -> None:
        """Power off, power on: no resident is left and memory is empty."""
        self._residents.clear()
        self._left.clear()
        self._parked.clear()

    def _settle_in(self, new: Resident, volume: VolumeRef | None = None) -> None:
        resource = new.part.resource
        residents = self._residents.setdefault(resource, {})
        if new.lease not in residents:
            self._check_neighbours(new, residents)
            self._check_disk(new, volume)
        residents[new.lease] = new

    def _check_disk(self, new: Resident, volume: VolumeRef | None) -> None:
        """A kept volume takes its room whether a lease has it now or not."""
        old = self.disk.stored.get(volume) if volume is not None and new.part.kind is Kind.BLOCK else None
        if old is not None and old.lease != new.lease and self.is_there(old.resource, old.lease, old.epoch):
            self.overlaps.append(f"volume {volume} is used by {old.lease} and by {new.lease} at once")
        if old is not None and (old.size, old.resource) != (new.part.amount, new.part.resource):
            self.overlaps.append(f"volume {volume} has {old.size} on {old.resource}, and {new.lease} {new.part}")
        in_use = new.part.amount + self.disk.beside(new.part, volume)
        if in_use > self._capacity.get(new.part.resource, 0):
            self.overlaps.append(f"{new.part.resource}: {in_use} are in use, with what is kept there")

    def _check_neighbours(self, new: Resident, residents: dict[LeaseId, Resident]) -> None:
        resource = new.part.resource
        for old in residents.values():
            if is_exclusive(old.part) or is_exclusive(new.part):
                self.overlaps.append(
                    f"{resource} is exclusive, and {new.lease} ({new.epoch}) came while {old.lease} ({old.epoch}) "
                    "was still there"
                )
        in_use = new.part.amount + sum(old.part.amount for old in residents.values())
        if in_use > self._capacity.get(resource, 0):
            self.overlaps.append(f"{resource} has {self._capacity.get(resource, 0)}, and {in_use} are in use")
        for lease, left in self._left.get(resource, {}).items():
            in_use += left.part.amount
            if left.tenant != new.tenant and (is_exclusive(new.part) or in_use > self._capacity.get(resource, 0)):
                self.overlaps.append(f"{resource}: {new.tenant} could read what {lease} of {left.tenant} left behind")


# ---- The pretended disk: what leases of blocks with a name left there. It survives its agent, and the machine's reboot


class Disk:
    """The volumes of one node."""

    def __init__(self) -> None:
        self.stored: dict[VolumeRef, StoredVolume] = {}
        self.counts = True
        """Whether kept volumes that no lease has count against the capacity. A restored office may lend that room
        again before it has heard which volumes are there; a real disk is full then."""
        self.removed: list[StoredVolume] = []
        """What was removed, in order."""

    def write(self, volume: VolumeRef, stored: StoredVolume) -> None:
        """A guest has put something into it."""
        self.stored[volume] = stored

    def remove(self, volume: VolumeRef) -> None:
        """It is gone for good."""
        self.removed.append(self.stored.pop(volume))

    def beside(self, part: Part, own: VolumeRef | None) -> int:
        """Bytes that other volumes have of the resource of this part."""
        if part.kind is not Kind.BLOCK or not self.counts:
            return 0
        return sum(one.size for ref, one in self.stored.items() if one.resource == part.resource and ref != own)
