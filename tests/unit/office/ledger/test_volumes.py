"""Volumes in the ledger: what they cost, who may have them, and a second account of them without any cleverness."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from sublet.errors import CapacityExceeded, InvalidRequest, NotFound, SubletError
from sublet.lease.states import LeaseStatus, SliceState, VolumeState
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, Place, Refusal
from sublet.office.ledger.checks import check_books
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import Quota
from sublet.office.ledger.state import Books, State
from sublet.values import GIB, Epoch, Kind, LeaseId, NodeId, ResourceId, TenantId
from sublet.wire.orders import (
    End,
    Grant,
    RemoveVolume,
    Saved,
    StoredVolume,
    TornDown,
    VolumeRef,
    VolumeRemoved,
    Volumes,
)
from tests.unit.office.ledger.bench import ANN, BEN, Bench, cores, device, disk, gpu, inventory, seconds

CKPT = VolumeRef(tenant=ANN, name="ckpt")
N1, BLOCK = NodeId("n1"), ResourceId("block")


def bench(gib: int = 10, **how: object) -> Bench:
    found = inventory("n1", device("block", Kind.BLOCK, capacity=gib * GIB), device("cpu", Kind.CPU), device("gpu0"))
    return Bench(found, **how)  # type: ignore[arg-type]


def kept(b: Bench, name: str = "ckpt", gib: float = 4) -> None:
    """A volume of ann's that nobody has."""
    b.release(b.granted(disk(gib), tenant=ANN, name=name))
    assert b.state.volumes[f"ann/{name}"].state is VolumeState.RETAINED


def test_every_end_of_a_named_lease_is_asked_about_its_volume() -> None:
    """Also that of a grant nobody claimed, and again after a restart."""
    b = bench()
    b.granted(disk(4), tenant=ANN, name="ckpt", ttl_s=10)
    b.obedient = False
    b.wait(11)
    (end,) = [order for order in b.unsent if isinstance(order, End)]
    assert (end.volume, end.parts[0].resource) == (CKPT, BLOCK)
    b.ledger = Ledger(b.policy, State.restore(b.state.snapshot()))
    b.unsent.clear()
    b.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
    assert [order.volume for order in b.unsent if isinstance(order, End)] == [CKPT]


def test_a_grant_that_goes_on_with_a_volume_says_so_and_one_that_makes_it_does_not() -> None:
    b = bench()
    kept(b)
    b.granted(disk(0), tenant=ANN, name="ckpt")
    assert [order.kept for order in b.sent if isinstance(order, Grant)] == [False, True]


def test_what_was_never_claimed_leaves_a_volume_as_it_was() -> None:
    """It waited in line until its turn came, and nobody was there: the volume is kept, with a new time."""
    b = bench()
    held = b.granted(disk(4), tenant=ANN, name="ckpt")
    b.obedient = False
    b.release(held)
    waiting = b.queued(disk(0), tenant=ANN, name="ckpt")
    b.obedient = True
    b.obey()
    assert b.lease(waiting.id).status is LeaseStatus.GRANTED
    b.wait(11)
    assert b.lease(waiting.id).status is LeaseStatus.ENDED
    assert b.state.volumes["ann/ckpt"].state is VolumeState.RETAINED


def test_a_request_for_a_volume_on_a_full_node_does_not_hold_up_one_for_another_volume() -> None:
    """They ask for the same and differ in nothing but the name, by which one goes to this node and one to that."""
    nodes = [
        inventory(f"n{n}", device(f"block{n}", Kind.BLOCK, capacity=8 * GIB), device(f"cpu{n}", Kind.CPU))
        for n in range(2)
    ]
    b = Bench(*nodes)
    found = {}
    for name in "ab":
        first = b.granted(disk(4), cores(8), tenant=ANN, name=name)
        found[first.node] = name
        b.release(first)
        b.granted(cores(8), tenant=BEN)  # so that the next volume is made on the other node
    assert len(found) == 2
    busy = {lease.node: lease for lease in b.state.leases.values() if lease.tenant == BEN and lease.end is None}
    waiting = {name: b.queued(cores(2), disk(0), tenant=ANN, name=name) for name in "ab"}
    [free] = [node for node, name in found.items() if name == "b"]
    b.release(busy[free])
    assert b.lease(waiting["b"].id).status is LeaseStatus.GRANTED
    assert b.lease(waiting["a"].id).status is LeaseStatus.QUEUED


