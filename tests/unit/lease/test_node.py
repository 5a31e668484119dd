"""The law of a node, over hardware that only writes down what it was asked to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublet.errors import LeaseExpired, LeaseNotActive, LeaseRevoked
from sublet.lease import node
from sublet.lease.fence import is_exclusive
from sublet.lease.hardware import Clean, Leftover, Need, NotYet, Unclean, Verdict
from sublet.lease.node import Node
from sublet.lease.teardown import Bounds, TeardownPhase
from sublet.lease_end import EndReason
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
    Fault,
    Grant,
    Held,
    Inventory,
    NotHeld,
    Notify,
    Parking,
    Part,
    Report,
    StoredVolume,
    TornDown,
    Verify,
    VolumeRef,
)

S = NS_PER_S
GPU, CPU = ResourceId("n/gpu"), ResourceId("n/cpu")
A, B = LeaseId("a"), LeaseId("b")
ALICE = TenantId("alice")
ONE = Part(resource=GPU, kind=Kind.GPU, amount=GIB, exclusivity=Exclusivity.SESSION)
CORE = Part(resource=CPU, kind=Kind.CPU, amount=1)
INVENTORY = Inventory(
    node=NodeId("n"),
    domain="n",
    devices=(Device(id=GPU, kind=Kind.GPU, capacity=16 * GIB), Device(id=CPU, kind=Kind.CPU, capacity=8)),
)


class Paper:
    """Hardware on paper: what was asked, who is there, what a look finds."""

    def __init__(self, *left: Leftover) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.there = {(one.part.resource, one.lease) for one in left}
        self.dies = True
        """Whether who is killed is gone."""
        self.kill_takes_ns: int | None = None
        self.verdicts: list[Verdict] = []
        """What the next looks find; then it is clean."""
        self.wrong: dict[ResourceId, str] = {}
        self.disk: dict[VolumeRef, StoredVolume] = {}
        self.had: set[VolumeRef] = set()
        """Volumes whose folder somebody has."""
        self.removes = True
        self._left = left

    def names(self) -> list[object]:
        return [name for name, *_ in self.asked]

    def grant(self, lease: LeaseId, tenant: TenantId, epoch: Epoch, parts: tuple[Part, ...], deadline_ns: int) -> None:
        self.asked.append(("grant", lease, tenant, epoch.n, deadline_ns))

    def extend(self, lease: LeaseId, epoch: Epoch, deadline_ns: int) -> None:
        self.asked.append(("extend", lease, epoch.n, deadline_ns))

    def notice(self, lease: LeaseId, notice: Notify | None) -> None:
        self.asked.append(("notice", lease, None if notice is None else notice.take_at_ns))

    def warn(self, lease: LeaseId, epoch: Epoch, deadline_ns: int) -> None:
        self.asked.append(("warn", lease, epoch.n, deadline_ns))

    def cancel_warning(self, lease: LeaseId, epoch: Epoch) -> None:
        self.asked.append(("spare", lease, epoch.n))

    def announce_end(
        self, lease: LeaseId, epoch: Epoch, reason: EndReason, kill_at_ns: int, detail: str, now_ns: int
    ) -> None:
        self.asked.append(("tell", lease, epoch.n, reason, kill_at_ns))

    def kill(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int) -> int | None:
        self.asked.append(("kill", resource, lease, epoch.n, now_ns))
        if self.dies:
            self.there.discard((resource, lease))
        return None if self.kill_takes_ns is None else now_ns + self.kill_takes_ns

    def is_there(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> bool:
        return (resource, lease) in self.there

    def why_alive(self, resource: ResourceId, lease: LeaseId, epoch: Epoch) -> str:
        return ""

    def verify(self, resource: ResourceId, lease: LeaseId, epoch: Epoch, now_ns: int) -> Verdict:
        self.asked.append(("look", resource, lease, epoch.n, now_ns))
        return self.verdicts.pop(0) if self.verdicts else Clean()

    def need(self, lease: LeaseId, epoch: Epoch) -> Need:
        return Need()

    def park(self, lease: LeaseId, epoch: Epoch, under: Parking, room: int, until_ns: int, now_ns: int) -> bool:
        return False

    def parked(self, under: LeaseId) -> bool:
        return False

    def resume(self, under: Parking, lease: LeaseId, epoch: Epoch) -> None:
        raise AssertionError("nothing is parked here")

    def volumes(self) -> list[StoredVolume]:
        return [one for ref, one in self.disk.items() if ref not in self.had]

    def volume_epoch(self, volume: VolumeRef) -> Epoch | None:
        return self.disk[volume].epoch if volume in self.disk else None

    def remove_volume(self, volume: VolumeRef, epoch: Epoch, now_ns: int) -> None:
        self.asked.append(("remove", volume.name, epoch.n, now_ns))
        if self.removes and volume not in self.had:
            self.disk.pop(volume, None)

    def forget(self, resource: ResourceId, lease: LeaseId) -> None:
        self.asked.append(("forget", resource, lease))

    def leftovers(self) -> tuple[Leftover, ...]:
        return self._left

    def fault(self, resource: ResourceId) -> str | None:
        return self.wrong.get(resource)


class Rig:
    """A node on paper; the present is a number that a test moves."""

    def __init__(self, *left: Leftover, same_clock: bool = True, bounds: Bounds | None = None) -> None:
        self.paper, self.reports, self.now_ns = Paper(*left), list[Report](), 0
        self.node = Node(
            INVENTORY, self.paper, report=self.reports.append, same_clock=same_clock, bounds=bounds or Bounds()
        )

    def grant(
        self, lease: LeaseId = A, n: int = 1, *, number: int = 1, ttl_s: float = 60, parts: tuple[Part, ...] = (ONE,)
    ) -> None:
        ttl_ns = round(ttl_s * S)
        order = Grant(
            lease=lease,
            epoch=Epoch(1, n),
            number=number,
            tenant=ALICE,
            parts=parts,
            deadline_ns=self.now_ns + ttl_ns,
            ttl_ns=ttl_ns,
        )
        self.node.send(order, now_ns=self.now_ns)

    def settle(self, lease: LeaseId = A, *resources: ResourceId) -> None:
        """A guest of the lease is there."""
        self.paper.there |= {(resource, lease) for resource in resources or (GPU,)}

    def extend(self, number: int, *, ttl_s: float = 60, lease: LeaseId = A, n: int = 1, lead_s: int = 0) -> None:
        ttl_ns = round(ttl_s * S)
        order = Extend(
            lease=lease,
            epoch=Epoch(1, n),
            number=number,
            deadline_ns=self.now_ns + ttl_ns,
            ttl_ns=ttl_ns,
            lead_ns=lead_s * S,
        )
        self.node.send(order, now_ns=self.now_ns)

    def end(self, lease: LeaseId = A, n: int = 1, *, grace_s: int = 0, parts: tuple[Part, ...] = (ONE,)) -> None:
        order = End(
            lease=lease,
            epoch=Epoch(1, n),
            number=9,
            parts=parts,
            reason=EndReason.PREEMPTED,
            grace_ns=grace_s * S,
        )
        self.node.send(order, now_ns=self.now_ns)

    def at(self, seconds: float) -> int | None:
        """Time passes, and the node is woken exactly when it said."""
        until_ns = round(seconds * S)
        while (wake_ns := self.node.tick(self.now_ns)) is not None and wake_ns <= until_ns:
            self.now_ns = wake_ns
        self.now_ns = until_ns
        return self.node.tick(self.now_ns)

    def said(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]


# ---- what the hardware is told while a lease lives ----


def test_the_hardware_hears_once_of_what_an_order_changed() -> None:
    """Copies and older orders are answered, and change nothing below."""
    rig = Rig()
    rig.grant(ttl_s=60)
    rig.grant(ttl_s=60)
    rig.extend(3, ttl_s=80)
    rig.extend(2, ttl_s=70)
    rig.extend(3, ttl_s=80)
    assert len(rig.said(Held)) == 5
    assert rig.paper.asked == [("grant", A, ALICE, 1, 60 * S), ("extend", A, 1, 80 * S)]


def test_after_an_attach_the_newer_epoch_is_granted_in_place_of_the_older() -> None:
    """The guests go on under it."""
    rig = Rig()
    rig.grant(n=1)
    rig.grant(n=2, number=2, ttl_s=90)
    assert [asked[0:4:3] for asked in rig.paper.asked] == [("grant", 1), ("grant", 2)]
    assert rig.node.check(A, Epoch(1, 2), 0).deadline_ns == 90 * S
    assert rig.node.tenants == {A: ALICE}


def test_a_grant_on_a_shared_device_does_not_look_through_all_who_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counted(part: Part) -> bool:
        nonlocal asked
        asked += 1
        return is_exclusive(part)

    monkeypatch.setattr(node, "is_exclusive", counted)
    rig = Rig()
    many = 400
    for n in range(many):
        rig.grant(LeaseId(f"l-{n}"), n + 1, parts=(replace(ONE, amount=1, exclusivity=Exclusivity.SHARED),))
    assert len(rig.said(Held)) == many
    assert asked < 10 * many


def test_a_grant_that_was_late_ends_no_lease_that_came_after_it() -> None:
    """It was on its way for longer than the lease that has the device now, and waits for that one's end."""
    rig = Rig()
    rig.grant(A, 5)
    rig.settle(A)
    rig.grant(B, 3, parts=(replace(ONE, exclusivity=Exclusivity.SHARED),))
    rig.at(1)
    assert rig.node.check(A, Epoch(1, 5), rig.now_ns).lease == A
    assert not rig.said(EndedHere)
    assert ("grant", B) not in [asked[:2] for asked in rig.paper.asked]


