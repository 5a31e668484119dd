"""What an agent must do whose devices can suspend: the contract of ``End.park`` and ``Grant.resume``, as tests.

Subclass it as one does ``AgentConformance``, with a bench whose node has two GPUs and some memory.
"""

from __future__ import annotations

from typing import Final

from sublet.errors import LeaseEnded
from sublet.lease_end import EndReason
from sublet.testing.office_in_short import ALICE, AgentBench, OfficeInShort, part_of, refused, reports_of
from sublet.values import GIB, Epoch, Kind, LeaseId, TenantId
from sublet.wire.orders import End, EndedHere, Grant, Held, NotHeld, Parkable, Parking, Part, Resumed, TornDown

A, B, UNDER, AGAIN = LeaseId("lease-a"), LeaseId("lease-b"), LeaseId("parking"), LeaseId("again")
E1, E2, E3, E4 = Epoch(1, 1), Epoch(1, 2), Epoch(1, 3), Epoch(1, 4)
HERE: Final = Parking(lease=UNDER, epoch=E2)
BOB = TenantId("bob")


class ParkingConformance(OfficeInShort):
    """The contract of parking."""

    settle_s: float = 10.0

    def make_bench(self) -> AgentBench:
        raise NotImplementedError("say how to make a bench with the agent to be tested")

    # ---- the office in short ----

    def set_aside(self, bench: AgentBench, epoch: Epoch = E2, *, parked: bool = False, amount: int = GIB) -> None:
        """The parking lease."""
        ttl_ns = self.length_ns(600)
        bench.agent.send(
            Grant(
                lease=UNDER,
                epoch=epoch,
                number=epoch.n,
                tenant=ALICE,
                parts=(memory_of(bench, amount),),
                deadline_ns=bench.now_ns() + ttl_ns,
                ttl_ns=ttl_ns,
                parked=parked,
            )
        )

    def end_and_park(self, bench: AgentBench, *, grace_s: float = 10) -> None:
        """The first lease ends, and its guests are to live on."""
        bench.agent.send(
            End(
                lease=A,
                epoch=E1,
                number=99,
                parts=(part_of(bench, 0),),
                reason=EndReason.PREEMPTED,
                grace_ns=self.length_ns(grace_s),
                park=HERE,
            )
        )

    def parked(self, bench: AgentBench) -> None:
        """A worked, and is parked."""
        self.grant(bench, A, E1)
        bench.work(A, E1)
        self.set_aside(bench)
        self.end_and_park(bench)
        assert self.torn_down(bench).parked

    def resume(self, bench: AgentBench, lease: LeaseId, epoch: Epoch, under: Parking = HERE, device: int = 1) -> None:
        """A new lease goes on with what is parked."""
        ttl_ns = self.length_ns(600)
        bench.agent.send(
            Grant(
                lease=lease,
                epoch=epoch,
                number=epoch.n,
                tenant=ALICE,
                parts=(part_of(bench, device),),
                deadline_ns=bench.now_ns() + ttl_ns,
                ttl_ns=ttl_ns,
                resume=under,
            )
        )

    def torn_down(self, bench: AgentBench) -> TornDown:
        """Wait until the first lease is."""
        self.wait(bench, lambda: reports_of(bench, TornDown), self.settle_s)
        return next(report for report in reports_of(bench, TornDown) if report.lease == A)

    # ---- the contract ----

    def test_with_a_notice_it_is_said_what_parking_takes(self) -> None:
        """If there are guests; so that memory can be set aside before anything is taken."""
        bench = self.make_bench()
        self.grant(bench, A, E1)
        bench.work(A, E1)
        self.notify(bench, A, E1, number=2)
        self.wait(bench, lambda: reports_of(bench, Parkable), self.settle_s)
        word = reports_of(bench, Parkable)[0]
        assert (word.lease, word.epoch) == (A, E1)
        assert word.amount > 0
        assert not word.why

    def test_its_device_is_torn_down_with_the_guest_parked(self) -> None:
        """Fenced from the first moment on; the device goes to another tenant, and the guest lives."""
        bench = self.make_bench()
        self.grant(bench, A, E1)
        bench.work(A, E1)
        self.set_aside(bench)
        self.end_and_park(bench)
        refused(bench, A, E1, LeaseEnded)
        assert self.torn_down(bench).parked
        self.grant(bench, B, E3, tenant=BOB)
        assert [report.lease for report in reports_of(bench, Held)][-1] == B
        refused(bench, A, E1, LeaseEnded)

    def test_an_order_to_park_given_again_is_answered_again(self) -> None:
        """And parks no guest twice."""
        bench = self.make_bench()
        self.parked(bench)
        bench.reports.clear()
        self.end_and_park(bench)
        assert self.torn_down(bench).parked
        bench.reports.clear()
        self.resume(bench, AGAIN, E4)
        self.wait(bench, lambda: reports_of(bench, Resumed), self.settle_s)
        bench.work(AGAIN, E4)

    def test_without_a_parking_lease_the_guest_ends(self) -> None:
        """Or with one that has too little room: the guest is not parked, and does not stay."""
        bench = self.make_bench()
        self.grant(bench, A, E1)
        bench.work(A, E1)
        self.set_aside(bench, amount=4096)
        self.end_and_park(bench, grace_s=1)
        assert not self.torn_down(bench).parked
        assert not bench.at_work(A)

    def test_what_is_parked_goes_on_under_the_new_lease(self) -> None:
        """In one step with the end of the parking lease, which is said until the office has heard it."""
        bench = self.make_bench()
        self.parked(bench)
        bench.reports.clear()
        self.resume(bench, AGAIN, E4)
        self.wait(bench, lambda: len(reports_of(bench, Resumed)) > 1, self.settle_s)
        assert [report.lease for report in reports_of(bench, Held)] == [AGAIN]
        assert {(report.lease, report.epoch, report.under) for report in reports_of(bench, Resumed)} == {
            (AGAIN, E4, HERE)
        }
        bench.work(AGAIN, E4)
        refused(bench, A, E1, LeaseEnded)
        refused(bench, UNDER, E2, LeaseEnded)

    def test_an_old_epoch_of_the_parking_lease_goes_on_with_nothing(self) -> None:
        """A holder attached to it and so has its new epoch; only that one resumes."""
        bench = self.make_bench()
        self.parked(bench)
        self.set_aside(bench, E3, parked=True)
        bench.reports.clear()
        self.resume(bench, AGAIN, E4)
        assert [(report.lease, report.reason) for report in reports_of(bench, NotHeld)] == [(AGAIN, EndReason.REFUSED)]
        self.resume(bench, B, Epoch(1, 5), Parking(lease=UNDER, epoch=E3))
        assert [report.lease for report in reports_of(bench, Held)] == [B]

    def test_nobody_goes_on_twice(self) -> None:
        """The second finds nothing, and is not held."""
        bench = self.make_bench()
        self.parked(bench)
        self.resume(bench, AGAIN, E4)
        bench.reports.clear()
        self.resume(bench, B, Epoch(1, 5), device=0)
        assert [report.lease for report in reports_of(bench, NotHeld)] == [B]

    def test_what_is_parked_ends_with_its_parking_lease(self) -> None:
        """At its deadline, without an order."""
        bench = self.make_bench()
        self.parked(bench)
        self.extend(bench, UNDER, E2, number=3, ttl_s=3)
        self.wait(bench, lambda: reports_of(bench, EndedHere) and not bench.at_work(A), self.settle_s)
        assert {(end.lease, end.reason) for end in reports_of(bench, EndedHere)} == {(UNDER, EndReason.EXPIRED)}
        assert not bench.at_work(A)
        bench.reports.clear()
        self.resume(bench, AGAIN, E4)
        assert [report.lease for report in reports_of(bench, NotHeld)] == [AGAIN]


def memory_of(bench: AgentBench, amount: int) -> Part:
    """A piece of the node's memory."""
    found = next(device for device in bench.agent.inventory().devices if device.kind is Kind.MEMORY)
    return Part(resource=found.id, kind=Kind.MEMORY, amount=amount)
