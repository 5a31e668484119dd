"""Builds wire messages from the ledger's records. Pure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from sublet.lease.states import LeaseStatus, SliceState
from sublet.office.journal.audit import AuditRecord
from sublet.office.ledger.answers import Offer, Place, Refusal
from sublet.office.ledger.budgets import money
from sublet.office.ledger.burst_credit import remaining_seconds
from sublet.office.ledger.explain import Explanation
from sublet.office.ledger.fairness import Account, share_of_everything
from sublet.office.ledger.records import (
    EndRecord,
    GroupRecord,
    LeaseRecord,
    NodeRecord,
    Now,
    Quota,
    ResourceRecord,
    TenantRecord,
    VolumeRecord,
)
from sublet.office.ledger.state import State
from sublet.office.ledger.volumes import holder_of
from sublet.values import MILLIS_PER_DEVICE, NS_PER_S, LeaseId, ResourceId, TenantId
from sublet.wire.decoders import decode_as
from sublet.wire.http import (
    AheadView,
    AuditEntry,
    DeviceView,
    EndView,
    ExplainAnswer,
    FenceView,
    GroupView,
    LeaseView,
    NodeView,
    NoticeView,
    OfferAnswer,
    ParksView,
    PartView,
    PlaceAnswer,
    QuotaView,
    ReasonView,
    RefusalAnswer,
    RenewAnswer,
    ShareView,
    TenantView,
    VolumeView,
    WantView,
)

LISTED_MAX: Final = 100
"""Leases and tenants that an explanation names of each kind."""


def seconds(ns: int) -> float:
    """Seconds of nanoseconds, to the microsecond: more digits would only be noise on the wire."""
    return round(ns / NS_PER_S, 6)


def rfc3339(wall_ns: int) -> str:
    """UTC, to the millisecond."""
    second, ns = divmod(wall_ns, NS_PER_S)
    return f"{_second(second)}.{ns // 1_000_000:03}Z"


@functools.lru_cache(maxsize=1024)
def _second(second: int) -> str:
    """Formatting a date costs more than all the rest of a view, and the same few seconds are asked for all the time."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _wall_of(instant_ns: int, now: Now) -> str:
    """An instant as people see it; it moves if the wall clock does."""
    return rfc3339(now.wall_ns + instant_ns - now.ns)


def _end_view(lease: LeaseRecord, end: EndRecord) -> EndView:
    saved_wall_ns = lease.saved_wall_ns
    way = end.reported_way(saved_wall_ns)
    return EndView(
        reason=end.reason.value,
        at=rfc3339(end.wall_ns),
        detail=end.detail,
        way="" if way is None else way.value,
        parked="" if end.resume is None else end.resume.hint,
        resume_hint="" if end.resume is None else end.resume.advice,
        saved_at=None if saved_wall_ns is None else rfc3339(saved_wall_ns),
        saved_version=lease.saved_version,
        saved_volume=lease.saved_volume,
    )


def lease_view(lease: LeaseRecord, now: Now, resources: Mapping[ResourceId, ResourceRecord]) -> LeaseView:
    """A lease as its holder, or the operator, sees it."""
    held = lease.deadline_ns is not None and lease.status in (LeaseStatus.ACTIVE, LeaseStatus.NOTICED)
    deadline_ns = lease.deadline_ns if held else None
    claim_by_ns = lease.claim_by_ns if lease.status is LeaseStatus.GRANTED else None
    notice = lease.notice if lease.status is LeaseStatus.NOTICED else None
    return LeaseView(
        id=lease.id,
        tenant=lease.tenant,
        status=lease.status.value,
        name=lease.name,
        labels=lease.labels,
        tier=lease.tier.value,
        renew=lease.renew.value,
        ttl=seconds(lease.ttl_ns),
        wants=[
            WantView(
                kind=want.kind.value,
                amount=want.amount,
                count=want.count,
                exclusivity=None if want.exclusivity is None else want.exclusivity.value,
                model=want.model,
                least=want.least,
            )
            for want in lease.full_wants or lease.wants
        ],
        epoch=lease.epoch,
        node=lease.node,
        parts=[
            PartView(
                resource=part.resource,
                kind=part.kind.value,
                amount=part.amount,
                model=resources[part.resource].device.model,
                host=resources[part.resource].device.host,
                exclusivity=None if part.exclusivity is None else part.exclusivity.value,
            )
            for part in lease.parts
        ],
        asked_at=rfc3339(lease.asked_wall_ns),
        granted_at=None if lease.granted_at_ns is None else _wall_of(lease.granted_at_ns, now),
        expires_at=None if deadline_ns is None else _wall_of(deadline_ns, now),
        deadline=None if deadline_ns is None else seconds(deadline_ns),
        remaining=None if deadline_ns is None else max(0.0, seconds(deadline_ns - now.ns)),
        claim_within=None if claim_by_ns is None else max(0.0, seconds(claim_by_ns - now.ns)),
        idle=lease.idle_since_ns is not None,
        busy=seconds(lease.busy_ns),
        renewals=lease.renewals,
        notice=None
        if notice is None
        else NoticeView(
            reason=notice.reason.value,
            in_seconds=max(0.0, seconds(notice.take_at_ns - now.ns)),
            at=_wall_of(notice.take_at_ns, now),
            detail=notice.detail,
        ),
        end=None if lease.end is None else _end_view(lease, lease.end),
        holder=lease.holder,
        bound_to=None if lease.process is None else lease.process.pid,
        peer=lease.peer,
        parks=None
        if (parks := lease.parks) is None
        else ParksView(of=parks.of, holds=parks.holds, resumed_by=parks.resumed_by),
        resume=None if lease.resume is None else lease.resume.hint,
        pays_priority=lease.pays_priority,
    )


