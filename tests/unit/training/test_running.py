"""What `sublet train` makes of a program that cannot be gone on with, or that never began."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import CapacityExceeded, LeaseNotActive
from sublet.training.running import Life, TrainingPlan, TrainingRun, _Attendance


def attendance(*, parking_is_over: bool) -> _Attendance:
    """Its lease was taken, and no other is to be had for what is parked."""

    def gpu(**_: Any) -> Any:
        raise CapacityExceeded("GPU unavailable: not free now")

    def lease(name: str) -> Any:
        assert name == "l-a-p4"
        return SimpleNamespace(end="over" if parking_is_over else None)

    fabric = SimpleNamespace(gpu=gpu, lease=lease)
    training: Any = SimpleNamespace(
        fabric=fabric,
        preemptions=0,
        onlooker=SimpleNamespace(news=lambda _: None),
        terms={},
    )
    made = _Attendance(training, SimpleNamespace(id="l-a", end=None), SimpleNamespace())  # type: ignore[arg-type]
    made._end = SimpleNamespace(parked="l-a-p4@1.3")  # type: ignore[assignment]
    return made


def test_what_left_its_parking_lease_is_heard_out_and_run_again() -> None:
    """It saved when that lease ended, so there is an end to be heard, and another lease to be asked for."""
    found = attendance(parking_is_over=True)
    found._resume(contextlib.ExitStack())
    assert found._end is None


def test_what_is_parked_still_is_told_as_it_is() -> None:
    with pytest.raises(CapacityExceeded):
        attendance(parking_is_over=False)._resume(contextlib.ExitStack())


def test_every_lease_of_a_training_is_asked_for_on_its_terms() -> None:
    """The first, and the one with which it goes on after it was parked, which would be interactive otherwise."""
    asked: list[dict[str, Any]] = []

    def gpu(**terms: Any) -> Any:
        asked.append(terms)
        return SimpleNamespace(
            release=lambda: None, activity=lambda _: contextlib.nullcontext(), on_end=lambda _: None, id="l-a", end=None
        )

    plan = TrainingPlan(argv=["python", "x.py"], name="x", vram=1, ttl=60, tier="spot", pay_priority=True, wait=9)
    onlooker: Any = SimpleNamespace(news=lambda _: None, waits=lambda _: None)
    training = TrainingRun(SimpleNamespace(gpu=gpu), plan, onlooker)  # type: ignore[arg-type]
    parked = _Attendance(training, training._acquire(), SimpleNamespace())  # type: ignore[arg-type]
    parked._resume(contextlib.ExitStack())
    first, second = asked
    assert {"ttl": 60, "tier": "spot", "pay_priority": True, "wait": 9}.items() <= first.items()
    assert second == {**training.terms, "resume": second["resume"]}


class Taken:
    """A lease that is over before its program began; the office's books know a moment later."""

    id = "l-b"

    def __init__(self, reason: str) -> None:
        self.reason, self.asked, self.activities = reason, 0, 0

    def view(self, _: str) -> Any:
        self.asked += 1
        return SimpleNamespace(tenant="local", end=SimpleNamespace(reason=self.reason) if self.asked > 2 else None)

    @contextlib.contextmanager
    def activity(self, _: str) -> Iterator[None]:
        self.activities += 1
        yield
        self.activities -= 1


def never_begun(monkeypatch: pytest.MonkeyPatch, lease: Taken) -> Life:
    def start(*_: Any, **__: Any) -> Any:
        assert lease.activities == 1, "who waits for an interpreter is not idle"
        raise LeaseNotActive("lease l-b is ended, so there is nothing to open with a token")

    monkeypatch.setattr("sublet.training.running.start_spec", start)
    fabric: Any = SimpleNamespace(lease=lease.view)
    run = TrainingRun(fabric, TrainingPlan(argv=["python", "x.py"], name="x", vram=1), SimpleNamespace())
    return run._live(lease, SimpleNamespace())  # type: ignore[arg-type]


def test_a_lease_that_is_taken_before_its_program_began_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    life = never_begun(monkeypatch, Taken("preempted"))
    assert (life.is_over, life.reason) == (False, "preempted")


def test_a_lease_that_its_holder_gave_back_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LeaseNotActive):
        never_begun(monkeypatch, Taken("released"))
