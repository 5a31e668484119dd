"""Requests that replace a lease of the same tenant, decided in one step with that lease's parts counted as free.

1. *Decided.* The request fits into what is free together with what its present lease has. If it fits into what is free,
   it is granted, and the present lease ends when the grant is claimed; until then limits count one of the two. If it
   needs a part of the present lease, those parts are promised to it and the present lease ends, in one step; it is
   granted when they were seen to be clean. No other request is let into promised parts, so none gets in between.
2. *Waiting.* Otherwise it waits like any request. The present lease stays, and is renewed although nothing runs under
   it: its holder waits. It is idle, though, and yields like any idle lease; so two holders that each wait for what the
   other has do not wait for ever.
3. *Refused, withdrawn, lapsed.* The present lease stays.

The time for which the present lease was held counts on: a holder that replaces its lease again and again holds no
longer than others.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import msgspec

from sublet.errors import InvalidRequest, StaleEpoch
from sublet.lease.states import LIVE_STATES, LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger.groups import gpu_millis, held_millis
from sublet.office.ledger.placement import RoomsByNode
from sublet.office.ledger.queue_order import others_wait_for
from sublet.office.ledger.records import LeaseRecord
from sublet.values import Kind

if TYPE_CHECKING:
    from sublet.office.ledger.free_capacity import Room
    from sublet.office.ledger.policy import Policy
    from sublet.office.ledger.state import Held, State


def check(state: State, lease: LeaseRecord, command: cmd.Acquire) -> cmd.Acquire:
    """The request, with the epoch that it means; raises if this lease cannot be replaced by it."""
    if command.resume is not None:
        raise InvalidRequest(
            "a request cannot both resume what is parked and replace a lease", do="Leave one of the two out."
        )
    if lease.parks is not None or any(part.kind is Kind.BLOCK for part in lease.parts):
        what = "holds what is parked" if lease.parks is not None else "has blocks of disk"
        raise InvalidRequest(f"{lease.id} {what} and cannot be replaced", do="Leave replaces= out.")
    if command.replaces_epoch is not None and command.replaces_epoch != lease.epoch:
        raise StaleEpoch(
            f"epoch {command.replaces_epoch} of {lease.id} is old; {lease.epoch} is live",
            do="Another program took over the lease.",
        )
    if is_being_replaced(state, lease):
        raise InvalidRequest(
            f"{lease.id} is being replaced already, by {lease.replaced_by}", do="Withdraw that request first."
        )
    return msgspec.structs.replace(command, replaces_epoch=lease.epoch)


def present(state: State, lease: LeaseRecord) -> LeaseRecord | None:
    """The lease that this one replaces, if that is still live."""
    old = None if lease.replaces is None else state.leases.get(lease.replaces)
    return old if old is not None and old.status in LIVE_STATES else None


def is_being_replaced(state: State, lease: LeaseRecord) -> bool:
    """Whether its holder waits for another lease in its place."""
    by = None if lease.replaced_by is None else state.leases.get(lease.replaced_by)
    return by is not None and by.status in (LeaseStatus.QUEUED, LeaseStatus.GRANTED)


def with_its_parts_free(
    state: State, lease: LeaseRecord, rooms: RoomsByNode, now_ns: int, policy: Policy
) -> RoomsByNode | None:
    """These rooms as if the present lease had ended; None if that changes nothing for this request: there is none, it
    is to be taken for another request, or it was held for the maximum and others wait for it."""
    old = present(state, lease)
    if old is None or old.status is not LeaseStatus.ACTIVE or old.node is None or old.node not in rooms:
        return None
    if now_ns - held_since_ns(old) >= policy.max_hold_ns and others_wait_for(state, old, now_ns, policy):
        return None
    parts = {part.resource: part for part in old.parts}

    def freed(room: Room) -> Room:
        part = parts.get(room.resource)
        if part is None:
            return room
        room = room.copy()
        room.give_back(part, old.tenant)
        return room

    return {**rooms, old.node: [freed(room) for room in rooms[old.node]]}


def without_it(state: State, lease: LeaseRecord, held: Held) -> Held:
    """What its tenant holds, without the lease that this one replaces."""
    old = present(state, lease)
    if old is None:
        return held
    held = copy(held)
    held.add(old.parts, -1)
    return held


def millis_beside(state: State, lease: LeaseRecord) -> int:
    """How much of devices its group holds, without the lease that this one replaces."""
    old = present(state, lease)
    return held_millis(state, state.group_of(lease.tenant)) - (0 if old is None else gpu_millis(old.parts))


def held_since_ns(lease: LeaseRecord) -> int:
    """Since when its holder has had it, or the lease that it replaced."""
    assert lease.claimed_at_ns is not None
    return lease.claimed_at_ns if lease.held_since_ns is None else lease.held_since_ns
