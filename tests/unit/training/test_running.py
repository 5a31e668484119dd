"""What `sublet train` makes of a parked program that cannot be gone on with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import CapacityExceeded
from sublet.training.running import _Attendance


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
        plan=SimpleNamespace(wait=None),
        _labels={},
    )
    made = _Attendance(training, SimpleNamespace(id="l-a", end=None), SimpleNamespace())  # type: ignore[arg-type]
    made._end = SimpleNamespace(parked="l-a-p4@1.3")  # type: ignore[assignment]
    return made


def test_what_left_its_parking_lease_is_heard_out_and_run_again() -> None:
    """It saved when that lease ended, so there is an end to be heard, and another lease to be asked for."""
    found = attendance(parking_is_over=True)
    found._go_on(contextlib.ExitStack())
    assert found._end is None


def test_what_is_parked_still_is_told_as_it_is() -> None:
    with pytest.raises(CapacityExceeded):
        attendance(parking_is_over=False)._go_on(contextlib.ExitStack())