def test_several_kinds_with_a_name_go_where_the_volume_is() -> None:
    nodes = [
        inventory(f"n{n}", device(f"block{n}", Kind.BLOCK, capacity=8 * GIB), device(f"cpu{n}", Kind.CPU))
        for n in range(3)
    ]
    b = Bench(*nodes)
    filler = b.granted(cores(8), tenant=BEN)
    first = b.granted(disk(4), cores(2), tenant=ANN, name="ckpt")
    assert first.node != filler.node
    b.release(first)
    b.release(filler)
    assert b.granted(cores(2), disk(0), tenant=ANN, name="ckpt").node == first.node


def test_while_its_node_is_full_otherwise_a_request_for_a_volume_waits_and_then_has_it() -> None:
    b = bench()
    kept(b)
    busy = b.granted(cores(8), tenant=BEN)
    waiting = b.queued(cores(4), disk(0), tenant=ANN, name="ckpt")
    b.release(busy)
    assert b.lease(waiting.id).status is LeaseStatus.GRANTED


def test_the_capacity_shrinks_and_a_volume_is_still_found() -> None:
    """The operator's disk became smaller: what is there is there."""
    b = bench(10)
    kept(b, gib=8)
    b.do(cmd.NodeUp(inventory=inventory("n1", device("block", Kind.BLOCK, capacity=2 * GIB), device("cpu", Kind.CPU))))
    assert b.refused(disk(1), tenant=BEN, wait_s=0).would_fit is None
    assert b.granted(disk(0), tenant=ANN, name="ckpt").parts[0].amount == 8 * GIB


def test_a_refusal_and_a_release_may_come_in_any_order_with_the_words_of_the_agent() -> None:
    """Late, doubled and old reports change nothing that is newer."""
    b = bench()
    kept(b)
    old = b.state.volumes["ann/ckpt"].epoch
    again = b.granted(disk(0), tenant=ANN, name="ckpt")
    torn = TornDown(node=N1, lease=LeaseId("L1"), epoch=old, resources=(BLOCK,), kept=False)
    for report in (torn, VolumeRemoved(node=N1, lease=LeaseId("L1"), epoch=old, volume=CKPT), Volumes(node=N1)):
        assert not b.report(report).events, report
    b.release(again)
    assert not b.report(torn).events
    assert not b.report(VolumeRemoved(node=N1, lease=again.id, epoch=Epoch(9, 9), volume=CKPT)).events
    assert b.state.volumes["ann/ckpt"].state is VolumeState.RETAINED


def test_what_is_removed_is_free_only_when_the_agent_of_its_node_has_said_so() -> None:
    b = bench()
    kept(b)
    b.obedient = False
    b.do(cmd.RemoveVolume(tenant=ANN, name="ckpt"))
    volume = b.state.volumes["ann/ckpt"]
    assert b.refused(disk(8), tenant=BEN, wait_s=0).would_fit == 6 * GIB
    for node, epoch in ((NodeId("n2"), volume.epoch), (N1, Epoch(0, 1))):
        b.report(VolumeRemoved(node=node, lease=volume.lease, epoch=epoch, volume=CKPT))
        assert b.state.volumes["ann/ckpt"].state is VolumeState.REMOVING
    b.at(1000 + 3)
    assert [type(order) for order in b.ledger.orders_due(b.now)] == [RemoveVolume]
    b.report(VolumeRemoved(node=N1, lease=volume.lease, epoch=volume.epoch, volume=CKPT))
    assert not b.state.volumes
    b.granted(disk(8), tenant=BEN)


def test_a_reboot_moves_the_end_of_the_retention_with_the_clock() -> None:
    b = bench(policy=Policy(retain_ns=seconds(100)))
    kept(b)
    b.wait(40)
    b.ledger = Ledger(b.policy, State.restore(b.state.snapshot()))
    last_ns, b.now_ns = b.now_ns, seconds(5)
    b.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-2", last_ns=last_ns))
    b.wait(55)
    assert "ann/ckpt" in b.state.volumes
    b.wait(10)
    assert not b.state.volumes


def test_what_was_saved_is_on_record_once() -> None:
    b = bench()
    lease = b.granted(gpu(), tenant=ANN)
    b.obedient = False
    b.release(lease)
    assert lease.epoch is not None
    report = TornDown(node=N1, lease=lease.id, epoch=lease.epoch, resources=(ResourceId("gpu0"),))
    saved = Saved(version=7, wall_ns=12, size=100, count=3, volume="ckpt")
    facts = [*b.report(replace(report, saved=saved)).events, *b.report(replace(report, saved=saved)).events]
    assert [event.saved for event in facts if isinstance(event, ev.Saved)] == [saved]
    assert b.lease(lease.id).saved_wall_ns == 12


