"""What the in-memory agent does beyond the contract: clocks apart, leftovers, offices that do not know."""

from __future__ import annotations

import pytest

from sublet.errors import LeaseExpired, LeaseNotActive, LeaseRevoked
from sublet.lease.retransmit import Repeats
from sublet.lease_end import EndReason
from sublet.testing import HeldClock, preempt
from sublet.testing.machine import FaultName, Faults, Machine
from sublet.testing.memory import MemoryAgent
from sublet.testing.pretended import Timings
from sublet.values import (
    GIB,
    NS_PER_S,
    Epoch,
    Exclusivity,
    Kind,
    LeaseId,
    NodeId,
    ResourceId,
    TenantId,
)
from sublet.wire.orders import (
    Device,
    End,
    EndedHere,
    Failed,
    Grant,
    Held,
    Inventory,
    NotHeld,
    Notify,
    Part,
    Report,
    TornDown,
    Verify,
)

GPU, CPU = ResourceId("n/gpu"), ResourceId("n/cpu")
INVENTORY = Inventory(
    node=NodeId("n"),
    domain="n",
    devices=(
        Device(id=GPU, kind=Kind.GPU, capacity=16 * GIB),
        Device(id=CPU, kind=Kind.CPU, capacity=8),
    ),
)
ALICE, BOB = TenantId("alice"), TenantId("bob")
A, B, C = LeaseId("a"), LeaseId("b"), LeaseId("c")
EXCLUSIVE = Part(resource=GPU, kind=Kind.GPU, amount=16 * GIB, exclusivity=Exclusivity.SESSION)


def shared(gib: int) -> Part:
    return Part(resource=GPU, kind=Kind.GPU, amount=gib * GIB, exclusivity=Exclusivity.SHARED)


class Rig:
    """An agent on a held clock, and what it said."""

    def __init__(self, *, same_clock: bool = True, timings: Timings | None = None) -> None:
        self.clock, self.faults, self.reports = HeldClock(), Faults(), list[Report]()
        self.machine = Machine(INVENTORY)
        self.agent = MemoryAgent(
            INVENTORY,
            report=self.reports.append,
            clock=self.clock,
            same_clock=same_clock,
            timings=timings,
            faults=self.faults,
            machine=self.machine,
        )

    def grant(
        self,
        lease: LeaseId,
        n: int,
        *parts: Part,
        tenant: TenantId = ALICE,
        ttl_s: int = 60,
        incarnation: int | None = None,
    ) -> None:
        ttl_ns = ttl_s * NS_PER_S
        order = Grant(
            lease=lease,
            epoch=Epoch(incarnation or 1, n),
            number=1,
            tenant=tenant,
            parts=parts or (EXCLUSIVE,),
            deadline_ns=self.clock.now_ns() + ttl_ns,
            ttl_ns=ttl_ns,
        )
        self.agent.send(order, incarnation=incarnation)

    def end(self, lease: LeaseId, n: int, *parts: Part, incarnation: int | None = None) -> None:
        order = End(
            lease=lease,
            epoch=Epoch(incarnation or 1, n),
            number=9,
            parts=parts or (EXCLUSIVE,),
            reason=EndReason.PREEMPTED,
            grace_ns=0,
        )
        self.agent.send(order, incarnation=incarnation)

    def pass_time(self, seconds: int) -> None:
        for _ in range(10 * seconds):
            self.clock.advance(0.1)
            self.agent.tick(self.clock.now_ns())

    def said(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]


def test_without_delays_a_release_is_verified_within_the_call() -> None:
    """Nothing to wait for: the office can free the slice in the same turn."""
    rig = Rig()
    rig.grant(A, 1)
    rig.agent.touch(A, Epoch(1, 1))
    rig.end(A, 1)
    assert [type(report) for report in rig.reports] == [Held, TornDown]
    assert rig.machine.residents(GPU) == ()


def test_an_agent_on_another_clock_counts_from_the_arrival() -> None:
    """The office's instants mean nothing here; what remains does."""
    rig = Rig(same_clock=False)
    rig.agent.send(
        Grant(
            lease=A,
            epoch=Epoch(1, 1),
            number=1,
            tenant=ALICE,
            parts=(EXCLUSIVE,),
            deadline_ns=1,
            ttl_ns=5 * NS_PER_S,
        )
    )
    rig.clock.advance(4.9)
    rig.agent.check(A, Epoch(1, 1), rig.clock.now_ns())
    rig.clock.advance(0.2)
    with pytest.raises(LeaseExpired):
        rig.agent.check(A, Epoch(1, 1), rig.clock.now_ns())


