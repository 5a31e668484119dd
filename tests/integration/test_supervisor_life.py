"""A supervisor that dies, is started anew, is left alone: what runs, what goes, what is not given to others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.values import EndReason, Epoch, Exclusivity, Kind, LeaseId, ResourceId
from sublet.wire.orders import End, Failed, Grant, Held, Part, TornDown, Verify
from tests.integration.supervisor_stage import (
    TENANT,
    Freezer,
    SupervisorStage,
    needs_freezer,
    supervisor_at,
)
from tests.traces import now_ns, until

A, B = LeaseId("lease-a"), LeaseId("lease-b")
E5, E6, E7 = Epoch(1, 5), Epoch(1, 6), Epoch(1, 7)
S = 1_000_000_000
STUBBORN = "trap '' TERM HUP INT; (setsid sleep 1000 &) ; (sleep 1000 &) ; exec sleep 1000"
"""Double-forks, once out of its session, and ignores what it can."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path, gpus=4) as found:
        yield found


def part(n: int = 0) -> Part:
    return Part(
        resource=ResourceId(f"bench/gpu{n}"),
        kind=Kind.GPU,
        amount=1 << 30,
        millis=1000,
        exclusivity=Exclusivity.SESSION,
    )


def grant(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, *, n: int = 0, ttl_s: float = 300) -> None:
    ttl_ns = round(ttl_s * S)
    stage.office_line.order(
        Grant(
            lease=lease,
            epoch=epoch,
            number=1,
            tenant=TENANT,
            parts=(part(n),),
            deadline_ns=now_ns() + ttl_ns,
            ttl_ns=ttl_ns,
        )
    )


def end(stage: SupervisorStage, lease: LeaseId, epoch: Epoch, *, n: int = 0, grace_s: float = 0) -> None:
    stage.office_line.order(
        End(
            lease=lease,
            epoch=epoch,
            number=9,
            parts=(part(n),),
            reason=EndReason.RELEASED,
            grace_ns=round(grace_s * S),
        )
    )


def heard(stage: SupervisorStage, kind: type, count: int = 1) -> None:
    def is_heard() -> bool:
        stage.office_line.wait(0.02)
        return sum(isinstance(report, kind) for report in stage.office_line.reports) >= count

    until(f"{count} {kind.__name__}", is_heard)


@needs_freezer
def test_what_a_predecessor_left_frozen_harms_no_guest_of_today(stage: SupervisorStage) -> None:
    """It is looked for again and again, and each time only its own are ended."""
    grant(stage, A, E5)
    frozen = stage.holder(A, E5).start("sh", "-c", STUBBORN)
    until("three processes", lambda: len(stage.marked(A)) == 3)
    freezer = Freezer.make(f"elsewhere-{stage.office}")
    assert freezer is not None
    with contextlib.closing(freezer):
        freezer.freeze([one.pid for one in stage.marked()])
        stage.kill()
        stage.start()
        stage.connect()
        grant(stage, B, E6, n=1)
        living = stage.holder(B, E6).start("sleep", "1000")
        end(stage, A, E5)
        heard(stage, Failed)
        stage.office_line.order(Verify(lease=A, epoch=E5, parts=(part(0),)))
        heard(stage, Failed, 2)
        assert [one.pid for one in stage.marked(B)] == [living.pid]
        failed = next(one for one in stage.office_line.reports if isinstance(one, Failed))
        assert f"process {frozen.pid}" in failed.detail
        assert "frozen" in failed.detail
        stage.office_line.reports.clear()
        grant(stage, LeaseId("lease-c"), E7)
        assert not any(isinstance(one, Held) for one in stage.office_line.reports), "nobody gets it"
        freezer.thaw()
        stage.office_line.order(Verify(lease=A, epoch=E5, parts=(part(0),)))
        heard(stage, TornDown)
        assert not stage.marked(A)
        assert [one.pid for one in stage.marked(B)] == [living.pid]
    end(stage, B, E6, n=1)
    heard(stage, TornDown, 2)
    assert stage.residue() == []
