"""A ledger alone with a long queue: all devices are held, and thousands of requests of many tenants wait.

It runs as a process of its own (``python -m benchmarks.waiting_ledger``). One JSON line in, one out; the end of its
input is its end. The queue keeps its length: a release lets the first request in, an acquire puts another at its end.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any, Final

from sublet.errors import SubletError
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Outcome, Place
from sublet.office.ledger.commands import (
    Acquire,
    AddTenant,
    AgentReport,
    Claim,
    Command,
    NodeUp,
    OpenOffice,
    Release,
    SetGroup,
)
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.policy import Policy
from sublet.office.ledger.records import GroupRecord, Now, Want
from sublet.values import GIB, NS_PER_S, GroupId, Kind, LeaseId, NodeId, RequestId, ResourceId, TenantId
from sublet.wire.orders import Device, End, Extend, Grant, Held, Inventory, TornDown

__all__ = ["WaitingLedger"]

DEVICES: Final = 64
NODE: Final = NodeId("node-0")
TTL_NS: Final = 3600 * NS_PER_S
STEP_NS: Final = 1_000_000
"""How far the clock goes with each command: a thousand commands a second."""


class WaitingLedger:
    """One node with 64 devices, tenants in as many groups as wanted (0: none), and as long a queue."""

    def __init__(self, waiting: int, tenants: int, groups: int) -> None:
        self.ledger = Ledger(Policy(queue_max=2 * waiting))
        self._ns, self._count, self._random = 1_000 * NS_PER_S, 0, random.Random(1)
        self._live: dict[LeaseId, TenantId] = {}
        self._tenants = [TenantId(f"tenant-{number}") for number in range(tenants)]
        self._do(OpenOffice(incarnation=1, clock_domain="bench"))
        devices = tuple(
            Device(id=ResourceId(f"gpu-{number}"), kind=Kind.GPU, capacity=16 * GIB) for number in range(DEVICES)
        )
        self._do(NodeUp(inventory=Inventory(node=NODE, domain="bench", devices=devices)))
        for number in range(groups):
            self._do(SetGroup(group=GroupRecord(id=GroupId(f"group-{number}"), weight=1 + number % 3)))
        for number, tenant in enumerate(self._tenants):
            group = GroupId(f"group-{number % groups}") if groups else None
            self._do(AddTenant(tenant=tenant, token_hash=tenant, group=group))
        while self.ledger.state.queued_count < waiting:
            self.acquire()

    def acquire(self) -> int:
        """Nanoseconds of a request that comes and waits, its place included."""
        self._count += 1
        tenant = self._tenants[self._count % len(self._tenants)]
        command = Acquire(
            tenant=tenant,
            lease=LeaseId(f"l-{self._count:016x}"),
            request_id=RequestId(f"bench-{self._count}"),
            wants=(Want(kind=Kind.GPU, amount=GIB),),
            ttl_ns=TTL_NS,
            holder="benchmark",
        )
        began = time.perf_counter_ns()
        outcome = self._do(command)
        took = time.perf_counter_ns() - began
        if not isinstance(outcome.answer, Place):
            self._live[command.lease] = tenant
        return took

    def release(self) -> int:
        """The same of a lease that is given back, its device seen to be clear, and the next request let in."""
        lease = self._random.choice(list(self._live))
        began = time.perf_counter_ns()
        outcome = self._do(Release(tenant=self._live.pop(lease), lease=lease))
        took = time.perf_counter_ns() - began
        if outcome.answer is None:
            raise RuntimeError("a release was not answered")
        return took

    def _do(self, command: Command) -> Outcome:
        """The command, what its agent reports, and the claim of what was granted."""
        self._ns += STEP_NS
        now = Now(self._ns, self._ns)
        outcome = self.ledger.handle(command, now)
        if isinstance(outcome.answer, SubletError):
            raise outcome.answer
        todo = [outcome]
        while todo:
            done = todo.pop()
            for order in done.orders:
                match order:
                    case Grant() | Extend():
                        report: Held | TornDown = Held(
                            node=NODE, lease=order.lease, epoch=order.epoch, number=order.number
                        )
                    case End():
                        gone = tuple(part.resource for part in order.parts)
                        report = TornDown(node=NODE, lease=order.lease, epoch=order.epoch, resources=gone)
                    case _:
                        continue
                todo.append(self.ledger.handle(AgentReport(report=report), now))
            for event in done.events:
                if isinstance(event, ev.Granted) and event.lease not in self._live and type(command) is Release:
                    tenant = self.ledger.state.leases[event.lease].tenant
                    self._live[event.lease] = tenant
                    todo.append(self.ledger.handle(Claim(tenant=tenant, lease=event.lease), now))
        return outcome


def main() -> int:
    made: WaitingLedger | None = None
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        if made is None:
            made = WaitingLedger(asked["waiting"], asked["tenants"], asked["groups"])
            answer: dict[str, Any] = {"waiting": made.ledger.state.queued_count}
        else:
            # in turn, so that the queue keeps its length
            took = [(made.release(), made.acquire()) for _ in range(asked["most"])]
            answer = {"release": [one for one, _ in took], "acquire": [other for _, other in took]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
