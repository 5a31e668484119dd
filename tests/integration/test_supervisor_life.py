"""A supervisor that dies, is started anew, is left alone: what runs, what goes, what is not given to others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet.errors import (
    CapacityExceeded,
    InvalidRequest,
    NotFound,
    StaleEpoch,
    SubletError,
    Unauthorized,
)
from sublet.lease_end import EndReason
from sublet.node.processes.cgroups_places import CgroupFiles
from sublet.values import (
    Epoch,
    Exclusivity,
    GuestId,
    Kind,
    LeaseId,
    ResourceId,
    TenantId,
)
from sublet.wire.codec import dumps
from sublet.wire.guests import (
    Attach,
    Attached,
    EndGuest,
    Guests,
    GuestSpec,
    HolderCall,
    ListGuests,
    NotStarted,
    Quit,
    Resize,
    SignalGuest,
    Start,
)
from sublet.wire.link import CALLS_MAX
from sublet.wire.orders import End, Failed, Grant, Held, Part, TornDown, Verify
from tests.integration.supervisor_stage import (
    PATH,
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
    stage.holder(A, E5).start("sh", "-c", STUBBORN)

    def asleep() -> int:
        return sum(stage.procs.text(one.pid, "cmdline") == "sleep\x001000\x00" for one in stage.marked(A))

    until("three processes, and none to come", lambda: asleep() == 3)
    frozen = [one.pid for one in stage.marked(A)]
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
        assert any(f"process {pid} " in failed.detail for pid in frozen)  # one of the three is named
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
    until("no residue", lambda: not stage.residue())


# ---- what a holder may ----


def test_what_is_anothers_looks_as_if_it_were_not_there(stage: SupervisorStage) -> None:
    """The same words for a guest of another tenant and for none, whatever is asked; an operator sees both."""
    grant(stage, A, E5)
    guest = stage.holder(A, E5).start("sleep", "1000").guest
    stranger = stage.office_line.admit(None, None, tenant=TenantId("ben"))
    calls: list[Callable[[GuestId], HolderCall]] = [
        lambda one: Attach(guest=one),
        lambda one: EndGuest(guest=one),
        lambda one: SignalGuest(guest=one, number=9),
        lambda one: Resize(guest=one, rows=1, cols=1),
    ]
    for call in calls:
        said = []
        for one in (guest, GuestId("g-0000000000")):
            with pytest.raises(NotFound) as refused:
                stranger.ask(call(one))
            said.append(refused.value.message.replace(one, "ID"))
        assert said[0] == said[1]
    assert stranger.ask(ListGuests(guest=guest)) == Guests(guests=())
    operator = stage.office_line.admit(None, None, tenant=TenantId("ben"), operator=True)
    listed = operator.ask(ListGuests())
    assert isinstance(listed, Guests)
    assert [one.id for one in listed.guests] == [guest]
    stranger.close()
    operator.close()


def test_rights_that_a_token_does_not_give_are_not_had(stage: SupervisorStage) -> None:
    grant(stage, A, E5)
    guest = stage.holder(A, E5).start("sleep", "1000").guest
    reader = stage.office_line.admit(A, E5, operations=("logs",))
    with pytest.raises(Unauthorized, match="may not run"):
        reader.start("true")
    with pytest.raises(Unauthorized):
        reader.ask(SignalGuest(guest=guest, number=9))
    assert isinstance(reader.ask(Attach(guest=guest)), Attached)
    nobody = stage.office_line.admit(None, None)
    with pytest.raises(InvalidRequest, match="not of a lease"):
        nobody.start("true")
    with pytest.raises(InvalidRequest, match="no signal"):
        nobody.ask(SignalGuest(guest=guest, number=4000))
    for line in (reader, nobody):
        line.close()


def test_an_older_epoch_is_cut_off_and_starts_nothing(stage: SupervisorStage) -> None:
    """Its guests go on under the new one."""
    grant(stage, A, E5)
    old = stage.holder(A, E5)
    guest = old.start("sleep", "1000")
    grant(stage, A, E6)
    with pytest.raises(SubletError):
        old.start("true")
    until("an end", lambda: old.is_over or not old.talk.wait(0.1))
    late = stage.office_line.admit(A, E5)
    with pytest.raises(StaleEpoch):
        late.start("true")
    late.close()
    stage.holder(A, E6).start("true")
    assert guest.pid in [one.pid for one in stage.marked(A)]


def test_a_holder_that_goes_away_or_asks_nonsense_harms_nobody(stage: SupervisorStage) -> None:
    """Whatever one connection does, the supervisor, its guests and other connections go on."""
    grant(stage, A, E5)
    guest = stage.holder(A, E5).start("sleep", "1000")
    for _ in range(20):
        gone = stage.office_line.admit(A, E5)
        gone.talk.link.call(dumps(Start(spec=GuestSpec(argv=("true",), cwd="/", env={"PATH": PATH}))))
        gone.talk.pump()
        gone.sock.close()  # before the answer
    rude = stage.office_line.admit(A, E5)
    with pytest.raises(InvalidRequest):
        rude.talk.call(b"nonsense")
    with open(os.devnull) as null:
        rude.talk.link.event(b"?", [os.dup(null.fileno())])
        rude.talk.link.open_channel()
    rude.sock.send(bytes(1000))
    until("a cut", lambda: rude.talk.wait(0.1) is not None and rude.is_over)
    greedy = stage.office_line.admit(A, E5)
    for _ in range(CALLS_MAX):
        greedy.talk.link.call(dumps(ListGuests()))
    with pytest.raises(CapacityExceeded):
        greedy.talk.link.call(dumps(ListGuests()))
    greedy.talk.pump()
    greedy.sock.close()
    rude.close()
    until("an end of all but one", lambda: [one.pid for one in stage.marked()] == [guest.pid])
    fds = len(os.listdir(f"/proc/{stage.pid}/fd"))
    for _ in range(5):
        stage.office_line.admit(A, E5).close()
    stage.office_line.ask(ListGuests())
    until("closed descriptors", lambda: len(os.listdir(f"/proc/{stage.pid}/fd")) <= fds)
    assert "Traceback" not in stage.log


def test_a_guest_that_awaits_its_holder_goes_on_when_that_has_gone(stage: SupervisorStage, tmp_path: Path) -> None:
    """It waits in the middle of what it says, until the holder that has not come to read hangs up."""
    grant(stage, A, E5)
    holder, out = stage.holder(A, E5), tmp_path / "out"
    script = f"echo begun > {out}; head -c 1000000 /dev/zero; echo said > {out}"
    spec = GuestSpec(argv=("sh", "-c", script), cwd="/", env={"PATH": PATH})
    holder.ask(Start(spec=spec, awaits=True))
    until("a beginning", lambda: out.exists() and out.read_text())
    assert out.read_text() == "begun\n"
    holder.close()
    until("its last word", lambda: out.read_text() == "said\n")


def test_a_command_that_cannot_run_says_so_and_leaves_nothing(stage: SupervisorStage) -> None:
    grant(stage, A, E5)
    for argv, cwd, code in ((("no-such",), "/", 127), (("/etc/hostname",), "/", 126), (("true",), "/nowhere", 126)):
        reply = stage.holder(A, E5).ask(Start(spec=GuestSpec(argv=argv, cwd=cwd, env={"PATH": PATH})))
        assert isinstance(reply, NotStarted)
        assert (reply.exit_code, bool(reply.do)) == (code, True), reply
    end(stage, A, E5)
    heard(stage, TornDown)
    until("no residue", lambda: not stage.residue())


# ---- many at once ----


def test_of_a_crowd_that_ends_in_one_message_each_is_seen_to_be_gone(stage: SupervisorStage) -> None:
    """More than are told in one turn. What is granted behind them does not wait for them."""
    memory = Part(resource=ResourceId("bench/memory"), kind=Kind.MEMORY, amount=1 << 20)
    crowd = [(LeaseId(f"lease-{n}"), Epoch(1, 10 + n)) for n in range(20)]
    for lease, epoch in crowd:
        ttl_ns, parts = 300 * S, (memory,)
        order = Grant(
            lease=lease, epoch=epoch, number=1, tenant=TENANT, parts=parts, deadline_ns=now_ns() + ttl_ns, ttl_ns=ttl_ns
        )
        stage.office_line.order(order)
        stage.holder(lease, epoch).start("sleep", "1000")
    ends = [
        End(lease=lease, epoch=epoch, number=9, parts=(memory,), reason=EndReason.RELEASED, grace_ns=60 * S)
        for lease, epoch in crowd
    ]
    stage.office_line.send(*ends)
    grant(stage, B, Epoch(1, 99))
    heard(stage, TornDown, len(crowd))
    said = [report for report in stage.office_line.reports if isinstance(report, Held) and report.lease == B]
    assert len(said) == 1
    assert {report.lease for report in stage.office_line.reports if isinstance(report, TornDown)} == dict(crowd).keys()
    until("no process", lambda: not stage.marked())


# ---- groups that nobody is in any more ----

NEVER = "from sublet.node.processes import trash; trash.WAIT_S = 1e6"
"""What nobody waits for is not removed."""


def test_one_that_is_killed_between_a_report_and_the_removal_leaves_names_and_no_lease(tmp_path: Path) -> None:
    """Of a lease that was seen to be gone there are groups, a folder and a note. They stand in nobody's way."""
    with supervisor_at(tmp_path, faults=NEVER) as stage:
        grant(stage, A, E5)
        stage.holder(A, E5).start("sleep", "1000")
        end(stage, A, E5)
        heard(stage, TornDown)
        left = stage.residue()
        stage.kill()
        assert stage.residue() == left
        stage.faults = ""
        stage.start()
        office = stage.connect()
        assert office.configured.live == ()
        assert stage.lease_groups() == []
        grant(stage, B, E6)
        heard(stage, Held)
        stage.holder(B, E6).start("sleep", "1000")
        end(stage, B, E6)
        heard(stage, TornDown)
        assert not any(isinstance(report, Failed) for report in stage.office_line.reports)
        until("no residue", lambda: not stage.residue())


