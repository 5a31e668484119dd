"""What an agent must do that keeps volumes, as tests. Subclass it beside ``AgentConformance``; its bench has a device
of kind ``block``, and work under a lease of blocks leaves data there.
"""

from __future__ import annotations

from sublet.lease_end import EndReason
from sublet.testing.machine import FaultName
from sublet.testing.office_in_short import ALICE, AgentBench, OfficeInShort, reports_of
from sublet.values import MIB, Epoch, Kind, LeaseId, TenantId
from sublet.wire.orders import (
    End,
    Grant,
    Held,
    NotHeld,
    Part,
    RemoveVolume,
    TornDown,
    VolumeRef,
    VolumeRemoved,
)

A, B, C = LeaseId("lease-a"), LeaseId("lease-b"), LeaseId("lease-c")
E5, E6, E7 = Epoch(1, 5), Epoch(1, 6), Epoch(1, 7)
CKPT = VolumeRef(tenant=ALICE, name="ckpt")


class VolumeConformance(OfficeInShort):
    """Volumes, as an office and the disk see them."""

    settle_s: float = 3.0
    """Long enough for a teardown, or a removal, in which nothing goes wrong."""

    def make_bench(self) -> AgentBench:
        raise NotImplementedError("say how to make a bench with the agent to be tested")

    def take(self, bench: AgentBench, lease: LeaseId, epoch: Epoch, *, kept: bool = False, works: bool = True) -> None:
        """Take a lease of the volume and, with ``works``, write into it."""
        ttl_ns = self.length_ns(600)
        bench.agent.send(
            Grant(
                lease=lease,
                epoch=epoch,
                number=1,
                tenant=ALICE,
                parts=(_part(bench),),
                deadline_ns=bench.now_ns() + ttl_ns,
                ttl_ns=ttl_ns,
                name=CKPT.name,
                kept=kept,
            )
        )
        answers = (Held, NotHeld)
        self.wait(
            bench,
            lambda: any(isinstance(one, answers) and one.lease == lease for one in bench.reports),
            self.settle_s,
        )
        if works:
            bench.work(lease, epoch)

    def give_back(self, bench: AgentBench, lease: LeaseId, epoch: Epoch) -> bool:
        """Whether it is kept, as the agent says."""
        before = len(reports_of(bench, TornDown))
        bench.agent.send(
            End(
                lease=lease,
                epoch=epoch,
                number=9,
                parts=(_part(bench),),
                reason=EndReason.RELEASED,
                grace_ns=0,
                volume=CKPT,
            )
        )
        self.wait(bench, lambda: len(reports_of(bench, TornDown)) > before, self.settle_s)
        return reports_of(bench, TornDown)[before].kept

    def remove(self, bench: AgentBench, epoch: Epoch, volume: VolumeRef = CKPT) -> bool:
        """Whether it is said to be gone."""
        before = len(reports_of(bench, VolumeRemoved))
        bench.agent.send(RemoveVolume(lease=A, epoch=epoch, number=0, volume=volume, parts=(_part(bench),)))
        self.wait(bench, lambda: len(reports_of(bench, VolumeRemoved)) > before, self.settle_s)
        return len(reports_of(bench, VolumeRemoved)) > before

    def is_there(self, bench: AgentBench, lease: LeaseId, epoch: Epoch) -> bool:
        """Whether a lease that is to go on with it is held."""
        bench.reports.clear()
        self.take(bench, lease, epoch, kept=True, works=False)
        return bool(reports_of(bench, Held))

    # ---- what is kept ----

    def test_what_was_written_is_kept_and_the_next_lease_goes_on_with_it(self) -> None:
        bench = self.make_bench()
        self.take(bench, A, E5)
        assert self.give_back(bench, A, E5)
        assert self.is_there(bench, B, E6)
        bench.work(B, E6)
        assert self.give_back(bench, B, E6)
        assert not bench.broken_rules()

    def test_where_nothing_was_written_nothing_is_kept(self) -> None:
        bench = self.make_bench()
        self.take(bench, A, E5, works=False)
        assert not self.give_back(bench, A, E5)
        assert not self.is_there(bench, B, E6)

    def test_a_lease_that_was_never_seen_is_answered_for_its_volume(self) -> None:
        """Its grant was lost: what is kept is not this lease's doing, and is kept all the same."""
        bench = self.make_bench()
        assert not self.give_back(bench, C, E5)
        self.take(bench, A, E5)
        assert self.give_back(bench, A, E5)
        assert self.give_back(bench, C, E7)

    def test_an_agent_that_dies_between_keeping_and_saying_so_says_it_when_it_is_asked_again(self) -> None:
        bench = self.make_bench()
        self.take(bench, A, E5)
        self.give_back(bench, A, E5)
        bench.turn_on(FaultName.AMNESIA)
        assert self.give_back(bench, A, E5)
        assert self.is_there(bench, B, E6)

    def test_one_lease_at_a_time_has_it(self) -> None:
        """An office that was restored gives it to another: the newer one gets it when the older is off it."""
        bench = self.make_bench()
        self.take(bench, A, E5)
        self.take(bench, B, E6, kept=True, works=False)
        self.wait(bench, lambda: any(report.lease == B for report in reports_of(bench, Held)), self.settle_s)
        assert any(report.lease == B for report in reports_of(bench, Held))
        assert not bench.at_work(A)
        assert not bench.broken_rules()

    # ---- what is removed ----

    def test_what_is_removed_is_gone_and_that_is_said_each_time_it_is_asked(self) -> None:
        bench = self.make_bench()
        self.take(bench, A, E5)
        self.give_back(bench, A, E5)
        assert self.remove(bench, E5)
        assert self.remove(bench, E5)
        assert self.remove(bench, E5, VolumeRef(tenant=TenantId("nobody"), name="never-was"))
        assert not self.is_there(bench, B, E6)

    def test_an_order_that_comes_late_takes_nothing_of_who_had_it_since(self) -> None:
        bench = self.make_bench()
        self.take(bench, A, E5)
        self.give_back(bench, A, E5)
        self.take(bench, B, E6, kept=True)
        assert self.remove(bench, E5)
        assert self.give_back(bench, B, E6)
        assert self.remove(bench, E5)
        assert self.is_there(bench, C, E7)


def _part(bench: AgentBench) -> Part:
    blocks = [device for device in bench.agent.inventory().devices if device.kind is Kind.BLOCK]
    return Part(resource=blocks[0].id, kind=Kind.BLOCK, amount=min(4 * MIB, blocks[0].capacity))
