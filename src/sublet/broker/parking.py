"""How the office takes a device without ending who is on it, and gives him another later.

1. A lease has notice, and its agent says what its guests would need (``Parkable``). A *parking lease* is set aside
   for them there and then: a lease of memory of the same tenant, in its quota and on its bill, on the same node.
2. The notice is due. If the parking lease is there the device is taken by ``End`` with ``park``; if none was to be had
   the lease ends like any other, and the record of its end says that nothing was saved, and why.
3. The agent reports ``TornDown`` and whether the guests live. If they do not, the parking lease goes, too.
4. A request names the parking lease (and its epoch) as what it wants to go on with. It waits in line like any other,
   and while it does the parking lease is kept. Its grant names both; the agent hands over in one step.

The parking lease is in the journal from the first of these moments on, so a restart at any of them goes on with it.
What is not announced is not parked: who is silent until his deadline, is taken by an operator's word, or has a device
of exclusivity ``device``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from sublet.broker import admission
from sublet.broker import events as ev
from sublet.broker.placement import fit_on_node
from sublet.broker.records import LeaseRecord, NoticeRecord, Parks, Want
from sublet.lease.parking import NOT_PARKED_FOR
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.values import (
    EndReason,
    Exclusivity,
    Kind,
    LeaseId,
    RenewMode,
    RequestId,
    Suspend,
    Way,
    format_size,
)
from sublet.wire.orders import Parkable, Parking, Resumed

if TYPE_CHECKING:
    from sublet.broker.schedule import Schedule
    from sublet.broker.state import State
    from sublet.broker.step import Step

__all__ = ["after_end", "keep", "not_needed", "parkable", "resumed", "take", "torn_down"]

_KINDS: Final = frozenset({Kind.GPU, Kind.CPU})
"""What a lease may have whose guests are parked: memory and disk of its own end with it."""
_CLASSES: Final = frozenset({Exclusivity.SHARED, Exclusivity.SESSION})
_WAITS: Final = frozenset({LeaseStatus.QUEUED, LeaseStatus.GRANTED})


# ---- 1: notice ----


def parkable(step: Step, schedule: Schedule, report: Parkable) -> None:
    """An agent says what the guests of a lease that has notice would need. It says so again, so nothing is lost by
    answering no now."""
    lease = step.state.leases.get(report.lease)
    if lease is None or lease.epoch != report.epoch or _under(step.state, lease) is not None:
        return
    ability = _ability(step.state, lease)
    if ability is Suspend.NONE:
        return
    if report.why or report.amount < 1:
        _deny(step, lease, report.why or "nothing of it can be parked")
        return
    parking = _record(step, lease, report.amount, ability)
    over = admission.over_quota(parking.wants, step.state.tenants[lease.tenant].quota, step.state.held_by(lease.tenant))
    here = schedule.rooms_for(step.state, parking).get(lease.node, ()) if lease.node is not None else ()
    parts = None if over else fit_on_node(parking.wants, lease.tenant, here, mix=True)
    if parts is None:
        needed = format_size(report.amount)
        _deny(step, lease, over or f"{needed} of memory would be needed for it on its machine, and are not free")
        return
    assert lease.node is not None
    hold = step.hold
    step.emit(ev.Queued(lease=parking))
    parking = step.state.leases[parking.id]
    step.grant(parking, lease.node, parts)
    step.claim(parking)
    step.hold = hold  # nobody waits for an answer


def _ability(state: State, lease: LeaseRecord) -> Suspend:
    """Whether the guests of this lease may be parked at all, and where they could go on."""
    notice = lease.notice
    if lease.status is not LeaseStatus.NOTICED or notice is None or notice.reason in NOT_PARKED_FOR:
        return Suspend.NONE
    if not {part.kind for part in lease.parts} <= _KINDS:
        return Suspend.NONE
    gpus = [part for part in lease.parts if part.kind is Kind.GPU]
    if not gpus or any(part.exclusivity not in _CLASSES for part in gpus):
        return Suspend.NONE
    able = {state.resources[part.resource].device.suspend for part in gpus}
    return next(one for one in Suspend if one in able)  # the least of them


def _record(step: Step, lease: LeaseRecord, amount: int, ability: Suspend) -> LeaseRecord:
    arrival = step.state.books.next_arrival
    id_ = LeaseId(f"{lease.id}-p{arrival}")
    return LeaseRecord(
        id=id_,
        tenant=lease.tenant,
        request_id=RequestId(f"parking\n{id_}"),  # not printable, so no request of a holder's
        fingerprint="",
        wants=(Want(kind=Kind.MEMORY, amount=amount),),
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
        parks=Parks(of=lease.id, wants=_wants_of(lease), parts=lease.parts, ability=ability),
    )


def _wants_of(lease: LeaseRecord) -> tuple[Want, ...]:
    """What it has, as a request: an offer that was taken may be less than what was asked for."""
    found = []
    for want in lease.wants:
        has = min(part.amount for part in lease.parts if part.kind is want.kind)
        found.append(msgspec.structs.replace(want, amount=min(want.amount, has), least=None, model=None))
    return tuple(found)


def _deny(step: Step, lease: LeaseRecord, why: str) -> None:
    if lease.unsaved != why:
        step.emit(ev.ParkingDenied(lease=lease.id, why=why))


def _under(state: State, lease: LeaseRecord) -> LeaseRecord | None:
    """The parking lease of this one, if it is still there."""
    found = state.leases.get(lease.parked_under) if lease.parked_under is not None else None
    return None if found is None or found.status in (LeaseStatus.ENDING, LeaseStatus.ENDED) else found


# ---- 2: the end ----


def take(step: Step, lease: LeaseRecord, notice: NoticeRecord) -> None:
    """The notice is due: off its devices, with its guests parked if that can be."""
    under = _under(step.state, lease)
    if under is not None and under.status is LeaseStatus.ACTIVE and _ability(step.state, lease) is not Suspend.NONE:
        assert under.epoch is not None
        park = Parking(lease=under.id, epoch=under.epoch)
        step.end(lease, notice.reason, notice.detail, grace_ns=step.policy.suspend_ns, way=Way.SUSPEND, park=park)
        return
    why = lease.unsaved if lease.parked_under is None else "its parking lease is over"
    if why:
        step.end(lease, notice.reason, f"{notice.detail}; not parked: {why}".lstrip("; "), way=Way.NOT_SAVED)
    else:
        step.end(lease, notice.reason, notice.detail)


def after_end(step: Step, lease: LeaseRecord) -> None:
    """What follows from the end of a lease for its parking lease, or of that for who wanted to go on with it."""
    if lease.end is not None and lease.end.way is not Way.SUSPEND:
        not_needed(step, lease, "its lease ended otherwise")
    waiting = _resumed_by(step.state, lease)
    if waiting is not None and waiting.status in _WAITS:
        assert lease.end is not None
        step.end(waiting, EndReason.REFUSED, f"the parking lease {lease.id} is over ({lease.end.reason})")


def not_needed(step: Step, lease: LeaseRecord, why: str) -> None:
    """Nobody of this lease will be parked: what was set aside for that is given back."""
    under = _under(step.state, lease)
    if under is not None and under.parks is not None and not under.parks.holds:
        step.end(under, EndReason.WITHDRAWN, why, grace_ns=0)


# ---- 3: parked ----


def torn_down(step: Step, lease: LeaseRecord, *, parked: bool) -> None:
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


def keep(step: Step, lease: LeaseRecord) -> bool:
    """Whether this is a parking lease that somebody in line wants to go on with: it is kept for as long as he waits,
    and whether he is still there is seen to by others (``presence``)."""
    waiting = _resumed_by(step.state, lease)
    if waiting is None or waiting.status not in _WAITS or lease.status is not LeaseStatus.ACTIVE:
        return False
    step.extend(lease)
    return True


def _resumed_by(state: State, lease: LeaseRecord) -> LeaseRecord | None:
    by = lease.parks.resumed_by if lease.parks is not None else None
    return state.leases.get(by) if by is not None else None


# ---- 4: resume (see ``resuming`` for the request) ----


def resumed(step: Step, report: Resumed) -> None:
    """The agent has handed over: the parking lease has done its work."""
    lease = step.state.leases.get(report.lease)
    if lease is not None and lease.resume is not None and lease.resume.lease == report.under.lease:
        is_news = not lease.resumed and lease.status in (*LIVE_STATES, LeaseStatus.ENDING)
        if is_news:
            step.emit(ev.Resumed(lease=lease.id, under=report.under.lease))
    under = step.state.leases.get(report.under.lease)
    if under is not None and under.epoch == report.under.epoch and under.status in LIVE_STATES:
        step.end(under, EndReason.RELEASED, f"its guests went on under {report.lease}", grace_ns=0)