def test_shared_slices_fit_beside_each_other_up_to_what_there_is() -> None:
    """Two of six GiB run together; a third waits until one of them is verified gone, and is then held unasked."""
    rig = Rig(timings=Timings(kill_ns=NS_PER_S))
    for n, lease in enumerate((A, B, C), start=1):
        rig.grant(lease, n, shared(6))
    assert [report.lease for report in rig.reports if isinstance(report, Held)] == [A, B]
    rig.agent.touch(A, Epoch(1, 1))
    rig.agent.touch(B, Epoch(1, 2))
    rig.end(A, 1, shared(6))
    assert len(rig.said(Held)) == 2
    rig.pass_time(2)
    assert [report.lease for report in rig.reports if isinstance(report, Held)] == [A, B, C]
    rig.agent.touch(C, Epoch(1, 3))
    assert not rig.machine.overlaps


def test_the_end_of_one_shared_lease_leaves_its_neighbour_at_work() -> None:
    """Only the lease that ended leaves the device."""
    rig = Rig()
    rig.grant(A, 1, shared(4))
    rig.grant(B, 2, shared(4), tenant=ALICE)
    rig.agent.touch(A, Epoch(1, 1))
    rig.agent.touch(B, Epoch(1, 2))
    rig.end(A, 1, shared(4))
    assert [resident.lease for resident in rig.machine.residents(GPU)] == [B]
    rig.agent.touch(B, Epoch(1, 2))


def test_a_restarted_agent_clears_what_was_left_before_it_grants_anything_there() -> None:
    """The office may be a restored one that never heard of the lease whose memory is still full."""
    rig = Rig(timings=Timings(verify_ns=NS_PER_S))
    rig.grant(A, 1)
    rig.agent.touch(A, Epoch(1, 1))
    rig.agent.restart()
    rig.reports.clear()
    rig.grant(B, 2, tenant=BOB)
    assert not rig.reports, "the memory of A is not cleared yet"
    rig.pass_time(2)
    assert [report.lease for report in rig.reports if isinstance(report, Held)] == [B]
    rig.agent.touch(B, Epoch(1, 2))
    assert not rig.machine.overlaps


def test_a_lease_that_outlives_a_restart_gets_its_own_resource_back_clean() -> None:
    """Its guests died with the agent; the same grant is held again once their memory is cleared."""
    rig = Rig(timings=Timings(verify_ns=NS_PER_S))
    rig.grant(A, 1, shared(4))
    rig.agent.touch(A, Epoch(1, 1))
    rig.agent.restart()
    rig.grant(A, 1, shared(4))
    with pytest.raises(LeaseNotActive):
        rig.agent.touch(A, Epoch(1, 1))
    rig.pass_time(2)
    rig.agent.touch(A, Epoch(1, 1))


def test_an_office_that_never_heard_of_an_unclean_device_hears_of_it_with_certainty() -> None:
    """The grant is refused, and the end that follows is answered by a failure, as often as it is asked."""
    rig = Rig()
    rig.grant(A, 1, incarnation=1)
    rig.agent.touch(A, Epoch(1, 1))
    rig.faults.turn_on(FaultName.SCRUB_FAILURE)
    rig.end(A, 1, incarnation=1)
    assert rig.said(Failed)
    rig.reports.clear()
    rig.grant(B, 1, tenant=BOB, incarnation=2)
    assert [type(report) for report in rig.reports] == [NotHeld]
    for _ in range(2):
        rig.reports.clear()
        rig.end(B, 1, incarnation=2)
        failed = rig.reports[0]
        assert isinstance(failed, Failed)
        assert (failed.lease, failed.hard) == (B, True)
        assert "left by lease a" in failed.detail
    rig.faults.turn_off(FaultName.SCRUB_FAILURE)
    rig.reports.clear()
    rig.grant(C, 2, tenant=BOB, incarnation=2)
    assert [type(report) for report in rig.reports] == [Held], "it was told, so a grant says that somebody vouched"


def test_an_office_that_does_not_know_who_left_a_device_unclean_hears_of_it_when_it_had_time_to_answer() -> None:
    """Liveness seed 10185: restored, it never answered that a lease had ended which its backup does not know. For an
    hour every grant on that device was refused, and nothing was quarantined."""
    rig = Rig()
    rig.grant(A, 1)
    rig.agent.touch(A, Epoch(1, 1))
    rig.faults.turn_on(FaultName.SCRUB_FAILURE)
    rig.faults.turn_on(FaultName.DEVICE_FAULT, GPU)
    rig.pass_time(1)
    rig.faults.turn_off(FaultName.DEVICE_FAULT, GPU)
    assert [report.lease for report in rig.said(EndedHere) if isinstance(report, EndedHere)] == [A]
    rig.pass_time(1)
    for wait_s, answer in ((0, TornDown), (20, Failed)):  # in between the office may yet say what becomes of that lease
        rig.pass_time(wait_s)
        rig.reports.clear()
        rig.grant(B, 1 + wait_s, tenant=BOB, incarnation=2)
        assert [type(report) for report in rig.reports] == [NotHeld]
        rig.reports.clear()
        rig.end(B, 1 + wait_s, incarnation=2)
        assert [type(report) for report in rig.reports] == [answer]
    failed = rig.reports[0]
    assert isinstance(failed, Failed)
    assert (failed.lease, failed.hard) == (B, True)
    assert "left by lease a" in failed.detail