def test_a_grant_that_waits_is_granted_when_the_hardware_is_free() -> None:
    """Not before: whoever gets a folder and a page may start."""
    rig = Rig()
    rig.grant(A, 1)
    rig.settle(A)
    rig.end(A, 1, grace_s=5)
    rig.grant(B, 2)
    assert ("grant", B) not in [asked[:2] for asked in rig.paper.asked]
    rig.at(5)
    assert rig.paper.asked[-1][:2] == ("grant", B)


def test_notices_of_the_office_are_handed_on_and_taken_back() -> None:
    """Taking back what was never announced is silent."""
    rig = Rig()
    rig.grant()
    for number, take_at_ns in ((2, None), (3, 40 * S), (4, None)):
        order = Notify(lease=A, epoch=Epoch(1, 1), number=number, reason=EndReason.PREEMPTED, take_at_ns=take_at_ns)
        rig.node.send(order, now_ns=0)
        assert (A in rig.node.notices) is (take_at_ns is not None)
    assert rig.paper.asked[1:] == [("notice", A, 40 * S), ("notice", A, None)]


def test_a_device_that_reports_an_error_ends_its_leases_in_its_own_words() -> None:
    """Only those on it; and nothing is granted there while it lasts."""
    rig = Rig()
    rig.grant(A, 1)
    rig.grant(B, 2, parts=(CORE,))
    rig.paper.wrong[GPU] = "Xid 79: it has fallen off the bus"
    rig.at(1)
    assert {report.detail for report in rig.reports if isinstance(report, Fault)} == {rig.paper.wrong[GPU]}
    ends = [report for report in rig.reports if isinstance(report, EndedHere)]
    assert {(end.lease, end.reason) for end in ends} == {(A, EndReason.DEVICE_LOST)}
    assert "Xid 79" in ends[0].detail
    rig.node.check(B, Epoch(1, 2), rig.now_ns)


