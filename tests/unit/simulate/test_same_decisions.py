"""What spares the ledger work in a long queue changes no decision: replays with and without it, event by event."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sublet.office.ledger import commands as cmd
from sublet.office.ledger import preemption
from sublet.office.ledger.answers import Outcome, Place
from sublet.office.ledger.placement import FreeRooms
from sublet.office.ledger.preemption import TakeableBy
from sublet.office.ledger.records import Quota
from sublet.office.ledger.scheduler import Schedule
from sublet.office.ledger.state import State
from sublet.office.policy_file import parse_policy
from sublet.simulate.replay import POLICY, Replay, ReplayHardware, Rules
from sublet.simulate.workload import Cell, WorkloadSession, course, generate, merged, parse_lab, paying
from sublet.values import TenantId, Tier

LAB = parse_lab("Tue 10:00-12:00")
DECLARED = """
[group.course]
floor = 1
weight = 2
[group.other]
ceiling = 2
[reservation.lab]
group = "course"
gpus = 1
when = "every Tue 10:00-11:00"
zone = "Europe/Berlin"
"""


def lab(students: int, seed: int = 1, group: str = "") -> list[WorkloadSession]:
    found = course(seed, students=students, labs=[LAB])
    return [replace(session, group=group) for session in found if session.start_min < 11]


def jobs(count: int, group: str = "other") -> list[WorkloadSession]:
    return [
        WorkloadSession(
            f"job{n}",
            3.0 * n,
            (Cell(0.0, 60.0 + n % 7 * 25, 1 + n % 2),),
            9999.0,
            tier=Tier.BATCH if n % 3 else Tier.SPOT,
            group=group,
        )
        for n in range(count)
    ]


class Recorded(Replay):
    """Keeps a digest of all that was decided, and of what people in the queue were told."""

    def __init__(
        self, sessions: Sequence[WorkloadSession], hardware: ReplayHardware, rules: Rules | None = None
    ) -> None:
        self.digest = hashlib.sha256()
        self.decisions = 0
        super().__init__(sessions, hardware, rules=rules)

    def _handle(self, command: cmd.Command) -> Outcome:
        outcome = super()._handle(command)
        if outcome.events or outcome.orders:
            answer: Any = outcome.answer
            told = (answer.position, answer.estimate_ns, answer.reason) if isinstance(answer, Place) else str(answer)
            self.digest.update(repr((self._now_ns, told)).encode())
            self.digest.update(msgspec.json.encode((outcome.events, outcome.orders)))
            self.decisions += 1
        return outcome


WORKLOADS: dict[str, Callable[[], Recorded]] = {
    "a lab on one device": lambda: Recorded(lab(30), ReplayHardware(gpus=1, vram_gib=16)),
    "some pay": lambda: Recorded(paying(lab(16, 3), 0.25, 1), ReplayHardware(gpus=1, vram_gib=16)),
    "notebooks": lambda: Recorded(generate(2, sessions=12, days=2), ReplayHardware(gpus=6, per_node=4)),
    "limits of device time": lambda: Recorded(
        generate(5, sessions=10, days=2),
        ReplayHardware(gpus=6, per_node=4),
        Rules(policy=msgspec.structs.replace(POLICY, quota_default=Quota(gpus=2, gpu_seconds=1500))),
    ),
    "groups, a floor, a reservation, jobs": lambda: Recorded(
        merged(lab(6, group="course"), jobs(12)),
        ReplayHardware(gpus=3, per_node=2),
        Rules(declared=parse_policy(DECLARED).declared, week_min=LAB.start_min),
    ),
    "gangs and jobs": lambda: Recorded(
        merged(generate(7, sessions=8, days=1), jobs(10, "")), ReplayHardware(gpus=6, per_node=4)
    ),
}


class Forgetful(dict[TenantId, int]):
    def __setitem__(self, tenant: TenantId, share: int) -> None:
        """Keeps nothing."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_walk_that_ends_early_decides_as_one_to_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without: every request in the queue is looked at, all leases are candidates for each, no share is kept."""
    fast = WORKLOADS[name]()
    fast.run()
    monkeypatch.setattr(Schedule, "_is_over", lambda *_, **__: False)
    monkeypatch.setattr("sublet.office.ledger.scheduler._alike", lambda *_: None)
    monkeypatch.setattr(preemption, "takeable", lambda *_: TakeableBy())
    monkeypatch.setattr(State, "shares_at_rest", lambda *_: Forgetful())
    monkeypatch.setattr(FreeRooms, "have_room_for", lambda *_: True)
    slow = WORKLOADS[name]()
    slow.run()
    assert fast.decisions == slow.decisions > 100
    assert fast.digest.digest() == slow.digest.digest()


def test_requests_look_for_victims_among_those_that_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded lab: less than half of the looks that there are if each request looks at each lease."""
    looks, victim = 0, preemption.victim

    def counted(*given: Any, **more: Any) -> preemption.Victim | None:
        nonlocal looks
        looks += 1
        return victim(*given, **more)

    monkeypatch.setattr(preemption, "victim", counted)
    result = WORKLOADS["a lab on one device"]().run()
    assert result.wait_s(0.95) > 60, "it is crowded"
    few, looks = looks, 0
    monkeypatch.setattr(preemption, "takeable", lambda *_: TakeableBy())
    WORKLOADS["a lab on one device"]().run()
    assert 2 * few < looks
