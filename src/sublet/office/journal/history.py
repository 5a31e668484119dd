"""Folds audited events into usages, for bills only.

The audit chain is the one source of truth for money, so every link is checked while it is read: a chain that was
touched gives no bill.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from sublet.errors import JournalError
from sublet.lease.value import rfc3339
from sublet.office.journal import audit
from sublet.office.ledger import events as ev
from sublet.office.ledger.bills import Bill, Charge, Holding, Line, Usage
from sublet.office.ledger.fairness import DEFAULT_GROUP
from sublet.office.ledger.fold_spending import volume_name
from sublet.office.ledger.records import EndRecord
from sublet.values import NS_PER_S, GroupId, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.decoders import decoder
from sublet.wire.http import BillLine
from sublet.wire.orders import Metered, Part, Saved

_AuditedEvent = (
    ev.NodeJoined
    | ev.TenantSet
    | ev.Queued
    | ev.Granted
    | ev.Claimed
    | ev.Ungranted
    | ev.Ending
    | ev.Ended
    | ev.Metered
    | ev.Saved
    | ev.Rebased
    | ev.VolumeTaken
    | ev.VolumeKept
    | ev.VolumeFound
    | ev.VolumeLost
    | ev.VolumeRemoved
)
_KINDS: Final = frozenset(str(fact.__struct_config__.tag) for fact in _AuditedEvent.__args__)
_decode: Final = decoder(_AuditedEvent).decode


class _Lease:
    """One lease on its way through the past; or a volume, for as long as it takes room without one."""

    __slots__ = (
        "busy_ns",
        "charges",
        "done",
        "end",
        "group",
        "is_volume",
        "labels",
        "metered",
        "offered",
        "pays_priority",
        "saved",
        "start_ns",
        "tenant",
        "waited_ns",
        "wall_ns",
        "way",
    )

    def __init__(
        self,
        tenant: TenantId,
        group: GroupId,
        labels: Mapping[str, str],
        start_ns: int,
        *,
        is_volume: bool = False,
        pays_priority: bool = False,
    ) -> None:
        self.tenant = tenant
        self.group = group
        self.labels = labels
        self.is_volume = is_volume
        self.pays_priority = pays_priority
        self.saved: Saved | None = None
        self.done: tuple[Holding, ...] = ()
        self.charges: tuple[Charge, ...] | None = None
        """What it holds now; None between grants."""
        self.offered: tuple[Part, ...] = ()
        """An offer that is open. It costs nothing until it is accepted, which is when it is claimed."""
        self.start_ns = start_ns
        """When what it holds was granted; before the first grant, when it was asked for."""
        self.waited_ns: int | None = None
        """Until the first grant."""
        self.wall_ns = 0
        self.busy_ns = 0
        self.end: str | None = None
        self.way = ""
        self.metered: Metered | None = None

    def holding(self, stop_ns: int) -> tuple[Holding, ...]:
        if self.charges is None:
            return ()
        stop_ns = max(stop_ns, self.start_ns)
        return (Holding(start_ns=self.start_ns, stop_ns=stop_ns, wall_ns=self.wall_ns, charges=self.charges),)


class AuditHistory:
    """Fold of the audited events, two ways at once.

    By lease, each stretch from a grant to its end is kept as an interval. By device, no interval is ever formed: each
    grant subtracts its instant times its units, each end adds it, and what is held now counts as if it ended now. The
    two agree only if nothing was counted twice, dropped or paired wrongly.
    """

    def __init__(self) -> None:
        self.seq = 0
        """The last record that was taken in."""
        self._walk = audit.Walk()
        self._leases: dict[LeaseId, _Lease] = {}
        self._in_other_groups: list[tuple[LeaseId, _Lease]] = []
        """Volumes, as they were kept while their tenant was in another group."""
        self._open: set[LeaseId] = set()
        """That wait or hold something."""
        self._groups: dict[TenantId, GroupId] = {}
        self._models: dict[ResourceId, str] = {}
        self._edges: defaultdict[tuple[ResourceId, Kind], int] = defaultdict(int)
        self._levels: defaultdict[tuple[ResourceId, Kind], int] = defaultdict(int)

    def read(self, records: Iterable[audit.AuditRecord]) -> AuditHistory:
        """Take in the chain from its first record, or from the one after ``seq``."""
        for record in records:
            problem = self._walk.step(record)
            if problem is not None:
                raise JournalError(
                    f"no bill can be made, since the audit chain does not hold ({problem})",
                    do="`sublet audit verify` says more; restore a backup.",
                )
            self.seq = record.seq
            if record.kind in _KINDS:
                self._apply(_decode(record.body), record.ns, record.wall_ns)
        return self

    def _apply(self, event: _AuditedEvent, ns: int, wall_ns: int) -> None:
        match event:
            case ev.NodeJoined():
                self._models.update((device.id, device.model) for device in event.inventory.devices)
            case ev.TenantSet():
                self._groups[event.tenant.id] = event.tenant.group or DEFAULT_GROUP
            case ev.Queued():
                request, tenant = event.lease, event.lease.tenant
                self._leases[request.id] = _Lease(
                    tenant, self._group(tenant), request.labels, ns, pays_priority=request.pays_priority
                )
                self._open.add(request.id)
            case ev.Granted(offered=True):
                self._leases[event.lease].offered = event.parts
            case ev.Granted():
                self._start(event.lease, event.parts, ns, wall_ns)
            case ev.Claimed():
                if offered := self._leases[event.lease].offered:
                    self._leases[event.lease].offered = ()
                    self._start(event.lease, offered, ns, wall_ns)
            case ev.Ungranted():
                self._leases[event.lease].offered = ()
            case ev.Ending():
                # The agent ends a lease by its own clock, perhaps while the office is down; what the end says counts,
                # but never more than until it was written.
                self._stop(event.lease, min(event.end.at_ns, ns))
                self._leases[event.lease].busy_ns = event.busy_ns
                self._ends(event.lease, event.end)
            case ev.Ended():
                self._stop(event.lease, min(event.end.at_ns, ns))
                self._ends(event.lease, event.end)
            case ev.Metered():
                self._leases[event.lease].metered = event.counts
            case ev.Saved():
                if event.saved.count:  # else it was under the parking lease, on whose bill it is
                    self._leases[event.lease].saved = event.saved
            case ev.VolumeKept() | ev.VolumeFound():
                self._keeps(event, ns, wall_ns)
            case ev.VolumeTaken() | ev.VolumeLost() | ev.VolumeRemoved():
                self._stop(volume_name(event.tenant, event.name), ns)
            case ev.Rebased():
                for lease_id in self._open:
                    self._leases[lease_id].start_ns += event.shift_ns
                for place, level in self._levels.items():
                    self._edges[place] -= level * event.shift_ns

    def _keeps(self, event: ev.VolumeKept | ev.VolumeFound, ns: int, wall_ns: int) -> None:
        """Its tenant pays for it from here on, as it did for the lease before. Kept again, it is kept still."""
        key, group = volume_name(event.tenant, event.name), self._group(event.tenant)
        if isinstance(event, ev.VolumeFound):
            self._stop(key, ns)
        volume = self._leases.get(key)
        if volume is None or (volume.charges is None and volume.group != group):
            if volume is not None:
                self._in_other_groups.append((key, volume))
            volume = self._leases[key] = _Lease(event.tenant, group, {}, ns, is_volume=True)
        if volume.charges is None:
            self._start(key, (Part(resource=event.resource, kind=Kind.BLOCK, amount=event.size),), ns, wall_ns)

    def _start(self, lease_id: LeaseId, parts: tuple[Part, ...], ns: int, wall_ns: int) -> None:
        lease = self._leases[lease_id]
        lease.charges = tuple(
            Charge(
                resource=part.resource,
                kind=part.kind,
                units=part.millis if part.kind is Kind.GPU else part.amount,
                model=self._models.get(part.resource, ""),
                has_priority=lease.pays_priority and part.kind is Kind.GPU,
                vram=part.amount if part.kind is Kind.GPU else 0,
            )
            for part in parts
        )
        if lease.waited_ns is None:
            lease.waited_ns = max(0, ns - lease.start_ns)
        lease.start_ns, lease.wall_ns = ns, wall_ns
        self._open.add(lease_id)
        for charge in lease.charges:
            self._edges[charge.resource, charge.kind] -= charge.units * ns
            self._levels[charge.resource, charge.kind] += charge.units

    def _stop(self, lease_id: LeaseId, ns: int) -> None:
        lease = self._leases.get(lease_id)  # a volume that was never kept has none
        if lease is None or lease.charges is None:
            self._open.discard(lease_id)
            return
        stop_ns = max(ns, lease.start_ns)
        lease.done += lease.holding(stop_ns)
        for charge in lease.charges:
            self._edges[charge.resource, charge.kind] += charge.units * stop_ns
            self._levels[charge.resource, charge.kind] -= charge.units
        lease.charges = None
        self._open.discard(lease_id)

    def _ends(self, lease_id: LeaseId, end: EndRecord) -> None:
        """The last word counts: what was to be parked may not have been."""
        lease = self._leases[lease_id]
        lease.end, lease.way = end.reason, "" if end.way is None else end.way.value

    def usages(self, now_ns: int, busy_ns: Mapping[LeaseId, int] | None = None) -> list[Usage]:
        """Every lease that ever held something, the live ones up to now.

        ``now_ns`` is no earlier than the last record. ``busy_ns`` is the busy time of live leases, which is not audited
        before their end.
        """
        busy = busy_ns or {}
        return [
            Usage(
                lease=lease_id,
                tenant=lease.tenant,
                labels=lease.labels,
                holdings=lease.done + lease.holding(now_ns),
                busy_ns=lease.busy_ns if lease.end is not None else busy.get(lease_id, 0),
                counts=lease.metered,
                end=lease.end,
                live=lease.charges is not None,
                way=lease.way,
                is_volume=lease.is_volume,
                saved_bytes=0 if lease.saved is None else lease.saved.size,
                saves=0 if lease.saved is None else lease.saved.count,
                group=lease.group,
                waited_ns=lease.waited_ns or 0,
            )
            for lease_id, lease in (*self._leases.items(), *self._in_other_groups)
            if lease.done or lease.charges is not None
        ]

    def _group(self, tenant: TenantId) -> GroupId:
        return self._groups.get(tenant, DEFAULT_GROUP)

    def devices(self, now_ns: int) -> dict[tuple[ResourceId, Kind], int]:
        """Units times nanoseconds that were held of each resource, up to now."""
        return {place: edge + self._levels[place] * now_ns for place, edge in self._edges.items()}


def wire_lines(bill: Bill) -> list[BillLine]:
    """The bill as the control API gives it: floats, for showing. The CSV has every digit."""
    return [_wire_line(line, bill.currency) for line in bill.lines]


def _wire_line(line: Line, currency: str) -> BillLine:
    return BillLine(
        key=line.key,
        tenant=line.tenant,
        leases=line.leases,
        held_seconds=line.held_ns / NS_PER_S,
        busy_seconds=line.busy_ns / NS_PER_S,
        gpu_seconds=line.gpu_milli_ns / (1000 * NS_PER_S),
        core_seconds=line.core_ns / NS_PER_S,
        memory_byte_seconds=line.memory_byte_ns / NS_PER_S,
        block_byte_seconds=line.block_byte_ns / NS_PER_S,
        vram_byte_seconds=line.vram_byte_seconds,
        vram_leased_byte_seconds=line.vram_leased_byte_ns / NS_PER_S,
        launches=line.known_launches,
        launch_errors=line.failures,
        bytes_moved=line.bytes_moved,
        bytes_saved=line.bytes_saved,
        saves=line.saves,
        fuel=line.fuel,
        period=line.period,
        waited_seconds=line.waited_ns / NS_PER_S,
        ended=line.ended,
        uncounted=line.uncounted,
        cost=float(line.cost),
        priority_cost=float(line.priority_cost),
        currency=currency,
        end=line.end,
        ended_at=None if line.ended_wall_ns is None else rfc3339(line.ended_wall_ns),
        live=line.live,
        way=line.way,
    )
