"""Renewals, and holders' reports of activity."""

from __future__ import annotations

from sublet.errors import InvalidRequest, LeaseRevoked, QuotaExceeded, RenewalRefusal
from sublet.lease_end import EndReason
from sublet.office.ledger import admission, budgets, parking, replacement
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Answer, Done, Granted
from sublet.office.ledger.groups import gpu_millis
from sublet.office.ledger.lookup import find_live
from sublet.office.ledger.queue_order import kinds_of, others_wait_for
from sublet.office.ledger.records import LeaseRecord
from sublet.office.ledger.scheduler import Schedule
from sublet.office.ledger.step import Step, extend_order
from sublet.values import Kind, RenewMode, format_duration


def renew(step: Step, schedule: Schedule, command: cmd.Renew) -> Answer:
    """Move the deadline, or say why not. A renewal after the end changes nothing."""
    lease = find_live(step, command.tenant, command.lease, command.epoch)
    if command.busy_ns < 0:
        raise InvalidRequest("busy time cannot be negative")
    policy, now = step.policy, step.now
    ttl_ns = lease.ttl_ns if command.ttl_ns is None else command.ttl_ns
    if command.lead_ns > 0:  # asked for by a reckoning, not by a person: what is too much is had as far as it may be
        ttl_ns = min(ttl_ns, policy.ttl_max_ns)
    if not policy.ttl_min_ns <= ttl_ns <= policy.ttl_max_ns:
        raise InvalidRequest("the new time to live is out of bounds", do="Leave it out to keep the old one.")
    refused = _why_not_renewed(step, lease, active=command.active)
    if refused is not None:
        reason, why = refused
        if command.busy_ns or not command.active:
            step.emit(activity(step, lease, command.busy_ns, idle=not command.active))
        if lease.fate is not reason:
            step.emit(ev.FateSealed(lease=lease.id, reason=reason))
        kind = QuotaExceeded if reason is EndReason.QUOTA else LeaseRevoked
        word = RenewalRefusal(reason)
        raise kind(f"the renewal was refused: {why}", do="It runs to its deadline; save what matters now.", reason=word)
    deadline_ns = max(lease.deadline_ns or 0, now.ns + ttl_ns)
    is_beyond = Kind.GPU in kinds_of(lease) and admission.over_own_seconds(step.state, lease, now) is not None
    step.draw(lease, gpu_millis(lease.parts) if is_beyond else 0)
    step.emit(
        ev.Renewed(
            lease=lease.id,
            deadline_ns=deadline_ns,
            number=lease.number + 1,
            busy_ns=_plausible(step, lease, command.busy_ns),
            idle=not command.active,
            ttl_ns=None if command.ttl_ns is None else ttl_ns,
        )
    )
    step.orders.append(extend_order(lease, now.ns, max(0, min(command.lead_ns, ttl_ns))))
    step.holds = ((lease.id, lease.number),)
    runs_out = lease.notice is not None and lease.notice.reason is EndReason.IDLE
    if command.active or runs_out:  # by this renewal it does not
        parking.holder_is_back(step, lease)
    return Granted(lease=lease)


def note_activity(step: Step, schedule: Schedule, command: cmd.NoteActivity) -> Answer:
    """The lease became busy or idle; its deadline stays."""
    lease = find_live(step, command.tenant, command.lease, command.epoch)
    if command.busy_ns < 0:
        raise InvalidRequest("busy time cannot be negative")
    step.emit(activity(step, lease, command.busy_ns, idle=not command.active))
    if command.active:
        parking.holder_is_back(step, lease)
    else:
        schedule.will_yield(step.state, lease)
    return Done(lease=lease)


def activity(step: Step, lease: LeaseRecord, busy_ns: int, *, idle: bool) -> ev.ActivityNoted:
    """The fact of what a holder says of its work."""
    return ev.ActivityNoted(lease=lease.id, busy_ns=_plausible(step, lease, busy_ns), idle=idle)


def _why_not_renewed(step: Step, lease: LeaseRecord, *, active: bool) -> tuple[EndReason, str] | None:
    if lease.renew is RenewMode.WHILE_BUSY and not active and not replacement.is_being_replaced(step.state, lease):
        return EndReason.IDLE, "nothing runs under it"
    over = admission.over_seconds(step.state, lease, step.now)
    if over is not None:
        return EndReason.QUOTA, over
    budget = budgets.used_up(step.state, lease, step.now) if lease.parks is not None else None
    if budget is not None:
        return EndReason.BUDGET, budgets.sentence(budget, step.now)
    held_ns = step.now.ns - replacement.held_since_ns(lease)
    if held_ns >= step.policy.max_hold_ns and others_wait_for(step.state, lease, step.now.ns, step.policy):
        return EndReason.FAIR_SHARE, f"it was held for {format_duration(held_ns)} and others wait"
    return None


def _plausible(step: Step, lease: LeaseRecord, busy_ns: int) -> int:
    """A holder cannot have been busy for longer than it held the lease."""
    assert lease.granted_at_ns is not None
    return max(0, min(busy_ns, step.now.ns - lease.granted_at_ns - lease.busy_ns))
