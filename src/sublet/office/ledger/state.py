"""The ledger's state: the fold of its events, and nothing else.

``fold.apply`` is the only way anything changes. What the journal holds is therefore enough to rebuild everything, and a
test can compare the state that lived with the state that was folded. Decisions are made elsewhere (``ledger``); here
every event is taken as a fact, and a fact the tables do not know is a bug that raises before anything is changed.

``Books`` is what a snapshot stores. The rest are indexes, made from the books.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from sublet.lease.states import (
    LIVE_STATES,
    LeaseStatus,
    SliceEvent,
    SliceState,
    next_slice,
)
from sublet.lease_end import EndReason
from sublet.office.ledger.fairness import DEFAULT_GROUP, HALF_LIFE_NS, SHARED_KINDS, Account, Decay, amounts_of
from sublet.office.ledger.free_capacity import Room
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import (
    HOLDING_STATES,
    KEPT_STATES,
    LOCAL_TENANT,
    NO_QUOTA,
    BudgetRecord,
    BurstRecord,
    DeclaredRecord,
    GroupRecord,
    HeldRecord,
    LeaseRecord,
    NodeRecord,
    Now,
    PricesRecord,
    Quota,
    ReservationRecord,
    ReservedRecord,
    ResourceRecord,
    SliceRecord,
    SpentRecord,
    TenantRecord,
    VolumeRecord,
    Want,
    volume_key,
)
from sublet.office.ledger.spending import account_of, accounts_of, rates_of
from sublet.office.ledger.usage import UsageMeter
from sublet.values import (
    MILLIS_PER_DEVICE,
    NS_PER_S,
    BudgetId,
    Epoch,
    Exclusivity,
    GroupId,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ReservationId,
    ResourceId,
    TenantId,
    Tier,
)
from sublet.wire.decoders import decode_as
from sublet.wire.orders import Part

ATTAINED_STEPS_NS: Final = (30 * 60 * NS_PER_S, 4 * 3600 * NS_PER_S)
"""Of two requests of a tenant, that goes first whose holder has not yet held for so long without a break."""
TAKEN_REASONS: Final = frozenset({EndReason.PREEMPTED, EndReason.FAIR_SHARE})
"""Ends that make room for another request."""
TAKEN_LOOKED_AT: Final = 64
"""Leases of a tenant that are looked at to see whether a request goes on with one of them."""
_DEFAULT: Final = GroupRecord(id=DEFAULT_GROUP)
STALE_ENTRIES_MAX = 1024
"""Entries of a heap (timers, waiting requests) whose leases are over; with more of them the heap is made anew."""


Lane = tuple[Tier, bool]
"""Of the queue: a tier, and in it whether the requests go before the others of the tier (``has_priority``)."""
LANES: Final[tuple[Lane, ...]] = tuple(
    (tier, first) for tier in sorted(Tier, key=lambda tier: tier.rank, reverse=True) for first in (True, False)
)
"""In the order of the queue."""

Waiting = tuple[int, int, LeaseId]
"""Step of what its holder has had without a break, arrival, and the lease."""


class Books(msgspec.Struct, kw_only=True):
    """Everything that is remembered."""

    incarnation: int = 0
    next_n: int = 1
    next_arrival: int = 1
    clock_domain: str = ""
    usage_window_ns: int
    cool_down_ns: int
    nodes: dict[NodeId, NodeRecord] = {}
    resources: dict[ResourceId, ResourceRecord] = {}
    tenants: dict[TenantId, TenantRecord] = {}
    removed: dict[TenantId, int] = {}
    """Tenants that were removed, and the generation of their rights."""
    leases: dict[LeaseId, LeaseRecord] = {}
    """Live ones, and ended ones for as long as they are remembered."""
    volumes: dict[str, VolumeRecord] = {}
    """By ``volume_key``."""
    usage: dict[TenantId, UsageMeter] = {}
    groups: dict[GroupId, GroupRecord] = {}
    reservations: dict[ReservationId, ReservationRecord] = {}
    reserved: dict[ReservationId, ReservedRecord] = {}
    """The times for which devices are kept now."""
    accounts: dict[TenantId, Account] = {}
    """What decides the order of the queue."""
    group_accounts: dict[GroupId, Account] = {}
    half_life_ns: int = 0
    """0: books of before, which have no accounts."""
    periods_from_ns: int = 0
    """The first instant of a period of the decay, on the present clock."""
    prices: PricesRecord | None = None
    """None: those that hold without a file."""
    budgets: dict[BudgetId, BudgetRecord] = {}
    spent: dict[BudgetId, SpentRecord] = {}
    held: dict[LeaseId, HeldRecord] = {}
    """What costs something now, where there are budgets."""
    bursts: dict[TenantId, BurstRecord] = {}
    """The burst credit of tenants that have drawn on it."""
    declared: DeclaredRecord = DeclaredRecord()
    """What ``policy.toml`` said when it was applied last."""
    cool_until_ns: dict[TenantId, dict[TenantId, int]] = {}
    """Victim's tenant → beneficiary's tenant → until when the first may not preempt the second."""


class Held(msgspec.Struct):
    """What one tenant holds now, against its quota. A lease counts from its grant until it begins to end, a volume for
    as long as it is kept."""

    leases: int = 0
    gpus: int = 0
    vram_bytes: int = 0
    cores: int = 0
    memory_bytes: int = 0
    block_bytes: int = 0
    kept_bytes: int = 0
    """How much of that is kept in volumes that no lease has."""

    def keep(self, size: int) -> None:
        self.block_bytes += size
        self.kept_bytes += size

    def merge(self, other: Held, sign: int) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))

    def add(self, parts: tuple[Part, ...], sign: int) -> None:
        self.leases += sign
        for part in parts:
            match part.kind:
                case Kind.GPU:
                    self.gpus += sign
                    if part.exclusivity is Exclusivity.SHARED:  # whole devices are counted, not weighed
                        self.vram_bytes += sign * part.amount
                case Kind.CPU:
                    self.cores += sign * part.amount
                case Kind.MEMORY:
                    self.memory_bytes += sign * part.amount
                case Kind.BLOCK:
                    self.block_bytes += sign * part.amount


def is_yielding(lease: LeaseRecord) -> bool:
    """Whether it is not renewed any more, so that others have their turn."""
    return lease.fate is EndReason.FAIR_SHARE and lease.status in LIVE_STATES


class State:
    """The books with their indexes."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.leases: Final = books.leases
        self.nodes: Final = books.nodes
        self.resources: Final = books.resources
        self.tenants: Final = books.tenants
        self.volumes: Final = books.volumes
        self.rooms: dict[ResourceId, Room] = {r.id: Room.of(r) for r in books.resources.values()}
        self.rooms_by_node: dict[NodeId, list[Room]] = {}
        self.reserved_by: dict[ResourceId, ReservationId] = {}
        """Devices that are kept for a reservation now."""
        self.held: dict[TenantId, Held] = {}
        self.held_by_group: dict[GroupId, Held] = {}
        self._capacity: list[int] | None = None
        self._weights_differ: bool | None = None
        self._limits_time: bool | None = None
        self._has_floors: bool | None = None
        self._shares_at_rest: dict[TenantId, int] = {}
        self._rest_period = -1
        self.requests: dict[tuple[TenantId, RequestId], LeaseId] = {}
        self.queue: dict[Lane, dict[GroupId, dict[TenantId, list[Waiting]]]] = {lane: {} for lane in LANES}
        """Waiting leases, per tier, group and tenant in the order in which they go."""
        self.queued_count = 0
        self.waiting_wants: dict[tuple[Want, ...], int] = {}
        """How many waiting requests want what, but for those that are told apart by more (``is_particular``)."""
        self.waiting_particular = 0
        self.waiting_since: list[tuple[int, LeaseId]] = []
        """Heap of when requests were asked for. Entries of requests that do not wait any more are stale."""
        self.live_count = 0
        """Leases that are neither queued nor ended."""
        self.promises: dict[LeaseId, None] = {}
        """Queued leases for which victims are leaving, in the order of the promises."""
        self.yielding: dict[LeaseId, None] = {}
        """Leases that are not renewed any more, so that others have their turn."""
        self.on_node: dict[NodeId, dict[LeaseId, None]] = {node: {} for node in books.nodes}
        """Granted, live and ending leases of each node."""
        self.ended: deque[LeaseId] = deque()
        """Remembered ended leases, oldest end first."""
        self.capacity_version = 0
        """Rises whenever something may fit that did not fit before."""
        self.timers: list[tuple[int, LeaseId]] = []
        self.armed: dict[LeaseId, int] = {}
        self.saves: dict[LeaseId, int] = {}
        """How long the last save under a live lease took, as its agent said with its last confirmation. Told with the
        next one, it need not be in the journal."""
        self.volume_timers: list[tuple[int, str]] = []
        """When volumes are to be removed. Entries that the books have otherwise are stale."""
        self.rates = rates_of(books.prices)
        self.budgets_of: dict[str, list[BudgetRecord]] = {}
        """By account: of a tenant or a group."""
        self.held_on: dict[str, dict[LeaseId, HeldRecord]] = {}
        """What each account pays for."""
        self.budgets_changed: set[BudgetId] = set()
        """Since they were last settled: something began or ended that they pay for, or they are gone."""
        self.taken: dict[TenantId, list[LeaseId]] = {}
        """Leases that others took while their holders were at work, and leases of GPUs that their holders released, in
        the order in which they ended, until a request goes on with that work."""
        self.quota_default: Quota = NO_QUOTA
        """Of a tenant where its own quota says nothing: it comes with each start, and is not in the books."""
        self._rebuild()

    def waiting_of(self, tenant: TenantId) -> int:
        """How many requests of a tenant wait."""
        return sum(len(line) for line in self.lines_of(tenant))

    def waiting_of_group(self, group: GroupId) -> int:
        """How many requests of its tenants wait."""
        return sum(len(line) for groups in self.queue.values() for line in groups.get(group, {}).values())

    def lines_of(self, tenant: TenantId) -> Iterator[Sequence[Waiting]]:
        """The waiting requests of a tenant by lane, those that go first before the others."""
        group = self.group_of(tenant)
        for groups in self.queue.values():
            if line := groups.get(group, {}).get(tenant):
                yield line

    def group_of(self, tenant: TenantId) -> GroupId:
        known = self.tenants.get(tenant)
        return DEFAULT_GROUP if known is None or known.group is None else known.group

    def group(self, name: GroupId) -> GroupRecord:
        """What holds for a group; the default group is there without being made."""
        return self.books.groups.get(name) or (_DEFAULT if name == DEFAULT_GROUP else GroupRecord(id=name))

    def weight_of(self, tenant: TenantId) -> int:
        """Within its group."""
        known = self.tenants.get(tenant)
        return 1 if known is None else known.weight

    @property
    def weights_differ(self) -> bool:
        """Whether any group or tenant has another weight than 1."""
        if self._weights_differ is None:
            groups, tenants = self.books.groups.values(), self.tenants.values()
            self._weights_differ = any(one.weight != 1 for one in groups) or any(one.weight != 1 for one in tenants)
        return self._weights_differ

    @property
    def limits_time(self) -> bool:
        """Whether device time is limited for any tenant or group, so that time alone may allow what is waited for."""
        if self._limits_time is None:
            quotas = (*(one.quota for one in self.books.groups.values()), *(one.quota for one in self.tenants.values()))
            self._limits_time = any(quota.gpu_seconds is not None for quota in quotas)
        return self._limits_time or self.quota_default.gpu_seconds is not None

    @property
    def has_floors(self) -> bool:
        """Whether any group has a floor."""
        if self._has_floors is None:
            self._has_floors = any(group.floor for group in self.books.groups.values())
        return self._has_floors

    def tenants_changed(self) -> None:
        """A group or a tenant is there, is gone, or has another weight or other limits."""
        self._weights_differ = self._limits_time = self._has_floors = None
        self._shares_at_rest = {}

    def shares_at_rest(self, period: int) -> dict[TenantId, int]:
        """Shares of tenants that hold nothing, as far as they were asked for: such a share stays the same during a
        period of the decay. A share that is used is at hand for thousands of waiting requests."""
        if period != self._rest_period:
            self._rest_period, self._shares_at_rest = period, {}
        return self._shares_at_rest

    def reserved_group(self, resource: ResourceId) -> GroupId | None:
        """The group for which a reservation keeps the device; None if none does."""
        reservation = self.reserved_by.get(resource)
        return None if reservation is None else self.books.reservations[reservation].group

    def has_reserved(self, lease: LeaseRecord) -> GroupId | None:
        """The group for which a device of this lease is reserved; None if none is."""
        if not self.reserved_by:
            return None
        groups = (self.reserved_group(part.resource) for part in lease.parts)
        return next((group for group in groups if group is not None), None)

    @property
    def capacity(self) -> Sequence[int]:
        """What the nodes that answer have, by kind as in an account."""
        if self._capacity is None:
            self._capacity = [0 for _ in SHARED_KINDS]
            for resource in self.resources.values():
                device = resource.device
                if device.kind in SHARED_KINDS and not self.nodes[resource.node].lost:
                    amount = MILLIS_PER_DEVICE if device.kind is Kind.GPU else device.capacity
                    self._capacity[SHARED_KINDS.index(device.kind)] += amount
        return self._capacity

    @property
    def decay(self) -> Decay:
        return Decay(self.books.half_life_ns, self.books.periods_from_ns)

    def quota_of(self, tenant: TenantId) -> Quota:
        """What holds for a tenant: its own limits, and the office's where it has none. The owner has but its own."""
        own, default = self.tenants[tenant].quota, self.quota_default
        if default == NO_QUOTA or tenant == LOCAL_TENANT:
            return own
        if own == NO_QUOTA:
            return default
        given = {name: value for name in Quota.__struct_fields__ if (value := getattr(own, name)) is not None}
        return msgspec.structs.replace(default, **given)

    # ---- snapshot ----

    @classmethod
    def fresh(cls, policy: Policy) -> State:
        """Nothing has happened yet."""
        return cls(
            Books(
                usage_window_ns=policy.usage_window_ns,
                cool_down_ns=policy.cool_down_ns,
                half_life_ns=policy.half_life_ns,
            )
        )

    def snapshot(self) -> bytes:
        return msgspec.json.encode(self.books)

    @classmethod
    def restore(cls, data: bytes) -> State:
        return cls(decode_as(data, Books))

    def _open_accounts(self) -> None:
        """Books of before: what was used is what the meters of device time still know, and what is held."""
        books = self.books
        books.half_life_ns = HALF_LIFE_NS
        changes: list[tuple[int, TenantId, list[int]]] = []
        for tenant, meter in books.usage.items():
            for at_ns, before, level in zip(meter.at_ns, [0, *meter.level], meter.level, strict=False):
                changes.append((at_ns, tenant, [level - before, 0, 0]))
        changes += [
            (lease.granted_at_ns, lease.tenant, [0, *amounts_of(lease.parts)[1:]])
            for lease in self.leases.values()
            if lease.status in HOLDING_STATES and lease.granted_at_ns is not None
        ]
        for at_ns, tenant, by in sorted(changes):
            if any(by):
                books.accounts.setdefault(tenant, Account()).change(by, at_ns, self.decay)
                books.group_accounts.setdefault(DEFAULT_GROUP, Account()).change(by, at_ns, self.decay)

    def _rebuild(self) -> None:
        if not self.books.half_life_ns:
            self._open_accounts()
        for node in self.nodes.values():
            self.index_node(node)
        self.index_reserved()
        self.index_budgets()
        self.budgets_changed.update(self.books.budgets)
        for lease in self.leases.values():
            self.requests[lease.tenant, lease.request_id] = lease.id
            if lease.status is LeaseStatus.QUEUED:
                self.enqueue(lease)
            elif lease.status is not LeaseStatus.ENDED:
                self.live_count += 1
                self.index_granted(lease)
                self.index_yielding(lease)
            if lease.promise:
                self.promises[lease.id] = None
            self.arm(lease)
        for volume in self.volumes.values():
            if volume.state in KEPT_STATES:
                self.count_kept(volume, +1)
            self.arm_volume(volume)
        ended = [lease for lease in self.leases.values() if lease.status is LeaseStatus.ENDED]
        self.ended.extend(lease.id for lease in sorted(ended, key=_end_order))
        went_on = {lease.goes_on for lease in self.leases.values()}
        for lease in sorted((lease for lease in self.leases.values() if lease.end is not None), key=_end_order):
            if lease.id not in went_on:
                self.note_taken(lease)

    # ---- reading ----

    def held_by(self, tenant: TenantId) -> Held:
        return self.held.get(tenant) or Held()

    def used_milli_ns(self, tenant: TenantId, now_ns: int) -> int:
        """Device-thousandths × nanoseconds within the rolling window."""
        meter = self.books.usage.get(tenant)
        return 0 if meter is None else meter.used(now_ns, self.books.usage_window_ns)

    def held_millis(self, tenant: TenantId) -> int:
        meter = self.books.usage.get(tenant)
        return 0 if meter is None else meter.held_millis

    def next_epoch(self) -> Epoch:
        """The epoch of the next grant. It is used up by the event that carries it."""
        return Epoch(self.books.incarnation, self.books.next_n)

    def queue_listing(self, tenant: TenantId | None = None) -> Iterator[LeaseRecord]:
        """All waiting leases, or those of one tenant, in no particular order."""
        for groups in self.queue.values():
            for tenants in groups.values():
                for entries in tenants.values() if tenant is None else (tenants.get(tenant, ()),):
                    for *_, lease in entries:
                        yield self.leases[lease]

    def first_asked_ns(self) -> int | None:
        """When the request that has waited longest was asked for."""
        while self.waiting_since:
            lease = self.leases.get(self.waiting_since[0][1])
            if lease is not None and lease.status is LeaseStatus.QUEUED:
                return self.waiting_since[0][0]
            heapq.heappop(self.waiting_since)
        return None

    def slices_of(self, lease: LeaseRecord) -> Iterator[SliceRecord]:
        """What the lease's present epoch still takes."""
        key = str(lease.epoch)
        for part in lease.parts:
            piece = self.resources[part.resource].slices.get(key)
            if piece is not None:
                yield piece

    def volume_of(self, lease: LeaseRecord) -> VolumeRecord | None:
        """The volume of its name, whichever lease has that now; None for a lease without a name or blocks."""
        if lease.name is None or not any(want.kind is Kind.BLOCK for want in lease.wants):
            return None
        return self.volumes.get(volume_key(lease.tenant, lease.name))

    def note_taken(self, lease: LeaseRecord) -> None:
        """It ends. If its holder was at work and others took it, the holder will go on; and if it was released, its
        holder may."""
        if lease.end is None or lease.claimed_at_ns is None or lease.parks is not None:
            return
        if lease.end.reason is EndReason.RELEASED:
            goes_on = lease.replaced_by is None and any(part.kind is Kind.GPU for part in lease.parts)
        else:
            goes_on = lease.end.reason in TAKEN_REASONS and lease.idle_since_ns is None
        if goes_on:
            self.taken.setdefault(lease.tenant, []).append(lease.id)

    def taken_since(self, tenant: TenantId, at_ns: int) -> Iterator[LeaseRecord]:
        """Of those, the tenant's that ended at this instant or later, the last ``TAKEN_LOOKED_AT``."""
        found = self.taken.get(tenant, [])
        first = bisect_left(found, at_ns, key=lambda lease: _end_order(self.leases[lease]))
        return map(self.leases.__getitem__, found[max(first, len(found) - TAKEN_LOOKED_AT) :])

    def no_longer_taken(self, tenant: TenantId, lease: LeaseId) -> None:
        """A request goes on with its work, or it is forgotten."""
        found = self.taken.get(tenant)
        if found is not None and lease in found:
            found.remove(lease)
            if not found:
                del self.taken[tenant]

    def is_cooling(self, victim: TenantId, beneficiary: TenantId, now_ns: int) -> bool:
        """Whether ``victim`` lost a lease to ``beneficiary`` so recently that it may not take one back."""
        return self.books.cool_until_ns.get(victim, {}).get(beneficiary, 0) > now_ns

    def due_at(self, lease: LeaseRecord) -> int | None:
        """When time alone will change this lease."""
        match lease.status:
            case LeaseStatus.QUEUED:
                if lease.priority_at_ns is None or lease.has_priority:
                    return lease.wait_until_ns
                return min(lease.priority_at_ns, lease.wait_until_ns or lease.priority_at_ns)
            case LeaseStatus.GRANTED:
                return lease.claim_by_ns
            case LeaseStatus.ACTIVE:
                return lease.deadline_ns if lease.parks is None else self._parking_due_at(lease)
            case LeaseStatus.NOTICED:
                assert lease.notice is not None and lease.deadline_ns is not None
                return min(lease.notice.take_at_ns, lease.deadline_ns)
            case _:
                return None

    def _parking_due_at(self, lease: LeaseRecord) -> int | None:
        """Of a parking lease. While a request to go on with it waits it is kept, which has to be in time; once that is
        claimed, only the agent knows which was first, the deadline or the handing over, and says so."""
        assert lease.parks is not None and lease.deadline_ns is not None
        by = self.leases.get(lease.parks.resumed_by) if lease.parks.resumed_by is not None else None
        if by is None or by.status is LeaseStatus.ENDED:
            return lease.deadline_ns
        if by.status in (LeaseStatus.QUEUED, LeaseStatus.GRANTED):
            return lease.deadline_ns - lease.ttl_ns // 4
        return None

    def next_timer_ns(self) -> int | None:
        """When time alone will change a lease. Timers that are early by now are set anew on the way: waking for each of
        them would cost a turn of the office for every grant and every renewal."""
        while self.timers:
            at, lease_id = self.timers[0]
            lease = self.leases.get(lease_id) if self.armed.get(lease_id) == at else None
            due = None if lease is None else self.due_at(lease)
            if due is not None and due <= at:
                return at
            heapq.heappop(self.timers)
            if self.armed.get(lease_id) == at:
                del self.armed[lease_id]
            if lease is not None:
                self.arm(lease)
        return None

    def pop_due(self, now_ns: int) -> LeaseRecord | None:
        """A lease whose time has come, or None. Its timer is disarmed: the caller must apply an event to it."""
        while self.timers and self.timers[0][0] <= now_ns:
            at, lease_id = heapq.heappop(self.timers)
            if self.armed.get(lease_id) != at:
                continue
            del self.armed[lease_id]
            lease = self.leases.get(lease_id)
            due = None if lease is None else self.due_at(lease)
            if lease is not None and due is not None:
                if due <= now_ns:
                    return lease
                self.arm(lease)
        return None

    def next_volume_ns(self) -> int | None:
        """When the next volume is to be removed."""
        while self.volume_timers:
            at, key = self.volume_timers[0]
            volume = self.volumes.get(key)
            if volume is not None and volume.until_ns == at:
                return at
            heapq.heappop(self.volume_timers)
        return None

    # ---- changing: for the fold alone ----

    def index_budgets(self) -> None:
        """Which budgets an account has, and what is held on it."""
        self.budgets_of, self.held_on = {}, {}
        for budget in self.books.budgets.values():
            self.budgets_of.setdefault(account_of(budget.tenant, budget.group), []).append(budget)
        for name, held in self.books.held.items():
            for whose in accounts_of(held):
                self.held_on.setdefault(whose, {})[name] = held

    def tear_down(self, lease: LeaseRecord, now: Now) -> None:
        """The holder's time is over: its slices go to teardown, quota and meter stop."""
        for piece in self.slices_of(lease):
            self.move_slice(self.resources[piece.resource], piece, SliceEvent.TEARDOWN)
        self.hold(lease, -1)
        self.meter(lease, -1, now)
        if self.queued_count:  # a quota may have been all they lacked, or notice for one device more
            self.capacity_version += 1

    def count_kept(self, volume: VolumeRecord, sign: int) -> None:
        """It is kept and counts in its tenant's quota, or no longer."""
        self.held.setdefault(volume.tenant, Held()).keep(sign * volume.size)
        self.held_by_group.setdefault(self.group_of(volume.tenant), Held()).keep(sign * volume.size)

    def arm_volume(self, volume: VolumeRecord) -> None:
        if volume.until_ns is not None:
            heapq.heappush(self.volume_timers, (volume.until_ns, volume.key))

    def move_slice(self, resource: ResourceRecord, piece: SliceRecord, happened: SliceEvent) -> None:
        room = self.rooms[resource.id]
        room.remove(piece)
        piece.state = next_slice(piece.state, happened, resource.id)
        room.put(piece)

    def free_slice(self, resource: ResourceRecord, piece: SliceRecord, happened: SliceEvent) -> None:
        next_slice(piece.state, happened, resource.id)  # raises unless it may become free
        del resource.slices[str(piece.epoch)]
        resource.used -= piece.part.amount
        self.rooms[resource.id].remove(piece)
        self.capacity_version += 1

    def index_yielding(self, lease: LeaseRecord) -> None:
        if is_yielding(lease):
            self.yielding[lease.id] = None
        else:
            self.yielding.pop(lease.id, None)

    def drop_promise(self, lease: LeaseRecord) -> None:
        if self.promises.pop(lease.id, False) is None:
            lease.promise, lease.promise_node, lease.victims = (), None, ()
            self.capacity_version += 1

    def note(self, lease: LeaseRecord, busy_ns: int, idle: bool, now: Now) -> None:
        lease.busy_ns += busy_ns
        if not idle:
            lease.idle_since_ns = None
        elif lease.idle_since_ns is None:
            lease.idle_since_ns = now.ns

    def meter(self, lease: LeaseRecord, sign: int, now: Now) -> None:
        amounts, books = amounts_of(lease.parts), self.books
        if not any(amounts):
            return
        by, tenant, group = [sign * amount for amount in amounts], lease.tenant, self.group_of(lease.tenant)
        if by[0]:
            if tenant not in books.usage:
                books.usage[tenant] = UsageMeter()
            books.usage[tenant].change(by[0], now.ns, books.usage_window_ns)
        if tenant not in books.accounts:
            books.accounts[tenant] = Account()
        if group not in books.group_accounts:
            books.group_accounts[group] = Account()
        decay = self.decay
        books.accounts[tenant].change(by, now.ns, decay)
        self._shares_at_rest.pop(tenant, None)
        books.group_accounts[group].change(by, now.ns, decay)

    def move_tenant(self, tenant: TenantId, into: GroupId, now: Now) -> None:
        """What it holds and what waits goes on in another group; what it has used stays with the old one."""
        old = self.group_of(tenant)
        held = self.held.get(tenant)
        if held is not None:
            self.held_by_group.setdefault(old, Held()).merge(held, -1)
            self.held_by_group.setdefault(into, Held()).merge(held, +1)
        account = self.books.accounts.get(tenant)
        if account is not None and any(account.level):
            decay, accounts = self.decay, self.books.group_accounts
            accounts.setdefault(old, Account()).change([-level for level in account.level], now.ns, decay)
            accounts.setdefault(into, Account()).change(account.level, now.ns, decay)
        for groups in self.queue.values():
            line = groups.get(old, {}).pop(tenant, None)
            if line is not None:
                if not groups[old]:
                    del groups[old]
                groups.setdefault(into, {})[tenant] = line

    def enqueue(self, lease: LeaseRecord) -> None:
        group = self.queue[lane_of(lease)].setdefault(self.group_of(lease.tenant), {})
        insort(group.setdefault(lease.tenant, []), waiting(lease))
        self.queued_count += 1
        if is_particular(lease):
            self.waiting_particular += 1
        else:
            self.waiting_wants[lease.wants] = self.waiting_wants.get(lease.wants, 0) + 1
        heapq.heappush(self.waiting_since, (lease.asked_at_ns, lease.id))
        if len(self.waiting_since) > 2 * self.queued_count + STALE_ENTRIES_MAX:  # behind one that waits for long
            self.index_waiting_since()

    def dequeue(self, lease: LeaseRecord) -> None:
        groups, name = self.queue[lane_of(lease)], self.group_of(lease.tenant)
        line = groups[name][lease.tenant]
        del line[bisect_left(line, waiting(lease))]
        if not line:
            del groups[name][lease.tenant]
            if not groups[name]:
                del groups[name]
        self.queued_count -= 1
        if is_particular(lease):
            self.waiting_particular -= 1
        elif self.waiting_wants[lease.wants] == 1:
            del self.waiting_wants[lease.wants]
        else:
            self.waiting_wants[lease.wants] -= 1

    def index_waiting_since(self) -> None:
        """Make the heap anew: its entries are stale, or the clock is another one."""
        self.waiting_since = [(lease.asked_at_ns, lease.id) for lease in self.queue_listing()]
        heapq.heapify(self.waiting_since)

    def index_node(self, node: NodeRecord) -> None:
        """Rooms in service: what placement may look at."""
        self.on_node.setdefault(node.id, {})
        in_service = [self.rooms[r] for r in node.resources if self.resources[r].state is SliceState.FREE]
        if in_service and not node.lost:
            self.rooms_by_node[node.id] = in_service
        else:
            self.rooms_by_node.pop(node.id, None)
        self._capacity, self._shares_at_rest = None, {}

    def index_reserved(self) -> None:
        self.reserved_by = {
            resource: name for name, reserved in self.books.reserved.items() for resource in reserved.resources
        }

    def index_granted(self, lease: LeaseRecord) -> None:
        self.on_node[self.node_of(lease)][lease.id] = None
        if lease.status is not LeaseStatus.ENDING:
            self.hold(lease, +1)

    def hold(self, lease: LeaseRecord, sign: int) -> None:
        """It counts against the quotas of its tenant and group from now on, or no longer."""
        tenant, group = lease.tenant, self.group_of(lease.tenant)
        if tenant not in self.held:
            self.held[tenant] = Held()
        if group not in self.held_by_group:
            self.held_by_group[group] = Held()
        self.held[tenant].add(lease.parts, sign)
        self.held_by_group[group].add(lease.parts, sign)

    def node_of(self, lease: LeaseRecord) -> NodeId:
        assert lease.node is not None, f"{lease.id} is {lease.status} but on no node"
        return lease.node

    def arm(self, lease: LeaseRecord) -> None:
        """Keep one timer per lease that is not later than its due time; a stale early one re-arms itself."""
        due = self.due_at(lease)
        armed = self.armed.get(lease.id)
        if due is not None and (armed is None or due < armed):
            self.armed[lease.id] = due
            heapq.heappush(self.timers, (due, lease.id))
            if len(self.timers) > 2 * len(self.armed) + STALE_ENTRIES_MAX:
                self.timers = [(at, lease_id) for lease_id, at in self.armed.items()]
                heapq.heapify(self.timers)


def lane_of(lease: LeaseRecord) -> Lane:
    """The part of the queue in which it waits."""
    return lease.tier, lease.has_priority


def is_particular(lease: LeaseRecord) -> bool:
    """Whether more than its wants decides where it fits: labels of nodes, a volume, what it resumes or replaces."""
    is_volume = lease.name is not None and any(want.kind is Kind.BLOCK for want in lease.wants)
    return bool(lease.selector) or is_volume or lease.resume is not None or lease.replaces is not None


def waiting(lease: LeaseRecord) -> Waiting:
    """Where it stands among the requests of its tenant: first those whose holder has had least, then by arrival."""
    step = bisect_right(ATTAINED_STEPS_NS, lease.attained_ns)
    return step, lease.arrival, lease.id


def _end_order(lease: LeaseRecord) -> int:
    return lease.end.at_ns if lease.end else 0
