"""What a caller is told of a call whose worker is gone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sublet.compute.calls import Lost, Pending
from sublet.compute.posting import AGAIN, outcome
from sublet.errors import LeaseRevoked, SubletError, WorkerLost

EXECUTING = 7


class Gone:
    """A worker that is no more, and why."""

    guest = object()

    def __init__(self, why: SubletError) -> None:
        self._why = why

    def why_lost(self, lease: object) -> SubletError:
        return self._why


def came_of(call: int, why: SubletError) -> Any:
    pending = Pending()
    pending.call, pending.lost = call, Lost(None, EXECUTING, 0)
    nobody = cast(Any, None)
    return outcome(nobody, cast(Any, Gone(why)), pending, nobody)


def test_what_was_in_line_when_the_lease_ended_can_go_to_another() -> None:
    """A lease may end between the look at it and the call; nothing was begun then, and nobody has to be told."""
    why = LeaseRevoked("lease L1 was revoked", do="Wait.", reason="ended")
    with pytest.raises(LeaseRevoked) as of_one_in_line:
        came_of(EXECUTING + 1, why)
    with pytest.raises(LeaseRevoked) as of_the_executing:
        came_of(EXECUTING, why)
    assert (of_one_in_line.value.begun, of_the_executing.value.begun) == (False, True)
    assert (str(of_one_in_line.value), of_one_in_line.value.reason) == (str(why), why.reason)


def test_with_the_process_alone_what_was_in_line_goes_to_its_successor() -> None:
    why = WorkerLost("the worker was killed")
    assert came_of(EXECUTING + 1, why) is AGAIN
    with pytest.raises(WorkerLost):
        came_of(EXECUTING, why)