def place_answer(place: Place, view: LeaseView) -> PlaceAnswer:
    return PlaceAnswer(
        lease=view,
        position=place.position,
        reason=place.reason,
        estimate=None if place.estimate_ns is None else seconds(place.estimate_ns),
    )


def explain_answer(found: Explanation, state: State, now: Now, caller: TenantId | None) -> ExplainAnswer:
    """``caller``: the tenant that asks, which learns of no other; None for an operator."""
    lease = found.lease

    def shown(leases: Sequence[LeaseRecord]) -> list[str]:
        return [str(one.id) for one in leases if caller in (None, one.tenant)][:LISTED_MAX]

    tenant, group = state.tenants.get(lease.tenant), state.group(state.group_of(lease.tenant))
    return ExplainAnswer(
        lease=lease.id,
        tenant=lease.tenant,
        status=lease.status.value,
        tier=lease.tier.value,
        summary=found.summary,
        position=found.position,
        estimate=None if found.estimate_ns is None else seconds(found.estimate_ns),
        ahead=[
            AheadView(
                because=ahead.because.value,
                requests=len(ahead.requests),
                leases=shown(ahead.requests),
                tenants=[] if caller else sorted({str(one.tenant) for one in ahead.requests})[:LISTED_MAX],
            )
            for ahead in found.ahead
        ],
        reasons=[
            ReasonView(
                kind=reason.kind.value,
                text=reason.text,
                in_seconds=None if reason.at_ns is None else max(0.0, seconds(reason.at_ns - now.ns)),
                leases=shown(reason.leases),
            )
            for reason in found.reasons
        ],
        share=ShareView(
            group=group.id,
            group_weight=group.weight,
            group_share=_share(state.books.group_accounts.get(group.id), state, now.ns),
            weight=1 if tenant is None else tenant.weight,
            share=_share(state.books.accounts.get(lease.tenant), state, now.ns),
        ),
        advice=list(found.advice),
    )


def _share(account: Account | None, state: State, now_ns: int) -> float:
    _, share = share_of_everything(account or Account(), state.capacity, now_ns, state.decay)
    return round(float(share), 6)


def offer_answer(offer: Offer, view: LeaseView) -> OfferAnswer:
    price, asked_price = offer.prices or (None, None)
    return OfferAnswer(
        lease=view,
        kind=offer.kind.value,
        asked=offer.requested,
        offered=offer.offered,
        valid=view.claim_within or 0.0,
        model=offer.model,
        estimate=None if offer.estimate_ns is None else seconds(offer.estimate_ns),
        price=None if price is None else money(price, "").strip(),
        asked_price=None if asked_price is None else money(asked_price, "").strip(),
        currency=offer.currency or None,
    )


def refusal_answer(refusal: Refusal) -> RefusalAnswer:
    return RefusalAnswer(
        code=refusal.code.value,
        reason=refusal.reason,
        do=refusal.do,
        would_fit=refusal.would_fit,
        estimate=None if refusal.estimate_ns is None else seconds(refusal.estimate_ns),
    )


def renew_answer(lease: LeaseRecord, now: Now, token: str | None = None, *, save_ns: int = 0) -> RenewAnswer:
    """``ttl`` is counted from the decision, a little after the request came in: the error is on the safe side."""
    assert lease.epoch is not None and lease.deadline_ns is not None
    return RenewAnswer(
        lease=lease.id,
        epoch=lease.epoch,
        deadline=seconds(lease.deadline_ns),
        ttl=max(0.0, seconds(lease.deadline_ns - now.ns)),
        number=lease.number,
        token=token,
        save=seconds(save_ns),
    )


