"""The ledger and the second implementation of preemption take the same leases for the same requests, at the same time.

Sequences are generated: tenants in groups with weights, floors and ceilings, of all tiers, with reservations that
begin, lend and end meanwhile, for one GPU or two at once.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from sublet.errors import SubletError
from sublet.lease.states import LeaseStatus
from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Granted, Place, Refusal
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import GroupRecord, LeaseRecord, ReservationRecord, Span
from sublet.values import GroupId, LeaseId, RequestId, ReservationId, TenantId, Tier
from sublet.wire.orders import End
from tests.unit.office.ledger.bench import ANN, BEN, LOCAL, Bench, answers_to, device, gpu, inventory, seconds
from tests.unit.office.ledger.taking_model import Asked, Group, Reserved, TakingModel

SEQUENCES = int(os.environ.get("SUBLET_SEQUENCES", "40"))
STEPS = 50
APART_NS = 100
"""The model looks for victims a moment after a command, the ledger with it or after it."""
POLICY = Policy(
    notice_ns=seconds(7),
    notice_spot_ns=seconds(2),
    min_run_batch_ns=seconds(30),
    max_hold_ns=seconds(90),
    turn_least_ns=seconds(11),
    cool_down_ns=seconds(13),
    gang_patience_ns=seconds(25),
    reserved_clear_ns=seconds(5),
    reserved_keep_ns=seconds(20),
    half_life_ns=seconds(157),
    claim_window_ns=seconds(10),
    replan_every_ns=1,
)
GROUPS = ("default", "course", "lab")
TENANTS = {"ann": "course", "bea": "course", "cat": "lab", "dan": "lab", "eve": "default"}
VERBS = ("acquire",) * 6 + ("claim",) * 5 + ("renew",) * 3 + ("release", "release", "group", "reserve")


class Pair:
    """Both, side by side, with the same commands at the same moments."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        names = [f"gpu{index}" for index in range(rng.choice((2, 3, 4)))]
        self.bench = Bench(inventory("n1", *map(device, names)), policy=POLICY)
        self.bench.obedient = self.bench.is_empty = False
        for group in GROUPS[1:]:
            self.bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId(group))))
        for tenant, group in TENANTS.items():
            known = TenantId(tenant) in self.bench.state.tenants
            made = cmd.SetTenant if known else cmd.AddTenant
            more = {} if known else {"token_hash": tenant}
            self.bench.do(made(tenant=TenantId(tenant), group=GroupId(group), **more))  # type: ignore[arg-type]
        groups = {name: Group() for name in GROUPS}
        self.model = TakingModel(POLICY, names, groups, dict(TENANTS), now_ns=self.bench.now_ns)
        self.seen: Counter[str] = Counter()
        self.told: list[str] = []

    def run(self) -> None:
        for number in range(STEPS):
            self.pass_time(self.rng.randrange(1, 12_000_000_000))
            getattr(self, self.rng.choice(VERBS))(number)
            self.bench.now_ns += 1
            self.tick()
            self.compare()
        assert self.bench.state.snapshot() == self.bench.folded().snapshot()
        began = {
            str(event.reservation): event.ready for event in self.bench.events if isinstance(event, ev.ReservationBegan)
        }
        assert began == {one.id: one.ready for one in self.model.reservations if one.state not in ("ahead", "chosen")}

    # ---- time ----

    def pass_time(self, how_long_ns: int) -> None:
        """A tick at each moment that either of them asks for; the ledger never asks later than the model."""
        until_ns = self.bench.now_ns + how_long_ns
        while True:
            wake_ns, due_ns = self.bench.ledger.next_wake_ns(), self.model.next_due_ns()
            if due_ns is not None and due_ns <= until_ns:
                assert wake_ns is not None, "the ledger sleeps for good"
                assert wake_ns <= due_ns, f"the ledger sleeps to {wake_ns}, and {due_ns} is a moment"
            if wake_ns is None or wake_ns > until_ns:
                break
            self.bench.now_ns = max(self.bench.now_ns, wake_ns)
            self.tick()
            self.compare()
        self.bench.now_ns = max(self.bench.now_ns, until_ns)

    def tick(self) -> None:
        self.model.now_ns = self.bench.now_ns
        self.bench.do(cmd.Tick())
        self.looked()
        self.model.tick()
        while self.bench.unsent:
            order = self.bench.unsent.pop(0)
            for report in answers_to(order, self.bench.ledger.node_of, empty=False):
                self.bench.now_ns += 1
                self.model.now_ns = self.bench.now_ns
                self.bench.report(report)
                self.looked()
                if isinstance(order, End):
                    self.model.torn_down(self.named(order.lease))
                else:
                    self.model.settle()

    # ---- commands ----

    def acquire(self, number: int) -> None:
        rng, wait_s = self.rng, self.rng.choice((None, None, None, 0, 40))
        asked = Asked(
            id=f"L{number}",
            tenant=rng.choice(list(TENANTS)),
            gpus=rng.choice((1, 1, 1, 2)),
            tier=rng.choice((Tier.INTERACTIVE, Tier.INTERACTIVE, Tier.BATCH, Tier.SPOT)),
            ttl_ns=seconds(rng.choice((60, 200, 1000))),
            asked_ns=self.bench.now_ns,
            wait_until_ns=None if wait_s is None else self.bench.now_ns + seconds(wait_s),
            arrival=number,
        )
        command = cmd.Acquire(
            tenant=TenantId(asked.tenant),
            lease=LeaseId(asked.id),
            request_id=RequestId(f"r{number}"),
            wants=(gpu(count=asked.gpus),),
            ttl_ns=asked.ttl_ns,
            tier=asked.tier,
            wait_ns=None if wait_s is None else seconds(wait_s),
        )
        self.same(f"{asked.tenant} asks {asked.id}: {asked.gpus} {asked.tier} wait={wait_s}", command)
        self.answered(self.model.acquire(asked, wait=wait_s != 0))

    def claim(self, number: int) -> None:
        if lease := self.pick("granted"):
            self.same(f"claim {lease.id}", cmd.Claim(tenant=TenantId(lease.tenant), lease=LeaseId(lease.id)))
            self.answered(self.model.claim(lease))

    def renew(self, number: int) -> None:
        if lease := self.pick("active", "noticed"):
            real = self.real(lease)
            assert real.epoch is not None
            self.same(f"renew {lease.id}", cmd.Renew(tenant=real.tenant, lease=real.id, epoch=real.epoch))
            self.answered(self.model.renew(lease))

    def release(self, number: int) -> None:
        if lease := self.pick("active", "noticed", "granted", "queued"):
            self.same(f"release {lease.id}", cmd.Release(tenant=TenantId(lease.tenant), lease=LeaseId(lease.id)))
            self.model.release(lease)

    def group(self, number: int) -> None:
        """Another weight, floor and ceiling, where they go together with what there is."""
        name, rng = self.rng.choice(GROUPS), self.rng
        group = Group(rng.choice((1, 1, 2, 5)), rng.choice((0, 1, 2)), rng.choice((None, None, 2, 3)))
        record = GroupRecord(id=GroupId(name), weight=group.weight, floor=group.floor, ceiling=group.ceiling)
        self.same(f"{record}", cmd.SetGroup(group=record))
        if not isinstance(self.answer, SubletError):
            self.model.set_group(name, group)

    def reserve(self, number: int) -> None:
        name, rng = f"r{number}", self.rng
        start_ns = self.bench.now_ns + rng.randrange(1, 40_000_000_000)
        end_ns = start_ns + rng.randrange(5_000_000_000, 90_000_000_000)
        made = Reserved(name, rng.choice(GROUPS), rng.choice((1, 1, 2)), start_ns, end_ns)
        ahead_ns = self.bench.now.wall_ns - self.bench.now_ns
        span = Span(start_ns + ahead_ns, end_ns + ahead_ns)
        record = ReservationRecord(id=ReservationId(name), group=GroupId(made.group), gpus=made.gpus, spans=(span,))
        self.same(f"{made}", cmd.SetReservation(reservation=record))
        if not isinstance(self.answer, SubletError):
            self.model.add(made)

    # ---- looking ----

    def same(self, what: str, command: cmd.Command) -> None:
        self.told.append(f"{self.bench.now_ns} {what}")
        self.model.now_ns = self.bench.now_ns
        self.answer = self.bench.do(command).answer
        self.looked()

    def looked(self) -> None:
        self.model.looked_ns = max(0, self.bench.ledger._schedule._looked_at_ns)

    def answered(self, expected: str) -> None:
        match self.answer:
            case Granted():
                said = "granted"
            case Place():
                said = "queued"
            case Refusal(code=code):
                said = f"refused {code}"
            case _:
                said = "error"
        assert said == expected, f"the ledger says {self.answer}, the model {expected}"

    def real(self, lease: Asked) -> LeaseRecord:
        return self.bench.lease(lease.id)

    def named(self, lease_id: str) -> Asked:
        return next(lease for lease in self.model.leases if lease.id == lease_id)

    def pick(self, *statuses: str) -> Asked | None:
        found = [lease for lease in self.model.leases if lease.status in statuses]
        return self.rng.choice(found) if found else None

    def compare(self) -> None:
        places = {lease.id: place for place, lease in enumerate(self.model.line(), 1)}
        for lease in self.model.leases:
            real = self.real(lease)
            assert str(real.status) == lease.status, f"{lease.id} is {real.status}, in the model {lease}"
            assert [part.resource for part in real.promise] == lease.promise, f"{lease.id}: what it is promised"
            assert set(real.victims) == set(lease.victims), f"{lease.id}: who leaves for it"
            if lease.status in ("granted", "active", "noticed"):
                assert [part.resource for part in real.parts] == lease.has, f"{lease.id}: what it has"
            if lease.status == "noticed":
                assert real.notice is not None
                by_floor = "within the floor" in real.notice.detail
                self.seen["reservation" if lease.reservation else "floor" if by_floor else lease.why] += 1
                assert str(real.notice.reason) == lease.why
                assert (real.notice.beneficiary or "", real.notice.reservation or "") == (
                    lease.beneficiary,
                    lease.reservation,
                )
                assert abs(real.notice.take_at_ns - lease.take_at_ns) <= APART_NS, f"{lease.id}: when it leaves"
                lease.take_at_ns = real.notice.take_at_ns
            if lease.status == "queued":
                place = self.bench.ledger.place_of(real.id, self.bench.now)
                assert place is not None
                assert place.position == places[lease.id], f"{lease.id}: its place"
            if lease.end:
                assert real.end is not None
                assert str(real.end.reason) == lease.end, f"{lease.id}: why it ended"
        reserved = {str(name): list(one.resources) for name, one in self.bench.state.books.reserved.items()}
        assert reserved == {
            one.id: sorted(one.chosen) for one in self.model.reservations if one.state not in ("ahead", "over")
        }


