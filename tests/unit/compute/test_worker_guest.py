"""Why a process that ran under a lease has ended: with the lease, or alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sublet.compute.worker_guest import why_lost
from sublet.errors import LeaseEnded, LeaseNotActive, WorkerLost
from sublet.lease.states import GuestState
from sublet.wire.http import EndView
from sublet.wire.zygote import LEASE_ENDED


def lost(*, exit_code: int, reason: str, office_says: EndView | Exception | None) -> Exception:
    """What is told where the holder has not heard of an end yet."""

    def look(_: str) -> Any:
        if isinstance(office_says, Exception):
            raise office_says
        return SimpleNamespace(end=office_says)

    lease = SimpleNamespace(id="l-1", end=None, _fabric=SimpleNamespace(lease=look))
    view = SimpleNamespace(exit_code=exit_code, reason=reason, state=GuestState.GONE, log_bytes=0)
    guest = SimpleNamespace(view=lambda: view, output=lambda **_: iter(()), close=lambda: None)
    return why_lost(cast("Any", lease), cast("Any", guest))


REVOKED = EndView(reason="operator", at="2026-01-01T00:00:00Z", detail="", saved_at=None)


@pytest.mark.parametrize(("exit_code", "reason"), [(LEASE_ENDED, ""), (LEASE_ENDED, "operator"), (143, "operator")])
def test_a_process_that_was_told_of_the_end_before_its_holder_ended_with_its_lease(exit_code: int, reason: str) -> None:
    found = lost(exit_code=exit_code, reason=reason, office_says=REVOKED)
    assert isinstance(found, LeaseEnded)
    assert found.end is not None
    assert found.end.reason == "operator"


@pytest.mark.parametrize("office_says", [None, LeaseNotActive("not known"), WorkerLost("no answer")])
@pytest.mark.parametrize(
    ("exit_code", "reason"), [(LEASE_ENDED, ""), (143, "operator"), (1, "guest_failed"), (139, "")]
)
def test_of_a_lease_that_lives_only_the_process_ended(
    exit_code: int, reason: str, office_says: EndView | Exception | None
) -> None:
    found = lost(exit_code=exit_code, reason=reason, office_says=office_says)
    assert isinstance(found, WorkerLost)
    assert found.exit_code == exit_code


def test_a_process_whose_lease_was_renewed_after_it_had_ended_for_it_is_told_so() -> None:
    found = lost(exit_code=LEASE_ENDED, reason="", office_says=None)
    assert "of which it had been warned; the lease was renewed too late for it, in the middle of the call" in str(found)
