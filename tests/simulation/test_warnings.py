"""A guest that is warned, spared, parked, resumed, stopped alone and ended, in any order, and that handles its signal
at any moment after it was sent: the real page, tally and handler, and what a supervisor asks before it parks."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sublet.errors import LeaseInterrupt
from sublet.guest import bootstrap
from sublet.guest.bootstrap import EndOfLease
from sublet.lease_end import EndReason
from sublet.node.processes.cgroups import Groups
from sublet.node.processes.lease_runtime import LeaseRuntime
from sublet.node.processes.limits import GroupLimits
from sublet.values import Epoch, LeaseId, TenantId
from sublet.wire.page import PageReader, PageView

SEED = 20261123
WORLDS = 200
STEPS = 14
STEPS_OF_A_WORLD = ("warn", "warn", "spare", "park", "resume", "notice", "end", "stop", "handle", "handle")


class NoGroups(Groups):
    """A machine without control groups."""

    def __init__(self) -> None:
        pass

    def group(self, *_: object) -> None:
        return None


class Killed(BaseException):
    """The signal did what it does without a handler."""


class LateReader(PageReader):
    """A page at which the guest looks while other things happen: ``between`` is called after each look."""

    between: Callable[[], object] = staticmethod(lambda: None)

    def read(self) -> PageView:
        found = super().read()
        self.between()
        return found


class World:
    """One guest and its leases, one after the other."""

    def __init__(self, place: Path, draw: random.Random) -> None:
        self._draw = draw
        self._numbers = itertools.count(1)
        self._guest = SimpleNamespace(spec=SimpleNamespace(entry="work:main"), was_warned=False, is_gone=False)
        self.story: list[str] = []
        self.here = self._tenancy()
        self.here.open(str(place), NoGroups(), 0, lambda _: (), GroupLimits())
        self.here.guests["g"] = self._guest  # type: ignore[index,assignment]
        self._page = LateReader(self.here.page_path)
        self._handle = EndOfLease(self._page, self.here.tally_path)
        self._pending: set[str] = set()
        self.left = ""
        """How the guest ended, if it did."""
        self.late_park = False
        """Whether it was parked before it met a warning."""
        self._said_leave = False
        """Whether the page said so when the handler looked last; what happens after that look comes too late."""
        self._page.between = self._may_happen

    def close(self) -> None:
        self._page.close()
        if self._handle._tally is not None:
            self._handle._tally.close()
        assert self.here.close(lambda _: None, lambda _: None) in ([], [self.here.folder])

    def _tenancy(self) -> LeaseRuntime:
        n = next(self._numbers)
        return LeaseRuntime(
            lease=LeaseId(f"l-{n}"), tenant=TenantId("t"), epoch=Epoch(1, n), parts=(), deadline_ns=1 << 60, office="o"
        )

    # ---- what happens to it ----

    def warn(self) -> None:
        if not self.here.is_parked and self.here.over is None:
            self.here.warn(0)
            self._pending.add("warned")

    def spare(self) -> None:
        self.here.expiring = self.here.is_parked and self.here.expiring
        self.here.show(0)

    def park(self) -> None:
        """As the parker does, once everything stands still."""
        if self.here.is_parked or self.here.over is not None or self.here.is_leaving():
            return
        assert self.left != "interrupted", f"what leaves was parked: {self.story}"
        self.late_park |= "warned" in self._pending
        self._move(is_parked=True)

    def resume(self) -> None:
        if self.here.is_parked:
            self._move(is_parked=False)

    def _move(self, *, is_parked: bool) -> None:
        there = self._tenancy()
        self.here.move_to(there, is_parked=is_parked)
        self.here = there
        there.show(0)

    def notice(self) -> None:
        """It will be taken, or will not after all: no signal comes with that."""
        notice: Any = SimpleNamespace(reason=EndReason.PREEMPTED, take_at_ns=1)
        self.here.notice = None if self.here.notice is not None else notice
        self.here.show(0)

    def end(self) -> None:
        if self._draw.random() < 0.2 and not self.here.is_parked:
            self.here.over = EndReason.PREEMPTED
            self.here.show(0)
            self._pending.add("ended")

    def stop(self) -> None:
        """Alone, by an operator: an ordinary SIGTERM."""
        if self._draw.random() < 0.1:
            self._pending.add("stopped")

    def handle(self) -> None:
        """The signal is met; several that wait are one."""
        if not self._pending or self.left:
            return
        met, self._pending = self._pending, set()
        try:
            self._handle(signal.SIGTERM, None)
        except LeaseInterrupt:
            self.left = "interrupted"
            assert self._said_leave or "stopped" in met, f"a warning that was taken back: {self.story}"
        except Killed:
            self.left = "killed"
            assert "stopped" in met, f"a warning ended it as any signal would: {self.story}"
        else:
            assert "ended" not in met, f"its end was missed: {self.story}"

    def step(self, name: str) -> None:
        self.story.append(name)
        getattr(self, name)()

    def _may_happen(self) -> None:
        """Between two instructions of the handler the supervisor goes on."""
        self._said_leave = PageReader.read(self._page).is_leaving
        if self._draw.random() < 0.5:
            self.step(self._draw.choice(("spare", "park", "resume")))


@pytest.fixture
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGTERM)
        raise Killed

    fake: Any = SimpleNamespace(kill=kill, getpid=os.getpid, environ=os.environ)
    monkeypatch.setattr(bootstrap, "os", fake)
    monkeypatch.setattr(bootstrap, "signal", SimpleNamespace(signal=lambda *_: None, SIG_DFL=signal.SIG_DFL))


def test_no_warning_that_was_taken_back_ends_a_guest_and_none_that_leaves_is_parked(
    no_signals: None, tmp_path: Path
) -> None:
    ends: dict[str, int] = {}
    late_parks = 0
    for number in range(WORLDS):
        world = World(tmp_path / str(number), random.Random(SEED + number))
        draw = random.Random(SEED - number)
        try:
            for _ in range(STEPS):
                world.step(draw.choice(STEPS_OF_A_WORLD))
        except AssertionError as error:
            raise AssertionError(f"seed {SEED} + {number}: {error}") from error
        finally:
            world.close()
        ends[world.left] = ends.get(world.left, 0) + 1
        late_parks += world.late_park
    assert min(ends.get(name, 0) for name in ("", "interrupted", "killed")) > WORLDS // 50, ends
    assert late_parks > WORLDS // 10, late_parks
