"""What a supervisor that died left: which hardware is nobody's until it is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sublet.node.processes.cgroups import Groups
from sublet.node.processes.cgroups_places import CgroupFiles, CgroupPlace
from sublet.node.processes.group import ControlGroup
from sublet.node.processes.guest_records import GuestNote, GuestRecords
from sublet.node.processes.procs import ProcessInstance, Procs, Table
from sublet.node.processes.tree import LEASE_MARK, OFFICE_MARK
from sublet.node.supervisor.recovery import Predecessor, Sweep
from sublet.values import GIB, Epoch, Exclusivity, GuestId, Kind, LeaseId, ResourceId, TenantId
from sublet.wire.guests import Profile
from sublet.wire.orders import Device, Part
from tests.traces import until

# Of this process alone: another one of the suite that runs these tests ends what has its own mark.
OFFICE = f"t-predecessor-{os.getpid()}"
A, B = LeaseId("lease-a"), LeaseId("lease-b")
DEVICES = (
    Device(id=ResourceId("n/gpu0"), kind=Kind.GPU, capacity=16 * GIB),
    Device(id=ResourceId("n/gpu1"), kind=Kind.GPU, capacity=8 * GIB),
    Device(id=ResourceId("n/cpu"), kind=Kind.CPU, capacity=4),
)
ONE = Part(resource=DEVICES[0].id, kind=Kind.GPU, amount=GIB, millis=1000, exclusivity=Exclusivity.SESSION)


class Kernel(Procs):
    """The real table of processes, and signals that end nobody until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.obeys = False
        self.looks = 0
        self.sent: list[tuple[int, int]] = []

    def table(self) -> Table:
        self.looks += 1
        return super().table()

    def send(self, identity: ProcessInstance, number: int) -> bool:
        self.sent.append((identity.pid, number))
        return super().send(identity, number) if self.obeys else False


class HeldClock:
    """Time passes with each look."""

    domain = "test"
    ns = 0

    def now_ns(self) -> int:
        self.ns += 300_000_000
        return self.ns

    def wall_ns(self) -> int:
        return self.ns


@pytest.fixture
def left() -> Iterator[int]:
    """A process of lease ``A``, marked as every guest is from its first instruction on."""
    with orphan(**{OFFICE_MARK: OFFICE, LEASE_MARK: A}) as pid:
        yield pid


@contextlib.contextmanager
def orphan(**env: str) -> Iterator[int]:
    """A process with this environment. Its parent is not ours: what descends from us is spared."""
    started = subprocess.run(
        ["/bin/sh", "-c", "exec setsid /bin/sleep 1000 >/dev/null 2>&1 & echo $!"],
        env=env,
        capture_output=True,
        check=True,
    )
    pid = int(started.stdout)
    # While a process becomes another program, its environment cannot be read; it has its new name a little earlier.
    proc = Path(f"/proc/{pid}")
    until(
        "an orphan that sleeps",
        lambda: (proc / "comm").read_text() == "sleep\n" and all(one in (proc / "environ").read_text() for one in env),
    )
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    stat = Procs().stat(pid)
    return stat is None or stat.is_gone


def note(pid: int, epoch: Epoch, guest: str = "g-1", part: Part = ONE) -> GuestNote:
    stat = Procs().stat(pid)
    assert stat is not None
    return GuestNote(
        guest=GuestId(guest),
        lease=A,
        epoch=epoch,
        tenant=TenantId("local"),
        profile=Profile.LOCAL,
        parts=(part,),
        pid=pid,
        start_ticks=stat.identity.start_ticks,
        group="",
    )


def successor(place: Path, kernel: Procs, *notes: GuestNote, groups: Groups | None = None) -> Predecessor:
    found = GuestRecords(str(place / "notes"))
    for one in notes:
        found.write(one)
    (place / "leases").mkdir(exist_ok=True)
    return Predecessor(
        procs=kernel,
        groups=groups or Groups.none(OFFICE),
        notes=found,
        leases=str(place / "leases"),
        clock=HeldClock(),
    )


