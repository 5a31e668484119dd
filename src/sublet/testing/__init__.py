"""For tests of programs that lease hardware: a clock to hold, hardware to break, agents to check.

- ``HeldClock`` stands still until it is moved; it can reboot and its wall clock can jump.
- ``MemoryAgent`` is an agent with pretended hardware (``Machine``) and real rules; ``Faults`` breaks it by name.
- ``AgentConformance`` tests any agent: hand it a bench.
- ``ParkingConformance`` tests an agent whose devices can suspend.
- ``DeviceConformance`` tests any device: say how it is opened.
- ``ReplicaConformance`` tests any replica: say how one is made and opened again.
- ``preempt`` rehearses losing a lease.

Each name is fetched when it is first used: a test of a device needs nothing of what replicas need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sublet.testing.clock import HeldClock
    from sublet.testing.conformance import AgentBench, AgentConformance
    from sublet.testing.device_conformance import DeviceConformance
    from sublet.testing.machine import Effect, FaultName, Faults, Machine
    from sublet.testing.memory import MemoryAgent, MemoryBench
    from sublet.testing.parking_conformance import ParkingConformance
    from sublet.testing.pretended import Timings
    from sublet.testing.rehearsal import preempt
    from sublet.testing.replica_conformance import ReplicaConformance
    from sublet.testing.volume_conformance import VolumeConformance

__all__ = [
    "AgentBench",
    "AgentConformance",
    "DeviceConformance",
    "Effect",
    "FaultName",
    "Faults",
    "HeldClock",
    "Machine",
    "MemoryAgent",
    "MemoryBench",
    "ParkingConformance",
    "ReplicaConformance",
    "Timings",
    "VolumeConformance",
    "preempt",
]

_LAZY: Final[dict[str, str]] = {
    **dict.fromkeys(("Effect", "FaultName", "Faults", "Machine"), "sublet.testing.machine"),
    "MemoryAgent": "sublet.testing.memory",
    "Timings": "sublet.testing.pretended",
    "MemoryBench": "sublet.testing.memory",
    "HeldClock": "sublet.testing.clock",
    **dict.fromkeys(("AgentBench", "AgentConformance"), "sublet.testing.conformance"),
    "DeviceConformance": "sublet.testing.device_conformance",
    "ParkingConformance": "sublet.testing.parking_conformance",
    "preempt": "sublet.testing.rehearsal",
    "ReplicaConformance": "sublet.testing.replica_conformance",
    "VolumeConformance": "sublet.testing.volume_conformance",
}


def __getattr__(name: str) -> object:
    """Fetch a public name on first use (PEP 562), and keep it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
