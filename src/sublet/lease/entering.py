"""What stands in the way of a grant: what is still on its resource, or not yet verified to be off it. Pure."""

from __future__ import annotations

from sublet.lease.fence import FenceTable, is_exclusive
from sublet.lease.teardowns import Teardowns
from sublet.values import Kind, LeaseId
from sublet.wire.orders import Part


def in_the_way(fence: FenceTable, teardowns: Teardowns, lease: LeaseId, part: Part, capacity: int) -> bool:
    """Whether this lease has to wait before it may have this part."""
    own = teardowns.get(lease, part.resource)
    if own is not None and own.holds(part.resource):
        return True  # what it had before a restart is being cleared away
    leaving = teardowns.leaving(part.resource)
    there = fence.on(part.resource)
    if is_exclusive(part):
        return bool(leaving or there)
    if part.kind is Kind.GPU and (fence.exclusive_on(part.resource) or any(map(is_exclusive, leaving))):
        return True
    in_use = fence.in_use(part.resource) + sum(other.amount for other in leaving)
    return in_use + part.amount > capacity