def test_what_is_left_without_a_note_has_all_of_every_device_until_it_is_gone(tmp_path: Path, left: int) -> None:
    """Nobody knows which hardware it has. Its supervisor was killed between the fork and the note."""
    kernel = Kernel()
    predecessor = successor(tmp_path, kernel)
    found = {leftover.part.resource: leftover for leftover in predecessor.leftovers(DEVICES)}
    assert found.keys() == {device.id for device in DEVICES}
    for device in DEVICES:
        part = found[device.id].part
        assert (part.amount, part.exclusivity, found[device.id].lease) == (device.capacity, Exclusivity.DEVICE, A)
    assert predecessor.remaining(A)
    assert not predecessor.remaining(B)
    kernel.obeys = True
    until("nothing left", lambda: not predecessor.remaining(A))
    assert is_gone(left)


def test_what_has_a_note_has_what_the_note_says_under_its_newest_epoch(tmp_path: Path, left: int) -> None:
    """And nothing else: other devices are free at once."""
    other = Part(resource=DEVICES[2].id, kind=Kind.CPU, amount=1)
    notes = [note(left, Epoch(1, 5)), note(left, Epoch(1, 7), "g-2"), note(left, Epoch(1, 6), "g-3", other)]
    found = successor(tmp_path, Kernel(), *notes).leftovers(DEVICES)
    assert sorted((one.part.resource, one.epoch.n) for one in found) == [("n/cpu", 6), ("n/gpu0", 7)]
    assert (tmp_path / "notes" / "g-1.note").exists(), "until it is gone the next supervisor must know of it too"


def test_a_process_that_only_its_note_tells_of_is_found_and_ended(tmp_path: Path) -> None:
    """It cleared its environment, and there are no groups: its number and start are in the note."""
    with orphan() as pid:
        kernel = Kernel()
        predecessor = successor(tmp_path, kernel, note(pid, Epoch(1, 5)))
        assert predecessor.remaining(A)
        kernel.obeys = True
        until("nothing left", lambda: not predecessor.remaining(A))
        assert is_gone(pid)


def test_the_terminal_in_which_a_guest_runs_is_left_alone(tmp_path: Path) -> None:
    """Its session is led by a process of the user, and others in it are the user's as well."""
    program = (
        f"{OFFICE_MARK}={OFFICE} {LEASE_MARK}={A} /bin/sleep 1000 >/dev/null 2>&1 & echo $!; "
        "/bin/sleep 1000 >/dev/null 2>&1 & echo $!; exec >/dev/null 2>&1; wait"
    )
    # Its parent is not ours: what descends from us is spared.
    shell = f"exec setsid /bin/sh -c '{program}' &"
    started = subprocess.run(["/bin/sh", "-c", shell], env={}, capture_output=True, check=True)
    guest, beside = map(int, started.stdout.split())
    try:
        until("a marked guest", lambda: OFFICE in Path(f"/proc/{guest}/environ").read_text())
        kernel = Kernel()
        predecessor = successor(tmp_path, kernel)
        kernel.obeys = True
        until("nothing left", lambda: not predecessor.remaining(A))
        assert is_gone(guest)
        assert not is_gone(beside)
    finally:
        for pid in (guest, beside):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_since_when_a_card_has_guests_is_known_by_the_first_of_them(tmp_path: Path, left: int) -> None:
    """What drew on it before is none of theirs."""
    card = Part(resource=ResourceId("n/GPU-1"), kind=Kind.GPU, amount=GIB)
    first = note(left, Epoch(1, 5), part=card)
    second = replace(note(left, Epoch(1, 5), "g-2", card), start_ticks=first.start_ticks + 5)
    found = successor(tmp_path, Kernel(), first, second, note(left, Epoch(1, 5), "g-3")).cards_since()
    assert found == {"GPU-1": first.start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")}


def test_what_could_be_ended_is_in_nobodys_way(tmp_path: Path, left: int) -> None:
    """Without a note there is nothing to verify; with one it is verified, as it was said to be there."""
    kernel = Kernel()
    kernel.obeys = True
    folder = tmp_path / "leases" / f"{A}.1.5"
    folder.mkdir(parents=True)
    predecessor = successor(tmp_path, kernel, note(left, Epoch(1, 5)))
    until("nothing left", lambda: not predecessor.remaining(A))  # a process that was killed may be slow to end
    assert is_gone(left)
    assert [one.part.resource for one in predecessor.leftovers(DEVICES)] == [ONE.resource]
    assert not (tmp_path / "notes" / "g-1.note").exists()


def test_a_file_that_is_no_note_is_removed(tmp_path: Path, left: int) -> None:
    """Of a note that was being written the guest never ran; a damaged one tells nothing. Neither is read again."""
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "g-2.note~").write_bytes(b"half of")
    (notes / "g-3.note").write_bytes(b"not a note")
    successor(tmp_path, Kernel(), note(left, Epoch(1, 5)))
    assert [path.name for path in notes.iterdir()] == ["g-1.note"]


