"""What every agent must do, as tests. Subclass it in a test file and say how to make a bench::

    class TestMyAgent(AgentConformance):
        def make_bench(self) -> AgentBench:
            return MyBench()

The suite talks to the agent as an office would and looks at the hardware through the bench. It sleeps through
``bench.pass_time`` only, so an agent on a held clock is tested in milliseconds, and one with real processes in real
time: it waits for what is to come, at most ``settle_s`` or ``give_up_s``, and the durations it has to sit out are
counted in ``second_s``.
"""

from __future__ import annotations

from sublet.errors import LeaseEnded, LeaseExpired, LeaseNotActive, LeaseRevoked, StaleEpoch, SubletError
from sublet.lease_end import EndReason
from sublet.testing.machine import FaultName
from sublet.testing.office_in_short import AgentBench, OfficeInShort, part_of, refused, reports_of
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.orders import EndedHere, Failed, Fault, Held, NotHeld, TornDown

__all__ = ["AgentBench", "AgentConformance"]

A, B = LeaseId("lease-a"), LeaseId("lease-b")
E5, E6, E7, E8 = Epoch(1, 5), Epoch(1, 6), Epoch(1, 7), Epoch(1, 8)
BOB = TenantId("bob")


class AgentConformance(OfficeInShort):
    """The contract of ``AgentPort``."""

    settle_s: float = 3.0
    """Long enough for any teardown in which nothing goes wrong."""
    give_up_s: float = 60.0
    """Long enough for an agent to give up on a guest that cannot be ended."""
    quiet_s: float = 60.0
    """How long it is listened for what must not be said."""

    def make_bench(self) -> AgentBench:
        raise NotImplementedError("say how to make a bench with the agent to be tested")

    def torn_down(self, bench: AgentBench, count: int = 1) -> None:
        """Wait until that was said so often."""
        self.wait(bench, lambda: len(reports_of(bench, TornDown)) >= count, self.settle_s)
        assert len(reports_of(bench, TornDown)) == count

    # ---- what is accepted ----

    def test_nothing_is_accepted_before_a_grant(self) -> None:
        """An agent that knows no lease permits no access."""
        bench = self.make_bench()
        refused(bench, A, E5, LeaseNotActive)

    def test_a_grant_is_held_and_accepts_exactly_its_epoch(self) -> None:
        """The live pair is accepted; the epochs before and after it are stale."""
        bench = self.make_bench()
        self.grant(bench, A, E6)
        assert reports_of(bench, Held) == [Held(node=bench.agent.node, lease=A, epoch=E6, number=1)]
        bench.work(A, E6)
        assert bench.at_work(A)
        refused(bench, A, E5, StaleEpoch)
        refused(bench, A, E7, StaleEpoch)
        refused(bench, B, E6, LeaseNotActive)

    def test_a_grant_taken_twice_is_held_twice(self) -> None:
        """The first answer may have been lost, so the second order is answered like the first."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        self.grant(bench, A, E5)
        assert [report.number for report in reports_of(bench, Held)] == [1, 1]

    def test_a_newer_epoch_makes_the_older_one_stale(self) -> None:
        """After an attach only the new epoch is accepted, and the old grant, arriving late, does not bring it back."""
        bench = self.make_bench()
        self.grant(bench, A, E5, number=1)
        self.grant(bench, A, E6, number=2)
        bench.work(A, E6)
        refused(bench, A, E5, StaleEpoch)
        bench.reports.clear()
        self.grant(bench, A, E5, number=1)
        assert [type(report) for report in bench.reports] == [NotHeld]
        refused(bench, A, E5, StaleEpoch)
        bench.work(A, E6)

    # ---- deadlines ----

    def test_a_lease_ends_at_its_deadline_by_itself(self) -> None:
        """Without a call, nothing outlives the deadline; the agent reports the end until it is answered."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        self.extend(bench, A, E5, number=2, ttl_s=2)  # from now on: on a busy machine it takes long to begin work
        self.sleep(bench, 2)
        refused(bench, A, E5, LeaseExpired)
        self.wait(bench, lambda: len(reports_of(bench, EndedHere)) > 1 and not bench.at_work(A), self.settle_s)
        assert not bench.at_work(A)
        ends = reports_of(bench, EndedHere)
        assert ends
        assert {(end.lease, end.epoch, end.reason) for end in ends} == {(A, E5, EndReason.EXPIRED)}
        assert len(ends) > 1
        assert not reports_of(bench, TornDown), "the office has not asked yet"
        self.end(bench, A, E5, reason=EndReason.EXPIRED)
        self.torn_down(bench)
        bench.reports.clear()
        bench.pass_time(self.quiet_s)
        assert not reports_of(bench, EndedHere), "it was answered"

    def test_an_extension_moves_the_deadline(self) -> None:
        """Once it is held, the lease lives past its old deadline and ends at the new one."""
        bench = self.make_bench()
        self.grant(bench, A, E5, ttl_s=12)
        self.extend(bench, A, E5, number=2, ttl_s=600)
        assert [report.number for report in reports_of(bench, Held)] == [1, 2]
        self.sleep(bench, 12)
        bench.work(A, E5)
        self.extend(bench, A, E5, number=3, ttl_s=2)
        self.sleep(bench, 2)
        refused(bench, A, E5, LeaseExpired)

    def test_an_older_extension_changes_nothing(self) -> None:
        """Two extensions change places on the wire; the newer one stands, and both are answered."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        self.extend(bench, A, E5, number=3, ttl_s=600)
        self.extend(bench, A, E5, number=2, ttl_s=1)
        assert [report.number for report in reports_of(bench, Held)] == [1, 3, 2]
        self.sleep(bench, 2)
        bench.work(A, E5)

    def test_a_notice_that_overtakes_an_extension_does_not_swallow_it(self) -> None:
        """The extension has the lower number and comes later; its deadline counts all the same."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        self.notify(bench, A, E5, number=3)
        self.extend(bench, A, E5, number=2, ttl_s=1)
        self.sleep(bench, 1)
        refused(bench, A, E5, LeaseExpired)

    def test_an_extension_after_the_deadline_revives_nothing(self) -> None:
        """It is refused, even if the agent had not looked at its clock since."""
        bench = self.make_bench()
        self.grant(bench, A, E5, ttl_s=2)
        self.sleep(bench, 2)
        bench.reports.clear()
        self.extend(bench, A, E5, number=2, ttl_s=60)
        assert reports_of(bench, NotHeld)
        assert not reports_of(bench, Held)
        refused(bench, A, E5, LeaseExpired)

    def test_an_extension_of_a_lease_it_never_saw_is_not_answered(self) -> None:
        """After a restart the agent cannot know; the office sends the grant again, and then it can."""
        bench = self.make_bench()
        self.extend(bench, A, E5, number=2, ttl_s=60)
        assert not bench.reports
        self.grant(bench, A, E5, number=3)
        assert reports_of(bench, Held)

    # ---- the end ----

    def test_an_end_fences_at_once_and_is_torn_down_after_looking(self) -> None:
        """No new effect from the first moment on; the resource is reported only when the guest is gone."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        self.end(bench, A, E5, grace_s=1)
        refused(bench, A, E5, LeaseRevoked)
        assert not (reports_of(bench, TornDown) and bench.at_work(A))
        self.torn_down(bench)
        assert not bench.at_work(A)
        torn = reports_of(bench, TornDown)
        assert [(report.lease, report.epoch) for report in torn] == [(A, E5)]
        assert [resource for report in torn for resource in report.resources] == [part_of(bench, 0).resource]

    def test_an_end_taken_again_is_answered_again(self) -> None:
        """The report may have been lost."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        for count in (1, 2, 3):
            self.end(bench, A, E5)
            self.torn_down(bench, count)
        assert len(reports_of(bench, TornDown)) == 3

    def test_an_end_for_a_lease_it_never_saw_fences_it(self) -> None:
        """The grant that comes later came too late."""
        bench = self.make_bench()
        self.end(bench, A, E6)
        self.torn_down(bench)
        assert [report.epoch for report in reports_of(bench, TornDown)] == [E6]
        self.grant(bench, A, E5)
        self.grant(bench, A, E6)
        assert [report.epoch for report in reports_of(bench, NotHeld)] == [E5, E6]
        refused(bench, A, E6, LeaseEnded)

    def test_a_late_end_of_the_older_lease_leaves_the_newer_alone(self) -> None:
        """A copy of an old order must not hurt who came next."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        self.end(bench, A, E5)
        self.torn_down(bench)
        self.grant(bench, B, E7, tenant=BOB)
        bench.work(B, E7)
        self.end(bench, A, E5)
        self.torn_down(bench, 2)
        bench.work(B, E7)
        assert bench.at_work(B)
        assert not bench.broken_rules()

    def test_a_lease_may_come_back_with_a_newer_epoch(self) -> None:
        """An offer was declined, the request went back into the line and was granted again."""
        bench = self.make_bench()
        self.end(bench, A, E5)
        self.torn_down(bench)
        self.grant(bench, A, E7, number=2)
        bench.work(A, E7)

    def test_notices_are_held(self) -> None:
        """A notice, and that the lease is spared after all, are answered like any order; the lease goes on."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        self.notify(bench, A, E5, number=2)
        self.notify(bench, A, E5, number=3, take_at_ns=None)
        assert [report.number for report in reports_of(bench, Held)] == [1, 2, 3]
        bench.work(A, E5)

    # ---- offices that forgot ----

    def test_a_newer_grant_waits_until_a_forgotten_lease_is_off_the_hardware(self) -> None:
        """A restored office gives away a device on which a lease still runs: the old one ends, then the new one is
        held, and at no moment are both there."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        self.grant(bench, B, E7, tenant=BOB)
        refused(bench, A, E5, LeaseEnded)
        self.wait(bench, lambda: len(reports_of(bench, Held)) == 2, self.settle_s)
        assert [report.lease for report in reports_of(bench, Held)] == [A, B]
        bench.work(B, E7)
        assert not bench.at_work(A)
        assert not bench.broken_rules()

    def test_a_name_given_anew_to_other_hardware_gets_neither(self) -> None:
        """A restored office may give a name again. What runs is on the old device, and the new one may be in use."""
        bench = self.make_bench()
        self.grant(bench, A, E5, device=0)
        self.grant(bench, B, E6, device=1)
        bench.work(B, E6)
        again = Epoch(2, 1)
        self.grant(bench, A, again, device=1, incarnation=2)
        refused(bench, A, again, SubletError)
        assert reports_of(bench, NotHeld)
        bench.work(B, E6)
        self.wait(bench, lambda: reports_of(bench, EndedHere) and not bench.at_work(A), self.settle_s)
        assert {(report.lease, report.reason) for report in reports_of(bench, EndedHere)} == {(A, EndReason.OPERATOR)}
        assert not bench.at_work(A)
        assert not bench.broken_rules()

    def test_orders_of_an_older_incarnation_are_not_obeyed(self) -> None:
        """An office that was replaced by its restored backup, and still runs, is not obeyed."""
        bench = self.make_bench()
        self.grant(bench, A, E5, incarnation=2)
        bench.reports.clear()
        self.end(bench, A, E5, incarnation=1)
        self.extend(bench, A, E5, number=9, ttl_s=600, incarnation=1)
        self.grant(bench, B, E8, incarnation=1)
        assert not bench.reports
        bench.work(A, E5)
        refused(bench, B, E8, LeaseNotActive)

    def test_after_a_restart_nothing_is_accepted_until_the_grant_comes_again(self) -> None:
        """The tables are empty; the office's journal has the grants."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.turn_on(FaultName.AMNESIA)
        bench.pass_time(0.1)
        refused(bench, A, E5, LeaseNotActive)
        self.grant(bench, A, E5)
        bench.work(A, E5)

    # ---- when hardware fails ----

    def test_a_deaf_guest_is_ended_when_its_grace_is_over(self) -> None:
        """Not earlier than the grace, and without its help."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        bench.turn_on(FaultName.DEAF_GUEST)
        until_ns = bench.now_ns() + self.length_ns(2)
        self.end(bench, A, E5, grace_s=2)
        self.wait(bench, lambda: reports_of(bench, TornDown) or not bench.at_work(A), self.settle_s)
        assert bench.now_ns() >= until_ns
        self.torn_down(bench)
        assert not bench.at_work(A)

    def test_no_time_out_leads_to_free(self) -> None:
        """A guest that cannot be ended is given up, softly; only a later full verification says ``TornDown``."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        bench.turn_on(FaultName.STUCK_TEARDOWN)
        self.end(bench, A, E5)
        self.wait(bench, lambda: reports_of(bench, Failed), self.give_up_s)
        assert bench.at_work(A)
        assert not reports_of(bench, TornDown)
        assert [failed.hard for failed in reports_of(bench, Failed)] == [False]
        self.verify(bench, A, E5)
        self.wait(bench, lambda: reports_of(bench, Failed), self.give_up_s)
        assert reports_of(bench, Failed), "it is still there"
        assert not reports_of(bench, TornDown), "it is still there"
        bench.turn_off(FaultName.STUCK_TEARDOWN)
        self.verify(bench, A, E5)
        self.wait(bench, lambda: reports_of(bench, TornDown), self.settle_s)
        # said twice where the agent had seen the guest's end by itself before it was asked
        assert {report.epoch for report in reports_of(bench, TornDown)} == {E5}
        assert not bench.at_work(A)

    def test_a_guest_that_outlives_the_agent_is_found(self) -> None:
        """After a restart the agent looks at the hardware, not at its empty memory."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        bench.turn_on(FaultName.STUCK_TEARDOWN)
        bench.turn_on(FaultName.AMNESIA)
        bench.pass_time(0.1)
        self.end(bench, A, E5)
        self.wait(bench, lambda: reports_of(bench, Failed), self.give_up_s)
        assert not reports_of(bench, TornDown)
        assert reports_of(bench, Failed)

    def test_a_slow_teardown_is_waited_for(self) -> None:
        """Lateness alone is neither free nor failed."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        bench.turn_on(FaultName.DEAF_GUEST)
        bench.turn_on(FaultName.SLOW_TEARDOWN)
        self.end(bench, A, E5)
        self.sleep(bench, 1)
        assert bench.at_work(A)
        assert not reports_of(bench, TornDown)
        assert not reports_of(bench, Failed)
        self.wait(bench, lambda: reports_of(bench, TornDown), self.give_up_s)
        assert reports_of(bench, TornDown)
        assert not reports_of(bench, Failed)

    def test_a_failed_scrub_is_a_hard_failure(self) -> None:
        """Memory that could not be cleared is not given to the next tenant, and looking again does not help."""
        bench = self.make_bench()
        self.grant(bench, A, E5)
        bench.work(A, E5)
        bench.turn_on(FaultName.SCRUB_FAILURE)
        self.end(bench, A, E5)
        self.wait(bench, lambda: reports_of(bench, Failed), self.settle_s)
        assert [failed.hard for failed in reports_of(bench, Failed)] == [True]
        assert not reports_of(bench, TornDown)

    def test_a_device_fault_ends_its_leases_and_is_said(self) -> None:
        """The lease on it ends as lost; the other device goes on."""
        bench = self.make_bench()
        self.grant(bench, A, E5, device=0)
        self.grant(bench, B, E6, device=1)
        gpu = part_of(bench, 0).resource
        bench.turn_on(FaultName.DEVICE_FAULT, gpu)
        self.wait(bench, lambda: reports_of(bench, Fault) and reports_of(bench, EndedHere), self.settle_s)
        assert {fault.resource for fault in reports_of(bench, Fault)} == {gpu}
        assert {(end.lease, end.reason) for end in reports_of(bench, EndedHere)} == {(A, EndReason.DEVICE_LOST)}
        refused(bench, A, E5, LeaseEnded)
        bench.work(B, E6)
        self.end(bench, A, E5)
        self.wait(bench, lambda: reports_of(bench, Failed), self.settle_s)
        assert [failed.hard for failed in reports_of(bench, Failed)] == [True]

    def test_lost_reports_are_given_again(self) -> None:
        """A lost report is sent again when the order is repeated, and otherwise by the agent itself."""
        bench = self.make_bench()
        self.grant(bench, A, E5, ttl_s=2)
        bench.turn_on(FaultName.LOST_REPORTS)
        self.sleep(bench, 3)
        bench.reports.clear()
        bench.turn_off(FaultName.LOST_REPORTS)
        self.wait(bench, lambda: reports_of(bench, EndedHere), self.give_up_s)
        assert reports_of(bench, EndedHere)
