"""The in-memory agent passes the suite that every agent must pass."""

from __future__ import annotations

from sublet.testing import AgentBench, AgentConformance, MemoryBench, ParkingConformance, VolumeConformance


class TestMemoryAgent(AgentConformance):
    def make_bench(self) -> AgentBench:
        return MemoryBench()


class TestMemoryAgentParks(ParkingConformance):
    def make_bench(self) -> AgentBench:
        return MemoryBench()


class TestMemoryAgentKeepsVolumes(VolumeConformance):
    def make_bench(self) -> AgentBench:
        return MemoryBench()
