"""Fairness over time on the real ledger: tenants that ask all the time have the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from sublet.office.ledger import events as ev
from sublet.office.policy_file import parse_policy
from sublet.simulate.replay import Replay, ReplayHardware, Rules
from sublet.simulate.workload import Cell, WorkloadSession
from sublet.values import NS_PER_S, TenantId

HOUR_NS = 3600 * NS_PER_S
HOLD_NS = HOUR_NS // 2
"""The maximum hold."""


class Recorded(Replay):
    """Notes who held how much when."""

    def __init__(self, sessions: Sequence[WorkloadSession], hardware: ReplayHardware, rules: Rules) -> None:
        self.held: list[tuple[TenantId, int, int, int]] = []
        super().__init__(sessions, hardware, rules=rules)

    def _on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.Ending):
            since_ns, millis = self._granted[event.lease]
            self.held.append((self._by_lease[event.lease].tenant, millis, since_ns, self._now_ns))
        super()._on_event(event)


def jain(shares: Sequence[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


SETUPS = (
    (1, (1, 2)), (1, (1, 3)), (2, (1, 2)), (2, (2, 3)), (2, (1, 2, 3)), (2, (1, 4)), (3, (1, 2)), (3, (1, 5)),
    (4, (1, 3)), (4, (1, 4)), (4, (1, 7)), (4, (1, 2, 3)), (4, (1, 1, 2)), (6, (1, 2, 4)), (8, (1, 2, 3, 4)),
)  # fmt: skip
"""GPUs, and the weights of those who want all of them."""
HARDEST = ((1, (1, 3)), (2, (1, 2, 3)), (2, (1, 4)))
"""The set-ups in which one turn more or less is most of what a tenant is due."""


@pytest.mark.parametrize(
    ("gpus", "weights", "cell_min"),
    [
        pytest.param(2, (1, 1, 1), 840.0, id="long cells"),
        pytest.param(2, (1, 1, 1), 7.0, id="short cells"),
        *(
            pytest.param(
                *setup,
                840.0,
                id=f"{setup[0]} GPUs, weights {setup[1]}",
                marks=() if setup in HARDEST else pytest.mark.soak,
            )
            for setup in SETUPS
        ),
    ],
)
def test_usage_per_weight_is_even_in_every_window_of_eight_maximum_holds(
    gpus: int, weights: tuple[int, ...], cell_min: float
) -> None:
    """Each tenant is a group of its own and asks for all GPUs all the time, from one moment on. Jain's index of what
    they had per weight is at least 0.95, wherever the window of four hours begins. While holders of more weight yielded
    after the maximum as soon as the others, all had the same: with weights 1 and 3 the index was 0.79."""
    tenants = len(weights)
    cells = (Cell(0.0, cell_min, 1),) * round(840 / cell_min)
    sessions = [
        WorkloadSession(f"s{number}-{each}", 0.0, cells, 840.0, tenant=f"t{number}", group=f"g{number}")
        for each in range(gpus)
        for number in range(tenants)
    ]
    text = "".join(f"[group.g{number}]\nweight = {weight}\n" for number, weight in enumerate(weights))
    replay = Recorded(sessions, ReplayHardware(gpus=gpus), Rules(declared=parse_policy(text).declared))
    begin_ns = replay.result.start_ns
    replay.run()
    worst = 1.0
    for low_ns in range(begin_ns, begin_ns + 10 * HOUR_NS, HOLD_NS // 3):
        used: dict[TenantId, int] = defaultdict(int)
        for tenant, millis, start_ns, stop_ns in replay.held:
            used[tenant] += millis * max(0, min(stop_ns, low_ns + 8 * HOLD_NS) - max(start_ns, low_ns))
        worst = min(worst, jain([used[TenantId(f"t-t{number}")] / weight for number, weight in enumerate(weights)]))
    assert worst >= 0.95
