"""64 and 1,000 leases of a core on 100 machines, in one request: from the call to all of them active.

The machines are pretended (`MemoryAgent`, ten cores each, confirming at once); the office, its journal and the client
are the real ones. The call is `fabric.many(1000).cpu(1)`, and ends when every lease is an object in the program.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Final

import sublet
from benchmarks.harness import Bench, Figure, Goal, Row, figure
from benchmarks.ours import DISTRIBUTIONS
from benchmarks.procs import Child

SIZES: Final = (64, 1000)
ROUNDS: Final = 9
NODES: Final = 100
CORES_OF_ONE: Final = 10


def name_of(leases: int) -> str:
    return f"{leases:,} leases active on {NODES} machines"


def back_of(leases: int) -> str:
    return f"{leases:,} leases given back"


def measure(bench: Bench) -> list[Figure]:
    home = bench.folder / "machines"
    took: dict[str, list[float]] = {name(size): [] for size in SIZES for name in (name_of, back_of)}
    child = Child([sys.executable, "-m", "benchmarks.rows.burst_leases", str(home)], name="office", pipes=True)
    try:
        if child.answer().strip() != "up":
            raise RuntimeError(f"the office of {NODES} machines did not start: {child.complaint()}")
        with sublet.connect(home=home, start=False) as fabric:
            for number in range(1 + bench.either(ROUNDS, 3)):
                for size in SIZES:
                    began = time.perf_counter()
                    leases = fabric.many(size, at_least=size).cpu(1, ttl="5m", renew="always")
                    active = time.perf_counter()
                    assert len({lease.id for lease in leases}) == size
                    fabric.release(leases)
                    if number:
                        took[name_of(size)].append(active - began)
                        took[back_of(size)].append(time.perf_counter() - active)
    finally:
        child.end()
    return [figure(name, "s", samples) for name, samples in took.items()]


async def _office(home: Path) -> None:
    """An office whose machines are pretended, until its standard input ends."""
    from sublet.engines.local import Office
    from sublet.office.ledger.commands import NodeUp
    from sublet.testing.memory import MemoryAgent
    from sublet.values import Kind, NodeId, ResourceId
    from sublet.wire.orders import Device, Inventory

    office = Office(home, make_agent=MemoryAgent)
    await office.start()
    for number in range(NODES):
        name = f"machine-{number}"
        device = Device(id=ResourceId(f"{name}/cpu"), kind=Kind.CPU, capacity=CORES_OF_ONE)
        inventory = Inventory(node=NodeId(name), domain=name, devices=(device,))
        agent = MemoryAgent(inventory, report=office.driver.report, clock=office.clock)
        office.driver._agents[agent.node] = agent
        await office.driver.submit(NodeUp(inventory=inventory))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await office.close()


ROW: Final = Row(
    name="burst_leases",
    title="1,000 leases on 100 machines are active within 3 s",
    goals=[Goal(figure=name_of(size), at_most=3) for size in SIZES],
    measure=measure,
    limit_s=300,
    distributions=DISTRIBUTIONS,
)

if __name__ == "__main__":
    asyncio.run(_office(Path(sys.argv[1])))