class Slow(CgroupFiles):
    """Groups that do not go at once, as where a process has just left them; or that cannot be looked at."""

    def __init__(self, times: int = 0) -> None:
        self.times = times
        self.is_short = False

    def remove(self, folder: str) -> None:
        if self.times:
            self.times -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if os.path.isdir(folder):
            for name in os.listdir(folder):
                if os.path.isfile(os.path.join(folder, name)):  # the kernel's own files are in nobody's way
                    os.unlink(os.path.join(folder, name))
        super().remove(folder)

    def folders(self, folder: str, *, sure: bool = False) -> list[str]:
        if self.is_short and sure:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().folders(folder, sure=sure)


def groups_of_dead(place: Path, files: CgroupFiles) -> Groups:
    """Of a lease and a guest of which nothing else is there."""
    (place / f"sublet-{OFFICE}" / A / "g-1").mkdir(parents=True)
    return Groups(OFFICE, (CgroupPlace(True, str(place), frozenset(), str(place)),), files)


@pytest.mark.parametrize("is_noted", [True, False], ids=["noted", "not noted"])
def test_what_only_a_group_tells_of_has_what_its_note_says_and_without_one_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noted: bool
) -> None:
    """The name of a group does not say whose it is. Nothing becomes free before the group is empty, either way."""
    kernel = Kernel()
    monkeypatch.setattr(ControlGroup, "kill", lambda *_: None)  # it does not obey this one either
    with orphan() as left:
        group = f"sublet-{OFFICE}/5e1d/0a7c"
        folder = tmp_path / "cg" / group
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(f"{left}\n")
        groups = Groups(OFFICE, (CgroupPlace(True, str(tmp_path / "cg"), frozenset(), str(tmp_path / "cg")),), Slow())
        first = replace(note(left, Epoch(1, 5)), start_ticks=1, group=group)  # another process, which is gone
        predecessor = successor(tmp_path, kernel, *([first] if is_noted else []), groups=groups)
        found = predecessor.leftovers(DEVICES)
        assert [one.part for one in found if one.part == ONE] == ([ONE] if is_noted else [])
        assert {one.part.resource for one in found} == {ONE.resource if is_noted else device.id for device in DEVICES}
        (lease,) = {one.lease for one in found}
        assert lease == (A if is_noted else "5e1d")
        assert str(left) in predecessor.remaining(lease)
        kernel.obeys = True
        until("nothing left", lambda: not predecessor.remaining(lease))
        assert is_gone(left)
    assert not os.path.exists(tmp_path / "notes" / "g-1.note")