def test_a_lease_that_is_had_again_at_once_has_groups_of_its_own(tmp_path: Path) -> None:
    with supervisor_at(tmp_path, faults=NEVER) as stage:
        for epoch in (E5, E6, E7):
            grant(stage, A, epoch)
            stage.holder(A, epoch).start("sleep", "1000")
            end(stage, A, epoch)
            heard(stage, TornDown, epoch.n - 4)
        stage.office_line.ask(Quit(now=False))
        assert stage.process is not None
        stage.process.wait(30)
        until("no residue", lambda: not stage.residue())


@needs_freezer
def test_who_was_put_into_the_group_of_a_guest_is_seen_and_ended_before_anything_is_free(tmp_path: Path) -> None:
    """Nothing else tells of him: he has other parents, and carries no mark."""
    stranger = subprocess.Popen(["/bin/sleep", "1000"], env={})
    try:
        with supervisor_at(tmp_path, faults=NEVER) as stage:
            grant(stage, A, E5)
            stage.holder(A, E5).start("sleep", "1000")
            [lease] = [folder for folder in stage.lease_groups() if "/freezer/" in folder]
            [folder] = CgroupFiles().folders(lease)
            Path(folder, "cgroup.procs").write_text(str(stranger.pid))
            end(stage, A, E5)
            heard(stage, TornDown)
            assert stranger.wait(30) == -signal.SIGKILL
    finally:
        stranger.kill()
        stranger.wait(30)


