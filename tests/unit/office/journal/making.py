"""A home with its anchors, and facts that look like an office's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sublet.lease_end import EndReason
from sublet.office.journal import backup
from sublet.office.journal.files import Anchors
from sublet.office.journal.journal import Journal
from sublet.office.ledger import events as ev
from sublet.office.ledger.records import EndRecord, LeaseRecord, Now, Want
from sublet.values import (
    GIB,
    Epoch,
    Kind,
    LeaseId,
    NodeId,
    RequestId,
    ResourceId,
    TenantId,
    Tier,
)
from sublet.wire.orders import Device, Inventory, Part

WALL_NS: Final = 1_700_000_000_000_000_000
GPU: Final = ResourceId("n/gpu0")
OPENED: Final = ev.OfficeOpened(incarnation=1, clock_domain="boot-1")


class Place:
    """Where one journal lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.anchors = root / "anchors"
        self.db = self.home / "journal.db"

    def open(self) -> Journal:
        return Journal.open(self.home, wall_ns=WALL_NS, anchors=self.anchors)

    def restore(self, source: Path) -> int:
        return backup.restore(source, self.home, wall_ns=WALL_NS, anchors=self.anchors)

    def anchor_path(self, journal: Journal) -> Path:
        return Anchors(self.anchors, self.home.resolve()).path(journal.id)


def at(ns: int) -> Now:
    return Now(ns, WALL_NS + ns)


def joined(*devices: Device) -> ev.NodeJoined:
    return ev.NodeJoined(inventory=Inventory(node=NodeId("n"), domain="d", devices=devices))


def queued(name: str, tenant: str = "ada", labels: dict[str, str] | None = None) -> ev.Queued:
    return ev.Queued(
        lease=LeaseRecord(
            id=LeaseId(name),
            tenant=TenantId(tenant),
            request_id=RequestId(f"r-{name}"),
            fingerprint="f",
            wants=(Want(kind=Kind.GPU, amount=GIB),),
            ttl_ns=300,
            tier=Tier.INTERACTIVE,
            arrival=1,
            asked_at_ns=1,
            asked_wall_ns=1,
            labels=labels or {},
        )
    )


def part(resource: ResourceId = GPU, kind: Kind = Kind.GPU, amount: int = GIB, millis: int = 1000) -> Part:
    return Part(resource=resource, kind=kind, amount=amount, millis=millis if kind is Kind.GPU else 0)


def granted(name: str, n: int, *parts: Part) -> ev.Granted:
    return ev.Granted(
        lease=LeaseId(name), node=NodeId("n"), epoch=Epoch(1, n), parts=parts or (part(),), claim_by_ns=99
    )


def renewed(name: str, deadline_ns: int = 7) -> ev.Renewed:
    return ev.Renewed(lease=LeaseId(name), deadline_ns=deadline_ns, number=1)


def end_record(ns: int, reason: EndReason = EndReason.RELEASED) -> EndRecord:
    return EndRecord(reason=reason, at_ns=ns, wall_ns=WALL_NS + ns)


def ending(name: str, ns: int, busy_ns: int = 0) -> ev.Ending:
    return ev.Ending(lease=LeaseId(name), end=end_record(ns), number=2, busy_ns=busy_ns)


def ended(name: str, ns: int) -> ev.Ended:
    return ev.Ended(lease=LeaseId(name), end=end_record(ns))
