"""Parking as the law of a node has it: the steps, the races between them, and what a restart finds.

The law is the real one, over hardware that keeps its own account of who is where (``testing.memory``).
"""

from __future__ import annotations

import pytest

from sublet.errors import LeaseEnded, LeaseNotActive, StaleEpoch
from sublet.lease_end import EndReason
from sublet.testing import HeldClock
from sublet.testing.machine import FaultName
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
    Extend,
    Failed,
    Grant,
    Held,
    Inventory,
    NotHeld,
    Notify,
    Parkable,
    Parking,
    Part,
    Report,
    Resumed,
    TornDown,
)

S = NS_PER_S
GPU, OTHER, MEMORY = ResourceId("n/gpu0"), ResourceId("n/gpu1"), ResourceId("n/memory")
INVENTORY = Inventory(
    node=NodeId("n"),
    domain="n",
    devices=(
        Device(id=GPU, kind=Kind.GPU, capacity=16 * GIB),
        Device(id=OTHER, kind=Kind.GPU, capacity=16 * GIB),
        Device(id=MEMORY, kind=Kind.MEMORY, capacity=8 * GIB),
    ),
)
A, B, UNDER, AGAIN = LeaseId("a"), LeaseId("b"), LeaseId("under"), LeaseId("again")
ALICE, BOB = TenantId("alice"), TenantId("bob")
HERE = Parking(lease=UNDER, epoch=Epoch(1, 2))


def gpu(resource: ResourceId = GPU) -> Part:
    return Part(resource=resource, kind=Kind.GPU, amount=16 * GIB, millis=1000, exclusivity=Exclusivity.SESSION)


class Rig:
    """One agent, an office in short, and who was heard."""

    def __init__(self, park_s: float = 1) -> None:
        self.clock = HeldClock()
        self.reports: list[Report] = []
        timings = Timings(park_ns=round(park_s * S), leave_ns=S // 2, attempts=3)
        self.agent = MemoryAgent(INVENTORY, report=self.reports.append, clock=self.clock, timings=timings)

    def grant(
        self,
        lease: LeaseId,
        n: int,
        part: Part,
        *,
        ttl_s: float = 600,
        parked: bool = False,
        resume: Parking | None = None,
        tenant: TenantId = ALICE,
    ) -> None:
        ttl_ns = round(ttl_s * S)
        self.agent.send(
            Grant(
                lease=lease,
                epoch=Epoch(1, n),
                number=n,
                tenant=tenant,
                parts=(part,),
                deadline_ns=self.clock.now_ns() + ttl_ns,
                ttl_ns=ttl_ns,
                parked=parked,
                resume=resume,
            )
        )

    def end(self, lease: LeaseId, n: int, part: Part, *, park: Parking | None = None, grace_s: float = 5) -> None:
        self.agent.send(
            End(
                lease=lease,
                epoch=Epoch(1, n),
                number=99,
                parts=(part,),
                reason=EndReason.PREEMPTED,
                grace_ns=round(grace_s * S),
                park=park,
            )
        )

    def wait(self, seconds: float) -> None:
        """Time passes; the agent does what it asked to be woken for."""
        until_ns = self.clock.now_ns() + round(seconds * S)
        while (wake_ns := self.agent.tick(self.clock.now_ns())) is not None and wake_ns <= until_ns:
            self.clock.advance(max(0, wake_ns - self.clock.now_ns()) / S)
        self.clock.advance((until_ns - self.clock.now_ns()) / S)
        self.agent.tick(self.clock.now_ns())
        assert not self.agent.machine.overlaps

    def said(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]

    def at_work(self, *, memory_gib: int = 2) -> None:
        """A works on the device, and a parking lease is there for it."""
        self.grant(A, 1, gpu())
        self.agent.touch(A, Epoch(1, 1))
        self.grant(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=memory_gib * GIB))
        self.reports.clear()

    def parked(self) -> None:
        """And A is parked there."""
        self.at_work()
        self.end(A, 1, gpu(), park=HERE)
        self.wait(2)
        assert self.lies_there()
        self.reports.clear()

    def lies_there(self) -> bool:
        return bool(self.agent.machine.parked(UNDER))

    def on(self, resource: ResourceId) -> list[LeaseId]:
        return [resident.lease for resident in self.agent.machine.residents(resource)]


