"""The ledger's records: requests, leases, slices, resources, nodes, tenants.

These are plain records. They change in one place only, ``fold.apply``, and they are what a snapshot stores.
Where most fields of most records have their usual value, these are not written down; so a default is part of the
format and may never change.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from sublet.lease.states import LIVE_STATES, LeaseStatus, SliceState, VolumeState
from sublet.lease_end import EndReason
from sublet.values import (
    BudgetId,
    BudgetLevel,
    BudgetWindow,
    Epoch,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RenewMode,
    RequestId,
    ReservationId,
    ResourceId,
    Suspend,
    TenantId,
    Tier,
    Way,
)
from sublet.wire.orders import Device, Parking, Part, VolumeRef

HOLDING_STATES: Final = LIVE_STATES | {LeaseStatus.GRANTED}
"""In which a lease counts against quotas, and as use."""
KEPT_STATES: Final = frozenset({VolumeState.RETAINED, VolumeState.REMOVING})
"""In which a volume takes room without a lease."""
LOCAL_TENANT = TenantId("local")
"""The tenant of calls over the owner-only socket without a token: the owner of the machine, with operator rights."""


class Now(NamedTuple):
    """The moment a command is handled: ``ns`` decides, ``wall_ns`` is only recorded."""

    ns: int
    wall_ns: int


class Want(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a request: ``count`` times ``amount`` of one kind, all on one node, all or nothing."""

    kind: Kind
    amount: int
    """Bytes (of VRAM, memory, block) or cores. 0 of block, in a request with a name: what its volume has."""
    count: int = 1
    exclusivity: Exclusivity | None = None
    """GPU only (default: ``session``)."""
    model: str | None = None
    least: int | None = None
    """The smallest amount the holder would take instead (``or_smaller``)."""
    other: str | None = None
    """Models that the holder would take instead of ``model``, as an offer (``or_model``); ``*`` is any."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one tenant; None is no limit."""

    gpus: int | None = None
    vram_bytes: int | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    block_bytes: int | None = None
    leases: int | None = None
    gpu_seconds: int | None = None
    """Device time within the rolling window of the policy."""
    queue: int | None = None
    """Requests that wait at once."""
    requests_per_minute: int | None = None
    """Sent to the office."""
    burst_seconds: int | None = None
    """Device time beyond ``gpu_seconds``, as a credit; None: none."""
    burst_refill_seconds: int | None = None
    """What of that credit comes back in an hour; None: nothing."""


NO_QUOTA: Final = Quota()
"""Of most tenants."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tenants that share: a course, a lab."""

    id: GroupId
    weight: int = 1
    """Of two groups that both wait, the one with twice the weight gets twice as much."""
    floor: int = 0
    """GPUs that it can always have, by preemption where need be."""
    ceiling: int | None = None
    """GPUs that it never has more of at once."""
    quota: Quota = Quota()
    """What all its tenants together may hold."""


class Span(NamedTuple):
    """From one instant of the wall clock to another, in nanoseconds of UTC."""

    start_ns: int
    end_ns: int


class ReservationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GPUs promised to a group at stated times."""

    id: ReservationId
    group: GroupId
    gpus: int
    model: str | None = None
    when: str = ""
    """The rule as it was written; only ``spans`` decide."""
    zone: str = ""
    """The time zone in which it was written."""
    spans: tuple[Span, ...] = ()
    """The instants of the rule, in order and apart from one another, as far as they were worked out."""


class ReservedRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One time of a reservation, from the moment at which its devices are chosen to its end."""

    span: Span
    resources: tuple[ResourceId, ...] = ()
    """The devices that are kept for the group; fewer than reserved where there are no more in service."""
    began: bool = False
    lends: bool = False
    """What the group leaves unused goes to requests of tier spot, until the group asks for it."""


class PricesRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the hardware costs, as ``rates.toml`` says it: millionths of a unit of money for an hour."""

    currency: str
    gpu: int
    """A device of a model that is not named."""
    models: dict[str, int]
    cpu: int
    """A core."""
    memory: int
    """A GiB."""
    block: int
    """A GiB."""
    priority: int | None = None
    """What a device costs more whose holder pays for priority; None: it is not for sale."""


class BudgetRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one tenant, or one group, may spend in a window."""

    id: BudgetId
    tenant: TenantId | None = None
    group: GroupId | None = None
    """Either of the two."""
    per: BudgetWindow
    amount: int
    """Millionths of a unit of money, in each window."""
    currency: str
    since_wall_ns: int
    """What is held when the budget is set counts from this instant on."""
    credits: dict[str, int] = {}
    """Added by operators, by the name of the window."""
    credited: dict[RequestId, int] = {}
    """Of the last credits, by the request: one that is sent again is known by it."""


class DeclaredRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ``policy.toml`` says of groups, reservations and budgets: the keys that stand there, and no others."""

    groups: dict[GroupId, dict[str, int]] = {}
    """By the name of the field of ``GroupRecord``, or of its quota."""
    members: dict[TenantId, GroupId] = {}
    """Tenants that it puts into a group. Those that are not there yet are put into it when they are added."""
    reservations: dict[ReservationId, ReservationRecord] = {}
    """Without instants."""
    budgets: dict[BudgetId, int] = {}
    """Millionths of a unit of money."""


class HeldRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease or a volume holds, on its way to a budget."""

    tenant: TenantId
    group: GroupId
    """That the tenant was in when it asked."""
    start_ns: int
    wall_ns: int
    """Where on the wall clock it began."""
    units: dict[str, int]
    """By kind, and for a GPU with its model as in ``gpu/NVIDIA H200``: thousandths of a device, cores or bytes. Under
    ``priority`` the thousandths of devices for which priority is paid, once more."""


class SpentRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a budget stands, but for what is held now."""

    window: str = ""
    """In which ``level`` was reached."""
    level: BudgetLevel = BudgetLevel.OPEN
    past: dict[str, dict[str, int]] = {}
    """By window and what was held: units times nanoseconds, of what is held no more."""
    since_ns: int | None = None
    """When the budget was set, by the clock of leases; None: books that are older than this field."""


class BurstRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The burst credit of a tenant as it stood at one moment, and what it does from then on."""

    at_ns: int
    credit: int
    """As ``burst_credit`` counts it."""
    bound: int
    refill: int
    """GPU-seconds an hour."""
    drawn: int = 0
    """By leases that draw on it: thousandths of a device."""


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant: it is accountable for its leases."""

    id: TenantId
    quota: Quota = Quota()
    tier_max: Tier = Tier.INTERACTIVE
    operator: bool = False
    token_hash: str | None = None
    """SHA-256 of the access token; the token itself is printed once and never stored."""
    generation: int = 0
    """Of its rights: it rises with every new access token and whenever rights are taken away. What was opened, or
    signed, under an older one is not valid any more."""
    disabled: bool = False
    """It has no rights and gets no leases, until it is enabled."""
    uid: int | None = None
    """The one user of the machine who may be this tenant; None: any bearer of the token."""
    needs_token: bool = True
    """Whether that user must show the token as well, where the kernel says who asks."""
    group: GroupId | None = None
    """None: the default group."""
    weight: int = 1
    """Within its group."""
    studio: bool = False
    """It is no tenant that has leases but a studio, which acts for others (``studio_right``)."""


class NoticeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The lease will be taken, when and for whom."""

    reason: EndReason
    take_at_ns: int
    detail: str = ""
    beneficiary: LeaseId | None = None
    when_safe: bool = False
    """It ends as soon as nothing of it would be lost; ``take_at_ns`` is only the bound."""
    reservation: ReservationId | None = None
    """For which its device is kept."""
    budget: BudgetId | None = None
    """That is used up."""


class EndRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the lease ended."""

    reason: EndReason
    at_ns: int
    wall_ns: int
    detail: str = ""
    way: Way | None = None
    """What became of those who were on its devices, where it was taken and that was asked."""
    resume: Parking | None = None
    """Where they live on, or are to."""

    def reported_way(self, saved_wall_ns: int | None) -> Way | None:
        """The way as it is told, given when something was saved: a guest that saved has not lost everything."""
        return Way.SAVED if self.way is Way.NOT_SAVED and saved_wall_ns is not None else self.way


class Parks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What makes a lease of memory a parking lease."""

    of: LeaseId
    """Whose guests it is for."""
    wants: tuple[Want, ...]
    """What they need to go on."""
    parts: tuple[Part, ...]
    """What they had."""
    ability: Suspend
    holds: bool = False
    """Whether they are parked there; before that it was set aside for them."""
    resumed_by: LeaseId | None = None
    """The request, or the lease, that goes on with them."""
    partial: bool = False
    """Parking does not keep all that they have."""
    took_ns: int = 0
    """How long it took to take them off their devices."""


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the office's machine, for good: a pid alone is reused."""

    pid: int
    start_ticks: int
    """When it started, in clock ticks since boot, as /proc/PID/stat has it."""
    boot_id: str
    namespaces: str
    """The PID and time namespaces in which the two numbers were read."""


class LeaseRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One lease, from the request to its end."""

    # what was asked
    id: LeaseId
    tenant: TenantId
    request_id: RequestId
    fingerprint: str
    """Hash of the request, so that the same id with another content is noticed."""
    wants: tuple[Want, ...]
    ttl_ns: int
    tier: Tier
    arrival: int
    """Place in the order of arrival."""
    asked_at_ns: int
    asked_wall_ns: int
    wait_until_ns: int | None = None
    """None waits without bound."""
    expect_ns: int | None = None
    """How long it will probably be used. It decides about admission only; what is charged is what was held."""
    selector: dict[str, str] = {}
    """Labels the node must have."""
    full_wants: tuple[Want, ...] = msgspec.field(default=(), name="asked")
    """What was asked for, where no node could ever have so much: ``wants`` is then the most there is, and what is
    granted of it is an offer."""
    renew: RenewMode = RenewMode.WHILE_BUSY
    name: str | None = None
    labels: dict[str, str] = {}
    holder: str = ""
    """What the client says of itself; shown, never trusted."""
    process: ProcessRecord | None = None
    """The holder's process, where the lease ends with it. None: it ends by its time to live."""
    peer: str = ""
    """Which user and process of the machine asked for it, or attached, where that was not the owner's own."""

    # where it is
    status: LeaseStatus = LeaseStatus.QUEUED
    node: NodeId | None = None
    epoch: Epoch | None = None
    parts: tuple[Part, ...] = ()
    offered: bool = False
    """The grant is smaller than asked and waits for a yes."""
    offers: int = 0
    """How many offers were made; after one was declined or ran out, none is made again."""
    number: int = 0
    """The last order sent to the agent."""
    granted_at_ns: int | None = None
    granted_wall_ns: int | None = None
    group: GroupId | None = None
    """That its tenant was in when it asked, and that pays for it. None: a lease of before this was noted."""
    claim_by_ns: int | None = None
    claimed_at_ns: int | None = None
    deadline_ns: int | None = None
    renewals: int = 0
    metered: bool = False
    """Whether it was said what was done on its devices."""
    idle_since_ns: int | None = None
    busy_ns: int = 0
    extended_ns: int = 0
    """Time added by restarts on another clock since the last renewal; at most one TTL."""
    fate: EndReason | None = None
    """Why a renewal was refused: what the end will say if the deadline comes."""
    notice: NoticeRecord | None = None
    promise: tuple[Part, ...] = ()
    """Parts set aside for this queued request, which its victims are about to leave."""
    promise_node: NodeId | None = None
    victims: tuple[LeaseId, ...] = ()
    end: EndRecord | None = None
    attach_request_id: RequestId | None = None
    """The last attach, so that its retry gives no second epoch."""

    # parking
    parks: Parks | None = None
    """It is a parking lease."""
    parked_under: LeaseId | None = None
    """The parking lease that was set aside for its guests."""
    unsaved: str = ""
    """Why its guests cannot be parked, if that is known."""
    resume: Parking | None = None
    """It was asked for to go on with what is parked there, under that epoch."""
    resumed: bool = False
    """They go on under it."""
    replaces: LeaseId | None = None
    """The lease of the same tenant in whose place it was asked for. That one ends with the claim of this one, or when
    this one is promised a part of it."""
    replaced_by: LeaseId | None = None
    """The request that is to replace it."""
    held_since_ns: int | None = None
    """Since when its holder has had the lease that it replaced."""
    draws: int = 0
    """On the burst credit of its tenant: thousandths of a device."""
    attained_ns: int = 0
    """For how long its holder had held, without a break, what this request goes on with."""
    pays_priority: bool = False
    """Its holder pays the rate for priority."""
    has_priority: bool = False
    """In the queue it goes before others of its tier: its holder pays for that, or it has waited for long enough."""
    priority_at_ns: int | None = None
    """When it has waited for long enough. None: it pays, or priority was not for sale when it was asked for."""
    goes_on: LeaseId | None = None
    """The lease that was taken from its holder, or released by it, and with whose work this request goes on."""
    moving_ns: int = 0
    """How long its guests' last suspend and resume took together; 0 if they were never parked."""

    # volume
    retain_ns: int | None = None
    """How long what is in its blocks is to be kept after its end; None: as it was before, or as the policy has it."""
    takes: bool = False
    """Its volume was there before it."""
    saved_wall_ns: int | None = None
    """When the last checkpoint was published under it; known once it has ended."""
    saved_version: int | None = None
    """Which one that was, by its number in its volume."""
    saved_volume: str = ""
    """In which; empty: it went with its lease."""

    @property
    def spot(self) -> bool:
        return self.tier is Tier.SPOT


