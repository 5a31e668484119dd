"""The ledger's facts: what the journal stores, and of which the state is the fold.

One frozen type per fact. ``AUDITED`` names those that go into the audit chain: every change of state of a lease, a
slice, a node or a tenant, once. What is not audited (a renewal, an activity note) moves a deadline or a counter, and
the record of the lease's end carries its total. Every audited fact says whose doing it was.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sublet.lease_end import EndReason
from sublet.office.ledger.records import (
    BudgetRecord,
    BurstRecord,
    DeclaredRecord,
    EndRecord,
    ForeignRecord,
    GroupRecord,
    LeaseRecord,
    NoticeRecord,
    PricesRecord,
    ProcessRecord,
    ReservationRecord,
    Span,
    TenantRecord,
)
from sublet.values import (
    BudgetId,
    BudgetLevel,
    Epoch,
    GroupId,
    LeaseId,
    NodeId,
    RequestId,
    ReservationId,
    ResourceId,
    TenantId,
)
from sublet.wire import orders
from sublet.wire.orders import Inventory, Part


class _Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """What has its usual value is not written down, so a default is part of the format: it may never change."""


class _Audited(_Fact, frozen=True, kw_only=True):
    by: str = ""
    """Whose doing it was: ``tenant:ID``, ``operator:ID``, or ``office`` for what time, an agent or the scheduler did;
    behind that, where it came over the shared socket, which user's process asked, as in ``tenant:ana (uid 1001, pid
    4242)``. Empty in records that are older than this field."""


class OfficeOpened(_Audited, frozen=True, kw_only=True, tag="office_opened"):
    """A broker opened the journal. Epochs of its incarnation follow."""

    incarnation: int
    clock_domain: str


class Rebased(_Audited, frozen=True, kw_only=True, tag="rebased"):
    """The clock is another one (reboot, other machine): leases go on with their persisted remaining time."""

    clock_domain: str
    shift_ns: int
    """Added to every instant the ledger knows, from the old clock to the new one."""
    extended_ns: int
    """The most that this may have added to the life of each lease."""


class NodeJoined(_Audited, frozen=True, kw_only=True, tag="node_joined"):
    inventory: Inventory


class NodeLost(_Audited, frozen=True, kw_only=True, tag="node_lost"):
    node: NodeId
    detail: str = ""


class NodeReturned(_Audited, frozen=True, kw_only=True, tag="node_returned"):
    """The node answers again; what was on it must be verified first."""

    node: NodeId


class NodeDrained(_Audited, frozen=True, kw_only=True, tag="node_drained"):
    node: NodeId
    draining: bool


class ResourceFaulted(_Audited, frozen=True, kw_only=True, tag="resource_faulted"):
    """The device reported a fault: no new lease until an operator clears it."""

    resource: ResourceId
    detail: str


class ResourceLost(_Audited, frozen=True, kw_only=True, tag="resource_lost"):
    """The node answers and no longer has the device: it is not granted before it is there again."""

    resource: ResourceId


class ResourceReturned(_Audited, frozen=True, kw_only=True, tag="resource_returned"):
    """The node has the device again. What is left on it of leases must be verified first."""

    resource: ResourceId


class ForeignSeen(_Fact, frozen=True, kw_only=True, tag="foreign_seen"):
    """Others than our guests use the device, or no longer do (None). It changes while they work, so it is not audited;
    it says nothing of who had a lease."""

    resource: ResourceId
    foreign: ForeignRecord | None


class TenantSet(_Audited, frozen=True, kw_only=True, tag="tenant_set"):
    tenant: TenantRecord


class TenantRemoved(_Audited, frozen=True, kw_only=True, tag="tenant_removed"):
    """It had nothing any more, and may not ask again. One of the same name goes on behind its generation."""

    tenant: TenantId
    generation: int


class PolicyApplied(_Audited, frozen=True, kw_only=True, tag="policy_applied"):
    """The operator's file was read again. Its limits are not in the books: this says who changed what."""

    changed: dict[str, str]
    """Of the limits: key → what holds from now on, as a person writes it."""
    declared: DeclaredRecord | None = None
    """What it says of groups, reservations and budgets, where that is something else than before."""