# ---- orders that come at the deadline or after it, before the node has looked at its clock ----


@pytest.mark.parametrize("late_s", [0, 0.5, 3600])
def test_an_extension_that_comes_at_the_deadline_or_later_extends_nothing(late_s: float) -> None:
    """The order was written in time and delivered late; no tick came in between. The lease is over, what ran under it
    is killed, and the office hears that it is not held."""
    rig = Rig()
    rig.grant(ttl_s=60)
    rig.settle()
    rig.now_ns = round((60 + late_s) * S)
    rig.extend(2, ttl_s=60)
    assert [report.number for report in rig.reports if isinstance(report, NotHeld)] == [2]
    assert not [report for report in rig.reports if isinstance(report, Held) and report.number == 2]
    assert ("tell", A, 1, EndReason.EXPIRED, rig.now_ns) in rig.paper.asked
    with pytest.raises(LeaseExpired):
        rig.node.check(A, Epoch(1, 1), rig.now_ns)
    rig.node.tick(rig.now_ns)
    assert not rig.paper.there
    assert [report.reason for report in rig.reports if isinstance(report, EndedHere)] == [EndReason.EXPIRED]


def test_a_newer_epoch_that_comes_at_the_deadline_does_not_take_over_the_guests() -> None:
    """An attach revives no more than a renewal does."""
    rig = Rig()
    rig.grant(n=1, ttl_s=60)
    rig.settle()
    rig.now_ns = 60 * S
    rig.grant(n=2, number=2, ttl_s=60)
    assert [report.number for report in rig.reports if isinstance(report, NotHeld)] == [2]
    with pytest.raises(LeaseExpired):
        rig.node.check(A, Epoch(1, 1), rig.now_ns)
    with pytest.raises(LeaseNotActive):
        rig.node.check(A, Epoch(1, 2), rig.now_ns)


