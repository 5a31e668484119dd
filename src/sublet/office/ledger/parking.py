"""Takes a device without ending its guests, and gives them another later.

1. A lease has notice, and its agent says what its guests would need (``Parkable``). A *parking lease* is set aside
   for them there and then: a lease of memory of the same tenant, in its quota and on its bill, on the same node.
2. The notice is due. If the parking lease is there the device is taken by ``End`` with ``park``; if none was to be had
   the lease ends like any other, and the record of its end says that nothing was saved, and why. A notice of an idle
   holder (``when_safe``) is due as soon as the agent holds the parking lease, or says that there are no guests, or none
   that has anything left to save; those that cannot be parked have the time that the notice leaves to say so. The same
   notice is given to an idle holder whose time runs out, when its agent asks for it.
3. The agent reports ``TornDown`` and whether the guests live. If they do not, the parking lease goes, too.
4. A request names the parking lease (and its epoch) as what it wants to go on with. It waits in line like any other,
   and while it does the parking lease is kept. Its grant names both; the agent hands over in one step.

The parking lease is in the journal from the first of these moments on, so a restart at any of them goes on with it.
What is not announced is not parked: a lease that is silent until its deadline, is ended by an operator, or has a device
of exclusivity ``device``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from sublet.lease.parking import NOT_PARKED_FOR, copy_ns
from sublet.lease.policy import lead_ns
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease_end import EndReason
from sublet.office.ledger import admission
from sublet.office.ledger import events as ev
from sublet.office.ledger.placement import RoomsByNode, fit_on_node
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, NoticeRecord, Parks, Want
from sublet.values import (
    Exclusivity,
    Kind,
    LeaseId,
    RenewMode,
    RequestId,
    Suspend,
    Way,
    format_size,
)
from sublet.wire.orders import Held, Parkable, Parking, Resumed

if TYPE_CHECKING:
    from sublet.office.ledger.state import State
    from sublet.office.ledger.transaction import Transaction

_KINDS: Final = frozenset({Kind.GPU, Kind.CPU})
"""What a lease may have whose guests are parked: memory and disk of its own end with it."""
_CLASSES: Final = frozenset({Exclusivity.SHARED, Exclusivity.SESSION})
_WAITS: Final = frozenset({LeaseStatus.QUEUED, LeaseStatus.GRANTED})


# ---- 1: notice ----


def parkable(step: Transaction, rooms_for: Callable[[State, LeaseRecord, int], RoomsByNode], report: Parkable) -> None:
    """An agent says what the guests of a lease that has notice, or runs out, would need. It says so again, so nothing
    is lost by answering no now."""
    lease = step.state.leases.get(report.lease)
    if lease is None or lease.epoch != report.epoch or lease.status not in LIVE_STATES:
        return
    runs_out = report.expiring and lease.idle_since_ns is not None
    if lease.notice is None and not runs_out:
        return
    if _under(step.state, lease) is not None:
        _give_way(step, lease, is_idle=runs_out, is_safe=report.safe)
        return
    ability = _ability(step.state, lease)
    if report.amount < 1 and not report.why:
        _without_parking(step, lease, has_nothing=True)
        return
    if ability is Suspend.NONE or report.why:
        if report.why or (lease.notice is not None and lease.notice.when_safe):
            _deny(step, lease, report.why or "a lease like this one is never parked")
        _without_parking(step, lease, is_safe=report.safe)
        return
    parking = _record(step, lease, report, ability)
    over = admission.over_quotas(step.state, parking)
    node_rooms = rooms_for(step.state, parking, step.now.ns).get(lease.node, ()) if lease.node is not None else ()
    parts = None if over else fit_on_node(parking.wants, lease.tenant, node_rooms, mix=True)
    if parts is None:
        needed = format_size(report.amount)
        _deny(step, lease, over or f"{needed} of memory would be needed for it on its machine, and are not free")
        _without_parking(step, lease, is_safe=report.safe)
        return
    assert lease.node is not None
    holds = step.holds
    if lease.notice is None:
        assert lease.deadline_ns is not None
        left_ns, detail = max(0, lease.deadline_ns - step.now.ns), "nothing runs under it, and its time runs out"
        step.notice(lease, EndReason.IDLE, left_ns, detail, when_safe=True)
    step.emit(ev.Queued(lease=parking))
    parking = step.state.leases[parking.id]
    step.grant(parking, lease.node, parts)
    step.claim(parking)
    step.holds = holds  # no caller waits for an answer


def waited_for(state: State, report: Held) -> LeaseRecord | None:
    """The lease that ends because its agent holds the parking lease now; None if there is none."""
    under = None if report.told else state.leases.get(report.lease)
    if under is None or under.parks is None or under.parks.holds or under.epoch != report.epoch:
        return None
    lease = state.leases.get(under.parks.of)
    if lease is None or lease.status is not LeaseStatus.NOTICED or lease.notice is None or not lease.notice.when_safe:
        return None
    return lease if under.status is LeaseStatus.ACTIVE else None


def held(step: Transaction, report: Held) -> None:
    """The agent holds a parking lease: from now on nothing is lost by taking its guests off their devices."""
    lease = waited_for(step.state, report)
    if lease is not None:
        _give_way(step, lease)


def holder_is_back(step: Transaction, lease: LeaseRecord) -> None:
    """Something runs again under a lease that was to end for want of work, or it has time again. It stays where no
    request wants it, and where what runs would be lost; what can be parked waits for a device as any request does."""
    notice = lease.notice
    if lease.status is not LeaseStatus.NOTICED or notice is None or not notice.when_safe:
        return
    if notice.beneficiary is None or (lease.unsaved and _under(step.state, lease) is None):
        _stays(step, lease, notice)


def give_way_early(step: Transaction, lease: LeaseRecord) -> None:
    """Its holder has become idle while it has notice: if its guests can be parked, the beneficiary waits no longer."""
    if lease.status is LeaseStatus.NOTICED and lease.notice is not None and lease.notice.beneficiary is not None:
        _give_way(step, lease, is_idle=True)


def bound_ns(step: Transaction, lease: LeaseRecord) -> int:
    """How long an idle holder's lease may still last where its guests cannot be parked: at least the grace, and one and
    a half times what their last save took."""
    return lead_ns(step.policy.grace_ns(lease.ttl_ns), step.state.saves.get(lease.id, 0))


def _give_way(step: Transaction, lease: LeaseRecord, *, is_idle: bool = False, is_safe: bool = False) -> None:
    """Take a lease whose parking lease is held by its agent, if it is one that ends as soon as that is so."""
    notice, under = lease.notice, _under(step.state, lease)
    if notice is None or under is None or under.status is not LeaseStatus.ACTIVE or not step.is_held(under.id):
        return
    is_whole = is_safe or under.parks is None or not under.parks.partial
    if is_whole and (is_idle or notice.when_safe):
        take(step, lease, notice)


def _without_parking(
    step: Transaction, lease: LeaseRecord, *, has_nothing: bool = False, is_safe: bool = False
) -> None:
    """The guests of an idle lease will not be parked. Without guests, or with nothing left to save, it ends now; else
    they have until the bound to save. If something runs again meanwhile, that would be lost, and the lease stays."""
    notice = lease.notice
    if notice is None or not notice.when_safe:
        return
    if lease.idle_since_ns is None:
        _stays(step, lease, notice)
    elif has_nothing:
        step.end(lease, notice.reason, notice.detail)
    elif is_safe:
        take(step, lease, notice)


def _stays(step: Transaction, lease: LeaseRecord, notice: NoticeRecord) -> None:
    """It is not taken; the request that was to have it waits for another."""
    waiting = None if notice.beneficiary is None else step.state.leases.get(notice.beneficiary)
    if waiting is not None and waiting.promise:
        step.drop_promise(waiting)
    else:
        step.cancel_notice(lease)


def _ability(state: State, lease: LeaseRecord) -> Suspend:
    """Whether the guests of this lease may be parked at all, and where they could go on."""
    notice = lease.notice
    if lease.status not in LIVE_STATES or (notice is not None and notice.reason in NOT_PARKED_FOR):
        return Suspend.NONE
    if not {part.kind for part in lease.parts} <= _KINDS:
        return Suspend.NONE
    gpus = [part for part in lease.parts if part.kind is Kind.GPU]
    if not gpus or any(part.exclusivity not in _CLASSES for part in gpus):
        return Suspend.NONE
    devices = [state.resources[part.resource].device for part in gpus]
    is_walled = lease.tenant != LOCAL_TENANT
    able = {one.suspend_walled if is_walled and one.suspend_walled is not None else one.suspend for one in devices}
    return next(one for one in Suspend if one in able)  # the least of them


def _record(step: Transaction, lease: LeaseRecord, report: Parkable, ability: Suspend) -> LeaseRecord:
    arrival = step.state.books.next_arrival
    id_ = LeaseId(f"{lease.id}-p{arrival}")
    return LeaseRecord(
        id=id_,
        tenant=lease.tenant,
        request_id=RequestId(f"parking\n{id_}"),  # not printable, so no request of a holder's
        fingerprint="",
        wants=(Want(kind=Kind.MEMORY, amount=report.amount),),
        ttl_ns=step.policy.ttl_parking_ns,
        tier=lease.tier,
        arrival=arrival,
        asked_at_ns=step.now.ns,
        asked_wall_ns=step.now.wall_ns,
        wait_until_ns=step.now.ns,
        renew=RenewMode.ALWAYS,
        labels=lease.labels,
        holder=lease.holder,
        process=lease.process,
        peer=lease.peer,
        parks=Parks(of=lease.id, wants=_wants_of(lease), parts=lease.parts, ability=ability, partial=not report.whole),
    )


def _wants_of(lease: LeaseRecord) -> tuple[Want, ...]:
    """What it has, as a request: an offer that was taken may be less than what was asked for."""
    found = []
    for want in lease.wants:
        has = min(part.amount for part in lease.parts if part.kind is want.kind)
        found.append(msgspec.structs.replace(want, amount=min(want.amount, has), least=None, model=None))
    return tuple(found)


def _deny(step: Transaction, lease: LeaseRecord, why: str) -> None:
    if lease.unsaved != why:
        step.emit(ev.ParkingDenied(lease=lease.id, why=why))


def _under(state: State, lease: LeaseRecord) -> LeaseRecord | None:
    """The parking lease of this one, if it is still there."""
    found = state.leases.get(lease.parked_under) if lease.parked_under is not None else None
    return None if found is None or found.status in (LeaseStatus.ENDING, LeaseStatus.ENDED) else found


# ---- 2: the end ----


def take(step: Transaction, lease: LeaseRecord, notice: NoticeRecord) -> None:
    """The notice is due: off its devices, with its guests parked if that can be."""
    under = _under(step.state, lease)
    # That it is ACTIVE is redundant: a parking lease is granted at once or refused, and one that ends is not found. It
    # stays because guests that are parked under a lease without hardware would be counted nowhere.
    if under is not None and under.status is LeaseStatus.ACTIVE and _ability(step.state, lease) is not Suspend.NONE:
        assert under.epoch is not None
        park = Parking(lease=under.id, epoch=under.epoch)
        grace_ns = suspend_ns(step.state, lease, park.lease, step.policy.suspend_ns)
        step.end(lease, notice.reason, notice.detail, grace_ns=grace_ns, way=Way.SUSPEND, park=park)
        return
    why = lease.unsaved if lease.parked_under is None else "its parking lease is over"
    if why:
        step.end(lease, notice.reason, f"{notice.detail}; not parked: {why}".lstrip("; "), way=Way.NOT_SAVED)
    else:
        step.end(lease, notice.reason, notice.detail)


def suspend_ns(state: State, lease: LeaseRecord | None, parking: LeaseId, least_ns: int) -> int:
    """How long it may take to bring guests off their devices; on cards also to copy what was set aside for them."""
    parts = () if lease is None else lease.parts
    if not any(part.kind is Kind.GPU and not state.resources[part.resource].device.host for part in parts):
        return least_ns
    under = state.leases.get(parking)
    return least_ns + copy_ns(sum(part.amount for part in under.parts) if under is not None else 0)


def after_end(step: Transaction, lease: LeaseRecord) -> None:
    """What follows from the end of a lease for its parking lease, or of that for the lease that was to resume it."""
    if lease.end is not None and lease.end.way is not Way.SUSPEND:
        not_needed(step, lease, "its lease ended otherwise")
    waiting = _resumed_by(step.state, lease)
    if waiting is not None and waiting.status in _WAITS:
        assert lease.end is not None
        step.end(waiting, EndReason.REFUSED, f"the parking lease {lease.id} is over ({lease.end.reason})")


def not_needed(step: Transaction, lease: LeaseRecord, why: str) -> None:
    """No guest of this lease will be parked: what was set aside for that is given back."""
    under = _under(step.state, lease)
    if under is not None and under.parks is not None and not under.parks.holds:
        step.end(under, EndReason.WITHDRAWN, why, grace_ns=0)


# ---- 3: parked ----


def torn_down(step: Transaction, lease: LeaseRecord, *, parked: bool) -> None:
    """The agent has looked. Whether its guests live on is known by now."""
    if lease.status is not LeaseStatus.ENDING or lease.end is None or lease.end.way is not Way.SUSPEND:
        return
    under = _under(step.state, lease)
    if under is not None and under.parks is not None and under.parks.holds:
        return
    if parked and under is not None:
        step.emit(ev.Parked(lease=under.id, of=lease.id))
        return
    why = "it could not be taken off its device alive" if under is not None else "its parking lease was given up"
    _deny(step, lease, why)
    not_needed(step, lease, why)


def keep(step: Transaction, lease: LeaseRecord) -> bool:
    """Whether this is a parking lease that a queued request wants to go on with: it is kept for as long as that waits.
    ``queue_liveness`` watches whether the request's holder is still there."""
    waiting = _resumed_by(step.state, lease)
    if waiting is None or waiting.status not in _WAITS or lease.status is not LeaseStatus.ACTIVE:
        return False
    step.extend(lease)
    return True


def _resumed_by(state: State, lease: LeaseRecord) -> LeaseRecord | None:
    by = lease.parks.resumed_by if lease.parks is not None else None
    return state.leases.get(by) if by is not None else None


# ---- 4: resume (see ``resuming`` for the request) ----


def resumed(step: Transaction, report: Resumed) -> None:
    """The agent has handed over: the parking lease has done its work."""
    lease = step.state.leases.get(report.lease)
    if lease is not None and lease.resume is not None and lease.resume.lease == report.under.lease:
        is_news = not lease.resumed and lease.status in (*LIVE_STATES, LeaseStatus.ENDING)
        if is_news:
            step.emit(ev.Resumed(lease=lease.id, under=report.under.lease))
    under = step.state.leases.get(report.under.lease)
    if under is not None and under.epoch == report.under.epoch and under.status in LIVE_STATES:
        step.end(under, EndReason.RELEASED, f"its guests went on under {report.lease}", grace_ns=0)