class GroupSet(_Audited, frozen=True, kw_only=True, tag="group_set"):
    group: GroupRecord


class GroupRemoved(_Audited, frozen=True, kw_only=True, tag="group_removed"):
    """No tenant was in it any more."""

    group: GroupId


class ReservationSet(_Audited, frozen=True, kw_only=True, tag="reservation_set"):
    """With the instants that were worked out from its rule: a newer time-zone database changes nothing of the past."""

    reservation: ReservationRecord


class ReservationRemoved(_Audited, frozen=True, kw_only=True, tag="reservation_removed"):
    reservation: ReservationId


class ReservationPlaced(_Audited, frozen=True, kw_only=True, tag="reservation_placed"):
    """These devices are kept for one time of a reservation: chosen before its start, and again when one is lost."""

    reservation: ReservationId
    span: Span
    resources: tuple[ResourceId, ...]


class ReservationBegan(_Audited, frozen=True, kw_only=True, tag="reservation_began"):
    """Its time has come."""

    reservation: ReservationId
    ready: int
    """Devices on which nothing of another group was left at that moment."""


class ReservationLent(_Audited, frozen=True, kw_only=True, tag="reservation_lent"):
    """What the group does not use goes to requests of tier spot from now on."""

    reservation: ReservationId


class ReservationOver(_Audited, frozen=True, kw_only=True, tag="reservation_over"):
    """The end of one of its times."""

    reservation: ReservationId


class PricesSet(_Audited, frozen=True, kw_only=True, tag="prices_set"):
    """The office opened with other prices than before. Budgets count by them, and so do bills."""

    prices: PricesRecord


class BudgetSet(_Audited, frozen=True, kw_only=True, tag="budget_set"):
    """A budget is there, or has another amount."""

    budget: BudgetRecord


class BudgetCredited(_Audited, frozen=True, kw_only=True, tag="budget_credited"):
    """An operator added to what may be spent in one window."""

    budget: BudgetId
    window: str
    amount: int
    """Millionths of a unit of money."""
    request_id: RequestId = RequestId("")
    """Of the request that asked for it; empty in records that are older than this field."""


class BudgetReached(_Audited, frozen=True, kw_only=True, tag="budget_reached"):
    """The use of a budget reached 80 % of it, or all; or it is below that again, by credit or a larger amount."""

    budget: BudgetId
    window: str
    level: BudgetLevel
    used: int
    """Millionths of a unit of money, as of that moment."""
    limit: int


class BudgetRemoved(_Audited, frozen=True, kw_only=True, tag="budget_removed"):
    budget: BudgetId


class BurstDrawn(_Fact, frozen=True, kw_only=True, tag="burst_drawn"):
    """A lease begins to draw on the burst credit of its tenant, or no longer does, while the quota has room."""

    lease: LeaseId
    millis: int
    """Thousandths of a device; 0: no longer."""
    before: BurstRecord
    """How the credit stands, with the numbers of the quota that hold from now on."""


class BurstChanged(_Fact, frozen=True, kw_only=True, tag="burst_changed"):
    """The burst credit of a tenant that has drawn on it has another bound, or fills at another rate, from now on."""

    tenant: TenantId
    burst: BurstRecord


class Queued(_Audited, frozen=True, kw_only=True, tag="queued"):
    """A request was accepted. It may be granted in the same step."""

    lease: LeaseRecord


class PriorityGained(_Fact, frozen=True, kw_only=True, tag="priority_gained"):
    """A request that does not pay for priority has waited for long enough: it stands among those that do."""

    lease: LeaseId


class Granted(_Audited, frozen=True, kw_only=True, tag="granted"):
    """Hardware is set aside under a new epoch."""

    lease: LeaseId
    node: NodeId
    epoch: Epoch
    parts: tuple[Part, ...]
    claim_by_ns: int
    offered: bool = False


class Ungranted(_Audited, frozen=True, kw_only=True, tag="ungranted"):
    """An offer was declined or ran out; the request goes back into the line and its slices are torn down."""

    lease: LeaseId
    detail: str


class Claimed(_Audited, frozen=True, kw_only=True, tag="claimed"):
    lease: LeaseId
    deadline_ns: int
    number: int


