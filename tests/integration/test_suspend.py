"""Real processes are taken off their (host) device in the middle of what they do, and go on as if nothing had been."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.errors import LeaseEnded, SubletError
from sublet.lease_end import EndReason
from sublet.values import GIB, MIB, Epoch, Exclusivity, Kind, LeaseId, TenantId
from sublet.wire.codec import dumps
from sublet.wire.guests import Attach, Guests, GuestSpec, ListGuests, Start, Started
from sublet.wire.orders import (
    End,
    EndedHere,
    Extend,
    Grant,
    Held,
    NotHeld,
    Notify,
    Parkable,
    Parking,
    Part,
    Report,
    Resumed,
    TornDown,
)
from sublet.wire.page import PageReader, PageState
from tests.integration.supervisor_stage import TENANT, SupervisorStage, supervisor_at
from tests.traces import now_ns, until

SUSPENDS = int(os.environ.get("SUBLET_SUSPENDS", "20"))
"""Of one computation; the soak has 500."""
COMPUTE = """
import hashlib, os, sys, time
out, enough = sys.argv[1], sys.argv[2]
parts = []
for number in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        digest, done = str(number).encode(), 0
        while not os.path.exists(enough):
            for _ in range(500):
                digest = hashlib.sha256(digest).digest()
            done += 500
            if done % 20000 == 0:
                if os.fork() == 0:
                    os._exit(0)
                os.wait()
                time.sleep(0.002)
        os.write(write, f"{done} {digest.hex()}\\n".encode())
        os._exit(0)
    os.close(write)
    parts.append(read)
found = b"".join(os.read(part, 256) for part in parts)
os.wait(), os.wait()
with open(out + "~", "wb") as file:
    file.write(found)
os.rename(out + "~", out)
"""
"""Two processes that compute until it is enough, fork in the middle of it and sleep. What comes out depends on every
step that was made, and on their number, which is told."""

BEAT = """
import os, sys, time
with open(sys.argv[1], "ab", buffering=0) as file:
    while True:
        file.write(b".")
        time.sleep(0.002)