KINDS = {"floor", "reservation", "preempted", "fair_share"}


@pytest.mark.parametrize("block", range(4))
def test_both_take_the_same_leases(block: int) -> None:
    """And in each block leases are taken for every reason."""
    seen: Counter[str] = Counter()
    for number in range(SEQUENCES // 4):
        seed = block * 1_000_000 + number
        pair = Pair(random.Random(seed))
        try:
            pair.run()
        except AssertionError as error:
            story = "\n".join(pair.told[-14:])
            raise AssertionError(f"seed {seed} at {pair.bench.now_ns}: {error}\n{story}") from error
        seen.update(pair.seen)
    assert seen.keys() == KINDS


# ---- what the comparison found

FOUND_SEEDS = {
    747: "time has put a newcomer behind a patient request since the queue was last looked at",
    4_000_031: "of two that are promised something, the one that was asked for later was promised it first",
    2_000_352: "another request of the group uses up the ceiling after a promise",
}


@pytest.mark.parametrize("seed", FOUND_SEEDS, ids=str)
def test_both_take_the_same_leases_in_sequences_that_were_found_to_differ(seed: int) -> None:
    """Each was found among many thousands; what was wrong stands beside it."""
    Pair(random.Random(seed)).run()


def test_a_promise_above_the_ceiling_is_dropped_at_once_and_its_victim_stays() -> None:
    """Ann is promised two devices, the ceiling of her group. Then another request of the group is granted one of its
    own. Before, her victim had notice for nothing until the queue was looked at again."""
    bench = Bench(gpus=3, policy=FOUND)
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("lab"), ceiling=2)))
    for tenant in (ANN, BEN):
        bench.do(cmd.SetTenant(tenant=tenant, group=GroupId("lab")))
    both = bench.granted(gpu(count=2), tenant=LOCAL, ttl_s=FULL_S)
    third = bench.granted(tenant=LOCAL, ttl_s=FULL_S)
    for_two = bench.queued(gpu(count=2), tenant=ANN)
    batch = bench.queued(tenant=BEN, tier=Tier.BATCH)
    bench.wait(601)
    assert bench.lease(for_two.id).victims == (both.id,)
    bench.release(third)
    assert bench.lease(batch.id).status is LeaseStatus.GRANTED
    assert not bench.lease(for_two.id).promise
    assert bench.lease(both.id).status is LeaseStatus.ACTIVE


