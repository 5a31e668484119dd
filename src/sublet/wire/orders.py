"""The broker's orders to an agent, and the agent's reports.

Orders are level-triggered: the broker sends one again until the matching report arrives, so an agent must take the same
order twice, late, or out of order, without harm. Each order of a lease carries a rising ``number``; an older number is
ignored. Reports may be lost as well and are repeated by the agent for as long as they are true.

Standard library only: the supervisor reads these too.
"""

from __future__ import annotations

from dataclasses import field

from sublet.lazy_dataclass import dataclass
from sublet.lease_end import EndReason
from sublet.values import (
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    NodeId,
    ResourceId,
    Suspend,
    TenantId,
)
from sublet.wire.compat import later

_CARDS = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One slice that a lease has: so much of this resource."""

    resource: ResourceId
    kind: Kind
    amount: int
    """Bytes, or cores."""
    millis: int = 0
    """The share of the device in thousandths, for metering; 0 for anything but a GPU."""
    exclusivity: Exclusivity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parking:
    """The parking lease under which guests live that were taken off their device, and the epoch it has."""

    lease: LeaseId
    epoch: Epoch

    @property
    def hint(self) -> str:
        """As people and programs are told it, to name it when they want to go on."""
        return f"{self.lease}@{self.epoch}"

    @property
    def advice(self) -> str:
        """What to do with it, in a sentence."""
        return f'What ran under it is parked: go on with `fabric.gpu(resume="{self.hint}")`.'


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRef:
    """Which volume: the storage that a tenant finds again by the name of its block leases."""

    tenant: TenantId
    name: str

    def __str__(self) -> str:
        return f"{self.name} of {self.tenant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVolume:
    """A volume on a node's disk that no lease has now."""

    volume: VolumeRef
    resource: ResourceId
    size: int
    """Bytes: what the lease had that made it."""
    lease: LeaseId
    epoch: Epoch
    """The lease that had it last."""


def card_uuid(resource: str) -> str:
    """The UUID of the card, or of the instance of one, that is lent under this name; empty for a host device."""
    last = resource.rpartition("/")[2]
    return last if last.startswith(_CARDS) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One resource as an agent offers it."""

    id: ResourceId
    kind: Kind
    capacity: int
    """Bytes, or cores."""
    model: str = ""
    """What people ask for by name; "host device, no GPU" is said where it is one."""
    host: bool = False
    """True for a host device: a CPU standing in for a GPU."""
    partition: bool = False
    """True for a part of a card that the hardware itself keeps apart (MIG)."""
    machine_id: str = ""
    """What it is called on the whole machine, where one office at a time may lend it; the parts of one card share it.
    Empty where it is no thing that another office could also have."""
    suspend: Suspend = Suspend.NONE
    """What was tried out here with guests on it."""
    nodes: tuple[str, ...] = later(())
    """The device files below /dev that a program needs for this card alone. Empty: none is known."""
    suspend_walled: Suspend | None = later(None)
    """The same with guests behind the walls of tenants other than local; None: as ``suspend``."""
    one_process: bool = later(False)
    """Its driver lets one process in at a time, so leases cannot share it."""
    walled_trouble: str = later("")
    """Why a guest of a tenant other than local could not use it when that was tried; it is not lent to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one node has."""

    node: NodeId
    domain: str
    """Failure domain: things that break together."""
    labels: dict[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Accept exactly this (lease, epoch) on these parts until the deadline. A newer epoch replaces an older one."""

    lease: LeaseId
    epoch: Epoch
    number: int
    tenant: TenantId
    parts: tuple[Part, ...]
    deadline_ns: int
    """Absolute, if the agent shares the broker's clock domain."""
    ttl_ns: int
    """What remains, for an agent with another clock."""
    name: str = ""
    """What its holder calls it. Storage of a lease with a name is kept when the lease ends."""
    parked: bool = False
    """It is a parking lease with guests under it. An agent that has none of them does not hold it."""
    resume: Parking | None = None
    """What is parked under that goes on under this, and the parking lease is over; without it this is not held."""
    kept: bool = False
    """Its name is that of a volume that is kept here, which it goes on with; without it this is not held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Move the deadline. A lease that is already ending is not revived: the answer is ``NotHeld``."""

    lease: LeaseId
    epoch: Epoch
    number: int
    deadline_ns: int
    ttl_ns: int
    lead_ns: int = 0
    """So long before the deadline its holder knows that saving must begin, and renews with that in mind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Tell the guests that the lease will be taken at ``take_at_ns``; None says that it is spared after all."""

    lease: LeaseId
    epoch: Epoch
    number: int
    reason: EndReason
    take_at_ns: int | None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End every guest, verify that nothing is left, then report ``TornDown`` (or ``Failed``).

    It fences: from here on no epoch up to this one is accepted on these parts, whether or not the agent ever saw the
    grant.
    """

    lease: LeaseId
    epoch: Epoch
    number: int
    parts: tuple[Part, ...]
    reason: EndReason
    grace_ns: int
    detail: str = ""
    park: Parking | None = None
    """Its guests are not ended but taken off the device, to live on under that, if that is possible within the grace.
    Their end is what happens otherwise."""
    volume: VolumeRef | None = None
    """The volume it had, of which ``TornDown`` says whether it is kept. The agent need not have seen the grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Look again at a quarantined slice; report ``TornDown`` only after a full verification."""

    lease: LeaseId
    epoch: Epoch
    parts: tuple[Part, ...]
    vouched: bool = later(False)
    """An operator says that nothing is left there: no look is taken, and nothing is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveVolume:
    """Remove what is kept under this name from epochs up to this one, then report ``VolumeRemoved``.

    What a lease had since, under a newer epoch, is another volume of the same name: it stays, and the report is given
    all the same, for nothing of the one that was meant is left.
    """

    lease: LeaseId
    epoch: Epoch
    """The lease that had it last, as the office knows it; for one that was only found, an epoch above that."""
    number: int
    volume: VolumeRef
    parts: tuple[Part, ...]
    """The one slice that becomes free."""
    detail: str = ""


