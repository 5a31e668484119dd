"""Guests that come late to the signal that warns them: what was taken back by then ends none of them, and what has
begun to leave is not parked."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.node.agent.starting import package_folder
from sublet.values import LeaseId
from sublet.wire.guests import GuestSpec, Start, Started
from sublet.wire.orders import Extend, Parking
from sublet.wire.page import PageReader, PageState
from tests.integration.supervisor_stage import PATH, SupervisorStage, supervisor_at
from tests.integration.test_suspend import BEAT, NOT_FROZEN, Desk
from tests.traces import now_ns, until

S = 1_000_000_000
LONG_GRACE = "from sublet.lease import expiring\nexpiring.grace_ns = lambda ttl_ns: 300 * 10**9\n"
"""So that no test has to be done within the five seconds that are the most a guest has otherwise."""
WORK = """
import os, time
from sublet.errors import LeaseInterrupt

def main(beat, saved, enough):
    with open(beat, "ab", buffering=0) as file:
        try:
            while True:
                file.write(b".")
                time.sleep(0.002)
        except LeaseInterrupt:
            with open(saved, "wb"):
                while not os.path.exists(enough):
                    time.sleep(0.005)
            raise
"""


class Warned(Desk):
    """An office in short, whose holder is late."""

    def __init__(self, stage: SupervisorStage, folder: Path) -> None:
        super().__init__(stage)
        self.beats, self.saved, self.enough = (folder / name for name in ("beats", "saved", "enough"))
        (folder / "late_work.py").write_text(WORK)
        self._folder = folder

    def begin_work(self) -> int:
        """A guest of Python that beats until it is told to leave, and then saves until it is enough; its process."""
        self.epoch = self.grant("a", self.gpu())
        said = json.dumps({"beat": str(self.beats), "saved": str(self.saved), "enough": str(self.enough)})
        env = {"PATH": PATH, "PYTHONPATH": f"{package_folder()}:{self._folder}"}
        spec = GuestSpec(entry="late_work:main", args=said, cwd="/", env=env)
        started = self.stage.holder(self.lease, self.epoch).ask(Start(spec=spec))
        assert isinstance(started, Started), started
        until("a beat", lambda: self.beats.exists() and self.beats.stat().st_size > 0)
        return started.pid

    def extend(self, left_s: int) -> None:
        """So much of its time is left."""
        self.n += 1
        deadline_ns = now_ns() + left_s * S
        order = Extend(lease=self.lease, epoch=self.epoch, number=self.n, deadline_ns=deadline_ns, ttl_ns=600 * S)
        self.stage.office_line.order(order)

    def warn(self) -> PageReader:
        """It is told to leave, and the supervisor has done all that it does for that."""
        page, before = self.page(), self.page().read().warnings
        self.extend(290)
        until("the warning", lambda: page.read().warnings == before + 1)
        until("the signal", self._was_signalled)
        return page

    def _was_signalled(self) -> bool:
        """The line about it is written after the signal was sent."""
        folder = self.stage.state / "guests"
        return any(b"is not being renewed" in file.read_bytes() for file in folder.rglob("*") if file.is_file())

    def goes_on(self) -> bool:
        before = self.beats.stat().st_size
        until("it beats again", lambda: self.beats.stat().st_size > before + 10)
        return not self.saved.exists()


@pytest.fixture(params=["", NOT_FROZEN], ids=["frozen", "stopped one by one"])
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Warned]:
    with supervisor_at(tmp_path, faults=LONG_GRACE + request.param) as stage:
        desk = Warned(stage, tmp_path)
        yield desk
        desk.enough.touch()


def test_a_guest_that_was_renewed_before_it_met_the_warning_goes_on(desk: Warned) -> None:
    pid = desk.begin_work()
    os.kill(pid, signal.SIGSTOP)
    page = desk.warn()
    assert page.read().state is PageState.NOTICED
    desk.extend(600)
    assert page.read().state is PageState.LIVE
    os.kill(pid, signal.SIGCONT)
    assert desk.goes_on()
    desk.warn()
    until("it saves", desk.saved.exists)


def test_a_guest_that_was_parked_before_it_met_the_warning_goes_on_under_the_next_lease(desk: Warned) -> None:
    """Its process is stopped from before the warning until it was resumed."""
    pid = desk.begin_work()
    under = desk.set_aside()
    os.kill(pid, signal.SIGSTOP)
    page = desk.warn()
    desk.end(park=under, grace_s=600)
    assert desk.torn_down(LeaseId("a")).parked, desk.stage.log
    desk.resume(under)
    assert page.read().state is PageState.LIVE
    os.kill(pid, signal.SIGCONT)
    assert desk.goes_on()


def test_a_guest_that_has_begun_to_leave_is_not_parked(desk: Warned) -> None:
    """It saves and leaves, as it was told to; set going under another lease it would do so there."""
    desk.begin_work()
    under = desk.set_aside()
    page = desk.warn()
    until("it saves", desk.saved.exists)
    desk.end(park=under, grace_s=600)
    until("the end is told", lambda: page.read().state is PageState.OVER)
    desk.enough.touch()
    assert not desk.torn_down(LeaseId("a")).parked


def test_a_command_that_was_warned_is_not_parked(desk: Warned) -> None:
    """What it does about a signal that it meets later cannot be known."""
    started = desk.begin(
        "-c", f"import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n{BEAT}", str(desk.beats)
    )
    until("a beat", lambda: desk.beats.exists() and desk.beats.stat().st_size > 0)
    under: Parking = desk.set_aside()
    os.kill(started.pid, signal.SIGSTOP)
    desk.warn()
    desk.end(park=under, grace_s=0)
    assert not desk.torn_down(LeaseId("a")).parked