def test_an_office_that_knows_only_an_older_epoch_of_what_is_left_gets_its_answer() -> None:
    """Liveness seed 8601: a restored office ended the lease under the epoch of its backup, and was never answered."""
    rig = Rig(timings=Timings(attempts=1))
    rig.grant(A, 9, shared(4))
    rig.agent.touch(A, Epoch(1, 9))
    rig.faults.turn_on(FaultName.STUCK_TEARDOWN)
    rig.agent.restart()
    rig.agent.tick(rig.clock.now_ns())
    rig.end(A, 5, shared(4))
    failed = rig.reports[-1]
    assert isinstance(failed, Failed)
    assert failed.epoch == Epoch(1, 9), "what is said holds up to this epoch"
    look_again = Verify(lease=A, epoch=Epoch(1, 5), parts=(shared(4),))
    rig.agent.send(look_again)
    rig.faults.turn_off(FaultName.STUCK_TEARDOWN)
    rig.agent.send(look_again)
    assert [type(report) for report in rig.reports[-2:]] == [Failed, TornDown], "the newer guest was there at first"


def test_a_restored_office_ends_what_was_granted_after_its_backup_as_well() -> None:
    """It knows an older epoch, and other hardware; everything under that name goes, and is looked at."""
    rig = Rig()
    rig.grant(A, 9, shared(4), incarnation=1)
    rig.agent.touch(A, Epoch(1, 9))
    core = Part(resource=CPU, kind=Kind.CPU, amount=1)
    order = End(
        lease=A, epoch=Epoch(1, 5), number=3, parts=(core,), reason=EndReason.OPERATOR, grace_ns=0, detail="restored"
    )
    rig.agent.send(order, incarnation=2)
    with pytest.raises(LeaseRevoked):
        rig.agent.touch(A, Epoch(1, 9))
    rig.pass_time(1)
    assert rig.machine.residents(GPU) == ()
    assert isinstance(rig.reports[-1], TornDown)


def test_a_late_end_of_an_older_epoch_leaves_the_newer_grant_of_the_same_office_alone() -> None:
    """The request went back into the line and came again; a copy of its first end arrives now."""
    rig = Rig()
    rig.grant(A, 9, shared(4), incarnation=1)
    rig.end(A, 5, shared(4), incarnation=1)
    rig.agent.touch(A, Epoch(1, 9))


def test_an_operators_word_clears_memory_but_not_a_guest_that_is_seen() -> None:
    """After a failure that the office knows of, a new grant means that somebody vouched; the agent still looks."""
    rig = Rig(timings=Timings(attempts=1))
    rig.grant(A, 1)
    rig.agent.touch(A, Epoch(1, 1))
    rig.faults.turn_on(FaultName.STUCK_TEARDOWN)
    rig.end(A, 1)
    assert rig.said(Failed)
    rig.grant(B, 2, tenant=BOB)
    assert rig.said(NotHeld), "the guest is still there"
    rig.machine.leave(GPU, A)
    rig.grant(C, 3, tenant=BOB)
    rig.agent.touch(C, Epoch(1, 3))
    assert not rig.machine.overlaps


def test_a_soft_failure_comes_clean_by_a_later_look_and_frees_the_resource() -> None:
    """Mere lateness."""
    rig = Rig(timings=Timings(attempts=2))
    rig.grant(A, 1)
    rig.agent.touch(A, Epoch(1, 1))
    rig.faults.turn_on(FaultName.STUCK_TEARDOWN)
    rig.end(A, 1)
    rig.pass_time(3)
    rig.faults.turn_off(FaultName.STUCK_TEARDOWN)
    rig.agent.send(Verify(lease=A, epoch=Epoch(1, 1), parts=(EXCLUSIVE,)))
    assert isinstance(rig.reports[-1], TornDown)
    assert rig.agent.teardowns() == ()


def test_an_end_that_nobody_answers_is_not_said_for_ever() -> None:
    """An office that was silent for an hour does not know the lease; the agent forgets it, and stays small."""
    rig = Rig()
    rig.grant(A, 1, ttl_s=1)
    rig.clock.advance(2)
    rig.agent.tick(rig.clock.now_ns())
    assert rig.said(EndedHere)
    rig.clock.advance("2h")
    assert rig.agent.tick(rig.clock.now_ns()) is None
    assert rig.agent.teardowns() == ()