def device_view(resource: ResourceRecord, shown: Collection[LeaseId] | None) -> DeviceView:
    """``shown``: the leases the caller may know of; None shows all."""
    leased = [piece for piece in resource.slices.values() if piece.state is not SliceState.RETAINED]
    taken = resource.used + (0 if resource.foreign is None else resource.foreign.amount)
    return DeviceView(
        id=resource.id,
        node=resource.node,
        kind=resource.device.kind.value,
        model=resource.device.model,
        host=resource.device.host,
        capacity=resource.device.capacity,
        free=max(0, resource.device.capacity - taken) if resource.state is SliceState.FREE else 0,
        state=resource.state.value,
        detail=resource.detail or ("" if resource.foreign is None else resource.foreign.detail),
        leases=sorted({s.lease for s in leased if shown is None or s.lease in shown}),
        suspend=resource.device.suspend.value,
    )


def volume_view(volume: VolumeRecord, state: State, now: Now) -> VolumeView:
    """A volume as its tenant, or the operator, sees it."""
    holder = holder_of(state, volume)
    is_away = state.nodes[volume.node].lost
    return VolumeView(
        name=volume.name,
        tenant=volume.tenant,
        state=volume.state.value,
        size=volume.size,
        node=volume.node,
        resource=volume.resource,
        lease=None if holder is None else holder.id,
        last_lease=volume.lease,
        epoch=volume.epoch,
        made_at=rfc3339(volume.made_wall_ns),
        kept_at=None if volume.kept_wall_ns is None else rfc3339(volume.kept_wall_ns),
        keep_until=None if volume.until_ns is None else _wall_of(volume.until_ns, now),
        remaining=None if volume.until_ns is None else max(0.0, seconds(volume.until_ns - now.ns)),
        retain=seconds(volume.retain_ns),
        detail=f"{volume.node} does not answer" if is_away and not volume.detail else volume.detail,
    )


def node_view(node: NodeRecord) -> NodeView:
    state = "lost" if node.lost else "draining" if node.draining else "up"
    return NodeView(id=node.id, domain=node.domain, labels=node.labels, state=state)


def fence_views(resource: ResourceRecord) -> Iterator[FenceView]:
    """What of this resource cannot be granted: the device itself, or single slices of it."""
    if resource.state is SliceState.QUARANTINED:
        yield FenceView(
            resource=resource.id,
            lease=None,
            epoch=None,
            amount=resource.device.capacity,
            detail=resource.detail,
            hard=True,
        )
    for piece in resource.slices.values():
        if piece.state is SliceState.QUARANTINED:
            yield FenceView(
                resource=resource.id,
                lease=piece.lease,
                epoch=piece.epoch,
                amount=piece.part.amount,
                detail=piece.detail,
                hard=piece.hard,
            )


def audit_entry(record: AuditRecord) -> AuditEntry:
    """A record as an operator reads it."""
    event = decode_as(record.body, dict)
    event.pop("type", None)
    by = event.pop("by", "")
    return AuditEntry(seq=record.seq, at=rfc3339(record.wall_ns), kind=record.kind, by=by, event=event)


def quota_view(quota: Quota) -> QuotaView:
    return QuotaView(**{name: getattr(quota, name) for name in quota.__struct_fields__})


def tenant_view(tenant: TenantRecord, state: State, now_ns: int) -> TenantView:
    return TenantView(
        id=tenant.id,
        tier_max=tenant.tier_max.value,
        operator=tenant.operator,
        quota=quota_view(tenant.quota),
        burst_seconds_left=remaining_seconds(state, tenant.id, now_ns)
        if state.quota_of(tenant.id).burst_seconds
        else None,
        gpu_seconds_used=round(state.used_milli_ns(tenant.id, now_ns) / MILLIS_PER_DEVICE / NS_PER_S, 3),
        leases=state.held_by(tenant.id).leases,
        queued=state.waiting_of(tenant.id),
        disabled=tenant.disabled,
        uid=tenant.uid,
        needs_token=tenant.needs_token,
        group=state.group_of(tenant.id),
        weight=tenant.weight,
        share=_share(state.books.accounts.get(tenant.id), state, now_ns),
        studio=tenant.studio,
    )


def group_view(group: GroupRecord, state: State, now_ns: int) -> GroupView:
    account = state.books.group_accounts.get(group.id, Account())
    kind, share = share_of_everything(account, state.capacity, now_ns, state.decay)
    return GroupView(
        id=group.id,
        weight=group.weight,
        floor=group.floor,
        ceiling=group.ceiling,
        quota=quota_view(group.quota),
        tenants=[tenant for tenant in state.tenants if state.group_of(tenant) == group.id],
        gpus=account.level[0] / MILLIS_PER_DEVICE,
        share=round(float(share), 6),
        share_of=kind.value,
        queued=state.waiting_of_group(group.id),
    )