def test_books_of_a_time_before_volumes_are_taken_up() -> None:
    """Their live leases have their volumes from the opening on; what they left on disk before is found by its agent."""
    b = bench()
    b.granted(disk(2), tenant=ANN, name="ckpt", lease="live")
    b.granted(disk(1), tenant=ANN)
    books = msgspec.json.decode(b.state.snapshot())
    del books["volumes"]
    for resource in books["resources"].values():
        for piece in resource["slices"].values():
            del piece["volume"]
    state = State(msgspec.json.decode(msgspec.json.encode(books), type=Books))
    check_books(state)
    b.ledger = Ledger(b.policy, state)
    b.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
    assert [(volume.key, volume.state, volume.lease) for volume in b.state.volumes.values()] == [
        ("ann/ckpt", VolumeState.LIVE, "live")
    ]
    old = VolumeRef(tenant=BEN, name="old")
    stored = StoredVolume(volume=old, resource=BLOCK, size=3 * GIB, lease=LeaseId("x"), epoch=Epoch(1, 1))
    b.report(Volumes(node=N1, volumes=(stored,)))
    assert b.granted(disk(0), tenant=BEN, name="old").parts[0].amount == 3 * GIB
    b.release(b.lease("live"))
    assert b.state.volumes["ann/ckpt"].state is VolumeState.RETAINED


@pytest.mark.parametrize("word", ["ann/../x", "", "Ünï", "a" * 64, "A"])
def test_what_an_agent_names_and_is_no_name_is_not_taken_into_the_books(word: str) -> None:
    b = bench()
    ref = VolumeRef(tenant=ANN, name=word)
    stored = StoredVolume(volume=ref, resource=BLOCK, size=GIB, lease=LeaseId("x"), epoch=Epoch(1, 1))
    for wrong in (
        stored,
        replace(stored, volume=CKPT, size=0),
        replace(stored, volume=CKPT, resource=ResourceId("gpu0")),
    ):
        assert not b.report(Volumes(node=N1, volumes=(wrong,))).events
    assert not b.report(Volumes(node=NodeId("n9"), volumes=(replace(stored, volume=CKPT),))).events


# ---- the second account ----


@dataclass
class Kept:
    size: int
    lease: str = ""
    until_s: float = 0