def notify(rig: Rig, number: int = 2, reason: EndReason = EndReason.PREEMPTED, take_at: int | None = 1 << 60) -> None:
    rig.agent.send(Notify(lease=A, epoch=Epoch(1, 1), number=number, reason=reason, take_at_ns=take_at))


# ---- 1: notice ----


def test_with_a_notice_it_is_said_what_the_guests_need() -> None:
    """Again and again, since a word may be lost; until the lease is spared."""
    rig = Rig()
    rig.at_work()
    notify(rig)
    rig.wait(10)
    found = rig.said(Parkable)
    assert len(found) >= 3
    assert {(one.lease, one.amount, one.why) for one in found if isinstance(one, Parkable)} == {(A, GIB, "")}
    notify(rig, 3, take_at=None)
    rig.reports.clear()
    rig.wait(60)
    assert not rig.said(Parkable)


def test_once_devices_are_counted_anew_it_is_said_once_more() -> None:
    """And nothing of leases that nobody is to take."""
    rig = Rig()
    rig.at_work()
    rig.agent._law.counted(rig.clock.now_ns())
    rig.wait(0.1)
    assert not rig.said(Parkable)
    notify(rig)
    rig.wait(0.1)
    rig.reports.clear()
    rig.agent._law.counted(rig.clock.now_ns())
    rig.wait(0.1)
    assert len(rig.said(Parkable)) == 1


def test_a_lease_without_guests_needs_nothing() -> None:
    """The agent says so, for then nothing is lost by its end; and an operator's word is final."""
    rig = Rig()
    rig.grant(A, 1, gpu())
    notify(rig)
    rig.wait(5)
    assert {(one.amount, one.why) for one in rig.said(Parkable) if isinstance(one, Parkable)} == {(0, "")}
    rig.agent.touch(A, Epoch(1, 1))
    rig.reports.clear()
    rig.wait(60)
    newest = rig.said(Parkable)[-1]
    assert isinstance(newest, Parkable)
    assert newest.amount == GIB, "a guest that came after the notice counts, too"
    rig = Rig()
    rig.at_work()
    notify(rig, reason=EndReason.OPERATOR)
    rig.wait(5)
    assert not rig.said(Parkable)


def test_who_cannot_be_parked_says_why() -> None:
    """In words that reach the person."""
    rig = Rig()
    rig.at_work()
    rig.agent.faults.turn_on(FaultName.FAILED_PARK, GPU)
    notify(rig)
    rig.wait(1)
    first = rig.said(Parkable)[0]
    assert isinstance(first, Parkable)
    assert (first.amount, first.why) == (0, "its driver cannot copy what it has")


# ---- 2: suspend ----


def test_a_device_is_torn_down_when_its_guest_is_off_it_and_not_before() -> None:
    """From the order on nothing of the lease is let through; the guest lives."""
    rig = Rig()
    rig.at_work()
    rig.end(A, 1, gpu(), park=HERE)
    with pytest.raises(LeaseEnded):
        rig.agent.touch(A, Epoch(1, 1))
    rig.wait(0.5)
    assert not rig.said(TornDown)
    assert rig.on(GPU) == [A]
    rig.wait(1)
    (torn,) = rig.said(TornDown)
    assert isinstance(torn, TornDown)
    assert torn.parked
    assert rig.on(GPU) == []
    assert rig.on(MEMORY) == [UNDER]


def test_the_order_given_again_parks_nobody_twice() -> None:
    """While it is being done, and after; each time that it is asked the answer is the same."""
    rig = Rig()
    rig.at_work()
    for _ in range(3):
        rig.end(A, 1, gpu(), park=HERE)
    rig.wait(2)
    rig.end(A, 1, gpu(), park=HERE)
    rig.wait(1)
    assert [isinstance(torn, TornDown) and torn.parked for torn in rig.said(TornDown)] == [True, True]
    assert len(rig.agent.machine.parked(UNDER)) == 1