"""


def is_right(text: str) -> bool:
    """Whether each chain of hashes comes to what it says it came to."""
    for number, line in enumerate(text.splitlines()):
        links, said = line.split()
        digest = str(number).encode()
        for _ in range(int(links)):
            digest = hashlib.sha256(digest).digest()
        if digest.hex() != said:
            return False
    return text.count("\n") == 2


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SupervisorStage]:
    with supervisor_at(tmp_path) as found:
        yield found


class Desk:
    """An office in short, which parks and resumes one guest's lease after the other."""

    def __init__(self, stage: SupervisorStage) -> None:
        self.stage = stage
        self.n = 0
        self.lease, self.epoch = LeaseId("a"), Epoch(1, 0)
        self.device = 0

    @property
    def reports(self) -> list[Report]:
        return self.stage.office_line.reports

    def gpu(self) -> Part:
        return Part(
            resource=self.stage.inventory.devices[self.device].id,
            kind=Kind.GPU,
            amount=GIB,
            millis=1000,
            exclusivity=Exclusivity.SESSION,
        )

    def memory(self, amount: int = GIB) -> Part:
        return Part(resource=self.stage.inventory.devices[-1].id, kind=Kind.MEMORY, amount=amount)

    def grant(
        self,
        lease: str,
        part: Part,
        *,
        resume: Parking | None = None,
        ttl_s: float = 600,
        parked: bool = False,
        tenant: str = TENANT,
    ) -> Epoch:
        self.n += 1
        ttl_ns = round(ttl_s * 1e9)
        self.stage.office_line.order(
            Grant(
                lease=LeaseId(lease),
                epoch=Epoch(1, self.n),
                number=self.n,
                tenant=TenantId(tenant),
                parts=(part,),
                deadline_ns=now_ns() + ttl_ns,
                ttl_ns=ttl_ns,
                resume=resume,
                parked=parked,
            )
        )
        return Epoch(1, self.n)

    def begin(self, *argv: str) -> Started:
        """A first lease, and something that runs under it."""
        self.lease, self.epoch = LeaseId("a"), self.grant("a", self.gpu())
        return self.stage.holder(self.lease, self.epoch).start(sys.executable, *argv)

    def end(self, *, park: Parking | None, grace_s: float = 20, reason: EndReason = EndReason.PREEMPTED) -> None:
        self.stage.office_line.order(
            End(
                lease=self.lease,
                epoch=self.epoch,
                number=99,
                parts=(self.gpu(),),
                reason=reason,
                grace_ns=round(grace_s * 1e9),
                park=park,
            )
        )

    def set_aside(self, *, amount: int = GIB, ttl_s: float = 600) -> Parking:
        name = f"{self.lease}-p"
        return Parking(lease=LeaseId(name), epoch=self.grant(name, self.memory(amount), ttl_s=ttl_s))

    def park(self, *, amount: int = GIB, ttl_s: float = 600) -> Parking:
        """Off the device. Returns where it lies."""
        under = self.set_aside(amount=amount, ttl_s=ttl_s)
        self.end(park=under, grace_s=600)  # its device is free once it is off it, not when its grace is over
        assert self.torn_down(self.lease).parked, self.stage.log
        return under

    def torn_down(self, lease: LeaseId) -> TornDown:
        found: list[TornDown] = []

        def is_there() -> bool:
            self.stage.office_line.wait(0.02)
            found.extend(one for one in self.reports if isinstance(one, TornDown) and one.lease == lease)
            return bool(found)

        until(f"the end of {lease}", is_there)
        return found[-1]

    def resume(self, under: Parking) -> None:
        """On the other device, under another lease."""
        self.device = 1 - self.device
        self.lease = LeaseId(f"r{self.n}")
        self.epoch = self.grant(self.lease, self.gpu(), resume=under)
        assert any(isinstance(one, Held) and one.lease == self.lease for one in self.reports), self.reports
        self.end_parking(under)

    def end_parking(self, under: Parking) -> None:
        self.stage.office_line.order(
            End(
                lease=under.lease,
                epoch=under.epoch,
                number=99,
                parts=(self.memory(),),
                reason=EndReason.RELEASED,
                grace_ns=0,
            )
        )
        self.torn_down(under.lease)
        self.reports.clear()

    def guests(self, lease: LeaseId) -> Guests:
        found = self.stage.office_line.ask(ListGuests(lease=lease))
        assert isinstance(found, Guests)
        return found

    def page(self) -> PageReader:
        folder = next((self.stage.runtime / "leases").iterdir())
        return PageReader(str(folder / "page"))


NOT_FROZEN = "from sublet.node.processes.group import ControlGroup\nControlGroup.can_freeze = False\n"
"""As on a machine without the second version of control groups: each process is stopped by itself."""


@pytest.mark.parametrize("faults", ["", NOT_FROZEN], ids=["frozen", "stopped one by one"])
def test_a_computation_is_the_same_however_often_it_is_suspended(tmp_path: Path, faults: str) -> None:
    """At random moments, for random times, each time onto the other device under another lease; forks included."""
    with supervisor_at(tmp_path, faults=faults) as stage:
        desk, out, enough = Desk(stage), tmp_path / "out", tmp_path / "enough"
        source = random.Random(7)
        desk.begin("-c", COMPUTE, str(out), str(enough))
        for _ in range(SUSPENDS):
            time.sleep(source.random() * 0.02)
            under = desk.park()
            time.sleep(source.random() * 0.01)
            desk.resume(under)
        enough.touch()
        until("the result", out.exists)
        assert is_right(out.read_text())