class SliceRecord(msgspec.Struct, kw_only=True):
    """A part of a resource that is not free. What is free is what no slice takes."""

    resource: ResourceId
    lease: LeaseId
    epoch: Epoch
    tenant: TenantId
    part: Part
    state: SliceState
    detail: str = ""
    hard: bool = False
    """Only an operator may clear it."""
    volume: str = ""
    """The name of the volume in it. That outlives the lease, and so does this slice."""


class ForeignRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What others than our guests have of a resource, as its agent last said."""

    amount: int
    blocks: bool
    """No lease can have the device to itself."""
    detail: str


NO_LONGER_THERE: Final = "the device is no longer there"
"""What is said of a device that its node does not have any more."""


class ResourceRecord(msgspec.Struct, kw_only=True):
    """A device, or the cores, memory or disk of a node. Its state is that of the part that no lease has."""

    id: ResourceId
    node: NodeId
    device: Device
    state: SliceState = SliceState.FREE
    detail: str = ""
    used: int = 0
    slices: dict[str, SliceRecord] = {}
    """By the text of the epoch: one lease may have an old slice in teardown beside its new one."""
    foreign: ForeignRecord | None = None


class NodeRecord(msgspec.Struct, kw_only=True):
    """One machine."""

    id: NodeId
    domain: str
    labels: dict[str, str]
    resources: tuple[ResourceId, ...] = ()
    draining: bool = False
    lost: bool = False


class VolumeRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The storage that a tenant finds again by name."""

    tenant: TenantId
    name: str
    node: NodeId
    resource: ResourceId
    size: int
    state: VolumeState
    lease: LeaseId
    epoch: Epoch
    """The lease that has it, or had it last. Its slice is filed under this epoch."""
    retain_ns: int
    """How long it is kept from the end of its last lease on."""
    made_wall_ns: int
    kept_ns: int | None = None
    """Since when no lease has it."""
    kept_wall_ns: int | None = None
    group: GroupId | None = None
    """That its tenant was in when it began to be kept, and that pays for that."""
    until_ns: int | None = None
    """When it is removed, unless it is taken before."""
    detail: str = ""
    """What there is to say of it."""

    @property
    def ref(self) -> VolumeRef:
        return VolumeRef(tenant=self.tenant, name=self.name)

    @property
    def key(self) -> str:
        return volume_key(self.tenant, self.name)


def volume_key(tenant: TenantId, name: str) -> str:
    """Under what the books file a volume; neither of the two has a slash in it."""
    return f"{tenant}/{name}"