@pytest.mark.parametrize("why", ["no parking lease", "its epoch is older", "not enough memory", "cannot be copied"])
def test_who_cannot_be_parked_ends_like_anybody_else(why: str) -> None:
    """And the office hears that nobody was parked."""
    rig = Rig()
    rig.at_work(memory_gib=2)
    park = HERE
    if why == "no parking lease":
        park = Parking(lease=LeaseId("nobody"), epoch=Epoch(1, 2))
    elif why == "its epoch is older":
        park = Parking(lease=UNDER, epoch=Epoch(1, 9))
    elif why == "cannot be copied":
        rig.agent.faults.turn_on(FaultName.FAILED_PARK, GPU)
    else:
        small = Rig()
        small.grant(A, 1, gpu())
        small.agent.touch(A, Epoch(1, 1))
        small.grant(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=GIB // 2))
        rig = small
    rig.end(A, 1, gpu(), park=park)
    rig.wait(3)
    (torn,) = rig.said(TornDown)
    assert isinstance(torn, TornDown)
    assert not torn.parked
    assert rig.on(GPU) == []
    assert not rig.lies_there()


def test_a_park_that_fails_half_way_ends_the_guest_within_its_grace() -> None:
    """It turns out only then; nothing is left on the device."""
    rig = Rig()
    rig.at_work()
    rig.end(A, 1, gpu(), park=HERE)
    rig.agent.faults.turn_on(FaultName.FAILED_PARK, GPU)
    rig.wait(2)
    (torn,) = rig.said(TornDown)
    assert isinstance(torn, TornDown)
    assert not torn.parked
    assert rig.agent.fence.get(UNDER) is not None, "the office ends it"


def test_a_park_that_takes_too_long_is_an_end() -> None:
    """The device does not wait for ever."""
    rig = Rig(park_s=60)
    rig.at_work()
    rig.end(A, 1, gpu(), park=HERE, grace_s=3)
    rig.wait(4)
    (torn,) = rig.said(TornDown)
    assert isinstance(torn, TornDown)
    assert not torn.parked


def test_who_cannot_be_moved_at_all_is_given_up() -> None:
    """Neither parked nor ended: the device is nobody's, as ever."""
    rig = Rig()
    rig.at_work()
    rig.agent.faults.turn_on(FaultName.STUCK_TEARDOWN, GPU)
    rig.end(A, 1, gpu(), park=HERE, grace_s=2)
    rig.wait(60)
    assert rig.said(Failed)
    assert not rig.said(TornDown)
    assert rig.on(GPU) == [A]


def test_the_parking_lease_may_end_while_its_guest_is_on_the_way() -> None:
    """Then nobody comes, and nobody stays."""
    rig = Rig()
    rig.at_work()
    rig.end(A, 1, gpu(), park=HERE)
    rig.end(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB), grace_s=0)
    rig.wait(4)
    assert not rig.lies_there()
    assert rig.on(GPU) == []
    assert {torn.lease for torn in rig.said(TornDown) if isinstance(torn, TornDown)} == {A, UNDER}


def test_a_guest_is_parked_while_another_lease_is_torn_down_beside_it() -> None:
    """Each of them comes to its own end."""
    rig = Rig()
    rig.grant(B, 3, gpu(OTHER), tenant=BOB)
    rig.agent.touch(B, Epoch(1, 3))
    rig.at_work()
    rig.end(B, 3, gpu(OTHER))
    rig.end(A, 1, gpu(), park=HERE)
    rig.wait(4)
    assert rig.lies_there()
    assert rig.on(GPU) == rig.on(OTHER) == []
    assert {torn.lease for torn in rig.said(TornDown) if isinstance(torn, TornDown)} == {A, B}


# ---- 3: parked ----


def test_what_is_parked_acts_under_no_epoch() -> None:
    """Not that of its device, which is over; another tenant may be there by now."""
    rig = Rig()
    rig.parked()
    with pytest.raises(LeaseEnded):
        rig.agent.touch(A, Epoch(1, 1))
    rig.grant(B, 3, gpu(), tenant=BOB)
    rig.agent.touch(B, Epoch(1, 3))
    assert rig.on(GPU) == [B]


def test_the_end_of_the_parking_lease_is_the_end_of_what_is_parked() -> None:
    """By its deadline, with nobody's help; or by an order."""
    for by_order in (False, True):
        rig = Rig()
        rig.parked()
        if by_order:
            rig.end(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB), grace_s=0)
        else:
            rig.wait(700)
            assert [(one.lease, one.reason) for one in rig.said(EndedHere)[:1] if isinstance(one, EndedHere)] == [
                (UNDER, EndReason.EXPIRED)
            ]
        rig.wait(5)
        assert not rig.lies_there()
        assert rig.on(MEMORY) == []