def test_what_is_parked_does_nothing_and_then_goes_on(stage: SupervisorStage, tmp_path: Path) -> None:
    """Not a byte is written meanwhile; the page and the list of guests say how it stands; the device is free."""
    desk, beat = Desk(stage), tmp_path / "beat"
    desk.begin("-c", BEAT, str(beat))
    until("a beat", lambda: beat.exists() and beat.stat().st_size > 10)
    page = desk.page()
    under = desk.park()
    before = beat.stat().st_size
    time.sleep(0.2)
    assert beat.stat().st_size == before
    view = page.read()
    assert (view.state, view.lease, view.epoch, view.devices) == (PageState.PARKED, under.lease, under.epoch, ())
    (guest,) = desk.guests(under.lease).guests
    assert (guest.state, guest.epoch) == ("parked", under.epoch)
    other = desk.grant("b", desk.gpu(), tenant="bob")
    assert any(isinstance(one, Held) and one.epoch == other for one in desk.reports), "somebody else has the device"
    desk.resume(under)
    until("it beats again", lambda: beat.stat().st_size > before + 10)
    view = page.read()
    assert (view.state, view.lease, view.epoch) == (PageState.LIVE, desk.lease, desk.epoch)
    assert view.devices == (desk.gpu().resource,)
    view.check(LeaseId("a"), Epoch(1, 1), now_ns())


def test_its_connections_stay_open(stage: SupervisorStage, tmp_path: Path) -> None:
    """Who reads its output goes on reading, and learns from it what happened."""
    desk = Desk(stage)
    started = desk.begin("-uc", "import time\nfor n in range(10**6): print(n, flush=True); time.sleep(0.01)")
    holder = stage.holder(desk.lease, desk.epoch)
    holder.ask(Attach(guest=started.guest))
    under = desk.park()
    desk.resume(under)
    assert not holder.is_over
    log = stage.state / "guests" / started.guest

    def says(word: bytes) -> bool:
        return any(word in file.read_bytes() for file in log.iterdir())

    until("word of the park", lambda: says(b"--resume a-p` goes on with it"))
    until("word of the resume", lambda: says(f"it goes on, under lease {desk.lease}".encode()))


def test_with_a_notice_it_is_said_how_much_memory_is_needed(stage: SupervisorStage) -> None:
    """More than the guest has, so that it may grow a little."""
    desk = Desk(stage)
    started = desk.begin("-c", "import time; block = bytearray(64 << 20); time.sleep(600)")
    until("it has it", lambda: stage.procs.stat(started.pid).rss_pages * 4096 > 64 * MIB)  # type: ignore[union-attr]
    stage.office_line.order(
        Notify(lease=desk.lease, epoch=desk.epoch, number=50, reason=EndReason.PREEMPTED, take_at_ns=1 << 62)
    )

    def said() -> list[Parkable]:
        stage.office_line.wait(0.05)
        return [one for one in desk.reports if isinstance(one, Parkable)]

    until("a word", said)
    assert 72 * MIB < said()[0].amount < 512 * MIB


def test_without_memory_for_it_a_guest_ends_like_any_other(stage: SupervisorStage, tmp_path: Path) -> None:
    """It is told, has its grace, and nothing is parked."""
    desk, beat = Desk(stage), tmp_path / "beat"
    desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.set_aside(amount=MIB)
    desk.end(park=under, grace_s=5)
    assert not desk.torn_down(desk.lease).parked
    assert not stage.marked(desk.lease)


def test_a_guest_that_just_starts_is_parked_once_it_runs(stage: SupervisorStage, tmp_path: Path) -> None:
    """The order comes in the same moment as the start."""
    desk, beat = Desk(stage), tmp_path / "beat"
    desk.lease, desk.epoch = LeaseId("a"), desk.grant("a", desk.gpu())
    under = desk.set_aside()
    holder = stage.holder(desk.lease, desk.epoch)
    spec = holder.start("true")  # the connection is there
    assert spec.pid
    argv = (sys.executable, "-c", BEAT, str(beat))
    holder.talk.link.call(dumps(Start(spec=GuestSpec(argv=argv, cwd="/", env={"PATH": "/usr/bin:/bin"}))))
    holder.talk.flush(1.0)
    desk.end(park=under)
    torn = desk.torn_down(desk.lease)
    if torn.parked:
        desk.resume(under)
        until("a beat", beat.exists)
    else:
        assert not stage.marked(LeaseId("a"))