@dataclass
class Account:
    """Volumes without any cleverness: a list, looked through anew for every question. One node, an agent that obeys."""

    capacity: int
    quota: int
    retain_s: float
    volumes: dict[tuple[str, str], Kept] = field(default_factory=dict)
    plain: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Leases without a name: tenant and size."""

    def used(self, tenant: str | None = None) -> int:
        volumes = sum(kept.size for (whose, _), kept in self.volumes.items() if tenant in (None, whose))
        return volumes + sum(size for whose, size in self.plain.values() if tenant in (None, whose))

    def ask(self, tenant: str, lease: str, name: str | None, size: int) -> str:
        found = self.volumes.get((tenant, name)) if name is not None else None
        if found is None and not size:
            return "NotFound" if name is not None else "InvalidRequest"
        if found is not None:
            if size not in (0, found.size):
                return "InvalidRequest"
            if found.lease:
                return "refused capacity"
            found.lease = lease
            return "granted"
        if size > self.quota:
            return "refused quota"
        if self.used(tenant) + size > self.quota:
            return "refused quota" if size <= self.capacity else "refused too_big"
        if size > self.capacity:
            return "refused too_big"
        if self.used() + size > self.capacity:
            return "refused capacity"
        if name is None:
            self.plain[lease] = (tenant, size)
        else:
            self.volumes[tenant, name] = Kept(size, lease)
        return "granted"

    def release(self, lease: str, now_s: float, *, keeps: bool) -> None:
        self.plain.pop(lease, None)
        for key, kept in list(self.volumes.items()):
            if kept.lease == lease and keeps:
                kept.lease, kept.until_s = "", now_s + self.retain_s
            elif kept.lease == lease:
                del self.volumes[key]

    def give_up(self, tenant: str, name: str) -> str:
        found = self.volumes.get((tenant, name))
        if found is None:
            return "NotFound"
        if found.lease:
            return "InvalidRequest"
        del self.volumes[tenant, name]
        return "done"

    def passes(self, now_s: float) -> None:
        for key, kept in list(self.volumes.items()):
            if not kept.lease and kept.until_s <= now_s:
                del self.volumes[key]


def said(answer: object) -> str:
    match answer:
        case Granted():
            return "granted"
        case Refusal():
            return f"refused {answer.code}"
        case SubletError():
            return answer.kind
        case _:
            return "done"


@pytest.mark.parametrize("block", range(4))
def test_the_ledger_and_a_list_come_to_the_same(block: int) -> None:
    """Thousands of steps: every answer, every byte that is taken, everything that is kept."""
    for seed in range(block * 1000, block * 1000 + 25):
        source = random.Random(f"volumes/{seed}")
        quota = source.choice((3, 5, 20)) * GIB
        b = bench(6, policy=Policy(retain_ns=seconds(20)), quotas={t: Quota(block_bytes=quota) for t in (ANN, BEN)})
        account, held = Account(6 * GIB, quota, 20), list[tuple[TenantId, str]]()
        for step in range(60):
            tenant = source.choice((ANN, BEN))
            name: str | None
            match source.choice(("ask", "ask", "ask", "release", "release", "give up", "wait", "restart")):
                case "ask":
                    name, gib = source.choice((None, "a", "a", "b")), source.choice((0, 0, 1, 1, 2, 7))
                    lease = f"L{step}"
                    wants = (disk(gib),)
                    answer = said(b.ask(*wants, tenant=tenant, lease=lease, name=name, wait_s=0, ttl_s=10_000))
                    assert answer == account.ask(tenant, lease, name, gib * GIB), f"seed {seed}, step {step}"
                    if answer == "granted":
                        held.append((tenant, lease))
                case "release" if held:
                    whose, lease = held.pop(source.randrange(len(held)))
                    b.keeps = source.random() < 0.8
                    b.do(cmd.Release(tenant=whose, lease=LeaseId(lease)))
                    account.release(lease, b.now_ns / 1e9, keeps=b.keeps)
                case "give up":
                    name = source.choice("ab")
                    answer = said(b.do(cmd.RemoveVolume(tenant=tenant, name=name)).answer)
                    assert answer == account.give_up(tenant, name), f"seed {seed}, step {step}"
                case "restart":
                    b.ledger = Ledger(b.policy, State.restore(b.state.snapshot()))
                    b.do(cmd.OpenOffice(incarnation=1, clock_domain="boot-1"))
                case _:
                    b.wait(source.choice((1, 5, 19)))
                    account.passes(b.now_ns / 1e9)
            assert b.state.resources[BLOCK].used == account.used(), f"seed {seed}, step {step}"
            known = {volume.key: (volume.size, volume.state is VolumeState.LIVE) for volume in b.state.volumes.values()}
            assert known == {f"{t}/{n}": (k.size, bool(k.lease)) for (t, n), k in account.volumes.items()}
        assert b.state.snapshot() == b.folded().snapshot()


def test_a_second_request_in_the_line_goes_on_when_the_first_is_done() -> None:
    b = bench()
    held = b.granted(disk(4), tenant=ANN, name="ckpt")
    b.obedient = False
    b.release(held)
    first, second = (b.queued(disk(0), tenant=ANN, name="ckpt") for _ in range(2))
    b.obedient = True
    b.obey()
    b.claim(b.lease(first.id))
    place = b.ledger.answer_for(b.lease(second.id), b.now)
    assert isinstance(place, Place)
    assert f"in use by lease {first.id}" in place.reason
    b.release(b.lease(first.id))
    assert b.lease(second.id).status is LeaseStatus.GRANTED


def test_given_up_while_it_is_put_away_it_is_asked_for_again() -> None:
    b = bench()
    held = b.granted(disk(4), tenant=ANN, name="ckpt")
    b.obedient = False
    b.release(held)
    answer = b.do(cmd.RemoveVolume(tenant=ANN, name="ckpt")).answer
    assert isinstance(answer, CapacityExceeded)
    assert isinstance(b.do(cmd.RemoveVolume(tenant=BEN, name="ckpt")).answer, NotFound)
    assert isinstance(b.ask(disk(4), tenant=ANN, name="ckpt", retain_s=-1), InvalidRequest)
    assert b.state.resources[BLOCK].slices[str(held.epoch)].state is SliceState.TEARDOWN