def test_an_order_for_one_lease_ends_another_whose_deadline_has_come() -> None:
    """Every order is a look at the clock: a grant of hardware that is still in use waits until it is verified."""
    rig = Rig()
    rig.grant(A, 1, ttl_s=60)
    rig.settle(A)
    rig.now_ns = 60 * S
    rig.paper.dies = False
    rig.grant(B, 2)
    assert [report.lease for report in rig.reports if isinstance(report, Held)] == [A]
    with pytest.raises(LeaseExpired):
        rig.node.check(A, Epoch(1, 1), rig.now_ns)


# ---- the local notice ----


@pytest.mark.parametrize(("ttl_s", "warned_s"), [(2, 1.8), (20, 18), (50, 45), (300, 295), (3600, 3595)])
def test_guests_are_warned_by_the_grace_before_the_deadline_and_killed_at_it(ttl_s: float, warned_s: float) -> None:
    """A tenth of the time to live, five seconds at most; and no office says anything."""
    rig = Rig()
    rig.grant(ttl_s=ttl_s)
    rig.settle()
    rig.at(warned_s - 0.001)
    assert rig.paper.names() == ["grant"]
    assert not rig.node.is_expiring(A)
    rig.at(warned_s)
    assert rig.paper.asked[1:] == [("warn", A, 1, round(ttl_s * S))]
    assert rig.node.is_expiring(A)
    rig.at(ttl_s - 0.001)
    assert rig.paper.names() == ["grant", "warn"], "it is warned once, and not killed early"
    rig.node.check(A, Epoch(1, 1), rig.now_ns)
    rig.at(ttl_s)
    deadline_ns = round(ttl_s * S)
    assert rig.paper.asked[2:4] == [
        ("tell", A, 1, EndReason.EXPIRED, deadline_ns),
        ("kill", GPU, A, 1, deadline_ns),
    ]
    assert not rig.paper.there


def test_a_lease_that_is_renewed_late_is_spared_and_may_be_warned_again() -> None:
    """Jeopardy was over in time."""
    rig = Rig()
    rig.grant(ttl_s=20)
    rig.at(19)
    rig.extend(2, ttl_s=20)
    assert rig.paper.names() == ["grant", "warn", "extend", "spare"]
    assert not rig.node.is_expiring(A)
    rig.at(36.9)
    assert rig.paper.names()[-1] == "spare"
    rig.at(37)
    assert rig.paper.asked[-1] == ("warn", A, 1, 39 * S)


def test_an_extension_that_leaves_no_more_than_the_lead_does_not_spare() -> None:
    """The guests were told to leave, and the end is no further than that."""
    rig = Rig()
    rig.grant(ttl_s=20)
    rig.node.saved(A, 4 * S)
    rig.at(19)
    rig.extend(2, ttl_s=3, lead_s=6)
    assert rig.paper.names() == ["grant", "warn", "extend"]
    assert rig.node.is_expiring(A)
    rig.at(21.9)
    assert rig.paper.names().count("warn") == 1


def test_what_saves_slowly_is_warned_earlier_from_the_next_extension_on() -> None:
    """One and a half times the last save, if that is more than the grace, and its holder, who is told with the
    extension, says that he reckons with it; a shorter save takes it back."""
    rig = Rig()
    rig.grant(ttl_s=100)
    rig.node.saved(A, 20 * S)
    rig.at(50)
    rig.extend(2, ttl_s=100)
    assert [one.save_ns for one in rig.reports if isinstance(one, Held)] == [0, 20 * S]
    rig.extend(3, ttl_s=100, lead_s=30)
    rig.at(119)
    assert "warn" not in rig.paper.names()
    rig.at(120)
    assert rig.paper.names()[-1] == "warn"
    rig.node.saved(A, 1 * S)
    rig.extend(4, ttl_s=40, lead_s=30)
    assert rig.paper.names()[-1] == "spare"
    rig.at(154)
    assert rig.paper.names()[-1] == "spare"
    rig.at(156)
    assert rig.paper.names()[-1] == "warn"
    rig.node.saved(B, 1 * S)  # a lease it does not know: nothing happens


def test_the_measured_save_outlives_a_renewal_and_an_attach() -> None:
    """It is a fact about the work, not about the deadline."""
    rig = Rig()
    rig.grant(ttl_s=100)
    rig.node.saved(A, 20 * S)
    rig.at(50)
    rig.grant(n=2, number=2, ttl_s=100)
    rig.at(134)
    assert "warn" not in rig.paper.names()
    rig.at(135)  # nobody says that he reckons with more than 15 % of the time
    assert rig.paper.asked[-1] == ("warn", A, 2, 150 * S)


