"""Who goes on with what, when office or supervisor are killed under running guests."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import Disconnected, LeaseEnded, Unauthorized
from sublet.node.processes.procs import ProcessInstance
from sublet.values import GIB
from sublet.wire.conversation import Conversation
from sublet.wire.guests import OUTPUT_HEAD, Attach, Attached, GuestSpec, ListGuests
from sublet.wire.guests import Guests as GuestList
from sublet.wire.link_events import Data
from tests.crash.office_process import Call
from tests.integration.office_stage import PATH, Held, HolderProcess, OfficeStage, asked, called, office_stage, started
from tests.integration.supervisor_stage import Freezer, needs_freezer
from tests.traces import until

COUNTING = "i=0; while :; do echo $i; i=$((i+1)); sleep 0.01; done"
STUBBORN = "trap '' TERM HUP INT; (setsid sleep 1000 &) ; (sleep 1000 &) ; exec sleep 1000"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[OfficeStage]:
    with office_stage(tmp_path / "place", "2x4GiB") as found:
        yield found


def take(stage: OfficeStage, *, ttl_s: float = 600, wait_s: float = 60) -> Held:
    return stage.acquire(stage.office.line(), memory=GIB, ttl_s=ttl_s, wait_s=wait_s)


def holder_of_a_short_lease(stage: OfficeStage) -> HolderProcess:
    """Its guest runs. A busy machine may take longer to start both than the shortest lease lasts."""
    for ttl_s in (2, 8, 32, 60):
        wanted = [(take(stage, ttl_s=ttl_s), GuestSpec(argv=("sleep", "1000"), env={"PATH": PATH}))]
        holder = HolderProcess(stage, wanted, "again")
        if any(holder.pids):  # none at all where the lease was over before the holder had connected
            return holder
        holder.kill()
    raise AssertionError("no guest was started within a minute")


def guest_of_a_short_lease(stage: OfficeStage, stack: contextlib.ExitStack) -> tuple[Conversation, float]:
    """Its holder's connection and the lease's deadline, for which the same holds."""
    for ttl_s in (2, 8, 32, 60):
        held = take(stage, ttl_s=ttl_s)
        with contextlib.suppress(LeaseEnded, Disconnected, Unauthorized):  # how it is told depends on when it ended
            talk = stack.enter_context(stage.hold(held))
            started(talk, "sh", "-c", STUBBORN)
            deadline = lease_of(stage, held)["deadline"]
            if isinstance(deadline, float):
                return talk, deadline
    raise AssertionError("no guest was started within a minute")


def lease_of(stage: OfficeStage, held: Held) -> dict[str, object]:
    found: dict[str, object] = asked(stage.office.line(), "GET", f"/v1/leases/{held.id}").doc["lease"]
    return found


def hold_again(stage: OfficeStage, held: Held) -> Conversation:
    """As soon as there is a supervisor again."""
    made: list[Conversation] = []

    def is_made() -> bool:
        with contextlib.suppress(Disconnected):
            made.append(stage.hold(held))
        return bool(made)

    until("a connection", is_made)
    return made[0]


class Listener:
    """Reads a guest's output and keeps the lines."""

    def __init__(self, talk: Conversation, guest: str) -> None:
        self._talk = talk
        reply = called(talk, Attach(guest=guest))  # type: ignore[arg-type]
        assert isinstance(reply, Attached)
        self._output = reply.output
        talk.link.grant(self._output, 1 << 20)
        self._text = b""

    def lines(self) -> list[str]:
        for happening in self._talk.wait(1.0):
            if isinstance(happening, Data) and happening.channel == self._output:
                self._text += happening.data[OUTPUT_HEAD.size :]
                self._talk.link.consumed(self._output, happening.cost)
        return self._text.decode().splitlines()[:-1]

    def until(self, count: int) -> list[str]:
        until(f"{count} lines", lambda: len(self.lines()) >= count)
        return self.lines()


def test_an_office_killed_under_a_running_guest_comes_back_and_goes_on_with_it(stage: OfficeStage) -> None:
    """The same guest under the same epoch; what it prints misses no line, and renewals go on."""
    held = take(stage)
    with stage.hold(held) as talk:
        guest = started(talk, "sh", "-c", COUNTING)
        listener = Listener(talk, guest.guest)
        listener.until(10)
        stage.kill_office()
        before = len(listener.lines())
        listener.until(before + 20)  # the office is not needed for that
        stage.start()
        assert lease_of(stage, held)["status"] == "active"
        assert lease_of(stage, held)["epoch"] == list(held.epoch)
        renewed = asked(stage.office.line(), "POST", f"/v1/leases/{held.id}/renew", {"epoch": list(held.epoch)})
        assert renewed.doc["epoch"] == list(held.epoch)
        found = listener.until(len(listener.lines()) + 20)
        assert found == [str(n) for n in range(len(found))]
        with stage.hold(held) as another:
            guests = called(another, ListGuests())
            assert isinstance(guests, GuestList)
            assert [(one.id, one.pid, one.epoch) for one in guests.guests] == [(guest.guest, guest.pid, held.epoch)]
    asked(stage.office.line(), "POST", f"/v1/leases/{held.id}/release", {})
    until("no residue", lambda: not stage.residue)


