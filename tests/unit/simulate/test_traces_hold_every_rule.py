"""Traces and generated days on the real ledger, with a reader along who checks every rule after every command."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest

from sublet.office.ledger import commands as cmd
from sublet.office.ledger import events as ev
from sublet.office.ledger.answers import Outcome
from sublet.office.ledger.checks import check_after, check_books
from sublet.office.ledger.ledger import Ledger
from sublet.office.ledger.queue_order import has_smaller_share
from sublet.office.ledger.records import Now
from sublet.office.ledger.state import State
from sublet.office.policy_file import parse_policy
from sublet.simulate.replay import Replay, ReplayHardware, Rules
from sublet.simulate.workload import WorkloadSession, course, generate, merged, parse_lab, read_trace
from sublet.values import TenantId
from tests.unit.office.ledger.bench import Bench
from tests.unit.office.ledger.watch import Note, Watch

POLICY_FILE: Final = """
[group.course]
weight = 3
floor = 1
ceiling = 5
[group.lab]
weight = 1
[reservation.lab]
group = "course"
gpus = 1
when = "every day 10:00-12:00"
zone = "UTC"
"""
LOOK_EVERY: Final = 1 if os.environ.get("SUBLET_CRASH_ALL") else 31
"""After so many commands all of the books are walked, and the meters compared; what a command changed is checked after
each."""


class Seen(NamedTuple):
    """What the reader may look at."""

    ledger: Ledger
    now: Now

    @property
    def state(self) -> State:
        return self.ledger.state

    @property
    def now_ns(self) -> int:
        return self.now.ns


class Reader(Watch):
    """Turns last for hours here, so a request for a further one also meets tenants that have used more."""

    def _may_preempt(self, event: ev.Noticed, state: State, now_ns: int) -> None:
        """S7: it takes no lease in its first minutes whose tenant had the smaller share as it came."""
        if event.notice.beneficiary is not None:
            lease, request = state.leases[event.lease], state.leases[event.notice.beneficiary]
            if has_smaller_share(state, lease.tenant, request.tenant, request.asked_at_ns, self.policy):
                super()._may_preempt(event, state, now_ns)

    def _was_at_rest(self, event: ev.Noticed, note: Note, state: State, now_ns: int) -> None:
        """S10: nor one in a pause of a holder that has used less."""
        if event.notice.beneficiary is not None:
            lease, request = state.leases[event.lease], state.leases[event.notice.beneficiary]
            if has_smaller_share(state, lease.tenant, request.tenant, now_ns, self.policy):
                super()._was_at_rest(event, note, state, now_ns)


class Watched(Ledger):
    """A ledger that is read along."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.watch = Reader(self.policy)
        self.commands = 0

    def handle(self, command: cmd.Command, now: Now) -> Outcome:
        outcome = super().handle(command, now)
        self.watch.see(command, outcome, cast("Bench", Seen(self, now)))
        self.commands += 1
        if outcome.events:
            check_after(self.state, outcome.events)
        if self.commands % LOOK_EVERY == 0:
            check_books(self.state)
            for tenant in self.state.tenants:
                metered = self.state.used_milli_ns(tenant, now.ns)
                assert metered == self.watch.used_milli_ns(TenantId(tenant), now.ns), f"S9: {tenant}"
        return outcome


def watched(
    sessions: Sequence[WorkloadSession], gpus: int, monkeypatch: pytest.MonkeyPatch, rules: Rules | None = None
) -> tuple[Replay, Counter[str]]:
    """The workload, replayed to its end."""
    monkeypatch.setattr("sublet.simulate.replay.Ledger", Watched)
    replay = Replay(sessions, ReplayHardware(gpus=gpus), rules=rules)
    replay.run()
    assert isinstance(replay._ledger, Watched)
    return replay, replay._ledger.watch.met


@pytest.mark.slow
@pytest.mark.needs("material")
@pytest.mark.parametrize(
    ("gpus", "part"), [(8, 7), *(pytest.param(gpus, 1, marks=pytest.mark.soak) for gpus in (40, 48, 64))]
)
def test_the_two_day_trace_breaks_no_rule(gpus: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, or each seventh notebook."""
    sessions = read_trace(Path(os.environ["SUBLET_MATERIAL"], "data", "notebook-trace-2days.csv"))[::part]
    replay, met = watched(sessions, gpus, monkeypatch)
    assert replay.result.cells == 518 or part > 1
    assert met["Promised"] or gpus == 64


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_generated_days_break_no_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups with weights, a floor, a ceiling and a reservation every day, and too few GPUs."""
    lab = [replace(one, group="lab") for one in generate(seed, sessions=16, days=2)]
    labs = (parse_lab("Tue 10:00-12:00"),)
    students = [replace(one, group="course") for one in course(seed, students=16, labs=labs)]
    rules = Rules(declared=parse_policy(POLICY_FILE).declared)
    _, met = watched(merged(lab, students), 4, monkeypatch, rules)
    assert met.keys() >= {"Promised", "Noticed", "ReservationLent", "ReservationOver", "preempted by a further turn"}