def test_who_was_not_awake_to_warn_ends_what_is_due_all_the_same() -> None:
    """A machine that slept through both: the deadline comes first, and nobody is warned of the past."""
    rig = Rig()
    rig.grant(ttl_s=20)
    rig.now_ns = 30 * S
    rig.node.tick(rig.now_ns)
    assert "warn" not in rig.paper.names()
    with pytest.raises(LeaseExpired):
        rig.node.check(A, Epoch(1, 1), rig.now_ns)


def test_what_has_ended_is_not_warned_and_wakes_nobody() -> None:
    """Given back long before its deadline."""
    rig = Rig()
    rig.grant(ttl_s=20)
    rig.end()
    assert rig.at(1) is None
    rig.at(30)
    assert "warn" not in rig.paper.names()


def test_on_another_clock_the_warning_counts_from_the_arrival_too() -> None:
    """The office's instants mean nothing here."""
    rig = Rig(same_clock=False)
    rig.now_ns = 1000 * S
    order = Grant(lease=A, epoch=Epoch(1, 1), number=1, tenant=ALICE, parts=(ONE,), deadline_ns=7, ttl_ns=20 * S)
    rig.node.send(order, now_ns=rig.now_ns)
    rig.at(1017.9)
    assert "warn" not in rig.paper.names()
    rig.at(1018)
    assert rig.paper.asked[-1] == ("warn", A, 1, 1020 * S)


# ---- the end ----


def test_an_end_tells_at_once_and_kills_when_the_grace_is_over() -> None:
    """The same order again tells nobody twice and gives no more time."""
    rig = Rig()
    rig.grant()
    rig.settle()
    rig.end(grace_s=5)
    rig.at(3)
    rig.end(grace_s=5)
    rig.at(4.9)
    assert rig.paper.asked[1:] == [("tell", A, 1, EndReason.PREEMPTED, 5 * S)]
    with pytest.raises(LeaseRevoked):
        rig.node.check(A, Epoch(1, 1), rig.now_ns)
    rig.at(5)
    assert rig.paper.asked[2:] == [("kill", GPU, A, 1, 5 * S), ("look", GPU, A, 1, 5 * S)]
    assert len(rig.said(TornDown)) == 1


def test_an_exit_that_is_seen_is_confirmed_at_once() -> None:
    """Within the poke, seconds before the next step would be due."""
    rig = Rig()
    rig.grant(parts=(ONE, CORE))
    rig.settle(A, GPU, CPU)
    rig.end(grace_s=5, parts=(ONE, CORE))
    rig.now_ns = S // 10
    rig.paper.there.clear()
    assert not rig.said(TornDown)
    rig.node.hardware_changed(rig.now_ns, A)
    [torn] = rig.said(TornDown)
    assert torn == TornDown(node=NodeId("n"), lease=A, epoch=Epoch(1, 1), resources=(GPU, CPU))
    assert "kill" not in rig.paper.names()


def test_an_exit_lets_who_waits_in() -> None:
    """The next grant is held in the same poke."""
    rig = Rig()
    rig.grant(A, 1)
    rig.settle()
    rig.end(A, 1, grace_s=5)
    rig.grant(B, 2)
    rig.paper.there.clear()
    rig.node.hardware_changed(S, A)
    assert rig.reports[-1] == Held(node=NodeId("n"), lease=B, epoch=Epoch(1, 2), number=1)


def test_who_waits_for_what_is_being_torn_down_is_not_too_late_however_many_end_meanwhile() -> None:
    """Their names are forgotten, and its epoch is below theirs; it came before, and its grant is repeated."""
    rig = Rig()
    rig.node.fence._ended_max = 2
    rig.grant(A, 1)
    rig.settle()
    rig.end(A, 1, grace_s=5)
    rig.grant(B, 2)
    for n in range(3, 20):
        rig.end(LeaseId(f"l-{n}"), n, parts=(CORE,))
    rig.grant(B, 2)
    assert not rig.said(NotHeld)
    rig.paper.there.clear()
    rig.node.hardware_changed(S, A)
    assert Held(node=NodeId("n"), lease=B, epoch=Epoch(1, 2), number=1) in rig.reports
    rig.grant(LeaseId("l-3"), 3, parts=(CORE,))
    assert rig.said(NotHeld)