@pytest.mark.parametrize("how", ["its parking lease runs out", "it is released", "SIGKILL from outside"])
def test_what_is_parked_can_always_be_ended(stage: SupervisorStage, tmp_path: Path, how: str) -> None:
    """And nothing of it stays: no process, no page, no group."""
    desk, beat = Desk(stage), tmp_path / "beat"
    started = desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.park()
    if "runs out" in how:
        stage.office_line.order(
            Extend(lease=under.lease, epoch=under.epoch, number=98, deadline_ns=now_ns() + 10**8, ttl_ns=600 * 10**9)
        )
    elif "released" in how:
        desk.end_parking(under)
    elif "SIGKILL" in how:
        os.kill(started.pid, signal.SIGKILL)

    def ended() -> bool:
        stage.office_line.wait(0.05)
        return not stage.marked(LeaseId("a"))

    until("its end", ended)
    if "released" not in how:

        def told() -> list[EndReason]:
            stage.office_line.wait(0.05)
            return [one.reason for one in desk.reports if isinstance(one, EndedHere) and one.lease == under.lease]

        until("word of it", told)
        assert told()[0] is (EndReason.EXPIRED if "runs out" in how else EndReason.GUEST_FAILED)
        desk.end_parking(under)
    until("nothing left", lambda: not stage.residue())