Order = Grant | Extend | Notify | End | Verify | RemoveVolume


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The agent holds the order of this number: the deadline stands even if everything else stops now."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    number: int
    told: bool = False
    """It answers a ``Notify``, and says nothing of any deadline: an older ``Extend`` may still be on its way."""
    save_ns: int = 0
    """How long the last save under the lease took, for its holder; 0 if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotHeld:
    """The agent does not take the order, because this (lease, epoch) is over for it."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    number: int
    detail: str = ""
    reason: EndReason = EndReason.NODE_LOST
    """What the lease ends for, if the office still thinks that it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedHere:
    """The agent ended the lease by itself: its deadline came, its guest failed, its device vanished."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    reason: EndReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """What was done on the devices of a lease, from its first guest to its last."""

    vram_byte_seconds: int = 0
    """Bytes that were allocated through Sublet, times how long."""
    peak_bytes: int = 0
    """The most that one process had on one device."""
    launches: int = 0
    failures: int = 0
    """Operations that failed, launches among them."""
    bytes_in: int = 0
    bytes_out: int = 0
    """Between programs and devices."""
    is_whole: bool = False
    """Whether all was counted: nothing but sessions ran, or guests that count what frameworks launch in them."""
    fuel: int = later(0)
    """That WASM tasklets used, also under a lease without devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The last checkpoint that was published by the guests of a lease."""

    version: int
    wall_ns: int
    """When it was published."""
    size: int = 0
    """Bytes that were written, of all checkpoints under the lease together."""
    count: int = 1
    """How many checkpoints those were."""
    volume: str = ""
    """The name of the volume it is in; empty if that goes with its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TornDown:
    """Verified: nothing of this lease up to this epoch is left on these resources."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    resources: tuple[ResourceId, ...]
    metered: Metered | None = None
    """Of the lease as a whole; None if nothing ran there that would be known of."""
    steps: dict[str, int] = field(default_factory=dict, compare=False)
    """How long each step took, in nanoseconds: ``told`` (the grace), ``killing``, ``verifying``, ``scrubbing``."""
    parked: bool = False
    """Guests of the lease live on, under the parking lease that the ``End`` named."""
    kept: bool = True
    """Of the volume that the ``End`` named: whether there is anything in it worth keeping. False: nothing of it is on
    the disk any more."""
    saved: Saved | None = None
    """None if nothing was published under it, or not as far as this process knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Teardown tried to its bound, or the scrub failed. Only lateness (not ``hard``) may be cleared by verification."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    resource: ResourceId
    detail: str
    hard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The device itself reported a fault (Xid, ECC) or vanished."""

    node: NodeId
    resource: ResourceId
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What others than our guests have of this resource now. It replaces what was said of the resource before; nothing
    at all is said with the defaults."""

    node: NodeId
    resource: ResourceId
    amount: int = 0
    """Bytes that cannot be lent for as long as this is so."""
    blocks: bool = False
    """A lease is on it, so no other can have it exclusively (``session``, ``device``)."""
    detail: str = ""
    """The program, in a sentence for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parkable:
    """What the guests of a lease that has notice, or runs out, would need to be parked. Said again, at growing
    intervals, until the lease is over or spared; the newest counts."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    amount: int
    """Bytes of memory: what they have resident, and what they have on their devices. 0: see ``why``."""
    why: str = ""
    """Why they cannot be parked, in words. Empty with an amount of 0: there are none."""
    expiring: bool = later(False)
    """The lease has had no notice; its deadline is near and was not moved."""
    whole: bool = later(True)
    """Whether everything they have is kept by parking them. It is not where a holder has a session on the device, with
    memory there."""
    safe: bool = later(False)
    """Whether they have nothing left to save, so that nothing is lost if they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was parked goes on under a new lease, and the parking lease is over here. Repeated until that is answered by
    an ``End`` of the parking lease."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    """Of the new lease."""
    under: Parking
    """What it was parked under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRemoved:
    """Nothing of this volume, up to this epoch, is left on the disk. It answers each
    ``RemoveVolume``, also of one that was never here."""

    node: NodeId
    lease: LeaseId
    epoch: Epoch
    volume: VolumeRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """Everything that is kept on this node without a lease. Said when an office comes: what it did not know of
    it takes into its books, and what it misses it asks for (``End``)."""

    node: NodeId
    volumes: tuple[StoredVolume, ...] = ()
    is_all: bool = True
    """False: there are more than one message holds, and this is some of them."""


Report = Held | NotHeld | EndedHere | TornDown | Failed | Fault | Foreign | Parkable | Resumed | VolumeRemoved | Volumes
