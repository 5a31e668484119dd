"""The auditor: reads the whole journal once more, by itself, and compares its sums with the office's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sublet.lease.states import LeaseStatus
from sublet.office.ledger import events as ev
from sublet.values import LeaseId, ResourceId, TenantId
from sublet.wire.orders import Part
from tests.simulation.disk import fold

if TYPE_CHECKING:
    from tests.simulation.office import OfficeProcess


def audit(office: OfficeProcess, fail: Callable[[str, str], None]) -> None:
    """S9: what tenants used is what devices were leased. L12: every lease has one end, or is still there. And the state
    that lived is the state that the journal comes to."""
    assert office.ledger is not None
    state = office.ledger.state
    now_ns = office.clock.now_ns()
    tenants: dict[LeaseId, TenantId] = {}
    since: dict[LeaseId, tuple[int, tuple[Part, ...]]] = {}
    used: dict[TenantId, int] = {}
    leased: dict[ResourceId, int] = {}
    ended: set[LeaseId] = set()

    def close(lease: LeaseId, at_ns: int) -> None:
        began_ns, parts = since.pop(lease)
        for part in parts:
            amount = part.millis * (at_ns - began_ns)
            used[tenants[lease]] = used.get(tenants[lease], 0) + amount
            leased[part.resource] = leased.get(part.resource, 0) + amount

    for now, events in office.disk.told():
        for event in events:
            match event:
                case ev.Queued():
                    tenants[event.lease.id] = event.lease.tenant
                case ev.Granted():
                    since[event.lease] = (now.ns, event.parts)
                case ev.Ungranted() | ev.Ending():
                    close(event.lease, now.ns)
                case ev.Rebased():
                    since = {lease: (began + event.shift_ns, parts) for lease, (began, parts) in since.items()}
                case ev.Ended():
                    if event.lease in ended:
                        fail("L12", f"{event.lease} ended twice")
                    ended.add(event.lease)
                case _:
                    pass
    for lease in tuple(since):
        close(lease, now_ns)
    for tenant, amount in used.items():
        books = state.used_milli_ns(tenant, now_ns)
        if books != amount:
            fail("S9", f"{tenant} used {amount} by the events and {books} by its meter")
    if sum(used.values()) != sum(leased.values()):
        fail("S9", "the sum over tenants is not the sum over devices")
    for lease in tenants:
        record = state.leases.get(lease)
        over = record is None or record.status is LeaseStatus.ENDED
        if over != (lease in ended):
            fail("L12", f"{lease} is {'over' if over else 'there'}, and {'ended' if lease in ended else 'did not end'}")
    lived, folded = state.snapshot(), fold(office.disk.policy, None, office.disk.history).snapshot()
    if lived != folded:
        fail("fold", "the state that lived is not what the whole journal comes to")
