"""Requests that resume parked guests: whose they are, whether they are still there, and what they need."""

from __future__ import annotations

import msgspec

from sublet.errors import InvalidRequest, StaleEpoch
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.finding import find, must_be_live
from sublet.office.ledger.records import LeaseRecord
from sublet.office.ledger.step import Step
from sublet.values import LeaseId
from sublet.wire.orders import Parking


def wanting(step: Step, command: cmd.Acquire) -> cmd.Acquire:
    """The request to go on, spelt out; raises if there is nothing to go on with."""
    assert command.resume is not None
    if command.wants:
        raise InvalidRequest("what is parked says itself what it needs", do="Leave the amounts out.")
    lease = find(step, command.tenant, command.resume)
    if lease.parks is None:
        raise InvalidRequest(
            f"{lease.id} is no parking lease", do="Name the one that `lease.end.parked` of the lease before says."
        )
    must_be_live(step, lease)
    check_epoch(lease, command)
    if lease.parks.resumed_by is not None:
        raise InvalidRequest(
            f"{lease.id} is being resumed already, as {lease.parks.resumed_by}", do="Claim or release that one."
        )
    return msgspec.structs.replace(command, wants=lease.parks.wants, selector={}, resume_epoch=lease.epoch)


def check_epoch(lease: LeaseRecord, command: cmd.Acquire) -> None:
    """If another program attached to the parking lease since, only that one may go on with it."""
    if command.resume_epoch is not None and command.resume_epoch != lease.epoch:
        raise StaleEpoch(
            f"epoch {command.resume_epoch} of {lease.id} is old; {lease.epoch} is live",
            do="Another program took over what is parked there.",
        )


def parking_of(command: cmd.Acquire) -> Parking | None:
    """What the request, spelt out, goes on with."""
    if command.resume is None or command.resume_epoch is None:
        return None
    return Parking(lease=LeaseId(command.resume), epoch=command.resume_epoch)