class Renewed(_Fact, frozen=True, kw_only=True, tag="renewed"):
    lease: LeaseId
    deadline_ns: int
    number: int
    busy_ns: int = 0
    """Busy time since the last word of the holder."""
    idle: bool = False
    ttl_ns: int | None = None
    """A longer time to live from now on, where the holder asked for one."""


class ActivityNoted(_Fact, frozen=True, kw_only=True, tag="activity"):
    lease: LeaseId
    busy_ns: int
    idle: bool


class FateSealed(_Audited, frozen=True, kw_only=True, tag="fate_sealed"):
    """A renewal was refused; the lease runs to its deadline and then ends for this reason."""

    lease: LeaseId
    reason: EndReason


class Attached(_Audited, frozen=True, kw_only=True, tag="attached"):
    """A new epoch for the same lease: the old one is fenced."""

    lease: LeaseId
    epoch: Epoch
    number: int
    request_id: RequestId
    holder: str = ""
    process: ProcessRecord | None = None
    """The process that it ends with from now on."""
    peer: str = ""
    """Which user and process of the machine attached, where that was not the owner's own."""


class Bound(_Audited, frozen=True, kw_only=True, tag="bound"):
    """The lease ends with another process from now on, or with none."""

    lease: LeaseId
    process: ProcessRecord | None


class Noticed(_Audited, frozen=True, kw_only=True, tag="noticed"):
    lease: LeaseId
    notice: NoticeRecord
    number: int


class Spared(_Audited, frozen=True, kw_only=True, tag="spared"):
    """The reason for the notice went away."""

    lease: LeaseId
    number: int


class Promised(_Audited, frozen=True, kw_only=True, tag="promised"):
    """These parts go to this request and to no other, as soon as the victims have left them."""

    lease: LeaseId
    node: NodeId
    parts: tuple[Part, ...]
    victims: tuple[LeaseId, ...]


class PromiseDropped(_Audited, frozen=True, kw_only=True, tag="promise_dropped"):
    """The victims are gone and the parts did not come free (quarantined), or the request went away."""

    lease: LeaseId


class Ending(_Audited, frozen=True, kw_only=True, tag="ending"):
    """Over for the holder; slices go to teardown. Carries the totals of what is not audited one by one."""

    lease: LeaseId
    end: EndRecord
    number: int
    busy_ns: int = 0
    """Busy time of the whole lease."""
    renewals: int = 0


class Ended(_Audited, frozen=True, kw_only=True, tag="ended"):
    """The last state. From the queue directly, or once every slice is verified, quarantined or lost."""

    lease: LeaseId
    end: EndRecord


class Metered(_Audited, frozen=True, kw_only=True, tag="metered"):
    """What was done on the devices of a lease, once for each lease on whose devices guests ran."""

    lease: LeaseId
    counts: orders.Metered
    steps: dict[str, int] = {}
    """How long each step of its teardown took, in nanoseconds."""


class TornDown(_Audited, frozen=True, kw_only=True, tag="torn_down"):
    """TORN_DOWN(epoch): verified, so the slice is free."""

    resource: ResourceId
    lease: LeaseId
    epoch: Epoch


class Quarantined(_Audited, frozen=True, kw_only=True, tag="quarantined"):
    resource: ResourceId
    lease: LeaseId
    epoch: Epoch
    detail: str
    hard: bool


class Cleared(_Audited, frozen=True, kw_only=True, tag="cleared"):
    """A quarantine ended: by a verification (then by the office) or by an operator's word. ``lease`` and ``epoch`` are
    None where the device itself was at fault."""

    resource: ResourceId
    lease: LeaseId | None
    epoch: Epoch | None = None
    """One lease may have several slices here: one of them coming clean says nothing of the others."""


class Parked(_Audited, frozen=True, kw_only=True, tag="parked"):
    """The guests of a lease that was taken live on under this parking lease; nothing of them is on a device."""

    lease: LeaseId
    """The parking lease."""
    of: LeaseId


class Replaced(_Fact, frozen=True, kw_only=True, tag="replaced"):
    """A lease ends because this one, of the same tenant, takes its place; what that one has may have to be cleared
    before this one is granted."""

    lease: LeaseId
    old: LeaseId
    wait_until_ns: int | None
    """How long the request waits for that, at least."""