def test_a_group_that_does_not_go_at_once_goes_later_though_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are gone, and its lease is forgotten: no question of an office would have it tried again. What was
    put into it meanwhile is ended. No process is looked for any more: the number of a session may be a stranger's."""
    (tmp_path / "leases").mkdir()
    files, acts, kernel = Slow(10**6), list[Callable[[], object]](), Kernel()
    groups = groups_of_dead(tmp_path / "cg", files)
    killed: list[str] = []
    monkeypatch.setattr(ControlGroup, "kill", lambda group: killed.append(os.path.basename(group.name)))
    Predecessor(
        procs=kernel,
        groups=groups,
        notes=GuestRecords(str(tmp_path / "notes")),
        leases=str(tmp_path / "leases"),
        clock=HeldClock(),
        later=acts.append,
    )
    (act,) = acts
    assert "g-1" in killed
    killed.clear()
    kernel.looks = 0
    with pytest.raises(OSError, match="left"):  # so it is called again
        act()
    assert (killed, kernel.looks) == (["g-1"], 0)
    files.times = 0
    act()
    assert list((tmp_path / "cg" / f"sublet-{OFFICE}").iterdir()) == []


def test_groups_that_cannot_be_looked_for_are_not_taken_for_gone(tmp_path: Path) -> None:
    """A supervisor that starts while descriptors are short ends with the error, and the next one looks again."""
    (tmp_path / "leases").mkdir()
    files = Slow()
    groups = groups_of_dead(tmp_path / "cg", files)
    files.is_short = True
    with pytest.raises(OSError, match="Too many open files"):
        Predecessor(
            procs=Procs(),
            groups=groups,
            notes=GuestRecords(str(tmp_path / "notes")),
            leases=str(tmp_path / "leases"),
            clock=HeldClock(),
        )


def test_what_is_left_is_stopped_before_it_is_killed(tmp_path: Path) -> None:
    """Else it could start others while it is looked at, one after another."""
    kernel = Kernel()
    with orphan(**{OFFICE_MARK: OFFICE, LEASE_MARK: A}) as one, orphan(**{OFFICE_MARK: OFFICE, LEASE_MARK: B}) as two:
        assert not Sweep(kernel, groups_of_dead(tmp_path, Slow())).again()
        assert sorted(kernel.sent[:2]) == sorted((pid, signal.SIGSTOP) for pid in (one, two))
        assert sorted(kernel.sent[2:]) == sorted((pid, signal.SIGKILL) for pid in (one, two))


def test_the_office_and_what_it_has_started_are_spared_though_a_guest_started_them(tmp_path: Path) -> None:
    """They have the marks of that guest in their environment."""
    marks = {OFFICE_MARK: OFFICE, LEASE_MARK: A}
    start = ["/bin/sh", "-c", "/bin/sleep 1000 & echo $!; exec /bin/sleep 1000"]
    office = subprocess.Popen(start, env=marks, stdout=subprocess.PIPE, text=True)
    assert office.stdout is not None
    child = int(office.stdout.readline())
    try:
        with orphan(**marks) as left:
            sweep = Sweep(Kernel(), groups_of_dead(tmp_path, Slow()), me=os.getpid() + 1, spare={office.pid})
            sweep.again()
            assert {one.pid for one in sweep.found[A]} == {left}
    finally:
        os.kill(child, signal.SIGKILL)
        office.kill()
        office.communicate()


def test_an_office_that_a_guest_started_in_its_own_session_is_spared_and_the_guest_is_not(tmp_path: Path) -> None:
    """As by a user who starts the office anew from a terminal within a guest: else it would end itself."""
    program = "/bin/sleep 1000 >/dev/null 2>&1 & echo $$ $!; exec /bin/sleep 1000 >/dev/null 2>&1"
    marks = {OFFICE_MARK: OFFICE, LEASE_MARK: A}
    shell = f"exec setsid /bin/sh -c '{program}' &"
    started = subprocess.run(["/bin/sh", "-c", shell], env=marks, capture_output=True, check=True)
    guest, office = map(int, started.stdout.split())
    try:
        until("both asleep", lambda: {Path(f"/proc/{pid}/comm").read_text() for pid in (guest, office)} == {"sleep\n"})
        assert os.getsid(office) == guest
        sweep = Sweep(Kernel(), groups_of_dead(tmp_path, Slow()), spare={office})
        sweep.again()
        assert {one.pid for one in sweep.found[A]} == {guest}
    finally:
        for pid in (guest, office):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