def test_what_is_parked_is_set_going_before_its_time_runs_out_and_leaves() -> None:
    """The lead before the deadline: at least the grace. Nobody goes on with what is on its way out."""
    rig = Rig()
    rig.parked()
    rig.wait(592)
    assert not rig.agent.machine.set_going
    rig.wait(2)
    assert rig.agent.machine.set_going == {UNDER}
    rig.reports.clear()
    rig.grant(AGAIN, 3, gpu(OTHER), resume=HERE)
    (refused,) = rig.said(NotHeld)
    assert isinstance(refused, NotHeld)
    assert (refused.reason, "leaves" in refused.detail) == (EndReason.REFUSED, True)
    rig.wait(10)
    ends = [one for one in rig.said(EndedHere) if isinstance(one, EndedHere)]
    assert {(one.lease, one.reason) for one in ends} == {(UNDER, EndReason.EXPIRED)}
    assert rig.on(MEMORY) == []


def test_who_leaves_is_not_called_back_by_an_extension() -> None:
    """It was told; and when it has gone, so has the lease. Its time did not run out, and that is not said of it."""
    rig = Rig()
    rig.parked()
    rig.wait(595)
    ttl_ns = 2000 * S
    order = Extend(lease=UNDER, epoch=Epoch(1, 2), number=9, deadline_ns=rig.clock.now_ns() + ttl_ns, ttl_ns=ttl_ns)
    rig.agent.send(order)
    rig.reports.clear()
    rig.grant(AGAIN, 3, gpu(OTHER), resume=HERE)
    assert rig.said(NotHeld)
    rig.wait(10)
    assert {one.reason for one in rig.said(EndedHere) if isinstance(one, EndedHere)} == {EndReason.GUEST_FAILED}


def test_what_is_parked_has_as_long_to_save_as_it_needed_before() -> None:
    """One and a half times its last save, measured under the lease that was taken."""
    rig = Rig()
    rig.at_work()
    rig.agent._law.saved(A, 20 * S)
    rig.end(A, 1, gpu(), park=HERE)
    rig.wait(565)
    assert not rig.agent.machine.set_going
    rig.wait(10)
    assert rig.agent.machine.set_going == {UNDER}


@pytest.mark.parametrize("grace_s", [0, 3])
def test_an_order_that_leaves_time_sets_it_going(grace_s: float) -> None:
    rig = Rig()
    rig.parked()
    rig.end(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB), grace_s=grace_s)
    assert rig.agent.machine.set_going == ({UNDER} if grace_s else set())
    rig.wait(5)
    assert rig.on(MEMORY) == []


@pytest.mark.parametrize(("save_s", "gone_s"), [(0, 3), (20, 30), (1000, 590)])
def test_an_order_waits_for_as_long_as_saving_takes(save_s: float, gone_s: float) -> None:
    """It is the first that what is parked hears of its end; but never beyond the deadline that the lease had."""
    rig = Rig()
    rig.at_work()
    rig.agent._law.saved(A, round(save_s * S))
    rig.end(A, 1, gpu(), park=HERE)
    rig.wait(10)
    rig.agent.faults.turn_on(FaultName.DEAF_GUEST)
    rig.end(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB), grace_s=3)
    rig.wait(gone_s - 1)
    assert rig.on(MEMORY) == [UNDER]
    rig.wait(2)
    assert rig.on(MEMORY) == []


def test_an_extension_keeps_it() -> None:
    """Like any lease."""
    rig = Rig()
    rig.parked()
    ttl_ns = 2000 * S
    order = Extend(lease=UNDER, epoch=Epoch(1, 2), number=9, deadline_ns=rig.clock.now_ns() + ttl_ns, ttl_ns=ttl_ns)
    rig.agent.send(order)
    rig.wait(1000)
    assert rig.lies_there()


def test_a_parked_guest_that_dies_ends_its_parking_lease() -> None:
    """Nobody pays for an empty place, and nobody is told that he may go on."""
    rig = Rig()
    rig.parked()
    rig.agent.machine.leave(MEMORY, UNDER)
    rig.wait(1)
    ends = [one for one in rig.said(EndedHere) if isinstance(one, EndedHere)]
    assert {(one.lease, one.reason) for one in ends} == {(UNDER, EndReason.GUEST_FAILED)}


def test_a_new_agent_holds_no_parking_lease_of_which_it_has_no_guest() -> None:
    """They died with the one before, and the office is told."""
    rig = Rig()
    rig.parked()
    rig.agent.restart()
    rig.grant(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB), parked=True)
    rig.wait(1)
    (refused,) = rig.said(NotHeld)
    assert isinstance(refused, NotHeld)
    assert refused.reason is EndReason.NODE_LOST