@pytest.mark.parametrize("reason", [EndReason.RELEASED, EndReason.OPERATOR], ids=["release", "revoke"])
@pytest.mark.parametrize("first", ["the end", "the suspend"])
def test_a_suspend_and_an_end_that_meet_leave_a_whole_guest_or_none(
    stage: SupervisorStage, tmp_path: Path, reason: EndReason, first: str
) -> None:
    """The lease is given back, or taken by the operator, while its guest is being parked, or is being ended already."""
    desk, beat = Desk(stage), tmp_path / "beat"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    desk.begin("-c", deaf + BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.set_aside()
    if first == "the suspend":
        desk.end(park=under)
        desk.end(park=None, grace_s=0.1, reason=reason)
    else:
        desk.end(park=None, grace_s=0.1, reason=reason)
        desk.end(park=under)
    if desk.torn_down(desk.lease).parked:
        before = beat.stat().st_size
        desk.resume(under)
        until("it beats", lambda: beat.stat().st_size > before)
        desk.end(park=None, grace_s=0)
        desk.torn_down(desk.lease)
    else:
        desk.end_parking(under)
    assert not stage.marked(LeaseId("a"))
    until("nothing left", lambda: not stage.residue())


def test_a_late_resume_is_refused(stage: SupervisorStage, tmp_path: Path) -> None:
    """By an old epoch, or when nothing lies there any more; the guest is as it was."""
    desk, beat = Desk(stage), tmp_path / "beat"
    desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.park()
    desk.n += 10
    newer = desk.grant(under.lease, desk.memory())  # somebody attached to it
    desk.grant("late", desk.gpu(), resume=under)
    refused = [one for one in desk.reports if isinstance(one, NotHeld)]
    assert [(one.lease, one.reason) for one in refused] == [(LeaseId("late"), EndReason.REFUSED)]
    with pytest.raises((LeaseEnded, SubletError)):
        stage.holder(LeaseId("late"), Epoch(1, desk.n)).start("true")
    before = beat.stat().st_size
    desk.resume(Parking(lease=under.lease, epoch=newer))
    until("it beats", lambda: beat.stat().st_size > before)


def test_nothing_starts_under_a_parking_lease(stage: SupervisorStage, tmp_path: Path) -> None:
    """It is the place of those who were taken, and of nobody else."""
    desk, beat = Desk(stage), tmp_path / "beat"
    desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.park()
    with pytest.raises(SubletError, match="parking lease"):
        stage.holder(under.lease, under.epoch).start("true")


@pytest.mark.parametrize("phase", ["while it is parked", "while it is being parked", "after it went on"])
def test_a_supervisor_that_dies_leaves_nobody(tmp_path: Path, phase: str) -> None:
    """The guest dies with it, standing or not; the next one holds no parking lease for it, and everything is clean."""
    with supervisor_at(tmp_path) as stage:
        desk, beat = Desk(stage), tmp_path / "beat"
        desk.begin("-c", BEAT, str(beat))
        until("a beat", beat.exists)
        under = desk.set_aside()
        if phase == "while it is being parked":
            desk.end(park=under)
        else:
            desk.end(park=under)
            assert desk.torn_down(desk.lease).parked
            if phase == "after it went on":
                desk.resume(under)
        stage.kill()
        until("everybody's end", lambda: not stage.marked())
        stage.start()
        stage.connect()
        desk.grant(under.lease, desk.memory(), parked=True)

        def refused() -> bool:
            stage.office_line.wait(0.05)
            return any(isinstance(one, NotHeld) and one.lease == under.lease for one in desk.reports)

        until("a refusal", refused)
        desk.grant("next", desk.gpu(), tenant="bob")

        def held() -> bool:
            stage.office_line.wait(0.05)
            return any(isinstance(one, Held) and one.lease == LeaseId("next") for one in desk.reports)

        until("the device", held)


def test_the_office_may_die_and_come_back_while_it_is_parked(stage: SupervisorStage, tmp_path: Path) -> None:
    """The supervisor holds what it held, and says again what was not answered."""
    desk, beat = Desk(stage), tmp_path / "beat"
    desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.park()
    stage.hang_up()
    stage.connect()
    desk.device = 1 - desk.device
    desk.lease, before = LeaseId("r"), beat.stat().st_size
    desk.epoch = desk.grant("r", desk.gpu(), resume=under)
    stage.hang_up()
    stage.connect()

    def told() -> bool:
        stage.office_line.wait(0.05)
        return any(isinstance(one, Resumed) and one.under == under for one in desk.reports)

    until("word of the resume", told)
    until("it beats", lambda: beat.stat().st_size > before)


def test_a_stopped_child_stays_stopped(stage: SupervisorStage, tmp_path: Path) -> None:
    """Who stood still for a reason of its own is not set going by the resume."""
    desk, beat = Desk(stage), tmp_path / "beat"
    code = (
        "import os, signal, sys, time\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        f"    open({str(beat)!r}, 'w').close()\n"
        "    time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    desk.begin("-c", code)
    until("two of them", lambda: len(stage.marked(LeaseId("a"))) == 2)

    def one_is_stopped() -> bool:
        stats = [stage.procs.stat(identity.pid) for identity in stage.marked(LeaseId("a"))]
        return sum(stat is not None and stat.is_stopped for stat in stats) == 1

    until("one of them stands", one_is_stopped)
    desk.resume(desk.park())
    time.sleep(0.1)
    assert not beat.exists()
    until("and still does", one_is_stopped)


CARD = """
import sys
import sublet.node.supervisor.parking as parking
import sublet.node.supervisor.suspending as suspending
parking._cards_of = lambda tenancy: tuple("GPU-" + name[-1] for name in tenancy.devices)
suspending.python_argv = lambda *words: (sys.executable, "-c", {helper!r}, {log!r})
"""
"""As if its devices were cards, with a driver that can be told what to do."""

HELPER = """
import json, os, sys
log = sys.argv[1]
def standing(pid):
    with open(f"/proc/{pid}/wchan") as file: frozen = "freeze" in file.read()
    with open(f"/proc/{pid}/stat") as file: return frozen or file.read().rpartition(")")[2].split()[0] == "T"
print(json.dumps({"ready": 13000}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    asked["standing"] = [standing(pid) for pid in asked["pids"]]
    with open(log, "a") as file: file.write(json.dumps(asked) + "\\n")
    if os.path.exists(log + "." + asked["do"] + ".die"): os.kill(os.getpid(), 9)
    if os.path.exists(log + "." + asked["do"] + ".fail"): print(json.dumps({"failed": "managed memory"}), flush=True)
    else: print(json.dumps({"done": asked["pids"]}), flush=True)
"""


@pytest.fixture
def card(tmp_path: Path) -> Iterator[tuple[Desk, Path]]:
    """A desk whose devices are cards as far as suspending goes, and what their driver was asked."""
    log = tmp_path / "asked"
    with supervisor_at(tmp_path, faults=CARD.format(helper=HELPER.replace("\\\\n", "\\n"), log=str(log))) as stage:
        yield Desk(stage), log


def log_of(desk: Desk, started: Started) -> bytes:
    return b"".join(file.read_bytes() for file in (desk.stage.state / "guests" / started.guest).iterdir())


def asked(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_on_a_card_the_driver_suspends_before_and_resumes_after_the_standstill(
    card: tuple[Desk, Path], tmp_path: Path
) -> None:
    """It works inside the processes, so they must run while it does; and it is told which card became which."""
    desk, log = card
    beat = tmp_path / "beat"
    started = desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.park()
    before = beat.stat().st_size
    time.sleep(0.1)
    assert beat.stat().st_size == before
    desk.resume(under)
    until("it beats", lambda: beat.stat().st_size > before)
    first, second = asked(log)
    assert (first["do"], first["pids"], first["standing"]) == ("suspend", [started.pid], [False])
    assert (second["do"], second["pids"], second["standing"]) == ("resume", [started.pid], [False])
    assert second["pairs"] == [["0", "1"]]


@pytest.mark.parametrize("how", ["fail", "die"])
def test_who_cannot_be_suspended_ends_with_the_reason(card: tuple[Desk, Path], tmp_path: Path, how: str) -> None:
    """The driver refuses, or its helper dies over it: nothing is parked, nobody stays."""
    desk, log = card
    beat = tmp_path / "beat"
    started = desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    Path(f"{log}.suspend.{how}").touch()
    desk.end(park=desk.set_aside(), grace_s=5)
    assert not desk.torn_down(desk.lease).parked
    assert not desk.stage.marked(desk.lease)
    until("the reason", lambda: (b"managed memory" if how == "fail" else b"its helper ended") in log_of(desk, started))


@pytest.mark.parametrize("how", ["fail", "die"])
def test_who_cannot_be_put_back_is_ended_and_it_is_said(card: tuple[Desk, Path], tmp_path: Path, how: str) -> None:
    """The lease lives, without what it was for; the next call finds the worker gone."""
    desk, log = card
    beat = tmp_path / "beat"
    started = desk.begin("-c", BEAT, str(beat))
    until("a beat", beat.exists)
    under = desk.park()
    Path(f"{log}.resume.{how}").touch()
    desk.resume(under)
    until("its end", lambda: not desk.stage.marked(LeaseId("a")))
    until("the reason", lambda: b"could not be put back" in log_of(desk, started))


def test_on_a_card_what_is_parked_leaves_without_its_card(card: tuple[Desk, Path], tmp_path: Path) -> None:
    """It is set going to save what is not on the card, and the driver is asked for nothing: its calls go on waiting."""
    desk, log = card
    beat, end = tmp_path / "beat", tmp_path / "end"
    code = (
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        f"    open({str(end)!r}, 'w').close()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        f"open({str(beat)!r}, 'w').close()\n"
        "while True: time.sleep(0.01)\n"  # Python sees no signal that comes just before one long sleep
    )
    desk.begin("-c", code)
    until("that it runs", beat.exists)
    under = desk.park()
    assert not end.exists()
    order = End(
        lease=under.lease,
        epoch=under.epoch,
        number=99,
        parts=(desk.memory(),),
        reason=EndReason.OPERATOR,
        grace_ns=20 * 10**9,
    )
    desk.stage.office_line.order(order)
    desk.torn_down(under.lease)
    assert end.exists()
    assert [one["do"] for one in asked(log)] == ["suspend"]