def test_a_killed_supervisor_takes_its_guests_along_and_the_office_starts_another(stage: OfficeStage) -> None:
    """Those that forked twice and changed their session, too; then the lease may start guests again."""
    held = take(stage)
    assert stage.traces is not None
    with stage.hold(held) as talk:
        started(talk, "sh", "-c", STUBBORN)
        until("three processes", lambda: stage.traces is not None and len(stage.traces.marked(held.id)) == 3)
        theirs = stage.traces.marked(held.id)
        stage.kill_supervisor()
    with hold_again(stage, held) as talk:
        until("the end of the guests", lambda: not _left(stage, theirs))
        started(talk, "sleep", "1000")
        assert lease_of(stage, held)["epoch"] == list(held.epoch)
    asked(stage.office.line(), "POST", f"/v1/leases/{held.id}/release", {})
    until("no residue", lambda: not stage.residue)


def _left(stage: OfficeStage, theirs: list[ProcessInstance]) -> list[ProcessInstance]:
    return [one for one in theirs if stage.procs.is_there(one)]


@pytest.mark.parametrize("first", ["office", "supervisor"])
def test_both_are_killed_and_the_next_ones_clear_away_and_go_on(stage: OfficeStage, first: str) -> None:
    held = take(stage)
    assert stage.traces is not None
    with stage.hold(held) as talk:
        started(talk, "sh", "-c", STUBBORN)
        until("three processes", lambda: stage.traces is not None and len(stage.traces.marked(held.id)) == 3)
        theirs = stage.traces.marked(held.id)
        for kill in (stage.kill_office, stage.kill_supervisor)[:: 1 if first == "office" else -1]:
            kill()
    stage.start()
    until("the end of the guests", lambda: not _left(stage, theirs))
    with hold_again(stage, held) as talk:
        started(talk, "sleep", "1000")
    asked(stage.office.line(), "POST", f"/v1/leases/{held.id}/release", {})
    until("no residue", lambda: not stage.residue)


def test_guests_end_at_their_deadline_while_the_office_is_away(stage: OfficeStage) -> None:
    """Longer than the time to live; the office that comes back finds the lease run out and the device free."""
    assert stage.traces is not None
    with contextlib.ExitStack() as stack:
        talk, deadline = guest_of_a_short_lease(stage, stack)
        stage.kill_office()
        until("the end of the guests", lambda: stage.traces is not None and not stage.traces.marked(), 120)
        at_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert at_s > deadline - 0.001
        with pytest.raises(LeaseEnded):
            started(talk, "true")
    stage.start()
    until("the end of the leases", lambda: not asked(stage.office.line(), "GET", "/v1/leases").doc)
    until("no residue", lambda: not stage.residue)
    take(stage)


def test_whoever_stands_still_beyond_the_deadline_has_nothing_left_when_it_goes_on(stage: OfficeStage) -> None:
    """The guest is ended although it is stopped; the holder, continued, is told that its lease ran out."""
    holder = holder_of_a_short_lease(stage)
    try:
        holder.process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError):  # its deadline was that near
            os.kill(holder.pids[0], signal.SIGSTOP)
        until("the end of the guest", lambda: stage.traces is not None and not stage.traces.marked(), 120)
        holder.process.send_signal(signal.SIGCONT)
        assert holder.said() == "LeaseExpired"
    finally:
        holder.kill()
    until("no residue", lambda: not stage.residue)


@needs_freezer
def test_a_quarantine_survives_everybody_and_ends_when_the_guest_does(stage: OfficeStage) -> None:
    """A guest that cannot be killed: nobody gets its device, whoever is restarted; clearing it is refused with what is
    still there; thawed and verified, it is free."""
    other = take(stage)
    held = take(stage)
    assert stage.traces is not None
    freezer = Freezer.make(f"elsewhere-{stage.traces.office}")
    assert freezer is not None
    with contextlib.closing(freezer):
        with stage.hold(held) as talk:
            guest = started(talk, "sleep", "1000")
        freezer.freeze([guest.pid])
        asked(stage.office.line(), "POST", f"/v1/leases/{held.id}/release", {})
        until("a quarantine", lambda: _fences(stage))
        stage.kill_supervisor()
        until("a supervisor", stage.find_supervisor)
        _still_fenced(stage, guest.pid)
        stage.kill_office()
        stage.start()
        _still_fenced(stage, guest.pid)
        stage.kill_office()
        stage.kill_supervisor()
        stage.start()
        _still_fenced(stage, guest.pid)
        freezer.thaw()
        asked(stage.office.line(), "POST", f"/v1/fences/clear?resource={held.devices[0]}", {})
        try:
            until("a free device", lambda: not _fences(stage))
        finally:
            print(_fences(stage), stage.residue, stage.supervisor_log)
        assert take(stage).devices == held.devices
        assert lease_of(stage, other)["status"] == "active"


def _fences(stage: OfficeStage) -> list[dict[str, object]]:
    found: list[dict[str, object]] = asked(stage.office.line(), "GET", "/v1/fences").doc
    return found


def _still_fenced(stage: OfficeStage, pid: int) -> None:
    refused = stage.office.line().ask(
        Call(
            method="POST",
            path="/v1/leases",
            body={"request_id": f"n-{os.urandom(4).hex()}", "wants": [{"kind": "gpu", "amount": GIB}], "wait": 0},
        )
    )
    assert refused is not None
    assert refused.status == 409, refused
    resource = str(_fences(stage)[0]["resource"])
    asked(stage.office.line(), "POST", f"/v1/fences/clear?resource={resource}", {})
    until("what is still there", lambda: f"process {pid} " in str(_fences(stage)))