# ---- 4: resume ----


def test_what_was_parked_goes_on_under_the_new_lease_and_no_other() -> None:
    """One step: before it the parking lease is live, after it the new one is."""
    rig = Rig()
    rig.parked()
    rig.grant(AGAIN, 3, gpu(OTHER), resume=HERE)
    assert rig.on(OTHER) == [AGAIN]
    assert not rig.lies_there()
    assert rig.agent.fence.get(UNDER) is None
    assert isinstance(rig.said(Held)[0], Held)
    rig.agent.touch(AGAIN, Epoch(1, 3))
    rig.wait(10)
    assert len(rig.said(Resumed)) > 2, "until it is answered"
    rig.end(UNDER, 2, Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB), grace_s=0)
    rig.wait(2)
    rig.reports.clear()
    rig.wait(200)
    assert not rig.said(Resumed)
    assert rig.on(OTHER) == [AGAIN]


def test_a_parking_lease_that_is_over_is_nobodys() -> None:
    """Whose it was, and what it was called, is not said of it any more."""
    rig = Rig()
    rig.parked()
    assert rig.agent._law.tenants.keys() == {UNDER}
    rig.grant(AGAIN, 3, gpu(), resume=HERE)
    assert rig.agent._law.tenants.keys() == {AGAIN}


def test_the_grant_given_again_resumes_nobody_twice() -> None:
    """The first answer may have been lost."""
    rig = Rig()
    rig.parked()
    rig.grant(AGAIN, 3, gpu(), resume=HERE)
    rig.grant(AGAIN, 3, gpu(), resume=HERE)
    assert len(rig.said(Held)) == 2
    assert not rig.said(NotHeld)


@pytest.mark.parametrize("why", ["over", "old epoch", "nobody there", "never known"])
def test_a_grant_that_finds_nobody_is_not_held(why: str) -> None:
    """Nothing runs under it, so nobody may believe that something does."""
    rig = Rig()
    rig.parked()
    under = HERE
    memory = Part(resource=MEMORY, kind=Kind.MEMORY, amount=2 * GIB)
    if why == "over":
        rig.end(UNDER, 2, memory, grace_s=0)
        rig.wait(2)
    elif why == "old epoch":
        rig.grant(UNDER, 3, memory)
    elif why == "nobody there":
        rig.grant(LeaseId("empty"), 4, Part(resource=MEMORY, kind=Kind.MEMORY, amount=GIB))
        under = Parking(lease=LeaseId("empty"), epoch=Epoch(1, 4))
    else:
        under = Parking(lease=LeaseId("never"), epoch=Epoch(1, 2))
    rig.reports.clear()
    rig.grant(AGAIN, 9, gpu(), resume=under)
    (refused,) = rig.said(NotHeld)
    assert isinstance(refused, NotHeld)
    assert (refused.reason, refused.lease) == (EndReason.REFUSED, AGAIN)
    assert UNDER in refused.detail or "under" in refused.detail or "over" in refused.detail
    with pytest.raises(LeaseNotActive):
        rig.agent.touch(AGAIN, Epoch(1, 9))


def test_it_waits_until_the_device_is_free_and_is_looked_at_again_then() -> None:
    """The parking lease may run out meanwhile."""
    rig = Rig()
    rig.parked()
    rig.agent.machine.touch(B, BOB, Epoch(1, 3), (gpu(),), 0)  # left by somebody the office does not know
    rig.grant(B, 3, gpu(), tenant=BOB)
    rig.grant(AGAIN, 4, gpu(), resume=HERE)
    assert not rig.said(NotHeld)
    rig.wait(3)
    assert rig.on(GPU) == [AGAIN]


def test_only_the_newest_epoch_may_touch_what_went_on() -> None:
    """Neither the lease of before nor the parking lease."""
    rig = Rig()
    rig.parked()
    rig.grant(AGAIN, 3, gpu(), resume=HERE)
    for lease, n in ((A, 1), (UNDER, 2), (AGAIN, 2)):
        with pytest.raises((LeaseEnded, StaleEpoch)):
            rig.agent.touch(lease, Epoch(1, n))
    rig.agent.touch(AGAIN, Epoch(1, 3))