FOUND = Policy(max_hold_ns=seconds(600), gang_patience_ns=seconds(60), min_run_batch_ns=seconds(100))
FULL_S = 86_000.0


def test_what_was_kept_for_a_request_that_leaves_the_queue_is_open_at_once() -> None:
    """Ann's second request waits in vain for her own lease, and keeps the node; Ben may take it once she withdraws."""
    bench = Bench(gpus=1, policy=FOUND)
    bench.granted(tenant=ANN, ttl_s=FULL_S, tier=Tier.BATCH)
    patient = bench.queued(tenant=ANN, tier=Tier.BATCH)
    bench.wait(650)
    other = bench.queued(tenant=BEN, tier=Tier.BATCH)
    bench.wait(5)
    assert not bench.lease(other.id).promise
    bench.release(patient)
    bench.wait(1)
    assert bench.lease(other.id).promise


def test_what_was_kept_for_a_request_that_is_promised_a_device_is_open_to_others() -> None:
    """Both GPUs may be taken from the same moment on: for the patient request, and a moment later for the next one."""
    bench = Bench(gpus=2, policy=FOUND)
    for _ in range(2):
        bench.granted(tenant=LOCAL, ttl_s=FULL_S, tier=Tier.BATCH)
    patient = bench.queued(tenant=ANN, tier=Tier.BATCH)
    bench.wait(590)
    other = bench.queued(tenant=BEN, tier=Tier.BATCH)
    bench.wait(10)
    assert bench.lease(patient.id).promise
    bench.wait(1)
    assert bench.lease(other.id).promise


