"""Volumes as the law of a node keeps them: named, removed when nobody has them, one lease's at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from sublet.lease import node_volumes
from sublet.lease.node_volumes import VOLUMES_PER_REPORT
from sublet.lease_end import EndReason
from sublet.values import GIB, NS_PER_S, Epoch, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.orders import (
    Device,
    End,
    EndedHere,
    Grant,
    Held,
    NotHeld,
    Part,
    RemoveVolume,
    StoredVolume,
    TornDown,
    VolumeRef,
    VolumeRemoved,
    Volumes,
)
from tests.unit.lease.test_node import ALICE, INVENTORY, A, B, Rig, S

T = TypeVar("T")
DISK = ResourceId("n/block")
PART = Part(resource=DISK, kind=Kind.BLOCK, amount=2 * GIB)
CKPT = VolumeRef(tenant=ALICE, name="ckpt")
WITH_DISK = replace(INVENTORY, devices=(*INVENTORY.devices, Device(id=DISK, kind=Kind.BLOCK, capacity=8 * GIB)))


def said(r: Rig, kind: type[T]) -> list[T]:
    return [report for report in r.reports if isinstance(report, kind)]


def stored(ref: VolumeRef = CKPT, n: int = 1) -> StoredVolume:
    return StoredVolume(volume=ref, resource=DISK, size=PART.amount, lease=A, epoch=Epoch(1, n))


def rig(*there: StoredVolume) -> Rig:
    made = Rig()
    made.node.inventory_changed(WITH_DISK)
    made.paper.disk = {one.volume: one for one in there}
    return made


def grant(r: Rig, lease: LeaseId = A, n: int = 1, *, kept: bool = False, name: str = "ckpt", ttl_s: int = 60) -> None:
    deadline_ns = r.now_ns + ttl_s * S
    order = Grant(
        lease=lease,
        epoch=Epoch(1, n),
        number=1,
        tenant=ALICE,
        parts=(PART,),
        deadline_ns=deadline_ns,
        ttl_ns=ttl_s * S,
        name=name,
        kept=kept,
    )
    r.node.send(order, now_ns=r.now_ns)


def end(r: Rig, lease: LeaseId = A, n: int = 1, volume: VolumeRef | None = CKPT) -> None:
    order = End(
        lease=lease,
        epoch=Epoch(1, n),
        number=9,
        parts=(PART,),
        reason=EndReason.RELEASED,
        grace_ns=0,
        volume=volume,
    )
    r.node.send(order, now_ns=r.now_ns)


def remove(r: Rig, n: int = 1, ref: VolumeRef = CKPT) -> None:
    order = RemoveVolume(lease=A, epoch=Epoch(1, n), number=0, volume=ref, parts=(PART,))
    r.node.send(order, now_ns=r.now_ns)


def test_the_end_of_a_lease_says_whether_its_volume_is_kept_although_the_grant_was_never_seen() -> None:
    for there, kept in ((stored(), True), (None, False)):
        r = rig(*([there] if there else []))
        end(r)
        assert [report.kept for report in said(r, TornDown)] == [kept]


def test_a_lease_that_ended_by_itself_is_asked_about_its_volume_later() -> None:
    """It came clean before the office knew; asked, it looks again."""
    r = rig(stored())
    grant(r, ttl_s=5)
    r.at(6)
    assert {report.reason for report in said(r, EndedHere)} == {EndReason.EXPIRED}
    assert not said(r, TornDown)
    end(r)
    assert [report.kept for report in said(r, TornDown)] == [True]


def test_a_grant_that_goes_on_with_what_is_not_there_is_not_held() -> None:
    """And one that is granted again, after its supervisor came back, is held as long as there is anything."""
    r = rig()
    grant(r, kept=True)
    assert [report.reason for report in said(r, NotHeld)] == [EndReason.DEVICE_LOST]
    r = rig(stored())
    grant(r, kept=True, n=2)
    assert said(r, Held)


def test_removing_is_begun_and_seen_to_be_over_and_said_each_time_it_is_asked() -> None:
    r = rig(stored())
    r.paper.removes = False
    remove(r)
    assert not said(r, VolumeRemoved)
    r.paper.removes = True
    r.at(1)
    assert [(report.volume, report.epoch) for report in said(r, VolumeRemoved)] == [(CKPT, Epoch(1, 1))]
    assert not r.paper.disk
    remove(r)
    remove(r, ref=VolumeRef(tenant=TenantId("nobody"), name="never-was"))
    assert len(said(r, VolumeRemoved)) == 3


def test_what_is_being_removed_wakes_the_node_until_it_is_gone() -> None:
    r = rig(stored())
    r.paper.removes = False
    remove(r)
    assert r.node.tick(0) == node_volumes.AGAIN_NS
    r.paper.removes = True
    assert r.node.tick(node_volumes.AGAIN_NS) is None


def test_an_old_order_takes_nothing_from_who_had_the_volume_since() -> None:
    """Neither from a lease that has it, used or not yet used, nor from what such a lease left."""
    r = rig(stored(n=1))
    grant(r, B, 5, kept=True)
    remove(r, 1)
    assert CKPT in r.paper.disk
    assert len(said(r, VolumeRemoved)) == 1
    end(r, B, 5)
    r.paper.disk[CKPT] = stored(n=5)
    remove(r, 1)
    assert CKPT in r.paper.disk
    assert len(said(r, VolumeRemoved)) == 2
    remove(r, 5)
    assert CKPT not in r.paper.disk


def test_an_old_order_that_comes_again_takes_nothing_from_a_lease_that_no_guest_used() -> None:
    """The disk has the older epoch then. A restored office was told that the order is over, and has the volume in
    its books again; the order's second copy comes after the end of the lease. Found by the simulation, seed 920."""
    r = rig(stored(n=1))
    grant(r, B, 5, kept=True)
    remove(r, 1)
    end(r, B, 5)
    remove(r, 1)
    assert CKPT in r.paper.disk
    assert len(said(r, VolumeRemoved)) == 2
    remove(r, 6)
    assert CKPT not in r.paper.disk


