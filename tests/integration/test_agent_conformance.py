"""The contract of agents, kept by the real one: a supervisor process, real guests, real time.

The bench is the office: it gives orders over the supervisor's socket and hands holders over. To work is to have a guest
running; whether one is there is seen in /proc by the marks of its environment, never in a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.node.agent.port import AgentPort
from sublet.node.processes.tree import LEASE_MARK
from sublet.testing import AgentBench, AgentConformance, ParkingConformance, VolumeConformance
from sublet.testing.machine import FaultName
from sublet.values import GIB, Epoch, Kind, LeaseId, NodeId, ResourceId
from sublet.wire.orders import Device, Inventory, Order, Report
from tests.integration.supervisor_stage import Freezer, SupervisorStage, needs_freezer
from tests.traces import now_ns, until

GUEST = """
trap '[ -e "$DEAF" ] || exit 0' TERM
[ -z "$SUBLET_BLOCK" ] || : > "$SUBLET_BLOCK/worked"
sleep 1000 &
: > "$READY"
while :; do wait; sleep 1000 & done
"""
"""It leaves when it is told to, unless it is deaf; it has a child, as programs do, and writes where it may."""
SLOW_S = 0.6
"""So long a slow teardown takes, in time that the suite lets pass. What the machine takes beside that does not count,
or a busy one would thaw before the suite has looked."""
PATIENT = """
from sublet.node.supervisor import real_hardware
real_hardware.KILL_AGAIN_NS = (*real_hardware.KILL_AGAIN_NS[:-1], 60_000_000_000)
"""
"""A supervisor that gives up later than after 3.6 s, since such a machine may stand still for as long."""


class RealAgent:
    """The agent's port over the supervisor's socket."""

    def __init__(self, stage: SupervisorStage) -> None:
        self._stage = stage
        self._incarnation = 1

    @property
    def node(self) -> NodeId:
        return self._stage.inventory.node

    def inventory(self) -> Inventory:
        return self._stage.inventory

    def send(self, order: Order, *, incarnation: int | None = None) -> None:
        self._incarnation = max(self._incarnation, incarnation or 0)
        self._stage.office_line.order(order, incarnation=incarnation or self._incarnation)

    def tick(self, now_ns: int) -> int | None:
        return None


class RealBench:
    """One supervisor, and what breaks it."""

    guest: tuple[str, ...] = ("sh", "-c", GUEST)

    def __init__(self, place: Path, faults: str = "") -> None:
        self._stage = SupervisorStage(place)
        self._stage.faults = faults
        self._place = place
        self._agent = RealAgent(self._stage)
        self._freezer: Freezer | None = None
        self._thaw_after_s: float | None = None
        self._is_losing = False
        self._broken: list[str] = []
        self._worked = 0
        self.reports: list[Report] = []

    def open(self) -> None:
        self._stage.start()
        self._stage.connect()
        self._stage.office_line.reports = self.reports

    def close(self) -> None:
        try:
            if self._freezer is not None:
                self._freezer.close()
        finally:
            self._stage.close()

    # ---- the bench ----

    @property
    def agent(self) -> AgentPort:
        return self._agent

    def now_ns(self) -> int:
        return now_ns()

    def pass_time(self, seconds: float) -> None:
        if self._thaw_after_s is not None:
            self._thaw_after_s -= seconds
            if self._thaw_after_s <= 0:
                self._thaw()
        end_ns = now_ns() + round(seconds * 1e9)
        while (left_ns := end_ns - now_ns()) > 0:
            self._stage.office_line.wait(min(0.05, left_ns / 1e9))
            if self._is_losing:
                self.reports.clear()

    def work(self, lease: LeaseId, epoch: Epoch) -> None:
        self._worked += 1
        ready = self._place / f"ready{self._worked}"
        env = self._stage.env | {"READY": str(ready), "DEAF": str(self._deaf)}
        started = self._stage.holder(lease, epoch).start(*self.guest, env=env)
        procs = self._stage.procs
        until("a guest at work", lambda: ready.exists() or procs.stat(started.pid) is None)
        self._look_for_overlap()

    def at_work(self, lease: LeaseId) -> bool:
        return bool(self._stage.marked(lease))

    def broken_rules(self) -> list[str]:
        self._look_for_overlap()
        return self._broken

    def _look_for_overlap(self) -> None:
        """Two leases on one device, as the environments of living processes say."""
        on: dict[str, set[str]] = {}
        for identity in self._stage.marked():
            marks = self._stage.procs.marks(identity.pid, "SUBLET_")
            on.setdefault(marks.get("SUBLET_DEVICES", ""), set()).add(marks.get(LEASE_MARK, ""))
        self._broken += [f"{device}: {sorted(leases)}" for device, leases in on.items() if len(leases - {""}) > 1]

    # ---- breaking it ----

    @property
    def _deaf(self) -> Path:
        return self._place / "deaf"

    def turn_on(self, fault: FaultName, resource: ResourceId | None = None) -> None:
        match fault:
            case FaultName.DEAF_GUEST:
                self._deaf.touch()
            case FaultName.STUCK_TEARDOWN:
                self._freeze()
            case FaultName.SLOW_TEARDOWN:
                self._freeze()
                self._thaw_after_s = SLOW_S
            case FaultName.AMNESIA:
                self._stage.kill()
                self.open()
            case FaultName.LOST_REPORTS:
                self._is_losing = True
            case _:
                raise NotImplementedError(fault)

    def turn_off(self, fault: FaultName, resource: ResourceId | None = None) -> None:
        match fault:
            case FaultName.LOST_REPORTS:
                self._is_losing = False
            case FaultName.STUCK_TEARDOWN:
                self._thaw()
            case _:
                raise NotImplementedError(fault)

    def _freeze(self) -> None:
        self._freezer = Freezer.make(f"elsewhere-{self._stage.office}")
        assert self._freezer is not None
        self._freezer.freeze([identity.pid for identity in self._stage.marked()])

    def _thaw(self) -> None:
        assert self._freezer is not None
        self._freezer.thaw()
        self._thaw_after_s = None


class TestRealAgent(AgentConformance):
    """All of it, but for what only a GPU can do: report an error of its own, or fail to have its memory cleared. Those
    two are played by the in-memory agent, whose law of the node is the same code."""

    second_s = 0.5
    settle_s = 20.0
    give_up_s = 30.0
    quiet_s = 2.5  # the next repetition would come within two seconds

    test_a_failed_scrub_is_a_hard_failure = None  # type: ignore[assignment]
    test_a_device_fault_ends_its_leases_and_is_said = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path) -> Iterator[None]:
        self._place = tmp_path
        self._faults = ""
        self._made: list[RealBench] = []
        yield
        for bench in self._made:
            bench.close()

    def make_bench(self) -> AgentBench:
        bench = RealBench(self._place, self._faults)
        self._made.append(bench)
        bench.open()
        return bench

    @needs_freezer
    def test_no_time_out_leads_to_free(self) -> None:
        super().test_no_time_out_leads_to_free()

    @needs_freezer
    def test_a_guest_that_outlives_the_agent_is_found(self) -> None:
        super().test_a_guest_that_outlives_the_agent_is_found()

    @needs_freezer
    def test_a_slow_teardown_is_waited_for(self) -> None:
        self._faults = PATIENT
        super().test_a_slow_teardown_is_waited_for()


class TestRealAgentParks(ParkingConformance):
    """The same for guests that are taken off their device alive."""

    second_s = 0.5
    settle_s = 20.0

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path) -> Iterator[None]:
        self._place = tmp_path
        self._made: list[RealBench] = []
        yield
        for bench in self._made:
            bench.close()

    def make_bench(self) -> AgentBench:
        bench = RealBench(self._place)
        self._made.append(bench)
        bench.open()
        return bench


class TestRealAgentKeepsVolumes(VolumeConformance):
    """And for what its leases leave on a real disk."""

    second_s = 0.5
    settle_s = 100.0  # an image is put away when nothing has it mounted, the guests of other tests included

    @pytest.fixture(autouse=True)
    def _at(self, tmp_path: Path) -> Iterator[None]:
        self._place = tmp_path
        self._made: list[RealBench] = []
        yield
        for bench in self._made:
            bench.close()

    def make_bench(self) -> AgentBench:
        bench = RealBench(self._place)
        disk = Device(id=ResourceId("bench/block"), kind=Kind.BLOCK, capacity=GIB)
        stage = bench._stage
        stage.inventory = replace(stage.inventory, devices=(*stage.inventory.devices, disk))
        self._made.append(bench)
        bench.open()
        return bench