class ParkingDenied(_Fact, frozen=True, kw_only=True, tag="parking_denied"):
    """The guests of a lease that has notice cannot be parked, or it did not come off. The record of its end says so."""

    lease: LeaseId
    why: str


class Resumed(_Audited, frozen=True, kw_only=True, tag="resumed"):
    """What was parked goes on under this lease."""

    lease: LeaseId
    under: LeaseId


class Saved(_Audited, frozen=True, kw_only=True, tag="saved"):
    """What was saved under a lease, once, when it is over."""

    lease: LeaseId
    saved: orders.Saved


class _Volume(_Audited, frozen=True, kw_only=True):
    tenant: TenantId
    name: str


class VolumeTaken(_Volume, frozen=True, kw_only=True, tag="volume_taken"):
    """A lease was granted that goes on with a volume, or makes one. From here on the slice is its own."""

    lease: LeaseId
    epoch: Epoch
    node: NodeId
    resource: ResourceId
    size: int
    retain_ns: int


class VolumeKept(_Volume, frozen=True, kw_only=True, tag="volume_kept"):
    """No process is on it any more, and it is kept; or it was looked for, and is there."""

    lease: LeaseId
    epoch: Epoch
    resource: ResourceId
    size: int


class VolumeMissed(_Volume, frozen=True, kw_only=True, tag="volume_missed"):
    """The node did not name it among what it keeps, so it is asked for."""

    resource: ResourceId


class VolumeRemoving(_Volume, frozen=True, kw_only=True, tag="volume_removing"):
    """Its retention is over, or it was given up."""

    resource: ResourceId
    detail: str


class VolumeRemoved(_Volume, frozen=True, kw_only=True, tag="volume_removed"):
    """Verified: nothing of it is on the disk, and its slice, if it still had one, is free."""

    resource: ResourceId
    size: int
    detail: str = ""


class VolumeLost(_Volume, frozen=True, kw_only=True, tag="volume_lost"):
    """The node does not have it any more, though its removal was not ordered. Its slice is free."""

    resource: ResourceId
    size: int
    detail: str = ""


class VolumeFound(_Volume, frozen=True, kw_only=True, tag="volume_found"):
    """A node keeps a volume that the books do not know, or not so new: they are older than it is. It is kept from
    here on, under an epoch of its own."""

    node: NodeId
    resource: ResourceId
    size: int
    lease: LeaseId
    epoch: Epoch
    retain_ns: int


class Forgotten(_Fact, frozen=True, kw_only=True, tag="forgotten"):
    """Ended leases that the ledger no longer remembers; the audit log does."""

    leases: tuple[LeaseId, ...]


Event = (
    OfficeOpened
    | Rebased
    | NodeJoined
    | NodeLost
    | NodeReturned
    | NodeDrained
    | ResourceFaulted
    | ResourceLost
    | ResourceReturned
    | ForeignSeen
    | TenantSet
    | TenantRemoved
    | PolicyApplied
    | GroupSet
    | GroupRemoved
    | ReservationSet
    | ReservationRemoved
    | ReservationPlaced
    | ReservationBegan
    | ReservationLent
    | ReservationOver
    | PricesSet
    | BudgetSet
    | BudgetCredited
    | BudgetReached
    | BudgetRemoved
    | BurstChanged
    | BurstDrawn
    | Queued
    | PriorityGained
    | Granted
    | Ungranted
    | Claimed
    | Renewed
    | ActivityNoted
    | FateSealed
    | Attached
    | Bound
    | Noticed
    | Spared
    | Promised
    | PromiseDropped
    | Ending
    | Ended
    | Metered
    | TornDown
    | Quarantined
    | Cleared
    | Parked
    | ParkingDenied
    | Replaced
    | Resumed
    | Saved
    | VolumeTaken
    | VolumeKept
    | VolumeMissed
    | VolumeRemoving
    | VolumeRemoved
    | VolumeLost
    | VolumeFound
    | Forgotten
)

EVENT_TYPES: Final[dict[str, type]] = {str(t.__struct_config__.tag): t for t in Event.__args__}

AUDITED: Final[frozenset[type]] = frozenset(t for t in EVENT_TYPES.values() if issubclass(t, _Audited))