def test_a_request_for_two_is_looked_at_as_soon_as_one_device_is_being_cleared() -> None:
    """Notice for the second device runs while the first is cleared. Before, it was given then only if a request of the
    group waited whose lease ended, and else a teardown later."""
    bench = Bench(gpus=2, policy=FOUND)
    bench.do(cmd.SetGroup(group=GroupRecord(id=GroupId("lab"))))
    bench.do(cmd.SetTenant(tenant=BEN, group=GroupId("lab")))
    spot = bench.granted(tenant=LOCAL, ttl_s=FULL_S, tier=Tier.SPOT)
    held = bench.granted(tenant=BEN, ttl_s=FULL_S)
    both = bench.queued(gpu(count=2), tenant=ANN)
    bench.wait(5)
    assert not bench.lease(both.id).promise
    bench.obedient = False
    bench.release(held)
    bench.wait(1)
    assert bench.lease(held.id).status is LeaseStatus.ENDING
    assert bench.lease(both.id).victims == (spot.id,)


def test_a_request_that_goes_before_a_patient_one_has_what_is_free_at_once() -> None:
    """Ann has waited for both GPUs for longer than the patience, and one is free. Ben has used less than she has, so he
    goes before her. Before, he was told to wait, and granted it a moment later; and refused where he would not wait."""
    bench = Bench(gpus=2, policy=FOUND)
    used = bench.granted(tenant=ANN, ttl_s=FULL_S)
    bench.wait(300)
    bench.granted(tenant=LOCAL, ttl_s=FULL_S)
    bench.release(used)
    both = bench.queued(gpu(count=2), tenant=ANN)
    bench.wait(61)
    bench.refused(tenant=ANN, wait_s=0)
    first = bench.granted(tenant=BEN, wait_s=0)
    bench.release(first)
    assert bench.lease(both.id).status is LeaseStatus.QUEUED