def test_a_volume_that_is_in_use_by_an_older_lease_is_removed_when_that_is_over() -> None:
    r = rig(stored(n=1))
    grant(r, A, 1)
    remove(r, 9)
    r.at(3)
    assert CKPT in r.paper.disk
    assert not said(r, VolumeRemoved)
    end(r)
    r.at(4)
    assert said(r, VolumeRemoved)
    assert CKPT not in r.paper.disk


def test_a_newer_lease_of_a_volume_gets_it_when_the_older_is_verified_to_be_off_it() -> None:
    """As after a restore: the office has forgotten who is in it."""
    r = rig(stored(n=1))
    grant(r, A, 1)
    r.settle(A, DISK)
    r.paper.dies = False
    grant(r, B, 2, kept=True)
    r.node.tick(0)
    assert [report.reason for report in said(r, EndedHere)] == [EndReason.OPERATOR]
    assert B not in [report.lease for report in said(r, Held)]
    r.paper.dies = True
    r.at(2)
    assert [report.lease for report in said(r, Held)] == [A, B]


def test_a_volume_of_another_name_or_tenant_is_in_nobodys_way() -> None:
    r = rig()
    grant(r, A, 1)
    grant(r, B, 2, name="other")
    assert [report.lease for report in said(r, Held)] == [A, B]
    assert not said(r, EndedHere)


def test_an_office_that_comes_hears_of_everything_that_is_kept_and_again_from_time_to_time() -> None:
    """But not of what a lease has."""
    r = rig(stored(), stored(VolumeRef(tenant=ALICE, name="held")))
    r.paper.had = {VolumeRef(tenant=ALICE, name="held")}
    r.node.resend_reports(0)
    (named,) = said(r, Volumes)
    assert (named.volumes, named.is_all) == ((stored(),), True)
    assert r.node.tick(0) == node_volumes.SAY_AGAIN_NS
    r.node.tick(node_volumes.SAY_AGAIN_NS)
    assert len(said(r, Volumes)) == 2


@pytest.mark.parametrize("count", [0, 1, VOLUMES_PER_REPORT, VOLUMES_PER_REPORT + 1])
def test_very_many_volumes_are_said_in_several_messages_of_which_none_claims_to_be_all(count: int) -> None:
    r = rig(*(stored(VolumeRef(tenant=ALICE, name=f"v{n}")) for n in range(count)))
    r.node.resend_reports(0)
    named = said(r, Volumes)
    assert sum(len(report.volumes) for report in named) == count
    assert [report.is_all for report in named] == [count <= VOLUMES_PER_REPORT] * len(named)
    assert NS_PER_S == S


def test_volumes_that_cannot_be_listed_now_are_not_reported_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An office that was told of none would take each for lost."""
    r = rig(stored())
    monkeypatch.setattr(r.paper, "volumes", lambda: None)
    r.node.resend_reports(0)
    assert said(r, Volumes) == []
    assert r.node.tick(0) == node_volumes.SAY_LATER_NS
    monkeypatch.undo()
    r.node.tick(node_volumes.SAY_LATER_NS)
    (named,) = said(r, Volumes)
    assert (named.volumes, named.is_all) == ((stored(),), True)
