"""A ledger alone, as large as wanted: no journal, no socket, and an agent that confirms at once.

It runs as a process of its own (``python -m benchmarks.bare_ledger``), so that memory is counted from nothing and the
collector of one size does not walk the leases of another. One JSON line in, one out; the end of its input is its end.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from typing import Any, Final

from benchmarks.procs import memory_of
from sublet.errors import SubletError
from sublet.office.ledger.answers import Granted, Outcome
from sublet.office.ledger.commands import Acquire, AgentReport, Command, NodeUp, OpenOffice, Release, Renew, Tick
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import LOCAL_TENANT, LeaseRecord, Now, Want
from sublet.values import NS_PER_S, Epoch, Kind, LeaseId, NodeId, RequestId, ResourceId
from sublet.wire.orders import Device, End, Extend, Grant, Held, Inventory, Order, TornDown

__all__ = ["BareLedger"]

MEMORY: Final = ResourceId("memory-0")
NODE: Final = NodeId("node-0")
AMOUNT: Final = 64 << 10
TTL_NS: Final = 3600 * NS_PER_S
STEP_NS: Final = 100_000
"""How far the clock goes with each command: 10,000 commands a second."""

UPKEEP_EVERY: Final = 1_000
"""Commands between two looks at the clock: ten looks a second."""
UPKEEP_ROUNDS: Final = 36
"""Orders come up again after two seconds of the clock, twenty rounds; only rounds after that are steady."""
RELEASES_MIN: Final = 3


class BareLedger:
    """One node with one large resource, one tenant, and as many leases as asked for."""

    def __init__(self) -> None:
        self.ledger = Ledger(Policy())
        self._ns = 1_000 * NS_PER_S
        self._numbers = itertools.count()
        self._size = 0
        self._since_upkeep = 0
        self._live: list[tuple[LeaseId, Epoch]] = []
        self._random = random.Random(1)
        device = Device(id=MEMORY, kind=Kind.MEMORY, capacity=1 << 50)
        self._do(OpenOffice(incarnation=1, clock_domain="bench"))
        self._do(NodeUp(inventory=Inventory(node=NODE, domain="bench", devices=(device,))))

    def grow(self, leases: int) -> None:
        """Acquire until so many live."""
        self._size = leases
        while len(self._live) < leases:
            self._acquire()

    def measure(self, operation: str, *, seconds: float, most: int) -> list[int]:
        """Nanoseconds of single operations, the agent's confirmation included.

        Releases go back to the size that was asked for; where time is up before, a few leases too many stay.
        """
        match operation:
            case "acquire":
                return [self._acquire() for _ in range(most)]
            case "renew":
                return [self._renew() for _ in range(most)]
            case "release":
                return self._release_some(seconds)
            case "upkeep":
                return [self._upkeep_per_command() for _ in range(UPKEEP_ROUNDS)][-UPKEEP_ROUNDS // 3 :]
            case _:
                raise ValueError(f"there is no operation {operation!r}")

    def _release_some(self, seconds: float) -> list[int]:
        took: list[int] = []
        end = time.monotonic() + seconds
        while len(self._live) > self._size and (len(took) < RELEASES_MIN or time.monotonic() < end):
            took.append(self._release())
        return took

    def _upkeep_per_command(self) -> int:
        """What a turn of the clock costs, shared among the commands since the last one."""
        self._upkeep()
        for _ in range(UPKEEP_EVERY - 1):
            self._renew()
        began = time.perf_counter_ns()
        self._upkeep()
        return (time.perf_counter_ns() - began) // UPKEEP_EVERY

    def _acquire(self) -> int:
        number = next(self._numbers)
        command = Acquire(
            tenant=LOCAL_TENANT,
            lease=LeaseId(f"l-{number:016x}"),
            request_id=RequestId(f"bench-{number}"),
            wants=(Want(kind=Kind.MEMORY, amount=AMOUNT),),
            ttl_ns=TTL_NS,
            wait_ns=0,
            holder="benchmark",
        )
        began = time.perf_counter_ns()
        lease = _granted(self._do(command))
        took = time.perf_counter_ns() - began
        assert lease.epoch is not None
        self._live.append((lease.id, lease.epoch))
        return took

    def _renew(self) -> int:
        lease, epoch = self._live[self._random.randrange(len(self._live))]
        command = Renew(tenant=LOCAL_TENANT, lease=lease, epoch=epoch)
        began = time.perf_counter_ns()
        _granted(self._do(command))
        return time.perf_counter_ns() - began

    def _release(self) -> int:
        """Any of them: the oldest and the newest are the easy ones."""
        at = self._random.randrange(len(self._live))
        self._live[at], self._live[-1] = self._live[-1], self._live[at]
        lease, _ = self._live.pop()
        command = Release(tenant=LOCAL_TENANT, lease=lease)
        began = time.perf_counter_ns()
        self._do(command)
        return time.perf_counter_ns() - began

    def _upkeep(self) -> None:
        """What a driver does as time passes: a tick, and a look for orders to send again."""
        self._since_upkeep = 0
        now = Now(self._ns, self._ns)
        self.ledger.handle(Tick(), now)
        for order in self.ledger.orders_due(now):
            raise RuntimeError(f"everything was confirmed, and yet this goes out again: {order!r}")

    def _do(self, command: Command) -> Outcome:
        """The command, and what its agent reports."""
        if self._since_upkeep >= UPKEEP_EVERY:
            self._upkeep()
        self._since_upkeep += 1
        self._ns += STEP_NS
        now = Now(self._ns, self._ns)
        outcome = self.ledger.handle(command, now)
        for order in outcome.orders:
            report = _report(order)
            if report is not None:
                self.ledger.handle(AgentReport(report=report), now)
        if isinstance(outcome.answer, SubletError):
            raise outcome.answer
        return outcome


def _report(order: Order) -> Held | TornDown | None:
    match order:
        case Grant() | Extend():
            return Held(node=NODE, lease=order.lease, epoch=order.epoch, number=order.number)
        case End():
            resources = tuple(part.resource for part in order.parts)
            return TornDown(node=NODE, lease=order.lease, epoch=order.epoch, resources=resources)
        case _:
            return None


def _granted(outcome: Outcome) -> LeaseRecord:
    if not isinstance(outcome.answer, Granted):
        raise RuntimeError(f"a grant was expected, not {outcome.answer!r}")
    return outcome.answer.lease


def main() -> int:
    bare = BareLedger()
    pid = os.getpid()
    before = memory_of(pid).own
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if "grow" in asked:
            began = time.monotonic()
            bare.grow(asked["grow"])
            answer: dict[str, Any] = {"took_s": time.monotonic() - began, "bytes": memory_of(pid).own - before}
        else:
            answer = {"ns": bare.measure(asked["operation"], seconds=asked["seconds"], most=asked["most"])}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
