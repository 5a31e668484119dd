"""A lease that was taken by suspending: what is asked for then, and what each answer comes to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.client.model import Place
from sublet.errors import CapacityExceeded, Disconnected, LeaseEnded, NotFound, StaleEpoch, SubletError
from sublet.lease_end import EndReason, LeaseEnd
from sublet.node.supervisor.parking import STAND_NS
from sublet.notebook import resume
from sublet.notebook.options import CellOptions
from sublet.notebook.resume import end_parked, is_parked, resume_parked
from sublet.notebook.status import Suspended
from sublet.values import NS_PER_S, LeaseId, Tier

END = LeaseEnd(reason=EndReason.PREEMPTED, at="2026-01-01T00:00:00Z", detail="somebody goes first", parked="l-1-p2@1.3")


class Lease:
    def __init__(self, end: LeaseEnd | None = END) -> None:
        self.id = "l-1"
        self.end = end


class Kernel:
    lease: Any = None

    def now_under(self, lease: Any) -> None:
        self.lease = lease


class Fabric:
    """Grants, or fails as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []

    def gpu(self, **asked: Any) -> str:
        self.asked = asked
        asked["on_place"](Place(lease=LeaseId("l-2"), position=2, reason="held", estimate=30.0))
        if self.error is not None:
            raise self.error
        return "the new lease"

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(estimates=SimpleNamespace(p90_error=4.0))

    def request(self, method: str, path: str, body: object, *, shape: type) -> dict[str, object]:
        self.requests.append((method, path))
        if self.error is not None:
            raise self.error
        return {}


def went_on(fabric: Fabric, options: CellOptions) -> tuple[Any, Kernel, list[Suspended]]:
    shown: list[Suspended] = []
    kernel = Kernel()
    new = resume_parked(
        cast(Any, fabric), cast(Any, Lease()), cast(Any, kernel), options, shown.append, {"program": "notebook"}
    )
    return new, kernel, shown


def test_what_is_parked_is_told_by_the_end() -> None:
    assert is_parked(cast(Any, Lease()))
    assert not is_parked(cast(Any, Lease(None)))
    assert not is_parked(cast(Any, Lease(replace(END, parked=""))))
    assert not is_parked(None)


def test_it_waits_in_line_as_the_cell_would_and_says_so() -> None:
    fabric = Fabric()
    new, kernel, shown = went_on(fabric, CellOptions(tier=Tier.SPOT, ttl_ns=60_000_000_000))
    assert (new, kernel.lease) == ("the new lease", "the new lease")
    assert fabric.asked["resume"].id == "l-1"
    assert (fabric.asked["tier"], fabric.asked["ttl"], fabric.asked["wait"]) == (Tier.SPOT, 60.0, None)
    assert [(one.place, one.estimate_s, one.error_s) for one in shown] == [(0, None, None), (2, 30.0, 4.0)]
    assert all("somebody goes first" in one.why for one in shown)


def test_a_lease_that_is_being_taken_is_waited_for_as_long_as_its_guests_may_take_to_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the cell would give it back, and what lives on the device only would be lost."""
    now_s, parked_s = [100.0], 101.0 + STAND_NS / NS_PER_S

    class Noticed:
        notice = object()

        @property
        def end(self) -> LeaseEnd | None:
            return END if now_s[0] >= parked_s else None

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    lease: Any = Noticed()
    resume.wait_until_taken(lease)
    assert is_parked(lease)
    assert now_s[0] < parked_s + 1


@pytest.mark.parametrize("error", [NotFound("gone"), StaleEpoch("older"), CapacityExceeded("refused")])
def test_what_is_not_to_be_had_any_more_is_the_end_of_the_session(error: SubletError) -> None:
    with pytest.raises(LeaseEnded) as caught:
        went_on(Fabric(error), CellOptions())
    assert caught.value.end == END


def test_who_does_not_wait_longer_leaves_it_parked() -> None:
    with pytest.raises(CapacityExceeded):
        went_on(Fabric(CapacityExceeded("not now")), CellOptions(wait_ns=0))


def test_silence_is_no_end() -> None:
    with pytest.raises(Disconnected):
        went_on(Fabric(Disconnected("no answer")), CellOptions())


def test_who_gives_it_up_releases_the_parking_lease_and_hears_of_no_failure() -> None:
    for fabric in (Fabric(), Fabric(Disconnected("no answer"))):
        end_parked(cast(Any, fabric), cast(Any, Lease()))
        assert fabric.requests == [("POST", "/v1/leases/l-1-p2/release")]
    fabric = Fabric()
    end_parked(cast(Any, fabric), cast(Any, Lease(None)))
    assert not fabric.requests