def test_a_poke_while_the_guest_is_there_uses_no_attempt_up() -> None:
    """Many children of one tree exit, one after the other; the tree is killed as often as the bounds say, no more."""
    rig = Rig(bounds=Bounds(attempts=3))
    rig.paper.dies = False
    rig.grant()
    rig.settle()
    rig.end()
    for _ in range(20):
        rig.node.hardware_changed(rig.now_ns, A)
        rig.node.hardware_changed(rig.now_ns)
    assert rig.paper.names().count("kill") == 1
    assert not rig.said(Failed)


def test_a_poke_concerns_its_lease_only() -> None:
    """Another lease is not even looked at."""
    rig = Rig()
    rig.grant(A, 1, parts=(CORE,))
    rig.grant(B, 2, parts=(CORE,))
    rig.settle(A, CPU)
    rig.settle(B, CPU)
    rig.end(A, 1, grace_s=5, parts=(CORE,))
    rig.end(B, 2, grace_s=5, parts=(CORE,))
    rig.paper.there.clear()
    rig.node.hardware_changed(S, A)
    assert [report.lease for report in rig.reports if isinstance(report, TornDown)] == [A]


def test_killing_is_bounded_and_ends_in_failure_not_in_free() -> None:
    """As often as it may be tried; then the office hears it, softly. A process with 80 GB of a card may take half a
    minute to exit after SIGKILL: when it has, a full look frees the resource without an operator."""
    rig = Rig(bounds=Bounds(attempts=3, retry_ns=2 * S))
    rig.paper.dies = False
    rig.grant()
    rig.settle()
    rig.end()
    rig.at(60)
    assert [asked[-1] for asked in rig.paper.asked if asked[0] == "kill"] == [0, 2 * S, 4 * S]
    [failed] = rig.said(Failed)
    assert isinstance(failed, Failed)
    assert (failed.hard, failed.lease) == (False, A)
    assert [down.phase for down in rig.node.teardowns()] == [TeardownPhase.FAILED]
    rig.at(120)
    assert "look" not in rig.paper.names(), "nothing is looked at while it is there"
    rig.paper.there.clear()
    rig.paper.verdicts = [NotYet(what="5 MiB")]
    rig.node.hardware_changed(rig.now_ns)
    assert not rig.said(TornDown)
    rig.at(140)
    assert len(rig.said(TornDown)) == 1


def test_hardware_that_knows_how_long_a_kill_takes_is_waited_for() -> None:
    """Even the last attempt; and no other is made meanwhile."""
    rig = Rig(bounds=Bounds(attempts=1))
    rig.paper.dies, rig.paper.kill_takes_ns = False, 15 * S
    rig.grant()
    rig.settle()
    rig.end()
    rig.at(14)
    assert rig.paper.names().count("kill") == 1
    assert not rig.said(Failed)
    rig.at(15)
    assert rig.paper.names().count("kill") == 1
    assert rig.said(Failed)


