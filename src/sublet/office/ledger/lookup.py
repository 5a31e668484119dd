"""Finds the lease that a holder names, or raises why it may not use it."""

from __future__ import annotations

from dataclasses import replace

from sublet.errors import LeaseEnded, LeaseNotActive, NotFound, RenewalRefusal, StaleEpoch
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.lease.value import ended_error as error_of_end
from sublet.lease.value import rfc3339
from sublet.lease_end import LeaseEnd
from sublet.office.ledger import parking
from sublet.office.ledger.records import LeaseRecord
from sublet.office.ledger.step import Step
from sublet.values import Epoch, LeaseId, TenantId


def find(step: Step, tenant: TenantId, lease_id: LeaseId) -> LeaseRecord:
    """The tenant's own lease. Another tenant's looks like none at all."""
    lease = step.state.leases.get(lease_id)
    if lease is None or lease.tenant != tenant:
        raise NotFound(
            f"there is no lease {lease_id[:64]}", do="`sublet lease ls` shows yours.", reason=RenewalRefusal.UNKNOWN
        )
    return lease


def find_live(step: Step, tenant: TenantId, lease_id: LeaseId, epoch: Epoch) -> LeaseRecord:
    """The lease, if this epoch of it is live now."""
    lease = find(step, tenant, lease_id)
    must_be_live(step, lease)
    if lease.epoch != epoch:
        raise StaleEpoch(
            f"epoch {Epoch(*epoch)} of lease {lease_id} is not the live one", reason=RenewalRefusal.STALE_EPOCH
        )
    return lease


def must_be_live(step: Step, lease: LeaseRecord) -> None:
    """Raises unless it is live; the holder of a lease whose time is over is told so, timer or no timer."""
    if lease.status in (LeaseStatus.ENDING, LeaseStatus.ENDED):
        raise ended_error(lease)
    if lease.status not in LIVE_STATES:
        raise LeaseNotActive(
            f"the lease {lease.id} is {lease.status}", do="Claim it first.", reason=RenewalRefusal.NOT_ACTIVE
        )
    due = step.state.due_at(lease)
    if due is not None and step.now.ns >= due and not parking.keep(step, lease):
        # Its timer has not fired yet, but its time is over all the same.
        step.act_as_system()
        step.end_when_due(lease)
        raise ended_error(lease)


def ended_error(lease: LeaseRecord) -> LeaseEnded:
    """What a call on an ended lease is told."""
    assert lease.end is not None
    end = LeaseEnd(reason=lease.end.reason, at=rfc3339(lease.end.wall_ns), detail=lease.end.detail)
    if lease.end.resume is not None:
        end = replace(end, resume_hint=lease.end.resume.advice, parked=lease.end.resume.hint)
    if lease.saved_wall_ns is not None:
        end = replace(end, saved_at=rfc3339(lease.saved_wall_ns))
    if (way := lease.end.reported_way(lease.saved_wall_ns)) is not None:
        end = replace(end, way=way.value)
    return error_of_end(lease.id, end)