def test_repeated_reports_grow_apart() -> None:
    """One second, two, four, up to a minute."""
    repeats: Repeats[str] = Repeats()
    repeats.repeat("x", EndedHere(node=NodeId("n"), lease=A, epoch=Epoch(1, 1), reason=EndReason.EXPIRED), 0)
    said = [second for second in range(300) if list(repeats.due(second * NS_PER_S))]
    assert said == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]
    repeats.stop("x")
    assert repeats.next_ns() is None
    assert "x" not in repeats


def test_notices_are_seen_by_guests_until_they_are_taken_back() -> None:
    """The newest word counts, and nothing is left of it after the end."""
    rig = Rig()
    rig.grant(A, 1)
    told = Notify(lease=A, epoch=Epoch(1, 1), number=2, reason=EndReason.PREEMPTED, take_at_ns=1 << 60)
    rig.agent.send(told)
    assert rig.agent.notice(A) == told
    spared = Notify(lease=A, epoch=Epoch(1, 1), number=3, reason=EndReason.PREEMPTED, take_at_ns=None)
    rig.agent.send(spared)
    assert rig.agent.notice(A) is None
    rig.agent.send(told)
    assert rig.agent.notice(A) is None, "that was older"


def test_preempt_rehearses_the_loss_of_a_lease() -> None:
    """The lease is fenced, its guest gone, and the office will learn of it as of any other end."""
    rig = Rig()
    rig.grant(A, 1)
    rig.agent.touch(A, Epoch(1, 1))
    live = rig.agent.fence.get(A)
    assert live is not None
    preempt(rig.agent, live, rig.clock)
    with pytest.raises(LeaseRevoked):
        rig.agent.touch(A, Epoch(1, 1))
    assert rig.machine.residents(GPU) == ()


def test_the_machine_names_every_way_in_which_two_can_meet() -> None:
    """The account against which agents are judged: exclusive neighbours, too much in use, leftovers."""
    machine = Machine(INVENTORY)
    machine.touch(A, ALICE, Epoch(1, 1), (EXCLUSIVE,), 0)
    machine.touch(B, BOB, Epoch(1, 2), (shared(1),), 0)
    assert "exclusive" in machine.overlaps[0]
    machine.rebooted()
    machine.overlaps.clear()
    machine.touch(A, ALICE, Epoch(1, 3), (shared(10),), 0)
    machine.touch(B, BOB, Epoch(1, 4), (shared(10),), 0)
    assert "in use" in machine.overlaps[0]
    machine.rebooted()
    machine.overlaps.clear()
    machine.touch(A, ALICE, Epoch(1, 5), (EXCLUSIVE,), 0)
    machine.leave(GPU, A)
    machine.touch(B, BOB, Epoch(1, 6), (EXCLUSIVE,), 0)
    assert "left behind" in machine.overlaps[0]


def test_faults_are_named_and_concern_one_resource_or_all() -> None:
    """A name that is not in the list is an error, not a fault that never happens."""
    faults = Faults()
    faults.turn_on(FaultName.DEAF_GUEST, GPU)
    assert faults.is_on(FaultName.DEAF_GUEST, GPU)
    assert not faults.is_on(FaultName.DEAF_GUEST, CPU)
    faults.turn_on(FaultName.DEAF_GUEST)
    assert faults.is_on(FaultName.DEAF_GUEST, CPU)
    assert faults.take(FaultName.DEAF_GUEST)
    assert not faults.take(FaultName.DEAF_GUEST)
    with pytest.raises(ValueError, match="sabotage"):
        faults.turn_on("sabotage")  # type: ignore[arg-type]


def test_ten_thousand_expiries_at_once_do_not_cost_their_square() -> None:
    """All of them are ended in one tick, and a renewal that comes right after is refused or held at once."""
    rig = Rig()
    inventory = Inventory(node=NodeId("n"), domain="n", devices=(Device(id=CPU, kind=Kind.CPU, capacity=20_000),))
    rig.agent = MemoryAgent(inventory, report=rig.reports.append, clock=rig.clock)
    core = Part(resource=CPU, kind=Kind.CPU, amount=1)
    for n in range(1, 10_001):
        rig.grant(LeaseId(f"l{n}"), n, core, ttl_s=10)
    rig.clock.advance(11)
    rig.agent.tick(rig.clock.now_ns())
    assert len(rig.said(EndedHere)) == 10_000
    assert len(rig.agent.fence) == 0
    for n in range(1, 10_001):
        rig.end(LeaseId(f"l{n}"), n, core)
        rig.grant(LeaseId(f"m{n}"), 10_000 + n, core, ttl_s=10)
    assert len(rig.said(TornDown)) == 10_000
    assert len(rig.agent.fence) == 10_000