def test_what_is_left_is_looked_at_again_until_it_is_gone() -> None:
    """When the hardware says, or after the usual pause; nobody is told anything before."""
    rig = Rig()
    rig.grant()
    rig.paper.verdicts = [NotYet(what="5 MiB", again_ns=S // 4), NotYet(what="5 MiB")]
    rig.end()
    rig.at(1.2)
    assert not rig.said(TornDown)
    rig.at(1.25)
    assert [asked[-1] for asked in rig.paper.asked if asked[0] == "look"] == [0, S // 4, S // 4 + S]
    assert rig.said(TornDown)


def test_what_never_goes_is_named_in_the_failure() -> None:
    """Looking is bounded like killing, and lateness is soft."""
    rig = Rig(bounds=Bounds(attempts=3))
    rig.grant()
    rig.paper.verdicts = [NotYet(what="a mount", again_ns=0), *[NotYet(what="a mount")] * 100]
    rig.end()
    rig.at(12)
    [failed] = rig.said(Failed)
    assert isinstance(failed, Failed)
    assert (failed.detail, failed.hard) == ("a mount", False)
    assert max(asked[-1] for asked in rig.paper.asked if asked[0] == "look") == 3 * S  # type: ignore[type-var]


def test_patience_counts_from_an_answer_and_not_while_the_look_is_under_way() -> None:
    """To overwrite a card takes longer than that, when the machine is busy."""
    rig = Rig(bounds=Bounds(attempts=3))
    rig.grant()
    working = NotYet(what="it is still being cleaned", is_working=True)
    rig.paper.verdicts = [*[working] * 8, NotYet(what="5 MiB"), working, working]
    rig.end()
    rig.at(10)
    assert not rig.said(Failed)
    rig.at(12)
    assert rig.said(TornDown)
    rig.grant(B, 2)
    rig.paper.verdicts = [*[working] * 8, *[NotYet(what="5 MiB")] * 100]
    rig.end(B, 2)
    rig.at(60)
    assert rig.said(Failed), "what is there and stays is given up all the same"


def test_what_was_only_late_is_told_when_it_has_gone_after_all() -> None:
    """Else a volume whose putting away took long is never had again. A fault is not looked at again."""
    rig = Rig(bounds=Bounds(attempts=3))
    rig.grant()
    rig.paper.verdicts = [NotYet(what="a mount")] * 4
    rig.end()
    rig.at(10)
    assert rig.said(Failed)
    rig.reports.clear()
    rig.paper.verdicts = [NotYet(what="a mount")] * 8
    rig.node.hardware_changed(rig.now_ns)
    rig.at(20)
    assert not rig.said(Failed), "that was told"
    assert not rig.said(TornDown)
    rig.paper.verdicts.clear()
    rig.node.hardware_changed(rig.now_ns)
    rig.at(21)
    [torn] = rig.said(TornDown)
    assert torn.lease == A  # type: ignore[union-attr]
    rig.grant(B, 2)
    rig.paper.verdicts = [Unclean(detail="ECC error", hard=True)]
    rig.end(B, 2)
    rig.node.hardware_changed(rig.now_ns)
    rig.at(60)
    assert [report.lease for report in rig.said(TornDown)] == [A]  # type: ignore[union-attr]


def test_what_was_only_late_is_looked_at_again_by_the_node_itself() -> None:
    """A card on which a desktop grew for a moment was out of use until an operator came."""
    rig = Rig(bounds=Bounds(attempts=3))
    rig.grant()
    rig.paper.verdicts = [NotYet(what="5 MiB")] * 6
    rig.end()
    for second in range(1, 14):
        rig.at(second)
    assert rig.said(Failed)
    assert not rig.said(TornDown)
    for second in range(14, 60):
        rig.at(second)
    assert len(rig.said(Failed)) == 1, "that was told"
    assert [report.lease for report in rig.said(TornDown)] == [A]  # type: ignore[union-attr]
    rig.grant(B, 2)
    rig.paper.verdicts = [*[NotYet(what="5 MiB")] * 4, Unclean(detail="ECC error", hard=True)]
    rig.end(B, 2)
    for second in range(60, 200):
        rig.at(second)
    assert len(rig.said(TornDown)) == 1, "a fault is not"
    assert [(failed.detail, failed.hard) for failed in rig.said(Failed)[1:]] == [("5 MiB", False), ("ECC error", True)]  # type: ignore[union-attr]


def test_an_operators_word_for_what_was_late_holds_while_it_is_looked_at_again() -> None:
    rig = Rig(bounds=Bounds(attempts=3))
    rig.grant()
    working = NotYet(what="it is still being cleaned", is_working=True, again_ns=1000 * S)
    rig.paper.verdicts = [*[NotYet(what="5 MiB")] * 4, *[working] * 100]
    rig.end()
    for second in range(1, 20):
        rig.at(second)
    assert rig.said(Failed)
    rig.grant(B, 2)
    assert ("forget", GPU, A) in rig.paper.asked
    assert rig.paper.asked[-1][:2] == ("grant", B)


def test_a_guest_that_shows_up_while_it_is_looked_at_is_killed() -> None:
    """A child that nobody had seen."""
    rig = Rig()
    rig.grant()
    rig.paper.verdicts = [NotYet(what="a socket")]
    rig.end()
    rig.settle()
    rig.at(1)
    assert rig.paper.names()[-3:] == ["look", "kill", "look"]
    assert rig.said(TornDown)


def test_a_fault_found_by_looking_is_hard_at_once() -> None:
    """Trying again would not mend it."""
    rig = Rig()
    rig.grant()
    rig.paper.verdicts = [Unclean(detail="ECC error", hard=True)]
    rig.end()
    [failed] = rig.said(Failed)
    assert isinstance(failed, Failed)
    assert (failed.detail, failed.hard) == ("ECC error", True)


def test_an_operators_word_makes_the_hardware_forget() -> None:
    """The office was told of the failure; a grant after it means that somebody vouched."""
    rig = Rig()
    rig.grant(A, 1)
    rig.paper.verdicts = [Unclean(detail="ECC error", hard=True)]
    rig.end(A, 1)
    rig.grant(B, 2)
    assert rig.paper.asked[-2:] == [("forget", GPU, A), ("grant", B, ALICE, 2, 60 * S)]


def test_an_operators_word_holds_at_once_for_what_the_office_was_told_of() -> None:
    """The node kept it until the next grant: its supervisor never ended, and kept the card from other offices."""
    rig = Rig(Leftover(lease=B, epoch=Epoch(1, 1), part=ONE))
    rig.paper.verdicts = [Unclean(detail="ECC error", hard=True), Unclean(detail="ECC error", hard=True)]
    rig.at(0)
    rig.grant(A, 2)
    rig.end(A, 2)  # the office is told of both with the end of A
    assert {down.lease for down in rig.node.teardowns()} == {A, B}
    rig.reports.clear()
    rig.node.send(Verify(lease=A, epoch=Epoch(1, 1), parts=(ONE,), vouched=True), now_ns=rig.now_ns)
    assert {down.lease for down in rig.node.teardowns()} == {A}, "of a newer epoch nobody vouched"
    rig.node.send(Verify(lease=A, epoch=Epoch(1, 2), parts=(ONE,), vouched=True), now_ns=rig.now_ns)
    assert not rig.node.teardowns()
    assert not rig.reports
    assert [asked[:2] for asked in rig.paper.asked if asked[0] == "forget"] == [("forget", GPU)] * 2


# ---- restarts, of the node and of the office ----


def test_what_an_earlier_keeper_left_is_killed_before_anything_is_granted_there() -> None:
    """At the first tick, without grace and without a word: whoever could tell them is gone."""
    rig = Rig(Leftover(lease=A, epoch=Epoch(1, 7), part=ONE))
    rig.grant(B, 8)
    assert not rig.reports
    rig.node.tick(0)
    assert rig.paper.names() == ["kill", "look", "grant"]
    assert [type(report) for report in rig.reports] == [Held], "the office has not asked for the leftover"


def test_a_verification_asked_for_while_a_leftover_is_being_cleared_is_answered() -> None:
    """It is the same work, begun without being asked for; what comes of it is the answer."""
    rig = Rig(Leftover(lease=A, epoch=Epoch(1, 7), part=ONE))
    rig.settle(A)
    rig.paper.dies = False
    rig.at(1)
    rig.node.send(Verify(lease=A, epoch=Epoch(1, 7), parts=(ONE,)), now_ns=rig.now_ns)
    assert not rig.reports
    rig.paper.dies = True
    rig.at(3)
    assert [type(report) for report in rig.reports] == [TornDown]


def test_a_new_office_may_find_other_devices_on_the_same_node() -> None:
    """What waited for more of a resource gets it; who is live stays; what is gone is not complained of for ever."""
    rig = Rig()
    many = Part(resource=CPU, kind=Kind.CPU, amount=12)
    rig.grant(A, 1)
    rig.grant(B, 2, parts=(many,))
    rig.paper.wrong[GPU] = "it is gone"
    rig.at(1)
    assert not [report for report in rig.reports if isinstance(report, Held) and report.lease == B]
    rig.node.inventory_changed(
        Inventory(node=NodeId("n"), domain="n", devices=(Device(id=CPU, kind=Kind.CPU, capacity=16),))
    )
    rig.reports.clear()
    rig.at(30)
    assert [report.lease for report in rig.reports if isinstance(report, Held)] == [B]
    assert not rig.said(Fault)


def test_a_new_office_hears_at_once_what_it_would_have_heard_in_a_minute() -> None:
    """Pauses between repeats grow; a newcomer starts them anew."""
    rig = Rig()
    rig.grant(ttl_s=1)
    rig.at(100)
    before = len(rig.said(EndedHere))
    rig.at(101)
    assert len(rig.said(EndedHere)) == before
    rig.node.resend_reports(rig.now_ns)
    rig.node.tick(rig.now_ns)
    assert len(rig.said(EndedHere)) == before + 1


def test_an_order_of_a_replaced_office_is_counted_and_not_obeyed() -> None:
    """Neither the tables nor the hardware see it."""
    rig = Rig()
    order = Grant(lease=A, epoch=Epoch(1, 1), number=1, tenant=ALICE, parts=(ONE,), deadline_ns=60 * S, ttl_ns=60 * S)
    rig.node.send(order, now_ns=0, incarnation=3)
    rig.node.send(Verify(lease=B, epoch=Epoch(1, 9), parts=(CORE,)), now_ns=0, incarnation=2)
    assert (rig.node.incarnation, rig.node.refused_orders) == (3, 1)
    assert rig.paper.names() == ["grant"]
    assert not rig.said(NotHeld)