# ---- its end ----


@pytest.mark.parametrize("now", [False, True])
def test_a_supervisor_that_is_told_to_quit_leaves_nothing(stage: SupervisorStage, now: bool) -> None:
    """At once, guests with it; or when the last lease is over."""
    grant(stage, A, E5)
    stage.holder(A, E5).start("sh", "-c", STUBBORN)
    until("three processes", lambda: len(stage.marked(A)) == 3)
    stage.office_line.ask(Quit(now=now))
    assert stage.process is not None
    if not now:
        assert stage.process.poll() is None
        end(stage, A, E5)
    stage.process.wait(30)
    until("no residue", lambda: not stage.residue())
    assert stage.groups() == []
    assert os.listdir(stage.runtime) == []


def test_an_office_that_takes_over_cuts_the_one_before(stage: SupervisorStage) -> None:
    grant(stage, A, E5)
    before = stage.office_line
    after = stage.connect()
    assert after.configured.live == (A,)
    assert not after.configured.is_new

    def is_cut() -> bool:
        before.wait(0.1)
        return before.error is not None

    until("a cut", is_cut)
    assert "another office" in str(before.error)
    before.close()


def test_a_supervisor_that_nobody_can_reach_any_more_ends(stage: SupervisorStage) -> None:
    """Its folder was removed, its office is gone, and nothing runs: there is nothing it could ever be told."""
    grant(stage, A, E5)
    stage.hang_up()
    shutil.rmtree(stage.runtime)
    assert stage.process is not None
    assert stage.process.wait(30) == 0, stage.log
    assert stage.groups() == []
